"""Pickles of other formats, read without running code from them.

PyTorch's ``weights_only`` loader lets in tensors and plain values. Objects of other classes are let in by name
(``allow``), and even then their class is never used: an inert stand-in collects the attributes of an object, and they
become a plain mapping.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import _native


class StandIn:
    """An object of a class that is not loaded. ``vars()`` gives its attributes; ``arguments`` are those of its
    constructor."""

    __slots__ = ("__dict__", "arguments")
    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = (*self.arguments, state)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__}{self.arguments} {vars(self)}>"


class RefusedPickle(Exception):
    """A pickle that asks for more than it may. ``names``: the classes that a caller could allow."""

    def __init__(self, names: list[str], reason: str) -> None:
        super().__init__(reason)
        self.names = names


def load(source: Path | io.BytesIO, allow: Sequence[str]) -> Any:
    """The object that ``torch.save`` wrote, as tensors and plain values."""
    with _stand_ins(allow):
        try:
            loaded = torch.load(source, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # PyTorch puts the reason last, after advice to load without checks and before a link.
            told = str(error).partition("\n\nCheck the documentation")[0].split("\n")
            reason = told[-1].strip().removeprefix("WeightsUnpickler error: ")
            raise RefusedPickle(_refused(source, reason), reason) from None
        except OSError:
            raise
        except Exception as error:
            # A damaged file fails in PyTorch with errors of any kind.
            raise _native.CorruptionError(f"{_name(source)}: PyTorch cannot read this file: {error}") from error
    return _plain(loaded, {}) if allow else loaded


def _name(source: Path | io.BytesIO) -> str:
    return str(source) if isinstance(source, Path) else "a value of the checkpoint"


@contextmanager
def _stand_ins(names: Sequence[str]) -> Iterator[None]:
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
            raise ValueError(f"allow={name!r}: use the full name of a class, such as argparse.Namespace")
    made = []
    for name in names:
        module, _, last = name.rpartition(".")
        # PyTorch finds the stand-in under its module and name, which are those of the class.
        made.append(type(last, (StandIn,), {"__module__": module, "__slots__": ()}))
    # A stand-in also goes before a class that this process allowed for other loads, as Megatron allows argparse.Namespace.
    hidden = [entry for entry in torch.serialization.get_safe_globals() if _full_name(entry) in names]
    _replace_safe_globals(hidden, made)
    try:
        yield
    finally:
        _replace_safe_globals(made, hidden)


def _full_name(entry: Any) -> str:
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _replace_safe_globals(gone: Sequence[Any], new: Sequence[Any]) -> None:
    kept = [entry for entry in torch.serialization.get_safe_globals() if entry not in gone]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*kept, *new])


def _refused(source: Path | io.BytesIO, reason: str) -> list[str]:
    """The names of the classes and functions that a pickle asks for and that are not allowed."""
    if " is blocked" in reason:
        return []
    found = re.search(r"Unsupported global: GLOBAL (\S+)", reason)
    # PyTorch leaves out the module of built-in functions.
    first = [found[1] if "." in found[1] else f"builtins.{found[1]}"] if found else []
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception:
        # The old format of torch.save does not list its names. The next run tells the next.
        return first
    return [] if any(name.partition(".")[0] in ("os", "posix", "nt", "sys") for name in names) else sorted(names) or first


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """The value with stand-ins replaced by mappings of their attributes, if attributes are all that they have."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, StandIn) and not value.arguments:
        attributes = vars(value)
        seen[id(value)] = attributes
        return _plain_items(attributes, attributes.items(), seen)
    if isinstance(value, dict):
        seen[id(value)] = value
        return _plain_items(value, value.items(), seen)
    if isinstance(value, list):
        seen[id(value)] = value
        return _plain_items(value, enumerate(value), seen)
    if type(value) is tuple:
        found = []
        for item in value:
            found.append(_plain(item, seen))
        return tuple(found)
    return value


def _plain_items(container: Any, items: Any, seen: dict[int, Any]) -> Any:
    for key, item in list(items):
        container[key] = _plain(item, seen)
    return container


class MetadataUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint of ``torch.distributed.checkpoint``, which is a pickle of a few classes."""

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
        if name in self._SAFE.get(module, ()) or module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return super().find_class(module, name)
        raise _native.UnsupportedError(f"the index of this folder asks for {module}.{name}. No index of a checkpoint needs it")
