"""One step of Adam from its gradients (joint 6 to 8). Numbers are binary32, those of bf16 widened."""

import numpy as np

from . import gradient, replay
from .errors import corrupt
from .replay import Numbers, canonical, form


def widen(dtype: str, data: Numbers) -> Numbers:
    if dtype == "f32":
        return data.view("<f4")
    return (data.view("<u2").astype("<u4") << 16).view("<f4")


def narrow(dtype: str, data: Numbers) -> Numbers:
    """From the bytes of binary32 numbers, rounded to nearest, ties to even."""
    if dtype == "f32":
        return data
    bits = data.view("<u4").astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, bits >> 16, rounded & 0xFFFF).astype("<u2").view(np.uint8)


def first(column: Numbers, exponents: Numbers, lengths: Numbers, digits: Numbers, base: Numbers) -> tuple[Numbers, Numbers]:
    """A first moment of bf16, and its gradients."""
    m = widen("bf16", base)
    elements, quotients, escaped, gradients, w = gradient.blended(column, exponents, lengths, digits, m)
    if (quotients[escaped] & 0xFFFF).any():
        raise corrupt("joint 4", "an escape of more than 16 bits")
    moments = np.where(escaped, quotients >> 16, narrow("bf16", elements).view("<u2")).astype("<u2").view(np.uint8)
    return moments, _gradients(m, quotients, escaped, gradients, w)


def gradients_of_f32(column: Numbers, exponents: Numbers, lengths: Numbers, digits: Numbers, base: Numbers) -> Numbers:
    m = base.view("<f4")
    _, quotients, escaped, gradients, w = gradient.blended(column, exponents, lengths, digits, m)
    return _gradients(m, quotients, escaped, gradients, w)


def _gradients(m: Numbers, quotients: Numbers, escaped: Numbers, gradients: Numbers, w: np.float32) -> Numbers:
    """An escape holds the element, from which its gradient is estimated."""
    with np.errstate(all="ignore"):
        before, now = m.astype(np.float64), quotients.view("<f4").astype(np.float64)
        estimated = (before + (now - before) * (np.float64(1) / np.float64(w))).astype("<f4")
    return canonical(np.where(escaped, estimated, gradients).astype("<f4"))


def second(column: Numbers, v: Numbers, g: Numbers) -> Numbers:
    if column.size != 9:
        raise corrupt("joint 3", f"{column.size} bytes of a moment")
    with np.errstate(all="ignore"):
        return canonical(_square(column, v, g))


def weight(column: Numbers, w: Numbers, m: Numbers, v: Numbers, g: Numbers) -> Numbers:
    if column.size != 36:
        raise corrupt("joint 3", f"{column.size} bytes of a step")
    update, divisor = form(replay.UPDATES, int(column[0]), "joint 3"), form(replay.DIVISORS, int(column[1]), "joint 3")
    blend = form(gradient.BLENDS, int(column[18]), "joint 3")
    d, s, b, e = column[2:18].copy().view("<f4")
    decay, share = column[19:27].copy().view("<f4")
    with np.errstate(all="ignore"):
        v = _square(column[27:], v, g)
        return canonical(update(w, blend(m, g, decay, share), divisor(np.sqrt(v), b, e), d, s))


def _square(column: Numbers, v: Numbers, g: Numbers) -> Numbers:
    square = form(replay.SQUARES, int(column[0]), "joint 3")
    b, o = column[1:].copy().view("<f4")
    return square(v, g, b, o)
