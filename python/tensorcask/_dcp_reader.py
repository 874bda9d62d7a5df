"""The ``storage_reader`` of DCP, and the description of a snapshot in DCP's terms."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from . import _device, _dtypes, _frameworks, _native, _planners, _process_stores, _refusals, _subclasses
from ._handle import StoreHandle as Store
from ._options import Framework, Step
from ._reports import TensorInfo
from ._snapshot import Snapshot, trees_of
from ._state import path_text
from ._steps import step_in, step_of

_log = logging.getLogger("tensorcask")


class Reader(StorageReader):  # type: ignore[misc]
    """A ``storage_reader`` for ``dcp.load``.

    ``step``: the training step, or ``"latest"``; without it, ``checkpoint_id`` names the step. Without both, the newest
    snapshot is loaded. Each rank reads only the elements that its tensors hold. ``process_group``: the group of the
    load; its first rank then reads the description of the state and sends it to the others. Without it, each rank reads
    the description itself.

    Planners that take a state apart (``flatten_state_dict=True``, the default) and planners that do not can both load
    any snapshot.

    >>> import tensorcask
    >>> import torch.distributed.checkpoint as dcp
    >>> store = tensorcask.Store("memory://dcp-reader-example")
    >>> _ = store.save({"model": {"w": torch.arange(4)}, "epoch": 3}, step=100)
    >>> state = {"model": {"w": torch.zeros(4, dtype=torch.int64)}, "epoch": 0}
    >>> dcp.load(state, checkpoint_id="step-100", storage_reader=store.reader(), no_dist=True)
    >>> state
    {'model': {'w': tensor([0, 1, 2, 3])}, 'epoch': 3}
    """

    def __init__(self, store: Store, *, step: Step | None = None, process_group: Any = None) -> None:
        self._store = store
        self._given_step: Step | None = step
        self._group = process_group
        self._told_step: int | None = None
        self._told_id: str | None = None
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self.load_id = str(uuid.uuid4())
        self._snapshot: Snapshot | None = None
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._arrays: dict[str, TensorInfo] = {}
        self._frameworks: dict[str, str] = {}
        # Descriptions of the tensors that are made of other tensors, by name.
        self._told_classes: dict[str, Any] = {}
        self._made: dict[str, tuple[list[Any], dict[str, str]]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_id, self.load_id = checkpoint_id, str(uuid.uuid4())
        self._snapshot, self._told_step, self._told_id = None, None, None

    def _open(self) -> Snapshot:
        if self._snapshot is None:
            step: Step | None = self._given_step
            if step is None and self.checkpoint_id is not None:
                step = step_of(self.checkpoint_id, "Rename it, or pass step= to store.reader()")
            step = step if self._told_step is None else self._told_step
            self._snapshot = _process_stores.shared(self._store).snapshot("latest" if step is None else step)
            if self._told_id not in (None, self._snapshot.id):
                raise _native.ConflictError(f"step {step} was saved again during this load. Load again")
        return self._snapshot

    def read_metadata(self, *args: Any) -> Metadata:
        if self._group is None:
            return self._describe_all()
        # One rank reads the description for all ranks.
        told: list[Any] = [None]
        if dist.get_rank(self._group) == 0:
            try:
                described = self._describe_all()
                found = (self._values, self._names, self._arrays, self._told_classes)
                told = [(described, found, self._open().step, self._open().id)]
            except Exception as error:
                told = [error]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        metadata, (self._values, self._names, self._arrays, self._told_classes), self._told_step, self._told_id = told[0]
        self.load_id = metadata.storage_meta.load_id
        described_all: Metadata = metadata
        return described_all

    def _describe_all(self) -> Metadata:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        nested, _ = self._open().structure()
        if not isinstance(nested, dict):
            raise _native.UnsupportedError(
                f"step {self._open().step} is a {type(nested).__name__}, and DCP loads mappings. Use tensorcask.load()"
            )
        placeholders = _map(nested, lambda info: _Placeholder(info) if isinstance(info, TensorInfo) else info)
        try:
            flat, mappings = flatten_state_dict(placeholders)
        except ValueError as error:
            step = self._open().step
            raise _native.UnsupportedError(f"step {step}: DCP cannot tell two keys apart: {error}. Use tensorcask.load()") from None
        self._values, self._names, self._arrays, self._told_classes = {}, {}, {}, {}
        _note_classes(nested, "", self._told_classes)
        self._frameworks = {value[0]: value[1] for _, tree in trees_of(self._open().native) for kind, value in tree if kind == "tensor"}
        described = {fqn: self._describe(fqn, value) for fqn, value in flat.items()}
        whole = {key: self._describe(key, value) for key, value in placeholders.items() if key not in described}
        storage = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._open().id, load_id=self.load_id)
        return _metadata(_Descriptions(described, whole), mappings, storage)

    def _describe(self, fqn: Any, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(value, _Placeholder):
            self._names[fqn] = value.info.name
            if self._frameworks.get(value.info.name, "torch") == "torch":
                return _describe(value.info)
            # To DCP, arrays of other frameworks are values.
            self._arrays[fqn] = value.info
        self._values[fqn] = _map(value, lambda leaf: leaf.info if isinstance(leaf, _Placeholder) else leaf)
        return BytesStorageMetadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        template = _planners.template_of(_planners.calling_planner())
        for fqn, info in self._arrays.items():
            if isinstance(template.get(fqn), torch.Tensor):
                metadata.state_dict_metadata[fqn] = _describe(info)
        self._made = self._made_of_tensors(template)
        for fqn, (told, _) in self._made.items():
            metadata.state_dict_metadata[fqn] = _described_as(template[fqn].dtype, torch.Size(told[2]))
        for fqn, value in template.items():
            if isinstance(value, torch.Tensor):
                _refusals.check_placements(value, path_text((fqn,)))

    def _made_of_tensors(self, template: Mapping[Any, Any]) -> dict[str, tuple[list[Any], dict[str, str]]]:
        """Tensors of the template that are made of other tensors: the description in the store, and the stored names of the inner tensors by
        attribute."""
        found: dict[str, tuple[list[Any], dict[str, str]]] = {}
        for fqn, value in template.items():
            inner = _frameworks.inner_tensors(value) if isinstance(value, torch.Tensor) else None
            told = self._told_classes.get(fqn)
            names = {name: self._names[f"{fqn}.{name}"] for name in inner or () if f"{fqn}.{name}" in self._names}
            if inner and len(names) == len(inner) and isinstance(told, list) and _subclasses.is_description(told):
                found[fqn] = (told, names)
        return found

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self._warn_about_moments_left_out({str(item.dest_index.fqn) for item in plan.items})
        return dataclasses.replace(plan, storage_data=self._told_id or self._open().id)

    def _warn_about_moments_left_out(self, wanted: set[str]) -> None:
        """DCP fills only what the caller's state has. A new optimizer has no moments, and their loss is no error."""
        groups = {re.sub(r"param_groups(\..*)?$", "", name) for name in wanted if re.search(r"(^|\.)param_groups(\.|$)", name)}
        for prefix in sorted(groups):
            slots = f"{prefix}state."
            if any(str(name).startswith(slots) for name in self._names) and not any(name.startswith(slots) for name in wanted):
                _log.warning(
                    "step %s has moments (%s*), but the state to load has none, so none are loaded. dcp.load fills only what the state "
                    "has. Make the state with get_state_dict(model, optimizer), which creates the moments of a new optimizer",
                    self._open().step,
                    slots,
                )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise _native.ConflictError("ranks found different snapshots: one was committed during this load. Load again, or pass step=")
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
                _planners.give(item, planner, resolve(snapshot, self._values[fqn]))
                continue
            target = planner.resolve_tensor(item)
            if fqn in self._made:
                told, names = self._made[fqn]
                parts = {name: infos[stored] for name, stored in names.items()}
                value = _subclasses.rebuilt({**resolve(snapshot, parts), _subclasses.CLASS: told})
                if not isinstance(value, torch.Tensor):
                    message = f"{path_text((fqn,))}: a {told[0]}, which PyTorch does not allow to load, or which its class cannot make again"
                    raise _native.UnsupportedError(f"{message}. See torch.serialization.add_safe_globals")
                with torch.no_grad():
                    target.copy_(value)
                planner.commit_tensor(item, target)
                continue
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
        return step_in(checkpoint_id) is not None


class _Descriptions(dict[Any, Any]):
    """Descriptions of values by the names of a flattened state. Names of the state as it is are found too, but not
    listed.

    DCP compares the listed names with those of the state to load. It looks up the names that its planner asks for.
    """

    def __init__(self, described: dict[Any, Any], whole: dict[Any, Any]) -> None:
        super().__init__(described)
        self._whole = whole

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._whole

    def __missing__(self, key: Any) -> Any:
        return self._whole[key]


def _note_classes(value: Any, name: str, found: dict[str, Any]) -> None:
    """Notes the descriptions of tensors that are made of other tensors, by their names in a flattened state."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if key == _subclasses.CLASS:
            found[name] = item
        else:
            _note_classes(item, f"{name}.{key}" if name else str(key), found)


def _metadata(described: dict[Any, Any], mappings: Any, storage: StorageMeta) -> Metadata:
    metadata = Metadata(state_dict_metadata=described, planner_data=mappings, storage_meta=storage)
    set_version(metadata)
    return metadata


def set_version(metadata: Metadata) -> None:
    """Sets the version of DCP's metadata. Older versions of PyTorch have no such field."""
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None and hasattr(metadata, "version"):
        metadata.version = version


def read_tensors(snapshot: Snapshot, wanted: Sequence[tuple[TensorInfo, Sequence[int], Sequence[int], torch.Tensor]]) -> None:
    """Reads rectangles, each an offset and a shape, into tensors of that shape on any device."""
    requests, elsewhere, addresses = [], [], set()
    for info, offset, shape, target in wanted:
        double = doubled(info.dtype)
        plain = target.detach()
        dtype = _dtypes.torch_dtype(torch, info.dtype, info.name)
        # Tied tensors share memory. Only the first is read in place.
        direct = plain.device.type == "cpu" and plain.is_contiguous() and plain.dtype == dtype
        direct = direct and not plain.is_conj() and not plain.is_neg() and plain.data_ptr() not in addresses
        staged = plain if direct else torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if direct:
            addresses.add(_device.written(plain).data_ptr())
        else:
            elsewhere.append((plain, staged))
        requests.append((info.name, double(offset), double(shape), _frameworks.torch_bytes(torch, staged)))
    snapshot.native.read_into(requests)
    for plain, staged in elsewhere:
        plain.copy_(staged)


def resolve(snapshot: Snapshot, value: Any, framework: Framework | None = None) -> Any:
    """A value of :meth:`Snapshot.structure` with its tensors loaded. A tuple of tensors is one value to DCP."""
    names: list[str] = []
    _map(value, lambda leaf: names.append(leaf.name) if isinstance(leaf, TensorInfo) else None)
    loaded = snapshot.load(tensors=names, framework=framework) if names else {}
    return _map(value, lambda leaf: loaded[leaf.name] if isinstance(leaf, TensorInfo) else leaf)


class _Placeholder(torch.Tensor):  # type: ignore[misc]
    """Stand-in for a tensor of the store while PyTorch flattens names."""

    info: TensorInfo

    def __new__(cls, info: TensorInfo) -> _Placeholder:
        made: _Placeholder = torch.Tensor._make_subclass(cls, torch.empty(0, device="meta"))
        made.info = info
        return made


def _describe(info: TensorInfo) -> TensorStorageMetadata:
    return _described_as(_dtypes.torch_dtype(torch, info.dtype, info.name), torch.Size(_dtypes.torch_shape(info.dtype, info.shape, info.name)))


def _described_as(dtype: torch.dtype, shape: torch.Size) -> TensorStorageMetadata:
    # One chunk: PyTorch need not plan which cask holds which part.
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=shape, chunks=[chunk])


def doubled(dtype: str) -> Callable[[Any], list[int]]:
    """Extents and offsets in elements. PyTorch counts pairs of float4."""

    def double(numbers: Any) -> list[int]:
        found = [int(number) for number in numbers]
        if dtype == "f4_e2m1" and found:
            found[-1] *= 2
        return found

    return double


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    if isinstance(value, deque):
        return deque((_map(item, change) for item in value), value.maxlen)
    return change(value)
