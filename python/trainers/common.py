"""What the training programs of this folder share: their arguments, losses, and the kill."""

import argparse
import hashlib
import json
import os
import signal
import sys

import tensorcask
import torch

EVERY, STEPS = 4, 14


class Run:
    """One start of a training, in one of its ranks."""

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--store", required=True, help="URL of the store")
        parser.add_argument("--work", required=True, help="a folder for files of the trainer")
        parser.add_argument("--out", required=True, help="a folder for the losses")
        parser.add_argument("--kill-at", type=int, help="step after which this process kills itself")
        parser.add_argument("--only-load", action="store_true", help="load the newest step, and end")
        self.arguments = parser.parse_args()
        self.store, self.work = self.arguments.store, self.arguments.work
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        torch.set_num_threads(1)
        restore = tensorcask.Engine.restore

        def noting(engine, *args, **options):
            found = restore(engine, *args, **options)
            self.write(resumed=found.step, source=found.source)
            return found

        tensorcask.Engine.restore = noting

    def write(self, **facts):
        with open(f"{self.arguments.out}/rank{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(facts) + "\n")

    def loss(self, step, value):
        """Notes a loss. The first rank kills itself here, so that no handler or finally clause runs."""
        self.write(step=step, loss=float(value).hex())
        if self.rank == 0 and step == self.arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def steps(self, done, tensors):
        """The steps to train. With --only-load, ends here with the tensors that were loaded."""
        if self.arguments.only_load:
            self.end(tensors())
        return range(done + 1, STEPS + 1)

    def end_arrays(self, arrays):
        """As `end`, with arrays of numpy."""
        self.end({name: torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) for name, array in arrays.items()})

    def end(self, tensors, **facts):
        """Notes a digest of each tensor of the trained state, and ends the process without waiting for threads of gloo."""
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            self.write(tensor=name, sha256=hashlib.sha256(data).hexdigest())
        self.write(ended=True, **facts)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def optimizer_tensors(optimizer):
    """Tensors of an optimizer's state, by name."""
    state = optimizer.state_dict()["state"]
    return {f"optimizer.{key}.{name}": value for key, values in state.items() for name, value in values.items() if torch.is_tensor(value)}
