"""Copies of states for asynchronous saves, and checks of the tensors in a state before PyTorch plans a save."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from . import _frameworks, _native, _refusals
from ._device import is_plain
from ._dtypes import UnstorableTypeError
from ._shard import PART_ATTRIBUTES, is_described_part
from ._state import OnUnsupported

# Stands for a value that is left out.
SKIPPED = object()
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


class Arena:
    """Reusable memory for staged tensors. Its pages are touched once, because fresh pages cost several times what a
    copy does.

    Each tensor has a storage of its own, because PyTorch sends a storage to another process as a whole.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.pieces = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]
        # Time for which the copy into this memory stopped the training.
        self.stall_seconds: float | None = None
        # Changed rows of the tensors in this memory, by the address of the tensor in decimal.
        self.claim: Any = None
        self._idle_uses = self._uses()

    def _uses(self) -> list[int] | None:
        count = getattr(torch._C, "_storage_Use_Count", None)
        return None if count is None else [int(count(piece.untyped_storage()._cdata)) for piece in self.pieces]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        place = tensor.untyped_storage().data_ptr()
        return place != 0 and any(piece.untyped_storage().data_ptr() == place for piece in self.pieces)

    def is_free(self) -> bool:
        """Whether no tensor uses the memory any more, in this process or in another that received one."""
        uses = self._uses()
        return uses is not None and uses == self._idle_uses and not any(piece.is_shared() for piece in self.pieces)


class Stager:
    """Copies the tensors of a state. Tensors that share memory are copied once."""

    def __init__(self, state: Any, on_unsupported: OnUnsupported = None) -> None:
        self._sources: dict[Any, torch.Tensor] = {}
        # Path of a tensor with attributes that a copy in this process has, but not one that is sent to another process.
        self.described: str | None = None
        self._state = screen(state, on_unsupported, self._note, take=_copied)
        self.sizes = tuple(source.numel() * source.element_size() for source in self._sources.values())

    def _note(self, tensor: torch.Tensor, path: str) -> None:
        _check_description(tensor, path)
        own = _own(tensor)
        if _shards_wrapper(tensor) is None and (is_described_part(own) or any(hasattr(own, name) for name in _DESCRIBING)):
            self.described = path
        if not _refusals.is_sharded(tensor):
            _refusals.check_torch_data(tensor, path)
        for local in _locals(tensor):
            _refusals.check_torch(local, path)
            self._sources.setdefault(_key(local), local)

    def sources(self, arena: Arena) -> dict[str, torch.Tensor]:
        """The tensors that are copied, by the address of the copy in decimal."""
        return {str(piece.data_ptr()): source for source, piece in zip(self._sources.values(), arena.pieces, strict=True)}

    def copy_into(self, arena: Arena) -> Any:
        """The state with its tensors in an arena and its other values copied."""
        copies: dict[Any, torch.Tensor] = {}
        pairs = []
        for (key, source), piece in zip(self._sources.items(), arena.pieces, strict=True):
            target = copies[key] = piece.view(source.dtype).view(source.shape)
            if source.device.type == "cpu" and is_plain(source):
                pairs.append((_frameworks.torch_bytes(torch, target), _frameworks.torch_bytes(torch, source)))
            else:
                target.copy_(source)
        _native.copy_all(pairs)
        return _with_copies(self._state, copies)


def _with_copies(value: Any, copies: Mapping[Any, torch.Tensor]) -> Any:
    # Not a nested function: a recursive closure is a reference cycle, which would keep the arena in use.
    if isinstance(value, dict) and type(value) is not Counter:
        return {key: _with_copies(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_copies(item, copies) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, torch.Tensor):
        return value
    if _shards_wrapper(value) is None and _refusals.is_sharded(value):
        return _sharded_copy(value, copies)
    copied = _local_copy(value, copies)
    if isinstance(value, DTensor):
        layout = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        copied = DTensor.from_local(copied, value.device_mesh, value.placements, **layout)
    _describe_like(copied, value)
    return copied


def screen(
    value: Any,
    on_unsupported: OnUnsupported,
    check: Callable[[torch.Tensor, str], None],
    path: str = "state",
    *,
    take: Callable[[Any, str], Any] = lambda value, path: value,
    may_ask: bool = True,
) -> Any:
    """The value with each tensor checked, and with each other value as ``take`` returns it.

    ``on_unsupported`` decides about what either of them refuses. Returns ``SKIPPED`` for a value that is left out; in a
    list, None takes its place.
    """

    def inner(item: Any, key: Any) -> Any:
        # Long lists of numbers are common. They need no paths.
        if type(item) in _PLAIN:
            return item
        return screen(item, on_unsupported, check, f"{path}[{key!r}]", take=take, may_ask=may_ask)

    if isinstance(value, dict) and type(value) is not Counter:
        return {key: found for key, item in value.items() if (found := inner(item, key)) is not SKIPPED}
    if isinstance(value, (list, tuple)):
        items = [None if (found := inner(item, at)) is SKIPPED else found for at, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    try:
        if not isinstance(value, torch.Tensor):
            return take(value, path)
        check(value, path)
        return value
    except UnstorableTypeError as error:
        if on_unsupported == "skip":
            return SKIPPED
        if not callable(on_unsupported):
            raise
        if not may_ask:
            raise TypeError(f"{error}; on_unsupported returned this value") from None
        return screen(on_unsupported(path, value), on_unsupported, check, path, take=take, may_ask=False)


def check_whole(tensor: torch.Tensor, path: str) -> None:
    """Refuses a sharded tensor inside a value that is stored or loaded as one."""
    if isinstance(tensor, DTensor) or hasattr(tensor, "local_shards"):
        raise UnstorableTypeError(
            f"{path}: a {type(tensor).__name__} inside a value that the planner does not take apart. "
            "Use a planner with flatten_state_dict=True, and no tuple around the tensor"
        )


def check_value(tensor: torch.Tensor, path: str) -> None:
    """Refuses a tensor inside a value that cannot be stored with it."""
    _refusals.check_torch_data(tensor, path)
    check_whole(tensor, path)


def check_stored(tensor: torch.Tensor, path: str) -> None:
    """Refuses a tensor, or the shard of one, that cannot be stored."""
    _refusals.check_torch(tensor, path)


def _copied(value: Any, path: str) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnstorableTypeError(f"{path}: {name} cannot be copied for an asynchronous save: {error}") from error


def _own(tensor: Any) -> Any:
    """The tensor that DCP asks about the shards: the local part of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _shards_wrapper(tensor: Any) -> Any:
    """The wrapper of several local shards that a tensor is, or that its local part is; None for other tensors."""
    return _own(tensor) if isinstance(_own(tensor), LocalShardsWrapper) else None


# Methods by which a tensor describes its shards to DCP. They get the tensor that they describe, so a copy may have them.
_DESCRIBING = ("__create_write_items__", "__create_chunk_list__")


def _check_description(tensor: Any, path: str) -> None:
    """Refuses tensors that tell DCP about their shards in a way that a copy cannot repeat."""
    own = _own(tensor)
    if _shards_wrapper(tensor) is not None or _refusals.is_sharded(tensor):
        return
    if hasattr(own, "__get_tensor_shard__") or any(hasattr(type(own), name) for name in _DESCRIBING):
        raise UnstorableTypeError(
            f"{path}: a {type(own).__qualname__} gives DCP its shards by methods of its own. They cannot be copied for an asynchronous "
            "save. Save it by dcp.save"
        )


def _local_copy(tensor: Any, copies: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """The copy of the local part of a tensor."""
    wrapper = _shards_wrapper(tensor)
    if wrapper is not None:
        return LocalShardsWrapper([copies[_key(local)] for local in _locals(tensor)], list(wrapper.local_offsets()))
    inner = _frameworks.inner_tensors(tensor)
    if inner is not None:
        parts = {name: copies[_key(part.detach())].detach() for name, part in inner.items()}
        made: torch.Tensor = type(tensor).__tensor_unflatten__(parts, tensor.__tensor_flatten__()[1], tensor.shape, tensor.stride())
        return made
    # A tensor of its own: another one may have the same memory as another part.
    return copies[_key(_locals(tensor)[0])].detach()


def _describe_like(copied: Any, original: Any) -> None:
    """Gives the copy of a tensor everything that tells DCP which part it is."""
    target, source = _own(copied), _own(original)
    if _shards_wrapper(original) is not None:
        return
    for name in PART_ATTRIBUTES if is_described_part(source) else _DESCRIBING:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def _locals(tensor: Any) -> list[torch.Tensor]:
    """The tensors of this rank that a tensor is made of."""
    wrapper = _shards_wrapper(tensor)
    if wrapper is not None:
        return [shard.detach() for shard in wrapper.local_shards()]
    if _refusals.is_sharded(tensor):
        return [shard.tensor.detach() for shard in tensor.local_shards()]
    inner = _frameworks.inner_tensors(tensor)
    if inner is not None:
        return [part.detach() for part in inner.values()]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()]


def _sharded_copy(tensor: Any, copies: Mapping[Any, torch.Tensor]) -> Any:
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    shards = [
        Shard(copies[_key(local)], shard.metadata) for shard, local in zip(tensor.local_shards(), _locals(tensor), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, tensor.metadata(), process_group=tensor._process_group, sharding_spec=tensor.sharding_spec()
    )


def _key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same piece of memory."""
    return (tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
