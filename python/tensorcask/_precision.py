"""Lossy storage: reports of rounding errors, and a search for the cheapest acceptable precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _frameworks, _native
from ._errors import InvalidTypeError, InvalidValueError
from ._native import RoundingChoice, RoundingReport


@dataclass(frozen=True)
class TensorRounding:
    """Rounding errors of a tensor, compared with the tensor that was passed to the save.

    ``elements`` counts the elements that have a relative error: finite and not zero. ``mean_squared`` covers all
    elements. ``update_error`` is the error of Adam's update: its root mean square, relative to that of the update. Only
    second moments that are saved with their first moment have it.
    """

    name: str
    role: str
    setting: str
    elements: int
    max_relative: float
    mean_relative: float
    mean_squared: float
    sign_flips: int
    update_error: float | None

    @classmethod
    def of(cls, name: str, role: str, setting: str, errors: RoundingReport) -> TensorRounding:
        """Creates the report from the values of the library."""
        means = (errors.max_relative, errors.mean_relative, errors.mean_squared)
        return cls(name, role, setting, errors.elements, *means, errors.sign_flips, errors.update_error)


def search_precision(tensor: Any, evaluate: Callable[[str, RoundingReport], object], *, role: str = "exp_avg") -> RoundingChoice:
    """Finds the setting that stores a tensor of f32 or bf16 in the fewest bytes and that ``evaluate`` accepts.

    Calls ``evaluate`` with each setting, cheapest first, and its rounding errors. ``evaluate`` returns whether the
    setting is good enough: it may compare the errors with a budget, or test a model with the rounded state. An
    exception in it ends the search. If no setting is accepted, the result is ``lossless``. Settings are text, as in the
    rules of ``precision=``.

    >>> import array
    >>> from tensorcask import RawTensor
    >>> moments = RawTensor("f32", (1000,), bytearray(array.array("f", (1 / n for n in range(1, 1001)))))
    >>> found = search_precision(moments, lambda setting, errors: errors.max_relative <= 0.05)
    >>> found.rounding.max_relative <= 0.05, found.stored_bytes < 2000
    (True, True)
    >>> search_precision(moments, lambda setting, errors: False).setting
    'lossless'
    """
    lent = _frameworks.lend(tensor, "tensor")
    if lent.dtype not in ("f32", "bf16"):
        raise InvalidValueError(f"a tensor of {lent.dtype}: only f32 and bf16 are rounded")
    return _native.search_precision(lent.dtype, lent.shape, lent.buffer, role, evaluate)


def lend_gradients(gradients: Mapping[str, Any] | None) -> list[tuple[str, str, tuple[int, ...], Any]]:
    """Borrows gradients: name, dtype, shape and bytes of each. Parameters without a gradient are left out."""
    if not isinstance(gradients, Mapping | None):
        raise InvalidTypeError(f"gradients: {type(gradients).__qualname__}; use a dict of gradients by name of the parameter")
    given = {name: gradient for name, gradient in (gradients or {}).items() if gradient is not None}
    lent = {name: _frameworks.lend(gradient, f"gradients[{name!r}]") for name, gradient in given.items()}
    return [(name, part.dtype, part.shape, part.buffer) for name, part in lent.items()]


def words(precision: str | Sequence[str]) -> tuple[str, ...]:
    """Returns one word or several as the tuple that writers take."""
    words = (precision,) if isinstance(precision, str) else tuple(precision) if isinstance(precision, Sequence) else (precision,)
    wrong = next((word for word in words if not isinstance(word, str)), None)
    if wrong is not None:
        raise InvalidTypeError(f"precision: {wrong!r}; use a word such as 'near', or a list of words")
    return words
