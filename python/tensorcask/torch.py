"""A tensorcask store for ``torch.distributed.checkpoint`` (DCP).

    store = tensorcask.Store("s3://bucket/run42")
    dcp.async_save(state, checkpoint_id="step-100", storage_writer=store.writer())
    dcp.load(state, checkpoint_id="step-100", storage_reader=store.reader())

All ranks save one snapshot. Each rank uploads its shards, and the coordinator commits the snapshot of all ranks, or
none. Another number of ranks can load the snapshot, with other placements. :func:`tensorcask.load` loads it as a whole.
Values that are not tensors are stored without pickle (``spec/tree.md``).

The last part of ``checkpoint_id`` names the training step: ``100``, ``step-100``, ``step_100``, ``step=100`` or
``global_step100`` (also ``iter``, ``iteration``, ``checkpoint`` and ``ckpt``). Any other name is an error, because two
names that are taken for one step would replace each other. Pass ``step=`` to ``store.writer()`` and ``store.reader()``
to use other names.

DCP turns the keys of mappings into text: it stores a state ``{7: tensor}`` as ``{"7": tensor}``.
Loading into ``{7: tensor}`` fills key 7. :func:`tensorcask.load` returns the text keys. ``Optimizer.load_state_dict``
ignores moments under text keys, so pass states of ``get_state_dict`` and ``set_state_dict``, whose keys are names.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from . import _dcp_paths, _frameworks, _native, _planners, _process_stores, _staging, _state
from ._changed_rows import Claim, Rows, RowSource, save_claimed
from ._dcp_reader import Reader, doubled, set_version
from ._errors import InvalidTypeError
from ._handle import StoreHandle as Store
from ._options import BaseCache, Check, Objective, Policy, check_step, user_json, writer_options
from ._snapshot import Snapshot
from ._state import OnUnsupported, check_on_unsupported, path_text
from ._steps import step_in, step_of
from ._touched_rows import TouchedRows

__all__ = ["Reader", "TouchedRows", "Writer", "register", "unregister"]

_log = logging.getLogger("tensorcask")
_TREE = "tc.tree"


@dataclass(frozen=True)
class _Task:
    """Instructions of the coordinator to one rank of a save."""

    step: int
    parent: str | None
    rank: int
    world: int


@dataclass(frozen=True)
class _Upload:
    """The casks that a rank has uploaded, and its part of the state's structure, if it has one."""

    receipt: bytes
    tree: bytes | None


class Writer(StorageWriter):  # type: ignore[misc]
    """A ``storage_writer`` for ``dcp.save`` and ``dcp.async_save``. It is also the stager of ``async_save``.

    ``step``: the training step; without it, ``checkpoint_id`` names the step. ``policy``, ``metadata``, ``base_cache``,
    ``verify_after_encode``, ``objective``, ``codecs``, ``roles``, ``precision``, ``statistics`` and ``check`` are those of :meth:`tensorcask.Store.save`.
    ``user`` may also be a function of the step.

    ``on_unsupported``: what to do with a value that cannot be stored: ``"error"``, ``"skip"``, or a function of its
    path and the value that returns a value to store instead. A function cannot replace the shards of a distributed
    tensor. ``dcp.save`` plans a save before the writer sees the state, so nested tensors and lazy parameters are an
    error there; ``dcp.async_save`` asks ``on_unsupported`` about them.

    ``overwrite``: whether to replace a step that is saved already. PyTorch's own ``FileSystemWriter`` replaces by
    default, with a warning that this will change. Here the default is a ``ConflictError`` on every rank, and the old
    snapshot stays.

    An asynchronous save stores the state as of the call: tensors may change as soon as ``async_save`` returns.
    ``result()`` of what ``async_save`` returns raises the error of a failed save, on every rank. The writer also logs a
    warning when the next save begins. In a job of one rank, the call after ``max_failed_saves`` failures in a row
    raises an error. In a job of several ranks it does not, because the other ranks would wait for the one that raised.
    A save in a process of its own (``AsyncCheckpointerType.PROCESS``) cannot report to the writer. ``saved`` is the
    result of the last save, on the coordinator.

    ``cache_staged_state_dict``: whether the memory of a stage is kept for later saves, as PyTorch's stagers do with
    the same argument. Memory is reused only after its save has ended. False frees it after each save.

    ``after_commit``: a function of the :class:`tensorcask.Snapshot`, called on the coordinator after the commit. An
    export of the weights to safetensors belongs here. If the function fails, the step stays saved, and the error is
    raised on every rank.

    ``changed_rows``: a :class:`TouchedRows`, which names the rows of whole tables that changed. A save in a process of
    its own compares all rows.

    >>> import tensorcask
    >>> import torch.distributed.checkpoint as dcp
    >>> store = tensorcask.Store("memory://dcp-writer-example")
    >>> writer = store.writer(policy="consecutive", after_commit=lambda snapshot: print("saved step", snapshot.step))
    >>> for step in (1, 2):
    ...     _ = dcp.async_save({"w": torch.full((2,), step)}, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True).result()
    saved step 1
    saved step 2
    >>> writer.saved.kind
    'delta'
    """

    _synchronize_after_execute: bool = False

    def __init__(
        self,
        store: Store,
        *,
        step: int | None = None,
        policy: Policy = "adaptive",
        user: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        metadata: Mapping[str, str] | None = None,
        base_cache: BaseCache = "memory",
        verify_after_encode: bool = True,
        objective: Objective = "balanced",
        codecs: str | Sequence[str] = (),
        roles: str | Sequence[str] = (),
        precision: str | Sequence[str] = "lossless",
        statistics: bool = False,
        check: Check = None,
        overwrite: bool = False,
        on_unsupported: OnUnsupported = None,
        max_failed_saves: int = 3,
        cache_staged_state_dict: bool = True,
        after_commit: Callable[[Snapshot], object] | None = None,
        changed_rows: RowSource | None = None,
    ) -> None:
        check_on_unsupported(on_unsupported)
        if not isinstance(changed_rows, RowSource | None):
            raise InvalidTypeError(f"changed_rows: {changed_rows!r}; use a tensorcask.torch.TouchedRows")
        self._store = store
        self._given_step = None if step is None else check_step(step)
        names = {"codecs": codecs, "roles": roles}
        self._options = writer_options(policy, base_cache, verify_after_encode, objective, precision, statistics, check, **names)
        self._user = user
        self._metadata = dict(metadata or {})
        self._overwrite = overwrite
        self._on_unsupported: OnUnsupported = on_unsupported
        self._max_failed_saves = max_failed_saves
        self._keeps_stages = cache_staged_state_dict
        self._after_commit = after_commit
        self._forget()
        self._changed_rows = changed_rows

    def _forget(self) -> None:
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self.saved: _native.Saved | None = None
        # Id of the snapshot, as DCP names it.
        self.save_id: str | None = None
        self._is_coordinator = False
        self._world = 1
        self._failures: list[BaseException] = []
        # Stall of the save that is under way, and of the stage before this writer was sent to another process.
        self._stall_seconds: float | None = None
        self._sent_stall: float | None = None
        self._last_stall: float | None = None
        self._arenas: list[_staging.Arena] = []
        # Path of a staged tensor that cannot be sent to another process, and that of one that was.
        self._described: str | None = None
        self._sent_described: str | None = None
        # Paths that the planner of the save leaves out, and that its lists need.
        self._empty_mappings: list[tuple[Any, ...]] = []
        self._left_out: list[tuple[Any, ...]] = []
        # Belongs to the process of the training.
        self._changed_rows = None

    def __getstate__(self) -> dict[str, Any]:
        fresh = ("saved", "_described", "_is_coordinator", "_world", "_failures", "_stall_seconds", "_sent_stall", "_last_stall", "_arenas", "_changed_rows")
        kept = {name: value for name, value in self.__dict__.items() if name not in fresh}
        return kept | {"_sent_stall": self._last_stall, "_sent_described": self._described}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        for name, value in state.items():
            setattr(self, name, value)

    def _step(self) -> int:
        if self._given_step is not None:
            return self._given_step
        if self.checkpoint_id is None:
            raise ValueError("this save has no training step. Pass checkpoint_id='step-100', or step= to store.writer()")
        return step_of(self.checkpoint_id, "Rename it, or pass step= to store.writer()")

    # DCP calls these methods in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_id, self.save_id = checkpoint_id, None
        self._step()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise _native.UnsupportedError("use_collectives=False: one rank has to commit for all ranks. Save with collectives")
        self._is_coordinator = is_coordinator
        if self._sent_described is not None:
            raise _native.UnsupportedError(
                f"{self._sent_described}: a tensor that tells DCP by its attributes which part it is. PyTorch loses them on the way to another "
                "process. Use async_checkpointer_type=AsyncCheckpointerType.THREAD"
            )
        state, planner = _planners.saving_call()
        _planners.check_plannable(state, self._on_unsupported)
        self._empty_mappings = _planners.empty_mappings(state, planner)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        step, self._world = self._step(), len(plans)
        if all(getattr(plan, "usable", True) for plan in plans):
            # Otherwise the plans are those of an earlier save.
            self._left_out = _planners.left_out(_planners.saving_call()[1], plans, self._empty_mappings)
        store = _process_stores.shared(self._store)
        parent = self._noting(
            lambda: store.with_writer(self._options, lambda writer: writer.next_parent(step, self._overwrite))
        )
        tasks = [_Task(step, parent, rank, len(plans)) for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if isinstance(plan.storage_data, _Task):
            self._world = plan.storage_data.world
        uploaded = self._noting(lambda: self._upload(plan, planner))
        if not self._is_coordinator:
            self._failures.clear()
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex("tc.receipt"), len(uploaded.receipt), uploaded)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        step = self._step()
        uploads: list[_Upload] = [result.storage_data for of_rank in results for result in of_rank]
        receipts = [uploaded.receipt for uploaded in uploads]
        self._noting(lambda: _check_loadable(step, uploads))
        user = user_json(self._user(step) if callable(self._user) else self._user)
        store = _process_stores.shared(self._store)
        stall, self._stall_seconds = self._stall_seconds, None

        def commit(writer: _native.Writer) -> _native.Saved:
            saved = writer.commit(step, receipts, user, self._metadata, self._overwrite)
            if stall is not None:
                # The training went on while the ranks uploaded.
                writer.note_stall(stall)
            return saved

        saved: _native.Saved = self._noting(lambda: store.with_writer(self._options, commit))
        self.saved, self.save_id = saved, saved.id
        set_version(metadata)
        metadata.storage_meta = self.storage_meta()
        if self._after_commit is not None:
            after_commit = self._after_commit
            self._noting(lambda: _call_after_commit(after_commit, store.snapshot(step)))
        self._failures.clear()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_in(checkpoint_id) is not None

    def _upload(self, plan: SavePlan, planner: SavePlanner) -> _Upload:
        task = plan.storage_data
        if not isinstance(task, _Task):
            raise _native.UnsupportedError("the planner dropped storage_data of its plan. Keep storage_data as the writer set it")
        # A plan from the planner's cache names the parent of an earlier save. Store this snapshot as a base.
        parent = task.parent if task.step == self._step() else None
        _check_values(planner, self._on_unsupported)
        tensors = []
        nested: dict[Any, Any] = {}
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        contiguous: dict[Any, Any] = {}
        keep = []
        found: list[torch.Tensor] = []
        whole: dict[str, torch.Tensor] = {}
        for item in plan.items:
            name = item.index.fqn
            path = paths.get(name, (name,))
            resolved: Any = _planners.value_of(item, planner) if item.type == WriteItemType.BYTE_IO else planner.resolve_data(item)
            if item.type == WriteItemType.TENSOR and _frameworks.inner_tensors(resolved) is not None:
                # Stored as by `Store.save`: as a mapping of its inner tensors.
                _set(nested, path, resolved)
                continue
            value = _screened(item, resolved, path_text(path), self._on_unsupported)
            if value is _staging.SKIPPED:
                # A list keeps its length.
                if len(path) > 1 and isinstance(path[-1], int):
                    _set(nested, path, None)
                continue
            if item.type == WriteItemType.BYTE_IO or value is not resolved:
                _set(nested, path, value)
                continue
            tensor: torch.Tensor = resolved.detach()
            found.append(tensor)
            lent = _frameworks.lend(tensor, path_text(path), contiguous)
            data: Any = item.tensor_data
            if tuple(tensor.shape) != tuple(data.chunk.sizes):
                planned = list(data.chunk.sizes)
                raise ValueError(f"{path_text(path)}: a shard has shape {list(tensor.shape)}, but {planned} in the plan")
            double = doubled(lent.dtype)
            shape, offset = double(data.size), double(data.chunk.offsets)
            tensors.append((str(name), lent.dtype, shape, offset, lent.shape, lent.buffer))
            keep.append(lent)
            if item.type == WriteItemType.TENSOR:
                whole[str(name)] = tensor
            _set(nested, path, _state.Reference(str(name), "torch"))
        claim, rows_of = _claim_of(whole, self._arenas, self._changed_rows, (self._store.key, self._options))
        self._stall_seconds = self._stall_of(found)
        if not self._keeps_stages:
            self._arenas = [arena for arena in self._arenas if not any(arena.holds(tensor) for tensor in found)]
        for path in self._empty_mappings:
            _set(nested, path, {}, replace=False)
        for path in self._left_out if self._is_coordinator else ():
            _set(nested, path, None, replace=False)
        flat = _state.flatten(nested, self._on_unsupported)
        for name, lent in flat.tensors.items():
            extent = list(lent.shape)
            tensors.append((name, lent.dtype, extent, [0] * len(extent), lent.shape, lent.buffer))
        blobs = list(flat.blobs.items())
        tree = _native.encode_tree(flat.nodes) if nested else None
        if tree is not None:
            blobs.append((_TREE, tree))
        store = _process_stores.shared(self._store)
        writer = _process_stores.rank_writer(store, task.rank, task.world, self._options)

        def save(rows: Rows) -> _Upload:
            return _Upload(writer.save(task.rank, self._step(), parent, tensors, blobs, rows), tree)

        try:
            if self._changed_rows is None or claim is None:
                return save({})
            return save_claimed(self._changed_rows, claim, save, rows_of)
        except _native.Error:
            raise
        except BaseException:
            _process_stores.forget_rank_writers()
            raise

    def _stall_of(self, tensors: Sequence[torch.Tensor]) -> float | None:
        """Time for which staging these tensors stopped the training. None if they were not staged, as in ``dcp.save``."""
        if self._sent_stall is not None:
            # A writer in another process gets one state.
            sent, self._sent_stall = self._sent_stall, None
            return sent
        arenas = (arena for arena in self._arenas if any(arena.holds(tensor) for tensor in tensors))
        return next((arena.stall_seconds for arena in arenas), None)

    # The stager of `async_save`.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, in memory that later saves reuse."""
        if self._failures:
            last = self._failures[-1]
            if self._world == 1 and len(self._failures) >= self._max_failed_saves:
                failures, self._failures = len(self._failures), []
                raise RuntimeError(f"{failures} saves in a row have failed. The last error: {last}") from last
            _log.warning("a save in the background has failed: %s", last)
        begun = time.monotonic()
        stager = _staging.Stager(state_dict, self._on_unsupported)
        self._described = stager.described
        arena = _free_arena(self._arenas, stager.sizes)
        if arena is None:
            self._arenas = [arena for arena in self._arenas if not arena.is_free()]
            arena = _staging.Arena(stager.sizes)
            self._arenas.append(arena)
        if self._changed_rows is not None:
            arena.claim = self._changed_rows.claim((self._store.key, self._options), stager.sources(arena))
        staged: dict[str, Any] = stager.copy_into(arena)
        self._last_stall = arena.stall_seconds = time.monotonic() - begun
        return staged

    def synchronize_staging(self) -> None:
        """Does nothing: staging is complete when ``stage`` returns."""

    def close(self) -> None:
        """Frees the memory of stages."""
        self._arenas = []

    def _noting(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            self._failures.append(error)
            raise


def register(*stores: Store | str | os.PathLike[str], **options: Any) -> None:
    """Lets DCP find stores by path: ``dcp.load(state, checkpoint_id="s3://bucket/run42/step-100")``.

    Call it once in each process, before ``dcp.save`` and ``dcp.load`` without ``storage_writer`` and
    ``storage_reader``. DCP then uses tensorcask for a ``checkpoint_id`` in a store that exists, or in one of
    ``stores``, which need not exist yet. ``options`` are those of :class:`Writer`, for these stores. The id of a load
    may be the store itself, for the newest step. All other ids are left to PyTorch.

    PyTorch has no interface for this, so its function that chooses a storage is replaced. :func:`unregister` undoes it.

    >>> import torch.distributed.checkpoint as dcp
    >>> register("memory://register-example", policy="full")
    >>> _ = dcp.save({"w": torch.ones(2)}, checkpoint_id="memory://register-example/step-100", no_dist=True)
    >>> state = {"w": torch.zeros(2)}
    >>> dcp.load(state, checkpoint_id="memory://register-example", no_dist=True)
    >>> state["w"]
    tensor([1., 1.])
    >>> unregister()
    """
    handles = [store if isinstance(store, Store) else Store(store) for store in stores]
    for store in handles:
        # Reports unknown options now, and not at the first save.
        Writer(store, **options)
    _detection.add(handles, options)
    _dcp_paths.install(_storage_for)


def unregister() -> None:
    """Undoes :func:`register`."""
    global _detection
    _detection = _dcp_paths.Detection()
    _dcp_paths.uninstall()


_detection = _dcp_paths.Detection()


def _storage_for(checkpoint_id: str | os.PathLike[str], reader: bool) -> Reader | Writer | None:
    chosen = _detection.choose(checkpoint_id)
    if chosen is None:
        return None
    if reader:
        return Reader(chosen.store, step="latest" if chosen.is_whole_store else None)
    if chosen.is_whole_store:
        raise ValueError(f"{checkpoint_id} is a store. Name the step to save: {os.fsdecode(checkpoint_id)}/step-100")
    return Writer(chosen.store, **chosen.options)


def _call_after_commit(after_commit: Callable[[Snapshot], object], snapshot: Snapshot) -> None:
    try:
        after_commit(snapshot)
    except Exception as error:
        raise RuntimeError(f"step {snapshot.step} is saved, but after_commit failed: {error}") from error


def _claim_of(
    tensors: Mapping[str, torch.Tensor], arenas: Sequence[_staging.Arena], source: RowSource | None, key: Any
) -> tuple[Claim | None, dict[str, str]]:
    """The changed rows of tensors, claimed when they were staged or, if they were not, now; and the names of the tensors
    by their names in the claim."""
    if source is None:
        return None, {}
    arena = next((arena for arena in arenas if any(arena.holds(tensor) for tensor in tensors.values())), None)
    if arena is not None:
        return arena.claim, {str(tensor.data_ptr()): name for name, tensor in tensors.items()}
    return source.claim(key, tensors), {name: name for name in tensors}


def _check_values(planner: SavePlanner, on_unsupported: OnUnsupported) -> None:
    """Refuses sharded tensors inside values, on every rank and before any rank uploads: only one rank gets to store
    a value."""
    planned = getattr(planner, "state_dict", None)
    if on_unsupported not in (None, "error") or not isinstance(planned, dict):
        return
    paths = getattr(planner, "mappings", None) or {}
    for name, value in planned.items():
        if not isinstance(value, torch.Tensor):
            _staging.screen(value, "error", _staging.check_value, path_text(paths.get(name, (name,))))


def _screened(item: Any, value: Any, path: str, on_unsupported: OnUnsupported) -> Any:
    """Returns the value as it is stored, after the check of its type."""
    if item.type == WriteItemType.BYTE_IO:
        return _staging.screen(value, on_unsupported, _staging.check_value, path)
    if item.type == WriteItemType.SHARD and callable(on_unsupported):
        on_unsupported = "error"
    return _staging.screen(value, on_unsupported, _staging.check_stored, path)


def _free_arena(arenas: list[_staging.Arena], sizes: tuple[int, ...]) -> _staging.Arena | None:
    """Returns an arena of these sizes that no save uses."""
    # The thread of a finished save may hold its tensors for a moment. Fresh memory costs more than this moment.
    for _ in range(20):
        found = next((arena for arena in arenas if arena.sizes == sizes and arena.is_free()), None)
        if found is not None or not arenas:
            return found
        time.sleep(0.001)
    return None


def _set(nested: dict[Any, Any], path: tuple[Any, ...], value: Any, *, replace: bool = True) -> None:
    """Puts a value at the path where PyTorch found it. Integers after the first key are positions in lists."""
    for key, after in zip(path[:-1], path[1:], strict=True):
        nested = nested.setdefault(key, _state.Part() if isinstance(after, int) else {})
    if replace or path[-1] not in nested:
        nested[path[-1]] = value


def _check_loadable(step: int, uploads: Sequence[_Upload]) -> None:
    """Refuses a state whose parts make no whole, before it is committed."""
    trees = [_native.decode_tree(uploaded.tree) for uploaded in uploads if uploaded.tree is not None]
    if not trees:
        return

    def leaf(kind: str, value: Any) -> Any:
        return (kind, *value) if kind == "tensor" else (kind, value)

    differing: list[str] = []
    _state.merge([_state.build(tree, leaf) for tree in trees], differing.append)
    _state.warn_of_differences(step, differing)
