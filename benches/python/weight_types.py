"""Measures how much of the weights changes in a step, and how deltas store it, for the same weights in bf16, f16 and f32.

    python benches/python/weight_types.py [--data FOLDER]

Takes the masters of steps 1000, 1001 and 1010 of `tests/data` (or of a folder with files of the same names), rounds them to each type and
saves them with the policy `one_shot`, with the default codecs and with `tc.planes` alone, the recipe of LMC. The packed mask is calculated
from the share of changed elements. Loads and compares.
"""

import argparse
import tempfile
from pathlib import Path

import tensorcask
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
MASTERS = "optimizer.master."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "tests" / "data")
    arguments = parser.parse_args()
    print("| weights | k | changed | packed mask | `tc.planes` | default codecs |\n|---|---:|---:|---:|---:|---:|")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        states = {}
        for step in (1000, 1001, 1010):
            state = load_file(arguments.data / f"step-{step}.safetensors")
            # Only matrices: vectors are too small to show anything.
            masters = {
                name.removeprefix(MASTERS): tensor for name, tensor in state.items() if name.startswith(MASTERS) and tensor.dim() == 2
            }
            states[step] = {f"model.{name}": tensor.to(dtype) for name, tensor in masters.items()}
        base = states[1000]
        for step in (1001, 1010):
            elements = sum(tensor.numel() for tensor in base.values())
            changed = sum(int((states[step][name] != tensor).sum()) for name, tensor in base.items()) / elements
            row = [1 / (8 * dtype.itemsize) + changed]
            for codecs in ([], ["*=tc.planes"]):
                with tempfile.TemporaryDirectory() as folder:
                    store = tensorcask.Store(folder)
                    store.save(base, step=1000, policy="one_shot", codecs=codecs)
                    saved = store.save(states[step], step=step, policy="one_shot", codecs=codecs)
                    assert all(map(torch.equal, store.load(step).values(), states[step].values()))
                    row.insert(1, saved.stored_bytes / saved.tensor_bytes)
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {step - 1000} | {changed:.1%} | " + " | ".join(f"{ratio:.3f}" for ratio in row) + " |", flush=True)


if __name__ == "__main__":
    main()
