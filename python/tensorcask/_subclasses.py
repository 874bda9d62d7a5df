"""Torch tensors that are made of other tensors, such as the moments of torchao's optimizers.

A store has such a tensor as a mapping of its inner tensors, with the name of its class and what the class needs to make it again
(spec/tree.md, clause 2.8). A load makes it again if the process allows the class. PyTorch's list of safe classes decides, as for
``torch.load``; torchao puts its classes there. Any other class stays a mapping. No name from a store is imported, except the optimizers
of torchao.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

# Key of the class in the mapping.
CLASS = "#class"
_OF_TORCHAO = "torchao.optim."


def described(value: Any) -> list[Any] | None:
    """Class, context, shape and strides of a tensor, as plain values; None if its context has other values."""
    try:
        context = _plain(value.__tensor_flatten__()[1])
    except TypeError:
        return None
    cls = type(value)
    return [f"{cls.__module__}.{cls.__qualname__}", context, list(map(int, value.shape)), list(map(int, value.stride()))]


def is_description(value: Any) -> bool:
    """Whether a value of a store has the form of :func:`described`."""
    if not isinstance(value, list) or len(value) != 4 or not isinstance(value[0], str):
        return False
    return all(isinstance(numbers, list) and all(type(number) is int for number in numbers) for numbers in value[2:])


def rebuilt(mapping: dict[Any, Any]) -> Any:
    """The tensor that a mapping describes; the mapping itself if it describes none, or if the process does not allow its class."""
    told = mapping.get(CLASS)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(told, list) or not is_description(told):
        return mapping
    inner = {name: tensor for name, tensor in mapping.items() if name != CLASS}
    cls = safe_class(told[0])
    if cls is None or not hasattr(cls, "__tensor_unflatten__") or not all(isinstance(tensor, torch.Tensor) for tensor in inner.values()):
        return mapping
    try:
        return cls.__tensor_unflatten__(inner, _context(told[1]), torch.Size(told[2]), tuple(told[3]))
    except Exception:
        # Of another version of the class.
        return mapping


def safe_class(name: str) -> Any:
    """The class of this full name, if PyTorch's ``weights_only`` loader lets it in; None otherwise."""
    torch = sys.modules["torch"]
    if name.startswith(_OF_TORCHAO) and "torchao.optim" not in sys.modules:
        try:
            import_module("torchao.optim")
        except ImportError:
            return None
    for entry in torch.serialization.get_safe_globals():
        cls, known = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        if known == name and isinstance(cls, type) and issubclass(cls, torch.Tensor):
            return cls
    return None


_DTYPE, _TUPLE = "dtype", "tuple"


def _plain(value: Any) -> Any:
    torch = sys.modules["torch"]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    raise TypeError(value)


def _context(value: Any) -> Any:
    torch = sys.modules["torch"]
    if isinstance(value, Mapping):
        if _DTYPE in value:
            found = getattr(torch, str(value[_DTYPE]))
            if not isinstance(found, torch.dtype):
                raise TypeError(value)
            return found
        return tuple(_context(item) for item in value[_TUPLE])
    return [_context(item) for item in value] if isinstance(value, list) else value
