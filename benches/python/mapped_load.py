"""Measures loads of a raw state from a warm local disk: tensorcask, mapped and not, against safetensors and torch.

    python benches/python/mapped_load.py [FOLDER] [--mib N] [--rounds N]

Saves one random state of bf16 weights and f32 moments in three formats. Each load runs in a process of its own, and the
formats take turns. Before the clock starts, the process has loaded a small state in the same way, and all files have
been read once. The sum reads every element of every tensor after the load. Prints a table: medians, with the range of
the rounds in parentheses.

The peak is the growth of resident memory, which counts pages of mapped files. Private memory is what the process holds
beside such pages, after load and sum. Only tensorcask compares checksums: its time includes reading every byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import tensorcask
import torch

State = dict[str, torch.Tensor]
MIB = 1 << 20

LOADS: dict[str, Callable[[Path], State]] = {
    "tensorcask.load": lambda folder: tensorcask.load(folder / "store"),
    "tensorcask.load(mmap=True)": lambda folder: tensorcask.load(folder / "store", mmap=True),
    "safetensors.torch.load_file": lambda folder: safetensors.torch.load_file(folder / "state.safetensors"),
    "torch.load": lambda folder: torch.load(folder / "state.pt"),
    "torch.load(mmap=True)": lambda folder: torch.load(folder / "state.pt", mmap=True),
}


def make(folder: Path, mib: float) -> int:
    """Saves a state of a size in all formats. Returns the number of bytes of its tensors."""
    generator = torch.Generator().manual_seed(0)
    columns = 2048
    # Ten bytes for each parameter, in eight layers.
    rows = max(1, int(mib * MIB / 10 / 8 / columns))
    state: State = {}
    for layer in range(8):
        random = partial(torch.randn, rows, columns, generator=generator)
        state[f"model.layers.{layer}.weight"] = random().bfloat16()
        state[f"exp_avg.layers.{layer}.weight"] = random() * 1e-3
        state[f"exp_avg_sq.layers.{layer}.weight"] = (random() * 1e-3).square()
    folder.mkdir()
    tensorcask.save(state, folder / "store", step=1, codecs="*=tc.raw", policy="full", base_cache="none")
    safetensors.torch.save_file(state, folder / "state.safetensors")
    torch.save(state, folder / "state.pt")
    return sum(tensor.nbytes for tensor in state.values())


def memory(field: str) -> int:
    """Returns a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def measure(folder: Path, name: str) -> dict[str, float]:
    """Loads and sums one state in this process. Returns seconds, bytes and the sum."""
    load = LOADS[name]
    sum_of(load(folder / "small"))
    Path("/proc/self/clear_refs").write_text("5")
    resident, private = memory("VmRSS"), memory("RssAnon")
    start = time.perf_counter()
    state = load(folder / "large")
    loaded = time.perf_counter()
    peak = memory("VmHWM") - resident
    before_sum = time.perf_counter()
    total = sum_of(state)
    summed = time.perf_counter()
    return {
        "load": loaded - start,
        "load and sum": loaded - start + summed - before_sum,
        "peak": peak,
        "peak with sum": memory("VmHWM") - resident,
        "private": memory("RssAnon") - private,
        "sum": total,
    }


def sum_of(state: State) -> float:
    return sum(float(tensor.sum(dtype=torch.float32)) for _, tensor in sorted(state.items()))


def spread(values: list[float], unit: float) -> str:
    low, middle, high = (value / unit for value in (min(values), statistics.median(values), max(values)))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def report(rounds: dict[str, list[dict[str, Any]]]) -> None:
    print("| load | ms | with sum, ms | peak, MiB | peak with sum, MiB | private, MiB |\n|---|---:|---:|---:|---:|---:|")
    units = {"load": 1e-3, "load and sum": 1e-3, "peak": MIB, "peak with sum": MIB, "private": MIB}
    for name, results in rounds.items():
        cells = [spread([result[key] for result in results], unit) for key, unit in units.items()]
        print("| " + " | ".join([f"`{name}`", *cells]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder on the disk to measure; a temporary folder if left out")
    parser.add_argument("--mib", type=float, default=512, help="size of the state in MiB [512]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds [5]")
    parser.add_argument("--measure", choices=list(LOADS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(Path(given.folder), given.measure)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        make(folder / "small", 1)
        size = make(folder / "large", given.mib)
        snapshot = tensorcask.Store(folder / "large" / "store").snapshot()
        assert all([part.reason for part in snapshot.parts(tensor)] == [None] for tensor in snapshot), "all tensors can be mapped"
        for path in folder.rglob("*"):
            if path.is_file():
                path.read_bytes()
        rounds: dict[str, list[dict[str, Any]]] = {load: [] for load in LOADS}
        for _ in range(given.rounds):
            for load, results in rounds.items():
                command = [sys.executable, __file__, str(folder), "--measure", load]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.append(json.loads(done.stdout))
        assert len({result["sum"] for results in rounds.values() for result in results}) == 1, "all formats hold the same state"
        print(f"{size / MIB:.0f} MiB of tensors, {given.rounds} rounds\n")
        report(rounds)


if __name__ == "__main__":
    main()
