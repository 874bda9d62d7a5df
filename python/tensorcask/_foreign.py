"""Recognizes checkpoints of other tools at a path that is not a store, and says how to import them.

Runs only after the library found no store, so loading from a store never pays for it.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from . import _folders, _native

_STORE = "store.json"
_MARKER = "tensorcask.json"
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = (".safetensors", ".safetensors.index.json")


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Explains the error of the block, if the path holds a checkpoint of another tool instead of a store."""
    try:
        yield
    except (_native.NotFoundError, _native.StorageError) as error:
        path = _local_path(url)
        found = None if path is None else _described(path)
        if path is None or found is None:
            raise
        # A file is no store that does not answer.
        is_absent = path.is_file()
        explained = (_native.NotFoundError if is_absent else type(error))(f"{path} is {found}")
        explained.kind = "not_found" if is_absent else error.kind
        for name in ("object", "tensor", "chunk", "offset", "clause"):
            setattr(explained, name, getattr(error, name, None))
        explained.message = str(explained)
        raise explained from None


def _described(path: Path) -> str | None:
    try:
        return None if (path / _STORE).exists() else describe(path)
    except OSError:
        return None


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a folder on local disk is a store."""
    return (Path(path) / _STORE).is_file()


def describe(path: Path) -> str | None:
    """Describes the checkpoint of another tool that lies at a path, and how to read it; None if there is none."""
    try:
        if path.is_file():
            return _describe_file(path)
        return _describe_folder(path) if path.is_dir() else None
    except OSError:
        return None


def _describe_file(path: Path) -> str | None:
    if path.name.endswith(_SAFETENSORS):
        what = "the index of a sharded safetensors model" if path.suffix == ".json" else "a safetensors file"
        return _to_import(path, f"{what}, not a store")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/data.pkl") for name in archive.namelist()):
                by_name = path.suffix in _TORCH_SUFFIXES
                return _to_import(path, "a file of torch.save, not a store", "" if by_name else " --format torch")
    return None


def _describe_folder(path: Path) -> str | None:
    if (path / _MARKER).is_file():
        return _describe_marker(path)
    if (path / ".metadata").is_file():
        return _to_import(path, "a folder of torch.distributed.checkpoint, not a store")
    if any((path / name).exists() for name in _ORBAX) or any(
        (step / name).exists() for step in path.iterdir() if step.name.isdigit() for name in _ORBAX
    ):
        return (
            "an Orbax checkpoint, not a store. `tensorcask import` does not read Orbax: "
            "restore the tree with Orbax, then call tensorcask.save(tree, STORE, step=N)"
        )
    if any(path.glob("weight_v*")):
        return _to_import(path, "a folder of weight deltas as slime writes them, not a store", step="")
    if _folders.is_of_trainer(path):
        return _to_import(path, "the checkpoint of a trainer, not a store")
    if any(path.glob("*.safetensors")):
        return _to_import(path, "a folder of safetensors files, not a store")
    return None


def _describe_marker(path: Path) -> str | None:
    """Describes a folder with a marker that names a snapshot."""
    try:
        told = json.loads((path / _MARKER).read_text())
        address, step = str(told["store"]), int(told["step"])
    except (ValueError, KeyError, TypeError):
        return None
    store = os.path.normpath(path.absolute() / address) if address.startswith("..") else address
    return f"the folder of another tool, not a store. Its tensors are step {step} of the store {store}: load({store!r}, {step})"


def _to_import(path: Path, what: str, options: str = "", step: str = " --step N") -> str:
    return f"{what}. Import it into a store: `tensorcask import {path} STORE{step}{options}`"


def _local_path(url: str) -> Path | None:
    """Returns the local path of a URL; None for a remote URL."""
    if "://" not in url:
        return Path(url).absolute()
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.netloc in ("", "localhost") else None
