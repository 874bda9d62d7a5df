"""Measures small states and states of many small tensors against `torch.save` and `torch.load`, in one process.

    python benches/python/small_and_many.py [FOLDER] [--rounds N] [--tensors N]

Prints a table. Each row is the median of the rounds, with the range of the rounds in parentheses: milliseconds, and
CPU-milliseconds (user and system, all threads). The rounds of tensorcask and torch alternate on the same disk.
`torch.save` is followed by fsync of the file and of its folder, because a save of tensorcask is durable too.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tensorcask
import torch


class Times:
    """Wall and CPU time of the rounds of one action, in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def run(self, action: Callable[[], Any]) -> Any:
        """Runs an action and notes its times."""
        cpu, wall = _cpu(), time.perf_counter()
        result = action()
        self.wall.append((time.perf_counter() - wall) * 1e3)
        self.cpu.append((_cpu() - cpu) * 1e3)
        return result

    def row(self, peer: Times | None = None) -> str:
        """Returns a row of the table; with a peer, the ratio of both medians."""
        ratio = "" if peer is None else f"{statistics.median(self.wall) / statistics.median(peer.wall):.2f}"
        return f"| {self.name} | {_spread(self.wall)} | {_spread(self.cpu)} | {ratio} |"


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _spread(values: list[float]) -> str:
    digits = 2 if statistics.median(values) < 100 else 0
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def torch_save(state: Any, path: Path) -> None:
    """Saves a state with torch so that it survives a power cut."""
    torch.save(state, path)
    for name in (path, path.parent):
        opened = os.open(name, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


def requests_of_a_small_read(folder: Path) -> int:
    """Counts the requests of a new process that reads 13 elements of a store with two commits."""
    url = str(folder / "requests")
    store = tensorcask.Store(url)
    table = torch.arange(40000, dtype=torch.float32).reshape(200, 200)
    for step in (1, 2):
        store.save({"table": table + step}, step=step)
    fresh = tensorcask.Store(url)
    loaded = fresh.snapshot().load(slices={"table": (slice(7, 8), slice(20, 33))}, framework="torch")["table"]
    assert torch.equal(loaded, table[7:8, 20:33] + 2)
    return int(fresh.native().io()[0])


def small(folder: Path, rounds: int) -> tuple[list[Times], int]:
    """Saves and loads ten tensors of 1 KiB. Every save has other values, as in training."""
    state = {f"layer.{number}": torch.randn(256) for number in range(10)}
    store = tensorcask.Store(str(folder / "small"))
    names = (
        "save 10 x 1 KiB: tensorcask",
        "save: torch.save, fsync",
        "load: tensorcask, open store",
        "load: tensorcask, new store",
        "load: torch.load",
    )
    times = [Times(name) for name in names]
    (folder / "torch").mkdir()
    for step in range(rounds + 3):
        for tensor in state.values():
            tensor.add_(torch.randn(256), alpha=1e-3)
        if step == 3:
            # The first saves and loads open the store, start threads and import modules.
            times = [Times(name) for name in names]
        path = folder / "torch" / f"{step}.pt"
        times[0].run(partial(store.save, state, step=step))
        times[1].run(partial(torch_save, state, path))
        loaded = times[2].run(store.load)
        fresh = times[3].run(lambda: tensorcask.Store(store.url).load())
        times[4].run(partial(torch.load, path))
        assert all(torch.equal(state[name], loaded[name]) and torch.equal(state[name], fresh[name]) for name in state)
    hundred = tensorcask.Store(str(folder / "hundred"))
    for step in range(100):
        state["layer.0"].add_(1.0)
        hundred.save(state, step=step)
    files = sum(len(found) for _, _, found in os.walk(folder / "hundred"))
    return times, files


def many(folder: Path, rounds: int, count: int) -> list[Times]:
    """Saves and loads many tensors of 1 to 64 elements. Each save goes to a new store or file."""
    state = {f"layers.{number // 8}.block.{number % 8}.weight": torch.randn(1 + number * 7 % 64) for number in range(count)}
    label = f"{count:,} tensors"
    names = (f"save {label}: tensorcask", "save: torch.save, fsync", f"load {label}: tensorcask", "load: torch.load")
    times = [Times(name) for name in names]
    for number in range(rounds):
        url, path = str(folder / f"many{number}"), folder / f"many{number}.pt"
        times[0].run(partial(tensorcask.Store(url).save, state, step=1))
        times[1].run(partial(torch_save, state, path))
        loaded = times[2].run(tensorcask.Store(url).load)
        assert number > 0 or all(torch.equal(state[name], loaded[name]) for name in state)
        del loaded
        times[3].run(partial(torch.load, path))
        shutil.rmtree(url)
        path.unlink()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder on the disk to measure; a temporary folder if left out")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the many tensors [5]; small states get 20 times as many")
    parser.add_argument("--tensors", type=int, default=100_000, help="number of the many tensors; 0 leaves them out [100000]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        requests = requests_of_a_small_read(folder)
        times, files = small(folder, 20 * given.rounds)
        print("| action | ms | CPU ms | ratio to torch |\n|---|---|---|---|")
        print("\n".join([times[0].row(times[1]), times[1].row(), times[2].row(times[4]), times[3].row(times[4]), times[4].row()]), flush=True)
        if given.tensors:
            times = many(folder, given.rounds, given.tensors)
            print("\n".join([times[0].row(times[1]), times[1].row(), times[2].row(times[3]), times[3].row()]))
        print(f"\nrequests of a read of 13 elements, two commits: {requests}\nfiles after 100 saves of 10 x 1 KiB: {files}")


if __name__ == "__main__":
    main()
