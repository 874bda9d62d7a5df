"""Measures the baseline of BitSnap's table 4: one linear 8-bit quantizer for each whole tensor.

    python benches/python/naive_8bit.py [FOLDER]

FOLDER holds step-1001.safetensors [tests/data]. For each moment of Adam, prints the mean relative error (MRE) and the
mean squared error (MSE). Then prints the error of Adam's update with both moments rounded, as `cargo bench --bench
precision` defines it. Numbers equal to zero are left out of the MRE.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Floats = NDArray[np.float64]


def rounded(values: Floats) -> Floats:
    """Returns the values after a linear quantizer with 256 levels from the least to the greatest."""
    low, high = values.min(), values.max()
    width = (high - low) or 1.0
    restored = np.rint((values - low) / width * 255) / 255 * width + low
    return restored.astype(np.float32).astype(np.float64)


def update(first: Floats, second: Floats) -> Floats:
    return first / (np.sqrt(np.maximum(second, 0)) + 1e-8)


def main() -> None:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2] / "tests/data")
    moments: dict[str, dict[str, Floats]] = {"exp_avg": {}, "exp_avg_sq": {}}
    with safe_open(folder / "step-1001.safetensors", framework="numpy") as file:
        for role, tensors in moments.items():
            prefix = f"optimizer.{role}."
            for name in sorted(name for name in file.keys() if name.startswith(prefix)):  # noqa: SIM118
                tensors[name.removeprefix(prefix)] = file.get_tensor(name).astype(np.float64).ravel()
    for role, tensors in moments.items():
        exact = np.concatenate(list(tensors.values()))
        error = np.concatenate([rounded(values) for values in tensors.values()]) - exact
        relative = np.abs(error[exact != 0] / exact[exact != 0])
        print(f"{role}: MRE {relative.mean():.3g}, MSE {np.square(error).mean():.3g}")
    for label, names in (
        ("all tensors", list(moments["exp_avg"])),
        ("without the embedding", [n for n in moments["exp_avg"] if "wte" not in n]),
    ):
        pairs = [(moments["exp_avg"][name], moments["exp_avg_sq"][name]) for name in names]
        exact = np.concatenate([update(first, second) for first, second in pairs])
        error = np.concatenate([update(rounded(first), rounded(second)) for first, second in pairs]) - exact
        print(f"update error, {label}: {np.linalg.norm(error) / np.linalg.norm(exact):.3g}")


if __name__ == "__main__":
    main()
