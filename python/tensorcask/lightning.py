"""Lightning checkpoints in a tensorcask store.

    import tensorcask.lightning

    trainer = Trainer(plugins=[tensorcask.lightning.CheckpointIO("s3://bucket/run42")])
    trainer.fit(model, ckpt_path="checkpoints/epoch=3-step=400.ckpt")

Each checkpoint is a snapshot of its ``global_step``, small where the snapshot is a delta. At the path that Lightning
chose, a small file names the snapshot, so callbacks can list, link, move and delete checkpoints as usual. Deleting or
overwriting the file forgets its snapshot. A second file for one step goes into a second store beside the first,
``s3://bucket/run42-2`` and so on. A file of weights alone causes this, and so does ``save_last=True``; use
``save_last="link"`` instead.

Values other than tensors, containers, numbers, text and bytes are an error with their path, unless ``on_unsupported``
says otherwise. ``save_hyperparameters`` works with plain values, but not with objects. Loading runs no code.
``LightningModule.load_from_checkpoint`` does not use plugins and cannot read the file: load the state by
:func:`tensorcask.load`.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _CheckpointIO

from . import _native
from ._files import write_whole
from ._options import check_step
from ._snapshot import Snapshot
from ._store import Store, open_store

__all__ = ["CheckpointIO"]

_log = logging.getLogger("tensorcask")
_FORMAT = "tensorcask"
_MOST_STORES = 16


@dataclass(frozen=True)
class _Marker:
    """The snapshot that a file names."""

    store: str
    step: int
    snapshot: str


class CheckpointIO(_CheckpointIO):  # type: ignore[misc]
    """A plugin for ``Trainer`` and ``Fabric``. ``options``: those of :meth:`tensorcask.Store.save`, such as
    ``policy``."""

    def __init__(self, store: Store | str | os.PathLike[str], **options: Any) -> None:
        first = open_store(store, None)
        self._stores = {first.url: first}
        self._first = first
        # Lightning overwrites files of the same name.
        self._options = {"overwrite": True, **options}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("CheckpointIO does not use storage_options. Pass options to CheckpointIO(...)")
        if "global_step" not in checkpoint:
            raise ValueError(f"{path}: the checkpoint has no global_step, which is the step of its snapshot. Add it")
        step = check_step(checkpoint["global_step"])
        file = Path(path).absolute()
        before = _read(file)
        store = self._store_for(step, file)
        saved = store.save(checkpoint, step=step, user={"file": str(file)}, **self._options)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"format": _FORMAT, "store": store.url, "step": step, "snapshot": saved.id}))
        if before is not None and (before.store, before.step) != (store.url, step):
            self._forget(before)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The state that the file names, or an error. ``weights_only`` has no effect, because loading never runs
        code."""
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} does not exist")
        marker = _read(Path(path))
        if marker is None:
            raise _native.UnsupportedError(f"{path} was not written by tensorcask.lightning. Load it without this plugin")
        store = self._store_at(marker.store)
        snapshot = store.snapshot(marker.step)
        if snapshot.id != marker.snapshot:
            again = f"step {marker.step} of {store.url} was saved again since"
            raise _native.ConflictError(f"{path} names snapshot {marker.snapshot}, but {again}. Use tensorcask.load() for the new snapshot")
        found = snapshot.load(device=map_location if isinstance(map_location, (str, torch.device)) else None)
        if not isinstance(found, dict):
            raise _native.CorruptionError(f"step {marker.step} of {store.url} is not a Lightning checkpoint")
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        file = Path(path).absolute()
        marker = _read(file)
        if marker is not None:
            file.unlink(missing_ok=True)
            self._forget(marker)

    def _forget(self, marker: _Marker) -> None:
        """Forgets the snapshot of a file, if it belongs to this run and was not replaced."""
        if not self._is_ours(marker.store):
            return
        store = self._store_at(marker.store)
        snapshot = _live(store, marker.step)
        if snapshot is not None and snapshot.id == marker.snapshot:
            try:
                store.forget([marker.step])
            except _native.Error as error:
                _log.warning("step %d stays in %s: %s", marker.step, store.url, error)

    def _is_ours(self, url: str) -> bool:
        rest = url.removeprefix(self._first.url)
        return url == self._first.url + rest and (rest == "" or rest[0] == "-" and rest[1:].isdigit())

    def _store_at(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = self._first.at(url) if self._is_ours(url) else open_store(url, None)
        return self._stores[url]

    def _store_for(self, step: int, file: Path) -> Store:
        """The first store in which no other file names the step."""
        for number in range(1, _MOST_STORES + 1):
            store = self._store_at(self._first.url if number == 1 else f"{self._first.url}-{number}")
            snapshot = _live(store, step)
            if snapshot is None:
                return store
            other = Path(str(snapshot.user.get("file", "")))
            if other == file or _read(other) != _Marker(store.url, step, snapshot.id):
                return store
        raise _native.ConflictError(f"{_MOST_STORES} files name step {step}. Delete some of them")


def _live(store: Store, step: int) -> Snapshot | None:
    try:
        return store.snapshot(step)
    except _native.NotFoundError:
        return None


def _read(file: Path) -> _Marker | None:
    """The snapshot that a file names; None for other files."""
    try:
        with open(file, "rb") as opened:
            told = json.loads(opened.read(4096))
        return _Marker(str(told["store"]), int(told["step"]), str(told["snapshot"])) if told["format"] == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
