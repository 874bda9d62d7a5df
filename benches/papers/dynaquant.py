"""DynaQuant: long chains of lossy snapshots, and searches of settings for whole states within a budget of errors."""

import sys
import time
from pathlib import Path

import numpy as np
import tensorcask
import torch
from data import TooFew
from safetensors.torch import load_file
from tables import percent, table

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from models import GPT, text_loss

# Steps of each chain, oldest first.
CHAINS = {"hundreds": list(range(100, 2500, 100)), "1000": list(range(1000, 1011)), "2400": list(range(2400, 2411))}
RECIPES = {
    "lossless": "lossless",
    "256 levels": "model=kmeans:256",
    "64 levels": "model=kmeans:64",
    "64 levels, sensitive": "model=kmeans:64:sensitive",
    "16 levels": "model=kmeans:16",
    "16 levels, 10 % pruned": "model=kmeans:16:pruned=100",
    "16 levels, sensitive": "model=kmeans:16:sensitive",
    "4 levels": "model=kmeans:4",
    "4 levels, sensitive": "model=kmeans:4:sensitive",
}
# Greatest error of the update and of the weights.
BUDGETS = ((0.01, 1e-4), (0.02, 1e-3), (0.05, 0.01), (0.2, 0.05))
# Batches of four sequences, from steps that no training has.
GRADIENT_BATCHES, LOSS_BATCHES = 4, 16


def model_of(weights):
    """The model of a snapshot, in f32."""
    model = GPT()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


def weights_at(run, step):
    found = load_file(run.paths[step])
    return {name.removeprefix("model."): tensor for name, tensor in found.items() if name.startswith("model.")}


def tokens_of(run):
    return torch.from_numpy(np.load(run.folder.parent / "tokens.npy"))


def gradients_of(weights, tokens, step):
    model = model_of(weights)
    for batch in range(GRADIENT_BATCHES):
        text_loss(model, tokens, (1 << 20) + step * GRADIENT_BATCHES + batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def loss_of(weights, tokens):
    model = model_of(weights)
    with torch.no_grad():
        return sum(text_loss(model, tokens, (1 << 24) + batch).item() for batch in range(LOSS_BATCHES)) / LOSS_BATCHES


def chain(run, tokens, steps, gradients, precision):
    """Sizes of the saves of a chain, and the loss of the last snapshot as restored."""
    store = tensorcask.Store(f"memory://lossy-{steps[0]}-{len(steps)}-{precision}")
    stored, raw = [], 0
    for step in steps:
        state = {"model": weights_at(run, step)}
        given = gradients[step] if "sensitive" in precision else None
        saved = store.save(state, step=step, policy="consecutive", objective="smallest", precision=precision, gradients=given)
        stored.append(saved.stored_bytes)
        raw = saved.tensor_bytes
    loss = loss_of(store.load(steps[-1])["model"], tokens)
    return {"raw": raw, "stored": stored, "loss": loss}


def measure_lossy(run):
    if not run.whole:
        raise TooFew("whole steps")
    run.need(*{step for steps in CHAINS.values() for step in steps})
    torch.set_num_threads(1)
    tokens = tokens_of(run)
    gradients = {step: gradients_of(weights_at(run, step), tokens, step) for steps in CHAINS.values() for step in steps}
    found = {name: {recipe: chain(run, tokens, steps, gradients, words) for recipe, words in RECIPES.items()} for name, steps in CHAINS.items()}
    return {"chains": found, "data": run.describe()}


def lossy_tables(found):
    tables = {}
    for name, recipes in found["chains"].items():
        exact = recipes["lossless"]["loss"]
        rows = []
        for recipe, of in recipes.items():
            base, deltas = of["stored"][0], sorted(of["stored"][1:])
            total = of["raw"] * len(of["stored"]) / sum(of["stored"])
            factors = [of["raw"] / base, of["raw"] / deltas[len(deltas) // 2], total]
            change = f"{100 * (of['loss'] / exact - 1):+.2f} %"
            rows.append([recipe, *(f"{factor:.1f}" for factor in factors), change])
        heads = ["setting", "base", "median delta", "whole chain", "loss of the last"]
        tables[f"lossy-{name}"] = table(heads, rows)
    return tables


def measure_search(run):
    if not run.whole:
        raise TooFew("whole steps")
    run.need(1000, 1001, 1010)
    states = {step: load_file(run.paths[step]) for step in (1000, 1001, 1010)}
    tokens = tokens_of(run)

    def masters(state):
        return {name.removeprefix("optimizer.master."): tensor for name, tensor in state.items() if ".master." in name}

    rows = []
    for words in [["lossless"], ["near"], ["compact"], *BUDGETS]:
        row = {"name": words[0] if len(words) == 1 else f"searched: {100 * words[0]:g} %, {100 * words[1]:g} %"}
        if len(words) == 2:
            begun = time.process_time()
            searched = tensorcask.search_state_precision(states[1000], update_error=words[0], weight_error=words[1])
            row["seconds"] = time.process_time() - begun
            words = searched.rules
        for step in (1001, 1010):
            store = tensorcask.Store(f"memory://search-{row['name']}-{step}")
            options = {"policy": "one_shot", "objective": "smallest", "precision": words}
            base = store.save(states[1000], step=1000, **options)
            delta = store.save(states[step], step=step, **options)
            row |= {"raw": base.tensor_bytes, "base": base.stored_bytes, f"delta {step}": delta.stored_bytes}
        row["update"] = 0.0 if base.rounding is None else base.rounding.update_error
        row["loss"] = loss_of(masters(store.load(1000)), tokens)
        rows.append(row)
    return {"rows": rows, "data": run.describe()}


def search_tables(found):
    exact = found["rows"][0]["loss"]
    rows = []
    for row in found["rows"]:
        factors = [f"{row['raw'] / row[key]:.1f}" for key in ("base", "delta 1001", "delta 1010")]
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else "-"
        rows.append([row["name"], *factors, percent(row["update"]), f"{100 * (row['loss'] / exact - 1):+.3f} %", seconds])
    heads = ["precision", "base", "delta, k = 1", "k = 10", "error of the update", "loss of the masters", "search, CPU s"]
    return {"search": table(heads, rows)}
