"""Saves the state of a Hugging Face Transformers Trainer every few steps, into a store or through the engine.

    from tensorcask.transformers import Callback, checkpoint

    trainer = Trainer(..., callbacks=[Callback("s3://bucket/run42", every=50)])
    trainer.train(resume_from_checkpoint=checkpoint("s3://bucket/run42", "resume"))      # "resume": a scratch folder

Pass a :class:`tensorcask.Engine` in place of the URL, to both, and a save stops the training only for a copy in memory.
On several ranks, each rank passes its own engine, made with ``rank=`` and ``world=``::

    engine = tensorcask.Engine("s3://bucket/run42", rank=arguments.process_index, world=arguments.world_size)
    trainer = Trainer(..., callbacks=[Callback(engine, every=50)])
    trainer.train(resume_from_checkpoint=checkpoint(engine, "resume"))
    engine.finish()

The same lines work with DDP, with FSDP2 (``fsdp=True``, ``fsdp_config={"version": 2}``) and with DeepSpeed's ZeRO 1, 2
and 3. With FSDP2 and DeepSpeed, each rank saves its shards, and ``checkpoint`` writes a folder without tensors: when
the Trainer resumes from the folder in the same process, this module fills the tensors in place. Resume with the same
kind of training. Without an engine, all ranks then save through ``torch.distributed.checkpoint``. With DDP and no
engine, the first process saves.

Each snapshot holds the model, the optimizer, the scheduler, the gradient scaler, the states of the Trainer, of its
callbacks and of random number generators of all ranks. A resumed training therefore continues bit for bit. States of
callbacks, such as the patience of early stopping, come back with ``restore_callback_states_from_checkpoint=True``, as
with the Trainer's own checkpoints. A step is saved when the Trainer begins the next one, after it has evaluated the
step. If PEFT trains one adapter, only the adapter is saved, without the frozen weights.

The Trainer's own checkpoints are not needed (``save_strategy="no"``), but do no harm, and ``load_best_model_at_end``
reads the best model from them. ``keep_last=`` stands for ``save_total_limit``. FSDP1 and models that Transformers
itself divides (``tp_plan``) are refused. FSDP2 and DeepSpeed need Transformers 5.4.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors.torch import save_file
from transformers.trainer_callback import CallbackHandler, ExportableState

from . import _adapters, _native, _ranks, _trainer_parts, _trainer_resume
from ._files import into_place, write_whole
from ._hosts import gather
from ._options import Step
from ._rank_saves import RankSaves, rank_saves
from .engine import Engine

__all__ = ["Callback", "checkpoint"]

# Of a state that each rank has whole.
_KEYS = {"model", "optimizer", "scheduler", "trainer_state"}
_T = TypeVar("_T")


class Callback(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves every ``every`` steps, after the evaluation of the step, and at the end of the training.

    Pass a callback on all ranks. ``target``: a store, its URL, or an engine. ``options``: those of
    :meth:`tensorcask.Store.save`, with FSDP2 and DeepSpeed those of :class:`tensorcask.torch.Writer` and ``keep_last``. With an
    engine none, because the engine has its own.
    """

    def __init__(self, target: _ranks.Target, *, every: int, **options: Any) -> None:
        if every < 1:
            raise ValueError(f"every={every}: use 1 or more")
        # A training that resumed from an older checkpoint saves the later steps again, as it does with the Trainer's
        # own checkpoints.
        self._target, self._every, self._options = _ranks.open_target(target, options), every, options
        self._saved: int | None = None
        # Step to save, and the random states at its end.
        self._due: int | None = None
        self._random: dict[str, Any] = {}
        self._handler: CallbackHandler | None = None
        # Of a training whose state is divided among ranks.
        self._trainer: Any = None
        self._kind: str | None = None
        self._saves: RankSaves | None = None
        _trainer_resume.install()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._target, Engine) and (self._target.rank, self._target.world) != (args.process_index, args.world_size):
            raise ValueError(
                f"the engine is of rank {self._target.rank} of {self._target.world}, but the Trainer of rank {args.process_index} of "
                f"{args.world_size}. Pass rank= and world= to tensorcask.Engine"
            )
        self._due, self._handler = None, _caller(CallbackHandler)
        self._trainer = _caller(transformers.Trainer)
        self._kind = None if self._trainer is None else _trainer_parts.kind_of(self._trainer)
        self._check(args, kwargs.get("optimizer"))
        if self._kind is not None and self._saves is None:
            self._saves = rank_saves(self._target, self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._due = state.global_step if state.global_step % self._every == 0 else None
        self._note_random_states()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_random_states()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_random_states()
        if args.load_best_model_at_end and control.should_training_stop:
            # Before the model is replaced by an older one.
            self._save_due(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer logs, evaluates, steps schedulers and updates other callbacks after the end of a step. It has already drawn the
        # next batch here, so random states are those of before.
        self._save_due(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # load_best_model_at_end has replaced the model by an older one, but not the optimizer.
        if state.global_step != self._saved and not args.load_best_model_at_end:
            self._note_random_states()
            self._due = state.global_step
            self._save_due(args, state, control, **kwargs)

    def _check(self, args: Any, optimizer: Any) -> None:
        """Refuses trainings of which this callback would miss a part."""
        if self._trainer is None and (getattr(args, "fsdp", None) or getattr(args, "deepspeed", None)):
            raise _native.UnsupportedError(
                "no transformers.Trainer has called tensorcask.transformers.Callback, so FSDP and DeepSpeed cannot be saved"
            )
        if self._kind is not None and not _trainer_resume.can_resume():
            raise _native.UnsupportedError(
                f"tensorcask.transformers needs Transformers 5.4 or later for FSDP2 and DeepSpeed, and this is {transformers.__version__}"
            )
        if getattr(args, "fp16", False) and self._kind is None and getattr(optimizer, "scaler", None) is None:
            raise _native.UnsupportedError("fp16: the optimizer of this Trainer has no gradient scaler that could be saved. Use bf16")

    def _note_random_states(self) -> None:
        self._random = _ranks.random_states()

    def _save_due(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due, self._due = self._due, None
        if due == state.global_step:
            self._save(args, state, control, **kwargs)

    def _save(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **kwargs: Any) -> None:
        self._saved = state.global_step
        # The loss that was logged last.
        logged = next((entry for entry in reversed(state.log_history) if "loss" in entry), None)
        user = {} if logged is None else {"loss": logged["loss"], "loss_step": logged["step"]}
        states = self._states_of_callbacks(state, control)
        described = json.dumps({**dataclasses.asdict(state), "stateful_callbacks": states}, sort_keys=True)
        if self._kind is not None and self._saves is not None:
            values = {"trainer_state": described, "random": self._random}
            _trainer_parts.save(self._trainer, self._kind, self._saves, values, state.global_step, user)
            return
        parts: dict[str, Any] = {}
        is_leader = _ranks.is_leader(self._target) if isinstance(self._target, Engine) else state.is_world_process_zero
        if is_leader:
            parts = {**_adapters.weights(model), "optimizer": optimizer.state_dict(), "scheduler": lr_scheduler.state_dict()}
            parts |= {"trainer_state": described, "rng": self._random}
            scaler = _trainer_parts.scaler_state(getattr(optimizer, "scaler", None))
            if scaler is not None:
                parts["scaler"] = scaler
        if isinstance(self._target, Engine):
            if self._target.world > 1:
                parts.pop("rng", None)
                parts[f"rng_{self._target.rank}"] = self._random
            self._target.save(parts, step=state.global_step, user=user)
            return
        others = gather(self._random, args.process_index, args.world_size) if args.world_size > 1 else None
        if is_leader:
            if others is not None:
                parts.pop("rng")
                parts |= {f"rng_{rank}": found for rank, found in enumerate(others)}
            self._target.save(parts, step=state.global_step, user=user, **{"overwrite": True, **self._options})

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


def _caller(kind: type[_T]) -> _T | None:
    """The innermost object of this type that has called this module. Callbacks get neither the handler nor the Trainer."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        frame = outer
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
    return None


def checkpoint(target: _ranks.Target, folder: str | os.PathLike[str], step: Step = "latest") -> str | None:
    """Makes ``folder/checkpoint-<step>``, from which the Trainer resumes, and returns its path; None if no step is saved.

    Call it on all ranks. ``latest`` is the newest step that all ranks can load. Of a training with FSDP2 or DeepSpeed, the folder has no
    tensors: they are read from the store when the Trainer resumes, in this process.
    """
    _trainer_resume.install()
    opened = _ranks.open_target(target, {})
    if isinstance(opened, Engine):
        return _checkpoint_of_engine(opened, folder, step)
    try:
        snapshot = opened.snapshot(step)
    except _native.NotFoundError:
        if step == "latest":
            return None
        raise
    saved, _ = snapshot.structure()
    if owns := _trainer_resume.values_of_ranks(saved):
        return str(_trainer_resume.write(owns, folder, snapshot.step, opened))
    loaded = snapshot.load(framework="torch")
    return str(_write(loaded, folder, snapshot.step, opened.url))


def _checkpoint_of_engine(engine: Engine, folder: str | os.PathLike[str], step: Step) -> str | None:
    told = _ranks.restore(engine, step, out={}, partial=True)
    if told is None:
        return None
    if owns := _trainer_resume.values_of_ranks(told.state):
        path = _trainer_resume.write(owns, folder, told.step, engine)
    else:
        # One rank may go back to an older step, if it cannot read this one. Several have agreed.
        found = _ranks.restore(engine, told.step if engine.world > 1 else step)
        if found is None:
            return None
        path = _write(found.state, folder, found.step, engine.store.url)
    _ranks.barrier(engine)
    return str(path)


def _write(loaded: Any, folder: str | os.PathLike[str], step: int, url: str) -> Path:
    """Writes the files of the Trainer for the parts that were loaded: a rank other than the first of its host has only its random
    states."""
    rngs = {} if not isinstance(loaded, dict) else {key: value for key, value in loaded.items() if key == "rng" or key.startswith("rng_")}
    is_whole = isinstance(loaded, dict) and loaded.keys() >= _KEYS
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
        file = "adapter_model.safetensors" if "adapter" in loaded else "model.safetensors"
        into_place(path / file, lambda temporary: save_file(weights, temporary, metadata={"format": "pt"}))
        if "adapter" in loaded:
            write_whole(path / _adapters.CONFIG, loaded["adapter"])
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
    _trainer_resume.note_whole(path, step)
    return path
