"""Checkpoints of other formats, into a store and out of one.

| format | read from | written as |
|---|---|---|
| ``safetensors`` | a file, the index of a sharded model (``*.index.json``), or a model's folder | a file, or shards with an index |
| ``torch`` | a file of ``torch.save`` | the same |
| ``dcp`` | a folder of ``torch.distributed.checkpoint`` | the same |
| ``trainer`` | a ``checkpoint-N`` of the Trainer of Transformers, a folder of ``Accelerator.save_state`` | |

A safetensors file holds tensors only, so an export to it leaves other values out. No import runs code from a file. For
folders of weight deltas, see :mod:`tensorcask.slime`. The commands ``tensorcask import`` and ``tensorcask export`` do
the same.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _folders, _native
from ._dtypes import byte_count
from ._files import folder_into_place, into_place, write_whole
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
    left_out: list[str] | None = None,
    take_over: bool = False,
) -> Saved:
    """Saves a checkpoint of another format as a snapshot. Several safetensors files together are one state.

    A folder is imported whole: small files beside the weights, such as ``config.json``, become blobs of the snapshot, or ``files`` of
    the state of a trainer. A warning names what is left out: large files of no known kind, and folders. ``left_out`` gets the names, too.

    ``allow``, for the formats ``torch`` and ``dcp``: full names of classes whose objects the checkpoint may hold, such
    as ``argparse.Namespace``. The classes are not imported, and no code of theirs runs. An object becomes a mapping of
    its attributes, or a dict or list if its class extends those. An object that was built with arguments cannot be stored.
    ``on_unsupported`` then gets a stand-in with ``vars()``, ``arguments`` and ``items``.

    ``on_unsupported``: what to do with a value that cannot be stored: ``"error"``, ``"skip"``, or a function of its
    path and the value that returns a value to store instead.

    ``take_over``: whether to take the store over from a job that saves to it, whose next save then fails with ``FencedError``. Without
    it, such an import is a ``ConflictError``.

    >>> import tempfile, torch, tensorcask
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2), "epoch": 1}, f"{folder}/old.pt")
    ...     saved = import_(f"{folder}/old.pt", "memory://import-example", step=5)
    >>> saved.step, tensorcask.load("memory://import-example")
    (5, {'w': tensor([1., 1.]), 'epoch': 1})
    """
    paths = [Path(source)] if isinstance(source, (str, os.PathLike)) else [Path(path) for path in source]
    for path in paths:
        _check_source(path, url)
    store = open_store(url, None).by_hand(take_over)
    kind = format or (_format_of_folder(paths[0]) if paths[0].is_dir() else _format_of(paths[0], False))
    left_out = [] if left_out is None else left_out
    if kind == "safetensors":
        files: dict[str, bytes] = {}
        for at, path in enumerate(paths):
            if path.is_dir():
                paths[at] = _files_of_model(path)
                found, others = _folders.other_files(path, _names_of(paths[at]))
                # Several folders may have files of one name.
                files.update({name if len(paths) == 1 else f"{path.name}/{name}": content for name, content in found.items()})
                left_out += [os.path.join(path, name) for name in others]
        options = writer_options(policy)
        arguments = (check_step(step), [str(path) for path in paths], user_json(user), list(files.items()))
        saved = store.with_writer(options, lambda writer: writer.save_safetensors(*arguments))
    else:
        if len(paths) != 1:
            raise ValueError(f"format {kind!r} needs one file or folder, not {len(paths)}")
        if kind not in _READERS:
            raise ValueError(
                f"format {kind!r}: use 'safetensors', 'torch', 'dcp' or 'trainer'. For weight deltas use tensorcask.slime.import_deltas()"
            )
        try:
            state, others = _READERS[kind](paths[0], allow)
        except Exception as error:
            from ._unpickle import RefusedPickle

            if not isinstance(error, RefusedPickle):
                raise
            command = ["tensorcask", "import", str(paths[0]), store.url, "--step", str(step)]
            command += ["--format", format] if format else []
            command += ["--policy", policy] if policy != "adaptive" else []
            command += ["--on-unsupported", "skip"] if on_unsupported == "skip" else []
            command += [word for name in allow for word in ("--allow", name)]
            raise _native.UnsupportedError(_refusal(error, paths[0], command)) from None
        left_out += [os.path.join(paths[0], name) for name in others]
        saved = store.save(state, step=step, policy=policy, user=user, on_unsupported=on_unsupported)
    if left_out:
        _log.warning("step %d is not all of the source. Left out: %s. Keep them if you need them", step, ", ".join(left_out))
    return saved


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

        def write(temporary: Path) -> None:
            # Into a file of Python, whose errors say what happened. Those of PyTorch do not tell that a disk is full.
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        with _told_by_the_system():
            into_place(path, write)
    elif kind == "dcp":
        state = snapshot.load(framework="torch")
        with _told_by_the_system():
            folder_into_place(path, lambda temporary: _write_dcp(state, temporary), ".metadata")
    else:
        raise ValueError(f"format {kind!r}: use 'safetensors', 'torch' or 'dcp'")


_STORE_FILE = "store.json"


def _check_source(path: Path, store: Any) -> None:
    """Refuses a source that is not there, or that is a store: the two were swapped."""
    is_swapped = isinstance(store, (str, os.PathLike)) and Path(store).exists() and not (Path(store) / _STORE_FILE).exists()
    hint = f". The source comes first, then the store: did you mean {store}?" if is_swapped else ""
    if (path / _STORE_FILE).exists():
        raise ValueError(f"{path} is a store of tensorcask, and no checkpoint of another format{hint}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist{hint}")


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
    if _folders.is_of_trainer(path):
        return "trainer"
    if any(path.glob("*.safetensors")):
        return "safetensors"
    raise ValueError(f"{path} holds no checkpoint of a known format (DCP, a trainer's folder, a model of safetensors, weight deltas). Pass format=")


def _files_of_model(folder: Path) -> Path:
    """The index of a model's folder, or the only file in the folder."""
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder} has {len(found)} files {pattern}. Name the files to import")
    raise FileNotFoundError(f"{folder} holds no safetensors")


def _names_of(file: Path) -> set[str]:
    """The names of a file of safetensors, or of an index and its files."""
    if not file.name.endswith(".index.json"):
        return {file.name}
    try:
        return {file.name, *json.loads(file.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        # The import will say what is wrong with it.
        return {file.name}


def _renamed(snapshot: Snapshot, patterns: str | Sequence[str] | None, prefix: str) -> dict[str, str]:
    """Names of the tensors to write, sorted, each with its name in the file."""
    names = sorted(snapshot.tensors() if patterns is None else snapshot.matching([patterns] if isinstance(patterns, str) else patterns))
    other = next((name for name in names if not name.startswith(prefix) or name == prefix), None)
    if other is not None:
        raise ValueError(f"strip_prefix={prefix!r}: tensor {other!r} does not begin with it. Choose tensors with tensors={prefix + '*'!r}")
    return {name: name.removeprefix(prefix) for name in names}


def _groups_below(snapshot: Snapshot, chosen: Mapping[str, str], limit: int) -> list[dict[str, str]]:
    groups: list[dict[str, str]] = [{}]
    filled = header = 0
    for name, written in chosen.items():
        size = _size_of(snapshot, name)
        # The name is written before it is replaced by a shorter one. A dimension and an offset have up to 20 digits.
        entry = len(json.dumps(name)) + 100 + 21 * len(snapshot.tensors()[name].shape)
        if groups[-1] and (filled + size > limit or header + entry > _MOST_HEADER_BYTES):
            groups.append({})
            filled = header = 0
        groups[-1][name] = written
        filled += size
        header += entry
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
    def write(temporary: Path) -> None:
        weights = {}
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05}-of-{len(groups):05}.safetensors"
            _write_safetensors(snapshot, temporary / file, group)
            weights.update(dict.fromkeys(group.values(), file))
        total = sum(_size_of(snapshot, name) for group in groups for name in group)
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        write_whole(temporary / _INDEX, json.dumps(index, indent=2))

    # The index is last: where it exists, all shards exist.
    folder_into_place(folder, write, _INDEX)


@contextmanager
def _told_by_the_system() -> Iterator[None]:
    """Raises the error of the system, such as a full disk, instead of those that PyTorch raised because of it."""
    try:
        yield
    except Exception as error:
        raise _reason(error) from None


def _reason(error: BaseException) -> BaseException:
    """The error of the system that led to an error; the error itself if there is none."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def _write_dcp(state: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        raise _reason(error) from None


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


def _read_torch(path: Path, allow: Sequence[str]) -> tuple[Any, list[str]]:
    from ._unpickle import load

    return load(path, allow), []


def _read_dcp_folder(path: Path, allow: Sequence[str]) -> tuple[Any, list[str]]:
    state = _read_dcp(path, allow)
    common = path / _COMMON
    if common.is_file() and _COMMON not in state:
        # Older versions of Megatron keep plain values there. tensorcask.megatron finds them under this name.
        state[_COMMON] = io.BytesIO(common.read_bytes())
    files, left_out = _folders.other_files(path, _OF_DCP)
    return state, sorted([*(name for name in files if not name.endswith(".distcp")), *(name for name in left_out if not name.endswith(".distcp"))])


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

        def _slice_file(self, file: Any, sinfo: Any) -> Any:
            place, found = sinfo, super()._slice_file(file, sinfo)
            if getattr(place, "transform_descriptors", None):
                return found
            content = io.BytesIO(found.read(-1))
            if bytes(content.getbuffer()[:4]) == b"PK\3\4":
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


_log = logging.getLogger("tensorcask")
_INDEX = "model.safetensors.index.json"
# Half of what readers accept, because a header also has the metadata of the snapshot.
_MOST_HEADER_BYTES = 50_000_000
_COMMON = "common.pt"
# What Megatron writes beside a folder of DCP: the name of the format, and checksums.
_OF_DCP = (_COMMON, "metadata.json", "integrity.json")
# Each returns a state, and the names of what is left out.
_READERS: dict[str, Callable[[Path, Sequence[str]], tuple[Any, list[str]]]] = {
    "torch": _read_torch,
    "dcp": _read_dcp_folder,
    "trainer": lambda folder, allow: _folders.read(folder, allow, _read_dcp),
}
