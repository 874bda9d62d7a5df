"""A small training run that goes wrong in several ways, for the queries of docs/src/guides/sql.md.

    python examples/broken_run.py runs/broken

Needs numpy. Four residual layers learn a function of 32 numbers with Adam. Every fifth training step is saved with
statistics. What goes wrong:

- half of the neurons of layer 2 never fire;
- an input is almost always zero, and its gradients are tiny;
- at step 20 the state is saved before the step is done, so that step 20 equals step 15;
- from step 40 on, layer 3 learns 300 times too fast, and the loss rises;
- at step 50, one weight of layer 1 becomes NaN.

The numbers are the same on every machine: only operations that IEEE 754 defines to the last bit, in a fixed order.
"""

import argparse

import numpy as np
import tensorcask

WIDTH, HIDDEN, LAYERS, BATCH = 32, 128, 4, 32


def times(a, b):
    """Product of two matrices. BLAS would add in an order that depends on the processor."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for column in range(a.shape[1]):
        total += a[:, column, None] * b[column]
    return total


def initial(generator):
    def uniform(*shape):
        return (generator.random(shape, np.float32) - np.float32(0.5)) * np.float32(0.4)

    model = {"embed.weight": uniform(WIDTH, WIDTH)}
    for layer in range(LAYERS):
        model[f"layers.{layer}.up.weight"] = uniform(WIDTH, HIDDEN)
        model[f"layers.{layer}.up.bias"] = np.zeros(HIDDEN, np.float32)
        model[f"layers.{layer}.down.weight"] = uniform(HIDDEN, WIDTH)
    model["layers.2.up.bias"][HIDDEN // 2 :] = -100
    model["head.weight"] = uniform(WIDTH, 1)
    return model


def gradients(model, inputs, wanted):
    """Returns the loss and the gradient of each parameter; `embed.weight` is frozen."""
    stream = times(inputs, model["embed.weight"])
    kept = []
    for layer in range(LAYERS):
        hidden = np.maximum(times(stream, model[f"layers.{layer}.up.weight"]) + model[f"layers.{layer}.up.bias"], 0)
        kept.append((stream, hidden))
        stream = stream + times(hidden, model[f"layers.{layer}.down.weight"])
    error = times(stream, model["head.weight"]) - wanted
    loss = sum(float(value) * float(value) for value in error[:, 0]) / len(error)

    error = error * np.float32(2 / BATCH)
    found = {"head.weight": times(stream.T, error)}
    upstream = times(error, model["head.weight"].T)
    for layer in reversed(range(LAYERS)):
        stream, hidden = kept[layer]
        found[f"layers.{layer}.down.weight"] = times(hidden.T, upstream)
        inner = np.where(hidden > 0, times(upstream, model[f"layers.{layer}.down.weight"].T), np.float32(0))
        found[f"layers.{layer}.up.bias"] = times(np.ones((1, BATCH), np.float32), inner)[0]
        found[f"layers.{layer}.up.weight"] = times(stream.T, inner)
        upstream = upstream + times(inner, model[f"layers.{layer}.up.weight"].T)
    return loss, found


def train(url, steps=60, every=5):
    """Trains, and saves into a new store."""
    generator = np.random.default_rng(7)
    model = initial(generator)
    model["embed.weight"][:, 0] *= np.float32(1e-18)
    state = {
        "model": model,
        "exp_avg": {name: np.zeros_like(values) for name, values in model.items() if name != "embed.weight"},
        "exp_avg_sq": {name: np.zeros_like(values) for name, values in model.items() if name != "embed.weight"},
    }
    store = tensorcask.Store(url)
    saved = None
    for step in range(1, steps + 1):
        inputs = generator.random((BATCH, WIDTH), np.float32) - np.float32(0.5)
        loss, found = gradients(model, inputs, inputs[:, :1] * inputs[:, 1:2] * np.float32(4))
        for name, gradient in found.items():
            first, second = state["exp_avg"][name], state["exp_avg_sq"][name]
            first += np.float32(0.1) * (gradient - first)
            second += np.float32(0.05) * (gradient * gradient - second)
            rate = 0.3 if step >= 40 and name.startswith("layers.3.") else 0.001
            model[name] -= np.float32(rate) * first / (np.sqrt(second) + np.float32(1e-8))
        if step == 50:
            model["layers.1.down.weight"][17, 3] = np.nan
        if step % every == 0:
            if step != 20:
                saved = {role: {name: values.copy() for name, values in tensors.items()} for role, tensors in state.items()}
            store.save(saved, step=step, policy="consecutive", statistics=True, user={"loss": loss})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", help="path or URL of a new store")
    with np.errstate(all="ignore"):
        train(parser.parse_args().store)
