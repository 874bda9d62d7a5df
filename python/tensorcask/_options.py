"""Options of saves and loads: types, accepted words and checks."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

from . import _dtypes, _native, _precision
from ._errors import InvalidTypeError, InvalidValueError

# Includes `intermittent:N`, which a type checker cannot describe.
Policy = Literal["adaptive", "full", "one_shot", "consecutive", "intermittent"] | str
# Includes `disk:FOLDER`.
BaseCache = Literal["memory", "encoded", "none"] | str
# Includes weights of size, speed and precision, such as `0.6,0.4,0`.
Objective = Literal["smallest", "balanced", "fastest", "auto"] | str
Framework = Literal["torch", "numpy", "jax", "bytes"]
VerifyDepth = Literal["log", "pages", "full"]
# A training step, or the newest step.
Step = int | Literal["latest"]
# By tensor name: a slice of the first dimension, or one slice per leading dimension.
Slices = Mapping[str, slice | tuple[slice, ...]]
# A dtype of torch, numpy or jax, or its name: `torch.bfloat16`, `np.float16`, `"bf16"`.
DType = Any
# A device of torch, or a device or sharding of jax.
Device = Any
# Refuse or mark a state whose parameters or moments hold NaN or infinities.
Check = Literal["finite", "tag"] | None
# When the objects of forgotten steps are deleted: with the next save, or by garbage collection.
Free = Literal["next_save", "gc"]
# Values of keep_last, keep_every, keep_weights_every and free.
Retention = tuple[int | None, int | None, int | None, str]
# Policy, number of the policy, base_cache, verify_after_encode, objective, precision, statistics, check, frozen, codecs, roles.
WriterOptions = tuple[str, int | None, str, bool, str, tuple[str, ...], bool, str | None, tuple[str, ...], tuple[str, ...], tuple[str, ...]]

_POLICIES = "adaptive, full, one_shot, consecutive, intermittent or intermittent:N, with N of 1 or more"
_BASE_CACHES = ("memory", "encoded", "none")
_CHECKS = ("finite", "tag", None)
_FREE = ("next_save", "gc")
_DISK = "disk:"
_MAX_STEP = 2**64 - 1
_ROLES = {"model", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "ema", "optimizer", "step"}
_STEP = "step"
# The least and the greatest integer of a fact.
_FACTS = (-(2**63), 2**64 - 1)
# Values of JSON that hold no others.
_JSON = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Compare:
    """A request to list the elements that a load with ``have=`` changes. ``limit``: share of the elements of a tensor above which they are
    not listed. ``places``, filled by the load: for each tensor the places of its changed elements in the flattened tensor, as 64-bit
    integers, or None beyond the limit."""

    limit: float
    places: dict[str, bytearray | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of :func:`tensorcask.load`, which describes them. Refuses wrong values before anything is read."""

    tensors: str | Sequence[str] | None = None
    slices: Slices | None = None
    out: Any = None
    device: Device | None = None
    framework: Framework | None = None
    dtype: DType | Mapping[str, DType] | None = None
    have: int | None = None
    max_error: float | None = None
    map_location: Device | None = None
    strip_prefix: str | None = None
    mmap: bool = False
    compare: Compare | None = None

    def __post_init__(self) -> None:
        if self.map_location is not None:
            self._take_map_location()
        if self.strip_prefix is not None:
            self._take_prefix()
        given: Any = self.tensors
        for pattern in given if isinstance(given, Collection) else [given]:
            if given is not None and not isinstance(pattern, str):
                raise InvalidTypeError(f"tensors: {pattern!r}; use a name, a pattern such as 'model.*', or a list of these")
        if self.slices is not None and not isinstance(self.slices, Mapping):
            raise InvalidTypeError(f"slices: {self.slices!r}; use a mapping of tensor names to slices")
        for name, wanted in (self.slices or {}).items():
            check_slices(name, wanted)
        if self.framework is not None and self.framework not in get_args(Framework):
            raise InvalidValueError(f"framework {self.framework!r}: use 'torch', 'numpy', 'jax' or 'bytes'")
        for argument, dtype in self._dtypes():
            if dtype is not None:
                float_name(dtype, argument)
        if self.max_error is not None and not (isinstance(self.max_error, (int, float)) and self.max_error >= 0):
            raise InvalidValueError(f"max_error {self.max_error!r}: use a relative error of 0 or more, such as 0.05")
        if self.mmap and self.out is not None:
            raise InvalidValueError("mmap=True returns tensors over the files of the store, and out= fills yours. Pass one of them")
        if self.have is not None:
            check_step(self.have)
            if self.out is None:
                raise InvalidValueError("have= says which step `out` holds, and `out` is missing")

    def _take_map_location(self) -> None:
        """``map_location`` is the name of ``torch.load`` for the device."""
        if self.device is not None:
            raise InvalidValueError("device= and map_location= are one argument under two names. Pass one of them")
        if callable(self.map_location) or isinstance(self.map_location, Mapping):
            raise InvalidTypeError("map_location: tensorcask takes a device, such as 'cpu' or 'cuda:1', and no function or mapping")
        object.__setattr__(self, "device", self.map_location)

    def _take_prefix(self) -> None:
        if not isinstance(self.strip_prefix, str) or not self.strip_prefix:
            raise InvalidTypeError(f"strip_prefix: {self.strip_prefix!r}; use the beginning of names, such as 'model.'")
        if self.out is not None or self.slices is not None:
            raise InvalidValueError("strip_prefix= is for whole tensors in a new dict, not for out= or slices=")
        if self.tensors is None:
            object.__setattr__(self, "tensors", f"{_escaped(self.strip_prefix)}*")

    def without_prefix(self, names: Sequence[str]) -> dict[str, str]:
        """Each name of a partial load with the name that it gets in the result."""
        prefix = self.strip_prefix or ""
        other = next((name for name in names if not name.startswith(prefix) or name == prefix), None)
        if other is not None:
            raise InvalidValueError(f"strip_prefix={prefix!r}: tensor {other!r} does not begin with it. Choose others with tensors=")
        return {name: name.removeprefix(prefix) for name in names}

    def _dtypes(self) -> list[tuple[str, Any]]:
        if isinstance(self.dtype, Mapping):
            return [(f"dtype[{pattern!r}]", dtype) for pattern, dtype in self.dtype.items()]
        return [("dtype", self.dtype)]

    @property
    def is_partial(self) -> bool:
        """Whether only a part of the state is loaded, as a flat dict."""
        return self.tensors is not None or self.slices is not None

    @property
    def patterns(self) -> list[str]:
        """Names and patterns of the tensors to load."""
        return [self.tensors] if isinstance(self.tensors, str) else list(self.tensors or [])

    def conversions(self, tensors: Sequence[Any]) -> dict[str, str]:
        """Returns the dtype of each tensor to convert, by name. ``tensors`` describes all tensors of the snapshot."""
        if self.dtype is None:
            return {}
        if not isinstance(self.dtype, Mapping):
            wanted = float_name(self.dtype, "dtype")
            return {info.name: wanted for info in tensors if _is_float(info.dtype) and not _keeps_dtype(info)}
        found: dict[str, str | None] = {}
        names = [info.name for info in tensors]
        for pattern, dtype in self.dtype.items():
            try:
                matches, _ = _native.matching(names, [pattern])
            except (TypeError, ValueError) as error:
                raise InvalidValueError(f"dtype: {pattern!r} is neither a role nor a pattern of names: {error}") from None
            fits = [info for info, matched in zip(tensors, matches, strict=True) if matched or info.role == pattern]
            if not fits and pattern not in _ROLES:
                raise _native.TemplateError(f"dtype: no tensor matches `{pattern}`")
            for info in fits:
                if _is_float(info.dtype) and (info.name == pattern or not _keeps_dtype(info)):
                    found[info.name] = None if dtype is None else float_name(dtype, "dtype")
        return {name: wanted for name, wanted in found.items() if wanted is not None}


def _escaped(text: str) -> str:
    """A pattern that matches this text alone."""
    return "".join(f"[{letter}]" if letter in "*?[{}" else letter for letter in text)


def _is_float(dtype: str) -> bool:
    """Whether a dtype is floating-point with elements of at least a byte."""
    return (dtype.startswith("f") or dtype == "bf16") and _dtypes.BITS[dtype] >= 8


def _keeps_dtype(info: Any) -> bool:
    """Whether a tensor is a scalar or a step counter, whose value a rounding would change."""
    return bool(info.shape == () or info.role == _STEP or info.name.rpartition(".")[2] == _STEP)


def float_name(dtype: DType, argument: str) -> str:
    """Returns the name in a store of a floating-point dtype of any framework."""
    name = _dtypes.dtype_name(dtype)
    if name is None or not _is_float(name):
        known = ", ".join(sorted(name for name in _dtypes.BITS if _is_float(name)))
        raise InvalidValueError(f"{argument} {dtype!r}: use a floating-point dtype of torch, numpy or jax, or one of {known}")
    return name


def check_slices(name: str, wanted: Any) -> tuple[slice, ...]:
    """Returns the slices of one tensor, one per leading dimension."""
    parts = wanted if isinstance(wanted, tuple) else (wanted,)
    bounds = [bound for part in parts if isinstance(part, slice) for bound in (part.start, part.stop, part.step)]
    if not all(isinstance(part, slice) for part in parts) or not all(bound is None or hasattr(bound, "__index__") for bound in bounds):
        raise InvalidTypeError(
            f"slices[{name!r}]: {wanted!r}; use a slice, or one slice per leading dimension, such as (slice(0, 2), slice(4, 8))"
        )
    return parts


def check_step(step: Any, words: str = "") -> int:
    """Returns a training step as an integer. ``words`` names further accepted values in the error."""
    found = _integer(step, f"step {step!r}: use an integer{words}")
    if not 0 <= found <= _MAX_STEP:
        raise InvalidValueError(f"step {found}: use 0 to {_MAX_STEP}")
    return found


def _integer(value: Any, message: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidTypeError(message)


def step_or_latest(step: Any) -> int | None:
    """Returns a training step as an integer; None for the newest."""
    return None if isinstance(step, str) and step == "latest" else check_step(step, " or 'latest'")


def check_count(name: str, count: Any) -> int:
    """Returns a number of at least 1."""
    found = _integer(count, f"{name}={count!r}: use an integer")
    if found < 1:
        raise InvalidValueError(f"{name}={found}: use 1 or more")
    return found


def parse_duration(duration: str | timedelta) -> timedelta:
    """Returns the time that ``30s``, ``5m``, ``24h`` or ``7d`` stands for, as on the command line."""
    if isinstance(duration, timedelta):
        if duration < timedelta():
            raise InvalidValueError(f"{duration!r}: use a time of 0 or more")
        return duration
    try:
        return _native.parse_duration(duration)
    except (_native.Error, TypeError) as error:
        raise InvalidValueError(f"{error}; or pass a timedelta") from None


def parse_policy(policy: Policy) -> tuple[str, int | None]:
    """Returns the name and the number of a policy; only ``intermittent:N`` has a number."""
    if not isinstance(policy, str):
        raise InvalidTypeError(f"policy {policy!r}: use {_POLICIES}")
    name, colon, every = policy.partition(":")
    if not colon:
        return name, None
    if not (every.isascii() and every.isdigit()) or int(every) > _MAX_STEP:
        raise InvalidValueError(f"policy {policy!r}: use {_POLICIES}")
    return name, int(every)


def writer_options(
    policy: Policy,
    base_cache: BaseCache = "memory",
    verify_after_encode: bool = True,
    objective: Objective = "balanced",
    precision: str | Sequence[str] = (),
    statistics: bool = False,
    check: Check = None,
    frozen: str | Sequence[str] = (),
    codecs: str | Sequence[str] = (),
    roles: str | Sequence[str] = (),
) -> WriterOptions:
    """Returns the options of a writer. Checks everything that the library does not check itself."""
    is_folder = isinstance(base_cache, str) and base_cache.startswith(_DISK) and base_cache != _DISK
    if base_cache not in _BASE_CACHES and not is_folder:
        raise InvalidValueError(f"base_cache {base_cache!r}: use memory, encoded, none or disk:FOLDER")
    if not isinstance(objective, str):
        raise InvalidTypeError(f"objective {objective!r}: use auto, smallest, balanced, fastest, or weights such as '0.6,0.4,0'")
    if check not in _CHECKS:
        raise InvalidValueError(f"check {check!r}: use 'finite', 'tag' or None")
    words = _precision.words(precision)
    patterns = _texts(frozen, "frozen", "a pattern of names")
    checks = (bool(statistics), check, patterns)
    rules = (codec_rules(codecs), role_rules(roles))
    return (*parse_policy(policy), base_cache, bool(verify_after_encode), objective, words, *checks, *rules)


def codec_rules(codecs: str | Sequence[str]) -> tuple[str, ...]:
    """Returns rules that assign codecs to tensors. The library checks patterns and codecs."""
    return _texts(codecs, "codecs", "a rule such as 'model=tc.bitmask'")


def role_rules(roles: str | Sequence[str]) -> tuple[str, ...]:
    """Returns rules that state the roles of tensors. The library checks them."""
    return _texts(roles, "roles", "a rule such as 'app.ema.*=ema'")


def _texts(given: str | Sequence[str], argument: str, use: str) -> tuple[str, ...]:
    """Returns one text or several as a tuple. Refuses other values."""
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidTypeError(f"{argument}: {given!r}; use {use}, or a sequence of them")
    return tuple(texts)


def retention_of(keep_last: int | None, keep_every: int | None, keep_weights_every: int | None, free: Free) -> Retention | None:
    """Returns which steps to keep, and when the others are deleted; None to keep all."""
    given = {"keep_last": keep_last, "keep_every": keep_every, "keep_weights_every": keep_weights_every}
    if free not in _FREE:
        raise InvalidValueError(f"free {free!r}: use 'next_save' or 'gc'")
    if all(number is None for number in given.values()):
        return None
    counts = [None if number is None else check_count(name, number) for name, number in given.items()]
    return (counts[0], counts[1], counts[2], free)


def text_values(mapping: Mapping[str, str] | None, argument: str) -> dict[str, str]:
    """Returns a mapping of text to text. Refuses other entries by name."""
    if mapping is not None and not isinstance(mapping, Mapping):
        raise InvalidTypeError(f"{argument}: {mapping!r}; use a mapping of text to text")
    for key, value in (mapping or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidTypeError(f"{argument}[{key!r}]: {value!r}; keys and values have to be text")
    return dict(mapping or {})


def changed_row_lists(changed_rows: Mapping[str, Sequence[int]] | None) -> dict[str, list[int]]:
    """Returns the indices of rows by tensor name. Refuses other values by tensor name."""
    found: dict[str, list[int]] = {}
    for name, rows in (changed_rows or {}).items():
        try:
            found[name] = [operator.index(row) for row in rows]
        except TypeError:
            raise InvalidTypeError(f"changed_rows[{name!r}]: {rows!r}; use a sequence of integers") from None
        lowest = min(found[name], default=0)
        if lowest < 0:
            raise InvalidValueError(f"changed_rows[{name!r}]: row {lowest}; use 0 or more")
    return found


def user_json(user: Mapping[str, Any] | None) -> str:
    """Returns the user's facts about a step as JSON. NaN and infinities, which JSON does not have, become text."""
    if user is not None and not isinstance(user, Mapping):
        raise InvalidTypeError(f"user: {user!r}; use a mapping, such as {{'loss': 0.5}}")

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item, f"{path}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, f"{path}[{at}]") for at, item in enumerate(value)]
        if not isinstance(value, _JSON):
            found = value
            try:
                # A tensor or an array of one element is a number.
                value = value.item()
            except (AttributeError, RuntimeError, ValueError):
                pass
            if not isinstance(value, _JSON):
                raise InvalidTypeError(f"{path}: {found!r}; use numbers, text, None, and lists and mappings of these")
        if isinstance(value, int) and not _FACTS[0] <= value <= _FACTS[1]:
            raise InvalidValueError(f"{path}: an integer of {value.bit_length()} bits; use -2^63 to 2^64 - 1, a float or a text")
        # Numbers of numpy are floats, too, and print themselves in their own way.
        return repr(float(value)) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(user or {}, "user"), allow_nan=False)
