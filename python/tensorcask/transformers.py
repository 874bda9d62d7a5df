"""Saves the state of a Hugging Face Transformers Trainer into a tensorcask store every few steps.

    from tensorcask.transformers import Callback, checkpoint

    trainer = Trainer(..., callbacks=[Callback("s3://bucket/run42", every=50)])
    trainer.train(resume_from_checkpoint=checkpoint("s3://bucket/run42", "resume"))      # "resume": a scratch folder

Each snapshot holds the model, the optimizer, the scheduler, the state of the Trainer and the states of random number
generators. A training of one process therefore continues bit for bit. The Trainer's own checkpoints are not needed
(``save_strategy="no"``), but do no harm. With DDP, the first process saves, and random number generators are not
restored. FSDP and DeepSpeed are refused (use ``torch.distributed.checkpoint``). fp16 is refused, because a callback
does not see its gradient scaler.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from . import _native
from ._files import into_place, write_whole
from ._options import Step
from ._store import Store, open_store

__all__ = ["Callback", "checkpoint"]

_KEYS = ("model", "optimizer", "scheduler", "trainer_state", "rng")


class Callback(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves every ``every`` steps and at the end of the training. ``options``: those of
    :meth:`tensorcask.Store.save`."""

    def __init__(self, store: Store | str | os.PathLike[str], *, every: int, **options: Any) -> None:
        if every < 1:
            raise ValueError(f"every={every}: use 1 or more")
        # A training that resumed from an older checkpoint saves the later steps again, as it does with the Trainer's
        # own checkpoints.
        self._store, self._every, self._options = open_store(store, None), every, {"overwrite": True, **options}
        self._saved: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name in ("fsdp", "deepspeed", "fp16"):
            if getattr(args, name, None):
                raise _native.UnsupportedError(
                    f"tensorcask.transformers with {name} would miss part of the state. "
                    "Use torch.distributed.checkpoint, or bf16 for fp16"
                )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            self._save(state, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # load_best_model_at_end has replaced the model by an older one, but not the optimizer.
        if state.global_step != self._saved and not args.load_best_model_at_end:
            self._save(state, **kwargs)

    def _save(self, state: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **kwargs: Any) -> None:
        self._saved = state.global_step
        if not state.is_world_process_zero:
            return
        rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        described = json.dumps(dataclasses.asdict(state), sort_keys=True)
        parts = (model.state_dict(), optimizer.state_dict(), lr_scheduler.state_dict(), described, rng)
        # The loss that was logged last. The loss of this step is not logged yet.
        logged = next((entry for entry in reversed(state.log_history) if "loss" in entry), None)
        user = {} if logged is None else {"loss": logged["loss"], "loss_step": logged["step"]}
        self._store.save(dict(zip(_KEYS, parts, strict=True)), step=state.global_step, user=user, **self._options)


def checkpoint(store: Store | str | os.PathLike[str], folder: str | os.PathLike[str], step: Step = "latest") -> str | None:
    """Writes a checkpoint for the Trainer to ``folder/checkpoint-<step>`` and returns its path; None if the store has
    no snapshot."""
    opened = open_store(store, None)
    try:
        loaded = opened.load(step, framework="torch")
    except _native.NotFoundError:
        if step == "latest":
            return None
        raise
    if not isinstance(loaded, dict) or not loaded.keys() >= set(_KEYS):
        raise _native.UnsupportedError(f"{opened.url}: the snapshot was not saved by tensorcask.transformers. Use tensorcask.load()")
    described = json.loads(loaded["trainer_state"])
    path = Path(folder) / f"checkpoint-{described['global_step']}"
    path.mkdir(parents=True, exist_ok=True)
    # The Trainer restores tied weights from the first of them.
    seen: set[tuple[int, tuple[int, ...]]] = set()
    weights = {}
    for name, tensor in loaded["model"].items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() == 0 or key not in seen:
            weights[name] = tensor.contiguous()
        seen.add(key)
    rng = loaded["rng"]
    rng["numpy"] = (rng["numpy"][0], np.asarray(rng["numpy"][1]), *rng["numpy"][2:])
    into_place(path / "model.safetensors", lambda temporary: save_file(weights, temporary, metadata={"format": "pt"}))
    for name, value in (("optimizer.pt", loaded["optimizer"]), ("scheduler.pt", loaded["scheduler"]), ("rng_state.pth", rng)):
        into_place(path / name, lambda temporary, value=value: torch.save(value, temporary))  # type: ignore[misc]
    write_whole(path / "trainer_state.json", json.dumps(described, indent=2, sort_keys=True))
    return str(path)
