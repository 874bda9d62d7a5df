"""Files of PyTorch, read without running code from them.

Tensors are made by the functions that PyTorch's ``weights_only`` loader uses. Objects of other classes are let in by name
(``allow``), and even then their class is never used: see :mod:`tensorcask._inert`.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, ClassVar

import torch
from torch import _tensor, _utils
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described

from . import _inert, _native, _subclasses
from ._inert import StandIn


class RefusedPickle(Exception):
    """A pickle that asks for more than it may. ``names``: the classes that a caller could allow."""

    def __init__(self, names: list[str], reason: str) -> None:
        super().__init__(reason)
        self.names = names


def load(source: Path | io.BytesIO, allow: Sequence[str]) -> Any:
    """The object that ``torch.save`` wrote, as tensors and plain values. A file whose checksums do not match is refused."""
    for name in allow:
        if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
            raise ValueError(f"allow={name!r}: use the full name of a class, such as argparse.Namespace")
    _check_file(source)
    known = _known()
    made: list[_Unpickler] = []

    class Unpickler(_Unpickler):
        def __init__(self, file: Any, **options: Any) -> None:
            super().__init__(file, known, allow, **options)
            made.append(self)

    module = types.SimpleNamespace(__name__="tensorcask", Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load())
    try:
        with torch.sparse.check_sparse_tensor_invariants():
            loaded: Any = torch.load(source, map_location="cpu", weights_only=False, pickle_module=module, mmap=False)
        refused = [name for one in made for name in one.refused]
        if not refused:
            return _inert.plain(loaded)
    except OSError:
        raise
    except Exception as error:
        if "TORCH_FORCE_WEIGHTS_ONLY_LOAD" in str(error) or "explicit pickle_module" in str(error):
            raise _native.UnsupportedError(
                "TORCH_FORCE_WEIGHTS_ONLY_LOAD is set. Unset it for the import, which runs no code from a file either"
            ) from None
        # A damaged file fails in PyTorch with errors of any kind. So does one with objects that are not allowed.
        refused = [name for one in made for name in one.refused]
        if not refused:
            raise _native.CorruptionError(f"{_name(source)}: PyTorch cannot read this file: {error}") from error
    is_blocked = any(one.is_blocked() for one in made)
    raise RefusedPickle([] if is_blocked else sorted(set(refused)), f"it asks for {', '.join(sorted(set(refused)))}")


def _name(source: Path | io.BytesIO) -> str:
    return str(source) if isinstance(source, Path) else "a value of the checkpoint"


def _check_file(source: Path | io.BytesIO) -> None:
    """Refuses files in forms that cannot be read without running code, and damaged ones."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            head = file.read(4)
    else:
        head = source.getbuffer()[:4].tobytes()
    if head == b"PK\3\4":
        names = check_sums(source, _name(source))
        if any(name.endswith("/constants.pkl") for name in names):
            raise _native.UnsupportedError(
                f"{_name(source)} is a TorchScript archive, which holds code. Load it with torch.jit.load(), and save its state_dict()"
            )
    elif isinstance(source, Path) and tarfile.is_tarfile(source):
        raise _native.UnsupportedError(f"{_name(source)} has the form of PyTorch before 0.1.10. Load it with torch.load() and save it again")
    if isinstance(source, io.BytesIO):
        source.seek(0)


def check_sums(source: Path | IO[bytes], name: str) -> list[str]:
    """Compares the checksums of a file of ``torch.save`` and returns the names of its records. PyTorch does not compare them."""
    try:
        with zipfile.ZipFile(source) as archive:
            records = archive.infolist()
            # After torch.serialization.set_crc32_options(False) there are none.
            if any(record.CRC for record in records):
                damaged = archive.testzip()
                if damaged is not None:
                    raise _native.CorruptionError(f"{name} is damaged: the checksum of its record {damaged} does not match")
            return [record.filename for record in records]
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise _native.CorruptionError(f"{name} is damaged: {error}") from error


def _known() -> dict[str, Any]:
    """What PyTorch itself lets in, and what this process has allowed for all loads."""
    from torch._weights_only_unpickler import _get_allowed_globals

    found: dict[str, Any] = dict(_get_allowed_globals())
    found["torch._tensor._rebuild_from_type_v2"] = _from_type
    for entry in torch.serialization.get_safe_globals():
        found[_full_name(entry)] = entry[0] if isinstance(entry, tuple) else entry
    return found


def _full_name(entry: Any) -> str:
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _from_type(make: Any, cls: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """``torch._tensor._rebuild_from_type_v2``: a tensor of a subclass, or one with attributes. A subclass that is not loaded becomes a
    plain tensor, or its attributes if it is made of other tensors."""
    if not (isinstance(cls, type) and issubclass(cls, StandIn)):
        return _tensor._rebuild_from_type_v2(make, cls, arguments, state)
    if make is not _utils._rebuild_wrapper_subclass and isinstance(found := make(*arguments), torch.Tensor) and not state:
        return found
    stand_in = cls()
    stand_in.__setstate__(state)
    return stand_in


class _Unpickler(_inert.Unpickler):
    """Unpickler of ``torch.save``. Besides objects, its pickles hold references to storages."""

    def _find(self, full: str) -> Any:
        if full not in self._known and full not in self._allowed and (cls := _subclasses.safe_class(full)) is not None:
            return cls
        return super()._find(full)

    def build(self, made: Any, state: Any) -> None:
        if type(made) is torch.Tensor:
            # The form of old versions of PyTorch.
            made.set_(*state)
        else:
            super().build(made, state)

    def _load_binpersid(self) -> None:
        reference = self.stack.pop()
        if type(reference) is tuple and len(reference) > 1 and reference[0] == "module":
            # The old form of torch.save adds its source to a class.
            self.append(reference[1])
            return
        if type(reference) is not tuple or not reference or reference[0] not in ("storage", b"storage"):
            raise pickle.UnpicklingError(f"a reference to {reference!r}")
        self.append(self.persistent_load(reference))

    dispatch: ClassVar = {**_inert.Unpickler.dispatch, pickle.BINPERSID[0]: _load_binpersid}


_METADATA = {
    name: getattr(described, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
    if hasattr(described, name)
}  # fmt: skip
_OF_INDEX: dict[str, Any] = {
    **{f"torch.distributed.checkpoint.metadata.{name}": found for name, found in _METADATA.items()},
    # Where PyTorch 2.0 to 2.2 had them.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": described.TensorProperties,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": described._MEM_FORMAT_ENCODING,
    "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
}


class _IndexUnpickler(_inert.Unpickler):
    """Reads the index of a checkpoint of ``torch.distributed.checkpoint``, which is a pickle of a few classes."""

    def _find(self, full: str) -> Any:
        module, _, name = full.rpartition(".")
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return super()._find(full)


def read_index(path: Path) -> described.Metadata:
    """Reads ``.metadata`` of a folder. Trainers add objects of their own classes, such as the plans of the save. Those are not needed,
    and no code of theirs runs."""
    file = path / ".metadata"
    unpickler = _IndexUnpickler(io.BytesIO(file.read_bytes()), _OF_INDEX)
    try:
        found: Any = unpickler.load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, UnicodeError, RuntimeError) as error:
        raise _native.CorruptionError(f"{file} is damaged: {error}") from error
    if unpickler.is_blocked():
        raise _native.UnsupportedError(f"{file} asks for {', '.join(unpickler.refused)}. No index of a checkpoint needs it")
    tensors, places = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    kinds = (described.TensorStorageMetadata, described.BytesStorageMetadata)
    if not isinstance(tensors, dict) or not isinstance(places, dict) or not all(isinstance(value, kinds) for value in tensors.values()):
        asked = f", but asks for {', '.join(unpickler.refused)}" if unpickler.refused else ""
        raise _native.UnsupportedError(f"{file} is not the index of a checkpoint of torch.distributed.checkpoint{asked}")
    for index, place in places.items():
        if not isinstance(index, described.MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            raise _native.UnsupportedError(f"{file} was written by a storage writer that tensorcask does not know. Load it with that one")
        name = PurePosixPath(str(place.relative_path))
        if name.is_absolute() or PurePath(str(place.relative_path)).is_absolute() or ".." in name.parts:
            raise _native.UnsupportedError(f"{file} names a file outside of its folder: {place.relative_path}")
    return described.Metadata(tensors, _inert.plain(getattr(found, "planner_data", None)), places)
