"""Random sequences of actions, and the required result of each save."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import tensorcask

from .places import KINDS, Folder, Mounted, Prefix, can_mount
from .savers import EngineSaver, Fresh, check_step, command_line, in_child, save_by_command, state_of

ACTS = 10


@dataclass
class Contents:
    """Knowledge of the model about the store in the place."""

    # The job that wrote last: "us", another, or None without a store.
    owner: str | None = None
    # The log may lack an entry below others, and then writers may fail.
    gap: bool = False


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


class Violation(AssertionError):
    """Raised if the rule is violated."""


class Sequence:
    """One sequence of actions on one place."""

    def __init__(self, seed: int, place: Any, fresh: Fresh, template: Path | None, engine: bool, say: Callable[[str], None]) -> None:
        self._random = Random(seed)
        self._place, self._fresh, self._say = place, fresh, say
        self.outcomes: Counter[str] = Counter()
        self._step = 1000
        self._others = 0
        # Jobs that each of our writers took over from; whose writer is not here opens the store with its next save, and
        # so takes over.
        self._known: dict[str, set[str | None]] = {}
        self._contents = Contents()
        self._kept: list[tuple[Any, Contents]] = []
        if template is not None:
            # A store with a catalog, of a job that has ended.
            place.put_back(template)
            self._contents = Contents("template")
        self._engine = EngineSaver(place.url) if engine else None
        self._stores = [tensorcask.Store(place.url), tensorcask.Store(place.url)]

    def run(self) -> None:
        saves = [self._by_engine] if self._engine else [self._by_first, self._by_second, self._by_function, self._in_child]
        others = [self._by_other, self._by_command] if not self._engine else []
        acts = [*saves * (2 if others else 8), *others, self._delete, self._move, self._backup, self._put_back, self._remove, self._remove_all]
        if hasattr(self._place, "exchange"):
            acts += [self._exchange] * 3
        try:
            if self._engine:
                # The agent takes the store over. An act in the middle of that may fail the save, which then says why.
                self._by_engine()
            for _ in range(ACTS):
                self._random.choice(acts)()
            self._random.choice(saves)()
        finally:
            if self._engine:
                self._engine.close()

    # Saves.

    def _save(self, who: str, act: Callable[[int], Any], has_to_work: bool) -> bool:
        self._step += 1
        step = self._step
        try:
            act(step)
        except (tensorcask.Error, RuntimeError) as error:
            name = type(error).__name__
            self.outcomes[f"{who}: {name}"] += 1
            self._say(f"{who} saves step {step}: {name}: {error}")
            if has_to_work or not str(error).strip():
                raise Violation(f"{who} failed to save step {step}: {name}: {error}") from error
            if isinstance(error, tensorcask.CorruptionError) and not self._contents.gap:
                raise Violation(f"{who} calls a whole store corrupt: {error}") from error
            return False
        self.outcomes[f"{who}: saved"] += 1
        self._say(f"{who} saves step {step}")
        try:
            self._fresh.run("check", self._place.url, step)
        except Exception as error:
            raise Violation(f"{who} saved step {step}, and a fresh process says: {type(error).__name__}: {error}") from error
        return True

    def _ours(self, who: str, act: Callable[[int], Any]) -> None:
        owner = self._contents.owner
        takes_over = who not in self._known or owner in self._known[who]
        if self._save(who, act, has_to_work=not self._contents.gap and takes_over):
            self._known.setdefault(who, {None, "us"}).add(owner)
            self._contents.owner = "us"
        elif not self._contents.gap:
            # Another job writes there: continues as the error says.
            self._stores[0] = tensorcask.Store(self._place.url)
            self._known.pop("first store", None)
            self._by_first()

    def _by_first(self) -> None:
        self._ours("first store", lambda step: self._stores[0].save(state_of(step), step=step))

    def _by_second(self) -> None:
        self._ours("second store", lambda step: self._stores[1].save(state_of(step), step=step, policy="consecutive"))

    def _by_function(self) -> None:
        self._ours("tensorcask.save", lambda step: tensorcask.save(state_of(step), self._place.url, step=step, base_cache="none"))

    def _in_child(self) -> None:
        self._known.pop("forked child", None)
        self._ours("forked child", lambda step: in_child(lambda: self._stores[0].save(state_of(step), step=step) and None))

    def _by_engine(self) -> None:
        assert self._engine is not None
        if self._save("engine", self._engine.save, has_to_work=not self._contents.gap):
            self._contents.owner = "us"

    def _theirs(self, who: str, act: Callable[[int], Any]) -> None:
        if self._save(who, act, has_to_work=not self._contents.gap):
            self._others += 1
            self._contents.owner = f"other {self._others}"

    def _by_other(self) -> None:
        self._theirs("other process", lambda step: self._fresh.run("save", self._place.url, step))

    def _by_command(self) -> None:
        self._theirs("command line", lambda step: save_by_command(command_line(), self._place.url, step))

    # What people do.

    def _delete(self) -> None:
        self._say("the store is deleted")
        self._place.delete()
        self._contents = Contents()

    def _move(self) -> None:
        self._say("the store is moved away")
        self._kept.append((self._place.move_away(), self._contents))
        self._contents = Contents()

    def _backup(self) -> None:
        self._say("the store is copied")
        self._kept.append((self._place.copy(), Contents(self._contents.owner, self._contents.gap)))

    def _put_back(self) -> None:
        if self._kept:
            kept, contents = self._random.choice(self._kept)
            self._say(f"an older copy is put in its place: {contents}")
            self._place.put_back(kept)
            self._contents = Contents(contents.owner, contents.gap)

    def _remove(self) -> None:
        kind = self._random.choice(KINDS)
        if self._place.remove(kind, self._random):
            self._say(f"one of {kind} is removed")
            # Without its catalog a log needs the entries before it.
            self._contents.gap |= kind in ("log", "catalog")

    def _remove_all(self) -> None:
        kind = self._random.choice(KINDS)
        if self._place.remove_all(kind):
            self._say(f"all of {kind} are removed")
            self._contents.gap |= kind in ("log", "catalog")

    def _exchange(self) -> None:
        self._say("mounted or unmounted")
        self._place.exchange()
        mine = self._contents
        self._contents = getattr(self, "_hidden", Contents())
        self._hidden = mine


def run_some(seeds: range, url: str | None, verbose: bool) -> Report:
    """Runs sequences one after another in this process."""
    report = Report()
    fresh = Fresh()
    scratch = Path(tempfile.mkdtemp())
    say: Callable[[str], None] = (lambda text: print(f"  {text}", file=sys.stderr, flush=True)) if verbose else (lambda text: None)
    try:
        mounts = can_mount(scratch)
        template = scratch / "template"
        if url is None:
            in_child(lambda: _fill(str(template)))
        for seed in seeds:
            random = Random(seed * 7919)
            engine, mounted, with_catalog = (random.randrange(n) == 0 for n in (40, 8, 5))
            root = scratch / f"sequence-{seed}"
            root.mkdir()
            place = Prefix(url, f"{os.getpid()}-{seed}") if url else Mounted(root, mounts) if mounted and not engine else Folder(root)
            try:
                # Each sequence runs in a process of its own, as a job of its own.
                outcomes = in_child(lambda s=seed, p=place, c=with_catalog, e=engine: _one(s, p, fresh, template if c and not url else None, e, say))
                report.outcomes.update(outcomes)
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


def _one(seed: int, place: Any, fresh: Fresh, template: Path | None, engine: bool, say: Callable[[str], None]) -> Counter[str]:
    sequence = Sequence(seed, place, fresh, template, engine, say)
    sequence.run()
    return sequence.outcomes


def _fill(url: str) -> None:
    store = tensorcask.Store(url, fsync=False)
    for step in range(70):
        store.save(state_of(step), step=step)
    check_step(url, 69)


def run_all(seeds: range, url: str | None = None, jobs: int = 1, verbose: bool = False, progress: bool = False) -> Report:
    """Runs sequences in several processes, in groups that end one after another."""
    if jobs == 1 and not progress:
        return run_some(seeds, url, verbose)
    groups = [seeds[at : at + 50] for at in range(0, len(seeds), 50)]
    report, begun = Report(), time.monotonic()
    with multiprocessing.get_context("forkserver").Pool(jobs, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(_group, [(group, url, verbose) for group in groups]):
            report.add(found)
            if progress:
                print(f"{report.sequences} sequences, {len(report.violations)} violations, {time.monotonic() - begun:.0f} s", flush=True)
    return report


def _group(arguments: tuple[range, str | None, bool]) -> Report:
    return run_some(*arguments)
