"""Checkpoints of other formats, into a store and out of one.

| format | read from | written as |
|---|---|---|
| ``safetensors`` | a file, the index of a sharded model (``*.index.json``), or a model's folder | a file, or shards with an index |
| ``torch`` | what ``torch.save`` wrote, loaded with ``weights_only=True`` | the same |
| ``dcp`` | a folder of ``torch.distributed.checkpoint`` | the same |

safetensors hold tensors alone: values of the state that are none stay behind. Nothing that is read here can run code. Folders of
weight deltas: :mod:`tensorcask.slime`. The commands ``tensorcask import`` and ``tensorcask export`` do the same.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _native
from ._files import into_place
from ._native import Saved
from ._options import Step, WriterOptions, check_step, parse_policy, user_json
from ._snapshot import Snapshot
from ._store import Store, open_store as _open

__all__ = ["export", "import_"]


def import_(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    url: str | os.PathLike[str] | Store,
    *,
    step: int,
    format: str | None = None,
    policy: str = "adaptive",
    user: Mapping[str, Any] | None = None,
) -> Saved:
    """Saves a checkpoint of another format as a snapshot. Several safetensors files together are one state."""
    store = _open(url, None)
    paths = [Path(source)] if isinstance(source, (str, os.PathLike)) else [Path(path) for path in source]
    kind = format or (_format_of_folder(paths[0]) if paths[0].is_dir() else _format_of(paths[0], False))
    if kind == "safetensors":
        paths = [_files_of_model(path) if path.is_dir() else path for path in paths]
        options: WriterOptions = (*parse_policy(policy), "memory", True, "balanced", ())
        arguments = (check_step(step), [str(path) for path in paths], user_json(user))
        return store.with_writer(options, lambda writer: writer.save_safetensors(*arguments))
    if len(paths) != 1:
        raise ValueError(f"format {kind!r}: give one file or folder")
    if kind not in ("torch", "dcp"):
        raise ValueError(f"format {kind!r}: use 'safetensors', 'torch' or 'dcp'; for weight deltas, tensorcask.slime.import_deltas()")
    state = _read_torch(paths[0]) if kind == "torch" else _read_dcp(paths[0])
    return store.save(state, step=step, policy=policy, user=user)


def export(
    url: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str],
    *,
    step: Step = "latest",
    format: str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a snapshot in another format. What is there already is not touched: an error says so.

    ``max_shard_bytes`` splits safetensors into shards with an index; ``target`` is then a folder.
    """
    snapshot = _open(url, None).snapshot(step)
    path = Path(target)
    kind = format or ("safetensors" if max_shard_bytes else _format_of(path, not path.suffix))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already")
    if kind == "safetensors" and max_shard_bytes:
        _write_shards(snapshot, path, max_shard_bytes)
    elif kind == "safetensors":
        _write_safetensors(snapshot, path, sorted(snapshot.tensors()))
    elif kind == "torch":
        import torch

        state = snapshot.load(framework="torch")
        into_place(path, lambda temporary: torch.save(state, temporary))
    elif kind == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(snapshot.load(framework="torch"), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    else:
        raise ValueError(f"format {kind!r}: use 'safetensors', 'torch' or 'dcp'")


def _format_of(path: Path, is_folder: bool) -> str:
    if is_folder:
        return "dcp"
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return "torch"
    raise ValueError(f"{path}: cannot tell the format by its name; pass format='safetensors', 'torch' or 'dcp'")


def _format_of_folder(path: Path) -> str:
    if (path / ".metadata").exists():
        return "dcp"
    if any(path.glob("weight_v*")):
        return "slime"
    if any(path.glob("*.safetensors")):
        return "safetensors"
    raise ValueError(f"{path}: holds no checkpoint of a known format (DCP, a model of safetensors, weight deltas); pass format=")


def _files_of_model(folder: Path) -> Path:
    """The index of a model's folder, or its only file."""
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder}: has {len(found)} of {pattern}; name the files")
    raise FileNotFoundError(f"{folder}: holds no safetensors")


def _write_shards(snapshot: Snapshot, folder: Path, limit: int) -> None:
    from ._frameworks import byte_count

    groups: list[list[str]] = [[]]
    filled = total = 0
    for name, info in sorted(snapshot.tensors().items()):
        size = byte_count(info.dtype, info.shape)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled, total = filled + size, total + size
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        _write_safetensors(snapshot, folder / file, names)
        weights.update(dict.fromkeys(names, file))
    # Last, so that its being there means that all is there.
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    into_place(folder / "model.safetensors.index.json", lambda temporary: temporary.write_text(json.dumps(index, indent=2)))


def _write_safetensors(snapshot: Snapshot, path: Path, names: list[str]) -> None:
    into_place(path, lambda temporary: snapshot.native.write_safetensors(str(temporary), names))


def _read_torch(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _native.UnsupportedError(f"{path}: holds more than tensors and plain values, and nothing here runs code: {error}") from error


def _read_dcp(path: Path) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    metadata = _MetadataUnpickler(io.BytesIO((path / ".metadata").read_bytes())).load()

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    class Planner(_EmptyStateDictLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            from torch.distributed.checkpoint._nested_dict import set_element

            loaded = torch.load(value, weights_only=True)
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)

    state: dict[str, Any] = {}
    try:
        _load_state_dict(state, storage_reader=Reader(path), planner=Planner(), no_dist=True)
    except CheckpointException as error:
        # Not an `Exception`: DCP wraps what happened, by rank.
        raise next(iter(error.failures.values()))[0] from error
    return state


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's index is a pickle; only the classes that it is made of are let in."""

    _SAFE = {
        "torch": {"Size", "device", "strided", "float32"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "collections": {"OrderedDict"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name in self._SAFE.get(module, ()) or module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return super().find_class(module, name)
        raise _native.UnsupportedError(f"the index of this folder asks for {module}.{name}, which an index has no need of")
