"""Import and export of weight deltas, in the folders that slime publishes and SGLang applies.

    steps = tensorcask.slime.import_deltas("shared/delta-updates", "s3://bucket/run42", base="hf-checkpoint", base_step=0)
    tensorcask.slime.export_deltas("s3://bucket/run42", "shared/delta-updates", tensors="model.*", strip="model.")

A folder holds one subfolder per version: ``weight_v000001``, ``weight_v000002``, ... A version is a checkpoint of
safetensors with an index, or a delta to the version before. The tensors of a delta are differences, compressed by zstd.
An ``xor`` difference has the size of the tensor. An ``overwrite`` difference holds the count and positions of changed
bytes (u32, little-endian) and their new values. A delta names the version that it builds on and has a checksum of the
new bytes of each changed tensor. The import checks both. slime describes the layout in
``docs/en/advanced/delta-weight-sync.md`` (as of August 2026). Needs ``pip install 'tensorcask[slime]'``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import zstandard
from safetensors.numpy import save_file

from . import _dtypes, _native
from ._files import into_place, write_whole
from ._frameworks import RawTensor
from ._options import check_step, user_json, writer_options
from ._store import Store, open_store
from .interchange import import_

__all__ = ["export_deltas", "import_deltas"]

_INDEX = "model.safetensors.index.json"
_STEP = "tensorcask_step"
# Digest of the files that a step was imported from.
_DIGEST = "weight_digest"
_LEVEL = 1


@dataclass(frozen=True)
class _Version:
    """The content of a version's index."""

    folder: Path
    number: int
    step: int
    base: int | None
    encoding: str
    checksum: str
    files: dict[str, str]


def import_deltas(
    folder: str | os.PathLike[str],
    url: str | os.PathLike[str] | Store,
    *,
    base: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    base_step: int = 0,
    policy: str = "adaptive",
) -> list[int]:
    """Saves each version of a folder as a snapshot. Returns the saved steps: the versions' numbers, or the steps that
    were exported.

    ``base``: the checkpoint that the first delta builds on (safetensors files, or an index), saved as ``base_step``. A
    folder whose first version is whole needs none. The import skips versions that the store has already, so a growing
    folder can be imported repeatedly. A step that holds other content than its version is an error; a restarted
    training causes this. The import ends at a version without an index, because this version is still being written.
    """
    store = open_store(url, None)
    options = writer_options(policy)
    live = _live(store)
    versions = list(_versions(Path(folder)))
    steps = [*([check_step(base_step)] if base is not None else []), *(version.step for version in versions)]
    twice = next((step for step in steps if steps.count(step) > 1), None)
    if twice is not None:
        raise _native.InvalidArgumentError(
            f"{folder}: step {twice} occurs twice, among the versions or as base_step. Pass another base_step"
        )

    def is_there(step: int, digest: str, what: str) -> bool:
        if step in live and live[step].get(_DIGEST) != digest:
            raise _native.ConflictError(f"{store.url}: step {step} differs from {what}. Import this folder into another store")
        return step in live

    if base is not None:
        paths = [Path(base)] if isinstance(base, (str, os.PathLike)) else [Path(path) for path in base]
        digest = _digest([file for path in paths for file in (_files_of(path) if path.name.endswith(".json") else [path])])
        if not is_there(base_step, digest, "the base"):
            import_(paths, store, step=base_step, format="safetensors", policy=policy, user={_DIGEST: digest})
    number, step, state = 0, base_step, None
    saved = []
    for version in versions:
        digest = _digest(_files_of(version.folder / _INDEX))
        found = is_there(version.step, digest, str(version.folder))
        user = {_DIGEST: digest, "weight_version": version.number}
        if version.base is None:
            if not found:
                import_(version.folder / _INDEX, store, step=version.step, policy=policy, user=user)
                saved.append(version.step)
            state = None
        else:
            if version.base != number:
                raise _native.InvalidArgumentError(
                    f"{version.folder} builds on version {version.base}, but follows version {number}. "
                    "Import all versions in order"
                )
            if not found:
                if state is None:
                    state = _bytes_of(store, step)
                _apply(version, state)
                tensors = [(name, raw.dtype, raw.shape, [0] * len(raw.shape), raw.shape, raw.data) for name, raw in state.items()]
                save = functools.partial(
                    _native.Writer.save,
                    step=version.step,
                    tensors=tensors,
                    blobs=[],
                    user=user_json(user),
                    metadata={},
                )
                store.with_writer(options, save)
                saved.append(version.step)
            else:
                state = None
        number, step = version.number, version.step
    return saved


def export_deltas(
    url: str | os.PathLike[str] | Store,
    folder: str | os.PathLike[str],
    *,
    steps: Sequence[int] | None = None,
    tensors: str | Sequence[str] | None = None,
    strip: str = "",
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    first_version: int = 0,
) -> list[Path]:
    """Writes snapshots as versions: the first as a whole checkpoint, the others as deltas. Returns the folders of the
    versions.

    A folder that exists already is an error. ``steps``: the steps to write, in this order; by default all live steps,
    ascending. ``tensors``: names of tensors, with ``*`` for any characters. ``strip``: a prefix to remove from the
    names. ``checksum``: ``xxh3-128``, ``blake3`` or ``adler32``.
    """
    if encoding not in ("xor", "overwrite"):
        raise ValueError(f"encoding {encoding!r}: use 'xor' or 'overwrite'")
    _checksum(checksum, b"")
    store = open_store(url, None)
    wanted = sorted(info.step for info in store.snapshots()) if steps is None else [check_step(step) for step in steps]
    root = Path(folder)
    written: list[Path] = []
    before: dict[str, RawTensor] | None = None
    for number, step in enumerate(wanted, first_version):
        state = {_stripped(name, strip): raw for name, raw in _bytes_of(store, step, tensors).items()}
        path = root / f"weight_v{number:06}"
        if path.exists():
            raise FileExistsError(f"{path} exists already. Export to another folder, or pass first_version=")
        path.mkdir(parents=True)
        index: dict[str, Any] = {_STEP: str(step)}
        file = "model-00000-of-00001.safetensors"
        names: Sequence[str] = list(state)
        if before is None:
            _write_whole(path / file, state)
        else:
            content, sums = _differences(before, state, encoding, checksum, step)
            names = list(content)
            if content:
                into_place(path / file, functools.partial(save_file, content, metadata=sums))
            index |= {
                "version": f"{number:06}",
                "base_version": f"{number - 1:06}",
                "delta_encoding": encoding,
                "compression_format": "zstd",
                "checksum_format": checksum,
            }
        # The index is last: where it exists, the version is whole.
        write_whole(path / _INDEX, json.dumps({"metadata": index, "weight_map": dict.fromkeys(names, file)}))
        written.append(path)
        before = state
    return written


def _live(store: Store) -> dict[int, dict[str, Any]]:
    """User facts of each live step."""
    try:
        return {info.step: info.user for info in store.snapshots()}
    except _native.NotFoundError:
        return {}


def _files_of(index: Path) -> list[Path]:
    """An index and the files that it names. All files are in the folder of the index."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _native.CorruptionError(f"{index} is not an index of weights: {error!r}") from None
    outside = next((name for name in names if Path(name).name != name), None)
    if outside is not None:
        raise _native.CorruptionError(f"{index} names a file outside of its folder: {outside!r}")
    return [index, *(index.parent / name for name in names)]


def _digest(files: Sequence[Path]) -> str:
    """Digest of the names and contents of files."""
    found = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            found.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()


def _versions(folder: Path) -> Iterator[_Version]:
    """The whole versions, by number."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"weight_v(\d+)", path.name))}
    for number, path in sorted(found.items()):
        try:
            text = (path / _INDEX).read_text()
        except FileNotFoundError:
            # This version is still being written, and so are all later versions.
            return
        try:
            index = json.loads(text)
            told = index.get("metadata") or {}
            files = {str(name): str(file) for name, file in index["weight_map"].items()}
            is_delta = "delta_encoding" in told
            base = int(told["base_version"]) if is_delta else None
            if is_delta and (int(told["version"]) != number or told["compression_format"] != "zstd"):
                raise ValueError(f"version {told['version']}, compression {told['compression_format']}")
            step = int(told.get(_STEP, number))
            yield _Version(path, number, step, base, str(told.get("delta_encoding", "")), str(told.get("checksum_format", "")), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _native.CorruptionError(f"{path / _INDEX} is not an index of weights: {error!r}") from None


def _bytes_of(store: Store, step: int, tensors: str | Sequence[str] | None = None) -> dict[str, RawTensor]:
    snapshot = store.snapshot(step)
    names = list(snapshot.tensors()) if tensors is None else tensors
    found: dict[str, RawTensor] = snapshot.load(tensors=names, framework="bytes") if names else {}
    # Each tied tensor gets its own bytes, because a version may change only one of them.
    seen: set[int] = set()
    for name, raw in found.items():
        if id(raw) in seen:
            found[name] = RawTensor(raw.dtype, raw.shape, bytearray(raw.data))
        seen.add(id(raw))
    return found


def _apply(version: _Version, state: dict[str, RawTensor]) -> None:
    """Applies a version to tensors. After an error the tensors belong to no version."""
    for path in _files_of(version.folder / _INDEX)[1:]:
        with safetensors.safe_open(path, framework="numpy") as file:
            sums = file.metadata() or {}
            promised = {name for name, file_name in version.files.items() if file_name == path.name}
            if promised != set(file.keys()):
                other = sorted(promised ^ set(file.keys()))[0]
                raise _native.CorruptionError(f"{path}: index and file disagree about tensor `{other}`")
            for name in file.keys():  # noqa: SIM118
                where = f"{path}, tensor `{name}`"
                if name not in state:
                    raise _native.CorruptionError(f"{where}: the version before does not have this tensor")
                data = np.frombuffer(state[name].data, dtype=np.uint8)
                compressed = file.get_tensor(name)
                if compressed.dtype != np.uint8 or compressed.ndim != 1:
                    raise _native.CorruptionError(f"{where}: a difference of dtype {compressed.dtype}; expected a list of bytes")
                _change(data, _decompress(compressed.tobytes(), 4 + 5 * data.size, where), version.encoding, where)
                if name not in sums:
                    raise _native.CorruptionError(f"{where}: the checksum is missing")
                if _checksum(version.checksum, data) != sums[name]:
                    raise _native.CorruptionError(f"{where}: checksum mismatch. Check that this delta belongs to its base")


def _change(data: Any, difference: bytes, encoding: str, where: str) -> None:
    found = np.frombuffer(difference, dtype=np.uint8)
    if encoding == "xor":
        if found.size != data.size:
            raise _native.CorruptionError(f"{where}: a difference of {found.size} bytes for a tensor of {data.size} bytes")
        np.bitwise_xor(data, found, out=data)
        return
    if encoding != "overwrite":
        raise _native.UnsupportedError(f"{where}: unknown encoding {encoding!r}; supported are 'xor' and 'overwrite'")
    count = int(found[:4].view("<u4")[0]) if found.size >= 4 else -1
    if found.size != 4 + 5 * count:
        raise _native.CorruptionError(f"{where}: a difference of {found.size} bytes with a count of {count}")
    positions = found[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= data.size:
        raise _native.CorruptionError(f"{where}: position {int(positions.max())} in a tensor of {data.size} bytes")
    data[positions] = found[4 + 4 * count :]


def _decompress(data: bytes, limit: int, where: str) -> bytes:
    try:
        declared = zstandard.frame_content_size(data)
        if declared > limit:
            raise _native.CorruptionError(f"{where}: a difference of {declared} bytes, more than the possible {limit}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise _native.CorruptionError(f"{where}: {error}") from None


def _differences(
    before: dict[str, RawTensor], after: dict[str, RawTensor], encoding: str, checksum: str, step: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compressed differences of the changed tensors, and checksums of their new bytes."""
    shape = {name: (raw.dtype, raw.shape) for name, raw in before.items()}
    other = next((name for name in {**before, **after} if name not in after or shape.get(name) != (after[name].dtype, after[name].shape)), None)
    if other is not None:
        raise _native.UnsupportedError(
            f"step {step}: `{other}` was added or removed, or has another shape or dtype. Start a new export at this step"
        )
    found, sums = {}, {}
    for name, raw in after.items():
        old, new = (np.frombuffer(tensor.data, dtype=np.uint8) for tensor in (before[name], raw))
        changed = new != old
        if not changed.any():
            continue
        if encoding == "xor":
            difference = (new ^ old).tobytes()
        else:
            if new.size > 1 << 32:
                raise _native.UnsupportedError(f"step {step}: `{name}` is too large for positions of 32 bits. Pass encoding='xor'")
            positions = np.flatnonzero(changed).astype("<u4")
            difference = np.array([positions.size], "<u4").tobytes() + positions.tobytes() + new[changed].tobytes()
        found[name] = np.frombuffer(zstandard.ZstdCompressor(level=_LEVEL).compress(difference), dtype=np.uint8)
        sums[name] = _checksum(checksum, new)
    return found, sums


def _checksum(algorithm: str, data: Any) -> str:
    if algorithm == "adler32":
        return f"{zlib.adler32(data):08x}"
    if algorithm == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128_hexdigest(data)
    if algorithm == "blake3":
        import blake3

        return str(blake3.blake3(data).hexdigest())
    raise _native.UnsupportedError(f"unknown checksum {algorithm!r}; supported are 'xxh3-128', 'blake3' and 'adler32'")


def _stripped(name: str, prefix: str) -> str:
    if not name.startswith(prefix):
        raise ValueError(f"`{name}` does not begin with {prefix!r}. Choose tensors with tensors=")
    return name[len(prefix) :]


def _write_whole(path: Path, tensors: dict[str, RawTensor]) -> None:
    import torch
    from safetensors.torch import save_file as save_tensors

    def tensor(name: str, raw: RawTensor) -> Any:
        dtype = _dtypes.torch_dtype(torch, raw.dtype, name)
        flat = torch.frombuffer(raw.data, dtype=torch.uint8) if raw.data else torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.view(dtype).reshape(_dtypes.torch_shape(raw.dtype, raw.shape, name))

    made = {name: tensor(name, raw) for name, raw in tensors.items()}
    into_place(path, lambda temporary: save_tensors(made, temporary, metadata={"format": "pt"}))
