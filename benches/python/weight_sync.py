"""Measures weight synchronisation: bytes and CPU seconds of one version of bf16 weights, for several learning rates.

    python benches/python/weight_sync.py [--mib 256 | --data FILE] [--rounds 5]

The weights are f32 numbers of a normal distribution (standard deviation 0.02), rounded to bf16. A version adds to each an update of about the
learning rate, as Adam does, and rounds again: few weights change, nearly all of them by one unit in the last place. A share in percent instead
of a rate: so many weights at random places change, whatever their size. `--data` takes the f32 masters of a real training and Adam's step
with their real moments instead: FILE is a safetensors file with `optimizer.master.*`, `optimizer.exp_avg.*` and `optimizer.exp_avg_sq.*`.

Compares snapshots that are read as differences (`tensorcask.weights`) with whole safetensors files; with deltas in slime's layout, XOR and
overwritten bytes, which are made and applied by `tensorcask.slime`; with snapshots of Moonclip, if it is installed; and with indices and
values in numpy: as they are (vLLM, verl), and gaps between indices, and values, each by zstd -3. CPU seconds are those of this process,
all threads, with zeroed buffers at hand; each way ends with the same weights in memory. Everything is in one folder, by default in shared memory. Prints a table: medians, and the range of CPU seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
import zstandard
from tensorcask import slime
from tensorcask._frameworks import RawTensor
from tensorcask.weights import Publisher, Subscriber

State = dict[str, torch.Tensor]
RATES = (1e-7, 3e-7, 1e-6, 2e-6, 5e-6)
SHARES = (0.001, 0.01)


def first(mib: int) -> State:
    """Weights before they are rounded."""
    generator = torch.Generator().manual_seed(0)
    rows = mib * (1 << 20) // (2 * 4096 * 16)
    return {f"layers.{at}.weight": torch.randn(rows, 4096, generator=generator) * 0.02 for at in range(16)}


def updated(masters: State, rate: float, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: (tensor + rate * torch.randn(tensor.shape, generator=generator)).bfloat16() for name, tensor in masters.items()}


def stepped(state: State, rate: float, _seed: int) -> State:
    def moved(name: str) -> torch.Tensor:
        first, second = (state[f"optimizer.{moment}.{name}"] for moment in ("exp_avg", "exp_avg_sq"))
        return (state[f"optimizer.master.{name}"] - rate * first / (second.sqrt() + 1e-8)).bfloat16()

    return {name: moved(name) for name in named_masters(state)}


def named_masters(state: State) -> State:
    prefix = "optimizer.master."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def changed(masters: State, share: float, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in masters.items():
        bits = tensor.bfloat16().view(torch.int16)
        chosen = torch.rand(bits.shape, generator=generator) < share
        steps = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16) * 2 - 1
        found[name] = torch.where(chosen, bits + steps, bits).view(torch.bfloat16)
    return found


def cpu_seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def raw(state: State) -> dict[str, RawTensor]:
    return {name: RawTensor("bf16", tuple(tensor.shape), bytearray(tensor.view(torch.uint8).numpy())) for name, tensor in state.items()}


def whole(old: State, new: State, folder: Path) -> tuple[float, float, float]:
    path, held = folder / "whole.safetensors", {name: tensor.clone() for name, tensor in old.items()}

    def read() -> None:
        for name, tensor in safetensors.torch.load_file(path).items():
            held[name].copy_(tensor)

    written = cpu_seconds(lambda: safetensors.torch.save_file(new, path))
    return path.stat().st_size, written, cpu_seconds(read)


def ours(old: State, new: State, folder: Path) -> tuple[float, float, float]:
    publisher = Publisher(str(folder))
    publisher.publish(old, 1)
    policy = Subscriber(str(folder), {name: torch.zeros_like(tensor) for name, tensor in old.items()})
    policy.update()
    before = size_of(folder)
    written = cpu_seconds(lambda: publisher.publish(new, 2))
    size = size_of(folder) - before
    read = cpu_seconds(policy.update)
    # As bits, because a moved zero is NaN.
    assert all(torch.equal(tensor.view(torch.int16), new[name].view(torch.int16)) for name, tensor in policy.named_tensors())
    return size, written, read


def moonclip(old: State, new: State, folder: Path) -> tuple[float, float, float]:
    from moonclip import MoonclipManager

    # The same manager writes both versions and keeps the first in memory. A reader starts afresh, and so reads the base, too.
    manager = MoonclipManager(str(folder), async_save=False)
    manager.save_tensors(1, old)
    manager.flush()
    before = size_of(folder)

    def write() -> None:
        manager.save_tensors(2, new)
        manager.flush()

    written = cpu_seconds(write)
    size = size_of(folder) - before
    reader = MoonclipManager(str(folder), async_save=False)
    found: dict[str, bytearray] = {}
    read = cpu_seconds(lambda: found.update(reader.load(reader.list_snapshots()[-1]["id"])))
    assert all(found[name] == tensor.view(torch.uint8).numpy().tobytes() for name, tensor in new.items())
    return size, written, read


def slimes(encoding: str, old: State, new: State, folder: Path) -> tuple[float, float, float]:
    before, after, held = raw(old), raw(new), raw(old)
    files: dict[str, str] = {}
    path = folder / "model-00000-of-00001.safetensors"

    def write() -> None:
        content, sums = slime._differences(before, after, encoding, "xxh3-128", 2)
        safetensors.numpy.save_file(content, path, metadata=sums)
        files.update(dict.fromkeys(content, path.name))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    written = cpu_seconds(write)
    version = slime._Version(folder, 2, 2, 1, encoding, "xxh3-128", files)
    read = cpu_seconds(lambda: slime._apply(version, held))
    assert all(held[name].data == tensor.data for name, tensor in after.items())
    return size_of(folder), written, read


def listed(level: int | None, old: State, new: State, folder: Path) -> tuple[float, float, float]:
    path, held = folder / "listed", {name: tensor.view(torch.int16).numpy().ravel().copy() for name, tensor in old.items()}
    after = {name: tensor.view(torch.int16).numpy().ravel() for name, tensor in new.items()}
    parts: list[tuple[str, int, int]] = []

    def write() -> None:
        coder = zstandard.ZstdCompressor(level or 3)
        with path.open("wb") as file:
            for name, tensor in after.items():
                places = np.flatnonzero(held[name] != tensor).astype(np.int32)
                numbers = places if level is None else np.diff(places, prepend=np.int32(0))
                columns = [column.tobytes() if level is None else coder.compress(column) for column in (numbers, tensor[places])]
                parts.append((name, *map(file.write, columns)))

    def read() -> None:
        decoder = zstandard.ZstdDecompressor()
        with path.open("rb") as file:
            for name, places, values in parts:
                columns = [file.read(places), file.read(values)]
                if level is not None:
                    columns = [decoder.decompress(column) for column in columns]
                numbers = np.frombuffer(columns[0], np.int32)
                held[name][numbers if level is None else np.cumsum(numbers)] = np.frombuffer(columns[1], np.int16)

    written = cpu_seconds(write)
    read_in = cpu_seconds(read)
    assert all(np.array_equal(held[name], tensor) for name, tensor in after.items())
    return path.stat().st_size, written, read_in


WAYS = {
    "whole safetensors": whole,
    "slime, XOR": partial(slimes, "xor"),
    "slime, overwrite": partial(slimes, "overwrite"),
    "indices, values": partial(listed, None),
    "gaps, values, zstd -3": partial(listed, 3),
    "tensorcask": ours,
}
if importlib.util.find_spec("moonclip"):
    WAYS["Moonclip"] = moonclip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--data")
    arguments = parser.parse_args()
    real = safetensors.torch.load_file(arguments.data) if arguments.data else None
    masters = named_masters(real) if real else first(arguments.mib)
    old = {name: tensor.bfloat16() for name, tensor in masters.items()}
    cases = [(f"rate {rate:.0e}", partial(stepped, real, rate) if real else partial(updated, masters, rate)) for rate in RATES]
    cases += [(f"{share:.1%}", partial(changed, masters, share)) for share in SHARES]
    print("| version | changed | | MB | write, CPU s | read, CPU s |\n|---|---:|---|---:|---:|---:|")
    for case, make in cases:
        rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
        share = 0.0
        for seed in range(1, arguments.rounds + 1):
            new = make(seed)
            share = statistics.fmean((new[name].view(torch.int16) != old[name].view(torch.int16)).double().mean().item() for name in old)
            for name, way in WAYS.items():
                with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                    rounds[name].append(way(old, new, Path(folder)))
        for name, measured in rounds.items():
            sizes, *times = zip(*measured, strict=True)
            cells = [f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in times]
            print(f"| {case} | {share:.2%} | {name} | {statistics.median(sizes) / 1e6:.3f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
