"""Saves and fills trainings of the Trainer of Transformers whose state is divided among ranks.

A snapshot has ``model``, ``optimizer`` and, with DeepSpeed, ``master`` and ``buffers``: each rank saves its parts. The values
of each rank have the state of the Trainer, the schedule, the gradient scaler and the random states.

To resume from its folder, the Trainer would need all tensors on disk first, in a format for each kind of training. So
:func:`fill` fills the tensors in place, once the Trainer has prepared the model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from . import _native, _ranks
from ._rank_saves import RankSaves
from ._ranks import Loaded

FSDP2, DEEPSPEED = "fsdp2", "deepspeed"
# Key of the kind of training among the values of a rank.
KIND = "trainer"


def kind_of(trainer: Any) -> str | None:
    """Returns how the state of a training is divided; None if each rank has it whole. Refuses kinds that cannot be saved."""
    is_fsdp = bool(getattr(trainer, "is_fsdp_enabled", False))
    is_xla = bool(getattr(trainer, "is_fsdp_xla_enabled", False))
    is_old = is_fsdp and not is_xla and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2
    is_divided = bool(getattr(trainer, "is_distributed_loading_by_transformers", False))
    divided = "a model that Transformers has divided (tp_plan, DistributedConfig)"
    refused = (
        (is_old, "FSDP1", "Use FSDP2: fsdp_config={'version': 2}"),
        (is_xla, "FSDP of XLA", "Use the Trainer's own checkpoints"),
        (is_divided, divided, "Use FSDP2, or tensorcask.Run in a loop of your own"),
    )
    for is_true, what, advice in refused:
        if is_true:
            raise _native.UnsupportedError(f"tensorcask.transformers cannot save {what}. {advice}")
    if getattr(trainer, "is_deepspeed_enabled", False):
        return DEEPSPEED
    return FSDP2 if is_fsdp else None


def save(trainer: Any, kind: str, saves: RankSaves, values: Mapping[str, Any], step: int, user: Mapping[str, Any]) -> None:
    """Saves the state of all ranks. ``values``: the state of the Trainer, and the random states of this rank."""
    own = {**values, KIND: kind, "scheduler": trainer.lr_scheduler.state_dict(), "scaler": scaler_state(trainer.accelerator.scaler)}
    if kind == DEEPSPEED:
        from . import deepspeed

        state, own["deepspeed"] = deepspeed.snapshot_of(trainer.model_wrapped, trained_only=is_peft(trainer))
    else:
        model, optimizer = _fsdp_parts(trainer)
        state = {"model": _model_state(model, trainer), "optimizer": _ranks.optimizer_state(model, optimizer)}
    saves.save(state, own, step, user)


def fill(trainer: Any, saves: RankSaves, told: Loaded) -> None:
    """Fills a prepared Trainer from a step, of which everything but the tensors is told."""
    kind = kind_of(trainer)
    if kind != told.own[KIND]:
        raise _native.UnsupportedError(
            f"step {told.step} was saved by a training with {told.own[KIND]}, and this one has {kind or 'neither FSDP2 nor DeepSpeed'}. "
            "Resume with the same kind, or begin anew from its weights: tensorcask export"
        )
    if kind == DEEPSPEED:
        from . import deepspeed

        def load(state: dict[str, Any]) -> object:
            return saves.fill(state, told.step)

        deepspeed.fill(trainer.model_wrapped, told.own["deepspeed"], told.step, load, trained_only=is_peft(trainer))
    else:
        model, optimizer = _fsdp_parts(trainer)
        with _ranks.untouched([optimizer]):
            template = _ranks.optimizer_template(told.state.get("optimizer"), model, optimizer)
            state = saves.fill({"model": _model_state(model, trainer), "optimizer": template}, told.step)
            set_model_state_dict(model, state["model"], options=StateDictOptions(strict=not is_peft(trainer)))
            _ranks.set_optimizer_state(state["optimizer"], model, optimizer)
    trainer.lr_scheduler.load_state_dict(told.own["scheduler"])
    if trainer.accelerator.scaler is not None and told.own["scaler"] is not None:
        trainer.accelerator.scaler.load_state_dict(told.own["scaler"])


def scaler_state(scaler: Any) -> dict[str, Any] | None:
    """State of a gradient scaler; None without one, or for one that is turned off."""
    return (scaler.state_dict() or None) if scaler is not None else None


def is_peft(trainer: Any) -> bool:
    """Whether a Trainer trains adapters of PEFT, whose base model stays as it is."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(trainer.accelerator.unwrap_model(trainer.model), peft.PeftModel)


def _fsdp_parts(trainer: Any) -> tuple[Any, Any]:
    """The model with its parameters in shards, and the optimizer."""
    from torch.distributed.fsdp import FSDPModule

    for module in trainer.model.modules():
        # An evaluation leaves the parameters of the root module whole.
        if isinstance(module, FSDPModule):
            module.reshard()
    return trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def _model_state(model: Any, trainer: Any) -> dict[str, Any]:
    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=is_peft(trainer)))
    return state
