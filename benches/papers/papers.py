"""Measures what the papers show and `benches/peers` does not, and renews its tables in RESULTS.md and docs/src/papers.md; run by `run`."""

import argparse
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import bitsnap
import dynaquant
import layouts
import lmc
import memory
import threads
from data import Run, TooFew
from peers import ROOT, busy, machine
from report import renew


@dataclass(frozen=True)
class Part:
    """What is measured of a run; its tables, by the name of their marker in the page; and its pictures.

    ``steps`` are those that it reads: None for all. Other steps that come or go do not cause another measurement. ``timed`` parts say
    how much of the machine other programs had.
    """

    measure: Callable
    tables: Callable
    plots: Callable | None = None
    steps: tuple[int, ...] | None = None
    timed: bool = False


PARTS = {
    "sweep": Part(bitsnap.measure_sweep, bitsnap.sweep_tables, bitsnap.sweep_plots, steps=()),
    "ten": Part(bitsnap.measure_ten, bitsnap.ten_tables, bitsnap.ten_plots),
    "moments": Part(bitsnap.measure_moments, bitsnap.moments_tables, bitsnap.moments_plots),
    "bits": Part(lmc.measure_bits, lmc.bits_tables, lmc.bits_plots),
    "blocks": Part(lmc.measure_blocks, lmc.blocks_tables),
    "sizes": Part(lmc.measure_sizes, lmc.sizes_tables, lmc.sizes_plots),
    "threads": Part(threads.measure_threads, threads.threads_tables, steps=(1000, 1010), timed=True),
    "memory": Part(memory.measure_memory, memory.memory_tables, steps=(1000, 1001), timed=True),
    "lossy": Part(dynaquant.measure_lossy, dynaquant.lossy_tables),
    "search": Part(dynaquant.measure_search, dynaquant.search_tables, steps=(1000, 1001, 1010)),
    "layouts": Part(layouts.measure_layouts, layouts.layouts_tables, steps=(1000, 1001), timed=True),
}


def measure(name, run):
    """Runs a part; records when and where, and how busy the machine was with other work."""
    before, begun = busy(), time.perf_counter()
    found = PARTS[name].measure(run)
    seconds = time.perf_counter() - begun
    spent, own = (after - then for after, then in zip(busy(), before, strict=True))
    found |= {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": machine(), "seconds": seconds}
    return found | {"others": max(0.0, spent - own) / seconds}


def source(name, found):
    """A line below a table: command, data, date."""
    data = f", {found['data']}" if "data" in found else ""
    line = f"`bash benches/papers/run --data DATA --only {name}`{data}; {found['date']}; {found['machine']}"
    line += f"; other programs took {found['others']:.1f} of a core meanwhile." if PARTS[name].timed else "."
    return textwrap.fill(line, 120, break_on_hyphens=False, break_long_words=False)


def render(results, pages, images):
    """Renews the pages and the pictures from what was measured; returns the tables."""
    tables = {}
    for name, found in results.items():
        tables |= PARTS[name].tables(found) | {f"{name}-source": source(name, found)}
        if PARTS[name].plots is not None:
            PARTS[name].plots(found, images)
    for page in pages:
        page.write_text(renew(page.read_text(), "papers", lambda name: f"\n\n{tables[name]}\n\n" if name in tables else None))
    return tables


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = os.environ.get("TENSORCASK_DATA", ROOT / ".cache" / "data")
    parser.add_argument("--data", type=Path, default=given, help="folder of benches/data/make [%(default)s]")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; all by default")
    parser.add_argument("--again", action="store_true", help="measure again what is there")
    parser.add_argument("--render", action="store_true", help="measure nothing: write tables and pictures again")
    parser.add_argument("--kept", type=Path, default=ROOT / ".cache" / "papers", help="folder of results")
    arguments = parser.parse_args()
    arguments.kept.mkdir(parents=True, exist_ok=True)
    run, results = Run(arguments.data), {}
    if not run.steps and not arguments.render:
        sys.exit(f"{arguments.data} has no steps: run `bash benches/data/make` first")
    for name in arguments.only or PARTS:
        path = arguments.kept / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else None
        inputs = run.inputs(PARTS[name].steps)
        if not arguments.render and (arguments.again or found is None or found["inputs"] != inputs):
            try:
                found = measure(name, run) | {"inputs": inputs}
            except TooFew as lack:
                print(f"{name}: left out, the data has no {lack}", file=sys.stderr)
                continue
            part = path.with_suffix(".part")
            part.write_text(json.dumps(found) + "\n")
            part.replace(path)
            print(f"{name}: measured in {found['seconds']:.0f} s", file=sys.stderr)
        if found is not None:
            results[name] = found
    docs = ROOT / "docs" / "src"
    for name, text in render(results, [Path(__file__).parent / "RESULTS.md", docs / "papers.md"], docs / "images").items():
        print(f"\n{name}:\n\n{text}")


if __name__ == "__main__":
    main()
