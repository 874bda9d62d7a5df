"""Checkpoints of other formats, into a store and out of one.

| format | read from | written as |
|---|---|---|
| ``safetensors`` | a file, the index of a sharded model (``*.index.json``), or a model's folder | a file, or shards with an index |
| ``torch`` | a file of ``torch.save`` | the same |
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
from ._dtypes import byte_count
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
    its attributes, or a dict or list if its class extends those. An object that was built with arguments cannot be stored.
    ``on_unsupported`` then gets a stand-in with ``vars()``, ``arguments`` and ``items``.

    ``on_unsupported``: what to do with a value that cannot be stored: ``"error"``, ``"skip"``, or a function of its
    path and the value that returns a value to store instead.

    >>> import tempfile, torch, tensorcask
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2), "epoch": 1}, f"{folder}/old.pt")
    ...     saved = import_(f"{folder}/old.pt", "memory://import-example", step=5)
    >>> saved.step, tensorcask.load("memory://import-example")
    (5, {'w': tensor([1., 1.]), 'epoch': 1})
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
    url: str | os.PathLike[str] | Store | Snapshot,
    target: str | os.PathLike[str],
    *,
    step: Step = "latest",
    format: str | None = None,
    max_shard_bytes: int | None = None,
    tensors: str | Sequence[str] | None = None,
    strip_prefix: str = "",
    fqn_to_index_mapping: Mapping[str, int] | None = None,
) -> None:
    """Writes a snapshot in another format. A target that exists already is an error, and stays as it is.

    ``url`` may also be a :class:`tensorcask.Snapshot`, as the function ``after_commit`` of a DCP writer gets it.

    These arguments are for safetensors. ``max_shard_bytes`` splits the tensors into shards with an index; ``target`` is
    then a folder. ``fqn_to_index_mapping`` does so too: it maps each name to the number of its file, from 1, as for
    PyTorch's ``HuggingFaceStorageWriter``. ``tensors`` are names or patterns (``model.*``) of the tensors to write.
    ``strip_prefix`` is left out at the start of their names; ``fqn_to_index_mapping`` has the names without it.

    >>> import tempfile, tensorcask
    >>> from safetensors import safe_open
    >>> weights = {"w": tensorcask.RawTensor("f32", (2,), bytearray(8))}
    >>> _ = tensorcask.save({"model": weights, "epoch": 1}, "memory://export-example", step=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export("memory://export-example", f"{folder}/model.safetensors", tensors="model.*", strip_prefix="model.")
    ...     with safe_open(f"{folder}/model.safetensors", "np") as file:
    ...         print(list(file.keys()))
    ['w']
    """
    snapshot = url if isinstance(url, Snapshot) else open_store(url, None).snapshot(step)
    path = Path(target)
    is_model = max_shard_bytes is not None or fqn_to_index_mapping is not None
    kind = format or ("safetensors" if is_model else _format_of(path, not path.suffix))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already. Choose another target")
    if kind != "safetensors" and (is_model or tensors is not None or strip_prefix):
        raise ValueError(f"format {kind!r} has all tensors under their names. tensors= and strip_prefix= are for safetensors")
    if kind == "safetensors":
        chosen = _renamed(snapshot, tensors, strip_prefix)
        if fqn_to_index_mapping is not None:
            _write_groups(snapshot, path, _groups_of(chosen, fqn_to_index_mapping))
        elif max_shard_bytes:
            _write_groups(snapshot, path, _groups_below(snapshot, chosen, max_shard_bytes))
        else:
            _write_safetensors(snapshot, path, chosen)
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


def _renamed(snapshot: Snapshot, patterns: str | Sequence[str] | None, prefix: str) -> dict[str, str]:
    """Names of the tensors to write, sorted, each with its name in the file."""
    names = sorted(snapshot.tensors() if patterns is None else snapshot.matching([patterns] if isinstance(patterns, str) else patterns))
    other = next((name for name in names if not name.startswith(prefix) or name == prefix), None)
    if other is not None:
        raise ValueError(f"strip_prefix={prefix!r}: tensor {other!r} does not begin with it. Choose tensors with tensors={prefix + '*'!r}")
    return {name: name.removeprefix(prefix) for name in names}


def _groups_below(snapshot: Snapshot, chosen: Mapping[str, str], limit: int) -> list[dict[str, str]]:
    groups: list[dict[str, str]] = [{}]
    filled = 0
    for name, written in chosen.items():
        size = _size_of(snapshot, name)
        if groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = written
        filled += size
    return groups


def _groups_of(chosen: Mapping[str, str], numbers: Mapping[str, int]) -> list[dict[str, str]]:
    missing = next((written for written in chosen.values() if written not in numbers), None)
    if missing is not None:
        raise ValueError(f"fqn_to_index_mapping has no file for tensor {missing!r}. Map it, or choose tensors with tensors=")
    used = {numbers[written] for written in chosen.values()}
    if used != set(range(1, len(used) + 1)):
        raise ValueError(f"fqn_to_index_mapping: files {sorted(used)}; their numbers must be 1, 2, 3, ... without a gap")
    return [{name: written for name, written in chosen.items() if numbers[written] == number} for number in sorted(used)]


def _write_groups(snapshot: Snapshot, folder: Path, groups: Sequence[Mapping[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        _write_safetensors(snapshot, folder / file, group)
        weights.update(dict.fromkeys(group.values(), file))
    # The index is last: where it exists, all shards exist.
    total = sum(_size_of(snapshot, name) for group in groups for name in group)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    into_place(folder / "model.safetensors.index.json", lambda temporary: temporary.write_text(json.dumps(index, indent=2)))


def _size_of(snapshot: Snapshot, name: str) -> int:
    info = snapshot.tensors()[name]
    return byte_count(info.dtype, info.shape)


def _write_safetensors(snapshot: Snapshot, path: Path, names: Mapping[str, str]) -> None:
    def write(temporary: Path) -> None:
        snapshot.native.write_safetensors(str(temporary), list(names))
        if any(name != written for name, written in names.items()):
            _rename_in_header(temporary, names)

    into_place(path, write)


def _rename_in_header(path: Path, names: Mapping[str, str]) -> None:
    """Renames tensors in a safetensors file. Shorter names leave room, which spaces fill as the format allows."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        renamed = {names.get(name, name): value for name, value in header.items()}
        encoded = json.dumps(renamed, separators=(",", ":"), ensure_ascii=False).encode()
        if len(encoded) > length:
            raise _native.UnsupportedError(f"the header of {path.name} has no room for the new names")
        file.seek(8)
        file.write(encoded.ljust(length))
        file.flush()
        os.fsync(file.fileno())


def _read_torch(path: Path, allow: Sequence[str]) -> Any:
    from ._unpickle import load

    return load(path, allow)


def _read_dcp(path: Path, allow: Sequence[str]) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import set_element
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from ._unpickle import RefusedPickle, check_sums, load, read_index

    # Read before DCP asks for the metadata: DCP prints a traceback and tries other files if that fails.
    metadata = read_index(path)

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

        def _slice_file(self, file: Any, place: Any) -> Any:
            found = super()._slice_file(file, place)
            if getattr(place, "transform_descriptors", None):
                return found
            content = io.BytesIO(found.read(-1))
            check_sums(content, f"{path / place.relative_path}, at byte {place.offset},")
            content.seek(0)
            return content

    class Planner(_EmptyStateDictLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            try:
                set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], load(value, allow))
            except RefusedPickle as error:
                refused.append(error)

    # All of them, so that one error names all classes.
    refused: list[RefusedPickle] = []
    state: dict[str, Any] = {}
    try:
        with torch.device("cpu"):
            _load_state_dict(state, storage_reader=Reader(path), planner=Planner(), no_dist=True)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        raise error from None
    if refused:
        names = {name for error in refused for name in error.names}
        raise RefusedPickle(sorted(names) if all(error.names for error in refused) else [], "; ".join(map(str, refused)))
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
