"""LMC: bits of the weights over training (figures 4 to 7), entropy of blocks (9, 10), and sizes over training (12, table A.3)."""

import re

import numpy as np
import states
from bitsnap import stored
from candidates import Bz2, Bz2Planes, Gzip, GzipPlanes, Lz4, Lz4Planes, entropy_bytes, ours, planes_bound
from data import TooFew, to_bf16, to_f32
from plots import BLUE, GREY, ORANGE, RED, picture, pyplot
from tables import percent, ratio, table

EVERY = 100  # steps from one checkpoint to the next
SHOWN_BITS = (15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 4, 2, 0)
SHOWN = (200, 300, 500, 800, 1100, 1500, 2000, 2400)


def over_training(run):
    """Pairs of steps, each `EVERY` apart."""
    return [(step - EVERY, step) for step in run.steps if step % EVERY == 0 and step - EVERY in run.steps]


# Figures 4 to 7.

SAMPLED = "h.2.attn_proj.weight"


def shares(words):
    """Share of words in which each bit is set, lowest bit first."""
    return [float(np.mean(words >> bit & 1)) for bit in range(16)]


def measure_bits(run):
    steps = sorted({step for pair in over_training(run) for step in pair})
    if not steps:
        raise TooFew(f"steps {EVERY} apart")
    random, rows, before, places = np.random.default_rng(4), [], None, None
    for step in steps:
        tensors = run.load(step)
        words = np.concatenate([one.reshape(-1) for one in tensors.values()])
        sampled = to_f32(tensors[SAMPLED].reshape(-1))
        places = random.choice(sampled.size, 12, replace=False) if places is None else places
        row = {"step": step, "set": shares(words), "sample": sampled[places].tolist(), "deviation": float(sampled.std())}
        if before is not None and step - before[0] == EVERY:
            row["flipped"] = shares(words ^ before[1])
            row["changed"] = float(np.mean(words != before[1]))
            row["moved"] = float(np.median(np.abs(sampled - before[2])))
        rows.append(row)
        before = step, words, sampled
    return {"data": run.describe(), "elements": words.size, "rows": rows}


def number_line():
    """Figure 7: bf16 from -0.25 to 0.25 in steps of 0.005, and the bits that differ from the value before."""
    words = to_bf16(np.arange(-50, 51) * np.float32(0.005))
    return words[1:] ^ words[:-1]


def bits_tables(found):
    heads = [str(bit) for bit in SHOWN_BITS]
    shown = [row for row in found["rows"] if row["step"] in (EVERY, *SHOWN)]

    def of(key):
        rows = [row for row in shown if key in row]
        return table(["step", *heads], [[row["step"], *(f"{100 * row[key][bit]:.1f}" for bit in SHOWN_BITS)] for row in rows])

    moved = [
        [row["step"], percent(row["changed"]), f"{row['moved']:.1e}", percent(row["moved"] / row["deviation"])]
        for row in shown
        if "moved" in row
    ]
    line = [100 * share for share in shares(number_line())]
    return {
        "set-bits": of("set"),
        "flipped-bits": of("flipped"),
        "sample-weights": table(["step", f"weights changed in {EVERY} steps", "median movement", "of the standard deviation"], moved),
        "number-line": table(["", *heads], [["flipped, %", *(f"{line[bit]:.0f}" for bit in SHOWN_BITS)]]),
    }


def bits_plots(found, folder):
    rows = found["rows"]
    with picture(folder / "papers-bits.png", 10, 3.6, columns=3) as axes:
        steps = [row["step"] for row in rows]
        axes[0].plot(steps, [row["sample"] for row in rows], linewidth=0.8)
        axes[0].set(title=f"12 weights of {SAMPLED}", xlabel="step")
        for axis, key, title in zip(axes[1:], ("set", "flipped"), ("bits set, %", f"bits flipped in {EVERY} steps, %"), strict=True):
            given = [row for row in rows if key in row]
            image = np.array([row[key][::-1] for row in given]) * 100
            extent = (-0.5, 15.5, given[-1]["step"] + EVERY / 2, given[0]["step"] - EVERY / 2)
            shown = axis.imshow(image, aspect="auto", extent=extent, cmap="viridis", vmin=0, vmax=100 if key == "set" else 50)
            axis.set(title=title, xlabel="bit", ylabel="step")
            axis.set_xticks(range(16), range(15, -1, -1), fontsize=6)
            pyplot.colorbar(shown, ax=axis)
    with picture(folder / "papers-number-line.png", 7.5, 2.2) as axis:
        flips = number_line()
        axis.imshow([flips >> bit & 1 for bit in range(16)], aspect="auto", extent=(-0.25, 0.25, 15.5, -0.5), cmap="cividis")
        axis.set_yticks(range(0, 16, 3))
        axis.set(xlabel="value (yellow: the bit differs from that of the value before)", ylabel="bit")


# Figures 9, 10, 12 and table A.3.

BLOCK = 64 * 1024
PAIRS = [(1000, 1001), (1000, 1010), (1000, 1050), (1000, 1100), (1000, 2000), (2000, 2001), (2000, 2010), (2400, 2401), (2400, 2410)]
ENGINES = {
    "`tc.planes`": lambda tensor: stored(ours(codec="tc.planes"), tensor),
    "BZ2, grouped": lambda tensor: stored(Bz2Planes, tensor),
    "BZ2": lambda tensor: stored(Bz2, tensor),
    "gzip -6, grouped": lambda tensor: stored(GzipPlanes, tensor),
    "gzip -6": lambda tensor: stored(Gzip, tensor),
    "LZ4, grouped": lambda tensor: stored(lambda one, _: Lz4Planes(one, _lz4()), tensor),
    "LZ4": lambda tensor: stored(lambda one, _: Lz4(one, _lz4()), tensor),
}
FIELDS = {
    "mlp, 4h to h": r"h\.\d+\.mlp_proj\.weight",
    "mlp, h to 4h": r"h\.\d+\.mlp_fc\.weight",
    "attention, dense": r"h\.\d+\.attn_proj\.weight",
    "attention, qkv": r"h\.\d+\.attn_qkv\.weight",
    "embedding": r"wte\.weight",
    "positions": r"wpe\.weight",
    "biases": r".*\.bias",
    "norms": r".*ln_\w+\.weight",
}


def _lz4():
    import lz4.block

    return lz4.block


def field_of(tensor):
    name = tensor.name.removeprefix("model.")
    return next((field for field, pattern in FIELDS.items() if re.fullmatch(pattern, name)), "other")


def by_field(tensors):
    """Tensors by field. Those of a field whose planes are smaller than a block are one tensor, behind one another."""
    fields = {}
    for tensor in tensors:
        fields.setdefault(field_of(tensor), []).append(tensor)
    for field, own in fields.items():
        if own[0].data.nbytes < 2 * BLOCK:
            data, base = (np.concatenate([getattr(tensor, which) for tensor in own]) for which in ("data", "base"))
            own = [states.Tensor(field, "model", "bf16", (data.size // 2,), data, base)]
        yield field, own


def block_shares(tensor):
    """Entropy of each block of each byte plane of the XOR, as a share of its size: high and low plane."""
    planes = (tensor.words(tensor.data) ^ tensor.words(tensor.base)).view(np.uint8).reshape(-1, 2)
    for at in (1, 0):
        plane = np.ascontiguousarray(planes[:, at])
        blocks = [plane[first : first + BLOCK] for first in range(0, plane.size, BLOCK)]
        yield [(entropy_bytes(np.bincount(block, minlength=256)), block.size) for block in blocks]


def measure_pair(run, base, step):
    fields, high, low = {}, [], []
    for field, tensors in by_field(run.tensors(step, base, matrices_only=False)):
        found = fields.setdefault(field, {"bytes": sum(tensor.data.nbytes for tensor in tensors), "blocks": 0.0})
        found |= {name: sum(engine(tensor) for tensor in tensors) for name, engine in ENGINES.items()}
        found["whole"] = sum(planes_bound(tensor, True) for tensor in tensors)
        for tensor in tensors:
            parts = list(block_shares(tensor))
            found["blocks"] += sum(stored for part in parts for stored, _ in part)
            for plane, part in zip((high, low), parts, strict=True):
                plane += [stored / size for stored, size in part if size == BLOCK]
    quartiles = {name: np.percentile(plane, (25, 50, 75)).tolist() for name, plane in (("high", high), ("low", low)) if plane}
    return {"base": base, "step": step, "fields": fields, "quartiles": quartiles, "count": len(high)}


def measure_blocks(run):
    pairs = [pair for pair in PAIRS if set(pair) <= set(run.steps)]
    if not pairs:
        raise TooFew("step 1000, 2000 or 2400 with a later step")
    return {"data": run.describe(), "rows": [measure_pair(run, *pair) for pair in pairs]}


def measure_sizes(run):
    if not over_training(run):
        raise TooFew(f"steps {EVERY} apart")
    return {"data": run.describe(), "rows": [measure_pair(run, *pair) for pair in over_training(run)]}


def total(row, name):
    fields = row["fields"].values()
    return sum(field[name] for field in fields) / sum(field["bytes"] for field in fields)


def of_field(row, field, name):
    return row["fields"][field][name] / row["fields"][field]["bytes"]


GROUPED = ("blocks", "whole", "`tc.planes`", "BZ2, grouped", "gzip -6, grouped", "LZ4, grouped")


def blocks_tables(found):
    rows = []
    for row in found["rows"]:
        quartiles = [" / ".join(f"{one:.3f}" for one in row["quartiles"].get(plane, ())) for plane in ("high", "low")]
        sizes = [ratio(total(row, name)) for name in GROUPED]
        rows.append([f"{row['base']} to {row['step']}", row["count"], *quartiles, *sizes])
    heads = ["steps", "blocks", "high plane", "low plane", "all blocks", "whole tensors", "`tc.planes`", "BZ2", "gzip -6", "LZ4"]
    return {"blocks": table(heads, rows)}


def sizes_tables(found):
    training = found["rows"]
    shown = [row for row in training if row["step"] in SHOWN]
    fields = [field for field in FIELDS if field in training[0]["fields"]]
    over = [
        [field, *(f"{of_field(row, field, '`tc.planes`'):.3f} / {of_field(row, field, 'BZ2'):.3f}" for row in shown)]
        for field in fields
    ]
    matrices = [field for field in fields if field not in ("biases", "norms", "positions")]
    means = [[name, *(f"{np.mean([of_field(row, field, name) for row in training]):.3f}" for field in matrices)] for name in ENGINES]
    return {
        "fields": table(["", *(f"step {row['step']}" for row in shown)], over),
        "means": table(["", *matrices], means),
    }


def sizes_plots(found, folder):
    training = found["rows"]
    steps = [row["step"] for row in training]
    with picture(folder / "papers-sizes.png", 10, 3.6, columns=2) as (left, right):
        colors = {"`tc.planes`": RED, "BZ2, grouped": BLUE, "gzip -6, grouped": ORANGE, "LZ4, grouped": GREY}
        for name, color in colors.items():
            left.plot(steps, [total(row, name) for row in training], color=color, label=name.replace("`", ""))
        left.plot(steps, [total(row, "blocks") for row in training], ":", color="black", label="entropy of blocks")
        left.set(title=f"all weights, {EVERY} steps apart", xlabel="step", ylabel="stored / original")
        left.legend(fontsize=7)
        fields = [field for field in FIELDS if field in training[0]["fields"]]
        for at, field in enumerate(fields):
            color = pyplot.get_cmap("tab10")(at)
            right.plot(steps, [of_field(row, field, "`tc.planes`") for row in training], color=color, label=field)
            right.plot(steps, [of_field(row, field, "BZ2") for row in training], ":", color=color)
        right.set(title="by field: tc.planes (dotted: BZ2)", xlabel="step")
        right.legend(fontsize=7, ncols=2)
