"""Refuses torch tensors that cannot be stored, by their paths."""

from __future__ import annotations

import importlib.util
import math
import sys
from functools import cache
from typing import Any

from ._dtypes import DTYPES, TORCH, UnstorableTypeError, torch_dtype_name
from ._shard import is_described_part


def is_plain_torch(value: Any) -> bool:
    """Whether a torch tensor is of no subclass, other than a parameter."""
    torch = sys.modules["torch"]
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def is_sharded(value: Any) -> bool:
    """Whether a torch tensor is a ``ShardedTensor``, which FSDP1 and older trainers use."""
    return not is_plain_torch(value) and hasattr(type(value), "local_shards")


def check_torch_shape(tensor: Any, path: object) -> None:
    """Refuses torch tensors without one shape."""
    if is_sharded(tensor):
        # Most attributes of these tensors raise errors. Their shards are checked instead.
        return
    check_placements(tensor, path)
    if not is_plain_torch(tensor) and sys.modules["torch"].nn.parameter.is_lazy(tensor):
        raise UnstorableTypeError(f"{path}: a lazy parameter has no shape yet: it is uninitialized. Run the module once before saving")
    if tensor.is_nested:
        raise UnstorableTypeError(
            f"{path}: a nested tensor cannot be stored. Store the list that unbind() returns, or values() and offsets()"
        )


def check_planned(tensor: Any, path: object) -> None:
    """Refuses torch tensors that DCP would plan as what they are not."""
    check_torch_shape(tensor, path)
    if is_described_part(tensor) and not _dcp_plans_parts():
        raise UnstorableTypeError(
            f"{path}: a tensor that says by its attributes which part of a larger one it is. DCP of PyTorch {sys.modules['torch'].__version__} "
            "takes it for the whole tensor. Save it with PyTorch 2.15, or through tensorcask.Engine"
        )


@cache
def _dcp_plans_parts() -> bool:
    """Whether DCP knows tensors that describe their parts."""
    return importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None


def check_placements(tensor: Any, path: object) -> None:
    """Refuses DTensors whose local part is several pieces of the whole tensor. DCP takes it for one piece, and mixes up the elements."""
    placements = getattr(tensor, "placements", None)
    if placements is None or hasattr(getattr(tensor, "_local_tensor", None), "__create_write_items__"):
        return
    for at, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        # One piece: the axes of the mesh that follow split the same dimension first, as tensor parallelism does before FSDP2.
        inner = [tensor.device_mesh.size(after) for after in range(at + 1, len(placements)) if placements[after].is_shard(placement.dim)]
        if factor != math.prod(inner):
            raise UnstorableTypeError(
                f"{path}: a DTensor with placements {placements}, whose local part is {factor} pieces of the tensor. "
                "Redistribute it to Shard placements first"
            )


def check_torch_data(tensor: Any, path: object) -> None:
    """Refuses torch tensors that have no elements of their own."""
    torch = sys.modules["torch"]
    check_torch_shape(tensor, path)
    if not is_plain_torch(tensor) and hasattr(tensor, "fake_mode"):
        raise UnstorableTypeError(
            f"{path}: a fake tensor has no data. Save outside of FakeTensorMode, or leave the tensor out of the state"
        )
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnstorableTypeError(
            f"{path}: a tensor inside a function transform (a functional tensor, or one of torch.func) has no data of its own. "
            "Save outside of the function"
        )


def check_torch(tensor: Any, path: object) -> str:
    """Returns the dtype in a store of a torch tensor. Refuses, by its path, a tensor that cannot be stored."""
    check_torch_data(tensor, path)
    if tensor.is_meta:
        raise UnstorableTypeError(f"{path}: a meta tensor has no data; materialize it, or leave it out of the state")
    if tensor.layout is not sys.modules["torch"].strided:
        raise UnstorableTypeError(f"{path}: a tensor of layout {tensor.layout}; store to_dense(), or its values and indices")
    if tensor.is_quantized:
        raise UnstorableTypeError(f"{path}: a quantized tensor; store int_repr() and its scales")
    if not is_plain_torch(tensor) and hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local"):
        raise UnstorableTypeError(
            f"{path}: a {type(tensor).__qualname__} is made of several tensors, and here it is one shard or one inner tensor of another. "
            "tensorcask stores such tensors only whole"
        )
    if not is_plain_torch(tensor) and any(hasattr(tensor, name) for name in ("to_local", "local_shards")):
        raise UnstorableTypeError(
            f"{path}: a {type(tensor).__qualname__} is distributed; "
            "save distributed states with torch.distributed.checkpoint and Store.writer()"
        )
    dtype = _dtype_of_torch(tensor.dtype)
    if dtype is None:
        raise UnstorableTypeError(f"{path}: dtype {tensor.dtype} cannot be stored")
    return dtype


@cache
def _dtype_of_torch(dtype: Any) -> str | None:
    name = torch_dtype_name(dtype)
    ours = DTYPES.get(name)
    return ours if ours is not None and TORCH.get(ours) == name else None
