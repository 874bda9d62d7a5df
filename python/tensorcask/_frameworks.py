"""Borrows the memory of torch, numpy and jax arrays for saves, and allocates arrays for loads.

Imports a framework only when one of its arrays is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from . import _native
from ._device import flat_bytes, is_on_device, is_plain, written
from ._dtypes import (
    BITS,
    DTYPES,
    UnstorableTypeError,
    byte_count,
    numpy_dtype,
    torch_dtype,
    torch_shape,
    torch_shape_in_store,
)
from ._errors import InvalidTypeError, InvalidValueError
from ._refusals import check_torch, is_plain_torch
from ._shard import Shard, Shards, is_described_part, is_given_part, is_part, parts_of_described

_PLAIN_NUMPY_KINDS = "biufc"
_NO_ARRAYS = frozenset((dict, list, tuple, str, int, float, bool, bytes, bytearray, type(None)))


@dataclass(frozen=True)
class RawTensor:
    """A tensor without a framework, as returned with ``framework="bytes"``.

    ``data`` holds the elements in row-major order, little-endian. Elements smaller than a byte are packed, low bits
    first.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class Lent(NamedTuple):
    """The borrowed bytes of an array. ``keep`` owns the memory.

    Without a buffer, the bytes are still to be fetched from ``keep``.

    For a shard, ``whole`` is the shape of the global tensor and ``offset`` the first index of the shard. ``others`` are further
    shards of the same tensor.
    """

    framework: str
    dtype: str
    shape: tuple[int, ...]
    buffer: Any
    keep: Any
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    others: tuple[Any, ...] = ()

    @property
    def is_empty_shard(self) -> bool:
        """Whether this is a shard without elements of a tensor with elements."""
        return self.whole is not None and 0 in self.shape and 0 not in self.whole


class Place(NamedTuple):
    """Memory to read a tensor into, and a function that returns the array when the memory is filled.

    Instead of memory, ``buffer`` may be a function that takes the data from an address: see ``fill`` of :func:`place_in`.
    """

    buffer: Any
    finish: Callable[[], Any]


# Frameworks of the types of arrays that were seen. A state has many arrays of few types.
_by_type: dict[type, str] = {}
_MAX_TYPES = 64


def framework_of(value: Any) -> str | None:
    """Returns the framework of an array; None for other values."""
    if type(value) is Shard or type(value) is Shards:
        return framework_of(value.data)
    known = _by_type.get(type(value))
    if known is None:
        known = _find_framework(value)
        if known is not None and len(_by_type) < _MAX_TYPES:
            _by_type[type(value)] = known
    return known


def _find_framework(value: Any) -> str | None:
    if type(value) in _NO_ARRAYS or isinstance(value, (str, bytes)):
        # numpy's text and bytes are numbers of numpy, and also text and bytes of Python.
        return None
    if isinstance(value, RawTensor):
        return "bytes"
    for framework, module, names in (
        ("torch", "torch", ("Tensor",)),
        ("numpy", "numpy", ("ndarray", "generic")),
        ("jax", "jax", ("Array",)),
    ):
        loaded = sys.modules.get(module)
        classes = tuple(found for name in names if (found := getattr(loaded, name, None)) is not None)
        if classes and isinstance(value, classes):
            return framework
    return None


def name_of_type(value: Any) -> tuple[str, str] | None:
    """Returns kind and name of a dtype or device; None for other values."""

    def is_of(module: str, name: str) -> bool:
        return isinstance(value, getattr(sys.modules.get(module), name, ()))

    if is_of("torch", "dtype"):
        return "torch.dtype", str(value).removeprefix("torch.")
    if is_of("torch", "device"):
        return "torch.device", str(value)
    if is_of("numpy", "dtype") and value.isbuiltin == 1:
        return "numpy.dtype", str(value.name)
    return None


def type_of_name(kind: str, name: str) -> Any:
    """Returns the dtype or device of a kind and name; the name, if there is none."""
    if kind == "torch.dtype":
        found = vars(_import("torch")).get(name)
        return found if isinstance(found, _import("torch").dtype) else name
    if kind == "torch.device":
        return _import("torch").device(name)
    if kind == "numpy.dtype":
        found = _import("numpy").dtype(name)
        return found if found.isbuiltin == 1 else name
    return name


def inner_tensors(value: Any) -> dict[str, Any] | None:
    """Returns the inner tensors of a torch tensor subclass by attribute; None for other values and for a DTensor."""
    if is_given_part(value) or framework_of(value) != "torch" or is_plain_torch(value):
        return None
    if not hasattr(value, "__tensor_flatten__") or hasattr(value, "to_local"):
        return None
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def default_framework() -> str:
    """Returns the framework for tensors that were saved without one."""
    if "torch" in sys.modules:
        return "torch"
    try:
        import_module("numpy")
    except ImportError:
        return "bytes"
    return "numpy"


@cache
def _import(framework: str) -> Any:
    try:
        return import_module(framework)
    except ImportError as error:
        raise ImportError(
            f"the tensors were saved from {framework}, which is not installed; pass framework='numpy' or framework='bytes'"
        ) from error


def lend(
    value: Any,
    path: object,
    contiguous: dict[Any, Any] | None = None,
    sharded: bool = False,
    deferred: Callable[[Any], bool] | None = None,
) -> Lent:
    """Borrows the bytes of an array. Copies only if the array is not contiguous or not on the CPU.

    ``contiguous`` keeps these copies, so that equal views stay one tensor. ``sharded``: takes the local part of a
    DTensor. ``deferred`` chooses torch tensors whose bytes are fetched later: they get no buffer, and ``keep`` is
    contiguous.
    """
    framework = framework_of(value)
    if is_given_part(value) and not sharded:
        raise UnstorableTypeError(
            f"{path}: a part of a tensor (a Shard, or a tensor with global_offsets) can only be saved by tensorcask.Engine or "
            "torch.distributed.checkpoint, on all ranks"
        )
    if is_described_part(value):
        value = parts_of_described(value)
    if isinstance(value, Shards):
        first, *others = (lend(part, path, contiguous, True, deferred) for part in value.parts)
        return first._replace(others=tuple(others))
    if sharded and is_part(value):
        local, whole, offset = local_part(value, path)
        lent = lend(local, path, contiguous, deferred=deferred)
        return lent._replace(whole=whole, offset=offset)
    if framework == "torch":
        return _lend_torch(value, path, {} if contiguous is None else contiguous, deferred)
    if framework == "numpy":
        return _lend_numpy(value, path, "numpy", {} if contiguous is None else contiguous)
    if framework == "jax":
        jax = import_module("jax")
        if isinstance(value, jax.core.Tracer):
            raise UnstorableTypeError(f"{path}: an array that jax is tracing has no data; save outside of jax.jit, grad and vmap")
        if value.is_deleted():
            raise UnstorableTypeError(f"{path}: a jax array that was deleted, or donated to a function; save what the function returned")
        if not value.is_fully_addressable:
            raise UnstorableTypeError(f"{path}: a jax array with shards on other processes; gather it with process_allgather() first")
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise UnstorableTypeError(
                f"{path}: a key of jax.random; store jax.random.key_data(key), and call wrap_key_data() after the load"
            )
        return _lend_numpy(import_module("numpy").asarray(value), path, "jax", {} if contiguous is None else contiguous)
    if framework == "bytes":
        if len(value.data) != byte_count(value.dtype, value.shape):
            raise UnstorableTypeError(f"{path}: {len(value.data)} bytes do not hold {value.dtype} of shape {list(value.shape)}")
        return Lent("bytes", value.dtype, tuple(value.shape), value.data, value)
    raise UnstorableTypeError(f"{path}: {type(value).__qualname__} is not a tensor")


def local_part(value: Any, path: object) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Returns the local part of a DTensor or shard, and its global shape and first index in elements of the store."""
    if is_described_part(value):
        value = parts_of_described(value)
    if isinstance(value, Shards):
        if len(value.parts) != 1:
            raise UnstorableTypeError(f"{path}: {len(value.parts)} parts of one tensor. They are restored one by one: pass Shards")
        value = value.parts[0]
    if isinstance(value, Shard):
        local = value.data.detach() if framework_of(value) == "torch" else value.data
        whole, first = tuple(map(int, value.shape)), [int(at) for at in value.offset]
        if framework_of(value) == "torch":
            plain = whole
            whole = torch_shape_in_store(check_torch(local, path), plain, path)
            if whole != plain:
                first[-1] *= 2
        return local, whole, tuple(first)
    compute = import_module("torch.distributed.tensor._utils").compute_local_shape_and_global_offset
    for placement in value.placements:
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise UnstorableTypeError(f"{path}: a DTensor with placement {placement}; only Shard and Replicate can be stored")
    local = value.to_local().detach()
    shape, offset = compute(value.shape, value.device_mesh, value.placements)
    chunks = getattr(value._local_tensor, "__create_chunk_list__", None)
    if chunks is not None:
        # Uneven shards, such as those of Megatron-FSDP, know their places.
        found = list(chunks())
        if len(found) != 1:
            raise UnstorableTypeError(f"{path}: a DTensor whose local part is {len(found)} chunks. Save it by torch.distributed.checkpoint")
        shape, offset = found[0].sizes, found[0].offsets
    if tuple(shape) != tuple(local.shape):
        raise UnstorableTypeError(f"{path}: a DTensor whose local part has shape {list(local.shape)}; its placements give {list(shape)}")
    dtype = check_torch(local, path)
    whole = torch_shape_in_store(dtype, tuple(value.shape), path)
    first = [int(at) for at in offset]
    if whole != tuple(value.shape):
        first[-1] *= 2
    return local, whole, tuple(first)


@dataclass(frozen=True)
class Wanted:
    """Memory of the caller to fill: the global shape of its tensor, and the first index and extent of its part."""

    memory: Any
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]


def wanted_part(value: Any, path: object) -> Wanted | None:
    """Describes the memory of a tensor of the caller; None for a shard without elements."""
    local, whole, offset = local_part(value, path) if is_part(value) else (value, None, None)
    extent = tuple(local.shape)
    if framework_of(local) == "torch":
        extent = torch_shape_in_store(check_torch(local, path), extent, path)
    if whole is None or offset is None:
        return Wanted(local, extent, (0,) * len(extent), extent)
    return None if 0 in extent and 0 not in whole else Wanted(local, whole, offset, extent)


def _lend_torch(tensor: Any, path: object, contiguous: dict[Any, Any], deferred: Callable[[Any], bool] | None) -> Lent:
    torch = sys.modules["torch"]
    dtype = check_torch(tensor, path)
    shape = torch_shape_in_store(dtype, tuple(tensor.shape), path)
    if deferred is not None and tensor.numel() and deferred(tensor):
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if key not in contiguous:
            contiguous[key] = tensor.detach().resolve_conj().resolve_neg().contiguous()
            contiguous[(key, "owner")] = tensor
        return Lent("torch", dtype, shape, None, contiguous[key])
    if tensor.device.type == "cpu" and is_plain(tensor):
        try:
            plain = tensor.detach()
            return Lent("torch", dtype, shape, torch_bytes(torch, plain), plain)
        except (AssertionError, RuntimeError) as error:
            # Nothing was allocated: the reason is the kind of tensor, not a lack of memory.
            reason = str(error).strip().partition("\n")[0]
            raise UnstorableTypeError(f"{path}: the memory of this {type(tensor).__qualname__} cannot be read: {reason}") from error
    key = (tensor.device, tensor.dtype, tensor.data_ptr(), shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    plain = contiguous.get(key)
    if plain is None:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # Keep the original alive too: its address is the key.
        contiguous[key] = plain
        contiguous[(key, "owner")] = tensor
    return Lent("torch", dtype, shape, torch_bytes(torch, plain), plain)


def torch_bytes(torch: Any, tensor: Any) -> Any:
    """Returns the memory of a contiguous tensor on the CPU."""
    return flat_bytes(torch, tensor).numpy() if tensor.numel() else bytearray()


def _lend_numpy(array: Any, path: object, framework: str, contiguous: dict[Any, Any]) -> Lent:
    np = sys.modules["numpy"]
    if isinstance(array, np.ma.MaskedArray):
        raise UnstorableTypeError(f"{path}: a masked array; store its data and its mask")
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None or array.dtype.fields is not None:
        raise UnstorableTypeError(f"{path}: dtype {array.dtype} cannot be stored")
    array = np.asarray(array)
    shape = tuple(array.shape)
    if array.dtype.kind in _PLAIN_NUMPY_KINDS and array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    elif not array.flags.c_contiguous:
        key = (array.dtype, array.ctypes.data, shape, array.strides)
        original, array = array, contiguous.setdefault(key, np.ascontiguousarray(array))
        contiguous[(key, "owner")] = original
    if array.size == 0:
        return Lent(framework, dtype, shape, bytearray(), array)
    buffer = array.reshape(-1).view(np.uint8)
    if BITS[dtype] < 8:
        buffer = _native.pack(dtype, buffer)
    return Lent(framework, dtype, shape, buffer, array)


def place(framework: str, dtype: str, shape: Sequence[int], name: str) -> Place:
    """Allocates an array of a framework for a tensor."""
    if framework == "torch":
        torch = _import("torch")
        tensor = torch.empty(torch_shape(dtype, shape, name), dtype=torch_dtype(torch, dtype, name), device="cpu")
        return Place(torch_bytes(torch, tensor), lambda: tensor)
    if framework == "numpy":
        return _numpy_place(dtype, shape, name, lambda array: array)
    if framework == "jax":
        return _numpy_place(dtype, shape, name, lambda array: to_jax(array, name))
    if framework == "bytes":
        raw = RawTensor(dtype, tuple(shape), bytearray(byte_count(dtype, shape)))
        return Place(raw.data, lambda: raw)
    raise InvalidValueError(f"framework {framework!r}: use 'torch', 'numpy', 'jax' or 'bytes'")


def to_jax(array: Any, name: str) -> Any:
    """Returns a numpy array as a jax array of the same dtype."""
    converted = _import("jax.numpy").asarray(array)
    if converted.dtype != array.dtype:
        raise _native.UnsupportedError(
            f"tensor `{name}`: jax has {array.dtype} only with jax_enable_x64; enable it, or pass framework='numpy'"
        )
    return converted


def _numpy_place(dtype: str, shape: Sequence[int], name: str, finish: Callable[[Any], Any]) -> Place:
    np = _import("numpy")
    array = np.empty(shape, numpy_dtype(np, dtype, name))
    if array.size == 0:
        return Place(bytearray(), lambda: finish(array))
    if BITS[dtype] >= 8:
        return Place(array.reshape(-1).view(np.uint8), lambda: finish(array))
    packed = bytearray(byte_count(dtype, shape))

    def unpack() -> Any:
        elements = _native.unpack(dtype, packed, array.size, dtype == "int4")
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(elements, np.uint8)
        return finish(array)

    return Place(packed, unpack)


def place_in(
    out: Any, dtype: str, shape: Sequence[int], name: str, fill: Callable[[Any, int, int], None] | None = None
) -> Place:
    """Returns the memory of the caller's array, or new memory that is then copied into the array.

    ``fill`` copies into a tensor on a device, from an address and so many bytes. Then no new memory is needed.
    """
    framework = framework_of(out)

    def refuse(what: str) -> None:
        raise _native.TemplateError(f"out, tensor `{name}`: {what}; the store has {dtype} of shape {list(shape)}")

    if framework == "torch":
        torch = sys.modules["torch"]
        theirs = check_torch(out, f"out, `{name}`")
        if theirs != dtype or tuple(out.shape) != torch_shape(dtype, shape, name):
            refuse(f"is {out.dtype} of shape {list(out.shape)}")
        if fill is not None and is_on_device(out):
            return Place(partial(fill, out), lambda: out)
        if out.device.type == "cpu" and is_plain(out):
            return Place(torch_bytes(torch, written(out)), lambda: out)
        fresh = place("torch", dtype, shape, name)

        def copy() -> Any:
            with torch.no_grad():
                out.copy_(fresh.finish())
            return out

        return Place(fresh.buffer, copy)
    if framework == "numpy" and hasattr(out, "flags"):
        np = sys.modules["numpy"]
        if isinstance(out, np.generic):
            # A number is immutable: return a new one, as for numbers of Python.
            if DTYPES.get(out.dtype.name) != dtype or shape:
                refuse(f"is a number of type {out.dtype}")
            number = place("numpy", dtype, shape, name)
            if BITS[dtype] >= 8:
                number.buffer[:] = np.frombuffer(out.tobytes(), np.uint8)
            return Place(number.buffer, lambda: number.finish()[()])
        if DTYPES.get(out.dtype.name) != dtype or tuple(out.shape) != tuple(shape):
            refuse(f"is {out.dtype} of shape {list(out.shape)}")
        if not out.flags.writeable:
            refuse("is read-only")
        if out.flags.c_contiguous and out.dtype.byteorder != ">" and BITS[dtype] >= 8:
            return Place(out.reshape(-1).view(np.uint8) if out.size else bytearray(), lambda: out)
        filled = place("numpy", dtype, shape, name)

        def assign() -> Any:
            out[...] = filled.finish()
            return out

        return Place(filled.buffer, assign)
    if framework == "bytes":
        if out.dtype != dtype or tuple(out.shape) != tuple(shape) or len(out.data) != byte_count(dtype, shape):
            refuse(f"is {out.dtype} of shape {list(out.shape)}, {len(out.data)} bytes")
        return Place(out.data, lambda: out)
    raise InvalidTypeError(f"out, tensor `{name}`: {type(out).__qualname__} cannot be filled")
