"""A training with everything that a run saves, in one process or in the ranks of a job. As a program: trains in one process.

    python run_training.py FOLDER [KILL_AT] [OPTIONS]
"""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import tensorcask
import torch
import torch.distributed as dist
from torch import nn

STEPS, EVERY = 10, 3


class Batches:
    """A stateful loader: batches in an order of its own, and the position in it."""

    def __init__(self, seed):
        self.data = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
        self.order = torch.Generator().manual_seed(seed)
        self.done = 0

    def next(self):
        self.done += 1
        return self.data[torch.randint(64, (4,), generator=self.order)]

    def state_dict(self):
        return {"order": self.order.get_state(), "done": self.done}

    def load_state_dict(self, state):
        self.order.set_state(state["order"])
        self.done = state["done"]


class Training:
    """``kind``: plain, ddp, fsdp2 or tp. ``alone``: the same training in one process."""

    def __init__(self, kind, alone=False):
        is_alone = alone or kind == "plain"
        rank, world = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.BatchNorm1d(16) if kind == "plain" else nn.Identity(), nn.Linear(16, 4))
        self.model = model = model if is_alone else _on_ranks(model, kind, world)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        # Its scale grows after two steps. It knows no shards.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=kind in ("plain", "ddp"))
        # Ranks of tensor parallelism read the same data.
        seed = 0 if kind == "tp" else rank
        self.loader = Batches(seed)
        for set_seed in (torch.manual_seed, np.random.seed, random.seed):
            set_seed(100 + seed)

    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "loader")}

    def step(self):
        batch = self.loader.next() * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        loss = (self.model(batch) - 1).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self):
        """The whole weights and moments, by name."""
        found = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        whole = {name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach() for name, value in found.items()}
        return {name.replace("module.", ""): hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in whole.items()}


def _on_ranks(model, kind, world):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if kind == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "4": RowwiseParallel()})
    return model


def train(kind, place, kill_at=None, **options):
    """Trains from the newest step to the end. Writes each loss before it goes on. After ``kill_at`` this process kills itself."""
    training = Training(kind)
    rank = 0 if kind == "plain" else dist.get_rank()
    with tensorcask.Run(f"{place}/store", **training.parts(), **options) as run, open(f"{place}/losses-{rank}", "a") as losses:
        for step in range(run.resume(), STEPS):
            loss = training.step()
            losses.write(json.dumps([step, loss.hex()]) + "\n")
            losses.flush()
            if step % EVERY == EVERY - 1:
                run.save(step, loss=loss)
            if step == kill_at:
                if kind != "plain":
                    # Each rank has its save.
                    dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
    Path(place, f"weights-{rank}").write_text(json.dumps(training.weights()))
    return training


def result(folder, rank=0):
    """Losses of all starts, in order, and the weights at the end."""
    losses = [json.loads(line) for line in Path(folder, f"losses-{rank}").read_text().splitlines()]
    return losses, json.loads(Path(folder, f"weights-{rank}").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    train("plain", sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))
