"""Resumes the Trainer of Transformers from a snapshot whose state is divided among ranks.

The Trainer resumes from a folder. It reads the training state from ``trainer_state.json``, the random states from
``rng_state_0.pth`` and so on, and skips the batches that are done. ``Trainer._prepare_for_training`` reads the tensors, from
files of FSDP2 or of DeepSpeed. :func:`write` makes a folder with the small files only. :func:`install` extends the method: for
such a folder, it fills the prepared model, optimizer, schedule and scaler from the store.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from . import _native, _ranks, _trainer_parts
from ._files import into_place, write_whole
from ._rank_saves import rank_saves
from ._store import Store
from .engine import Engine

# In a folder without tensors.
_MARKER = "tensorcask.json"


@dataclass(frozen=True)
class _Source:
    """The place of the tensors of a folder."""

    target: Store | Engine
    step: int


# By the real path of the folder.
_sources: dict[str, _Source] = {}
# Real paths of folders with all tensors, and their steps.
_whole: dict[str, int] = {}


def values_of_ranks(saved: Any) -> dict[int, dict[str, Any]]:
    """The values of each rank in a snapshot of a divided training; empty for other snapshots."""
    found = {}
    for key, value in saved.items() if isinstance(saved, Mapping) else ():
        own = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        number = str(key).removeprefix("rank_")
        if number.isdigit() and key == _ranks.own_key(int(number)) and isinstance(own, Mapping) and _trainer_parts.KIND in own:
            found[int(number)] = _ranks.with_tensors(own)
    return found


def write(values: Mapping[int, Mapping[str, Any]], folder: str | os.PathLike[str], step: int, target: Store | Engine) -> Path:
    """Writes the small files of a step. ``values``: those of the ranks whose random states are written; with an engine, of this rank."""
    path = Path(folder) / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    world = target.world if isinstance(target, Engine) else len(values)
    for rank, own in values.items():
        name = f"rng_state_{rank}.pth" if world > 1 else "rng_state.pth"
        random = _ranks.with_array(own["random"])
        into_place(path / name, lambda temporary, random=random: torch.save(random, temporary))  # type: ignore[misc]
    if not isinstance(target, Engine) or _ranks.is_leader(target):
        described = json.loads(values[min(values)]["trainer_state"])
        write_whole(path / "trainer_state.json", json.dumps(described, indent=2, sort_keys=True))
        url = target.store.url if isinstance(target, Engine) else target.url
        write_whole(path / _MARKER, json.dumps({"store": url, "step": step}))
    _whole.pop(os.path.realpath(path), None)
    _sources[os.path.realpath(path)] = _Source(target, step)
    return path


def note_whole(path: Path, step: int) -> None:
    """Notes that a folder has all tensors, in the form for trainings that are not divided."""
    (path / _MARKER).unlink(missing_ok=True)
    _sources.pop(os.path.realpath(path), None)
    _whole[os.path.realpath(path)] = step


def can_resume() -> bool:
    """Whether this version of Transformers can resume divided trainings: 5.4 and later."""
    return hasattr(transformers.Trainer, "_prepare_for_training")


def install() -> None:
    """Extends the Trainer. Folders of others are resumed as before."""
    if not can_resume() or hasattr(transformers.Trainer._prepare_for_training, "__wrapped__"):
        return
    prepare, load = transformers.Trainer._prepare_for_training, transformers.Trainer._load_from_checkpoint

    @functools.wraps(prepare)
    def prepare_and_fill(self: Any, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        source = _source_of(resume_from_checkpoint)
        if source is None:
            _check_whole(self, resume_from_checkpoint)
            return prepare(self, max_steps, train_dataloader, resume_from_checkpoint)
        prepared = prepare(self, max_steps, train_dataloader, None)
        saves = rank_saves(source.target, {})
        told = saves.look(source.step)
        if told is None:
            raise _native.NotFoundError(f"step {source.step} is not saved")
        _trainer_parts.fill(self, saves, told)
        return prepared

    @functools.wraps(load)
    def load_whole(self: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        # Only Trainers that are not divided read the model from the folder.
        source = _source_of(resume_from_checkpoint)
        if source is not None:
            raise _native.UnsupportedError(
                f"step {source.step} was saved with FSDP2 or DeepSpeed, and this Trainer has neither. Resume with the same kind, or "
                "begin anew from its weights: tensorcask export"
            )
        return load(self, resume_from_checkpoint, *args, **kwargs)

    transformers.Trainer._prepare_for_training = prepare_and_fill
    transformers.Trainer._load_from_checkpoint = load_whole


def _source_of(folder: Any) -> _Source | None:
    if folder is None:
        return None
    source = _sources.get(os.path.realpath(folder))
    if source is None and (Path(folder) / _MARKER).exists():
        raise _native.UnsupportedError(f"{folder} has no tensors. Make it again in this process: tensorcask.transformers.checkpoint(...)")
    return source


def _check_whole(trainer: Any, folder: Any) -> None:
    """Refuses a step of a training that was not divided, for one that is."""
    step = None if folder is None else _whole.get(os.path.realpath(folder))
    if step is not None and (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        raise _native.UnsupportedError(
            f"step {step} was saved without FSDP2 and DeepSpeed, and this Trainer has one of them. Resume with the same kind, or "
            "begin anew from its weights: tensorcask export"
        )
