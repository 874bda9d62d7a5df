"""Saves a DeepSpeed engine with ZeRO 1, 2 or 3 through the engine of tensorcask; another number of ranks can load it.

    from tensorcask.deepspeed import load_checkpoint, save_checkpoint

    engine = tensorcask.Engine("s3://bucket/run42", rank=dist.get_rank(), world=dist.get_world_size())
    model_engine, *_ = deepspeed.initialize(...)
    first = load_checkpoint(model_engine, engine) or 0
    for step in range(first + 1, last + 1):
        ...
        model_engine.step()
        save_checkpoint(model_engine, engine, step=step)      # returns after one copy
    engine.finish()

Each rank saves its part of each parameter as a range of a flat tensor of the parameter's name: ``model`` as it computes with, ``master`` in
fp32, and ``optimizer`` with the states of the optimizer. So a snapshot has no trace of the number of ranks, of the stage, or of the order of
parameters in DeepSpeed's flat buffers. A job with another number of ranks, and with another stage, loads it. No conversion to a *universal
checkpoint* is needed.

Saved are also buffers, hyperparameters and steps of the optimizer, the learning rate schedule, the scale of the loss, DeepSpeed's counters,
and the random states of each rank. Not saved: ``client_state`` (pass ``user=``), the position of the data, partial gradient accumulation (save
after a step of the optimizer). Refused: stage 0, pipelines, tensor parallelism, mixtures of experts, and parts that are swapped to NVMe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import _native, _ranks
from ._options import Step
from ._shard import Shard
from .engine import Engine

__all__ = ["load_checkpoint", "save_checkpoint"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def save_checkpoint(model_engine: Any, engine: Engine, *, step: int, user: Mapping[str, Any] | None = None) -> None:
    """Saves a DeepSpeed engine. Call it on all ranks, after ``model_engine.step()``."""
    _check_ranks(engine)
    state, values = snapshot_of(model_engine)
    _ranks.save(engine, state, {**values, "random": _ranks.random_states()}, step, user)


def snapshot_of(model_engine: Any, *, trained_only: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors of a snapshot, in the memory of DeepSpeed, and the values of this rank, without its random states.

    ``trained_only``: leaves out frozen parameters.
    """
    _check(model_engine)
    pieces = list(_pieces(model_engine))
    optimizer = model_engine.optimizer.optimizer
    groups: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        groups.setdefault(piece.group, _group_state(optimizer, piece))
    schedule = model_engine.lr_scheduler
    values = {
        "counters": {name: getattr(model_engine, name) for name in _COUNTERS},
        "groups": [groups.get(at, {}) for at in range(len(optimizer.param_groups))],
        "hyperparameters": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "schedule": schedule.state_dict() if schedule is not None else None,
        "scale": _scale(model_engine.optimizer),
        "shapes": _shapes(model_engine, trained_only),
    }
    return _tensors(model_engine, pieces, _keys(optimizer, pieces), trained_only), values


def load_checkpoint(model_engine: Any, engine: Engine, step: Step = "latest") -> int | None:
    """Fills a DeepSpeed engine. Returns the step, or None if no step is saved. Call it on all ranks.

    ``latest`` is the newest step that all ranks can load.
    """
    _check_ranks(engine)
    _check(model_engine)
    told = _ranks.load(engine, {}, step, partial=True)
    if told is None:
        return None
    at = told.step
    fill(model_engine, told.own, at, lambda state: _ranks.load(engine, state, at))
    if told.is_own:
        _ranks.set_random_states(told.own["random"])
    return at


def fill(
    model_engine: Any, values: Mapping[str, Any], step: int, load: Callable[[dict[str, Any]], object], *, trained_only: bool = False
) -> None:
    """Fills a DeepSpeed engine from a snapshot. ``values``: those of :func:`snapshot_of`. ``load``: fills the tensors that it gets."""
    _check(model_engine)
    shapes = _shapes(model_engine, trained_only)
    other = next((name for name in {**shapes, **values["shapes"]} if shapes.get(name) != values["shapes"].get(name)), None)
    if other is not None:
        raise _native.InvalidArgumentError(
            f"parameter `{other}` has shape {shapes.get(other)}, but {values['shapes'].get(other)} in step {step}"
        )
    optimizer = model_engine.optimizer.optimizer
    pieces = list(_pieces(model_engine))
    keys: dict[str, list[str]] = {}
    for piece in pieces:
        saved = values["groups"][piece.group]
        state = optimizer.state.setdefault(piece.flat, {})
        for key, dtype in saved["shards"].items():
            if key not in state:
                state[key] = torch.zeros_like(piece.flat, dtype=getattr(torch, dtype), requires_grad=False)
        state.update({key: value.clone() if torch.is_tensor(value) else value for key, value in saved["values"].items()})
        keys[piece.name] = list(saved["shards"])
    with torch.no_grad():
        load(_tensors(model_engine, pieces, keys, trained_only))
        # Stage 3 keeps small parameters whole on each rank.
        persistent = getattr(model_engine.optimizer, "persistent_parameters", None)
        if persistent:
            persistent[0].partition(persistent, has_been_updated=False)
            persistent[0].all_gather(persistent)
    # DeepSpeed links parameters to their optimizer states after the first step of stages 1 and 2. safe_get_full_optimizer_state needs the link.
    link_states = getattr(model_engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link_states is not None and any(keys.values()):
        link_states()
    for group, saved in zip(optimizer.param_groups, values["hyperparameters"], strict=True):
        group.update(saved)
    if model_engine.lr_scheduler is not None and values["schedule"] is not None:
        model_engine.lr_scheduler.load_state_dict(values["schedule"])
    for name, value in values["scale"].items():
        setattr(model_engine.optimizer.loss_scaler, name, value)
    for name, value in values["counters"].items():
        setattr(model_engine, name, value)


@dataclass(frozen=True)
class _Piece:
    """This rank's part of the master of a parameter: ``count`` elements from ``start`` of a flat buffer, which are those from ``offset`` of
    the parameter."""

    name: str
    group: int
    flat: Any
    start: int
    count: int
    offset: int
    whole: int

    def shard(self, buffer: Any) -> Shard:
        return Shard(buffer.detach().narrow(0, self.start, self.count), (self.whole,), (self.offset,))


def _pieces(model_engine: Any) -> Iterator[_Piece]:
    optimizer = model_engine.optimizer
    names = {id(parameter): name for name, parameter in model_engine.module.named_parameters()}
    if model_engine.zero_optimization_stage() == 3:
        for parameter in model_engine.module.parameters():
            if parameter.requires_grad:
                sub_group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                offset = min(optimizer._get_param_partition_rank(parameter) * length, parameter.ds_numel)
                # The last part of a parameter is padded.
                count = min(length, parameter.ds_numel - offset)
                flat, group = optimizer.fp32_partitioned_groups_flat[sub_group], optimizer.sub_group_to_group_id[sub_group]
                yield _Piece(names[id(parameter)], group, flat, start, count, offset, parameter.ds_numel)
        return
    is_bf16 = hasattr(optimizer, "fp32_groups_flat_partition")
    parameters = optimizer.bf16_groups if is_bf16 else optimizer.bit16_groups
    buffers = optimizer.fp32_groups_flat_partition if is_bf16 else optimizer.single_partition_of_fp32_groups
    for at, group in enumerate(parameters):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
                yield _Piece(names[id(parameter)], at, buffers[at], here.start, here.numel, there.start, parameter.numel())


def _tensors(model_engine: Any, pieces: list[_Piece], keys: Mapping[str, list[str]], trained_only: bool) -> dict[str, Any]:
    """The tensors of a snapshot, in the memory of DeepSpeed."""
    model: dict[str, Any] = {}
    for name, parameter in _named_parameters(model_engine, trained_only):
        if model_engine.zero_optimization_stage() == 3:
            data = parameter.ds_tensor.detach().view(-1)
            offset = min(model_engine.optimizer._get_param_partition_rank(parameter) * data.numel(), parameter.ds_numel)
            model[name] = Shard(data.narrow(0, 0, min(data.numel(), parameter.ds_numel - offset)), (parameter.ds_numel,), (offset,))
        else:
            model[name] = parameter.detach().view(-1)
    states = model_engine.optimizer.optimizer.state
    optimizer: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        for key in keys.get(piece.name, ()):
            optimizer.setdefault(key, {})[piece.name] = piece.shard(states[piece.flat][key])
    master = {piece.name: piece.shard(piece.flat) for piece in pieces}
    return {"model": model, "buffers": dict(model_engine.module.named_buffers()), "master": master, "optimizer": optimizer}


def _keys(optimizer: Any, pieces: list[_Piece]) -> dict[str, list[str]]:
    """States of the optimizer that have the form of the parameter, by parameter."""
    return {piece.name: list(_group_state(optimizer, piece)["shards"]) for piece in pieces}


def _group_state(optimizer: Any, piece: _Piece) -> dict[str, Any]:
    """The states of a group: dtypes of those in the form of the parameters, and the others, such as the step."""
    state = optimizer.state.get(piece.flat, {})
    shards = {key for key, value in state.items() if torch.is_tensor(value) and value.shape == piece.flat.shape}
    return {
        "shards": {key: str(state[key].dtype).removeprefix("torch.") for key in state if key in shards},
        "values": {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items() if key not in shards},
    }


def _named_parameters(model_engine: Any, trained_only: bool) -> Iterator[tuple[str, Any]]:
    named = model_engine.module.named_parameters()
    return ((name, parameter) for name, parameter in named if parameter.requires_grad or not trained_only)


def _shapes(model_engine: Any, trained_only: bool) -> dict[str, list[int]]:
    return {name: list(_shape(parameter)) for name, parameter in _named_parameters(model_engine, trained_only)}


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _scale(optimizer: Any) -> dict[str, Any]:
    """Numbers of the scaler of the loss."""
    found = vars(optimizer.loss_scaler) if hasattr(optimizer, "loss_scaler") and hasattr(optimizer.loss_scaler, "__dict__") else {}
    return {name: value for name, value in found.items() if isinstance(value, (int, float, bool))}


def _check_ranks(engine: Engine) -> None:
    import torch.distributed as dist

    if (engine.rank, engine.world) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(f"the engine is of rank {engine.rank} of {engine.world}. Pass rank=dist.get_rank() and world=dist.get_world_size()")


def _check(model_engine: Any) -> None:
    """Refuses trainings whose state is not complete here."""
    stage = model_engine.zero_optimization_stage()
    reasons = {
        f"ZeRO stage {stage}": stage not in (1, 2, 3),
        "a pipeline": hasattr(model_engine, "is_pipe_parallel") and bool(model_engine.is_pipe_parallel),
        "tensor parallelism": model_engine.mp_world_size > 1,
        "a mixture of experts": bool(getattr(model_engine, "has_moe_layers", False)),
        "states on NVMe": bool(getattr(model_engine.optimizer, "swap_optimizer", False) or getattr(model_engine.optimizer, "params_in_nvme_and_cpu", False)),
    }
    refused = next((reason for reason, is_true in reasons.items() if is_true), None)
    if refused is not None:
        raise _native.UnsupportedError(f"tensorcask.deepspeed cannot save {refused}; it can save ZeRO 1 to 3 with data parallelism")
