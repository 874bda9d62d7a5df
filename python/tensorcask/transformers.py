"""Saves the state of a Hugging Face Transformers Trainer every few steps, into a store or through the engine.

    from tensorcask.transformers import Callback, checkpoint

    trainer = Trainer(..., callbacks=[Callback("s3://bucket/run42", every=50)])
    trainer.train(resume_from_checkpoint=checkpoint("s3://bucket/run42", "resume"))      # "resume": a scratch folder

Pass a :class:`tensorcask.Engine` in place of the URL, to both, and a save stops the training only for a copy in memory. With DDP,
each rank passes its own engine, made with ``rank=`` and ``world=``::

    engine = tensorcask.Engine("s3://bucket/run42", rank=arguments.process_index, world=arguments.world_size)
    trainer = Trainer(..., callbacks=[Callback(engine, every=50)])
    trainer.train(resume_from_checkpoint=checkpoint(engine, "resume"))
    engine.finish()

Each snapshot holds the model, the optimizer, the scheduler, the states of the Trainer, of its callbacks and of random number
generators, with an engine those of all ranks. A resumed training therefore continues bit for bit. States of callbacks, such as the
patience of early stopping, come back with ``restore_callback_states_from_checkpoint=True``, as with the Trainer's own checkpoints. A step
is saved when the Trainer begins the next one, after it has evaluated the step. The Trainer's own
checkpoints are not needed (``save_strategy="no"``), but do no harm. With DDP and no engine, the first process saves, and
random number generators are not restored. FSDP and DeepSpeed are refused (use ``tensorcask.accelerate``,
``tensorcask.deepspeed`` or ``torch.distributed.checkpoint``). fp16 is refused, because a callback does not see its
gradient scaler.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.trainer_callback import CallbackHandler, ExportableState

from . import _native, _ranks
from ._files import into_place, write_whole
from ._options import Step
from ._store import Store
from .engine import Engine

__all__ = ["Callback", "checkpoint"]

_KEYS = ("model", "optimizer", "scheduler", "trainer_state", "rng")


class Callback(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves every ``every`` steps, after the evaluation of the step, and at the end of the training.

    ``target``: a store, its URL, or an engine. ``options``: those of :meth:`tensorcask.Store.save`; with an engine none, because
    the engine has its own.
    """

    def __init__(self, target: _ranks.Target, *, every: int, **options: Any) -> None:
        if every < 1:
            raise ValueError(f"every={every}: use 1 or more")
        # A training that resumed from an older checkpoint saves the later steps again, as it does with the Trainer's
        # own checkpoints.
        self._target, self._every, self._options = _ranks.open_target(target, options), every, {"overwrite": True, **options}
        self._saved: int | None = None
        # Step to save, and the random states at its end.
        self._due: int | None = None
        self._random: dict[str, Any] = {}
        self._handler: CallbackHandler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name in ("fsdp", "deepspeed", "fp16"):
            if getattr(args, name, None):
                raise _native.UnsupportedError(
                    f"tensorcask.transformers with {name} would miss part of the state. "
                    "Use torch.distributed.checkpoint, or bf16 for fp16"
                )
        if isinstance(self._target, Engine) and (self._target.rank, self._target.world) != (args.process_index, args.world_size):
            raise ValueError(
                f"the engine is of rank {self._target.rank} of {self._target.world}, but the Trainer of rank {args.process_index} of "
                f"{args.world_size}. Pass rank= and world= to tensorcask.Engine"
            )
        self._due, self._handler = None, _calling_handler()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._due = state.global_step if state.global_step % self._every == 0 else None
        self._note_random_states()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_random_states()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_random_states()
        if args.load_best_model_at_end and control.should_training_stop:
            # Before the model is replaced by an older one.
            self._save_due(state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer logs, evaluates, steps schedulers and updates other callbacks after the end of a step. It has already drawn the
        # next batch here, so random states are those of before.
        self._save_due(state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # load_best_model_at_end has replaced the model by an older one, but not the optimizer.
        if state.global_step != self._saved and not args.load_best_model_at_end:
            self._note_random_states()
            self._due = state.global_step
            self._save_due(state, control, **kwargs)

    def _note_random_states(self) -> None:
        self._random = _ranks.random_states()

    def _save_due(self, state: Any, control: Any, **kwargs: Any) -> None:
        due, self._due = self._due, None
        if due == state.global_step:
            self._save(state, control, **kwargs)

    def _save(self, state: Any, control: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **kwargs: Any) -> None:
        self._saved = state.global_step
        # The loss that was logged last.
        logged = next((entry for entry in reversed(state.log_history) if "loss" in entry), None)
        user = {} if logged is None else {"loss": logged["loss"], "loss_step": logged["step"]}
        parts: dict[str, Any] = {}
        is_leader = _ranks.is_leader(self._target) if isinstance(self._target, Engine) else state.is_world_process_zero
        if is_leader:
            described = json.dumps({**dataclasses.asdict(state), "stateful_callbacks": self._states_of_callbacks(state, control)}, sort_keys=True)
            values = (model.state_dict(), optimizer.state_dict(), lr_scheduler.state_dict(), described, self._random)
            parts = dict(zip(_KEYS, values, strict=True))
        if isinstance(self._target, Engine):
            if self._target.world > 1:
                parts.pop("rng", None)
                parts[f"rng_{self._target.rank}"] = self._random
            self._target.save(parts, step=state.global_step, user=user)
        elif is_leader:
            self._target.save(parts, step=state.global_step, user=user, **self._options)

    def _states_of_callbacks(self, state: Any, control: Any) -> dict[str, Any]:
        """The present states of callbacks and of the control, in the form of ``trainer_state.json``. The Trainer itself renews them only in
        its own checkpoints."""
        found: dict[str, Any] = {}
        for callback in [*(self._handler.callbacks if self._handler is not None else ()), control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                mine = callback.state()
                # Several callbacks of one class have a list.
                found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), mine] if name in found else mine
        return {**state.stateful_callbacks, **found}


def _calling_handler() -> CallbackHandler | None:
    """The handler that calls this callback. It passes neither itself nor other callbacks."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        frame = outer
        if isinstance(handler := frame.f_locals.get("self"), CallbackHandler):
            return handler
    return None


def checkpoint(target: _ranks.Target, folder: str | os.PathLike[str], step: Step = "latest") -> str | None:
    """Writes a checkpoint for the Trainer to ``folder/checkpoint-<step>`` and returns its path; None if no step is saved.

    With an engine, call it on all ranks: each writes its part. ``latest`` is then the newest step that all ranks can load.
    """
    if isinstance(target, Engine):
        found = _ranks.restore(target, step)
        if found is None:
            return None
        path = _write(found.state, folder, found.step, target.store.url)
        _ranks.barrier(target)
        return str(path)
    opened = _ranks.open_target(target, {})
    assert isinstance(opened, Store)
    try:
        snapshot = opened.snapshot(step)
    except _native.NotFoundError:
        if step == "latest":
            return None
        raise
    loaded = snapshot.load(framework="torch")
    return str(_write(loaded, folder, snapshot.step, opened.url))


def _write(loaded: Any, folder: str | os.PathLike[str], step: int, url: str) -> Path:
    """Writes the files of the Trainer for the parts that were loaded: a rank other than the first of its host has only its random
    states."""
    rngs = {} if not isinstance(loaded, dict) else {key: value for key, value in loaded.items() if key == "rng" or key.startswith("rng_")}
    is_whole = isinstance(loaded, dict) and loaded.keys() >= set(_KEYS[:-1])
    if not rngs or not is_whole and len(rngs) != len(loaded):
        raise _native.UnsupportedError(f"{url}: the snapshot was not saved by tensorcask.transformers. Use tensorcask.load()")
    path = Path(folder) / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    files = {("rng_state" + key.removeprefix("rng") + ".pth"): _ranks.with_array(value) for key, value in rngs.items()}
    if is_whole:
        # The Trainer restores tied weights from the first of them.
        seen: set[tuple[int, tuple[int, ...]]] = set()
        weights = {}
        for name, tensor in loaded["model"].items():
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if tensor.numel() == 0 or key not in seen:
                weights[name] = tensor.contiguous()
            seen.add(key)
        into_place(path / "model.safetensors", lambda temporary: save_file(weights, temporary, metadata={"format": "pt"}))
        files |= {"optimizer.pt": loaded["optimizer"], "scheduler.pt": loaded["scheduler"]}
        # Of a checkpoint that `tensorcask import` has read.
        for name, content in loaded.get("files", {}).items():
            if Path(name).name == name and isinstance(content, bytes):
                write_whole(path / name, content)
        if "scaler" in loaded:
            files["scaler.pt"] = loaded["scaler"]
    for file, content in files.items():
        into_place(path / file, lambda temporary, content=content: torch.save(content, temporary))  # type: ignore[misc]
    if is_whole:
        write_whole(path / "trainer_state.json", json.dumps(json.loads(loaded["trainer_state"]), indent=2, sort_keys=True))
    return path
