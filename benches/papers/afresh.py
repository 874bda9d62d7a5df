"""Compares the sizes that two trainings by benches/data/make lead to: the same recipe, with sums in another order.

    OMP_NUM_THREADS=1 PYTHONPATH=benches/peers python benches/papers/afresh.py DATA OTHER

Prints sizes of the first, of the second, and how much they differ in percent. Both need steps up to 1010. Make the other one with
`ATEN_CPU_CAPABILITY=avx2 bash benches/data/make OTHER --only gpt --threads 1 --until 1010`, or on another machine.
"""

import sys

import bitsnap
import tensorcask
from candidates import ours
from data import Run
from safetensors.torch import load_file

PAIRS = ((1000, 1001), (1000, 1002), (1000, 1005), (1000, 1010), (900, 1000), (500, 600), (100, 200))
CLUSTERS = [f"{role}=cluster" for role in ("master", "exp_avg", "exp_avg_sq")]


def weights(run):
    """Bytes of the weights of each pair of steps, by method."""
    found = {}
    for base, new in PAIRS:
        tensors = run.tensors(new, base)
        sizes = {name: size for name, size in bitsnap.SIZES.items() if name != "byte mask"}
        sizes["`tc.planes`"] = lambda tensor: bitsnap.stored(ours(codec="tc.planes"), tensor)
        found |= {f"{base} to {new}, {name}": sum(size(tensor) for tensor in tensors) for name, size in sizes.items()}
    return found


def states(run, number):
    """Bytes of whole states: a base, and deltas after one and ten steps."""
    found = {}
    for name, words in {"lossless": "lossless", "near": "near", "compact": "compact", "clusters": CLUSTERS}.items():
        store = tensorcask.Store(f"memory://afresh-{number}-{name}")
        for step in (1000, 1001, 1010):
            saved = store.save(load_file(run.paths[step]), step=step, policy="one_shot", objective="smallest", precision=words)
            found[f"state of step {step}, {saved.kind}, {name}"] = saved.stored_bytes
    return found


def main():
    runs = [Run(folder) for folder in sys.argv[1:3]]
    first, second = (run.load(1000) for run in runs)
    equal = sum((words == second[param]).all() for param, words in first.items())
    print(f"{equal} of {len(first)} weight matrices of step 1000 are equal")
    one, other = (weights(run) | states(run, number) for number, run in enumerate(runs))
    differences = {name: 100 * (other[name] / size - 1) for name, size in one.items()}
    for name, difference in differences.items():
        print(f"{name}: {one[name]} {other[name]} {difference:+.2f} %")
    print(f"at most {max(map(abs, differences.values())):.2f} % apart")


if __name__ == "__main__":
    main()
