"""A search for the precision of a whole state, within a budget of errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _native, _precision, _state


@dataclass(frozen=True)
class StatePrecision:
    """Precision that a search found for a state.

    ``rules``: for ``precision=`` of saves of this state and later ones. ``settings``: the setting of each tensor that was tried.
    ``stored_bytes``: their estimated size as a base, of ``tensor_bytes``. ``update_error`` and ``weight_error``: errors of
    the sample, in the terms of the budget.
    """

    rules: list[str]
    settings: dict[str, str]
    stored_bytes: int
    tensor_bytes: int
    update_error: float
    weight_error: float


def search_state_precision(
    state: Any, *, update_error: float, weight_error: float, gradients: Mapping[str, Any] | None = None
) -> StatePrecision:
    """Finds the settings with which a state takes the fewest bytes within a budget of errors.

    Tries every setting on a sample of each tensor, on all cores: at most 65,536 elements from its middle. Tried are masters,
    moments, and model tensors without a master, of f32 or bf16. All others stay exact. The result holds for a base; deltas are
    smaller, by factors that differ between settings.

    Args:
        state: State as for a save, with the roles of its tensors in their names.
        update_error: Greatest error of the optimizer's update over the whole state, such as 0.02: root mean square, relative to
            that of the update.
        weight_error: Greatest error of the weights over the whole state, such as 1e-3: root mean square, relative to that of the
            weights. Each number counts by its squared gradient, or Adam's second moment in its place.
        gradients: Gradients, as for :meth:`Store.save`.

    >>> import array, math
    >>> from tensorcask import RawTensor, Store
    >>> def numbers(scale):
    ...     return RawTensor("f32", (4000,), bytearray(array.array("f", (scale * (1 + math.sin(n)) for n in range(4000)))))
    >>> state = {"model": {"w": numbers(0.1)}, "exp_avg": {"w": numbers(1e-3)}, "exp_avg_sq": {"w": numbers(1e-6)}}
    >>> found = search_state_precision(state, update_error=0.02, weight_error=1e-3)
    >>> found.update_error <= 0.02 and found.weight_error <= 1e-3
    True
    >>> saved = Store("memory://state-search-example").save(state, step=1, precision=found.rules)
    >>> saved.stored_bytes < found.tensor_bytes / 2
    True
    """
    flat = _state.flatten(state)
    lent = _precision.lend_gradients(gradients)
    return StatePrecision(*_native.search_state_precision(flat.whole_tensors(), lent, float(update_error), float(weight_error)))
