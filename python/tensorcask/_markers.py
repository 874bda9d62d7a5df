"""Markers: small files in the checkpoint folders of other tools, each naming the snapshot that holds the tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path

from . import _native
from ._files import write_whole
from ._snapshot import Snapshot
from ._store import Store, open_store

NAME = "tensorcask.json"


def store_for(given: Store | str | os.PathLike[str] | None, folder: Path, beside: Path) -> tuple[Store, str]:
    """Opens the given store, or the store ``beside``, and returns its address for a marker in ``folder``.

    The address of a store beside the folder is relative, so that both may be moved together.
    """
    if given is not None:
        store = open_store(given, None)
        return store, _native.absolute_url(store.url)
    return open_store(beside.absolute(), None), os.path.relpath(beside.absolute(), folder.absolute())


def write(folder: Path, address: str, step: int, snapshot: str) -> None:
    """Writes a marker that names a snapshot into a folder."""
    write_whole(folder / NAME, json.dumps({"store": address, "step": step, "snapshot": snapshot}))


def step_in(folder: Path) -> int:
    """The step of the snapshot that the marker of a folder names."""
    try:
        return int(json.loads((folder / NAME).read_text())["step"])
    except FileNotFoundError:
        raise _native.NotFoundError(f"{folder} has no {NAME}, so tensorcask did not save it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _native.CorruptionError(f"{folder / NAME} is not the marker of a snapshot: {error}") from None


def snapshot_in(folder: Path, given: Store | str | os.PathLike[str] | None) -> Snapshot | None:
    """Opens the snapshot that the marker of a folder names; None without a marker."""
    marker = folder / NAME
    try:
        told = json.loads(marker.read_text())
        address, step, snapshot_id = str(told["store"]), int(told["step"]), told["snapshot"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise _native.CorruptionError(f"{marker} is not the marker of a snapshot: {error}") from None
    if given is None:
        given = os.path.normpath(folder.absolute() / address) if address.startswith("..") else address
    store = open_store(given, None)
    snapshot = store.snapshot(step)
    if snapshot.id != snapshot_id:
        raise _native.ConflictError(f"{marker} names snapshot {snapshot_id}, but step {step} of {store.url} was saved again since then")
    return snapshot
