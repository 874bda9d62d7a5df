"""Runs sequences of both kinds, one after another or in several processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import tensorcask

from .damage import Damages
from .places import Folder, Mounted, Place, Prefix, can_mount
from .savers import LARGE, Fresh, check_step, in_child, state_of
from .sequences import Sequence

Templates = Mapping[str, Mapping[str, bytes]]


@dataclass
class Report:
    """Results of some sequences."""

    sequences: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.sequences += other.sequences
        self.outcomes.update(other.outcomes)
        self.violations += other.violations


def run_some(seeds: range, url: str | None, templates: Templates, verbose: bool) -> Report:
    """Runs sequences one after another in this process."""
    report = Report()
    if not verbose:
        # Warnings of steps that are passed over.
        logging.disable(logging.WARNING)
    fresh = Fresh()
    scratch = Path(tempfile.mkdtemp())
    say: Callable[[str], None] = (lambda text: print(f"  {text}", file=sys.stderr, flush=True)) if verbose else (lambda text: None)
    try:
        mounts = can_mount(scratch)
        for seed in seeds:
            random = Random(seed * 7919)
            engine, mounted, with_catalog = (random.randrange(n) == 0 for n in (40, 8, 5))
            damages = seed % 2 == 0
            template = templates[random.choice(sorted(templates))] if damages or (with_catalog and not url) else {}
            root = scratch / f"sequence-{seed}"
            root.mkdir()
            place: Place = Folder(root)
            if url:
                place = Prefix(url, f"{os.getpid()}-{seed}")
            elif mounted and not engine and not damages:
                place = Mounted(root, mounts)

            def act(seed: int = seed, place: Place = place, template: Mapping[str, bytes] = template, engine: bool = engine) -> Counter[str]:
                sequence = Damages(seed // 2, place, fresh, template, say) if seed % 2 == 0 else Sequence(seed, place, fresh, template, engine, say)
                sequence.run()
                return sequence.outcomes

            try:
                # Each sequence runs in a process of its own, as a job of its own.
                report.outcomes.update(in_child(act))
            except Exception as error:
                report.violations.append(f"seed {seed}: {error}")
                print(f"VIOLATION seed {seed}: {error}", flush=True)
            finally:
                place.close()
            report.sequences += 1
    finally:
        fresh.close()
        shutil.rmtree(scratch, ignore_errors=True)
    return report


def make_templates() -> Templates:
    """Stores of jobs that have ended, as the bytes of their objects."""

    def make(root: str) -> Templates:
        found = {}
        for name, small_saves in (("short", 0), ("with a catalog", 62), ("with two catalogs", 126)):
            place = Folder(Path(root, name))
            store = tensorcask.Store(place.url, fsync=False)
            steps = [LARGE + at for at in range(6)]
            for step in steps:
                store.save(state_of(step), step=step, policy="consecutive")
            store.compact(steps[2])
            store.forget(steps[:2])
            for step in range(small_saves):
                store.save(state_of(step), step=step)
            if small_saves:
                store.forget(range(small_saves - 2))
            store.save(state_of(LARGE + 8), step=LARGE + 8)
            check_step(place.url, LARGE + 8)
            found[name] = place.objects()
        return found

    with tempfile.TemporaryDirectory() as root:
        templates: Templates = in_child(lambda: make(root))
        return templates


def run_all(seeds: range, url: str | None = None, jobs: int = 1, verbose: bool = False, progress: bool = False) -> Report:
    """Runs sequences in several processes, in groups that end one after another."""
    if jobs == 1 and not progress:
        return run_some(seeds, url, make_templates(), verbose)
    groups = [seeds[at : at + 50] for at in range(0, len(seeds), 50)]
    report, begun, templates = Report(), time.monotonic(), make_templates()
    with multiprocessing.get_context("forkserver").Pool(jobs, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(_group, [(group, url, templates, verbose) for group in groups]):
            report.add(found)
            if progress:
                print(f"{report.sequences} sequences, {len(report.violations)} violations, {time.monotonic() - begun:.0f} s", flush=True)
    return report


def _group(arguments: tuple[range, str | None, Templates, bool]) -> Report:
    return run_some(*arguments)
