"""Converts loaded arrays to another dtype, and moves them to a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ._dtypes import numpy_dtype, torch_dtype, torch_shape
from ._errors import InvalidValueError
from ._frameworks import framework_of


def check_device(framework: str, device: Any) -> None:
    """Refuses a device that tensors of a framework cannot be moved to."""
    if framework == "torch":
        try:
            import_module("torch").device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidValueError(f"device {device!r}: {str(error).strip().partition(chr(10))[0]}") from None
    elif framework != "jax":
        owner = "numpy arrays" if framework == "numpy" else "bytes"
        raise InvalidValueError(f"device {device!r}: {owner} have no device; pass framework='torch' or framework='jax'")


def is_remote(device: Any) -> bool:
    """Whether torch copies host memory to this device through CUDA, in part and asynchronously."""
    return bool(import_module("torch").device(device).type == "cuda")


def new_on(device: Any, dtype: str, shape: Sequence[int], name: str) -> Any:
    """Returns a new torch tensor on a device, with arbitrary content."""
    torch = import_module("torch")
    return torch.empty(torch_shape(dtype, shape, name), dtype=torch_dtype(torch, dtype, name), device=device)


def convert(value: Any, dtype: str | None, device: Any) -> Any:
    """Converts an array to another dtype, named as in a store, and moves it to a device."""
    framework = framework_of(value)
    if framework == "torch":
        if dtype is not None:
            value = value.to(torch_dtype(sys.modules["torch"], dtype, "dtype="))
        return value if device is None else value.to(device)
    if dtype is not None:
        value = value.astype(numpy_dtype(sys.modules["numpy"], dtype, "dtype="))
    return value if device is None else import_module("jax").device_put(value, device)
