"""Parts of tensors that several ranks save together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._errors import InvalidValueError


@dataclass(frozen=True)
class Shard:
    """A part of a tensor that the ranks of an :class:`Engine` save together, for layouts that are not DTensors.

    ``data``: this rank's part. ``shape``: shape of the whole tensor. ``offset``: first index of the part in it. A restore with ``out=``
    fills ``data``; the parts of ranks may then have other borders.

    >>> import numpy as np
    >>> Shard(np.zeros(3, np.float32), shape=(10,), offset=(7,)).shape
    (10,)
    """

    data: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        extent = tuple(self.data.shape)
        if not len(extent) == len(self.shape) == len(self.offset):
            raise InvalidValueError(f"a shard of {len(extent)} axes, with shape {list(self.shape)} and offset {list(self.offset)}")
        if any(at < 0 or at + length > size for at, length, size in zip(self.offset, extent, self.shape, strict=True)):
            raise InvalidValueError(f"a shard of {list(extent)} at {list(self.offset)} is not inside of shape {list(self.shape)}")


@dataclass(frozen=True)
class Shards:
    """Several parts of one tensor, which one rank saves. They are restored one by one."""

    parts: tuple[Shard, ...]

    @property
    def data(self) -> Any:
        return self.parts[0].data


# Attributes by which a torch tensor says that it holds parts of a larger one: a ``CheckpointableTensor`` of DCP.
PART_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_described_part(value: Any) -> bool:
    """Whether a torch tensor says by its attributes which parts of a larger tensor it holds."""
    return hasattr(value, "global_offsets") and all(hasattr(value, name) for name in PART_ATTRIBUTES)


def parts_of_described(tensor: Any) -> Shards:
    """The parts that a torch tensor holds by its attributes. A tensor without parts gets an empty one."""
    shape, memory = tuple(tensor.global_shape), tensor.detach()
    rows = list(zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True))
    nothing = (0,) * len(shape)
    parts = []
    for offset, begin, size in rows or [(nothing, nothing, nothing)]:
        data = memory[tuple(slice(at, at + length) for at, length in zip(begin, size, strict=True))] if begin else memory
        if tuple(data.shape) != tuple(size):
            raise InvalidValueError(f"a part of {list(size)} at {list(begin)} is not inside of a tensor of shape {list(memory.shape)}")
        parts.append(Shard(data, shape, tuple(offset)))
    return Shards(tuple(parts))


def is_given_part(value: Any) -> bool:
    """Whether a value is a :class:`Shard`, or several of one tensor."""
    return isinstance(value, (Shard, Shards)) or is_described_part(value)


def is_part(value: Any) -> bool:
    """Whether a value is a part of a tensor: a DTensor, a :class:`Shard`, or a tensor that says so."""
    return is_given_part(value) or hasattr(value, "to_local") and hasattr(value, "placements") and hasattr(value, "device_mesh")
