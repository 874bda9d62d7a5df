"""The two ways in which all ranks of a training save one snapshot: through the engine, and through DCP into a store.

A snapshot has tensors, whole or in parts, and the values of each rank, as :func:`tensorcask._ranks.save` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from . import _native, _ranks
from ._errors import InvalidTypeError
from ._hosts import gather
from ._options import Step
from ._ranks import Loaded
from ._shard import Shard
from ._snapshot import Snapshot
from ._state import flat_arrays
from ._store import Store
from .engine import Engine


class RankSaves(Protocol):
    """Saves and loads of all ranks. All ranks call each method."""

    def save(self, state: Mapping[str, Any], own: Mapping[str, Any], step: int, user: Mapping[str, Any]) -> None:
        """Saves tensors that all ranks have, in shards or in copies, and values of this rank."""

    def look(self, step: Step) -> Loaded | None:
        """Reads a step without its tensors; None if no step is saved. ``latest`` is the newest step that all ranks can load."""

    def fill(self, state: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Fills tensors from a step. Returns the saved state with these tensors."""
        ...


class ThroughEngine:
    """Saves through the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def save(self, state: Mapping[str, Any], own: Mapping[str, Any], step: int, user: Mapping[str, Any]) -> None:
        _ranks.save(self._engine, state, own, step, user)

    def look(self, step: Step) -> Loaded | None:
        return _ranks.load(self._engine, {}, step, partial=True)

    def fill(self, state: Mapping[str, Any], step: int) -> dict[str, Any]:
        found = _ranks.load(self._engine, state, step)
        if found is None:
            raise _native.NotFoundError(f"step {step} is not saved")
        return found.state


class ThroughStore:
    """Saves through ``torch.distributed.checkpoint``. A save is durable when it returns.

    ``options``: those of :class:`tensorcask.torch.Writer`, and ``keep_last``.
    """

    def __init__(self, store: Store, options: Mapping[str, Any]) -> None:
        self._store = store
        self._keep_last = options.get("keep_last")
        other = next((name for name in ("keep_every", "keep_weights_every", "free", "progress", "frozen") if name in options), None)
        if other is not None:
            raise InvalidTypeError(f"{other}: several ranks that save without an engine have no such option. Pass it to tensorcask.Engine")
        self._user: Mapping[str, Any] = {}
        writing = {"overwrite": True, **{name: value for name, value in options.items() if name != "keep_last"}}
        self._writer = store.writer(user=lambda step: self._user, **writing)

    def save(self, state: Mapping[str, Any], own: Mapping[str, Any], step: int, user: Mapping[str, Any]) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        self._user = user
        # DCP takes mappings and lists apart and turns their keys into text, but no tuples.
        values = {_ranks.own_key(dist.get_rank()): (_ranks.without_tensors(own),)}
        dcp.save({**_described(state), **values}, checkpoint_id=f"step-{step}", storage_writer=self._writer)
        if self._keep_last is not None and dist.get_rank() == 0:
            unpinned = [info.step for info in self._store.snapshots() if not info.pinned]
            if forgotten := unpinned[: -self._keep_last]:
                self._store.forget(forgotten)

    def look(self, step: Step) -> Loaded | None:
        import torch.distributed as dist

        rank, world = dist.get_rank(), dist.get_world_size()
        newest = None
        if step == "latest" and rank == 0:
            try:
                newest = self._store.read_step("latest", lambda snapshot: snapshot.step)
            except _native.NotFoundError:
                pass
        # Another rank may see a newer step, or none.
        told = gather(newest, rank, world) or [newest]
        at = told[0] if step == "latest" else step
        return None if at is None else self._read(self._store.snapshot(at), rank)

    def _read(self, snapshot: Snapshot, rank: int) -> Loaded:
        saved, _ = snapshot.structure()
        unpacked = {key: value[0] if isinstance(value, tuple) and len(value) == 1 else value for key, value in saved.items()}
        user = {name: value for name, value in snapshot.user.items() if not name.startswith("tc.")}
        return Loaded.of(snapshot.step, unpacked, {}, rank, user)

    def fill(self, state: Mapping[str, Any], step: int) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        snapshot = self._store.snapshot(step)
        saved, names = snapshot.structure()
        target = flat_arrays(state)
        # As in the engine: no tensor may be left over.
        missing = sorted(set(names) - target.keys()) or sorted(target.keys() - set(names))
        if missing:
            raise _native.TemplateError(f"step {step} and this training have other tensors, such as `{missing[0]}`. Nothing was filled")
        dcp.load(_described(target), checkpoint_id=f"step-{step}", storage_reader=self._store.reader(step=step))
        found: dict[str, Any] = _ranks.filled(state, {key: value for key, value in saved.items() if key in state})
        return found


def rank_saves(target: Store | Engine, options: Mapping[str, Any]) -> RankSaves:
    """The way to save into a store, or through an engine, which has its own options."""
    return ThroughEngine(target) if isinstance(target, Engine) else ThroughStore(target, options)


def _described(value: Any) -> Any:
    """A state with tensors that tell DCP by their attributes which part they are, in place of shards."""
    if isinstance(value, Shard):
        try:
            import torch.distributed.checkpoint.protocol  # noqa: F401
        except ImportError:
            raise _native.UnsupportedError("the parts of DeepSpeed need PyTorch 2.15, or an engine: pass tensorcask.Engine") from None
        part = value.data.detach()
        size = tuple(part.shape)
        has_elements = part.numel() > 0
        part.global_shape = value.shape
        part.global_offsets = (value.offset,) if has_elements else ()
        part.local_offsets = ((0,) * len(size),) if has_elements else ()
        part.local_sizes = (size,) if has_elements else ()
        return part
    if isinstance(value, Mapping):
        return {key: _described(item) for key, item in value.items()}
    return value
