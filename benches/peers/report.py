"""Results as targets met and missed, as Markdown, as a plot, and as figures in another page."""

import re

GIB = 2**30
ORDER = ("memcpy", "ours", "codec", "peer", "baseline", "bound")
TITLES = {
    "ours": "tensorcask, codecs chosen chunk by chunk",
    "codec": "tensorcask, one codec for all",
    "peer": "peers",
    "baseline": "other recipes, in numpy",
    "bound": "bounds",
}
XOR_ENTROPY = "order-0 entropy of XOR byte planes"
GIVEN_EXPONENT = "order-0 entropy of differences given the base's exponent"
HUFF0 = "zstd as huff0 alone, byte planes"


class Results:
    def __init__(self, results):
        self.cases = {case["key"]: case for case in results["cases"]}
        self.rows = {key: {row["name"]: row for row in case["rows"]} for key, case in self.cases.items()}
        self.scaling = {one["title"]: one["rows"] for one in results["scaling"]}

    def row(self, case, name):
        return self.rows.get(case, {}).get(name)

    def speed(self, case, name, way):
        """GB/s of tensor bytes, by the best round."""
        row = self.row(case, name)
        return row and self.cases[case]["bytes"] / row[way]["best_s"] / 1e9

    def faster(self, case, name, than, way):
        ours, theirs = self.speed(case, name, way), self.speed(case, than, way)
        return ours and theirs and ours / theirs


def targets(raw):
    """What was aimed at, what came out, and whether it was met: None where it was not measured."""
    results, found = Results(raw), []

    def add(what, wanted, got, met):
        found.append({"target": what, "wanted": wanted, "measured": got, "met": met})

    def ratio(case, name, most, what):
        row = results.row(case, name)
        add(what, f"<= {most}", f"{row['ratio']:.4f}" if row else "not measured", row and row["ratio"] <= most)

    def times(case, name, than, wanted, what, unit="x"):
        got = [results.faster(case, name, than, way) for way in ("encode", "decode")]
        if None in got:
            return add(what, " / ".join(f"{one}{unit}" for one in wanted), "not measured", None)
        pairs = list(zip(got, wanted, strict=True))
        return add(what, " / ".join(f">= {one}{unit}" for one in wanted), " / ".join(f"{one:.2f}{unit}" for one in got), all(a >= b for a, b in pairs))

    def speeds(case, name, wanted, what):
        got = [results.speed(case, name, way) for way in ("encode", "decode")]
        met = None if None in got else all(a >= b for a, b in zip(got, wanted, strict=True))
        shown = "not measured" if None in got else " / ".join(f"{one:.2f} GB/s" for one in got)
        add(what, " / ".join(f">= {one}" for one in wanted) + " GB/s", shown, met)

    times("bf16-k1", "tc.bitmask", "memcpy", (0.7, 0.85), "`tc.bitmask`, whole codec, over half changed: pack / expand against memcpy")
    times("bf16-low-k1", "tc.bitmask", "memcpy", (0.7, 0.85), "`tc.bitmask`, whole codec, about 1 % changed: pack / expand against memcpy")
    times("plane", "tc.planes", HUFF0, (2.2, 1.4), "Huffman plane: encode / decode against zstd's huff0")
    ratio("bf16-full", "tensorcask, balanced", 0.665, "bf16 in full, `balanced`: bytes / original")
    speeds("bf16-full", "tensorcask, balanced", (4, 5), "bf16 in full, `balanced`: encode / decode")
    times("bf16-full", "tensorcask, balanced", "ZipNN", (4, 2), "bf16 in full, `balanced`: encode / decode against ZipNN (instead of the line above)")
    for key in ("bf16-k1", "bf16-k5", "bf16-k10", "bf16-k50", "bf16-k100"):
        k = key.removeprefix("bf16-k")
        ours, bound = results.row(key, "tensorcask, balanced"), results.row(key, XOR_ENTROPY)
        if ours:
            add(f"bf16, k = {k}, `balanced`: bytes / XOR order-0", "< 1", f"{ours['stored'] / bound['stored']:.3f}", ours["stored"] < bound["stored"])
            times(key, "tensorcask, balanced", "ZipNN", (3, 3), f"bf16, k = {k}, `balanced`: encode / decode against ZipNN on the XOR")
            speeds(key, "tensorcask, balanced", (2.5, 2.5), f"bf16, k = {k}, `balanced`: encode / decode")
    for key in ("bf16-k1", "bf16-k5", "bf16-k10", "bf16-k50", "bf16-k100"):
        k = key.removeprefix("bf16-k")
        ours, bound = results.row(key, "tensorcask, smallest"), results.row(key, GIVEN_EXPONENT)
        if ours:
            add(
                f"bf16, k = {k}, `smallest`: bytes / entropy of differences given the base's exponent",
                "<= 1.03",
                f"{ours['stored'] / bound['stored']:.3f}",
                ours["stored"] <= 1.03 * bound["stored"],
            )
            speeds(key, "tensorcask, smallest", (1, 1), f"bf16, k = {k}, `smallest`: encode / decode")
    ratio("bf16-k5", "tensorcask, smallest", 0.34, "bf16, k = 5, `smallest`: bytes / original")
    for key, most in (("state-full", 0.72), ("state-k1", 0.30), ("state-k10", 0.66)):
        ratio(key, "tensorcask, balanced", most, f"whole state, {'full' if key == 'state-full' else key.removeprefix('state-')}, `balanced`: bytes / original")
    for key in results.cases:
        if key.startswith("bf16-") and results.row(key, "tc.bitmask"):
            ours, mask = results.row(key, "tc.ordered"), results.row(key, "tc.bitmask")
            changed = (mask["stored"] - results.cases[key]["elements"] / 8) / results.cases[key]["bytes"]
            add(f"`tc.ordered` against `tc.bitmask`, {changed:.2%} changed: bytes", "< 1", f"{ours['stored'] / mask['stored']:.3f}", ours["stored"] < mask["stored"])
    for key, case in results.cases.items():
        peers = [row for row in case["rows"] if row["kind"] in ("peer", "baseline")]
        ours = results.row(key, "tensorcask, smallest")
        if not peers or not ours or key == "plane":
            continue
        best = min(peers, key=lambda row: row["stored"])
        add(f"{case['title']}: `smallest`, bytes / those of the smallest peer ({best['name']})", "< 1", f"{ours['stored'] / best['stored']:.3f}", ours["stored"] < best["stored"])
    for title, rows in results.scaling.items():
        two = [row for row in rows if row["threads"] == 2]
        if two and "balanced" in title:
            got = rows[0]["encode_s"] / two[0]["encode_s"]
            add(f"{title}: encode with 2 threads against 1", ">= 1.8x", f"{got:.2f}x", got >= 1.8)
        if two and "LMC" in title:
            got = [two[0]["bytes"] / two[0][way] / GIB for way in ("encode_s", "decode_s")]
            met = got[0] >= 2.78 and got[1] >= 3.76
            add(f"{title}: encode / decode on 2 cores against LMC's on 16", ">= 2.78 / 3.76 GiB/s", f"{got[0]:.2f} / {got[1]:.2f} GiB/s", met)
    return found


def _gb(size, seconds):
    return f"{size / seconds / 1e9:.3g}"


def _table(case):
    memcpy = next(row for row in case["rows"] if row["kind"] == "memcpy")
    yield "| | bytes / original | bits / element | encode, GB/s | decode, GB/s | encode / memcpy | decode / memcpy |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    size = case["bytes"]
    for kind in ORDER:
        rows = [row for row in case["rows"] if row["kind"] == kind]
        if rows and kind in TITLES:
            yield f"| *{TITLES[kind]}* | | | | | | |"
        for row in rows:
            bits = 8 * row["stored"] / case["elements"]
            cells = [row["name"] + (" †" if row.get("cores", 1) > 1.25 else ""), f"{row['ratio']:.4f}", f"{bits:.2f}"]
            if "encode" in row:
                for way in ("encode", "decode"):
                    cells.append(f"{_gb(size, row[way]['best_s'])} ({_gb(size, row[way]['median_s'])})")
                cells += [f"{memcpy[way]['best_s'] / row[way]['best_s']:.3f}" for way in ("encode", "decode")]
            else:
                cells += [""] * 4
            yield "| " + " | ".join(cells) + " |"


KINDS = ("tc.planes", "tensorcask, smallest", "ZipNN", "zstd -1, byte planes", "bz2, byte planes", "bz2", "lz4, byte planes", "lz4")


def _kinds(case):
    rows = {row["name"]: row for row in case["rows"]}
    names = [name for name in KINDS if name in rows]
    yield "| tensor | MB | " + " | ".join(names) + " |"
    yield "|---|---:|" + "---:|" * len(names)
    for at, tensor in enumerate(rows["memcpy"]["tensors"]):
        cells = []
        for name in names:
            own = rows[name]["tensors"][at]
            cells.append(f"{own['stored'] / own['bytes']:.3f}, {own['decode_best_s'] * 1e3:.1f} ms")
        yield f"| {tensor['name']} | {tensor['bytes'] / 1e6:.1f} | " + " | ".join(cells) + " |"


def markdown(results):
    data = "--data DIR with larger slices of a run (`bash benches/data/make DIR`)" if results["own_data"] else "tests/data"
    names = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Peers and tensorcask on the same tensors",
        "",
        "Written by `bash benches/peers/run [--data DIR]`; not to be edited. See `benches/README.md` for what the rows are.",
        "",
        f"{results['date']}; {results['machine']};",
        f"{names}.",
        f"Data: {data}. Each case is about {results['mib']:g} MiB: real tensors, and copies of them with",
        "rows and columns in another order, so that no copy repeats the bytes of another. One process, one thread each, all taking turns;",
        f"speeds are GB/s of tensor bytes, best (median) of {results['rounds']} rounds, of 2 for what takes over 2 s in a round. Every row's bytes came back and",
        "were compared. Peers are given the XOR of tensor and base, made beforehand, where there is a base. `checked` is what a writer does: checksums",
        "of input and columns, each chunk decoded again and compared; its decode compares checksums. † used more than one core.",
        "",
    ]
    if "additions_s" in results:
        lines += [
            f"The processor did a million additions in Python in {results['additions_s']:.2f} s; other work took {results['others']:.2f} of a core meanwhile.",
            "",
        ]
    if results["missing"]:
        lines += ["Not installed here: " + "; ".join(f"{name} ({why})" for name, why in results["missing"].items()) + ".", ""]
    if results["left_out"]:
        lines += ["Left out: " + "; ".join(f"{one['title']} ({one['why']})" for one in results["left_out"]) + ".", ""]
    lines += ["![bytes against speed](results.png)", "", "## Targets", "", "| | wanted | measured | |", "|---|---:|---:|---|"]
    for one in results["targets"]:
        verdict = {True: "met", False: "**missed**", None: "-"}[one["met"]]
        lines.append(f"| {one['target']} | {one['wanted']} | {one['measured']} | {verdict} |")
    for case in results["cases"]:
        lines += ["", f"## {case['title'][0].upper()}{case['title'][1:]}", "", f"{case['bytes'] / 1e6:.0f} MB in {len(case['rows'][0]['tensors'])} tensors.", ""]
        lines += _table(case)
    kinds = [case for case in results["cases"] if case["key"] in ("bf16-full", "bf16-k10")]
    for case in kinds:
        lines += ["", f"## By kind of tensor: {case['title']}", "", "Bytes / original, and time to decode.", "", *_kinds(case)]
    if results["scaling"]:
        lines += ["", "## Threads", "", "| | threads | encode, GiB/s | decode, GiB/s | encode, x of one | decode, x of one |", "|---|---:|---:|---:|---:|---:|"]
        for one in results["scaling"]:
            first = one["rows"][0]
            for row in one["rows"]:
                speeds = [f"{row['bytes'] / row[way] / GIB:.2f}" for way in ("encode_s", "decode_s")]
                times = [f"{first[way] / row[way]:.2f}" for way in ("encode_s", "decode_s")]
                lines.append(f"| {one['title']} | {row['threads']} | " + " | ".join(speeds + times) + " |")
    if results["buffers"]:
        lines += ["", "## Size of the buffer", "", "| | KiB | bytes / original | encode, GiB/s | decode, GiB/s |", "|---|---:|---:|---:|---:|"]
        for one in results["buffers"]:
            for row in one["rows"]:
                speeds = [f"{row['bytes'] / row[way] / GIB:.2f}" for way in ("encode_s", "decode_s")]
                lines.append(f"| {one['title']} | {row['kib']} | {row['ratio']:.4f} | " + " | ".join(speeds) + " |")
    return "\n".join(lines) + "\n"


def renew(page, kind, text_of):
    """A page with what stands between its markers `<!--KIND NAME-->` and `<!---->` renewed by `text_of(NAME)`, or kept if that is None."""

    def text(match):
        found = text_of(match[1])
        return match[0] if found is None else f"<!--{kind} {match[1]}-->{found}<!---->"

    return re.sub(rf"<!--{kind} ([^>]*?)-->.*?<!---->", text, page, flags=re.DOTALL)


def fill(page, raw):
    """A page with its figures renewed: `<!--peers CASE/ROW/FIELD-->...<!---->`, FIELD of ratio, bits, encode, decode, or
    encode_median, decode_median; `<!--peers CASE/ROW/FIELD/OTHER-->`, the row's FIELD divided by that of row OTHER;
    `<!--peers scaling/TITLE/THREADS/FIELD-->` and `<!--peers buffers/TITLE/KIB/FIELD-->` with GiB/s; `<!--peers measured-->`,
    day and machine."""
    results = Results(raw)

    def of_table(rows, key, at, field):
        row = next(row for row in rows if row[key] == int(at))
        return f"{row['ratio']:.3f}" if field == "ratio" else f"{row['bytes'] / row[field + '_s'] / GIB:.2f}"

    def number(case, candidate, field):
        row, case = results.rows[case][candidate], results.cases[case]
        numbers = {"ratio": row["ratio"], "bits": 8 * row["stored"] / case["elements"]}
        for way in ("encode", "decode"):
            if way in row:
                numbers |= {way: case["bytes"] / row[way]["best_s"] / 1e9, f"{way}_median": case["bytes"] / row[way]["median_s"] / 1e9}
        return numbers[field]

    def figure(name):
        first, *rest = name.split("/")
        try:
            if first in ("scaling", "buffers"):
                title, at, field = rest
                rows = next(one["rows"] for one in raw[first] if one["title"] == title)
                return of_table(rows, "threads" if first == "scaling" else "kib", at, field)
            if first == "measured":
                return f"{raw['date']}, {raw['machine']}"
            candidate, field, *other = rest
            if other:
                return f"{number(first, candidate, field) / number(first, other[0], field):{'.4g' if field == 'ratio' else '.2f'}}"
            return f"{number(first, candidate, field):.3g}"
        except (KeyError, StopIteration):
            return None  # not measured this time: the page keeps its figure

    return renew(page, "peers", figure)


PLOTTED = ("bf16-full", "bf16-k1", "bf16-k10", "bf16-low-k1", "state-full", "state-k1")


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in results["cases"] if case["key"] in PLOTTED] or results["cases"][:1]
    styles = {"ours": ("#c1121f", "*", 90), "codec": ("#f08c00", "D", 26), "peer": (None, "o", 26), "baseline": ("#777777", "s", 22)}
    peers = sorted({row["name"] for case in cases for row in case["rows"] if row["kind"] == "peer"})
    colors = {name: pyplot.get_cmap("tab20")(at % 20) for at, name in enumerate(peers)}
    figure, axes = pyplot.subplots(len(cases), 2, figsize=(11, 2.9 * len(cases)), squeeze=False, layout="constrained")
    for case, pair in zip(cases, axes, strict=True):
        for axis, way in zip(pair, ("encode", "decode"), strict=True):
            for row in case["rows"]:
                if row["kind"] not in styles or "checked" in row["name"]:
                    continue
                color, marker, area = styles[row["kind"]]
                speed = case["bytes"] / row[way]["best_s"] / 1e9
                axis.scatter(speed, row["ratio"], s=area, marker=marker, color=color or colors[row["name"]], label=row["name"], zorder=3 if color else 2)
                if row["kind"] == "codec" or row["name"].endswith(("smallest", "fastest")):
                    axis.annotate(row["name"].removeprefix("tensorcask, "), (speed, row["ratio"]), fontsize=6, xytext=(4, 3), textcoords="offset points")
            for bound in (row for row in case["rows"] if row["kind"] == "bound"):
                axis.axhline(bound["ratio"], color="#999999", linewidth=0.7, linestyle=":", zorder=1)
            memcpy = next(row for row in case["rows"] if row["kind"] == "memcpy")
            axis.axvline(case["bytes"] / memcpy[way]["best_s"] / 1e9, color="#2a6f97", linewidth=0.8, linestyle="--", zorder=1)
            axis.set_xscale("log")
            if case["key"].startswith("bf16-low"):
                axis.set_yscale("log")
            else:
                # What is larger than the original needs no room.
                axis.set_ylim(top=min(axis.get_ylim()[1], 1.1))
            axis.set_title(f"{case['title']}: {way}", fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(True, linewidth=0.3)
        pair[0].set_ylabel("bytes / original", fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("GB/s of tensor bytes, one thread (dashed: memcpy; dotted: entropy bounds)", fontsize=7)
    handles = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label in peers:
                handles.setdefault(label, handle)
    ordered = sorted(handles)
    figure.suptitle("red stars: tensorcask as it chooses; orange diamonds: one codec for all; circles: peers; grey squares: other recipes", fontsize=8)
    figure.legend([handles[name] for name in ordered], ordered, loc="outside lower center", ncols=5, fontsize=7)
    figure.savefig(path, dpi=80)
