"""First moments from gradients, and the shortest gradient between two first moments (gradient 5 to 8)."""

from collections.abc import Callable

import numpy as np

from .errors import corrupt
from .replay import SQUARES, Numbers, canonical, fma, form

BLENDS: list[Callable[..., Numbers]] = [
    lambda m, g, b, w: fma(w, g - m, m),
    lambda m, g, b, w: m + w * (g - m),
    lambda m, g, b, w: m * b + g * w,
    lambda m, g, b, w: fma(g, w, m * b),
    lambda m, g, b, w: fma(m, b, g * w),
]
# The gradient of a quotient, from the scale and the factor.
SCALES: list[Callable[..., Numbers]] = [
    lambda q, a, c: ((q * a).astype("<f4") * c).astype("<f4"),
    lambda q, a, c: ((q / a).astype("<f4") * c).astype("<f4"),
]
# The factor of quotients, undone in binary64.
UNSCALES: list[Callable[..., Numbers]] = [lambda j, a: j / a, lambda j, a: j * a]
ESCAPE = 25


def first(column: Numbers, exponents: Numbers, lengths: Numbers, digits: Numbers, base: Numbers) -> Numbers:
    elements, quotients, escaped, _, _ = blended(column, exponents, lengths, digits, base.view("<f4"))
    return np.where(escaped, quotients, elements.view("<u4")).astype("<u4").view(np.uint8)


def blended(
    column: Numbers, exponents: Numbers, lengths: Numbers, digits: Numbers, base: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers, np.float32]:
    """Bytes of the elements that gradients give; bits of the quotients, or of the escapes; which are escaped; gradients; the weight."""
    if column.size not in (13, 18):
        raise corrupt("gradient 3", f"{column.size} bytes of a gradient")
    code, a = _scale(column[13:])
    quotients, escaped = _quotients(exponents.astype(np.int64), lengths.astype(np.int64), digits)
    with np.errstate(all="ignore"):
        blend, b, w, c = _blend(column)
        gradients = SCALES[code](quotients.view("<f4"), a, c)
        return canonical(blend(base, gradients, b, w)), quotients, escaped, gradients, w


def _blend(column: Numbers) -> tuple[Callable[..., Numbers], np.float32, np.float32, np.float32]:
    b, w, c = column[1:13].copy().view("<f4")
    return form(BLENDS, int(column[0]), "gradient 3"), b, w, c


def _scale(column: Numbers) -> tuple[int, np.float32]:
    """The scale that ends a column. A product with 1 changes nothing."""
    if not column.size:
        return 0, np.float32(1)
    form(SCALES, int(column[0]), "gradient 3")
    return int(column[0]), column[1:].copy().view("<f4")[0]


def _quotients(exponents: Numbers, lengths: Numbers, digits: Numbers) -> tuple[Numbers, Numbers]:
    """Bits of the quotients, or of the elements that are escaped; and which are."""
    number = (lengths >= 1) & (lengths < ESCAPE)
    escaped = lengths == ESCAPE
    if (lengths > ESCAPE).any() or (number != ((exponents >= 1) & (exponents <= 254))).any() or exponents[~number].any():
        raise corrupt("gradient 5", "lengths and exponents disagree")
    count = np.where(number, np.maximum(lengths - 1, 1), np.where(escaped, 32, 0))
    ends = np.cumsum(count)
    total = int(ends[-1]) if ends.size else 0
    bits = np.unpackbits(digits, bitorder="little")
    if digits.size != -(-total // 8) or bits[total:].any():
        raise corrupt("gradient 5", f"{digits.size} bytes for {total} bits, or unused bits that are 1")
    stored = np.zeros(count.size, np.int64)
    for i in range(int(count.max(initial=0))):
        chosen = np.flatnonzero(count > i)
        stored[chosen] |= bits[ends[chosen] - count[chosen] + i].astype(np.int64) << i
    last = np.where(lengths > 1, 1 << np.clip(24 - lengths, 0, 23), 0)
    middle = np.where(lengths > 2, stored >> 1 << np.clip(25 - lengths, 0, 23), 0)
    quotients = (stored & 1) << 31 | exponents << 23 | middle | last
    return np.where(escaped, stored, np.where(number, quotients, 0)).astype("<u4"), escaped


def second(column: Numbers, v: Numbers, m1: Numbers, m0: Numbers) -> Numbers:
    if column.size not in (22, 27):
        raise corrupt("gradient 3", f"{column.size} bytes of a moment")
    blend, b1, w, c = _blend(column)
    square = form(SQUARES, int(column[13]), "gradient 3")
    b, o = column[14:22].copy().view("<f4")
    scale = _scale(column[22:])
    with np.errstate(all="ignore"):
        return canonical(square(v.view("<f4"), _gradients(blend, b1, w, c, scale, m0.view("<f4"), m1.view("<f4")), b, o))


def _gradients(
    blend: Callable[..., Numbers], b: np.float32, w: np.float32, c: np.float32, scale: tuple[int, np.float32], m0: Numbers, m1: Numbers
) -> Numbers:
    code, a = scale
    i, j = np.float64(1) / np.float64(w), UNSCALES[code](np.float64(1) / np.float64(c), np.float64(a))
    wide = m0.astype(np.float64)
    r = (m1.astype(np.float64) - wide) * i
    g = wide + r
    z = g * j
    h = np.ldexp(1.0, np.maximum(m1.view("<u4") >> 23 & 255, 1).astype(np.int64) - 151)
    d = np.where(np.abs(g) > np.abs(r), np.abs(g), np.abs(r)) * (j * 2.0**-24)
    gradients, found = g.astype("<f4"), np.zeros(m0.size, bool)
    for k in (2.0, 1.0, 0.5, 0.0, -0.5, -1.0):
        t = h * (i * j) + k * d
        t = np.where(t > 0, t, 0.0)
        low, high = np.abs(z) - t, np.abs(z) + t
        top, below = high.view(np.uint64), (low.view(np.uint64) - np.uint64(1)) ^ high.view(np.uint64)
        for shift in (1, 2, 4, 8, 16, 32):
            below = below | below >> np.uint64(shift)
        q = np.where(low > 0, (top & ~(below >> np.uint64(1))).view(np.float64), 0.0)
        q = np.where(z < 0, 0.0 - q, q).astype("<f4")
        scaled = SCALES[code](q, a, c)
        hit = (canonical(blend(m0, scaled, b, w)).view("<u4") == m1.view("<u4")) & ~np.isnan(q) & ~found
        gradients, found = np.where(hit, scaled, gradients), found | hit
    return gradients
