"""Measures what a delta costs: CPU time of `tensorcask save` for a base and for a delta, and the size of the delta.

    python benches/python/delta_time.py A.safetensors B.safetensors [--only model.] [--mib 61] [--rounds 5]

A is the base, B the later step. Only tensors with two dimensions that both files hold count; their rows are repeated
until the state has about `--mib` MiB. The time is that of the command's process in user mode, so it includes reading the
base back and verifying each chunk. Prints seconds per GB of tensor bytes: the median and the range of the rounds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import tempfile
from typing import Any

import safetensors

TYPES = ("BF16", "F16", "F32")
Tensors = dict[str, dict[str, Any]]


def matrices(path: str, prefix: str) -> Tensors:
    found = safetensors.deserialize(pathlib.Path(path).read_bytes())
    return {name: one for name, one in found if name.startswith(prefix) and len(one["shape"]) == 2 and one["dtype"] in TYPES}


def write(tensors: Tensors, names: list[str], copies: int, path: pathlib.Path) -> None:
    """Writes a safetensors file in which the rows of each tensor are repeated."""
    header, at = {}, 0
    for name in names:
        rows, columns = tensors[name]["shape"]
        size = len(tensors[name]["data"]) * copies
        header[name] = {"dtype": tensors[name]["dtype"], "shape": [rows * copies, columns], "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            file.write(bytes(tensors[name]["data"]) * copies)


def save(program: str, store: pathlib.Path, step: int, path: pathlib.Path) -> tuple[float, dict[str, Any]]:
    """Saves a file and returns the CPU time in user mode and the command's result."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [program, "save", str(store), "--step", str(step), "--policy", "one_shot", "--json", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, json.loads(done.stdout)


def shown(seconds: list[float], gigabytes: float) -> str:
    least, middle, most = (value / gigabytes for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("later")
    parser.add_argument("--only", default="", help="prefix of the names of tensors that count")
    parser.add_argument("--mib", type=float, default=61)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", default="tensorcask")
    given = parser.parse_args()
    base, later = matrices(given.base, given.only), matrices(given.later, given.only)
    names = sorted(name for name in base if name in later and base[name]["shape"] == later[name]["shape"])
    if not names:
        parser.error("the files have no matrix in common")
    once = sum(len(later[name]["data"]) for name in names)
    copies = max(1, round(given.mib * 2**20 / once))
    times: dict[str, list[float]] = {"base": [], "delta": []}
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("base.safetensors", "later.safetensors")]
        for tensors, path in zip((base, later), files, strict=True):
            write(tensors, names, copies, path)
        for number in range(given.rounds):
            store = pathlib.Path(folder, f"store-{number}")
            for step, (label, path) in enumerate(zip(times, files, strict=True)):
                seconds, result = save(given.program, store, step, path)
                times[label].append(seconds)
    gigabytes = once * copies / 1e9
    print(f"{gigabytes * 1e3:.0f} MB, delta / original {result['stored_bytes'] / result['tensor_bytes']:.4f}; CPU seconds per GB: ", end="")
    print(f"base {shown(times['base'], gigabytes)}, delta {shown(times['delta'], gigabytes)}")


if __name__ == "__main__":
    main()
