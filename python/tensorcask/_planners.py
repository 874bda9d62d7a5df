"""Use of PyTorch's planners beyond their interface: values without pickle, integer keys, and errors that name a
path."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner

from . import _dtypes, _refusals, _staging
from ._state import OnUnsupported, path_text

# Files of torch.save begin so.
_ZIP = b"PK\x03\x04"


def value_of(item: Any, planner: SavePlanner) -> Any:
    """The value itself, which the default planner would pickle. For another planner, the bytes that it returns."""
    if not isinstance(planner, DefaultSavePlanner):
        return planner.resolve_data(item)
    if type(planner).transform_object is DefaultSavePlanner.transform_object and type(planner).resolve_data is DefaultSavePlanner.resolve_data:
        return planner.lookup_object(item.index)
    return _unpickled(planner.resolve_data(item), item)


def _unpickled(data: Any, item: Any) -> Any:
    """The value in the bytes of a planner that extends the default one, if they are those of ``torch.save``."""
    if not isinstance(data, io.BytesIO) or not data.getvalue().startswith(_ZIP):
        return data
    try:
        return torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise _dtypes.UnstorableTypeError(f"{path_text((item.index.fqn,))}: the planner has pickled a value that cannot be stored: {error}") from None
    except RuntimeError:
        # A ZIP archive of the planner's own.
        return data


def give(item: Any, planner: LoadPlanner, value: Any) -> None:
    """Sets a value as the default planner does after unpickling it. Another planner gets bytes, as from other
    readers."""
    if isinstance(planner, DefaultLoadPlanner) and type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
        fqn = item.dest_index.fqn
        if planner.flatten_state_dict:
            _put(planner.original_state_dict, planner.mappings[fqn], value)
            return
        # The planner may have a copy of the caller's state.
        for state in (planner.original_state_dict, planner.state_dict):
            _staging.screen(state.get(fqn), "error", _staging.check_whole, path_text((fqn,)))
            _put(state, (fqn,), value)
    elif isinstance(value, io.BytesIO):
        planner.load_bytes(item, value)
    else:
        # The planner expects the bytes that torch.save writes. They exist only in this process.
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)


def template_of(planner: Any) -> Mapping[Any, Any]:
    """The state to load, as a load planner looks at it. Empty for planners that do not keep it."""
    state = getattr(planner, "state_dict", None)
    return state if isinstance(state, Mapping) else {}


def calling_planner() -> Any:
    """The load planner of DCP's call that the caller is in; None where DCP changes."""
    return sys._getframe(2).f_locals.get("planner")


def _put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    """Sets a value of the caller's state. Where DCP says '7' and the state has key 7, key 7 is set."""
    from torch.distributed.checkpoint._nested_dict import set_element

    def key_in(container: Any, part: Any) -> Any:
        if not isinstance(container, Mapping) or part in container:
            return part
        return next((key for key in container if str(key) == part), part)

    container = state
    try:
        for part in path[:-1]:
            container = container[key_in(container, part)]
        container[key_in(container, path[-1])] = value
    except (KeyError, IndexError, TypeError):
        # The state has no such container yet.
        set_element(state, path, value)


def saving_call() -> tuple[Any, Any]:
    """The state and the save planner of DCP's call that the caller is in; None where DCP changes."""
    # No variable holds the frame: that cycle would keep the state in memory.
    return sys._getframe(2).f_locals.get("state_dict"), sys._getframe(2).f_locals.get("planner")


def empty_mappings(state: Any, planner: Any) -> list[tuple[Any, ...]]:
    """Paths of the empty mappings of a state, which DCP's planner leaves out. A list with one would have a gap."""
    if not isinstance(planner, DefaultSavePlanner) or not planner.flatten_state_dict:
        return []
    if type(planner).set_up_planner is not DefaultSavePlanner.set_up_planner or not isinstance(state, Mapping):
        # The planner may save another state.
        return []
    found: list[tuple[Any, ...]] = []

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, (*path, str(key)))
            if not value and path:
                found.append(path)
        # The planner takes lists apart if they hold mappings, and never tuples.
        elif isinstance(value, list):
            for at, item in enumerate(value):
                if isinstance(item, (Mapping, list)):
                    walk(item, (*path, at))

    walk(state, ())
    return found


def left_out(planner: Any, plans: Iterable[SavePlan], others: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Paths of list elements that the planner knows, but saves on no rank, of lists of which something is saved. ``others``: paths that
    are saved besides those of the plans."""
    paths = getattr(planner, "mappings", None)
    if not isinstance(paths, dict):
        return []
    saved = {item.index.fqn for plan in plans for item in plan.items}
    kept = [*others, *(path for fqn, path in paths.items() if fqn in saved)]
    places = {path[:length] for path in kept for length in range(1, len(path) + 1)}
    lists = {path[:at] for path in kept for at in range(1, len(path)) if isinstance(path[at], int)}
    found = (
        next((path[: at + 1] for at in range(1, len(path)) if path[:at] in lists and path[: at + 1] not in places), None)
        for fqn, path in paths.items()
        if fqn not in saved
    )
    return [path for path in dict.fromkeys(found) if path is not None]


def check_plannable(state: Any, on_unsupported: OnUnsupported) -> None:
    """Refuses tensors that PyTorch's planner would fail on without saying where they are.

    DCP plans a save before it gives the state to the writer, so the state is taken from DCP's own call. Where DCP
    changes, PyTorch's error is raised as before.
    """
    if not isinstance(state, dict):
        return
    try:
        _staging.screen(state, "error", _refusals.check_planned)
    except _dtypes.UnstorableTypeError as error:
        if on_unsupported in (None, "error"):
            raise
        message = f"{error}. dcp.save cannot ask on_unsupported about this tensor, but dcp.async_save can"
        raise _dtypes.UnstorableTypeError(message) from None
