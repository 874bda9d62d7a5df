"""Orbax checkpoints in a tensorcask store, for the ``CheckpointManager`` of its API v0. For API v1, see :mod:`tensorcask.orbax_v1`.

    with orbax.checkpoint.CheckpointManager("/ckpt") as manager:
        manager.save(step, args=tensorcask.orbax.Save(tree))
        tree = manager.restore(step, args=tensorcask.orbax.Restore(tree))

Through the engine, a save takes one copy in shared memory, arrays of several processes are saved, and a killed job restores from memory::

    engine = tensorcask.Engine("s3://bucket/run42", rank=jax.process_index(), world=jax.process_count())
    manager.save(step, args=tensorcask.orbax.Save(tree, engine=engine))
    tree = manager.restore(step, args=tensorcask.orbax.Restore(tree, engine=engine))

Without the engine, a save copies the arrays and returns. The manager waits for the upload, as it does with its own formats. The store is
``<folder of the manager>/tensorcask``, unless ``store`` names another. The folder of a step holds a marker that names
the snapshot. ``Restore(tree)`` returns a tree of this form. Each array gets the devices and the sharding of its
counterpart in ``tree`` (``jax.ShapeDtypeStruct`` is enough), and this process reads only the parts that it holds.
``Restore()`` returns nested dicts of numpy arrays. Their keys are text: positions in lists, and names of fields.

The name of a step's folder is the step: ``100``, ``step_100``, ``checkpoint_100`` and so on. With another
``step_prefix``, pass ``Save(..., step=)``.

Each item of a ``Composite`` has its own store: ``tensorcask`` for ``default`` and ``state``, and ``tensorcask-<name>`` for other
items. Without an engine, a tree with arrays of several processes is refused. An engine takes one item. A manager that
deletes old steps leaves their snapshots; :func:`tidy` forgets them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.future

from . import _markers, _native
from ._reports import TensorInfo
from ._shard import Shard, Shards
from ._snapshot import Snapshot
from ._steps import step_in, step_of
from ._store import Store, open_store
from .engine import Engine

__all__ = ["Handler", "Restore", "Save", "tidy"]

_TEMPORARY = ".orbax-checkpoint-tmp"
# User facts of a snapshot: its item, and the step of the folder that names it.
_ITEM, _FOLDER = "orbax_item", "orbax_step"
# Items whose store has no suffix: the names that APIs v0 and v1 give to the only item.
_DEFAULT = "default"
_MAIN_ITEMS = (_DEFAULT, "state")
# A leaf that another process saves.
_ABSENT = object()
_saving = threading.Lock()


class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Orbax handler of :class:`Save` and :class:`Restore`."""

    def __init__(self) -> None:
        # One thread, because a delta needs the save before it.
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "tensorcask-orbax")

    async def async_save(self, directory: Any, args: Save) -> list[Any]:
        folder = Path(os.fspath(directory))
        finish = _begin_save(folder, args)

        async def finish_in_turn() -> None:
            await asyncio.wrap_future(self._worker.submit(finish))

        # Orbax makes the folder in the background, and signals when it is there.
        return [orbax.checkpoint.future.CommitFutureAwaitingContractedSignals(finish_in_turn(), name="tensorcask-orbax")]

    def save(self, directory: Any, args: Save) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            for future in thread.submit(asyncio.run, self.async_save(directory, args)).result():
                future.result()

    def restore(self, directory: Any, args: Restore | None = None) -> Any:
        return _restore(Path(os.fspath(directory)), args or Restore())

    def finalize(self, directory: Any) -> None:
        """Does nothing: the snapshot is committed."""

    def close(self) -> None:
        self._worker.shutdown()


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Saves a tree. ``options``: those of :meth:`tensorcask.Store.save`. ``step``: needed if the folder's name is not a
    step. ``engine``: saves through this engine, which has the store and its own options."""

    item: Any
    store: Store | str | None = None
    step: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Engine | None = None


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restores a tree of the form of ``item``; without ``item``, the whole tree as nested dicts. ``engine``: restores from the nearest
    place; it needs ``item``."""

    item: Any = None
    store: Store | str | None = None
    engine: Engine | None = None


def tidy(manager: Any, store: Store | str | None = None) -> list[int]:
    """Forgets the snapshots of steps that a manager, or a ``Checkpointer`` of API v1, has deleted, and returns these steps.

    Snapshots of the manager's newest step and of newer steps stay, and so do snapshots that Orbax did not save.
    ``store``: the store to tidy; by default the store of the items ``default`` and ``state``.
    """
    kept = set(manager.all_steps()) if hasattr(manager, "all_steps") else {found.step for found in manager.checkpoints}
    found = open_store(store if store is not None else Path(os.fspath(manager.directory)) / "tensorcask", None)
    numbered = [(info.step, info.user[_FOLDER]) for info in found.snapshots() if isinstance(info.user.get(_FOLDER), int) and not info.pinned]
    gone = [step for step, folder in numbered if folder not in kept and folder < max(kept, default=0)]
    if gone:
        found.forget(gone)
    return gone


def _begin_save(folder: Path, args: Save) -> Callable[[], None]:
    """Copies the tree, and returns the rest of the save, which needs the folder to exist."""
    step_folder, numbered = _step_of(folder, args.step)
    step = numbered if args.step is None else args.step
    item = _DEFAULT if step_folder == folder else folder.name.split(_TEMPORARY)[0]
    if args.engine is not None:
        return _begin_save_through(args.engine, folder, step, args, {_ITEM: item, _FOLDER: numbered})
    state = _nested(args.item)
    # The manager decides whether a step may be saved again.
    options = {"overwrite": True, **args.options}
    options["user"] = {**(options.get("user") or {}), _ITEM: item, _FOLDER: numbered}
    beside = "tensorcask" if item in _MAIN_ITEMS else f"tensorcask-{item}"
    store, address = _markers.store_for(args.store, folder, step_folder.parent / beside)

    def finish() -> None:
        # Each item has its own thread. Two items may share a store by mistake.
        with _saving:
            other = _item_of(store, step)
            if other not in (None, item):
                raise _native.ConflictError(f"{store.url}: step {step} holds item {other!r}. Pass another store for {item!r}")
            saved = store.save(state, step=step, **options)
        _markers.write(folder, address, step, saved.id)

    return finish


def _begin_save_through(engine: Engine, folder: Path, step: int, args: Save, user: dict[str, Any]) -> Callable[[], None]:
    if args.store is not None or args.options.keys() - {"user"}:
        raise TypeError("pass the store and the options of saves to tensorcask.Engine")
    engine.save(_nested(args.item, _parts), step=step, user={**(args.options.get("user") or {}), **user})

    def finish() -> None:
        waited = engine.wait("durable", step=step)
        if not waited.reached:
            raise _native.StorageError(f"step {step} did not get into {engine.store.url}: {waited.failures or waited.problem}")
        if engine.rank == 0:
            _markers.write(folder, _native.absolute_url(engine.store.url), step, engine.store.snapshot(step).id)

    return finish


def _restore(folder: Path, args: Restore) -> Any:
    if args.engine is not None:
        return _restore_through(args.engine, _markers.step_in(folder), args.item)
    snapshot = _markers.snapshot_in(folder, args.store)
    if snapshot is None:
        raise _native.NotFoundError(f"{folder} has no {_markers.NAME}, so tensorcask.orbax did not save it")
    nested, _ = snapshot.structure()
    if args.item is None:
        return snapshot.load(framework="numpy")
    return jax.tree_util.tree_map_with_path(lambda path, like: _leaf(snapshot, nested, _keys(path), like), args.item)


def _item_of(store: Store, step: int) -> str | None:
    """The item of a store's snapshot at a step."""
    try:
        return store.snapshot(step).user.get(_ITEM)
    except _native.NotFoundError:
        return None


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    """The path of a leaf, as text."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _nested(tree: Any, leaf_of: Callable[[Any, str], Any] | None = None) -> dict[str, Any]:
    """A tree as nested dicts, by default with copied arrays, because the training may reuse the memory of the originals."""
    state: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = _keys(path)
        at = state
        for key in keys[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise ValueError(f"{'/'.join(keys)}: a part of this path is a leaf itself. Rename one of the two")
        if (keys or ("value",))[-1] in at:
            raise ValueError(f"{'/'.join(keys)}: two leaves have this name. Rename one of them")
        made = (leaf_of or _copied)(leaf, "/".join(keys))
        if made is not _ABSENT:
            at[(keys or ("value",))[-1]] = made
    return state


def _parts(leaf: Any, name: str) -> Any:
    """The parts of an array that this process saves. Each part of an array is saved by one process."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(leaf) if jax.process_index() == 0 else _ABSENT
    if not isinstance(leaf, jax.Array):
        return leaf
    _check_dtype(leaf, name)
    if leaf.is_fully_addressable and jax.process_count() > 1:
        return np.asarray(leaf) if jax.process_index() == 0 else _ABSENT
    found = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return Shards(tuple(Shard(np.asarray(shard.data), leaf.shape, _offset(shard.index)) for shard in found)) if found else _ABSENT


def _restore_through(engine: Engine, step: int, tree: Any) -> Any:
    if tree is None:
        raise ValueError("a restore through an engine needs a tree: Restore(tree, engine=engine)")
    values = engine.restore(step, out={}, partial=True).state
    memory: dict[tuple[str, ...], dict[tuple[int, ...], np.ndarray[Any, Any]]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
            shape = tuple(leaf.shape)
            # Each part that this process holds, once.
            indices = [()] if isinstance(leaf, (np.ndarray, np.generic)) else _sharding(leaf).addressable_devices_indices_map(shape).values()
            extents = {_offset(index, len(shape)): _extent(index, shape) for index in indices}
            memory[_keys(path) or ("value",)] = {offset: np.empty(extent, leaf.dtype) for offset, extent in extents.items()}
    shapes = {_keys(path) or ("value",): tuple(np.shape(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    # A restore fills one part of each array.
    for number in range(max((len(parts) for parts in memory.values()), default=0)):
        out: dict[str, Any] = {}
        for keys, parts in memory.items():
            if number < len(parts):
                at = out
                for key in keys[:-1]:
                    at = at.setdefault(key, {})
                offset, data = list(parts.items())[number]
                at[keys[-1]] = Shard(data, shapes[keys], offset)
        engine.restore(step, out=out, partial=True)

    def leaf_of(path: Any, like: Any) -> Any:
        keys = _keys(path) or ("value",)
        if keys in memory:
            if isinstance(like, (np.ndarray, np.generic)):
                return memory[keys][(0,) * len(shapes[keys])]
            return jax.make_array_from_callback(shapes[keys], _sharding(like), lambda index: memory[keys][_offset(index, len(shapes[keys]))])
        found = values
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                raise _native.TemplateError(f"step {step} has no `{'/'.join(keys)}`")
            found = found[key]
        return found

    return jax.tree_util.tree_map_with_path(leaf_of, tree)


def _sharding(like: Any) -> Any:
    return like.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _offset(index: tuple[slice, ...] | None, axes: int = 0) -> tuple[int, ...]:
    index = index or (slice(None),) * axes
    return tuple(part.start or 0 for part in index)


def _extent(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = index or (slice(None),) * len(shape)
    return tuple(len(range(*part.indices(length))) for part, length in zip(index, shape, strict=True))


def _copied(leaf: Any, name: str) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf
    if not leaf.is_fully_addressable:
        raise _native.UnsupportedError(
            f"{name}: the array belongs to several processes, and only one process can save. Save through an engine"
        )
    _check_dtype(leaf, name)
    return np.array(leaf)


def _check_dtype(leaf: Any, name: str) -> None:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: dtype {leaf.dtype} cannot be stored. For a key of random numbers, save jax.random.key_data(key)")


def _leaf(snapshot: Snapshot, nested: Any, keys: tuple[str, ...], like: Any) -> Any:
    name = "/".join(keys)
    found = nested
    for key in keys or ("value",):
        if not isinstance(found, dict) or key not in found:
            raise _native.TemplateError(f"step {snapshot.step} has no `{name}`")
        found = found[key]
    is_array = isinstance(like, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))
    if isinstance(found, dict) or is_array and not isinstance(found, TensorInfo):
        raise _native.InvalidArgumentError(f"`{name}` is a {type(found).__name__} in the store, but a {type(like).__name__} is requested")
    if not isinstance(found, TensorInfo):
        return found
    if not is_array:
        return snapshot.load(tensors=[found.name], framework="numpy")[found.name]
    if tuple(like.shape) != found.shape:
        raise _native.InvalidArgumentError(f"`{name}` has shape {list(found.shape)} in the store, but {list(like.shape)} is requested")
    pieces: dict[Any, Any] = {}

    def piece(index: tuple[slice, ...] | None) -> Any:
        index = index or ()
        key = tuple((part.start, part.stop) for part in index)
        if key not in pieces:
            pieces[key] = snapshot.load(slices={found.name: index}, framework="numpy")[found.name].astype(like.dtype, copy=False)
        return pieces[key]

    if isinstance(like, (np.ndarray, np.generic)):
        return piece(())
    return jax.make_array_from_callback(tuple(like.shape), _sharding(like), piece)


def _step_of(folder: Path, given: int | None) -> tuple[Path, int]:
    """The folder of a step, which is this folder or its parent, and the step in its name."""
    # While Orbax writes a step, the names of its folder and of an item's folder may have a suffix.
    candidates = [path for path in (folder.parent, folder) if _TEMPORARY in path.name]
    if not candidates:
        candidates = [folder.parent if step_in(folder) is None and step_in(folder.parent) is not None else folder]
    name = candidates[0].name.split(_TEMPORARY)[0]
    step = step_in(name)
    if step is None:
        step = step_of(name, "Pass step= to Save or State") if given is None else given
    return candidates[0], step
