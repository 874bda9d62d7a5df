"""Codecs of numbers that were rounded to few: a small code for each, and what the codes stand for. `tc.kmeans` is of `f32` and
`bf16`, all others of `f32` alone."""

from math import isqrt

import numpy as np

from .dtypes import Dtype
from .entropy import decode_plane
from .errors import corrupt

Bytes = np.ndarray


def _mantissa(k: int) -> int:
    """M(k) (loguniform 2), with 2^24 times the 128th root of 2^k by seven square roots; gives what the table of the page says."""
    root = 1 << k + 24 * 128
    for _ in range(7):
        root = isqrt(root)
    return (root + 1 >> 1) - (1 << 23)


MANTISSAS = np.array([_mantissa(k) for k in range(128)])
ZERO, ESCAPE = 128, 129


def loguniform(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    grid, rows, terms, codes, signs, escapes = columns
    if grid.size != 1 or grid[0] > 7:
        raise corrupt("loguniform 1", f"grid {grid[:8]} in {grid.size} bytes")
    steps = 1 << int(grid[0])
    if base is None:
        expected, sign = _expected(n, steps, rows, terms), np.zeros(n, np.int64)
    elif rows.size or terms.size:
        raise corrupt("loguniform 3", "terms in a delta")
    else:
        units = base.view("<u4").astype(np.int64)
        expected, sign = _nearest(units, steps), units >> 31
    symbols = decode_plane(codes, n)
    bits = np.unpackbits(decode_plane(signs, -(-n // 8)), bitorder="little")
    escaped = symbols == ESCAPE
    if bits[n:].any() or bits[:n][escaped].any():
        raise corrupt("loguniform 5", "unused bits, or the sign of an escape, are not zero")
    if escapes.size != 4 * int(escaped.sum()):
        raise corrupt("loguniform 6", f"{escapes.size} bytes for {escaped.sum()} escapes")
    coded = ~escaped & (symbols != ZERO)
    q = expected + symbols.view("i1")
    if ((q < steps) | (q >= 255 * steps))[coded].any():
        raise corrupt("loguniform 4", f"a code that is none of {steps} to {255 * steps - 1}")
    magnitude = np.where(coded, q // steps << 23 | MANTISSAS[q % steps * (128 // steps)], 0)
    chunk = ((sign ^ bits[:n]) << 31 | magnitude).astype("<u4")
    chunk[escaped] = escapes.view("<u4")
    return chunk.view(np.uint8)


def _expected(n: int, steps: int, rows: Bytes, columns: Bytes) -> np.ndarray:
    """p of an absolute chunk; without terms of columns, all of a row are 0 (loguniform 3)."""
    r, c = rows[1:].view("i1").astype(np.int64), columns.view("i1").astype(np.int64)
    if not rows.size or (r.size * c.size != n if c.size else not r.size or n % r.size):
        raise corrupt("loguniform 3", f"{rows.size} bytes of rows and {c.size} of columns for {n} elements")
    if not c.size:
        c = np.zeros(n // r.size, np.int64)
    return (steps * (4 * int(rows[0]) + r[:, None] + c) // 4).reshape(-1)


def _nearest(units: np.ndarray, steps: int) -> np.ndarray:
    """loguniform 2.1"""
    e, f = units >> 23 & 255, units & (1 << 23) - 1
    g = np.append(MANTISSAS[::128 // steps], 1 << 23)
    j = np.searchsorted(g[:-1] + g[1:], 2 * f, "right")
    return np.select([e == 0, e == 255], [steps, 255 * steps - 1], e * steps + j)


def _map(signed: bool) -> np.ndarray:
    """D (blockwise8 2). Rounded to binary64 first, which makes no difference: none of them is that close to a tie."""
    positive = []
    for i in range(7):
        size = 1 << i if signed else 2 << i
        k = np.arange(size)
        positive.append((2 * size + 9 * (2 * k + 1)) / (20 * size * 10 ** (6 - i)))
    t = np.concatenate(positive)
    return np.sort(np.concatenate([[0, 1], t, -t if signed else []])).astype("<f4")


MAPS = _map(True), _map(False)
LINEAR = np.arange(256).astype("<f4")
BLOCK = 256


def blockwise8(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    number, absmax, codes = columns
    if number.size != 1 or number[0] >= len(MAPS):
        raise corrupt("blockwise8 1", f"map {number[:8]} in {number.size} bytes")
    if absmax.size != 4 * -(-n // BLOCK):
        raise corrupt("blockwise8 1", f"{absmax.size} bytes of scales for {n} elements")
    scales = absmax.view("<f4")
    if not np.isfinite(scales).all() or np.signbit(scales).any():
        raise corrupt("blockwise8 1.1", "a scale is not finite, or has a sign")
    return (MAPS[number[0]][decode_plane(codes, n)] * np.repeat(scales, BLOCK)[:n]).view(np.uint8)


def cluster(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    labels, codes, scale, offset, options = columns
    m = scale.size // 4
    if not 1 <= m <= 16 or scale.size % 4 or offset.size != scale.size:
        raise corrupt("cluster 1", f"{scale.size} bytes of scales, {offset.size} of offsets")
    if (labels.size, codes.size, options.size) != (-(-n // 2), n, 2):
        raise corrupt("cluster 1", f"{labels.size} bytes of labels, {codes.size} of codes, {options.size} of options for {n} elements")
    clusters = np.stack([labels & 15, labels >> 4], 1).reshape(-1)
    if clusters[n:].any() or (clusters[:n] >= m).any():
        raise corrupt("cluster 1.1", f"unused bits are not zero, or a label is not below {m}")
    scale, offset = scale.view("<f4"), offset.view("<f4")
    if not np.isfinite(scale).all() or not np.isfinite(offset).all() or np.signbit(scale).any() or (options > 1).any():
        raise corrupt("cluster 1.1", f"scale {scale}, offset {offset}, options {options}")
    clusters = clusters[:n]
    with np.errstate(all="ignore"):
        product = scale[clusters] * (MAPS[1] if options[1] else LINEAR)[codes]
        return (offset[clusters] + product).view(np.uint8)


def kmeans(dtype: Dtype, n: int, columns: list[Bytes], base: Bytes | None) -> Bytes:
    levels, codes, protected = columns
    u = dtype.bits // 8
    if levels.size % u or not u <= levels.size <= 256 * u:
        raise corrupt("kmeans 1", f"{levels.size} bytes of levels")
    v = _as_f32(dtype, levels)
    if not np.isfinite(v).all() or (v[1:] <= v[:-1]).any():
        raise corrupt("kmeans 1", "levels are not finite, or do not ascend")
    if protected.size % (4 + u):
        raise corrupt("kmeans 1", f"{protected.size} bytes of protected elements")
    kept = protected.reshape(-1, 4 + u)
    numbers = np.ascontiguousarray(kept[:, :4]).view("<u4").reshape(-1)
    if (numbers[1:] <= numbers[:-1]).any() or (numbers >= n).any():
        raise corrupt("kmeans 1", "protected elements are out of order or beyond the chunk")
    c = decode_plane(codes, n)
    if base is not None:
        expected = _levels_expected(v, _as_f32(dtype, base))
        order, symbols = np.argsort(expected, kind="stable"), c
        c = np.empty(n, np.int64)
        c[order] = (symbols + expected[order]) % 256
    if (c >= v.size).any():
        raise corrupt("kmeans 4", f"a code of no level, of {v.size}")
    chunk = levels.reshape(-1, u)[c]
    chunk[numbers] = kept[:, 4:]
    return chunk.reshape(-1)


def _as_f32(dtype: Dtype, data: Bytes) -> np.ndarray:
    """The numbers of a chunk of f32, or of bf16, whose bits are the upper half of those of the f32."""
    return data.view("<f4") if dtype.name == "f32" else (data.view("<u2").astype("<u4") << 16).view("<f4")


def _levels_expected(v: np.ndarray, base: np.ndarray) -> np.ndarray:
    """kmeans 3; the middles ascend, though not strictly"""
    with np.errstate(all="ignore"):
        b, wide = base.astype(np.float64), v.astype(np.float64)
    return np.where(np.isnan(b), 0, np.searchsorted((wide[:-1] + wide[1:]) / 2, b, "left"))
