"""Measures saves and restores of a GPT that trains on a GPU: copies from the device, stall, time until durable, restore.

    python benches/gpu/measure.py [--layers N] [--width N] [--rounds N]

Training is that of `examples/train_gpt.py`: a bf16 model, f32 master weights and AdamW. Prints tables in Markdown. Needs
the package, PyTorch and a GPU; `bash benches/gpu/run` makes the whole page of results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensorcask.engine import stop_agent
from train_gpt import Training, add_sizes, read_text


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, torch.Tensor):
        yield state


def bytes_of(state: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state))


def seconds(work: Callable[[], Any]) -> float:
    """Returns the time that some work takes, with all work of the device that it has queued."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def spread(times: list[float], unit: float = 1e3) -> str:
    """Median, and in brackets the lowest and the highest."""
    low, middle, high = (value * unit for value in (min(times), statistics.median(times), max(times)))
    digits = 0 if middle >= 100 else 1
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


class Bench:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.training = Training(arguments, read_text(arguments.text))
        for _ in range(3):
            self.training.one_step()
        self.state_bytes = bytes_of(self.training.state())
        self.while_registering: list[float] = []

    @contextlib.contextmanager
    def engine(self, name: str, **options: Any) -> Iterator[tensorcask.Engine]:
        memory = tempfile.mkdtemp(dir="/dev/shm", prefix="tensorcask-")
        try:
            with tensorcask.Engine(self.folder / name, folder=memory, **options) as engine:
                yield engine
                engine.finish()
            stop_agent(memory)
        finally:
            shutil.rmtree(memory, ignore_errors=True)
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def row(self, name: str, times: list[float]) -> None:
        rate = self.state_bytes / statistics.median(times) / 1e9
        print(f"| {name} | {spread(times)} | {rate:.1f} |", flush=True)

    def repeat(self, work: Callable[[], Any]) -> list[float]:
        return [seconds(work) for _ in range(self.arguments.rounds)]

    def copies(self) -> None:
        """Copies of the whole state from the device into host memory."""
        print("| copy of the state to the host | ms | GB/s |\n|---|---:|---:|")
        sources = [tensor for tensor in tensors_of(self.training.state()) if tensor.is_cuda]
        for name, pinned in (("torch, into pageable memory", False), ("torch, into pinned memory", True)):
            targets = [torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in sources]

            def copy(targets: list[torch.Tensor] = targets) -> None:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)

            self.row(name, self.repeat(copy))
        del targets
        for name, registers in (("`Engine.save`", True), ("`Engine.save`, memory not registered", False)):
            with self.engine("copies", back_pressure="wait") as engine:
                if not registers:
                    engine._arena._rest_to_register = lambda mapping, device: None
                first = seconds(lambda: engine.save(self.training.state(), step=self.training.step))
                while (thread := engine._arena._thread) is not None and thread.is_alive():
                    self.while_registering.append(seconds(self.training.one_step))
                times = []
                for _ in range(self.arguments.rounds):
                    # The agent encodes meanwhile on a busy host; here only the copy counts.
                    assert engine.wait("durable", 600).reached
                    self.training.one_step()
                    times.append(seconds(lambda: engine.save(self.training.state(), step=self.training.step)))
                self.row(f"{name} (the first: {first * 1e3:.0f} ms)", times)

    def stall(self) -> None:
        """Time that saves cost a training: steps with and without a save, at an interval of `--every` steps."""
        every, count = self.arguments.every, self.arguments.rounds
        plain = [seconds(self.training.one_step) for _ in range(every * count)]
        step = statistics.median(plain)
        print(f"\nA training step takes {spread(plain)} ms; a save every {every} steps.")
        if self.while_registering:
            print(
                f"After the first save, memory is registered during {len(self.while_registering)} steps of {spread(self.while_registering)} ms."
            )
        print()
        print("| save | ms that a save holds the training up | steps between, ms | last save durable after, ms |\n|---|---:|---:|---:|")

        def measure(name: str, begin: Callable[[], Any], settle: Callable[[Any], None], finish: Callable[[Any], None]) -> None:
            stalls, between = [], []
            for _ in range(count):
                saving = None

                def step_with_save() -> None:
                    nonlocal saving
                    saving = begin()
                    self.training.gradients()
                    settle(saving)
                    self.training.update()

                stalls.append(seconds(step_with_save) - step)
                between += [seconds(self.training.one_step) for _ in range(every - 1)]
                last = saving
            begun = time.perf_counter()
            finish(last)
            rest = time.perf_counter() - begun
            print(f"| {name} | {spread(stalls)} | {spread(between)} | {rest * 1e3:.0f} |", flush=True)

        def nothing(_: Any) -> None:
            pass

        def durable(engine: tensorcask.Engine) -> Callable[[Any], None]:
            def wait(_: Any) -> None:
                assert engine.wait("durable", 600).reached

            return wait

        for name, asynchronous in (("`Engine.begin_save`, waited for before the update", True), ("`Engine.save`", False)):
            with self.engine("stall") as engine:
                # Both slots are in use and registered with CUDA, as later in a run.
                for _ in range(2):
                    engine.save(self.training.state(), step=self.training.step)
                    self.training.one_step()
                    assert engine.wait("durable", 600).reached
                engine._arena.is_registered()

                def begin(engine: tensorcask.Engine = engine) -> Any:
                    return engine.begin_save(self.training.state(), step=self.training.step)

                def save(engine: tensorcask.Engine = engine) -> Any:
                    return engine.save(self.training.state(), step=self.training.step)

                measure(name, begin if asynchronous else save, (lambda saving: saving.wait()) if asynchronous else nothing, durable(engine))
                self.stored = self.sizes()
        file = self.folder / "state.pt"
        measure("`torch.save` to a file", lambda: torch.save(self.training.state(), file), nothing, nothing)
        target = self.folder / "dcp"

        # DCP's saves must not overlap: the one before is waited for, as its documentation asks.
        pending: list[Any] = []

        def dcp_save(checkpoint: Path | None = None, **options: Any) -> Callable[[], Any]:
            def save() -> Any:
                last(None)
                name = checkpoint or f"step-{self.training.step}"
                pending.append(dcp.async_save(self.training.state(), checkpoint_id=str(name), **options))
                return pending[-1]

            return save

        def result(saving: Any) -> None:
            getattr(saving, "upload_completion", saving).result()

        def last(_: Any) -> None:
            while pending:
                result(pending.pop())

        measure("DCP `async_save`, files", dcp_save(target), nothing, last)
        try:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            options = StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True)
            stager = DefaultStager(options)

            def staged(saving: Any) -> None:
                saving.staging_completion.result()

            measure(
                "DCP `async_save`, files, staged in pinned memory beside the training", dcp_save(target, async_stager=stager), staged, last
            )
            stager.close()
        except Exception as error:
            print(f"| DCP with asynchronous staging | not run: {error} | | |")
        writer = tensorcask.Store(self.folder / "writer").writer()

        measure("DCP `async_save` with tensorcask's writer", dcp_save(storage_writer=writer), nothing, last)
        shutil.rmtree(self.folder / "writer", ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)

    def sizes(self) -> list[str]:
        """Kind and stored part of each snapshot of the last engine, oldest first."""
        known = tensorcask.Store(self.folder / "stall").snapshots()
        return [f"{info.kind} {info.stored_bytes / self.state_bytes:.3f}" for info in sorted(known, key=lambda info: info.step)]

    def restores(self) -> None:
        print("\n| restore to the device | ms | GB/s |\n|---|---:|---:|")
        with self.engine("restore") as engine:
            engine.save(self.training.state(), step=self.training.step)
            out = self.training.state()
            engine._arena.is_registered()
            self.row("`Engine.restore(out=)`, raw in memory", self.repeat(lambda: engine.restore(out=out)))
            engine._arena.forget()
            self.row("the same, memory not registered", self.repeat(lambda: engine.restore(out=out)))
            assert engine.wait("durable", 600).reached
            store = tensorcask.Store(self.folder / "restore")
            self.row('`Store.load(device="cuda")`, a base on a warm disk', self.repeat(lambda: store.load(device="cuda")))
            self.training.one_step()
            engine.save(self.training.state(), step=self.training.step)
            assert engine.wait("durable", 600).reached
            self.row('`Store.load(device="cuda")`, a base and a delta', self.repeat(lambda: store.load(device="cuda")))
        file = self.folder / "state.pt"
        torch.save(self.training.state(), file)
        self.row(
            '`torch.load(map_location="cuda")`, a warm disk', self.repeat(lambda: torch.load(file, map_location="cuda", weights_only=False))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="file to train on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=50, help="steps from one save to the next [%(default)s]")
    add_sizes(parser, layers=12, width=1024, heads=16, length=512, batch=16, device="cuda")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: not run")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks", 1), rank=0, world_size=1)
        bench = Bench(arguments, Path(folder))
        parameters = sum(parameter.numel() for parameter in bench.training.model.parameters())
        print(f"{parameters / 1e6:.0f} million parameters; state of {bench.state_bytes / 1e9:.2f} GB.\n")
        bench.copies()
        bench.stall()
        print(f"\nStored, of the state: {', '.join(bench.stored)}.")
        bench.restores()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
