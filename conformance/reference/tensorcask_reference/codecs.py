"""Registry of codecs: columns of a chunk to its bytes (codecs 4). A new codec is one function and one row of `CODECS`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .dtypes import Dtype
from .errors import corrupt, unsupported

Bytes = np.ndarray
Column = tuple[str, Bytes]


def _raw(dtype: Dtype, n: int, values: list[Bytes], base: Bytes | None) -> Bytes:
    if values[0].size != dtype.size(n):
        raise corrupt("raw 3", f"{values[0].size} bytes for a chunk of {dtype.size(n)}")
    return values[0]


def _constant(dtype: Dtype, n: int, values: list[Bytes], base: Bytes | None) -> Bytes:
    if values[0].size != dtype.unit:
        raise corrupt("constant 3", f"{values[0].size} bytes for a unit of {dtype.unit}")
    return np.tile(values[0], dtype.size(n) // dtype.unit)


def _bitmask(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    assert base is not None
    mask, values = columns
    units = dtype.size(n) // dtype.unit
    if mask.size != -(-units // 8):
        raise corrupt("bitmask 3", f"mask of {mask.size} bytes for {units} units")
    bits = np.unpackbits(mask, bitorder="little")
    if bits[units:].any():
        raise corrupt("bitmask 3", "unused bits of the mask are not zero")
    changed = np.flatnonzero(bits)
    if values.size != changed.size * dtype.unit:
        raise corrupt("bitmask 3", f"{values.size} bytes of values for {changed.size} units")
    chunk = base.copy()
    chunk.reshape(-1, dtype.unit)[changed] = values.reshape(-1, dtype.unit)
    return chunk


@dataclass(frozen=True)
class Codec:
    kinds: frozenset[str]
    columns: tuple[str, ...]
    function: Callable[[Dtype, int, list[Bytes], Bytes | None], Bytes]

    def check(self, name: str, kind: str, columns: list[str]) -> None:
        """What can be judged without bytes and base."""
        if kind not in self.kinds:
            raise corrupt("codecs 3", f"{name} in a chunk of kind {kind}")
        if tuple(columns) != self.columns:
            raise corrupt("codecs 4.1", f"columns {columns} of {name}")

    def decode(self, dtype: Dtype, n: int, columns: list[Column], base: Bytes | None) -> Bytes:
        return self.function(dtype, n, [data for _, data in columns], base)


CODECS: dict[tuple[str, int], Codec] = {
    ("tc.raw", 1): Codec(frozenset({"absolute"}), ("values",), _raw),
    ("tc.constant", 1): Codec(frozenset({"absolute"}), ("values",), _constant),
    ("tc.bitmask", 1): Codec(frozenset({"delta"}), ("mask", "values"), _bitmask),
}


def codec_of(name: str, version: int) -> Codec:
    if (name, version) not in CODECS:
        raise unsupported("codecs 2", f"codec {name!r} of version {version}")
    return CODECS[name, version]
