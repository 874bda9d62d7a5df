"""Measures saves of trainings in which most weights are frozen.

    OMP_NUM_THREADS=1 python benches/python/frozen_parts.py [--steps 300] [--every 100]

Trains the GPT of `examples/train_gpt.py` on text, saves its whole state every `--every` steps with the default policy, loads each step and
compares every bit. Prints the stored bytes of the first save and of the later ones, divided by those of the state:

- LoRA: a bf16 model that stays as it is, f32 adapters of rank 8 beside each linear layer, AdamW over the adapters;
- only the last block trains: f32 weights, AdamW over the parameters of this block.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import tensorcask
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT, read_text  # noqa: E402

SIZES = SimpleNamespace(layers=6, width=256, heads=8, length=64, batch=4, rank=8)


class LoRA(nn.Module):
    """A frozen linear layer and the product of two small matrices beside it."""

    def __init__(self, frozen: nn.Linear, rank: int):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = (x.float() @ self.down.T @ self.up.T).to(x.dtype)
        return self.frozen(x) + added


def lora() -> nn.Module:
    model = GPT(SIZES.layers, SIZES.width, SIZES.heads, SIZES.length).bfloat16().requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRA(layer, SIZES.rank))
    return model


def last_block() -> nn.Module:
    model = GPT(SIZES.layers, SIZES.width, SIZES.heads, SIZES.length).requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    return model


def tensors(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in tensors(value)] if isinstance(state, dict) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100, help="steps from one save to the next [%(default)s]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = read_text(None)
    print("| state | parameters | trained | bytes of the state | first save | later saves |\n|---|---:|---:|---:|---:|---:|")
    for name, make in (("LoRA, bf16 model, f32 adapters", lora), ("f32 model, the last block trains", last_block)):
        torch.manual_seed(0)
        model = make()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        data = torch.Generator().manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            store = tensorcask.Store(folder)
            ratios, state_bytes = [], 0
            for step in range(1, arguments.steps + 1):
                starts = torch.randint(len(text) - SIZES.length - 1, (SIZES.batch,), generator=data)
                rows = torch.stack([text[start : start + SIZES.length + 1] for start in starts]).long()
                loss = F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % arguments.every == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    saved = store.save(state, step=step)
                    ratios.append(saved.stored_bytes / saved.tensor_bytes)
                    state_bytes = saved.tensor_bytes
                    assert all(map(torch.equal, tensors(state), tensors(store.load(step)))), (name, step)
        count = sum(parameter.numel() for parameter in model.parameters())
        later = ", ".join(f"{ratio:.4f}" for ratio in ratios[1:])
        print(f"| {name} | {count:,} | {sum(map(torch.numel, trained)):,} | {state_bytes:,} | {ratios[0]:.3f} | {later} |", flush=True)


if __name__ == "__main__":
    main()
