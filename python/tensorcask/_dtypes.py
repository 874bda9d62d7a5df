"""Dtypes: their names in a store, and in torch, numpy and jax."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import Any

from . import _native
from ._errors import InvalidTypeError

# Names of dtypes: in numpy (with ml_dtypes) and torch, and in a store.
DTYPES: dict[str, str] = {
    "bool": "bool",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e4m3fnuz": "f8_e4m3fnuz",
    "float8_e5m2fnuz": "f8_e5m2fnuz",
    "float8_e8m0fnu": "f8_e8m0",
    "float6_e2m3fn": "f6_e2m3",
    "float6_e3m2fn": "f6_e3m2",
    "float4_e2m1fn": "f4_e2m1",
    "float4_e2m1fn_x2": "f4_e2m1",
    "int4": "int4",
    "uint4": "uint4",
}
BITS: dict[str, int] = dict(_native.dtypes())
_NUMPY = {ours: theirs for theirs, ours in DTYPES.items() if not theirs.endswith("_x2")}
# torch has no usable dtypes for elements smaller than a byte, except one that holds a pair of them.
TORCH = {ours: theirs for ours, theirs in _NUMPY.items() if BITS[ours] >= 8} | {"f4_e2m1": "float4_e2m1fn_x2"}


class UnstorableTypeError(InvalidTypeError):
    """A value that cannot be stored."""


def byte_count(dtype: str, shape: Sequence[int]) -> int:
    """Returns the size of a tensor in bytes."""
    return (prod(shape) * BITS[dtype] + 7) // 8


def dtype_name(dtype: Any) -> str | None:
    """Returns the name in a store of a dtype of any framework; None for anything else."""
    if dtype is float:
        return "f64"
    names = [dtype] if isinstance(dtype, str) else [getattr(dtype, "name", None), getattr(dtype, "__name__", None), str(dtype)]
    for name in names:
        text = name.removeprefix("torch.") if isinstance(name, str) else ""
        if text in BITS or text in DTYPES:
            return text if text in BITS else DTYPES[text]
    return None


def torch_dtype_name(dtype: Any) -> str:
    """Returns the name of a torch dtype without the module."""
    return str(dtype).removeprefix("torch.")


def torch_shape_in_store(dtype: str, shape: tuple[int, ...], path: object) -> tuple[int, ...]:
    """Returns a shape in elements; torch counts pairs of f4 elements."""
    if dtype != "f4_e2m1":
        return shape
    if not shape:
        raise UnstorableTypeError(f"{path}: a float4_e2m1fn_x2 tensor without dimensions cannot be stored; reshape it to [1]")
    return (*shape[:-1], shape[-1] * 2)


def torch_shape(dtype: str, shape: Sequence[int], name: str) -> tuple[int, ...]:
    """Returns the shape that torch gives to a stored tensor; torch counts pairs of f4 elements."""
    if dtype != "f4_e2m1":
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise _native.UnsupportedError(f"tensor `{name}`: torch holds f4_e2m1 in pairs, but the last extent is odd; pass framework='numpy'")
    return (*shape[:-1], shape[-1] // 2)


def torch_dtype(torch: Any, dtype: str, name: str) -> Any:
    """Returns the torch dtype for a dtype of a store."""
    theirs = TORCH.get(dtype)
    found = getattr(torch, theirs, None) if theirs else None
    if found is None:
        raise _native.UnsupportedError(f"tensor `{name}`: torch has no {dtype}; pass framework='numpy' or framework='bytes'")
    return found


def numpy_dtype(np: Any, dtype: str, name: str) -> Any:
    """Returns the numpy dtype for a dtype of a store."""
    theirs = _NUMPY[dtype]
    try:
        return np.dtype(theirs)
    except TypeError:
        pass
    try:
        return np.dtype(getattr(import_module("ml_dtypes"), theirs))
    except (ImportError, AttributeError) as error:
        raise _native.UnsupportedError(f"tensor `{name}`: numpy has {dtype} only with a recent ml_dtypes; install ml_dtypes") from error
