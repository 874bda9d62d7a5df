"""A checkpointer for torchtitan that saves through the engine.

    from tensorcask.torchtitan import CheckpointManager

    config.checkpoint = CheckpointManager.Config(enable=True, interval=500, store="s3://bucket/run42")

In place of torchtitan's own ``CheckpointManager.Config``, in a function of a ``config_registry``. The trainer then builds it, calls it and
closes it as its own. Snapshots hold what torchtitan saves: the model, the optimizers, the learning rates, the data loader of each
data-parallel rank, and the counters of the trainer. A save stops the training for one copy in memory; ``maybe_wait_for_staging``, which the
trainer calls before it changes the weights, waits for the copies of a GPU. Without ``store``, the store is torchtitan's checkpoint folder.

Any number of ranks can load a snapshot. ``keep_latest_k`` is the ``keep_last`` of the engine. Files of Hugging Face
(``initial_load_in_hf``, ``last_save_in_hf``) are refused: use ``tensorcask export``. ``initial_load_path`` names a store. Random generators
are not saved, as in torchtitan. Tested with torchtitan 0.3.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer.base import (  # pyright: ignore[reportMissingImports]
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP  # pyright: ignore[reportMissingImports]

from . import _native, _ranks
from ._store import Store
from .engine import Engine, Saving

__all__ = ["CheckpointManager"]


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves the state of torchtitan's trainer through an engine, which it starts and ends."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options, and some of :class:`tensorcask.Engine`."""

        store: str = ""
        """URL of the store; by default torchtitan's checkpoint folder."""

        next_tiers: list[str] = field(default_factory=list)
        """Further stores."""

        policy: str = "adaptive"
        """When to write a base."""

        back_pressure: str = "wait"
        """What to do if no slot is free."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        if config.initial_load_in_hf or config.last_save_in_hf:
            raise _native.UnsupportedError("tensorcask.torchtitan writes no files of Hugging Face. Use `tensorcask export`")
        self.config = config
        self.states = states
        self.states.update({MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers})
        self.engine = Engine(
            config.store or os.path.join(base_folder, config.folder),
            next_tiers=config.next_tiers,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            policy=config.policy,
            back_pressure=config.back_pressure,
            keep_last=config.keep_latest_k or None,
        )
        self._saving: Saving | None = None
        self._has_ended = False

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only:
            dtype = TORCH_DTYPE_MAP[config.export_dtype]
            weights = self.states[MODEL].state_dict().items()
            state = {key: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value for key, value in weights}
        else:
            state = self._state()
        self._saving = self.engine.begin_save(state, step=curr_step)
        if last_step:
            self._has_ended = True
            self._maybe_wait_for_staging()
        return True

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _load(self, step: int = -1) -> bool:
        config = self.config
        for key in config.exclude_from_loading:
            if key not in self.states:
                raise ValueError(f"{key} not found in state_dict.")
        # A look first: torchtitan makes the moments of new optimizers to describe them.
        if _ranks.restore(self.engine, "latest" if step == -1 else step, out={}, partial=True) is None:
            return self._load_initial()
        # A seed checkpoint, step 0, has only the model.
        is_seed = step == 0 or step == -1 and [found.step for found in self.engine.loadable()] == [0]
        target = dict(self.states[MODEL].state_dict()) if is_seed else self._state(config.exclude_from_loading)
        found = _ranks.restore(self.engine, "latest" if step == -1 else step, out=target, partial=True)
        if found is None:
            return self._load_initial()
        state = _ranks.filled(target, found.state)
        self.states[MODEL].load_state_dict(state)
        for key, value in self.states.items():
            if key != MODEL and not is_seed and isinstance(value, Stateful) and key not in config.exclude_from_loading:
                value.load_state_dict(state[key])
        return True

    def _load_initial(self) -> bool:
        path = self.config.initial_load_path
        if not path:
            return False
        # DCP calls the states' load_state_dict.
        state = dict(self.states[MODEL].state_dict())
        if not self.config.initial_load_model_only:
            state |= {key: value for key, value in self.states.items() if key != MODEL}
        dcp.load(state, storage_reader=Store(path).reader(step="latest"))
        self.states[MODEL].load_state_dict(state)
        return True

    def _state(self, without: Sequence[str] = ()) -> dict[str, Any]:
        """The model's tensors by name, and the states of the other parts."""
        state = dict(self.states[MODEL].state_dict())
        for key, value in self.states.items():
            if key != MODEL and value is not None and key not in without:
                state[key] = value.state_dict() if isinstance(value, Stateful) else value
        return state

    def _maybe_wait_for_staging(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.wait()

    def _wait_for_saving(self) -> None:
        """Does nothing: the agent saves in the background, in order."""

    def _close(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self._has_ended:
            self.engine.finish()
        self.engine.close()
