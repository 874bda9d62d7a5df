"""Saves the state of a Hugging Face ``Accelerator`` through the engine.

    from tensorcask.accelerate import load_state, save_state

    engine = tensorcask.Engine("s3://bucket/run42", rank=accelerator.process_index, world=accelerator.num_processes)
    first = load_state(accelerator, engine) or 0      # after accelerator.prepare
    for step in range(first + 1, last + 1):
        ...
        save_state(accelerator, engine, step=step)    # returns after one copy
    engine.finish()

A snapshot holds what ``Accelerator.save_state`` saves: models, optimizers, schedulers, the gradient scaler, objects of
``register_for_checkpointing``, stateful data loaders, and the random states of each rank. Hooks of ``register_save_state_pre_hook`` are not
called. With DDP the tensors are stored once, with FSDP2 each rank stores its shards. Tensors of models and optimizers have the names of
``torch.distributed.checkpoint.state_dict.get_state_dict``, so another number of ranks can load them, and so can another kind of training.
The states of a data loader and of random generators come back only on as many ranks.

DeepSpeed, Megatron-LM and FSDP1 are refused: use ``tensorcask.deepspeed``, ``tensorcask.megatron``, or FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from . import _native, _ranks
from ._options import Step
from .engine import Engine

__all__ = ["load_state", "save_state"]


def save_state(accelerator: Any, engine: Engine, *, step: int, user: Mapping[str, Any] | None = None) -> None:
    """Saves everything that the accelerator has prepared. Call it on all ranks, between two steps of the optimizer."""
    own: dict[str, Any] = {"random": _ranks.random_states(), "step": accelerator.step}
    own["data"] = [loader.state_dict() if getattr(loader, "use_stateful_dataloader", False) else None for loader in accelerator._dataloaders]
    _check(accelerator, engine)
    optimizers = [_ranks.optimizer_state(model, *optimizers) for model, optimizers in _pairs(accelerator)]
    _ranks.save(engine, _state(accelerator, optimizers), own, step, user)


def load_state(accelerator: Any, engine: Engine, step: Step = "latest") -> int | None:
    """Fills everything that the accelerator has prepared. Returns the step, or None if no step is saved. Call it on all ranks.

    ``latest`` is the newest step that all ranks can load. Skipping the batches of the current epoch is left to the caller:
    ``accelerator.skip_first_batches``.
    """
    _check(accelerator, engine)
    pairs = _pairs(accelerator)

    def template(saved: Mapping[str, Any]) -> dict[str, Any]:
        slots = saved.get("optimizers", {})
        states = [_ranks.optimizer_template(slots.get(str(at)), model, *optimizers) for at, (model, optimizers) in enumerate(pairs)]
        return _state(accelerator, states)

    with _ranks.untouched(optimizer for _, optimizers in pairs for optimizer in optimizers):
        found = _ranks.load(engine, template, step)
        if found is None:
            return None
        state, own = found.state, found.own
        for at, (model, optimizers) in enumerate(pairs):
            set_model_state_dict(model, state["models"][str(at)])
            _ranks.set_optimizer_state(state["optimizers"][str(at)], model, *optimizers)
    for scheduler, saved in zip(accelerator._schedulers, _in_order(state["schedulers"]), strict=True):
        scheduler.load_state_dict(saved)
    for custom, saved in zip(accelerator._custom_objects, _in_order(state["objects"]), strict=True):
        custom.load_state_dict(saved)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    if found.is_own:
        for loader, saved in zip(accelerator._dataloaders, own["data"], strict=True):
            if saved is not None:
                loader.load_state_dict(saved)
        accelerator.step = own["step"]
        _ranks.set_random_states(own["random"])
    return found.step


def _check(accelerator: Any, engine: Engine) -> None:
    """Refuses trainings whose state is not complete here."""
    kind = accelerator.distributed_type.value
    is_old = kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False)
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or is_old:
        raise _native.UnsupportedError(f"tensorcask.accelerate cannot save {'FSDP1' if is_old else kind}; it can save DDP and FSDP2")
    if (engine.rank, engine.world) != (accelerator.process_index, accelerator.num_processes):
        raise ValueError(
            f"the engine is of rank {engine.rank} of {engine.world}, but the accelerator of rank {accelerator.process_index} of "
            f"{accelerator.num_processes}. Pass rank= and world= to tensorcask.Engine"
        )


def _state(accelerator: Any, optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have."""
    return {
        "models": _numbered([get_model_state_dict(model) for model in accelerator._models]),
        "optimizers": _numbered(optimizers),
        "schedulers": _numbered([scheduler.state_dict() for scheduler in accelerator._schedulers]),
        "objects": _numbered([custom.state_dict() for custom in accelerator._custom_objects]),
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
    }


def _numbered(states: list[Any]) -> dict[str, Any]:
    """A mapping, because a rank that is new merges the mappings of all ranks; lists would have to be equal."""
    return {str(at): state for at, state in enumerate(states)}


def _in_order(states: Mapping[str, Any]) -> list[Any]:
    return [states[str(at)] for at in range(len(states))]


def _pairs(accelerator: Any) -> list[tuple[Any, list[Any]]]:
    """Each model with its optimizers."""
    optimizers = [getattr(wrapped, "optimizer", wrapped) for wrapped in accelerator._optimizers]
    return list(zip(accelerator._models, _ranks.optimizers_of_models(accelerator._models, optimizers), strict=True))
