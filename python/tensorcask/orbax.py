"""Orbax checkpoints in a tensorcask store, for the ``CheckpointManager`` of its API v0.

    with orbax.checkpoint.CheckpointManager("/ckpt") as manager:
        manager.save(step, args=tensorcask.orbax.Save(tree))
        tree = manager.restore(step, args=tensorcask.orbax.Restore(tree))

A save copies the arrays and returns; the manager waits for the rest as it does for its own formats. The store is
``<folder of the manager>/tensorcask`` unless ``store`` says otherwise; in the folder of a step lies a marker that names the snapshot.
``Restore(tree)`` gives a tree of that form, with each array on the devices and in the sharding of the one there
(``jax.ShapeDtypeStruct`` is enough), and reads only the parts that this process holds. ``Restore()`` gives nested dicts of numpy arrays,
with positions in lists and names of fields as keys, in text.

Each item of a ``Composite`` has a store: ``tensorcask`` that of ``default``, ``tensorcask-<name>`` those of others. One process: a tree with
arrays of other processes is refused. A manager that deletes old steps leaves their snapshots; :func:`tidy` forgets them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from . import _markers, _native
from ._steps import step_in, step_of
from ._store import Snapshot, Store, TensorInfo, _open

__all__ = ["Handler", "Restore", "Save", "tidy"]

_TEMPORARY = ".orbax-checkpoint-tmp"
# What a snapshot says of itself: its item, and the step of the folder that names it.
_ITEM, _FOLDER = "orbax_item", "orbax_step"
_saving = threading.Lock()


class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """What Orbax calls for :class:`Save` and :class:`Restore`."""

    def __init__(self) -> None:
        # One at a time: a delta needs the save before it.
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "tensorcask-orbax")

    async def async_save(self, directory: Any, args: Save) -> list[Any]:
        folder = Path(os.fspath(directory))
        step_folder, numbered = _step_of(folder, args.step)
        step = numbered if args.step is None else args.step
        item = "default" if step_folder == folder else folder.name.split(_TEMPORARY)[0]
        state = _nested(args.item)
        beside = "tensorcask" if item == "default" else f"tensorcask-{item}"
        store, address = _markers.store_for(args.store, folder, step_folder.parent / beside)
        # Whether a step may be saved again is the manager's to say.
        options = {"overwrite": True, **args.options}
        options["user"] = {**(options.get("user") or {}), _ITEM: item, _FOLDER: numbered}

        def save() -> None:
            # Items have handlers and threads of their own, and may have one store by mistake.
            with _saving:
                other = _item_of(store, step)
                if other not in (None, item):
                    raise _native.ConflictError(f"{store.url}: step {step} holds item {other!r}; give {item!r} a store of its own")
                saved = store.save(state, step=step, **options)
            _markers.write(folder, address, step, saved.id)

        return [self._worker.submit(save)]

    def save(self, directory: Any, args: Save) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            for future in thread.submit(asyncio.run, self.async_save(directory, args)).result():
                future.result()

    def restore(self, directory: Any, args: Restore | None = None) -> Any:
        args = args or Restore()
        folder = Path(os.fspath(directory))
        snapshot = _markers.snapshot_in(folder, args.store)
        if snapshot is None:
            raise _native.NotFoundError(f"{folder} has no {_markers.NAME}: not saved by tensorcask.orbax")
        nested, _ = snapshot.structure()
        if args.item is None:
            return snapshot.load(framework="numpy")
        return jax.tree_util.tree_map_with_path(lambda path, like: _leaf(snapshot, nested, _keys(path), like), args.item)

    def finalize(self, directory: Any) -> None:
        """Nothing: the snapshot is committed."""

    def close(self) -> None:
        self._worker.shutdown()


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Saves a tree. ``options``: those of :meth:`tensorcask.Store.save`. ``step``: where the folder's name has none."""

    item: Any
    store: Store | str | None = None
    step: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restores a tree like ``item``, or what there is."""

    item: Any = None
    store: Store | str | None = None


def tidy(manager: Any, store: Store | str | None = None) -> list[int]:
    """Forgets the snapshots of steps that a manager has deleted; gives those steps. Those of its newest step and of newer ones stay, and
    so does what was not saved by way of Orbax. ``store``: another than that of the item ``default``."""
    kept = set(manager.all_steps())
    found = _open(store if store is not None else Path(os.fspath(manager.directory)) / "tensorcask", None)
    numbered = [(info.step, info.user[_FOLDER]) for info in found.snapshots() if isinstance(info.user.get(_FOLDER), int) and not info.pinned]
    gone = [step for step, folder in numbered if folder not in kept and folder < max(kept, default=0)]
    if gone:
        found.forget(gone)
    return gone


def _item_of(store: Store, step: int) -> str | None:
    """The item whose snapshot a store has at a step."""
    try:
        return store.snapshot(step).user.get(_ITEM)
    except _native.NotFoundError:
        return None


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    """The way to a leaf, in text."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _nested(tree: Any) -> dict[str, Any]:
    """A tree as nested dicts, its arrays copied: their memory may be given to a later step of the training."""
    state: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = _keys(path)
        at = state
        for key in keys[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise ValueError(f"{'/'.join(keys)}: the way to it leads through a leaf")
        if (keys or ("value",))[-1] in at:
            raise ValueError(f"{'/'.join(keys)}: two leaves have this name")
        at[(keys or ("value",))[-1]] = _copied(leaf, "/".join(keys))
    return state


def _copied(leaf: Any, name: str) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf
    if not leaf.is_fully_addressable:
        raise _native.UnsupportedError(f"{name}: an array of several processes; one process at a time can save")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: dtype {leaf.dtype} cannot be stored; for keys of random numbers, save jax.random.key_data(key)")
    return np.array(leaf)


def _leaf(snapshot: Snapshot, nested: Any, keys: tuple[str, ...], like: Any) -> Any:
    name = "/".join(keys)
    found = nested
    for key in keys or ("value",):
        if not isinstance(found, dict) or key not in found:
            raise _native.NotFoundError(f"step {snapshot.step} has no `{name}`")
        found = found[key]
    is_array = isinstance(like, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))
    if isinstance(found, dict) or is_array and not isinstance(found, TensorInfo):
        raise _native.InvalidArgumentError(f"`{name}`: a {type(found).__name__} is stored, a {type(like).__name__} is asked for")
    if not isinstance(found, TensorInfo):
        return found
    if not is_array:
        return snapshot.load(tensors=[found.name], framework="numpy")[found.name]
    if tuple(like.shape) != found.shape:
        raise _native.InvalidArgumentError(f"`{name}`: shape {list(found.shape)} is stored, {list(like.shape)} is asked for")
    pieces: dict[Any, Any] = {}

    def piece(index: tuple[slice, ...]) -> Any:
        key = tuple((part.start, part.stop) for part in index)
        if key not in pieces:
            pieces[key] = snapshot.load(slices={found.name: index}, framework="numpy")[found.name].astype(like.dtype, copy=False)
        return pieces[key]

    if isinstance(like, (np.ndarray, np.generic)):
        return piece(())
    sharding = like.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(tuple(like.shape), sharding, piece)


def _step_of(folder: Path, given: int | None) -> tuple[Path, int]:
    """The folder of a step, which is this folder or its parent, and the step in its name."""
    # While Orbax writes a step, the names of its folder and of an item's folder may have a suffix.
    candidates = [path for path in (folder.parent, folder) if _TEMPORARY in path.name]
    if not candidates:
        candidates = [folder.parent if step_in(folder) is None and step_in(folder.parent) is not None else folder]
    name = candidates[0].name.split(_TEMPORARY)[0]
    step = step_in(name)
    if step is None:
        step = step_of(name, "Pass Save(..., step=)") if given is None else given
    return candidates[0], step
