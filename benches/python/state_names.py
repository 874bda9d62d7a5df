"""Measures base and delta of one state under the names of several trainers.

    python benches/python/state_names.py [--data FOLDER]

Takes steps 1000 and 1001 of `tests/data` (or of a folder with files of the same names): bf16 model, f32 master, both moments. Gives
the tensors the names of each trainer, without those that it does not save, and saves both steps with the policy `consecutive`.
Loads and compares both. Prints the stored bytes divided by those of the state.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import tensorcask
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"model": "model.", "master": "optimizer.master.", "exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
# The parameters of `tests/data`, as an optimizer numbers them.
PARAMS = [f"h.2.{name}" for name in ("attn_proj.bias", "attn_proj.weight", "ln_1.bias", "ln_1.weight", "ln_2.bias", "ln_2.weight")]
# Names of a part of a parameter; None if the trainer does not save this part.
Names = Callable[[str, str], str | None]


def fsdp2(part: str, param: str) -> str | None:
    if part == "model":
        return None
    return f"model.{param}" if part == "master" else f"optim.state.{param}.{part}"


def plain_torch(part: str, param: str) -> str | None:
    """Names of `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`."""
    if part == "model":
        return None
    return f"model.{param}" if part == "master" else f"optimizer.state.{PARAMS.index(param)}.{part}"


def megatron(part: str, param: str) -> str | None:
    if part == "model":
        return f"model.{param}"
    return f"optimizer.state.{'param' if part == 'master' else part}.{param}"


def plain(part: str, param: str) -> str | None:
    return PARTS[part] + param


def below_app(part: str, param: str) -> str | None:
    return f"app.{PARTS[part]}{param}"


APP_ROLES = [f"app.{prefix}*={part}:*" for part, prefix in PARTS.items()]
ROWS: list[tuple[str, Names, list[str]]] = [
    ("the names of `tests/data`", plain, []),
    ("FSDP2, torchtitan, Accelerate: f32 `model`, no 16-bit copy", fsdp2, []),
    ("plain PyTorch, Transformers, Lightning: f32 `model`, moments with numbers", plain_torch, []),
    ("Megatron `fully_reshardable`: masters are `optimizer.state.param.*`", megatron, []),
    ("every name below `app.`, the key of PyTorch's DCP recipe", below_app, []),
    ("every name below `app.`, with `roles=`", below_app, APP_ROLES),
]


def state(folder: Path, step: int, names: Names) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in load_file(folder / f"step-{step}.safetensors").items():
        part = next(part for part, prefix in PARTS.items() if name.startswith(prefix))
        given = names(part, name.removeprefix(PARTS[part]))
        if given is not None:
            found[given] = tensor
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "tests" / "data")
    arguments = parser.parse_args()
    print("| state | base | one step later |\n|---|---:|---:|")
    for text, names, roles in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            store = tensorcask.Store(folder)
            ratios = []
            states = {step: state(arguments.data, step, names) for step in (1000, 1001)}
            for step, tensors in states.items():
                saved = store.save(tensors, step=step, policy="consecutive", roles=roles)
                ratios.append(saved.stored_bytes / saved.tensor_bytes)
            for step, tensors in states.items():
                loaded = store.load(step)
                assert all(torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in tensors.items()), (text, step)
            print(f"| {text} | {ratios[0]:.3f} | {ratios[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
