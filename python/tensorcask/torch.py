"""``torch.distributed.checkpoint`` in a tensorcask store.

    store = tensorcask.Store("s3://bucket/run42")
    dcp.async_save(state, checkpoint_id="step-100", storage_writer=store.writer())
    dcp.load(state, checkpoint_id="step-100", storage_reader=store.reader())

All ranks save one snapshot: each uploads its shards, and the coordinator commits them together, or nothing. It may be loaded on
another number of ranks and with other placements, by :func:`tensorcask.load` as a whole, or by any other tool of this project.
Values that are no tensors are stored without pickle (``spec/tree.md``).
"""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from . import _frameworks, _native, _state
from ._options import BaseCache, Framework, Objective, Policy, Step, WriterOptions, check_step, user_json, writer_options
from ._handle import StoreHandle as Store
from ._reports import TensorInfo
from ._snapshot import Snapshot

__all__ = ["Reader", "Writer"]

_log = logging.getLogger("tensorcask")
_TREE = "tc.tree"


def step_of(checkpoint_id: str | os.PathLike[str] | None) -> int | None:
    """The step that a checkpoint id names: its last integer."""
    if checkpoint_id is None:
        return None
    numbers: list[str] = re.findall(r"\d+", os.fspath(checkpoint_id))
    if not numbers:
        raise ValueError(f"checkpoint_id {os.fspath(checkpoint_id)!r} has no number that could be the step; pass step=")
    return int(numbers[-1])


@dataclass(frozen=True)
class _Task:
    """What the coordinator tells each rank of a save."""

    step: int
    parent: str | None
    rank: int
    world: int


class Writer(StorageWriter):  # type: ignore[misc]
    """A ``storage_writer`` for ``dcp.save`` and ``dcp.async_save``, which uses it as its stager too.

    The step is the last integer of ``checkpoint_id``; ``step`` overrides it. ``policy``, ``user``, ``metadata``, ``base_cache``,
    ``verify_after_encode``, ``objective`` and ``precision`` are those of :meth:`tensorcask.Store.save`; ``user`` may be a function
    of the step. ``overwrite``: whether a step that is saved already is replaced, as PyTorch's own writer does by default; without it, that is
    a ``ConflictError``.

    What an asynchronous save stores is the state as it was staged: tensors may change as soon as ``async_save`` has returned. A
    save that failed in the background is a warning when the next is staged; after ``max_failed_saves`` in a row it is raised
    there. In a job of several ranks it stays a warning, on the ranks that know of it, because one that raised alone would leave
    the others waiting for it; and a save in a process of its own (``AsyncCheckpointerType.PROCESS``) cannot tell the writer. In
    both, look at what ``async_save`` returns: its ``result()`` raises on every rank. The result of the last save is ``saved``, on
    the coordinator, but for a process of its own.
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
        precision: str | Sequence[str] = "lossless",
        overwrite: bool = False,
        max_failed_saves: int = 3,
    ) -> None:
        self._store = store
        self._given_step = None if step is None else check_step(step)
        self._options = writer_options(policy, base_cache, verify_after_encode, objective, precision)
        self._user = user
        self._metadata = dict(metadata or {})
        self._overwrite = overwrite
        self._max_failed_saves = max_failed_saves
        self._forget()

    def _forget(self) -> None:
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self.saved: _native.Saved | None = None
        self._is_coordinator = False
        self._world = 1
        self._failures: list[BaseException] = []
        self._arenas: list[_Arena] = []

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_store", "_given_step", "_options", "_user", "_metadata", "_overwrite", "_max_failed_saves", "checkpoint_id")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self.__dict__.update(state)

    def _step(self) -> int:
        step = self._given_step if self._given_step is not None else step_of(self.checkpoint_id)
        if step is None:
            raise ValueError("pass checkpoint_id= with the step as its last number, or step= to store.writer()")
        return step

    # What DCP calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_id = checkpoint_id
        self._step()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise _native.UnsupportedError("use_collectives=False: one rank has to commit for all of them")
        self._is_coordinator = is_coordinator

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        step, self._world = self._step(), len(plans)
        store = _shared(self._store)
        parent = self._noting(
            lambda: store.with_writer(self._options, lambda writer: writer.next_parent(step, self._overwrite))
        )
        tasks = [_Task(step, parent, rank, len(plans)) for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if isinstance(plan.storage_data, _Task):
            self._world = plan.storage_data.world
        receipt = self._noting(lambda: self._upload(plan, planner))
        if not self._is_coordinator:
            self._failures.clear()
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex("tc.receipt"), len(receipt), receipt)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        step = self._step()
        receipts = [result.storage_data for of_rank in results for result in of_rank]
        user = user_json(self._user(step) if callable(self._user) else self._user)
        store = _shared(self._store)
        self.saved = self._noting(
            lambda: store.with_writer(
                self._options, lambda writer: writer.commit(step, receipts, user, self._metadata, self._overwrite)
            )
        )
        self._failures.clear()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(re.search(r"\d", os.fspath(checkpoint_id)))

    def _upload(self, plan: SavePlan, planner: SavePlanner) -> bytes:
        task = plan.storage_data
        if not isinstance(task, _Task):
            raise _native.UnsupportedError("the planner lost what the coordinator said; do not replace storage_data of plans")
        # A plan that the planner had cached names the parent of an earlier save: store this one whole.
        parent = task.parent if task.step == self._step() else None
        tensors = []
        nested: dict[Any, Any] = {}
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        contiguous: dict[Any, Any] = {}
        keep = []
        for item in plan.items:
            name = item.index.fqn
            path = paths.get(name, (name,))
            if item.type == WriteItemType.BYTE_IO:
                _set(nested, path, _value(item, planner))
                continue
            tensor = planner.resolve_data(item).detach()
            lent = _frameworks.lend(tensor, f"state, `{name}`", contiguous)
            data = item.tensor_data
            if tuple(tensor.shape) != tuple(data.chunk.sizes):
                raise ValueError(f"`{name}`: a shard of shape {list(tensor.shape)}, planned with {list(data.chunk.sizes)}")
            double = _doubled(lent.dtype)
            shape, offset = double(data.size), double(data.chunk.offsets)
            tensors.append((name, lent.dtype, shape, offset, lent.shape, lent.buffer))
            keep.append(lent)
            _set(nested, path, _state.Reference(name, "torch"))
        flat = _state.flatten(nested)
        for name, lent in flat.tensors.items():
            whole = list(lent.shape)
            tensors.append((name, lent.dtype, whole, [0] * len(whole), lent.shape, lent.buffer))
        blobs = list(flat.blobs.items())
        if nested:
            blobs.append((_TREE, _native.encode_tree(flat.nodes)))
        store = _shared(self._store)
        writer = _rank_writer(store, task.rank, task.world, self._options)
        try:
            return writer.save(task.rank, self._step(), parent, tensors, blobs)
        except _native.Error:
            raise
        except BaseException:
            _rank_writers.clear()
            raise

    # The stager of `async_save`.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, in memory that is used again and again."""
        if self._failures:
            last = self._failures[-1]
            if self._world == 1 and len(self._failures) >= self._max_failed_saves:
                failures, self._failures = len(self._failures), []
                raise RuntimeError(f"{failures} saves in a row have failed; the last with: {last}") from last
            _log.warning("a save in the background has failed: %s", last)
        stager = _Stager(state_dict)
        arena = self._free_arena(stager.sizes)
        if arena is None:
            self._arenas = [arena for arena in self._arenas if not arena.is_free()]
            arena = _Arena(stager.sizes)
            self._arenas.append(arena)
        staged: dict[str, Any] = stager.copy_into(arena)
        return staged

    def _free_arena(self, sizes: tuple[int, ...]) -> _Arena | None:
        # The thread of a save that is over may hold its tensors for a moment still; fresh memory would cost more than that moment.
        for _ in range(20):
            found = next((arena for arena in self._arenas if arena.sizes == sizes and arena.is_free()), None)
            if found is not None or not self._arenas:
                return found
            time.sleep(0.001)
        return None

    def synchronize_staging(self) -> None:
        """Staging is over when ``stage`` returns."""

    def close(self) -> None:
        """Gives the memory of stages back."""
        self._arenas = []

    def _noting(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            self._failures.append(error)
            raise


class Reader(StorageReader):  # type: ignore[misc]
    """A ``storage_reader`` for ``dcp.load``.

    The step is the last integer of ``checkpoint_id``; ``step`` overrides it; without both, the newest is loaded. Only what a
    rank needs is read, into the tensors that it gives. With ``process_group``, the one that the load runs on, one rank reads the
    description of the state and tells the others; without it each reads it by itself.
    """

    def __init__(self, store: Store, *, step: Step | None = None, process_group: Any = None) -> None:
        self._store = store
        self._given_step = step
        self._group = process_group
        self._told_step: int | None = None
        self._told_id: str | None = None
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self._snapshot: Snapshot | None = None
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_id = checkpoint_id
        self._snapshot, self._told_step, self._told_id = None, None, None

    def _open(self) -> Snapshot:
        if self._snapshot is None:
            step = self._given_step if self._given_step is not None else step_of(self.checkpoint_id)
            step = step if self._told_step is None else self._told_step
            self._snapshot = _shared(self._store).snapshot("latest" if step is None else step)
            if self._told_id not in (None, self._snapshot.id):
                raise _native.ConflictError(f"step {step} was saved again meanwhile. Load again")
        return self._snapshot

    def read_metadata(self, *args: Any) -> Metadata:
        if self._group is None:
            return self._describe_all()
        # One rank reads what all have to know.
        told: list[Any] = [None]
        if dist.get_rank(self._group) == 0:
            try:
                told = [(self._describe_all(), self._values, self._names, self._open().step, self._open().id)]
            except Exception as error:
                told = [error]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        metadata, self._values, self._names, self._told_step, self._told_id = told[0]
        described: Metadata = metadata
        return described

    def _describe_all(self) -> Metadata:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        nested, _ = self._open().structure()
        placeholders = _map(nested, lambda info: _Placeholder(info) if isinstance(info, TensorInfo) else info)
        flat, mappings = flatten_state_dict(placeholders)
        described: dict[str, Any] = {}
        self._values, self._names = {}, {}
        for fqn, value in flat.items():
            if isinstance(value, _Placeholder):
                self._names[fqn] = value.info.name
                described[fqn] = _describe(value.info)
            else:
                self._values[fqn] = _map(value, lambda leaf: leaf.info if isinstance(leaf, _Placeholder) else leaf)
                described[fqn] = BytesStorageMetadata()
        return Metadata(state_dict_metadata=described, planner_data=mappings)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._told_id or self._open().id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise _native.ConflictError("ranks found different snapshots: one was committed meanwhile. Load again, or by step")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if not plan.items:
            future: Future[None] = Future()
            future.set_result(None)
            return future
        snapshot = self._open()
        infos = snapshot.tensors()
        wanted, filled = [], []
        for item in plan.items:
            fqn = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                _give(item, planner, resolve(snapshot, self._values[fqn], "torch"))
                continue
            target = planner.resolve_tensor(item)
            wanted.append((infos[self._names[fqn]], item.storage_offsets, item.lengths, target))
            filled.append((item, target))
        read_tensors(snapshot, wanted)
        for item, target in filled:
            planner.commit_tensor(item, target)
        future = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(re.search(r"\d", os.fspath(checkpoint_id)))


def read_tensors(snapshot: Snapshot, wanted: Sequence[tuple[TensorInfo, Sequence[int], Sequence[int], torch.Tensor]]) -> None:
    """Reads rectangles, each an offset and a shape, into tensors of that shape, wherever they are."""
    requests, elsewhere, addresses = [], [], set()
    for info, offset, shape, target in wanted:
        double = _doubled(info.dtype)
        plain = target.detach()
        dtype = _frameworks.torch_dtype(torch, info.dtype, info.name)
        # Tied tensors share memory: the second is read apart.
        direct = plain.device.type == "cpu" and plain.is_contiguous() and plain.dtype == dtype
        direct = direct and not plain.is_conj() and not plain.is_neg() and plain.data_ptr() not in addresses
        staged = plain if direct else torch.empty(tuple(shape), dtype=dtype)
        if direct:
            addresses.add(plain.data_ptr())
        else:
            elsewhere.append((plain, staged))
        requests.append((info.name, double(offset), double(shape), _frameworks.torch_bytes(torch, staged)))
    snapshot.native.read_into(requests)
    for plain, staged in elsewhere:
        plain.copy_(staged)


def resolve(snapshot: Snapshot, value: Any, framework: Framework | None = None) -> Any:
    """A value of :meth:`Snapshot.structure`, with the tensors that lie in it (a tuple of tensors is one value to DCP)."""
    names: list[str] = []
    _map(value, lambda leaf: names.append(leaf.name) if isinstance(leaf, TensorInfo) else None)
    loaded = snapshot.load(tensors=names, framework=framework) if names else {}
    return _map(value, lambda leaf: loaded[leaf.name] if isinstance(leaf, TensorInfo) else leaf)


class _Placeholder(torch.Tensor):  # type: ignore[misc]
    """Stands for a tensor of the store while torch flattens names."""

    info: TensorInfo

    def __new__(cls, info: TensorInfo) -> _Placeholder:
        made: _Placeholder = torch.Tensor._make_subclass(cls, torch.empty(0, device="meta"))
        made.info = info
        return made


def _describe(info: TensorInfo) -> TensorStorageMetadata:
    shape = torch.Size(_frameworks.torch_shape(info.dtype, info.shape, info.name))
    dtype = _frameworks.torch_dtype(torch, info.dtype, info.name)
    # One chunk: which casks hold which part of it is nothing that torch has to plan.
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=shape, chunks=[chunk])


def _doubled(dtype: str) -> Callable[[Any], list[int]]:
    """Torch counts pairs of float4; a store counts elements."""

    def double(numbers: Any) -> list[int]:
        found = [int(number) for number in numbers]
        if dtype == "f4_e2m1" and found:
            found[-1] *= 2
        return found

    return double


def _set(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Puts a value where torch found it: integers on the way are positions in lists."""
    for key, after in zip(path[:-1], path[1:], strict=True):
        nested = nested.setdefault(key, _state.Part() if isinstance(after, int) else {})
    nested[path[-1]] = value


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    return change(value)


def _value(item: Any, planner: SavePlanner) -> Any:
    """A value as it is, before the default planner would pickle it; what another planner makes of it, as bytes."""
    if isinstance(planner, DefaultSavePlanner) and type(planner).transform_object is DefaultSavePlanner.transform_object:
        return planner.lookup_object(item.index)
    return planner.resolve_data(item)


def _give(item: Any, planner: LoadPlanner, value: Any) -> None:
    """Sets a value as the default planner would after unpickling it; another planner gets bytes, as it does from others."""
    from torch.distributed.checkpoint._nested_dict import set_element

    if isinstance(planner, DefaultLoadPlanner) and type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
        fqn = item.dest_index.fqn
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[fqn], value)
        else:
            planner.state_dict[fqn] = value
    elif isinstance(value, io.BytesIO):
        planner.load_bytes(item, value)
    else:
        # Such a planner expects what torch.save writes; this never was in the store.
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)


# Stores and writers of this process, so that bases are kept where each save unpickles its writer anew.
_stores: dict[Any, Store] = {}
_rank_writers: dict[Any, _native.RankWriter] = {}


def _shared(store: Store) -> Store:
    return _stores.setdefault(store.key, store)


def _rank_writer(store: Store, rank: int, world: int, options: WriterOptions) -> _native.RankWriter:
    key = (store.key, rank, world, options)
    if key not in _rank_writers:
        _rank_writers[key] = store.native().rank_writer(rank, world, *options)
    return _rank_writers[key]


class _Arena:
    """Memory for stages, touched once: fresh pages cost several times what the copy does.

    Each tensor has a storage of its own, because a storage is sent to another process as a whole.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.pieces = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self._idle_uses = self._uses()

    def _uses(self) -> list[int] | None:
        count = getattr(torch._C, "_storage_Use_Count", None)
        return None if count is None else [int(count(piece.untyped_storage()._cdata)) for piece in self.pieces]

    def is_free(self) -> bool:
        """Whether no tensor lies in it any more, in this process or in another that it was sent to."""
        uses = self._uses()
        return uses is not None and uses == self._idle_uses and not any(piece.is_shared() for piece in self.pieces)


class _Stager:
    """Copies the tensors of a state, those that share memory once."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._sources: dict[Any, torch.Tensor] = {}
        self._note(state, "state")
        self.sizes = tuple(source.numel() * source.element_size() for source in self._sources.values())

    def _note(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            local = _local(value, path)
            self._sources.setdefault(_key(local), local)
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._note(item, f"{path}[{key!r}]")

    def copy_into(self, arena: _Arena) -> Any:
        copies: dict[Any, torch.Tensor] = {}
        pairs = []
        for (key, source), piece in zip(self._sources.items(), arena.pieces, strict=True):
            target = copies[key] = piece.view(source.dtype).view(source.shape)
            if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
                pairs.append((_frameworks.torch_bytes(torch, target), _frameworks.torch_bytes(torch, source)))
            else:
                target.copy_(source)
        _native.copy_all(pairs)

        def staged(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            copied = copies[_key(_local(value, "state"))]
            if isinstance(value, DTensor):
                return DTensor.from_local(
                    copied, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
                )
            return copied

        return _map(self._state, staged)


def _local(tensor: torch.Tensor, path: str) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    _frameworks.check_torch(local, path)
    return local


def _key(tensor: torch.Tensor) -> Any:
    """The same for tensors that are one piece of memory."""
    return (tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
