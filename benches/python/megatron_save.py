#!/usr/bin/env python3
"""Time for which saves hold up a training loop of Megatron Core: its own formats, and tensorcask with and without the engine.

    OMP_NUM_THREADS=2 python benches/python/megatron_save.py [--layers 8] [--hidden 512] [--rounds 5] [--every 4] [--folder DIR]

Trains a GPT in f32 on the CPU, one rank of gloo, and saves after every few steps. Stall: seconds from the call until the next step may
begin, without the calls that finish asynchronous saves later. The next column is the time from the end of the last call until that save is
on disk. Needs megatron-core==0.16.1.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import tensorcask
import torch
import torch.distributed as dist

# Megatron Core expects CUDA, as in python/trainers/with_megatron.py.
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *device: None
torch.cuda.is_initialized = lambda: False

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, initialize_rng_tracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from tensorcask import megatron  # noqa: E402

VOCABULARY, LENGTH, BATCH = 8192, 128, 2


class Training:
    def __init__(self, layers, hidden):
        torch.manual_seed(1)
        config = TransformerConfig(
            num_layers=layers, hidden_size=hidden, num_attention_heads=8, use_cpu_initialization=True, bias_activation_fusion=False,
            pipeline_dtype=torch.float32, gradient_accumulation_fusion=False, masked_softmax_fusion=False, hidden_dropout=0.0,
            attention_dropout=0.0,
        )  # fmt: skip
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            position_embedding_type="learned_absolute",
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def one_step(self):
        generator = torch.Generator().manual_seed(self.step)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
        self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def plain(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "iteration": self.step}

    def sharded(self):
        """What Megatron-LM saves."""
        state = {"model": self.model.sharded_state_dict(), "optimizer": self.optimizer.state_dict(), "iteration": self.step}
        state["common_step"] = float(next(iter(state["optimizer"]["state"].values()))["step"])
        known = get_param_id_to_sharded_param_map(state["model"], self.model.parameters())
        optim_state_to_sharding_state(state["optimizer"], known, exclude_keys=("step",))
        return state

    def bytes(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *moments])


def spread(times):
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


def measure(name, training, arguments, save, each_step, finish, size):
    """Prints a row: one save to warm up, then `--rounds` saves."""
    stalls = []
    for number in range(arguments.rounds + 1):
        for _ in range(arguments.every):
            training.one_step()
            each_step()
        begun = time.perf_counter()
        save()
        if number:
            stalls.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    finish()
    print(f"| {name} | {spread(stalls)} | {time.perf_counter() - begun:.2f} | {size():.3f} |", flush=True)


def bytes_below(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=4, help="steps from one save to the next [%(default)s]")
    parser.add_argument("--folder", help="folder for the checkpoints [that of temporary files]")
    arguments = parser.parse_args()
    initialize_rng_tracker()
    CudaRNGStatesTracker.fork = lambda tracker, *name: contextlib.nullcontext()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks", 1), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        training = Training(arguments.layers, arguments.hidden)
        training.one_step()
        size = training.bytes()
        begun = time.perf_counter()
        for _ in range(5):
            training.one_step()
        step = (time.perf_counter() - begun) / 5
        print(f"state of {size / 1e6:.0f} MB; a step takes {step:.2f} s; a save every {arguments.every} steps\n")
        print("| save | stall, s | last save on disk after, s | stored / state |\n|---|---:|---:|---:|")

        def new(kind):
            path = Path(folder, kind, f"iter_{training.step:07}")
            path.mkdir(parents=True)
            return str(path)

        def nothing():
            pass

        def last(kind):
            return lambda: bytes_below(max(Path(folder, kind).glob("iter_*"))) / size

        def store_size():
            return statistics.median(one.stored_bytes for one in tensorcask.Store(f"{folder}/cask/tensorcask").snapshots()) / size

        def old():
            with open(f"{new('old')}/state.pt", "wb") as file:
                torch.save(training.plain(), file)
                file.flush()
                os.fsync(file.fileno())

        measure("`torch.save` and fsync, as Megatron-LM did", training, arguments, old, nothing, nothing, last("old"))
        measure(
            "Megatron's `torch_dist`",
            training,
            arguments,
            lambda: dist_checkpointing.save(training.sharded(), new("own")),
            nothing,
            nothing,
            last("own"),
        )
        calls = AsyncCallsQueue()
        measure(
            "Megatron's `torch_dist`, asynchronous",
            training,
            arguments,
            lambda: calls.schedule_async_request(dist_checkpointing.save(training.sharded(), new("async"), async_sharded_save=True)),
            lambda: calls.maybe_finalize_async_calls(),
            lambda: calls.maybe_finalize_async_calls(blocking=True),
            last("async"),
        )
        for kind in ("old", "own", "async"):
            shutil.rmtree(Path(folder, kind))
        measure(
            "tensorcask",
            training,
            arguments,
            lambda: megatron.save(training.sharded(), f"{folder}/cask/iter_{training.step:07}"),
            nothing,
            nothing,
            store_size,
        )
        shutil.rmtree(Path(folder, "cask"))
        with tensorcask.Engine(f"{folder}/cask/tensorcask", folder=memory, rank=0, world=1) as engine:
            measure(
                "tensorcask through the engine",
                training,
                arguments,
                lambda: calls.schedule_async_request(megatron.save(training.sharded(), f"{folder}/cask/iter_{training.step:07}", engine=engine)),
                lambda: calls.maybe_finalize_async_calls(),
                lambda: (calls.maybe_finalize_async_calls(blocking=True), engine.finish()),
                store_size,
            )
        tensorcask.engine.stop_agent(memory)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
