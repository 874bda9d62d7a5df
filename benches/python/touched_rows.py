"""Measures saves of a recommender with and without `tensorcask.torch.TouchedRows`, which records the rows that change.

    python benches/python/touched_rows.py [FOLDER] [--items 1048576] [--interval 10] [--saves 7] [--policy consecutive] [--engine]

One training of `Recommender` (`benches/data/models.py`): SparseAdam on the table, SGD with momentum on the rest, items drawn
by Zipf's law. At each save, the same state goes to four stores, which take turns in going first. Bytes, CPU-seconds (user and
system, all threads) and seconds are those of deltas: the median, with the range in parentheses. Every store is loaded and
compared at the end.

Then the cost of the hook for each step of training, with sparse gradients (SparseAdam) and dense ones (Adagrad). Blocks of
steps with and without the hook alternate.

`--engine` measures saves through the engine instead. The same training runs once for each case, with an agent of its own. The
CPU-seconds are those of the agent (user and system, all threads), from the save until its snapshot is durable. The memory is
what the agent has for itself after the last save, without shared memory (`RssAnon`): its base, or the hashes of rows.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tensorcask
import torch
from tensorcask.engine import agent_status, stop_agent
from tensorcask.torch import TouchedRows
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "data"))
from models import Recommender

BATCH, HISTORY, CANDIDATES = 512, 8, 16
# Name, base_cache, and whether rows are recorded.
CASES = [("compared", "memory", False), ("recorded", "memory", True), ("compared", "none", False), ("recorded", "none", True)]
# Name, keep_base_decoded, and whether rows are recorded.
ENGINE_CASES = [("compared", True, False), ("recorded", True, True), ("compared", False, False), ("recorded", False, True)]


class Training:
    """A recommender, its optimizers, and steps that depend on their number alone."""

    def __init__(self, items: int, sparse: bool) -> None:
        torch.manual_seed(1)
        self.items = items
        self.model = Recommender(items)
        self.model.table.sparse = sparse
        table = self.model.table.parameters()
        self.table = torch.optim.SparseAdam(table, lr=0.01) if sparse else torch.optim.Adagrad(table, lr=0.01)
        rest = [weight for name, weight in self.model.named_parameters() if not name.startswith("table")]
        self.rest = torch.optim.SGD(rest, lr=0.01, momentum=0.9)

    def step(self, number: int) -> None:
        """Trains on a batch of users."""
        chance = torch.rand(BATCH, HISTORY + CANDIDATES, generator=torch.Generator().manual_seed(number))
        # Zipf's law: the chance of an item falls with its rank.
        items = ((self.items + 1.0) ** chance - 1).long().clamp(max=self.items - 1)
        scores = self.model(items[:, :HISTORY], items[:, HISTORY:])
        F.cross_entropy(scores, torch.zeros(BATCH, dtype=torch.long)).backward()
        for optimizer in (self.table, self.rest):
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """What a program saves."""
        return {"model": self.model.state_dict(), "table": self.table.state_dict(), "rest": self.rest.state_dict()}


def used(action: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns the result of an action, its CPU-seconds and its seconds."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = action()
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def spread(values: list[float], digits: int) -> str:
    """Returns the median, and the range in parentheses."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def compare(found: Any, expected: Any) -> None:
    """Refuses a state that is not the same bit for bit."""
    if isinstance(expected, torch.Tensor):
        if not torch.equal(found.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)):
            raise SystemExit("a loaded tensor differs from the saved one")
    elif isinstance(expected, dict):
        for key, value in expected.items():
            compare(found[key], value)
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            compare(one, other)


def measure_saves(folder: Path, args: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of the table of saves."""
    training = Training(args.items, True)
    tensor_bytes = 0
    stores = [tensorcask.Store(folder / f"{name}-{base_cache}") for name, base_cache, _ in CASES]
    results: list[list[tuple[Any, float, float]]] = [[] for _ in CASES]
    with TouchedRows(training.model, training.table) as touched:
        for number in range(args.saves + 1):
            before = training.model.table.weight.detach().clone()
            for step in range(args.interval):
                training.step(number * args.interval + step)
            changed = int((before != training.model.table.weight).any(1).sum())
            for turn in range(len(CASES)):
                case = (turn + number) % len(CASES)
                _, base_cache, is_recorded = CASES[case]
                options: dict[str, Any] = {"policy": args.policy, "base_cache": base_cache}
                options["changed_rows"] = touched if is_recorded else None
                saved = used(lambda: stores[case].save(training.state(), step=number, **options))  # noqa: B023
                tensor_bytes = saved[0].tensor_bytes
                if saved[0].kind == "delta":
                    results[case].append(saved)
    for store in stores:
        compare(store.load(), training.state())
    yield f"State: {tensor_bytes / 2**20:.0f} MiB. Rows that change between the last two saves: {changed} of {args.items}."
    yield ""
    yield "| rows | base kept in | delta, KiB | CPU-seconds | seconds | base in memory, MiB |"
    yield "|---|---|---:|---:|---:|---:|"
    for (name, base_cache, _), store, saves in zip(CASES, stores, results, strict=True):
        kept = store.with_writer(store._writer[0], lambda writer: writer.base_cache_bytes()) if store._writer else 0
        kib = spread([saved.stored_bytes / 1024 for saved, _, _ in saves], 0)
        times = [spread([save[at] for save in saves], 2) for at in (1, 2)]
        yield f"| {name} | `{base_cache}` | {kib} | {times[0]} | {times[1]} | {kept / 2**20:.0f} |"


def cpu_seconds(pid: int) -> float:
    """Returns the time that all threads of a process have used, user and system."""
    # The name of the program, in parentheses, may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_mib(pid: int) -> float:
    """Returns the memory that a process has for itself, without shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def measure_engine_case(url: Path, args: argparse.Namespace, keeps_base: bool, is_recorded: bool) -> tuple[list[float], list[float], float]:
    """Returns the KiB and the CPU-seconds of the agent for each delta, and the agent's own memory in MiB."""
    training, memory = Training(args.items, True), tempfile.mkdtemp(dir="/dev/shm")
    kib, seconds = [], []
    try:
        options: dict[str, Any] = {"policy": args.policy, "keep_base_decoded": keeps_base, "folder": memory}
        with TouchedRows(training.model, training.table) as touched, tensorcask.Engine(url, **options) as engine:
            pid = int(Path(memory, "agent.lock").read_text())
            for number in range(args.saves + 1):
                for step in range(args.interval):
                    training.step(number * args.interval + step)
                before = cpu_seconds(pid)
                engine.save(training.state(), step=number, changed_rows=touched if is_recorded else None)
                if not engine.wait("durable", 600).reached:
                    raise SystemExit(f"step {number} is not durable: {agent_status(memory)}")
                used_seconds = cpu_seconds(pid) - before
                (save,) = [save for save in agent_status(memory)["runs"][0]["saves"] if save["step"] == number]
                if save["kind"] == "delta":
                    kib.append(save["bytes_out"] / 1024)
                    seconds.append(used_seconds)
            own_mib = private_mib(pid)
        compare(tensorcask.load(url), training.state())
    finally:
        stop_agent(memory)
        shutil.rmtree(memory, ignore_errors=True)
    return kib, seconds, own_mib


def measure_engine(folder: Path, args: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of the table of saves through the engine."""
    yield "| rows | `keep_base_decoded` | delta, KiB | CPU-seconds of the agent | agent's own memory, MiB |"
    yield "|---|---|---:|---:|---:|"
    for name, keeps_base, is_recorded in ENGINE_CASES:
        kib, seconds, own_mib = measure_engine_case(folder / f"engine-{name}-{keeps_base}", args, keeps_base, is_recorded)
        yield f"| {name} | {keeps_base} | {spread(kib, 0)} | {spread(seconds, 2)} | {own_mib:.0f} |"


def measure_steps(args: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of the table of training steps."""
    yield "| gradient | step without the hook, CPU-ms | with the hook, CPU-ms |"
    yield "|---|---:|---:|"
    for sparse in (True, False):
        training = Training(args.items, sparse)
        training.step(0)
        times: dict[bool, list[float]] = {False: [], True: []}
        for block in range(args.blocks):
            for is_recorded in (False, True) if block % 2 else (True, False):
                with TouchedRows(training.model, training.table) if is_recorded else nullcontext():
                    _, cpu, _ = used(lambda: [training.step(1 + step) for step in range(args.block)])  # noqa: B023
                times[is_recorded].append(1e3 * cpu / args.block)
        yield f"| {'sparse' if sparse else 'dense'} | {spread(times[False], 1)} | {spread(times[True], 1)} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="Saves of a recommender with and without recorded rows.")
    parser.add_argument("folder", nargs="?", type=Path, help="folder for the stores; a temporary one without it")
    parser.add_argument("--items", type=int, default=1 << 20, help="rows of the table")
    parser.add_argument("--interval", type=int, default=10, help="steps between two saves")
    parser.add_argument("--saves", type=int, default=7, help="deltas to save")
    parser.add_argument("--policy", default="consecutive", help="policy of the saves")
    parser.add_argument("--engine", action="store_true", help="measure saves through the engine instead")
    parser.add_argument("--blocks", type=int, default=9, help="blocks of training steps, with and without the hook")
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, tensorcask {tensorcask.__version__}, policy {args.policy}, a save every {args.interval} steps\n")
    with tempfile.TemporaryDirectory() if args.folder is None else nullcontext(args.folder) as folder:
        for line in (measure_engine if args.engine else measure_saves)(Path(folder), args):
            print(line, flush=True)
    if args.engine:
        return
    print()
    print("\n".join(measure_steps(args)))


if __name__ == "__main__":
    main()
