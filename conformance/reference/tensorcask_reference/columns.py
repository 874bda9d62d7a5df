"""Sequences of columns (index 1) and the layout tables (index 3), which casks and directories share."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from .dtypes import Dtype, Shape, chunk_count, dtype_of, elements
from .errors import LIMITS, corrupt, limit


def align(x: int, a: int) -> int:
    return -(-x // a) * a


class Columns:
    """Takes one column after another; no row is copied before it is known to be there."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, width: int, rows: int) -> np.ndarray:
        """index 1.1, 1.2"""
        end = self.at + width * rows
        after = align(end, 64)
        if after > len(self.data):
            raise corrupt("index 1.2", f"a column of {rows} rows at {self.at} does not fit")
        if any(self.data[end:after]):
            raise corrupt("index 1.2", f"padding at {end} is not zero")
        column = np.frombuffer(self.data, f"<u{width}", rows, self.at) if rows else np.zeros(0, f"<u{width}")
        self.at = after
        return column

    def heap(self, rows: int, values: int, width: int) -> tuple[list[int], np.ndarray]:
        """index 1.3"""
        if values >= 1 << 31:
            raise corrupt("index 1.3", f"heap of {values} values")
        offsets = self.take(4, rows + 1)
        if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] != values:
            raise corrupt("index 1.3", "offsets of a heap")
        return offsets.tolist(), self.take(width, values)

    def text(self, rows: int, values: int) -> list[bytes]:
        """index 1.4; rows stay bytes, because bytes are what order and equality are about."""
        offsets, heap = self.heap(rows, values, 1)
        LIMITS.check("max_name_bytes", max((b - a for a, b in pairwise(offsets)), default=0))
        data = heap.tobytes()
        texts = [data[a:b] for a, b in pairwise(offsets)]
        try:
            for text in texts:
                text.decode("utf-8")
        except UnicodeDecodeError:
            raise corrupt("index 1.4", f"{text!r} is not UTF-8") from None
        return texts

    def end(self) -> None:
        if self.at != len(self.data):
            raise corrupt("index 1.2", f"bytes after the last column, at {self.at}")


@dataclass(frozen=True, slots=True)
class Tensor:
    name: bytes
    dtype: Dtype
    shape: Shape


@dataclass(frozen=True, slots=True)
class Shard:
    tensor: int
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class Layout:
    tensors: list[Tensor]
    shards: list[Shard]

    @cached_property
    def rows(self) -> dict[tuple[bytes, Shape, Shape], int]:
        """Shard rows by tensor name and rectangle."""
        return {(self.tensors[s.tensor].name, s.offset, s.shape): row for row, s in enumerate(self.shards)}

    @cached_property
    def by_name(self) -> dict[bytes, int]:
        return {tensor.name: row for row, tensor in enumerate(self.tensors)}

    def chunks(self, shard: Shard) -> int:
        return chunk_count(self.tensors[shard.tensor].dtype, shard.shape)


def ascends(values: list) -> bool:
    return all(a < b for a, b in pairwise(values))


def read_layout(columns: Columns, tensors: int, name_bytes: int, dimensions: int, shards: int) -> Layout:
    """index 3"""
    LIMITS.check("max_tensors", tensors)
    LIMITS.check("max_shards", shards)
    names = columns.text(tensors, name_bytes)
    codes = columns.take(1, tensors).tolist()
    starts, extents = columns.heap(tensors, dimensions, 8)
    LIMITS.check("max_dimensions", max((b - a for a, b in pairwise(starts)), default=0))
    owners = columns.take(4, shards)
    if (owners >= tensors).any():
        raise corrupt("index 3.3", "shard of a tensor that is not there")
    rows = int(np.diff(np.array(starts, np.int64))[owners].sum())
    if rows >= 1 << 32:
        raise limit(f"{rows} dimensions of all shards")
    offsets, shapes = columns.take(8, rows).tolist(), columns.take(8, rows).tolist()
    if not ascends(names):
        raise corrupt("index 3.1", "tensor names do not ascend")
    wholes = extents.tolist()
    table = [Tensor(n, dtype_of(c), tuple(wholes[a:b])) for n, c, (a, b) in zip(names, codes, pairwise(starts))]
    for tensor in table:
        if elements(tensor.shape) * tensor.dtype.bits >= 1 << 64:
            raise corrupt("index 3.2", f"{tensor.name!r} has a shape beyond 64 bits")
    result, at = [], 0
    for owner in owners.tolist():
        end = at + len(table[owner].shape)
        shard = Shard(owner, tuple(offsets[at:end]), tuple(shapes[at:end]))
        if any(o + e > whole for o, e, whole in zip(shard.offset, shard.shape, table[owner].shape)):
            raise corrupt("index 3.4", f"a shard reaches out of {table[owner].name!r}")
        result.append(shard)
        at = end
    if not ascends([(s.tensor, s.offset, s.shape) for s in result]):
        raise corrupt("index 3.3", "shards do not ascend")
    return Layout(table, result)
