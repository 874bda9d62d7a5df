"""Every peer and us on the same tensors, in one process, taking turns: sizes, speeds, and whether every bit came back.

Run by `run`, which makes the environment. Writes results.json, RESULTS.md and results.png, and renews the figures in PAGES.
"""

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import report
import states
from candidates import CANDIDATES, Unfit, bounds, ours

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Pages with figures that a whole run renews.
PAGES = [ROOT / "docs" / "src" / "papers.md", ROOT / "docs" / "src" / "benchmarks" / "compression.md"]
# A candidate that takes longer than this in a round takes part in two rounds only.
PATIENCE_S = 2.0


class Runner:
    """A candidate on all tensors of a case."""

    def __init__(self, name, kind, items):
        self.name, self.kind, self.items = name, kind, items
        self.encode_s, self.decode_s = [[] for _ in items], [[] for _ in items]
        self.stored = [0] * len(items)
        self.cpu_s = self.wall_s = 0.0

    def round(self):
        cpu = time.process_time()
        for at, item in enumerate(self.items):
            begun = time.perf_counter()
            encoded = item.encode()
            between = time.perf_counter()
            decoded = item.decode(encoded)
            ended = time.perf_counter()
            self.encode_s[at].append(between - begun)
            self.decode_s[at].append(ended - between)
            self.wall_s += ended - begun
            stored = item.size(encoded)
            if len(self.encode_s[at]) == 1:
                self.cpu_s += time.process_time() - cpu
                same = np.array_equal(np.frombuffer(decoded, np.uint8), item.expected)
                if not same:
                    sys.exit(f"{self.name}: restored bytes differ")
                cpu = time.process_time()
                self.stored[at] = stored
            elif stored != self.stored[at]:
                sys.exit(f"{self.name}: another size in another round")
        self.cpu_s += time.process_time() - cpu

    @property
    def wants_more(self):
        rounds = len(self.encode_s[0])
        return rounds < 2 or self.wall_s / rounds < PATIENCE_S

    def row(self, sizes, names):
        def seconds(times):
            totals = [sum(run) for run in zip(*times, strict=True)]
            return {"best_s": min(totals), "median_s": statistics.median(totals)}

        best = [[min(runs) for runs in times] for times in (self.encode_s, self.decode_s)]
        return {
            "name": self.name,
            "kind": self.kind,
            "stored": sum(self.stored),
            "ratio": sum(self.stored) / sum(sizes),
            "encode": seconds(self.encode_s),
            "decode": seconds(self.decode_s),
            "rounds": len(self.encode_s[0]),
            "cores": round(self.cpu_s / self.wall_s, 2),
            "tensors": [
                {"name": name, "bytes": size, "stored": stored, "encode_best_s": encode, "decode_best_s": decode}
                for name, size, stored, encode, decode in zip(names, sizes, self.stored, *best, strict=True)
            ],
        }


def modules(folder):
    """Modules of peers; and for those that are not there, why not."""
    found, missing = {}, {}
    for _, _, needs, _ in CANDIDATES:
        if needs is None or needs in found or needs in missing:
            continue
        try:
            found[needs] = importlib.import_module(needs)
        except Exception as error:  # whatever a broken installation raises
            log = folder / needs.partition(".")[0]
            why = [line for line in log.read_text().splitlines() if line.startswith("ERROR")] if log.exists() else []
            missing[needs] = (why or [f"{type(error).__name__}: {error}"])[-1]
    return found, missing


def measure(case, found, rounds):
    runners = []
    for name, kind, needs, make in CANDIDATES:
        if needs is not None and needs not in found:
            continue
        try:
            runners.append(Runner(name, kind, [make(tensor, found.get(needs)) for tensor in case.tensors]))
        except Unfit:
            continue
    for _ in range(rounds):
        for runner in runners:
            if runner.wants_more:
                runner.round()
    sizes, names = [tensor.data.nbytes for tensor in case.tensors], [tensor.name for tensor in case.tensors]
    rows = [runner.row(sizes, names) for runner in runners]
    limits = [{"name": name, "kind": "bound", "stored": round(stored), "ratio": stored / case.bytes} for name, stored in bounds(case)]
    elements = sum(tensor.data.nbytes // tensor.width for tensor in case.tensors)
    return {"key": case.key, "title": case.title, "bytes": case.bytes, "elements": elements, "rows": rows + limits}


def pieces(tensor, rows):
    """A tensor in runs of rows, each a tensor of its own."""
    width = tensor.data.nbytes // tensor.shape[0]

    def cut(data, width, first, count):
        return None if data is None else data[first * width : (first + count) * width]

    for first in range(0, tensor.shape[0], rows):
        count = min(rows, tensor.shape[0] - first)
        of_row = {role: now.nbytes // tensor.shape[0] for role, (_, now, _) in tensor.partners.items()}
        partners = {
            role: (dtype, cut(now, of_row[role], first, count), cut(before, of_row[role], first, count))
            for role, (dtype, now, before) in tensor.partners.items()
        }
        data, base = cut(tensor.data, width, first, count), cut(tensor.base, width, first, count)
        yield states.Tensor(tensor.name, tensor.role, tensor.dtype, (count, *tensor.shape[1:]), data, base, partners)


def timed(work, rounds):
    """Best seconds of some rounds, and what the last gave."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - begun)
    return best, result


def chunk_items(case, how):
    """Our coders of a case, one for each piece of about a chunk."""
    make = ours(**how)
    return [make(piece, None) for tensor in case.tensors for piece in pieces(tensor, max(1, 2**18 // tensor.shape[1]))]


def scaling(case, how, rounds):
    """Encode and decode with more and more threads, in pieces of about a chunk."""
    items = chunk_items(case, how)
    found = []
    for threads in range(1, (os.cpu_count() or 1) + 1):
        with ThreadPoolExecutor(threads) as pool:
            encode_s, encoded = timed(lambda pool=pool: list(pool.map(lambda item: item.encode(), items)), rounds)
            decode_s, _ = timed(
                lambda pool=pool, encoded=encoded: list(pool.map(lambda pair: pair[0].decode(pair[1]), zip(items, encoded, strict=True))), rounds
            )
        found.append({"threads": threads, "encode_s": encode_s, "decode_s": decode_s, "bytes": case.bytes})
    return found


def buffer_sizes(case, how, rounds):
    """Ratio and speed with tensors cut into buffers of a size, on one thread."""
    found = []
    for kib in (4, 16, 64, 256, 512):
        items = []
        for tensor in case.tensors:
            rows = max(1, kib * 1024 // (tensor.data.nbytes // tensor.shape[0]))
            items += [ours(**how)(piece, None) for piece in pieces(tensor, rows)]
        encode_s, encoded = timed(lambda items=items: [item.encode() for item in items], rounds)
        decode_s, _ = timed(lambda items=items, encoded=encoded: [i.decode(e) for i, e in zip(items, encoded, strict=True)], rounds)
        stored = sum(one.stored_bytes for one in encoded)
        found.append({"kib": kib, "stored": stored, "ratio": stored / case.bytes, "encode_s": encode_s, "decode_s": decode_s, "bytes": case.bytes})
    return found


# Title, case, how we encode.
SCALING = [
    ("bf16 weights, full, tc.planes", "bf16-full", {"codec": "tc.planes"}),
    ("bf16 weights, k = 10, tc.planes on the XOR (LMC's recipe)", "bf16-k10", {"codec": "tc.planes"}),
    ("bf16 weights, k = 10, balanced, checked", "bf16-k10", {"objective": "balanced", "checks": True}),
    ("whole state, k = 1, balanced, checked", "state-k1", {"objective": "balanced", "checks": True}),
]
BUFFERS = [
    ("bf16 weights, k = 10, tc.planes on the XOR", "bf16-k10", {"codec": "tc.planes"}),
    ("bf16 weights, full, tc.planes", "bf16-full", {"codec": "tc.planes"}),
]


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def busy():
    """Seconds of processor time that the machine has spent on anything, and this process."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9] if Path("/proc/stat").exists() else []
    idle = {3, 4}
    machine = sum(int(field) for at, field in enumerate(fields) if at not in idle) / os.sysconf("SC_CLK_TCK")
    return machine, sum(os.times()[:4])


def additions():
    """Seconds of a million additions in Python: how fast the processor is, apart from the memory."""
    return timed(lambda: sum(at + 1 for at in range(1_000_000)), 5)[0]


def versions():
    names = ("numpy", "zipnn", "z4ai", "zstandard", "blosc2", "pcodec", "lz4", "tensorcask")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    found["commit"] = commit.stdout.strip() or "unknown"
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TENSORCASK_DATA", ROOT / "tests" / "data"), help="files step-N.safetensors")
    parser.add_argument("--mib", type=float, default=16, help="about how large each case is")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=[case[0] for case in states.CASES], help="a case; without threads and buffers")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--render", action="store_true", help="measure nothing: write table, plot and figures from results.json again")
    arguments = parser.parse_args()
    if arguments.render:
        render(json.loads((arguments.out / "results.json").read_text()), arguments.out, pages=arguments.out == HERE)
        return
    found, missing = modules(Path(sys.prefix) / "missing")
    gc.disable()
    results = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "own_data": Path(arguments.data).resolve() != (ROOT / "tests" / "data").resolve(),
        "mib": arguments.mib,
        "rounds": arguments.rounds,
        "additions_s": additions(),
        "missing": missing,
        "left_out": [],
        "cases": [],
        "scaling": [],
        "buffers": [],
    }
    before, started = busy(), time.perf_counter()
    for key, title, case in states.cases(arguments.data, arguments.mib, arguments.only):
        if isinstance(case, str):
            results["left_out"].append({"title": title, "why": case})
            continue
        begun = time.perf_counter()
        results["cases"].append(measure(case, found, arguments.rounds))
        if not arguments.only:
            results["scaling"] += [{"title": name, "rows": scaling(case, how, arguments.rounds)} for name, of, how in SCALING if of == key]
            results["buffers"] += [{"title": name, "rows": buffer_sizes(case, how, arguments.rounds)} for name, of, how in BUFFERS if of == key]
        gc.collect()
        print(f"{title}: {case.bytes / 1e6:.0f} MB, {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    spent = [after - then for after, then in zip(busy(), before, strict=True)]
    results["others"] = max(0.0, (spent[0] - spent[1]) / (time.perf_counter() - started))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    render(results, arguments.out, pages=arguments.out == HERE and not arguments.only)


def render(results, out, pages):
    """Table, plot, and the figures in other pages."""
    results["targets"] = report.targets(results)
    (out / "RESULTS.md").write_text(report.markdown(results))
    report.plot(results, out / "results.png")
    if pages:
        for page in PAGES:
            page.write_text(report.fill(page.read_text(), results))
    print(report.markdown(results))


if __name__ == "__main__":
    main()
