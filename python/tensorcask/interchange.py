"""Checkpoints of other formats, into a store and out of one.

| format | read from | written as |
|---|---|---|
| ``safetensors`` | a file, the index of a sharded model (``*.index.json``), or a model's folder | a file, or shards with an index |
| ``torch`` | a file of ``torch.save``, loaded with ``weights_only=True`` | the same |
| ``dcp`` | a folder of ``torch.distributed.checkpoint`` | the same |

A safetensors file holds tensors only, so an export to it leaves other values out. No import runs code from a file. For
folders of weight deltas, see :mod:`tensorcask.slime`. The commands ``tensorcask import`` and ``tensorcask export`` do
the same.
"""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _native
from ._files import into_place
from ._native import Saved
from ._options import Step, check_step, user_json, writer_options
from ._snapshot import Snapshot
from ._state import OnUnsupported
from ._store import Store, open_store

if TYPE_CHECKING:
    from ._unpickle import RefusedPickle

__all__ = ["export", "import_"]


def import_(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    url: str | os.PathLike[str] | Store,
    *,
    step: int,
    format: str | None = None,
    policy: str = "adaptive",
    user: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    on_unsupported: OnUnsupported = None,
) -> Saved:
    """Saves a checkpoint of another format as a snapshot. Several safetensors files together are one state.

    ``allow``, for the formats ``torch`` and ``dcp``: full names of classes whose objects the checkpoint may hold, such
    as ``argparse.Namespace``. The classes are not imported, and no code of theirs runs. An object becomes a mapping of
    its attributes. An object that was built with arguments cannot be stored. ``on_unsupported`` then gets a stand-in
    with ``vars()`` and ``arguments``.

    ``on_unsupported``: what to do with a value that cannot be stored: ``"error"``, ``"skip"``, or a function of its
    path and the value that returns a value to store instead.
    """
    store = open_store(url, None)
    paths = [Path(source)] if isinstance(source, (str, os.PathLike)) else [Path(path) for path in source]
    kind = format or (_format_of_folder(paths[0]) if paths[0].is_dir() else _format_of(paths[0], False))
    if kind == "safetensors":
        paths = [_files_of_model(path) if path.is_dir() else path for path in paths]
        options = writer_options(policy)
        arguments = (check_step(step), [str(path) for path in paths], user_json(user))
        return store.with_writer(options, lambda writer: writer.save_safetensors(*arguments))
    if len(paths) != 1:
        raise ValueError(f"format {kind!r} needs one file or folder, not {len(paths)}")
    if kind not in ("torch", "dcp"):
        raise ValueError(f"format {kind!r}: use 'safetensors', 'torch' or 'dcp'. For weight deltas use tensorcask.slime.import_deltas()")
    try:
        state = (_read_torch if kind == "torch" else _read_dcp)(paths[0], allow)
    except Exception as error:
        from ._unpickle import RefusedPickle

        if not isinstance(error, RefusedPickle):
            raise
        command = ["tensorcask", "import", str(paths[0]), store.url, "--step", str(step)]
        command += ["--policy", policy] if policy != "adaptive" else []
        command += ["--on-unsupported", "skip"] if on_unsupported == "skip" else []
        command += [word for name in allow for word in ("--allow", name)]
        raise _native.UnsupportedError(_refusal(error, paths[0], command)) from None
    return store.save(state, step=step, policy=policy, user=user, on_unsupported=on_unsupported)


def export(
    url: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str],
    *,
    step: Step = "latest",
    format: str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a snapshot in another format. A target that exists already is an error, and stays as it is.

    ``max_shard_bytes`` splits safetensors into shards with an index. ``target`` is then a folder.
    """
    snapshot = open_store(url, None).snapshot(step)
    path = Path(target)
    kind = format or ("safetensors" if max_shard_bytes else _format_of(path, not path.suffix))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already. Choose another target")
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
    raise ValueError(f"{path}: the name does not tell the format. Pass format='safetensors', 'torch' or 'dcp'")


def _format_of_folder(path: Path) -> str:
    if (path / ".metadata").exists():
        return "dcp"
    if any(path.glob("weight_v*")):
        return "slime"
    if any(path.glob("*.safetensors")):
        return "safetensors"
    raise ValueError(f"{path} holds no checkpoint of a known format (DCP, a model of safetensors, weight deltas). Pass format=")


def _files_of_model(folder: Path) -> Path:
    """The index of a model's folder, or the only file in the folder."""
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder} has {len(found)} files {pattern}. Name the files to import")
    raise FileNotFoundError(f"{folder} holds no safetensors")


def _write_shards(snapshot: Snapshot, folder: Path, limit: int) -> None:
    from ._dtypes import byte_count

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
    # The index is last: where it exists, all shards exist.
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    into_place(folder / "model.safetensors.index.json", lambda temporary: temporary.write_text(json.dumps(index, indent=2)))


def _write_safetensors(snapshot: Snapshot, path: Path, names: list[str]) -> None:
    into_place(path, lambda temporary: snapshot.native.write_safetensors(str(temporary), names))


def _read_torch(path: Path, allow: Sequence[str]) -> Any:
    from ._unpickle import load

    return load(path, allow)


def _read_dcp(path: Path, allow: Sequence[str]) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import set_element
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from ._unpickle import MetadataUnpickler, load

    # Read before DCP asks for the metadata: DCP prints a traceback and tries other files if that fails.
    metadata = MetadataUnpickler(io.BytesIO((path / ".metadata").read_bytes())).load()

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    class Planner(_EmptyStateDictLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], load(value, allow))

    state: dict[str, Any] = {}
    try:
        _load_state_dict(state, storage_reader=Reader(path), planner=Planner(), no_dist=True)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        raise error from None
    return state


def _refusal(refused: RefusedPickle, path: Path, command: list[str]) -> str:
    """The error of a file with objects of classes that were not allowed."""
    if not refused.names:
        return f"{path} is damaged, or cannot be loaded without running code from it: {refused}"
    allowed = [word for name in refused.names for word in ("--allow", name)]
    return (
        f"{path} holds objects of {', '.join(refused.names)}. To import their attributes as plain values, pass allow={refused.names} "
        f"to import_(), or run: {shlex.join([*command, *allowed])}. Neither runs code from the file"
    )
