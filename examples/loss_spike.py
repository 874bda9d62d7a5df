#!/usr/bin/env python3
"""Finds the batch behind a loss spike in the gradients that the checkpoints hold.

    python examples/loss_spike.py                 # or: --store s3://bucket/spike --steps 200

A small network trains in mixed precision and saves each step. One batch has inputs that are far too large. The
stored gradients name its step, and the parameters that it hit. No step is trained again. Needs torch; takes seconds.
"""

import argparse
import contextlib
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tensorcask
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

WIDTH, BATCH = 128, 64


def batch_of(step, bad_step):
    """Returns the inputs and labels of a step. Those of the bad step are 30 times too large."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    labels = (inputs[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 8])
    return (inputs * 30 if step == bad_step else inputs), labels


def train(store, steps, bad_step):
    """Trains and saves each step as a delta against the step before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        inputs, labels = batch_of(step, bad_step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        # Biases are too small for a search of their step, so their codec is assigned.
        store.save(
            {"model": weights, "optimizer": moments},
            step=step,
            policy="consecutive",
            codecs=["exp_avg=tc.gradient"],
            user={"loss": loss.item()},
        )
        optimizer.zero_grad()


def norms_of(store):
    """Returns the norm of the gradient of each parameter and step, from the store alone."""
    norms = {}
    for step in store.steps:
        snapshot = store.snapshot(step)
        for name in snapshot:
            if name.startswith("model."):
                # The first steps hold none: a base, and tiny moments that a save stores whole.
                with contextlib.suppress(tensorcask.NotFoundError):
                    norms.setdefault(name, {})[step] = snapshot.gradient(name).norm().item()
    return norms


def outliers(norms, factor=5.0):
    """Yields the parameters and steps whose norm exceeds the median of the parameter by a factor."""
    for name, by_step in norms.items():
        usual = statistics.median(by_step.values())
        for step, norm in by_step.items():
            if norm > factor * usual:
                yield name, step, norm, usual


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="memory://loss-spike")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bad-step", type=int, default=40)
    options = parser.parse_args()
    store = tensorcask.Store(options.store)
    train(store, options.steps, options.bad_step)
    losses = {info.step: info.user["loss"] for info in store.snapshots()}
    print(f"greatest loss: {max(losses.values()):.2f} at step {max(losses, key=losses.get)}")
    for name, step, norm, usual in outliers(norms_of(store)):
        print(f"step {step}: {name}: gradient norm {norm:.3g}, usually {usual:.3g}")


if __name__ == "__main__":
    main()
