"""The two ways in which a training run saves: through the engine, or one by one."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from . import _native, _ranks
from ._errors import InvalidTypeError, InvalidValueError
from ._options import Step
from ._ranks import Loaded
from ._snapshot import Snapshot
from ._state import flat_arrays
from ._store import Store
from .engine import Engine, Waited

_log = logging.getLogger("tensorcask")
_Template = Callable[[Mapping[str, Any]], dict[str, Any]]


class ThroughEngine:
    """Saves through the engine, on any number of ranks."""

    def __init__(self, url: Any, rank: int, world: int, options: Mapping[str, Any]) -> None:
        self.rank = rank
        self.world = world
        self.engine = Engine(url, rank=rank, world=world, **options)
        self.store = self.engine.store

    def save(self, state: Mapping[str, Any], own: Mapping[str, Any], step: int, facts: Mapping[str, Any]) -> bool:
        outcome = _ranks.save(self.engine, state, own, step, facts)
        for failed, reason in outcome.failures:
            _log.warning("step %d is not in the store: %s", failed, reason)
        return outcome.saved

    def load(self, template: _Template, step: Step) -> Loaded | None:
        return _ranks.load(self.engine, template, step)

    def wait(self, until: str = "durable", timeout: float | None = None) -> Waited:
        return self.engine.wait(until, timeout)

    def set_ending(self, is_ending: bool) -> None:
        self.engine.set_ending(is_ending)

    def finish(self, timeout: float | None) -> None:
        self.engine.finish(timeout)

    def close(self) -> None:
        self.engine.close()


class OneByOne:
    """Saves of one process without the engine. Each is durable when it returns. Refuses to replace steps as the engine does."""

    rank = 0
    world = 1
    engine = None

    def __init__(self, url: Any, world: int, options: Mapping[str, Any]) -> None:
        if world > 1:
            raise _native.UnsupportedError(
                f"{world} ranks save together only through the engine: pass engine=True, or use torch.distributed.checkpoint with store.writer()"
            )
        opening = {name: options[name] for name in ("config", "fsync") if name in options}
        if isinstance(url, Store) and opening:
            raise InvalidValueError(f"{min(opening)}= needs a URL; this Store is already open")
        self.store = url if isinstance(url, Store) else Store(url, **opening)
        self._options = {name: value for name, value in options.items() if name not in opening}
        # Whether the training has said which steps it continues from.
        self._continues = bool(self._options.pop("overwrite", False))

    def save(self, state: Mapping[str, Any], own: Mapping[str, Any], step: int, facts: Mapping[str, Any]) -> bool:
        if not self._continues:
            newest = max(_steps(self.store), default=-1)
            if step <= newest:
                raise _native.ConflictError(
                    f"step {step} is not saved, because it could replace stored steps: step {newest} is stored, and this training has restored "
                    "nothing. Call resume() first. A new training needs another store, or the option `overwrite`"
                )
        whole = {**state, _ranks.own_key(0): _ranks.without_tensors(own)}
        self.store.save(whole, step=step, user=facts, overwrite=True, **self._options)
        self._continues = True
        return True

    def load(self, template: _Template, step: Step) -> Loaded | None:
        def read(snapshot: Snapshot) -> Loaded:
            saved, names = snapshot.structure()
            target = template(saved)
            # Here as in the engine: a tensor that is left over is an error.
            missing = set(names) - flat_arrays(target).keys()
            if missing:
                raise _native.TemplateError(f"step {snapshot.step} has a tensor `{min(missing)}`, and this run has none. Nothing was filled")
            user = {name: value for name, value in snapshot.user.items() if not name.startswith("tc.")}
            return Loaded.of(snapshot.step, snapshot.load(out=target), target, 0, user)

        try:
            found = self.store.read_step(step, read)
        except _native.NotFoundError:
            # A step that is there may lack something.
            if step == "latest" and not _steps(self.store):
                return None
            raise
        self._continues = True
        return found

    def wait(self, until: str = "durable", timeout: float | None = None) -> Waited:
        return Waited(reached=True, failures=[], problem=None)

    def set_ending(self, is_ending: bool) -> None:
        """Does nothing: no save waits."""

    def finish(self, timeout: float | None) -> None:
        """Does nothing: all saves are durable."""

    def close(self) -> None:
        """Does nothing: the store of a process stays open."""


def can_run_engine(url: Any) -> bool:
    if not hasattr(_native, "Engine") or not isinstance(url, (str, os.PathLike)) or str(url).startswith("memory://"):
        return False
    return "TENSORCASK_ENGINE_DIR" in os.environ or os.access("/dev/shm", os.W_OK)


def checked_options(given: Mapping[str, Any], through_engine: bool) -> dict[str, Any]:
    """Options of the engine or of the store. None under another name stands for a part."""
    if through_engine:
        known = inspect.signature(Engine.__init__).parameters.keys() - {"self", "store", "rank", "world"}
        place = "tensorcask.Engine"
    else:
        known = inspect.signature(Store.save).parameters.keys() - {"self", "state", "step", "user"} | {"config", "fsync"}
        place = "tensorcask.Store.save, which saves without the engine"
    unknown = next((name for name, value in given.items() if name not in known and value is not None), None)
    if unknown is not None:
        raise InvalidTypeError(
            f"{unknown}={given[unknown]!r}: use an object with state_dict and load_state_dict, or an option of {place}: "
            f"`{unknown}` is not one of these"
        )
    return {name: value for name, value in given.items() if name in known}


def _steps(store: Store) -> list[int]:
    try:
        return store.steps
    except _native.NotFoundError:
        return []
