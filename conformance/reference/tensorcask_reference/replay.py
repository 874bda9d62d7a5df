"""The step of an optimizer, computed again as the trainer did (replay 5 to 8)."""

from collections.abc import Callable

import numpy as np

from .errors import corrupt

Numbers = np.ndarray


def fma(x: Numbers, y: Numbers, z: Numbers) -> Numbers:
    """x * y + z of binary32, rounded once. The product is exact in binary64; the sum is rounded to odd before the last rounding."""
    product, z = np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)
    total = np.asarray(product + z)
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64)
    inexact = ((error > 0) | (error < 0)) & (bits % 2 == 0)
    return (bits + np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)).view(np.float64).astype(np.float32)


DIVISORS: list[Callable[..., Numbers]] = [
    lambda r, b, e: r / b + e,
    lambda r, b, e: r * b + e,
    fma,
]
UPDATES: list[Callable[..., Numbers]] = [
    lambda w, m, q, d, s: w * d + (s * m) / q,
    lambda w, m, q, d, s: w * d + s * (m / q),
    lambda w, m, q, d, s: fma(s, m / q, w * d),
    lambda w, m, q, d, s: fma(w, d, (s * m) / q),
    lambda w, m, q, d, s: fma(d, w, w) + (s * m) / q,
    lambda w, m, q, d, s: fma(s, m / q, fma(d, w, w)),
]
SQUARES: list[Callable[..., Numbers]] = [
    lambda v, g, b, o: fma(o * g, g, v * b),
    lambda v, g, b, o: v * b + (o * g) * g,
    lambda v, g, b, o: fma(v, b, (o * g) * g),
    lambda v, g, b, o: v * b + o * (g * g),
    lambda v, g, b, o: fma(o, g * g, v * b),
    lambda v, g, b, o: fma(v, b, o * (g * g)),
]


def form(forms: list[Callable[..., Numbers]], code: int, clause: str = "replay 3") -> Callable[..., Numbers]:
    if code >= len(forms):
        raise corrupt(clause, f"form {code}")
    return forms[code]


def canonical(numbers: Numbers) -> Numbers:
    return np.where(np.isnan(numbers), np.array(0x7FC00000, "<u4").view("<f4"), numbers).astype("<f4").view(np.uint8)


def step(column: Numbers, w: Numbers, m: Numbers, v: Numbers) -> Numbers:
    """All are bytes of binary32 numbers: weights of the parent, moments of now."""
    if column.size != 18:
        raise corrupt("replay 3", f"{column.size} bytes of a step")
    update, divisor = form(UPDATES, int(column[0])), form(DIVISORS, int(column[1]))
    d, s, b, e = column[2:].copy().view("<f4")
    w, m, v = (data.view("<f4") for data in (w, m, v))
    with np.errstate(all="ignore"):
        return canonical(update(w, m, divisor(np.sqrt(v), b, e), d, s))


def moment(column: Numbers, v: Numbers, m1: Numbers, m0: Numbers) -> Numbers:
    if column.size != 13:
        raise corrupt("replay 3", f"{column.size} bytes of a moment")
    square = form(SQUARES, int(column[0]))
    b, o, weight = column[1:].copy().view("<f4")
    v, now, before = v.view("<f4"), m1.view("<f4").astype(np.float64), m0.view("<f4").astype(np.float64)
    with np.errstate(all="ignore"):
        g = (before + (now - before) * (np.float64(1) / np.float64(weight))).astype("<f4")
        return canonical(square(v, g, b, o))
