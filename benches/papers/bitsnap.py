"""BitSnap: sizes by share of changed elements (figure 8), over ten steps (figure 9), and the values of Adam's moments (figure 6)."""

import math

import numpy as np
import states
from candidates import Coo32, NaiveMask, ours
from data import TooFew, flat, to_bf16
from plots import BLUE, GREY, ORANGE, RED, picture
from tables import percent, ratio, table

# Percent of elements that change.
RATES = (0.1, 0.2, 0.5, 1, 2, 3.125, 5, 6.25, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 93.75, 100)
SIDE = 2048
SIZES = {
    "packed mask": lambda tensor: stored(ours(codec="tc.bitmask"), tensor),
    "byte mask": lambda tensor: stored(NaiveMask, tensor),
    # Four bytes of place for each element: its row and its column, or one index.
    "COO, row and column": lambda tensor: stored(Coo32, tensor),
    "`smallest`": lambda tensor: stored(ours(objective="smallest"), tensor),
}


def stored(make, tensor):
    """Bytes that a candidate stores for a tensor, from which it restores every bit."""
    item = make(tensor, None)
    encoded = item.encode()
    if not np.array_equal(np.frombuffer(item.decode(encoded), np.uint8), item.expected):
        raise AssertionError(f"{tensor.name}: restored bytes differ")
    return item.size(encoded)


def sizes(tensors):
    """Bytes / original of all tensors, by method."""
    total = sum(tensor.data.nbytes for tensor in tensors)
    return {name: sum(size(tensor) for tensor in tensors) / total for name, size in SIZES.items()}


# Figure 8.


def changes(base, rate, random):
    """Two later states of a base in which a share of the elements changed: by one step to a neighbour, and to a value drawn anew."""
    places = random.permutation(base.size)[: round(base.size * rate / 100)]
    near, fresh = base.copy(), base.copy()
    # The sign bit apart, bf16 are in the order of their bits. Zero is left out: its neighbour below has the other sign.
    near[places] += np.where((random.random(places.size) < 0.5) | (base[places] & 0x7FFF == 0), 1, -1).astype(np.int16).view(np.uint16)
    drawn = to_bf16(random.normal(0, 0.02, places.size))
    fresh[places] = np.where(drawn == base[places], drawn ^ 1, drawn)
    return {"neighbour": near, "drawn anew": fresh}


def measure_sweep(run):
    random = np.random.default_rng(8)
    base = to_bf16(random.normal(0, 0.02, SIDE * SIDE))
    rows = []
    for rate in RATES:
        row = {"rate": rate}
        for kind, new in changes(base, rate, random).items():
            row["changed"] = int(np.count_nonzero(new != base))
            found = sizes([states.Tensor("synthetic", "model", "bf16", (SIDE, SIDE), flat(new), flat(base))])
            row |= {name: size for name, size in found.items() if name != "`smallest`"}
            row[f"`smallest`, {kind}"] = found["`smallest`"]
        rows.append(row)
    return {"elements": SIDE * SIDE, "rows": rows}


SWEPT = ("packed mask", "byte mask", "COO, row and column", "`smallest`, neighbour", "`smallest`, drawn anew")


def sweep_tables(found):
    rows = [[f"{row['rate']:g} %", *(ratio(row[name]) for name in SWEPT)] for row in found["rows"]]
    return {"sweep": table(["changed", *SWEPT], rows)}


def sweep_plots(found, folder):
    with picture(folder / "papers-change-rates.png", 7.5, 4.2) as axis:
        share = [row["rate"] for row in found["rows"]]
        styles = dict(zip(SWEPT, ((ORANGE, "-"), (GREY, "--"), (BLUE, "-"), (RED, "-"), (RED, ":")), strict=True))
        for name, (color, line) in styles.items():
            axis.plot(share, [1 / row[name] for row in found["rows"]], line, marker=".", color=color, label=name.replace("`", ""))
        axis.axhline(1, color=GREY, linewidth=0.6)
        axis.set(xscale="log", yscale="log", xlabel="elements changed, %", ylabel="original / stored")
        axis.legend(fontsize=8)


# Figure 9.

# Learning rate after a step.
RATE_AT = {1000: "5e-4", 2000: "1e-4", 2400: "2e-6"}


def measure_ten(run):
    rows = []
    for base in run.steps:
        for k in range(1, 11):
            if base + k in run.steps and base in RATE_AT:
                tensors = run.tensors(base + k, base)
                changed = sum(int(np.count_nonzero(tensor.words(tensor.data) != tensor.words(tensor.base))) for tensor in tensors)
                elements = sum(tensor.data.nbytes // 2 for tensor in tensors)
                rows.append({"base": base, "k": k, "changed": changed / elements, "elements": elements, **sizes(tensors)})
    if not rows:
        raise TooFew("step 1000, 2000 or 2400 with a later step")
    return {"data": run.describe(), "rows": rows}


def ten_tables(found):
    rows = [[RATE_AT[row["base"]], row["k"], percent(row["changed"]), *(ratio(row[name]) for name in SIZES)] for row in found["rows"]]
    return {"ten": table(["learning rate", "k", "changed", *SIZES], rows)}


def ten_plots(found, folder):
    with picture(folder / "papers-ten-steps.png", 7.5, 3.8) as axis:
        for base, color in ((1000, RED), (2000, ORANGE), (2400, BLUE)):
            rows = [row for row in found["rows"] if row["base"] == base]
            for name, line in (("packed mask", "--"), ("`smallest`", "-")):
                label = f"{RATE_AT[base]}, {name.replace('`', '')}"
                axis.plot([row["k"] for row in rows], [1 / row[name] for row in rows], line, marker=".", color=color, label=label)
        axis.axhline(16, color=GREY, linewidth=0.6, linestyle=":")
        axis.set(yscale="log", xlabel="steps after the base (dotted: 16, the limit of a packed mask)", ylabel="original / stored")
        axis.legend(fontsize=7, ncols=3)


# Figure 6.

DECADES = range(-20, 1)
MOMENTS = {"exp_avg": "first moment", "exp_avg_sq": "second moment"}
EDGES = 8  # of the linear histogram, in standard deviations


def moments(values):
    """Histogram of magnitudes by decade and of values by standard deviation, and how near to a normal distribution they are."""
    values = values.astype(np.float64)
    magnitudes = np.abs(values)
    zeros = magnitudes == 0
    exponents = np.floor(np.log10(magnitudes[~zeros])).astype(int)
    shares = {str(decade): float(np.count_nonzero(exponents == decade) / values.size) for decade in DECADES}
    deviation, mean = values.std(), values.mean()
    linear, _ = np.histogram((values - mean) / deviation, bins=320, range=(-EDGES, EDGES))
    fine, _ = np.histogram(np.log10(magnitudes[~zeros]), bins=200, range=(DECADES[0], 0))
    return {
        "elements": values.size,
        "decades": shares,
        "zero": float(zeros.mean()),
        "mean": float(mean),
        "deviation": float(deviation),
        "kurtosis": float(((values - mean) ** 4).mean() / deviation**4),
        "within": {str(width): float((np.abs(values - mean) < width * deviation).mean()) for width in (0.1, 1, 3)},
        "linear": (linear / values.size).tolist(),
        "fine": (fine / values.size).tolist(),
    }


def measure_moments(run):
    found = {}
    for step in (step for step in (1000, 2400) if step in run.steps and set(MOMENTS) <= run.roles(step)):
        for role in MOMENTS:
            tensors = run.load(step, role, matrices_only=False)
            found[f"{step} {role}"] = moments(np.concatenate([words.view(np.float32).reshape(-1) for words in tensors.values()]))
    if not found:
        raise TooFew("step 1000 or 2400 with the optimizer's state")
    return {"data": run.describe(), "of": found}


def moments_tables(found):
    of = found["of"]
    heads = [f"{MOMENTS[key.split()[1]]}, step {key.split()[0]}" for key in of]
    used = [decade for decade in map(str, DECADES) if any(one["decades"][decade] >= 0.0005 for one in of.values())]
    rows = [[f"1e{decade} to 1e{int(decade) + 1}", *(percent(one["decades"][decade]) for one in of.values())] for decade in used]
    least, most = int(used[0]), int(used[-1])
    rest = [1 - sum(one["decades"][decade] for decade in used) - one["zero"] for one in of.values()]
    rows.append([f"below 1e{least} or above 1e{most + 1}", *(percent(max(0.0, share)) for share in rest)])
    rows.append(["zero", *(percent(one["zero"]) for one in of.values())])
    shape = [
        ["mean", *(f"{one['mean']:.1e}" for one in of.values())],
        ["standard deviation", *(f"{one['deviation']:.1e}" for one in of.values())],
    ]
    for width in (0.1, 1, 3):
        what = f"within {width} of it from the mean (normal: {percent(math.erf(width / 2**0.5))})"
        shape.append([what, *(percent(one["within"][str(width)]) for one in of.values())])
    shape.append(["kurtosis (normal: 3)", *(f"{one['kurtosis']:,.0f}" for one in of.values())])
    return {"moments": table(["magnitude", *heads], rows), "moments-shape": table(["", *heads], shape)}


def moments_plots(found, folder):
    with picture(folder / "papers-moments.png", 9, 3.4, columns=2) as (left, right):
        for (key, one), color in zip(found["of"].items(), (RED, ORANGE, BLUE, GREY), strict=False):
            step, role = key.split()
            label = f"{MOMENTS[role]}, step {step}"
            left.plot(np.linspace(DECADES[0], 0, len(one["fine"])), np.array(one["fine"]) * 100, color=color, label=label)
            if role == "exp_avg":
                right.plot(np.linspace(-EDGES, EDGES, len(one["linear"])), np.array(one["linear"]) * 100, color=color, label=label)
        at = np.linspace(-EDGES, EDGES, 320)
        right.plot(at, np.exp(-(at**2) / 2) / math.sqrt(2 * math.pi) * (at[1] - at[0]) * 100, ":", color="black", label="normal")
        left.set(xlabel="log10 of magnitude", ylabel="elements, % per 0.1")
        right.set(xlabel="standard deviations", ylabel="elements, % per 0.05", yscale="log", ylim=(1e-4, 100))
        left.legend(fontsize=7)
        right.legend(fontsize=7)
