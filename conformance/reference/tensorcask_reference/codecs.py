"""Registry of codecs: columns of a chunk to its bytes (codecs 4). A new codec is one function and one row of `CODECS`."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import descent, gradient, joint, replay
from .dtypes import DTYPES, Dtype
from .entropy import decode_plane
from .errors import corrupt, unsupported
from .quantized import blockwise8, cluster, kmeans, loguniform

Bytes = np.ndarray
Column = tuple[str, Bytes]
# Dtype, chunk, chunk of the parent, gradients.
Partner = tuple[Dtype, Bytes, Bytes | None, Bytes | None]
"""dtype, the chunk, and the same of the parent snapshot if the codec asks for it"""


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


ROTATED = {"f16", "bf16", "f32", "f64", "c64", "c128"}


def _planes(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    units, width = dtype.size(n) // dtype.unit, dtype.unit
    t = np.stack([decode_plane(column, units) for column in columns], 1).view(f"<u{width}").reshape(-1)
    u = t >> 1 | t << 8 * width - 1 if dtype.name in ROTATED else t
    if base is not None:
        u = u ^ base.view(f"<u{width}")
    return u.view(np.uint8)


# shift and bits of the exponent (ordered 1)
EXPONENTS = {
    "f8_e4m3": (3, 4), "f8_e4m3fnuz": (3, 4), "f8_e5m2": (2, 5), "f8_e5m2fnuz": (2, 5), "f16": (10, 5), "bf16": (7, 8), "f32": (23, 8),
    "c64": (23, 8),
}
LAST_TOKEN = {1: 47, 2: 111, 4: 239}


def _ordered(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    assert base is not None
    bits, width = 8 * dtype.unit, f"<u{dtype.unit}"
    units = base.view(width).astype(np.int64)
    tokens = _tokens(dtype, columns[0], units)
    count = np.where(tokens < 16, 0, (tokens - 16) // 8 + 1)
    z = np.where(tokens < 16, tokens, (8 + (tokens - 16) % 8 << count) + _extra_bits(columns[1], count))
    d = np.where(z % 2 == 0, z // 2, -(z + 1) // 2)
    half = 1 << bits - 1
    v = (np.where(units < half, units + half, 2 * half - 1 - units) + d) % (2 * half)
    return np.where(v >= half, v - half, 2 * half - 1 - v).astype(width).view(np.uint8)


def _tokens(dtype: Dtype, column: Bytes, units: np.ndarray) -> np.ndarray:
    """The token of each unit, by the class that the base gives it (ordered 3 to 3.2)."""
    shift, size = EXPONENTS[dtype.name]
    tokens = _classed(column, units >> shift & (1 << size) - 1, "ordered 3", "ordered 3.1")
    if tokens.max(initial=0) > LAST_TOKEN[dtype.unit]:
        raise corrupt("ordered 3.2", f"token {tokens.max()}")
    return tokens


def _classed(column: Bytes, exponents: np.ndarray, head: str, planes: str) -> np.ndarray:
    """Symbols in classes by exponent (ordered 3, 3.1), and the clauses of head and planes."""
    k = int(column[0]) if column.size else 16
    bounds = column[1:1 + k].astype(int)
    if k > 15 or column.size < 1 + k + 4 * (k + 1):
        raise corrupt(head, f"{k} bounds, or bounds or lengths that are cut")
    if (np.diff(bounds) <= 0).any() or 255 in bounds:
        raise corrupt(head, f"bounds {bounds}")
    at = 1 + k + 4 * (k + 1)
    classes = np.searchsorted(bounds, exponents)
    symbols = np.zeros(exponents.size, np.int64)
    for number, length in enumerate(column[1 + k:at].view("<u4").tolist()):
        if length > column.size - at:
            raise corrupt(planes, "a plane ends after the column")
        chosen = classes == number
        symbols[chosen] = decode_plane(column[at:at + length], int(chosen.sum()))
        at += length
    if at != column.size:
        raise corrupt(planes, f"{column.size - at} bytes after the last plane")
    return symbols


def _extra_bits(column: Bytes, count: np.ndarray) -> np.ndarray:
    """As numbers; `count` says how many each unit has (ordered 3.3)."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if ends.size else 0
    bits = np.unpackbits(column, bitorder="little")
    if column.size != -(-total // 8) or bits[total:].any():
        raise corrupt("ordered 3.3", f"{column.size} bytes for {total} extra bits, or unused bits that are 1")
    numbers = np.zeros(count.size, np.int64)
    for i in range(int(count.max(initial=0))):
        chosen = np.flatnonzero(count > i)
        numbers[chosen] |= bits[ends[chosen] - count[chosen] + i].astype(np.int64) << i
    return numbers


class _Bits:
    """Reads a bit stream, least significant bit first (sparse 1.1, 3)."""

    def __init__(self, column: Bytes) -> None:
        self.bits, self.at = np.unpackbits(column, bitorder="little"), 0

    def take(self, count: int) -> int:
        found = self.bits[self.at:self.at + count]
        if found.size != count:
            raise corrupt("sparse 3.3", "the column ends early")
        self.at += count
        return sum(int(bit) << i for i, bit in enumerate(found))

    def ones(self) -> int:
        count = 0
        while self.take(1):
            count += 1
        return count

    def number(self) -> int:
        g = self.ones()
        if g > 32:
            raise corrupt("sparse 3", f"a number of {g} bits")
        return (1 << g) - 1 + self.take(g)

    def count(self, most: int) -> int:
        count = self.number()
        if count > most:
            raise corrupt("sparse 2.1", f"{count} of {most}")
        return count

    def places(self, units: int, count: int) -> np.ndarray:
        if count == units:
            return np.arange(units)
        if 2 * count > units:
            return np.setdiff1d(np.arange(units), self.places(units, units - count))
        b = ((2 * units - count) // (2 * count)).bit_length() - 1
        places, before = [], -1
        for _ in range(count):
            before += 1 + (self.ones() << b) + self.take(b)
            if before >= units:
                raise corrupt("sparse 3.2", f"place {before} of {units}")
            places.append(before)
        return np.array(places)


def _sparse(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    assert base is not None
    half, width, (shift, size) = 1 << 8 * dtype.unit - 1, f"<u{dtype.unit}", EXPONENTS[dtype.name]
    units = base.view(width).astype(np.int64)
    exponents, stream = units >> shift & (1 << size) - 1, _Bits(columns[0])
    d = np.zeros(units.size, np.int64)
    for exponent in np.unique(exponents):
        members = np.flatnonzero(exponents == exponent)
        c = stream.count(members.size)
        if c == 0:
            continue
        changed = members[stream.places(members.size, c)]
        d[changed] = [1 - 2 * stream.take(1) for _ in range(c)]
        f = stream.count(c)
        if f:
            distant = changed[stream.places(c, f)]
            k = stream.take(5)
            if k >= 8 * dtype.unit:
                raise corrupt("sparse 2.2", f"order {k}")
            for unit in distant:
                difference = int(d[unit]) * ((stream.number() << k) + stream.take(k) + 2)
                if not -half <= difference < half:
                    raise corrupt("sparse 2.3", f"difference {difference}")
                d[unit] = difference
    if -(-stream.at // 8) != columns[0].size or stream.bits[stream.at:].any():
        raise corrupt("sparse 3.3", "bytes after the last group, or unused bits that are 1")
    v = (np.where(units < half, units + half, 2 * half - 1 - units) + d) % (2 * half)
    return np.where(v >= half, v - half, 2 * half - 1 - v).astype(width).view(np.uint8)


def _rows(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    assert base is not None
    number, row, rows = rows_header(columns[0])
    if row == 0 or base.size % row or 8 * row % dtype.bits:
        raise corrupt("rows 3", f"rows of {row} bytes in a chunk of {base.size}")
    bits = np.unpackbits(decode_plane(rows, -(-(base.size // row) // 8)), bitorder="little")
    if bits[base.size // row:].any():
        raise corrupt("rows 4", "unused bits are not zero")
    chunk = base.copy().reshape(-1, row)
    changed = np.flatnonzero(bits)
    name, takes_base = INNER[number]
    inner = CODECS[name, 1].function(
        dtype, 8 * row * changed.size // dtype.bits, columns[1:], chunk[changed].reshape(-1) if takes_base else None,
    )
    chunk[changed] = inner.reshape(-1, row)
    return chunk.reshape(-1)


# codecs of changed rows, and whether they take the base (rows 2)
INNER = [("tc.raw", False), ("tc.planes", False), ("tc.planes", True), ("tc.ordered", True)]


def rows_header(column: Bytes) -> tuple[int, int, Bytes]:
    """Number of the inner codec, bytes of a row, code of the bits (rows 2 to 4)."""
    if column.size < 5:
        raise corrupt("rows 2", f"{column.size} bytes")
    if column[0] >= len(INNER):
        raise corrupt("rows 2", f"inner codec {column[0]}")
    return int(column[0]), int(column[1:5].view("<u4")[0]), column[5:]


def _factored(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    rows, terms = columns[0][1:], columns[1]
    if not columns[0].size or rows.size * terms.size != n:
        raise corrupt("factored 2", f"{rows.size} rows and {terms.size} columns for {n} elements")
    p = (4 * int(columns[0][0]) + 2 + rows.view("i1").astype(int)[:, None] + terms.view("i1").astype(int) >> 2).reshape(-1) % 256
    s = decode_plane(columns[2], n).astype(int)
    e = np.where(s == 128, 0, np.where(s == -p % 256, p + 128, p + s) % 256)
    planes = [decode_plane(column, n) for column in columns[3:]] + [e.astype(np.uint8)]
    t = np.stack(planes, 1).view(f"<u{dtype.unit}").reshape(-1)
    return (t >> 1 | t << 8 * dtype.unit - 1).view(np.uint8)


def _magnitudes(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    if columns[0].size < 2:
        raise corrupt("magnitudes 2", "no floor")
    rows, terms = columns[0][2:].view("i1").astype(int), columns[1].view("i1").astype(int)
    height = rows.size or (n // terms.size if terms.size else 1)
    width = terms.size or n // height
    if height * width != n:
        raise corrupt("magnitudes 2.1", f"terms of {rows.size} rows and {terms.size} columns for {n} elements")
    floors = int(columns[0][:2].view("<i2")[0]) + (rows if rows.size else np.zeros(height, int))[:, None] + (terms if terms.size else np.zeros(width, int))
    symbols = decode_plane(columns[2], n)
    escaped = symbols == 0
    magnitudes = floors.reshape(-1) + symbols
    if ((magnitudes < 0) | (magnitudes > 2047))[~escaped].any():
        raise corrupt("magnitudes 3", "a magnitude that is not 0 to 2047")
    k = int(escaped.sum())
    escapes = decode_plane(columns[3], 2 * k).astype(int)
    if (escapes[k:] > 7).any():
        raise corrupt("magnitudes 3.1", "an escape above 2047")
    magnitudes[escaped] = escapes[:k] | escapes[k:] << 8
    signs = np.unpackbits(decode_plane(columns[4], -(-n // 8)), bitorder="little").astype(int)
    halves = decode_plane(columns[5], -(-n // 2)).astype(int)
    fractions = np.stack([halves & 15, halves >> 4], 1).reshape(-1)
    if signs[n:].any() or fractions[n:].any():
        raise corrupt("magnitudes 4", "bits beyond the last element are set")
    unit = signs[:n] << 15 | magnitudes << 4 | fractions[:n]
    for plane in reversed(columns[6:]):
        unit = unit << 8 | decode_plane(plane, n)
    return unit.astype(f"<u{dtype.unit}").view(np.uint8)


def _rounded(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    bf16 = next(known for known in DTYPES.values() if known.name == "bf16")
    rounded = _planes(bf16, n, columns[:2], None)
    chunk = _remainder(dtype, n, columns[2:], base, (bf16, rounded, None))
    u = chunk.view("<u4").astype(np.int64)
    nearest = np.where(u & (1 << 31) - 1 > 255 << 23, u >> 16 | 1 << 6, u + (1 << 15) - 1 + (u >> 16 & 1) >> 16)
    if (nearest != rounded.view("<u2")).any():
        raise corrupt("rounded 4", "a rounding is not the nearest of its element")
    return chunk


def _remainder(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None, model: Partner) -> Bytes:
    if dtype.name != "f32" or model[0].name not in ("bf16", "f16"):
        raise corrupt("remainder 1", f"{dtype.name} beyond {model[0].name}")
    rounding = columns[2]
    if rounding.size % 8 != 1 or rounding[0] > 1:
        raise corrupt("remainder 4" if rounding.size and rounding[0] <= 1 else "remainder 3", "mode or exceptions")
    p = widen_f16(model[1].view("<u2")) if model[0].name == "f16" else model[1].view("<u2").astype(np.int64) << 16
    r = decode_plane(columns[0], n).astype(np.int64) | decode_plane(columns[1], n).astype(np.int64) << 8
    d = np.where((r >= 1 << 15) & (rounding[0] == 0), r - (1 << 16), r)
    half = 1 << 31
    chunk = (p // half * half + (p % half + d) % half).astype("<u4")
    numbers, bits = rounding[1:].view("<u4").reshape(-1, 2).T.astype(np.int64)
    if (np.diff(numbers) <= 0).any() or (numbers >= n).any():
        raise corrupt("remainder 4", "exceptions are out of order or beyond the chunk")
    chunk[numbers] = bits
    return chunk.view(np.uint8)


def _predict(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None, first: Partner, second: Partner | None = None) -> Bytes:
    """The first partner is exp_avg, the second exp_avg_sq; of each the chunk, and that of the parent (predict 4)."""
    assert base is not None
    if dtype.name != "f32" or any(partner[0].name != "f32" or partner[2] is None for partner in (first, second) if partner):
        raise corrupt("predict 1", f"{dtype.name} or a partner is not f32")
    if columns[0].size != 32:
        raise corrupt("predict 2", f"{columns[0].size} bytes of coefficients")
    wide = [data.view("<f4").astype(np.float64) for data in (base, *first[1:3], *(second or ())[1:3]) if data is not None]
    with np.errstate(all="ignore"):
        if second:
            (e, a, b, c), (w, m1, m0, v1, v0) = columns[0].view("<f8"), wide
            p = w + ((a * (m1 / (np.sqrt(v1) + e)) + b * (m0 / (np.sqrt(v0) + e))) + c * w)
        else:
            (a, b, c, d), (v0, m1, m0) = columns[0].view("<f8"), wide
            p = (a * v0 + b * (m1 * m1)) + (c * (m0 * m0) + d * (m0 * m1))
        narrow = p.astype("<f4")
    prediction = np.where(np.isfinite(narrow), narrow, np.float32(0)).astype("<f4")
    return _ordered(dtype, n, columns[1:], prediction.view(np.uint8))


def _replay(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None, first: Partner, second: Partner | None = None) -> Bytes:
    """Partners as of `_predict` (replay 4)."""
    assert base is not None
    if dtype.name != "f32" or any(partner[0].name != "f32" for partner in (first, second) if partner):
        raise corrupt("replay 1", f"{dtype.name} or a partner is not f32")
    if second:
        replayed = replay.step(columns[0], base, first[1], second[1])
    else:
        assert first[2] is not None
        replayed = replay.moment(columns[0], base, first[1], first[2])
    return _ordered(dtype, n, columns[1:], replayed)


def _descent(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None, momentum: Partner) -> Bytes:
    assert base is not None
    if dtype.name != "f32" or momentum[0].name != "f32" or momentum[2] is None:
        raise corrupt("descent 1", f"{dtype.name} or the partner is not f32")
    return _ordered(dtype, n, columns[1:], descent.step(columns[0], base, momentum[1], momentum[2]))


def _gradient(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None, first: Partner | None = None) -> Bytes:
    assert base is not None
    if dtype.name != "f32" or (first and first[0].name != "f32"):
        raise corrupt("gradient 1", f"{dtype.name} or a partner is not f32")
    if first:
        assert first[2] is not None
        return _ordered(dtype, n, columns[1:], gradient.second(columns[0], base, first[1], first[2]))
    exponents = _classed(columns[1], base.view("<u4") >> 23 & 255, "gradient 4", "gradient 4")
    return gradient.first(columns[0], exponents, decode_plane(columns[2], n), columns[3], base)


def _joint(
    dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None, first: Partner | None = None, second: Partner | None = None
) -> Bytes:
    """Partners as of `_predict`; the first has gradients (joint 1)."""
    assert base is not None
    if first is None:
        return joint_first(dtype, n, columns, base)[0]
    used = [(dtype, base), *((partner[0], partner[2]) for partner in (first, second) if second and partner)]
    if any(kind.name not in ("f32", "bf16") for kind, _ in used):
        raise corrupt("joint 1", f"{dtype.name} or a partner is neither f32 nor bf16")
    if first[3] is None:
        raise corrupt("codecs 5.4", "the partner of role exp_avg holds no gradients of this step")
    wide = [joint.widen(kind.name, data) for kind, data in used if data is not None]
    replayed = (joint.weight if second else joint.second)(columns[0], *wide, first[3].view("<f4"))
    return _ordered(dtype, n, columns[1:], joint.narrow(dtype.name, replayed))


def gradients(name: str, dtype: Dtype, n: int, columns: list[Column], base: Bytes | None) -> Bytes:
    """The gradients that a chunk of first moments defines (codecs 5.4)."""
    if name not in ("tc.gradient", "tc.joint") or columns[0][0] != "gradient" or base is None:
        raise corrupt("codecs 5.4", f"a chunk of {name} holds no gradients")
    pages = [data for _, data in columns]
    if name == "tc.joint":
        return joint_first(dtype, n, pages, base)[1]
    exponents = _classed(pages[1], base.view("<u4") >> 23 & 255, "gradient 4", "gradient 4")
    return joint.gradients_of_f32(pages[0], exponents, decode_plane(pages[2], n), pages[3], base)


def joint_first(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes) -> tuple[Bytes, Bytes]:
    """A first moment, and its gradients."""
    if dtype.name != "bf16":
        raise corrupt("joint 1", f"a first moment of {dtype.name}")
    exponents = _classed(columns[1], base.view("<u2") >> 7 & 255, "gradient 4", "gradient 4")
    return joint.first(columns[0], exponents, decode_plane(columns[2], n), columns[3], base)


def widen_f16(bits: Bytes) -> np.ndarray:
    """The bits of the f32 of the same value, NaN too (remainder 2)."""
    e, f = (bits >> 10 & 31).astype(np.int64), (bits & 1023).astype(np.int64)
    h = np.where(f > 0, np.floor(np.log2(np.maximum(f, 1))), 0).astype(np.int64)
    small = np.where(f > 0, (h + 103 << 23) + (f - (1 << h) << 23 - h), 0)
    magnitude = np.where(e == 0, small, (np.where(e == 31, 255, e + 112) << 23) + (f << 13))
    return (bits >> 15).astype(np.int64) << 31 | magnitude


@dataclass(frozen=True)
class Codec:
    kinds: frozenset[str]
    columns: tuple[str, ...]
    function: Callable[..., Bytes]
    column_per_byte: bool = False
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """by role of the tensor, the roles of its partners (codecs 5); in deltas of the parent, too"""
    gradients: frozenset[str] = frozenset()
    """roles of partners whose gradients are needed (codecs 5.4)"""
    now_only: frozenset[str] = frozenset()
    """roles of tensors whose partners are not needed of the parent"""
    other_columns: tuple[tuple[str, ...], ...] = ()
    dtypes: frozenset[str] | None = None

    def check(self, name: str, kind: str, dtype: Dtype, columns: list[str]) -> None:
        """What can be judged without bytes and base."""
        if kind not in self.kinds:
            raise corrupt("codecs 3", f"{name} in a chunk of kind {kind}")
        if self.dtypes is not None and dtype.name not in self.dtypes:
            raise corrupt(f"{name.removeprefix('tc.')} 1", f"{name} in a chunk of {dtype.name}")
        lists = [self.columns_of(dtype), *self.other_columns]
        if name == "tc.rows":
            inner = [CODECS[inner, 1] for inner, _ in INNER]
            lists = [("rows", *codec.columns_of(dtype)) for codec in inner if codec.dtypes is None or dtype.name in codec.dtypes]
        elif name in ("tc.factored", "tc.magnitudes"):
            lists = [self.columns[:len(self.columns) - 4 + dtype.unit]]
        if tuple(columns) not in lists:
            raise corrupt("codecs 4.1", f"columns {columns} of {name}")

    def columns_of(self, dtype: Dtype) -> tuple[str, ...]:
        return self.columns[:dtype.unit] if self.column_per_byte else self.columns

    def decode(self, dtype: Dtype, n: int, columns: list[Column], base: Bytes | None, partners: list[Partner] = []) -> Bytes:
        if self.function is _rows:
            inner, _ = INNER[rows_header(columns[0][1])[0]]
            CODECS[inner, 1].check(inner, "delta" if inner == "tc.ordered" else "absolute", dtype, [name for name, _ in columns[1:]])
        wanted = len(self.needs.get({"moment": "exp_avg_sq", "gradient": "exp_avg"}.get(columns[0][0], "master"), ()))
        if len(partners) != wanted:
            raise corrupt("codecs 5.2", f"{len(partners)} partners, not {wanted}")
        return self.function(dtype, n, [data for _, data in columns], base, *partners)


CODECS: dict[tuple[str, int], Codec] = {
    ("tc.raw", 1): Codec(frozenset({"absolute"}), ("values",), _raw),
    ("tc.constant", 1): Codec(frozenset({"absolute"}), ("values",), _constant),
    ("tc.bitmask", 1): Codec(frozenset({"delta"}), ("mask", "values"), _bitmask),
    ("tc.planes", 1): Codec(frozenset({"absolute", "delta"}), tuple(f"plane{k}" for k in range(8)), _planes, True),
    ("tc.ordered", 1): Codec(frozenset({"delta"}), ("tokens", "bits"), _ordered, dtypes=frozenset(EXPONENTS)),
    ("tc.sparse", 1): Codec(frozenset({"delta"}), ("changes",), _sparse, dtypes=frozenset(EXPONENTS)),
    ("tc.rows", 1): Codec(frozenset({"delta"}), ("rows",), _rows),
    ("tc.factored", 1): Codec(
        frozenset({"absolute"}), ("rows", "columns", "exponents", "plane0", "plane1", "plane2"), _factored, dtypes=frozenset({"bf16", "f32"}),
    ),
    ("tc.magnitudes", 1): Codec(
        frozenset({"absolute"}), ("rows", "columns", "magnitudes", "escapes", "signs", "fractions", "plane0", "plane1"), _magnitudes,
        dtypes=frozenset({"bf16", "f32"}),
    ),
    ("tc.rounded", 1): Codec(
        frozenset({"absolute"}), ("rounded0", "rounded1", "low", "high", "rounding"), _rounded, dtypes=frozenset({"f32"}),
    ),
    ("tc.remainder", 1): Codec(
        frozenset({"absolute"}), ("low", "high", "rounding"), _remainder, needs={"master": ("model",)}, dtypes=frozenset({"f32"}),
    ),
    ("tc.predict", 1): Codec(
        frozenset({"delta"}), ("step", "tokens", "bits"), _predict, other_columns=(("moment", "tokens", "bits"),),
        needs={"master": ("exp_avg", "exp_avg_sq"), "exp_avg_sq": ("exp_avg",)}, dtypes=frozenset({"f32"}),
    ),
    ("tc.replay", 1): Codec(
        frozenset({"delta"}), ("step", "tokens", "bits"), _replay, other_columns=(("moment", "tokens", "bits"),),
        needs={role: ("exp_avg", "exp_avg_sq") for role in ("master", "model")} | {"exp_avg_sq": ("exp_avg",)},
        now_only=frozenset({"master", "model"}), dtypes=frozenset({"f32"}),
    ),
    ("tc.descent", 1): Codec(
        frozenset({"delta"}), ("step", "tokens", "bits"), _descent, needs={role: ("momentum",) for role in ("master", "model")},
        dtypes=frozenset({"f32"}),
    ),
    ("tc.gradient", 1): Codec(
        frozenset({"delta"}), ("gradient", "exponents", "lengths", "digits"), _gradient, other_columns=(("moment", "tokens", "bits"),),
        needs={"exp_avg": (), "momentum": (), "exp_avg_sq": ("exp_avg",)}, dtypes=frozenset({"f32"}),
    ),
    ("tc.joint", 1): Codec(
        frozenset({"delta"}), ("gradient", "exponents", "lengths", "digits"), _joint,
        other_columns=(("moment", "tokens", "bits"), ("step", "tokens", "bits")),
        needs={"exp_avg": (), "exp_avg_sq": ("exp_avg",)} | {role: ("exp_avg", "exp_avg_sq") for role in ("master", "model")},
        gradients=frozenset({"exp_avg"}), now_only=frozenset({"exp_avg_sq"}), dtypes=frozenset({"f32", "bf16"}),
    ),
    ("tc.loguniform", 1): Codec(
        frozenset({"absolute", "delta"}), ("grid", "rows", "columns", "codes", "signs", "escapes"), loguniform, dtypes=frozenset({"f32"}),
    ),
    ("tc.cluster", 1): Codec(
        frozenset({"absolute"}), ("labels", "codes", "scale", "offset", "options"), cluster, dtypes=frozenset({"f32"}),
    ),
    ("tc.kmeans", 1): Codec(frozenset({"absolute", "delta"}), ("levels", "codes", "protected"), kmeans, dtypes=frozenset({"bf16", "f32"})),
    ("tc.blockwise8", 1): Codec(frozenset({"absolute"}), ("map", "absmax", "codes"), blockwise8, dtypes=frozenset({"f32"})),
}


def codec_of(name: str, version: int) -> Codec:
    if (name, version) not in CODECS:
        raise unsupported("codecs 2", f"codec {name!r} of version {version}")
    return CODECS[name, version]
