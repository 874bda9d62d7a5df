"""Maps tensors of local stores into memory, instead of reading them: ``load(mmap=True)``.

A tensor whose bytes are one piece of a file becomes an array over a private map of the file. Writes to the array stay
in memory (copy on write). Every array keeps the map alive.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from . import _frameworks, _native
from ._dtypes import BITS, numpy_dtype, torch_dtype, torch_shape
from ._reports import StoredPart, TensorInfo

_log = logging.getLogger("tensorcask")


def parts_of(snapshot: _native.Snapshot, name: str) -> list[StoredPart]:
    """Returns the parts of a tensor. Reads no tensor."""
    rows = _native.stored_tensors(snapshot, [name]).parts(0)
    return [StoredPart(tuple(row[0]), tuple(row[1]), *row[2:]) for row in rows]


def places(
    snapshot: _native.Snapshot, tensors: Mapping[str, TensorInfo], framework_of: Callable[[str], str]
) -> dict[str, _frameworks.Place]:
    """Returns a place for each tensor, in their order: without memory if it is mapped, with memory to read into if not."""
    arrays = _arrays(snapshot, {name: (framework_of(name), info) for name, info in tensors.items()})
    return {
        name: _frameworks.Place(None, partial(arrays.__getitem__, name))
        if name in arrays
        else _frameworks.place(framework_of(name), info.dtype, info.shape, name)
        for name, info in tensors.items()
    }


def _arrays(snapshot: _native.Snapshot, tensors: Mapping[str, tuple[str, TensorInfo]]) -> dict[str, Any]:
    names = [name for name, (framework, info) in tensors.items() if _takes_memory(framework, info.dtype)]
    stored = _native.stored_tensors(snapshot, names)
    maps: dict[Path, memoryview | None] = {}
    mapped: list[tuple[int, memoryview]] = []
    for number, path, first_byte, size in stored.files():
        if path not in maps:
            maps[path] = _map(path)
        whole = maps[path]
        if whole is not None:
            mapped.append((number, whole[first_byte : first_byte + size]))
    # Also finds files that are too short.
    stored.check(mapped)
    return {names[number]: _array_over(*tensors[names[number]], memory) for number, memory in mapped}


def _takes_memory(framework: str, dtype: str) -> bool:
    """Whether arrays of a framework can be over memory with elements as in the store."""
    # Of elements smaller than a byte, numpy and jax keep one per byte. torch holds pairs of f4_e2m1.
    return framework == "torch" or (framework in ("numpy", "jax") and BITS[dtype] >= 8)


def _map(path: Path) -> memoryview | None:
    """Maps a whole file privately; None if the system cannot, and the tensors are to be read as usual."""
    options: dict[str, Any] = {} if sys.version_info < (3, 13) else {"trackfd": False}
    # Nothing is reserved for copies of pages that are never written: a file may be larger than memory.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **options))
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be mapped, and its tensors are read into memory: %s", path, error)
        return None


def _array_over(framework: str, info: TensorInfo, memory: memoryview) -> Any:
    if framework == "torch":
        torch = import_module("torch")
        dtype, shape = torch_dtype(torch, info.dtype, info.name), torch_shape(info.dtype, info.shape, info.name)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape)
    np = import_module("numpy")
    array = np.frombuffer(memory, np.uint8).view(numpy_dtype(np, info.dtype, info.name)).reshape(info.shape)
    return _frameworks.to_jax(array, info.name) if framework == "jax" else array
