"""Measures weight synchronisation: bytes and seconds of one version of bf16 weights, for several shares of changed weights.

    python benches/python/weight_sync.py [--mib 256] [--rounds 3]

A changed weight moves by one unit in the last place, up or down, as after a small step of an optimizer. Compares snapshots that are read as
differences (`tensorcask.weights`) with whole safetensors files and with folders of slime's layout. Everything is in one folder, by default in
shared memory, so times are those of the work and not of a disk. Prints the median of the rounds as a table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tensorcask import slime
from tensorcask.weights import Publisher, Subscriber

State = dict[str, torch.Tensor]
SHARES = (0.001, 0.01, 0.05, 1.0)


def first(mib: int) -> State:
    generator = torch.Generator().manual_seed(0)
    rows = mib * (1 << 20) // (2 * 4096 * 16)
    return {f"layers.{at}.weight": (torch.randn(rows, 4096, generator=generator) * 0.02).bfloat16() for at in range(16)}


def changed(state: State, share: float, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in state.items():
        bits = tensor.view(torch.int16).clone()
        chosen = torch.rand(bits.shape, generator=generator) < share
        steps = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16) * 2 - 1
        found[name] = torch.where(chosen, bits + steps, bits).view(torch.bfloat16)
    return found


def seconds(work: Any) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(old: State, new: State, folder: Path) -> dict[str, float]:
    whole = folder / "whole.safetensors"
    found = {"whole write": seconds(lambda: safetensors.torch.save_file(new, whole))}
    found["whole read"] = seconds(lambda: {name: tensor.clone() for name, tensor in safetensors.torch.load_file(whole).items()})
    found["whole MB"] = whole.stat().st_size / 1e6
    store = folder / "store"
    publisher = Publisher(str(store))
    publisher.publish(old, 1)
    policy = Subscriber(str(store), {name: torch.zeros_like(tensor) for name, tensor in old.items()})
    policy.update()
    before = size_of(store)
    found["publish"] = seconds(lambda: publisher.publish(new, 2))
    found["MB"] = (size_of(store) - before) / 1e6
    found["update"] = seconds(policy.update)
    assert all(torch.equal(tensor, new[name]) for name, tensor in policy.named_tensors())
    slime.export_deltas(str(store), folder / "slime")
    found["slime MB"] = size_of(folder / "slime" / "weight_v000002") / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm")
    arguments = parser.parse_args()
    old = first(arguments.mib)
    print("| changed | whole: MB | write (s) | read (s) | difference: MB | publish (s) | update (s) | slime's folder: MB |")
    print("|---|---|---|---|---|---|---|---|")
    for share in SHARES:
        rounds = []
        for seed in range(arguments.rounds):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                rounds.append(measure(old, changed(old, share, seed), Path(folder)))
        row = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        cells = ("whole MB", "whole write", "whole read", "MB", "publish", "update", "slime MB")
        print(f"| {share:.1%} | " + " | ".join(f"{row[name]:.1f}" if name.endswith("MB") else f"{row[name]:.2f}" for name in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
