"""Saves two steps of a real training with tensorcask and its peers, then flips single bits of what they wrote.

    python benches/python/peers_on_disk.py [--data FOLDER] [--flips 20] [--only NAME]

The state is that of `tests/data`: bf16 model, f32 masters, both moments, steps 1000 and 1001. Prints the bytes of all files of the
first save, and of those that the second one adds, divided by the bytes of the state. Then flips one bit of the largest file of the
store at each of `--flips` places, evenly over the file, loads the step that wrote it and counts: an error, other numbers without an
error, or right numbers. A peer that is not installed is left out: orbax-checkpoint, moonclip.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
State = dict[str, torch.Tensor]


def with_torch(folder: Path, step: int, state: State | None) -> State | None:
    if state is None:
        return torch.load(folder / f"step-{step}.pt", weights_only=True)
    torch.save(state, folder / f"step-{step}.pt")
    return None


def with_safetensors(folder: Path, step: int, state: State | None) -> State | None:
    from safetensors.torch import save_file

    if state is None:
        return load_file(folder / f"step-{step}.safetensors")
    save_file(state, folder / f"step-{step}.safetensors")
    return None


def with_dcp(folder: Path, step: int, state: State | None) -> State | None:
    import torch.distributed.checkpoint as dcp

    if state is None:
        loaded = {name: torch.full_like(tensor, -1) for name, tensor in EMPTY.items()}
        dcp.load(loaded, checkpoint_id=folder / f"step-{step}")
        return loaded
    dcp.save(state, checkpoint_id=folder / f"step-{step}")
    return None


def with_orbax(folder: Path, step: int, state: State | None) -> State | None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    # Orbax takes arrays of JAX; the bits of a bf16 tensor travel as 16-bit integers.
    with ocp.StandardCheckpointer() as checkpointer:
        if state is None:
            loaded = checkpointer.restore(folder / f"step-{step}")
            return {name: torch.from_numpy(np.array(array)).long() for name, array in loaded.items()}
        checkpointer.save(folder / f"step-{step}", {name: jnp.asarray(bits(tensor).numpy()) for name, tensor in state.items()})
        return None


def with_moonclip(folder: Path, step: int, state: State | None) -> State | None:
    from moonclip import CheckpointManager

    # One manager per save, as after a restart of the job; all tensors are given as model weights, for which it makes deltas.
    manager = CheckpointManager(str(folder / "store"), async_save=False, world_size=1, rank=0)
    module = Holder({name: torch.zeros_like(tensor) for name, tensor in EMPTY.items()} if state is None else state)
    if state is None:
        found = next(snapshot for snapshot in manager.list_snapshots() if snapshot["step"] == step)
        manager.load(found["id"], model=module)
        return dict(module.state_dict())
    manager.save(step=step, model=module)
    manager.flush()
    return None


def with_tensorcask(folder: Path, step: int, state: State | None) -> State | None:
    import tensorcask

    store = tensorcask.Store(folder)
    if state is None:
        return store.load(step)
    store.save(state, step=step)
    return None


class Holder:
    """What a checkpoint library takes for a model: its state can be read and set."""

    def __init__(self, state: State):
        self.state = dict(state)

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State, strict: bool = True) -> None:
        self.state = {name: torch.as_tensor(tensor) for name, tensor in state.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


PEERS: list[tuple[str, str, Callable[[Path, int, State | None], State | None]]] = [
    ("torch.save", "torch", with_torch),
    ("safetensors", "safetensors", with_safetensors),
    ("DCP", "torch", with_dcp),
    ("Orbax, StandardCheckpointer", "orbax-checkpoint", with_orbax),
    ("Moonclip", "moonclip", with_moonclip),
    ("tensorcask", "tensorcask", with_tensorcask),
]
EMPTY: State = {}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def equal(loaded: State, state: State) -> bool:
    def same(name: str) -> bool:
        found = loaded[name]
        if found.dtype == torch.int64:
            return torch.equal(found.flatten(), bits(state[name]).flatten().long())
        return found.dtype == state[name].dtype and torch.equal(bits(found), bits(state[name]))

    return loaded.keys() == state.keys() and all(map(same, state))


def flipped(load: Callable[[Path, int, State | None], State | None], folder: Path, states: dict[int, State], flips: int) -> Counter[str]:
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    counted: Counter[str] = Counter()
    for number in range(flips):
        place = len(whole) * (2 * number + 1) // (2 * flips)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        outcomes = set()
        for step, state in states.items():
            try:
                outcomes.add("right" if equal(load(folder, step, None) or {}, state) else "wrong, without an error")
            except Exception:
                outcomes.add("error")
        # The step that does not use the file is right in any case.
        counted[next(outcome for outcome in ("wrong, without an error", "error", "right") if outcome in outcomes)] += 1
    path.write_bytes(whole)
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "tests" / "data")
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--only", default="", help="only rows whose name has this text")
    arguments = parser.parse_args()
    logging.disable()
    states = {step: load_file(arguments.data / f"step-{step}.safetensors") for step in (1000, 1001)}
    EMPTY.update(states[1000])
    state_bytes = sum(tensor.nbytes for tensor in EMPTY.values())
    print("| | first save | one step later | error | wrong, without an error | right |\n|---|---:|---:|---:|---:|---:|")
    for name, package, peer in PEERS:
        if arguments.only not in name:
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package != "tensorcask":
                print(f"{name} is not installed", file=sys.stderr)
                continue
            version = "of this clone"
        folder = Path(tempfile.mkdtemp())
        with contextlib.redirect_stdout(sys.stderr):
            sizes = []
            for step, state in states.items():
                before = size(folder)
                peer(folder, step, state)
                sizes.append(size(folder) - before)
            assert all(equal(peer(folder, step, None) or {}, state) for step, state in states.items()), name
            counted = flipped(peer, folder, states, arguments.flips)
        ratios = " | ".join(f"{bytes_ / state_bytes:.3f}" for bytes_ in sizes)
        print(
            f"| {name} {version} | {ratios} | {counted['error']} | {counted['wrong, without an error']} | {counted['right']} |", flush=True
        )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
