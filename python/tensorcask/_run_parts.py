"""Parts of a training run: models with their optimizers, and objects that tell their state as plain values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from . import _native, _ranks
from ._errors import InvalidTypeError, InvalidValueError

_log = logging.getLogger("tensorcask")


class Parts:
    """The objects of a training, by name: models with their optimizers, and all others."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        from torch.nn import Module

        given = {name: part for name, part in named.items() if part is not None}
        if not given:
            raise InvalidTypeError("a run without parts: pass model=, optimizer= and what else the training needs")
        for name, part in given.items():
            _check_part(name, part)
        modules = {name: part for name, part in given.items() if isinstance(part, Module)}
        optimizers = {name: _each(part) for name, part in given.items() if _are_described_optimizers(part)}
        pairs = _ranks.optimizers_of_models(list(modules.values()), [one for found in optimizers.values() for one in found])
        self.models = {name: (modules[name], found) for name, found in zip(modules, pairs, strict=True)}
        self.values = {name: part for name, part in given.items() if name not in modules and name not in optimizers}

    def tensors(self, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Tensors of models and optimizers as they are; those of a saved state to fill.

        """
        # Moments get the names of their parameters, not the numbers of `Optimizer.state_dict()`. A writer finds the weights of
        # numbered moments only in a whole state; names tell them in shards, too, and another number of ranks can resume.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state: dict[str, Any] = {}
        for name, (model, optimizers) in self.models.items():
            found = {"model": get_model_state_dict(model)}
            if optimizers and saved is None:
                found["optimizer"] = _ranks.optimizer_state(model, *optimizers)
            elif optimizers:
                found["optimizer"] = _ranks.optimizer_template(_below(saved or {}, name).get("optimizer"), model, *optimizers)
            state.update(found if name == "model" else {name: found})
        return state

    def values_now(self) -> dict[str, Any]:
        return {name: _state_of(part) for name, part in self.values.items()}

    def check_saved(self, saved: Mapping[str, Any], rank: int) -> None:
        """Refuses a saved state without the parts of this run, before anything is filled."""
        own = saved.get(_ranks.own_key(rank), saved.get(_ranks.own_key(0)))
        if not isinstance(own, Mapping) or not isinstance(own.get("parts"), Mapping):
            raise _native.TemplateError("the saved state is not one of tensorcask.Run. Load it with tensorcask.load")
        for name, part in self.values.items():
            if name not in own["parts"]:
                raise _native.TemplateError(f"the saved state has no part `{name}`, which this run has. Nothing was filled")
            found = own["parts"][name]
            if isinstance(part, (list, tuple)) and not (isinstance(found, list) and len(found) == len(part)):
                raise _native.TemplateError(f"the saved state has another number of `{name}` than {len(part)}. Nothing was filled")
        for name in sorted(own["parts"].keys() - self.values.keys()):
            _log.warning("the saved state has a part `%s`, which this run does not have: it is not loaded", name)

    def fill_models(self, state: Mapping[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        for name, (model, optimizers) in self.models.items():
            found = _below(state, name)
            set_model_state_dict(model, found["model"])
            _ranks.set_optimizer_state(found["optimizer"] if optimizers else {}, model, *optimizers)

    def fill_values(self, found: _ranks.Loaded, world: int) -> None:
        states = found.own["parts"]
        if found.is_own and found.own["world"] == world:
            for name, part in self.values.items():
                _set_state(part, states[name])
            _ranks.set_random_states(found.own["random"])
            return
        _log.warning(
            "step %d was saved by %d ranks, and %d go on: random states and data loaders start anew", found.step, found.own["world"], world
        )
        for name, part in self.values.items():
            if name != "loader" and not _is_of_rank(part):
                _set_state(part, states[name])


def _each(part: Any) -> list[Any]:
    return list(part) if isinstance(part, (list, tuple)) else [part]


def _are_described_optimizers(part: Any) -> bool:
    """Whether a part is optimizers whose state PyTorch can describe before their first step. Others are values."""
    from torch.optim import Optimizer

    return all(isinstance(one, Optimizer) and not _ranks.needs_closure(one) for one in _each(part))


def _is_generator(part: Any) -> bool:
    import torch

    return isinstance(part, torch.Generator)


def has_state(part: Any) -> bool:
    if isinstance(part, (list, tuple)):
        return bool(part) and all(map(has_state, part))
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)) or _is_generator(part)


def _is_of_rank(part: Any) -> bool:
    """Whether a part is a position in the data, which only as many ranks share in the same way."""
    from torch.utils.data import DataLoader, Sampler

    return any(_is_generator(one) or isinstance(one, (DataLoader, Sampler)) for one in _each(part))


def _check_part(name: str, part: Any) -> None:
    from torch.nn import Module
    from torch.optim import Optimizer

    if name == "model" and not isinstance(part, Module):
        raise InvalidTypeError(f"model={part!r}: use a torch.nn.Module. Pass further models by names of your own")
    if name == "optimizer" and not all(isinstance(one, Optimizer) for one in _each(part)):
        raise InvalidTypeError(f"optimizer={part!r}: use a torch.optim.Optimizer, or a list of them")
    if not has_state(part):
        advice = ". Use a stateful loader, or leave it out and skip the batches that are done" if name == "loader" else ""
        raise InvalidTypeError(f"{name}={part!r} has no state_dict and load_state_dict{advice}")
    if name.startswith("rank_"):
        raise InvalidValueError(f"{name}: such names are those of ranks. Use another one")
    modules = part.modules() if isinstance(part, Module) else ()
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise _native.UnsupportedError(f"{name}: tensorcask.Run cannot save FSDP1. Use FSDP2 (torch.distributed.fsdp.fully_shard)")


def _state_of(part: Any) -> Any:
    if isinstance(part, (list, tuple)):
        return [_state_of(one) for one in part]
    return part.get_state() if _is_generator(part) else part.state_dict()


def _set_state(part: Any, state: Any) -> None:
    if isinstance(part, (list, tuple)):
        for one, saved in zip(part, state, strict=True):
            _set_state(one, saved)
    elif _is_generator(part):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def _below(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The state of a model of this name."""
    found = state if name == "model" else state.get(name, {})
    return found if isinstance(found, Mapping) else {}
