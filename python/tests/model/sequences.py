"""Random sequences of actions, and the required result of each save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import tensorcask

from .places import KINDS
from .savers import LARGE, EngineSaver, Fresh, command_line, in_child, save_by_command, state_of

ACTS = 10


@dataclass
class Contents:
    """Knowledge of the model about the store in the place."""

    # The job that wrote last: "us", another, or None without a store.
    owner: str | None = None
    # The log may lack an entry below others, and then writers may fail.
    gap: bool = False
    # store.json is lost. A writer that has the store open makes it anew; others cannot tell whose store it is.
    unnamed: bool = False

    @property
    def is_whole(self) -> bool:
        return not self.gap and not self.unnamed


class Violation(AssertionError):
    """Raised if the rule is violated."""


class Sequence:
    """One sequence of actions on one place."""

    def __init__(self, seed: int, place: Any, fresh: Fresh, template: Mapping[str, bytes], engine: bool, say: Callable[[str], None]) -> None:
        self._random = Random(seed)
        self._place, self._fresh, self._say = place, fresh, say
        self.outcomes: Counter[str] = Counter()
        # An engine that has restored nothing refuses steps below those of the template.
        self._step = 1000 + (LARGE if engine and template else self._random.choice((0, 0, LARGE)))
        self._others = 0
        # Jobs that each of our writers took over from; whose writer is not here opens the store with its next save, and
        # so takes over.
        self._known: dict[str, set[str | None]] = {}
        self._contents = Contents()
        self._kept: list[tuple[Any, Contents]] = []
        if template:
            # A store of a job that has ended.
            place.fill(template)
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
            # A mount came or went below a store that is open: a save there would be lost with it (spec log 5.6).
            is_elsewhere = "lies on another file system" in str(error)
            if (has_to_work and not is_elsewhere) or not str(error).strip():
                raise Violation(f"{who} failed to save step {step}: {name}: {error}") from error
            if isinstance(error, tensorcask.CorruptionError) and self._contents.is_whole:
                raise Violation(f"{who} calls a whole store corrupt: {error}") from error
            return False
        self._contents.unnamed = False
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
        if self._save(who, act, has_to_work=self._contents.is_whole and takes_over):
            self._known.setdefault(who, {None, "us"}).add(owner)
            self._contents.owner = "us"
        elif self._contents.is_whole:
            # Another job writes there: continues as the error says.
            self._stores[0] = tensorcask.Store(self._place.url)
            self._known.pop("first store", None)
            self._by_first()

    def _by_first(self) -> None:
        self._ours("first store", lambda step: self._stores[0].save(state_of(step), step=step))

    def _by_second(self) -> None:
        self._ours("second store", lambda step: self._stores[1].save(state_of(step), step=step, policy="consecutive", keep_last=3))

    def _by_function(self) -> None:
        self._ours("tensorcask.save", lambda step: tensorcask.save(state_of(step), self._place.url, step=step, base_cache="none"))

    def _in_child(self) -> None:
        self._known.pop("forked child", None)
        self._ours("forked child", lambda step: in_child(lambda: self._stores[0].save(state_of(step), step=step) and None))

    def _by_engine(self) -> None:
        assert self._engine is not None
        if self._save("engine", self._engine.save, has_to_work=self._contents.is_whole):
            self._contents.owner = "us"

    def _theirs(self, who: str, act: Callable[[int], Any]) -> None:
        if self._save(who, act, has_to_work=self._contents.is_whole):
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
        self._kept.append((self._place.copy(), replace(self._contents)))

    def _put_back(self) -> None:
        if self._kept:
            kept, contents = self._random.choice(self._kept)
            self._say(f"an older copy is put in its place: {contents}")
            self._place.put_back(kept)
            self._contents = replace(contents)

    def _remove(self) -> None:
        kind = self._random.choice(KINDS)
        if self._place.remove(kind, self._random):
            self._say(f"one of {kind} is removed")
            self._note_loss(kind)

    def _remove_all(self) -> None:
        kind = self._random.choice(KINDS)
        if self._place.remove_all(kind):
            self._say(f"all of {kind} are removed")
            self._note_loss(kind)

    def _note_loss(self, kind: str) -> None:
        # Without its catalog a log needs the entries before it.
        self._contents.gap |= kind in ("log", "catalog")
        self._contents.unnamed |= kind == "store.json"

    def _exchange(self) -> None:
        self._say("mounted or unmounted")
        self._place.exchange()
        mine = self._contents
        self._contents = getattr(self, "_hidden", Contents())
        self._hidden = mine
