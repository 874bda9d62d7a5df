"""Shared parts of the adapters of trainers: the random generators of a rank, and the step from which all ranks go on."""

from __future__ import annotations

import inspect
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import _native
from ._frameworks import framework_of, lend, place
from ._shard import is_part
from ._state import flat_arrays
from ._store import Store, open_store
from .engine import Engine, Outcome, Restored

Target = Store | Engine | str | os.PathLike[str]


def open_target(target: Target, options: Mapping[str, Any]) -> Store | Engine:
    """Opens a store; an engine stays as it is. Options of a save belong to the engine, if there is one."""
    if not isinstance(target, Engine):
        return open_store(target, None)
    if options:
        raise TypeError(f"{', '.join(options)}: pass options of saves to tensorcask.Engine")
    return target


def random_states() -> dict[str, Any]:
    """States of the random generators of Python, numpy and torch, in the form that trainers of PyTorch use."""
    import numpy as np
    import torch

    found = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_states(found: Mapping[str, Any]) -> None:
    """Sets the random generators to the result of :func:`random_states`, as it comes from a store."""
    import numpy as np
    import torch

    random.setstate(found["python"])
    np.random.set_state(with_array(found)["numpy"])
    torch.random.set_rng_state(found["cpu"].cpu())
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"].cpu())


def with_array(found: Mapping[str, Any]) -> dict[str, Any]:
    """Random states in which numpy's state is an array of numpy again, also if it was loaded as one of torch."""
    import numpy as np

    name, keys, *rest = found["numpy"]
    return {**found, "numpy": (name, np.asarray(keys), *rest)}


def is_leader(engine: Engine) -> bool:
    """Whether this rank is the first of its host. It saves the values that all ranks have."""
    return engine.rank == (0 if engine.hosts is None else engine.hosts.local_ranks.start)


def restore(engine: Engine, step: int | str = "latest", *, out: Any = None, partial: bool = False) -> Restored | None:
    """Restores the newest step that all ranks can load, or a given step; None if there is none. Call it on all ranks."""
    if step == "latest" and engine.world > 1:
        common = engine.agree()
        if common is None:
            return None
        step = common
    try:
        return engine.restore(step, out=out, partial=partial)
    except _native.NotFoundError:
        if step == "latest":
            return None
        raise


def barrier(engine: Engine) -> None:
    """Waits for all ranks."""
    if engine.world > 1:
        import torch.distributed as dist

        dist.barrier()


def save(engine: Engine, state: Mapping[str, Any], own: Mapping[str, Any], step: int, user: Mapping[str, Any] | None = None) -> Outcome:
    """Saves a state that all ranks have, in shards or in copies, and values of this rank.

    The first rank of each host saves the tensors that all ranks have.
    """
    shared = state if is_leader(engine) else _without_copies(state)
    return engine.save({**shared, own_key(engine.rank): without_tensors(own)}, step=step, user=user)


@dataclass(frozen=True)
class Loaded:
    """A state that :func:`save` saved: the step, the state, the values of this rank, or of the first rank if this rank is new, and
    facts of the user."""

    step: int
    state: dict[str, Any]
    own: dict[str, Any]
    is_own: bool
    user: dict[str, Any]

    @classmethod
    def of(cls, step: int, saved: Mapping[str, Any], target: Mapping[str, Any], rank: int, user: dict[str, Any]) -> Loaded:
        """Takes a saved state apart. ``target``: the tensors that were filled."""
        values = {key: value for key, value in saved.items() if not key.startswith(_OWN)}
        own = saved.get(own_key(rank))
        plain = saved.get(own_key(0), {}) if own is None else own
        return cls(step, filled(target, values), with_tensors(plain), own is not None, user)


Template = Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]]


def load(engine: Engine, state: Template, step: int | str = "latest", *, partial: bool = False) -> Loaded | None:
    """Fills the tensors of a state that :func:`save` saved; None if there is no step. Call it on all ranks.

    ``state``: the state to fill, or a function that makes one, which is called only if there is a step: PyTorch changes a new optimizer
    to describe it. The function gets the saved state, with None in place of each tensor. ``partial``: leaves out tensors that the state
    does not have. The first rank sends the tensors that all ranks have to the others.
    """
    if callable(state):
        told = restore(engine, step, out={}, partial=True)
        if told is None:
            return None
        state = state(told.state)
        # One rank may go back to an older step, if it cannot read this one. Several have agreed.
        step = told.step if engine.world > 1 else step
    is_first = is_leader(engine)
    found = restore(engine, step, out=state if is_first else _without_copies(state), partial=partial or not is_first)
    if found is None:
        return None
    if engine.world > 1:
        _send_copies(state)
    return Loaded.of(found.step, found.state, state, engine.rank, found.user)


def optimizer_state(model: Any, *optimizers: Any) -> dict[str, Any]:
    """State of optimizers by the names of parameters, as ``get_optimizer_state_dict`` gives it.

    PyTorch makes the moments of a new optimizer by a step with zero gradients, after which Adam counts one step more. Here a new
    optimizer stays as it is, and has no moments.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        found = get_optimizer_state_dict(model, optimizer) if optimizer.state else _new_optimizer_state(model, optimizer)
        merged["state"].update(found["state"])
        merged["param_groups"].extend(found["param_groups"])
    return merged


def _new_optimizer_state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import _get_fqns

    names = {parameter: next(iter(_get_fqns(model, name))) for name, parameter in model.named_parameters()}
    found = optimizer.state_dict()
    groups = zip(optimizer.param_groups, found["param_groups"], strict=True)
    return {**found, "param_groups": [{**saved, "params": [names[parameter] for parameter in group["params"]]} for group, saved in groups]}


def optimizer_template(saved: Any, model: Any, *optimizers: Any) -> dict[str, Any]:
    """State of optimizers to fill. It has moments of the parameters that have some in the saved state: others had no gradient yet."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state: dict[str, Any] = get_optimizer_state_dict(model, optimizers)
    slots = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(slots, Mapping):
        return state
    return {**state, "state": {name: value for name, value in state["state"].items() if name in slots}}


def set_optimizer_state(state: dict[str, Any], model: Any, *optimizers: Any) -> None:
    """Sets optimizers to a state of :func:`optimizer_state`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    if optimizers:
        set_optimizer_state_dict(model, optimizers, state, options=StateDictOptions(strict=False))


def optimizers_of_models(models: Sequence[Any], optimizers: Iterable[Any]) -> list[list[Any]]:
    """The optimizers of each model: those of its parameters."""
    known = [{id(parameter) for parameter in model.parameters()} for model in models]
    found: list[list[Any]] = [[] for _ in models]
    for optimizer in optimizers:
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        at = next((at for at, ids in enumerate(known) if theirs <= ids), None)
        if at is None:
            raise _native.UnsupportedError(
                "an optimizer has parameters of several models, or of none. Use one optimizer per model, or one module that holds these models"
            )
        found[at].append(optimizer)
    return found


def needs_closure(optimizer: Any) -> bool:
    """Whether each step of an optimizer needs a function, as of LBFGS. PyTorch cannot make the state of a new one then."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@contextmanager
def untouched(optimizers: Iterable[Any]) -> Iterator[None]:
    """Takes away the moments that a load has made for new optimizers, if the load fails."""
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    try:
        yield
    except BaseException:
        for optimizer in fresh:
            optimizer.state.clear()
        raise


_OWN = "rank_"


def own_key(rank: int) -> str:
    """Key of the values of a rank."""
    return f"{_OWN}{rank}"


def _without_copies(value: Any) -> Any:
    """A state without whole tensors. A list keeps its length."""
    if type(value) is Counter:
        return value
    if isinstance(value, Mapping):
        return {key: _without_copies(item) for key, item in value.items() if framework_of(item) is None or is_part(item)}
    if isinstance(value, (list, tuple)):
        return type(value)([None if framework_of(item) is not None and not is_part(item) else _without_copies(item) for item in value])
    return value


def _send_copies(state: Any) -> None:
    import torch
    import torch.distributed as dist

    for tensor in flat_arrays(state).values():
        if not is_part(tensor):
            # Objects, because a group may have no backend for the device of the tensor.
            sent = [tensor.detach().cpu() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(sent, src=0)
            received = sent[0]
            if dist.get_rank() != 0 and received is not None:
                with torch.no_grad():
                    tensor.copy_(received)


def filled(target: Any, saved: Any) -> Any:
    """The saved state with the tensors of the target."""
    if framework_of(target) is not None:
        return target
    if type(saved) is Counter:
        return saved
    if isinstance(target, Mapping) and isinstance(saved, Mapping):
        return {**saved, **{key: filled(value, saved.get(key, value)) for key, value in target.items()}}
    if isinstance(target, (list, tuple)) and isinstance(saved, (list, tuple)) and len(target) == len(saved):
        return type(target)([filled(value, item) for value, item in zip(target, saved, strict=True)])
    return saved


_TENSOR = "#tensor"


def without_tensors(value: Any) -> Any:
    """Values with bytes in place of small tensors and arrays: a rank that restores need not know their names."""
    framework = framework_of(value)
    if framework is not None:
        lent = lend(value, "a value of this rank")
        return {_TENSOR: [framework, lent.dtype, list(lent.shape), bytes(lent.buffer)]}
    if isinstance(value, deque):
        return deque(map(without_tensors, value), value.maxlen)
    if type(value) is Counter:
        return value
    if isinstance(value, Mapping):
        return {key: without_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [without_tensors(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def with_tensors(value: Any) -> Any:
    """Undoes :func:`without_tensors`."""
    if isinstance(value, deque):
        return deque(map(with_tensors, value), value.maxlen)
    if type(value) is Counter:
        return value
    if isinstance(value, Mapping):
        if value.keys() == {_TENSOR}:
            framework, dtype, shape, data = value[_TENSOR]
            made = place(framework, dtype, shape, "a value of this rank")
            made.buffer[:] = data if isinstance(made.buffer, bytearray) else memoryview(data)
            return made.finish()
        return {key: with_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [with_tensors(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
