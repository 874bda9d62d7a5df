"""The step of gradient descent with momentum, computed again as the trainer did (descent 5 to 7)."""

from collections.abc import Callable

import numpy as np

from .errors import corrupt
from .replay import Numbers, canonical, fma, form

UPDATES: list[Callable[..., Numbers]] = [
    lambda w, u, d, s: fma(s, u, w * d),
    lambda w, u, d, s: w * d + s * u,
]
DIRECTIONS: list[Callable[..., Numbers]] = [
    lambda m, g, b: m,
    lambda m, g, b: fma(b, m, g),
    lambda m, g, b: m * b + g,
]


def step(column: Numbers, w: Numbers, m1: Numbers, m0: Numbers) -> Numbers:
    """All are bytes of binary32 numbers: weights of the parent, momenta of now and of the parent."""
    if column.size != 14:
        raise corrupt("descent 3", f"{column.size} bytes of a step")
    update, direction = form(UPDATES, int(column[0]), "descent 3"), form(DIRECTIONS, int(column[1]), "descent 3")
    d, s, b = column[2:].copy().view("<f4")
    w, m1, m0 = (data.view("<f4") for data in (w, m1, m0))
    with np.errstate(all="ignore"):
        g = (m1.astype(np.float64) - m0.astype(np.float64) * np.float64(b)).astype("<f4")
        return canonical(update(w, direction(m1, g, b), d, s))
