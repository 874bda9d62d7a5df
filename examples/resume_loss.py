#!/usr/bin/env python3
"""Does a run go on as if nothing had happened, from a state whose tensors were rounded when it was saved?

    python examples/resume_loss.py --out runs/resume                              # all methods: some hours on 2 cores, minutes on a GPU
    python examples/resume_loss.py --stages 50 --steps 20 near exp_avg=kmeans:64  # profiles, rules

Trains the GPT of train_gpt.py on text, once with each seed, and saves its state at each stage: with each profile, with each published
method, or with those that are named (a comma between the rules of one). From each save it goes on with the same data, and compares its losses
with those of the run that was never stopped, and the losses of both at the end on text that no run trains on. Beside them stand runs that
differ in what nobody would call an error: the lowest bit of each master flipped at random, other data from the save on, another
initialisation. Each run is kept in a file: a program that was interrupted goes on after the last one. Writes resume.json, resume.md and, where
matplotlib is installed, resume.png. Needs torch.
"""

import argparse
import functools
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A setting without which matrix products on a GPU are not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import tensorcask
import torch
from torch.nn import functional as F
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
# Steps after a resume whose distance is shown by itself, and batches of the held-out loss.
FIRST, HELD_OUT_BATCHES = 20, 16


def mean(values):
    return sum(values) / len(values)


def kept(arguments, name, make):
    """The result of a run, from its file if it was made before."""
    path = arguments.out / "runs" / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.json"
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(make()))
        part.replace(path)
    return json.loads(path.read_text())


@functools.cache
def texts(path, least):
    """The text of the training, and the last twentieth, which no run trains on."""
    text = read_text(path, least)
    end = len(text) - len(text) // 20
    return text[:end], text[end:]


def training_of(arguments, seed):
    """A new run: weights by this seed, data by the seed of the arguments."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    training = Training(argparse.Namespace(**{**vars(arguments), "seed": seed}), texts(arguments.text, arguments.least_text)[0])
    training.data.manual_seed(arguments.seed)
    # As the head, the embedding of torch is far too large.
    with torch.no_grad():
        training.master["wte.weight"].mul_(0.02)
        training.model.wte.weight.copy_(training.master["wte.weight"])
    return training


def held_out_loss(arguments, training):
    text, length = texts(arguments.text, arguments.least_text)[1], arguments.length
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(HELD_OUT_BATCHES):
        starts = torch.randint(len(text) - length - 1, (arguments.batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts]).to(arguments.device).long()
        with torch.no_grad():
            losses.append(F.cross_entropy(training.logits(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten()).item())
    return mean(losses)


def store_of(arguments, seed):
    return str(arguments.out / f"whole-{seed}")


def whole_run(arguments, seed):
    """Losses of a run that is never stopped, from its first stage on; its state at each stage goes into a store."""

    def make():
        training = training_of(arguments, seed)
        losses, held_out = [], {}
        for step in range(arguments.stages[-1] + arguments.steps + 1):
            if step in arguments.stages:
                tensorcask.save(training.state(), store_of(arguments, seed), step=step, policy="full", overwrite=True)
            if step - arguments.steps in arguments.stages:
                held_out[step - arguments.steps] = held_out_loss(arguments, training)
            losses.append(training.one_step())
        return {"losses": losses[: arguments.stages[-1] + arguments.steps], "held_out": held_out}

    return kept(arguments, f"whole {seed}", make)


def resumed_run(arguments, seed, stage, name):
    """Losses from a stage on, out of a state that was saved so."""

    def make():
        state = tensorcask.load(store_of(arguments, seed), stage)
        training = training_of(arguments, seed)
        with tempfile.TemporaryDirectory() as folder:
            rounded = tensorcask.Store(folder)
            saved = rounded.save(state, step=stage, policy="full", precision=arguments.methods.get(name, ["lossless"]))
            training.restore(rounded.load())
        if name == BIT:
            generator = torch.Generator().manual_seed(seed)
            for master in training.master.values():
                flips = torch.randint(2, master.shape, generator=generator, dtype=torch.int32)
                master.view(torch.int32).bitwise_xor_(flips.to(master.device))
        if name == DATA:
            training.data.manual_seed(arguments.seed + 1)
        losses = [training.one_step() for _ in range(arguments.steps)]
        return {
            "losses": losses,
            "held_out": held_out_loss(arguments, training),
            "stored": saved.stored_bytes / saved.tensor_bytes,
        }

    return kept(arguments, f"{seed} {stage} {name}", make)


def compare(arguments, run, whole, stage):
    """Percent of the loss of the whole run: mean distance of a step, of the first ones and of all; how much higher mean and held-out loss are."""
    losses, base = run["losses"], whole["losses"][stage : stage + arguments.steps]
    apart = [100 * abs(a - b) / b for a, b in zip(losses, base, strict=True)]
    held_out = whole["held_out"][str(stage)]
    return {
        "stage": stage,
        "apart": apart,
        "first": mean(apart[:FIRST]),
        "all": mean(apart),
        "of_means": 100 * (sum(losses) - sum(base)) / sum(base),
        "held_out": 100 * (run["held_out"] - held_out) / held_out,
        "stored": run.get("stored"),
    }


def measure(arguments):
    """All runs, on as many processes as asked for. Returns the whole runs, and the comparisons of the others with them."""
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    rows = []
    # Each process has threads of its own from the start.
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        whole = dict(zip(seeds, pool.map(whole_run, [arguments] * len(seeds), seeds), strict=True))
        names = [*arguments.methods, BIT, DATA]
        cases = [(seed, stage, name) for stage in arguments.stages for name in names for seed in seeds]
        jobs = [pool.submit(resumed_run, arguments, *case) for case in cases]
        for (seed, stage, name), job in zip(cases, jobs, strict=True):
            row = {"name": name, **compare(arguments, job.result(), whole[seed], stage)}
            rows.append(row)
            print(f"seed {seed}, from step {stage}: {name}: {row['all']:.4f} % apart, mean loss {row['of_means']:+.4f} %", flush=True)
            if name == "lossless" and (row["all"] or row["held_out"]):
                sys.exit("a state that came back bit for bit does not go on bit for bit")
    for stage in arguments.stages:
        for seed in seeds if len(seeds) > 1 else ():
            other = whole[seed + 1 if seed + 1 in whole else seeds[0]]
            run = {"losses": other["losses"][stage : stage + arguments.steps], "held_out": other["held_out"][str(stage)]}
            rows.append({"name": START, **compare(arguments, run, whole[seed], stage)})
    return whole, rows


def named(rows, name, stage):
    return [row for row in rows if row["name"] == name and row["stage"] == stage]


def tables(arguments, whole, rows):
    """Markdown: one table for each stage."""
    for stage in arguments.stages:
        losses = mean([mean(run["losses"][stage : stage + arguments.steps]) for run in whole.values()])
        held_out = mean([run["held_out"][str(stage)] for run in whole.values()])
        yield f"From step {stage}. Losses without an interruption: mean {losses:.3f}, held out {held_out:.3f}."
        yield ""
        yield f"| | stored / state | apart, first {FIRST} steps | apart, {arguments.steps} steps | mean loss | held-out loss |"
        yield "|---|---:|---:|---:|---:|---:|"
        for name in dict.fromkeys(row["name"] for row in rows):
            own = named(rows, name, stage)
            size = f"{mean([row['stored'] for row in own]):.3f}" if name in arguments.methods else ""
            cells = [f"{mean([row[what] for row in own]):.4f}" for what in ("first", "all")]
            for what in ("of_means", "held_out"):
                values = [row[what] for row in own]
                cells.append(f"{mean(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})")
            yield f"| {name} | {size} | {' | '.join(cells)} |"
        yield ""


def plot(arguments, rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    width = max(1, arguments.steps // 20)

    def smooth(rows):
        apart = [mean(values) for values in zip(*(row["apart"] for row in rows), strict=True)]
        return [mean(apart[max(0, at - width + 1) : at + 1]) for at in range(len(apart))]

    stages = arguments.stages
    names = [name for name in arguments.methods if name != "lossless"]
    others = [color for at, color in enumerate(pyplot.get_cmap("tab20").colors) if at not in (6, 7, 14, 15)]
    greys = {BIT: "#000000", START: "#999999"}
    figure, axes = pyplot.subplots(1, len(stages), figsize=(1 + 3.7 * len(stages), 4.2), sharey=True, squeeze=False, layout="constrained")
    for axis, stage in zip(axes[0], stages, strict=True):
        for name, color in greys.items():
            if own := named(rows, name, stage):
                axis.plot(smooth(own), color=color, linewidth=1.4, linestyle=":", label=name)
        for at, name in enumerate(names):
            color, line = ("#c1121f", 2.0) if name == "near" else (others[at % len(others)], 1.0)
            axis.plot(smooth(named(rows, name, stage)), color=color, linewidth=line, label=name)
        axis.set_yscale("log")
        axis.set_title(f"from step {stage}", fontsize=9)
        axis.set_xlabel("steps after the resume", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(True, linewidth=0.3)
    axes[0][0].set_ylabel(f"|loss - uninterrupted|, % of it, mean of {width} steps", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(stages), fontsize=7)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def check_settings(arguments):
    """Refuses a folder whose runs were made with other settings."""
    told = ("layers", "width", "heads", "length", "batch", "lr", "warmup", "seed", "compute", "stages", "steps", "device")
    settings = {name: getattr(arguments, name) for name in told}
    settings["text_bytes"] = sum(map(len, texts(arguments.text, arguments.least_text)))
    (arguments.out / "runs").mkdir(parents=True, exist_ok=True)
    path = arguments.out / "settings.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        sys.exit(f"{path}: the runs of this folder were made with other settings. Name another folder with --out")
    path.write_text(json.dumps(settings))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help=f"which ones: a profile, rules with commas between, or of {', '.join(METHODS)} [all of these]")
    parser.add_argument("--out", type=Path, default=Path("runs/resume"), help="folder of the results, and of the stores of the whole runs [%(default)s]")
    parser.add_argument("--stages", type=int, nargs="+", default=[100, 1000, 3000], help="steps at which the state is saved %(default)s")
    parser.add_argument("--steps", type=int, default=500, help="steps that are compared after each resume [%(default)s]")
    parser.add_argument("--seeds", type=int, default=3, help="initialisations, each with all its runs [%(default)s]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, of one thread each [%(default)s]")
    parser.add_argument("--text", help="file to train on [the first text found that is long enough]")
    parser.add_argument("--least-text", type=int, default=1 << 20, help="bytes of text that are enough [%(default)s]")
    add_sizes(parser, layers=6, width=384, heads=6, length=256, batch=16, warmup=100, compute="f32")
    arguments = parser.parse_args()
    arguments.stages.sort()
    arguments.methods = {name: METHODS.get(name) or name.split(",") for name in arguments.methods or METHODS}
    for words in arguments.methods.values():
        try:
            tensorcask.save({}, "memory://words", step=0, precision=words)
        except tensorcask.InvalidArgumentError as error:
            parser.error(error.message)
    check_settings(arguments)
    begun = time.perf_counter()

    whole, rows = measure(arguments)
    (arguments.out / "resume.json").write_text(json.dumps(rows))
    lines = list(tables(arguments, whole, rows))
    (arguments.out / "resume.md").write_text("\n".join(lines))
    print("\n".join(lines))
    try:
        plot(arguments, rows, arguments.out / "resume.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
