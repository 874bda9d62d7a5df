#!/usr/bin/env python3
"""Does a run go on as if nothing had happened, from a state whose tensors were rounded when it was saved?

    python examples/resume_loss.py --out runs/resume                              # all methods, some minutes on 2 cores
    python examples/resume_loss.py --stages 50 --steps 20 near exp_avg=kmeans:64  # profiles, rules

Trains the small GPT of train_gpt.py on text, and saves its state early, in the middle and late: with each profile, with each published
method, or with those that are named (a comma between the rules of one). From each save it goes on with the same data, and compares its losses
with those of the run that was never stopped. Beside them stand runs that differ in what nobody would call an error: the lowest bit of
each master flipped at random, other data from the save on, another initialisation. Writes resume.json, resume.md and, where matplotlib is
installed, resume.png. Needs torch.
"""

import argparse
import io
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tensorcask
import torch
from train_gpt import Training, add_sizes, read_text


def rules(setting, roles=("master", "exp_avg", "exp_avg_sq")):
    return [f"{role}={setting}" for role in roles]


MOMENTS = ("exp_avg", "exp_avg_sq")
METHODS = {
    "lossless": ["lossless"],
    "near": ["near"],
    "compact": ["compact"],
    "8-bit blocks, moments": rules("blockwise8", MOMENTS),
    "k-means 256, moments": rules("kmeans:256", MOMENTS),
    "k-means 256": rules("kmeans:256"),
    "k-means 16": rules("kmeans:16"),
    "BitSnap, moments": rules("cluster", MOMENTS),
    "BitSnap, normal, linear": rules("cluster:16:normal:linear"),
    "BitSnap, normal, dynamic": rules("cluster:16:normal:dynamic"),
    "BitSnap, sample, linear": rules("cluster:16:sample:linear"),
    "BitSnap, sample, dynamic": rules("cluster:16:sample:dynamic"),
}
# Runs that differ without any rounding.
BIT, DATA, START = "lowest bits of masters flipped", "other data", "other initialisation"


def training_of(arguments, seed):
    """A new run: weights by this seed, data by the seed of the arguments."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    training = Training(argparse.Namespace(**{**vars(arguments), "seed": seed}), read_text(arguments.text, arguments.least_text))
    training.data.manual_seed(arguments.seed)
    # As the head, the embedding of torch is far too large.
    with torch.no_grad():
        training.master["wte.weight"].mul_(0.02)
        training.model.wte.weight.copy_(training.master["wte.weight"])
    return training


def whole_run(arguments, seed, store):
    """Losses of a run that is never stopped; its state at each stage into a store, if there is one."""
    training = training_of(arguments, seed)
    losses = []
    for step in range(max(arguments.stages) + arguments.steps + 1):
        if step in arguments.stages and store:
            tensorcask.save(training.state(), store, step=step, policy="full")
        if step < max(arguments.stages) + arguments.steps:
            losses.append(training.one_step())
    return losses


def resumed_run(arguments, stage, name, precision, seed, store):
    """Losses from a stage on, out of a state that was saved so."""
    state = tensorcask.load(store, stage)
    rounded = f"memory://{os.getpid()}-{stage}-{name}-{seed}"
    saved = tensorcask.save(state, rounded, step=stage, policy="full", precision=precision)
    training = training_of(arguments, arguments.seed)
    training.restore(tensorcask.load(rounded))
    if name == BIT:
        generator = torch.Generator().manual_seed(seed)
        for master in training.master.values():
            master.view(torch.int32).bitwise_xor_(torch.randint(2, master.shape, generator=generator, dtype=torch.int32))
    if name == DATA:
        training.data.manual_seed(seed)
    by_role = {}
    for errors in tensorcask.Store(rounded).snapshot().rounding():
        by_role[errors.role] = max(by_role.get(errors.role, 0.0), errors.mean_relative)
    losses = [training.one_step() for _ in range(arguments.steps)]
    return {"losses": losses, "stored_bytes": saved.stored_bytes, "tensor_bytes": saved.tensor_bytes, "worst_mean_relative": by_role}


def compare(losses, whole):
    """Percent of the loss of the whole run: distance of a step, mean, of the first 20 and worst; and how much higher the mean loss is."""
    apart = [abs(a - b) / b for a, b in zip(losses, whole, strict=True)]
    return {
        "mean_abs": 100 * sum(apart) / len(apart),
        "first": 100 * sum(apart[:20]) / len(apart[:20]),
        "worst": 100 * max(apart),
        "of_means": 100 * (sum(losses) - sum(whole)) / sum(whole),
    }


def measure(arguments):
    """All runs, on as many processes as asked for."""
    others = range(arguments.seed + 1, arguments.seed + 1 + arguments.seeds)
    store = str(arguments.out / "whole")
    rows = []
    # Each process has threads of its own from the start.
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {seed: pool.submit(whole_run, arguments, seed, None) for seed in others}
        whole = pool.submit(whole_run, arguments, arguments.seed, store).result()
        cases = [(name, precision, arguments.seed) for name, precision in arguments.methods.items()]
        cases += [(BIT, ["lossless"], seed) for seed in others] + [(DATA, ["lossless"], seed) for seed in others]
        jobs = [(stage, name, pool.submit(resumed_run, arguments, stage, name, *case, store)) for stage in arguments.stages for name, *case in cases]
        for stage, name, job in jobs:
            row = {"stage": stage, "name": name, **job.result()}
            row |= compare(row["losses"], whole[stage : stage + arguments.steps])
            rows.append(row)
            print(f"from step {stage}: {name}: {row['mean_abs']:.4f} % apart, mean loss {row['of_means']:+.4f} %", flush=True)
            if name == "lossless" and row["mean_abs"]:
                sys.exit("a state that came back bit for bit does not go on bit for bit")
        for job in pending.values():
            losses = job.result()
            for stage in arguments.stages:
                window = losses[stage : stage + arguments.steps]
                rows.append({"stage": stage, "name": START, "losses": window, **compare(window, whole[stage : stage + arguments.steps])})
    return whole, rows


def named(rows, name, stage):
    return [row for row in rows if row["name"] == name and row["stage"] == stage]


def table(results):
    stages, rows = results["stages"], results["rows"]
    first = {row["name"]: row for row in rows if row["stage"] == stages[-1]}
    yield "| | stored / state | " + " | ".join(f"from step {stage}" for stage in stages) + " |"
    yield "|---|---:|" + "---:|" * len(stages)
    for name in dict.fromkeys(row["name"] for row in rows):
        size = f"{first[name]['stored_bytes'] / first[name]['tensor_bytes']:.3f}" if name in results["methods"] else ""
        cells = []
        for stage in stages:
            own = named(rows, name, stage)
            mean, soon = (sum(row[what] for row in own) / len(own) for what in ("mean_abs", "first"))
            of_means = [row["of_means"] for row in own]
            shown = f"{of_means[0]:+.3f}" if len(own) == 1 else f"±{max(map(abs, of_means)):.3f}"
            cells.append(f"{soon:.4f} / {mean:.3f} / {shown}")
        yield f"| {name} | {size} | " + " | ".join(cells) + " |"


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    stages, rows, steps = results["stages"], results["rows"], results["steps"]
    width = max(1, steps // 20)

    def smooth(row):
        whole = results["whole"][row["stage"] : row["stage"] + steps]
        apart = [100 * abs(a - b) / b for a, b in zip(row["losses"], whole, strict=True)]
        return [sum(apart[max(0, at - width + 1) : at + 1]) / len(apart[max(0, at - width + 1) : at + 1]) for at in range(steps)]

    names = [name for name in results["methods"] if name != "lossless"]
    others = [color for at, color in enumerate(pyplot.get_cmap("tab20").colors) if at not in (6, 7, 14, 15)]
    greys = {BIT: "#000000", START: "#999999"}
    figure, axes = pyplot.subplots(1, len(stages), figsize=(3.7 * len(stages), 4.2), sharey=True, squeeze=False, layout="constrained")
    for axis, stage in zip(axes[0], stages, strict=True):
        for name, color in greys.items():
            for at, row in enumerate(named(rows, name, stage)):
                axis.plot(smooth(row), color=color, linewidth=1.4, linestyle=":", label=name if at == 0 else None)
        for at, name in enumerate(names):
            color, line = ("#c1121f", 2.0) if name == "near" else (others[at % len(others)], 1.0)
            axis.plot(smooth(named(rows, name, stage)[0]), color=color, linewidth=line, label=name)
        axis.set_yscale("log")
        axis.set_title(f"from step {stage}", fontsize=9)
        axis.set_xlabel("steps after the resume", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(True, linewidth=0.3)
    axes[0][0].set_ylabel(f"|loss - uninterrupted|, % of it, mean of {width} steps", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help=f"which ones: a profile, rules with commas between, or of {', '.join(METHODS)} [all of these]")
    parser.add_argument("--out", type=Path, default=Path("runs/resume"), help="folder of the results, and of the store of the whole run [%(default)s]")
    parser.add_argument("--stages", type=int, nargs="+", default=[100, 1000, 3000], help="steps at which the state is saved %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="steps that are compared after each resume [%(default)s]")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind with other seeds [%(default)s]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, of one thread each [%(default)s]")
    parser.add_argument("--text", help="file to train on [the first text found that is long enough]")
    parser.add_argument("--least-text", type=int, default=1 << 20, help="bytes of text that are enough [%(default)s]")
    add_sizes(parser, layers=2, length=64, warmup=50, compute="f32")
    arguments = parser.parse_args()
    arguments.stages.sort()
    arguments.methods = {name: METHODS.get(name) or name.split(",") for name in arguments.methods or METHODS}
    for words in arguments.methods.values():
        try:
            tensorcask.save({}, "memory://words", step=0, precision=words)
        except tensorcask.InvalidArgumentError as error:
            parser.error(error.message)
    arguments.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()

    whole, rows = measure(arguments)
    told = ("layers", "width", "heads", "length", "batch", "lr", "warmup", "seed", "seeds", "compute", "stages", "steps", "methods")
    results = {name: getattr(arguments, name) for name in told}
    results |= {"text_bytes": len(read_text(arguments.text, arguments.least_text)), "whole": whole, "rows": rows}
    (arguments.out / "resume.json").write_text(json.dumps(results))
    lines = list(table(results))
    (arguments.out / "resume.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    try:
        plot(results, arguments.out / "resume.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    print(f"{sum(len(row['losses']) for row in rows) + len(whole):,} steps in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
