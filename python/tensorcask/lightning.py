"""Checkpoints of Lightning in a tensorcask store.

    from lightning.pytorch import Trainer
    from tensorcask.lightning import CheckpointIO

    trainer = Trainer(plugins=[CheckpointIO("s3://bucket/run42")])
    trainer.fit(model, ckpt_path="checkpoints/epoch=3-step=400.ckpt")

The state goes into the store as the snapshot of its ``global_step``, small where it is a delta. At the path that Lightning chose a small
file says which: callbacks that list, link, move and delete checkpoints work as ever. A file that is deleted takes its snapshot with
it, unless another file that this store knows of names the same step.

What is no tensor, container, number, text or bytes is refused by its path (``on_unsupported``): ``save_hyperparameters`` with plain values
works, with objects it does not. Loading runs no code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _CheckpointIO

from . import _native
from ._files import write_whole
from ._store import Snapshot, Store, _open, check_step

__all__ = ["CheckpointIO"]

_FORMAT = "tensorcask"


class CheckpointIO(_CheckpointIO):  # type: ignore[misc]
    """A plugin for a ``Trainer`` or ``Fabric``. ``options``: those of :meth:`tensorcask.Store.save`, such as ``policy``."""

    def __init__(self, store: Store | str | os.PathLike[str], **options: Any) -> None:
        self._store = _open(store, None)
        self._options = options

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("storage_options is not used; give options to CheckpointIO")
        if "global_step" not in checkpoint:
            raise ValueError(f"{path}: a checkpoint without global_step has no step to be saved as")
        step = check_step(checkpoint["global_step"])
        file = Path(path).absolute()
        files = sorted({str(file), *self._files(step)})
        saved = self._store.save(checkpoint, step=step, user={"files": files}, **self._options)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"format": _FORMAT, "store": self._store.url, "step": step, "snapshot": saved.id}))

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The state of the step that the file names. ``weights_only`` changes nothing: nothing here runs code."""
        step = _step_in(Path(path))
        if step is None:
            raise _native.UnsupportedError(f"{path}: not written by tensorcask.lightning")
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        found = self._store.load(step=step, device=device)
        if not isinstance(found, dict):
            raise _native.CorruptionError(f"step {step} of {self._store.url} is no checkpoint of Lightning")
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        file = Path(path).absolute()
        step = _step_in(file)
        if step is None:
            return
        others = [other for other in self._files(step) if other != str(file) and _step_in(Path(other)) == step]
        file.unlink(missing_ok=True)
        if not others and self._snapshot(step) is not None:
            self._store.forget([step])

    def _snapshot(self, step: int) -> Snapshot | None:
        try:
            return self._store.snapshot(step)
        except _native.NotFoundError:
            return None

    def _files(self, step: int) -> list[str]:
        """The files that named the step when it was saved last."""
        snapshot = self._snapshot(step)
        return [] if snapshot is None else [str(file) for file in snapshot.user.get("files", [])]


def _step_in(file: Path) -> int | None:
    """The step that a file names, if it is one of these."""
    try:
        told = json.loads(file.read_bytes()[:4096])
        return int(told["step"]) if told["format"] == _FORMAT else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IsADirectoryError):
        return None
