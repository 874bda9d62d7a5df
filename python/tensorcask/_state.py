"""Flattens a state of nested mappings and lists into tensors, blobs and tree nodes, and rebuilds it."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import io
import logging
import struct
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import _frameworks, _subclasses
from ._dtypes import UnstorableTypeError
from ._errors import InvalidTypeError, InvalidValueError
from ._frameworks import Lent
from ._native import CorruptionError, TemplateError

_log = logging.getLogger("tensorcask")

Node = tuple[str, Any]
Path = tuple[str | int, ...]
OnUnsupported = Literal["error", "skip"] | Callable[[str, Any], Any] | None

# Blob that holds the nodes of a state.
TREE = "tc.tree"
_MAX_DEPTH = 400
_SKIP = object()


@dataclass(frozen=True)
class Reference:
    """Stands for a tensor that is stored separately under this name."""

    name: str
    framework: str


class Part(dict[int, Any]):
    """Elements of a list that one rank holds, by position."""


@dataclass
class Flat:
    """A flattened state."""

    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, Lent] = field(default_factory=dict)
    blobs: dict[str, Any] = field(default_factory=dict)

    def whole_tensors(self) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], Any]]:
        """Name, dtype, shape, offset, extent and bytes of each tensor, of a state without shards."""
        return [(name, t.dtype, t.shape, (0,) * len(t.shape), t.shape, t.buffer) for name, t in self.tensors.items()]


def flatten(
    state: Any,
    on_unsupported: OnUnsupported = None,
    *,
    sharded: bool = False,
    deferred: Callable[[Any], bool] | None = None,
) -> Flat:
    """Flattens a state. A tensor's name is its path of keys, joined by points: see :func:`name_of`. Refuses two tensors of one name.

    ``sharded``: takes the local part of each DTensor. ``deferred``: chooses tensors whose bytes are fetched later.
    """
    check_on_unsupported(on_unsupported)
    flattener = _Flattener(on_unsupported, sharded, deferred)
    flattener.add(state, (), True)
    return flattener.flat


def check_on_unsupported(on_unsupported: OnUnsupported) -> None:
    """Refuses other words than ``error`` and ``skip``."""
    if isinstance(on_unsupported, str) and on_unsupported not in ("error", "skip"):
        raise InvalidValueError(f"on_unsupported={on_unsupported!r}: use 'error', 'skip', or a function of path and value")


class _Flattener:
    def __init__(self, on_unsupported: OnUnsupported, sharded: bool = False, deferred: Callable[[Any], bool] | None = None) -> None:
        self.flat = Flat()
        self.sharded = sharded
        self.deferred = deferred
        self.on_unsupported = on_unsupported
        self.contiguous: dict[Any, Any] = {}
        self.paths: dict[str, Path] = {}

    def add(self, value: Any, path: Path, may_ask: bool) -> None:
        if len(path) > _MAX_DEPTH:
            raise InvalidValueError(f"{path_text(path[:4])}...: nested deeper than {_MAX_DEPTH} levels; does the state contain itself?")
        nodes = self.flat.nodes
        try:
            framework = _frameworks.framework_of(value)
            inner = _frameworks.inner_tensors(value)
            if inner is not None:
                told = _subclasses.described(value)
                self.container("dict", [*inner.items(), *([] if told is None else [(_subclasses.CLASS, told)])], path)
            elif framework is not None:
                lent = _frameworks.lend(value, _Path(path), self.contiguous, self.sharded, self.deferred)
                name = name_of(path)
                _claim(self.paths, name, path)
                self.flat.tensors[name] = lent
                nodes.append(("tensor", (name, framework)))
            elif isinstance(value, Reference):
                _claim(self.paths, value.name, path)
                nodes.append(("tensor", (value.name, value.framework)))
            elif isinstance(value, Part):
                self.container("part", sorted(value.items()), path)
            elif isinstance(value, Mapping):
                has_names = all(isinstance(key, (str, int)) and not isinstance(key, bool) for key in value)
                items = [(self.key(key, path), item) for key, item in value.items()] if has_names else self.pairs(value, path)
                # Nothing is added before the keys are checked.
                if type(value) is Counter:
                    nodes.append(("typed", "collections.Counter"))
                if not has_names:
                    nodes.append(("typed", "dict"))
                self.container("dict" if has_names else "list", items, path)
            elif isinstance(value, (list, tuple)):
                self.container("list" if isinstance(value, list) else "tuple", list(enumerate(value)), path)
            elif type(value) is deque:
                nodes.append(("typed", _DEQUE if value.maxlen is None else f"{_DEQUE}:{value.maxlen}"))
                self.container("list", list(enumerate(value)), path)
            elif isinstance(value, (bytes, bytearray, memoryview)):
                self.blob("bytes", bytes(value) if isinstance(value, memoryview) else value, path)
            elif isinstance(value, io.BytesIO):
                self.blob("file", value.getvalue(), path)
            else:
                nodes.extend(_scalar(value, path))
        except UnstorableTypeError:
            if not may_ask or self.on_unsupported in (None, "error"):
                raise
            if self.on_unsupported == "skip":
                nodes.append(("none", _SKIP))
            elif callable(self.on_unsupported):
                try:
                    self.add(self.on_unsupported(path_text(path), value), path, False)
                except UnstorableTypeError as error:
                    # A plain error, so that on_unsupported is not asked again about the containers around the value.
                    raise InvalidTypeError(f"{error}; on_unsupported returned this value") from None

    def key(self, key: Any, path: Path) -> str | int:
        return _encodable(str.__str__(key), path) if isinstance(key, str) else int.__int__(key)

    def container(self, kind: str, items: list[tuple[str | int, Any]], path: Path) -> None:
        nodes = self.flat.nodes
        at = len(nodes)
        nodes.append((kind, None))
        keys = []
        for key, item in items:
            here = len(nodes)
            self.add(item, (*path, key), True)
            if nodes[here] == ("none", _SKIP):
                if kind == "dict":
                    nodes.pop()
                    continue
                nodes[here] = ("none", None)
            keys.append(key)
        nodes[at] = (kind, keys if kind in ("dict", "part") else len(keys))

    def pairs(self, value: Mapping[Any, Any], path: Path) -> list[tuple[str | int, Any]]:
        """Returns a mapping with keys that are neither text nor integers as the items of a list of pairs."""
        for key, item in value.items():
            if not _is_plain_key(key):
                raise UnstorableTypeError(
                    f"{path_text(path)}: a key is {key!r}. Keys may be strings, numbers, None, bytes, and tuples of these. Use one of them"
                )
            if arrays_by_path(item):
                raise UnstorableTypeError(
                    f"{path_text((*path, key))}: a tensor under a key that is neither text nor an integer has no name. Use str(key)"
                )
        return list(enumerate(value.items()))

    def blob(self, kind: str, data: Any, path: Path) -> None:
        # Readers find a blob by its node, so its name may depend on the order of keys.
        name, count = name_of(path), 1
        while name in self.flat.blobs:
            count += 1
            name = f"{name_of(path)}#{count}"
        self.flat.blobs[name] = data
        self.flat.nodes.append((kind, name))


def _scalar(value: Any, path: Path) -> list[Node]:
    if value is None:
        return [("none", None)]
    if isinstance(value, bool):
        return [("bool", value)]
    # Subclasses such as enums may override conversions: call those of the plain types.
    if isinstance(value, int):
        if int.bit_length(value) > _MAX_DECIMAL_BITS:
            return [("typed", "int"), ("str", hex(int.__int__(value)))]
        return [("int", int.__int__(value))]
    if isinstance(value, float):
        return [("float", float.__float__(value))]
    if isinstance(value, str):
        return [("str", _encodable(str.__str__(value), path))]
    if type(value) is complex:
        return [("typed", "complex"), ("tuple", 2), ("float", value.real), ("float", value.imag)]
    name = _frameworks.name_of_type(value)
    if name is not None:
        return [("typed", name[0]), ("str", name[1])]
    hint = "; store its state_dict()" if hasattr(value, "state_dict") else _HINTS.get(type(value), "")
    if isinstance(value, enum.Enum):
        hint = "; store its value"
    raise UnstorableTypeError(f"{path_text(path)}: {type(value).__module__}.{type(value).__qualname__} cannot be stored{hint}")


# Python converts longer integers to decimal only in square time, and refuses them by default.
_MAX_DECIMAL_BITS = 14_000
_DEQUE = "collections.deque"
_HINTS: dict[type, str] = {
    set: "; store sorted(value)",
    frozenset: "; store sorted(value)",
    range: "; store list(value)",
    slice: "; store its start, stop and step",
    datetime.datetime: "; store its isoformat()",
    datetime.date: "; store its isoformat()",
    datetime.timedelta: "; store its total_seconds()",
    decimal.Decimal: "; store str(value)",
    fractions.Fraction: "; store its numerator and denominator",
    uuid.UUID: "; store its hex",
}


def _is_plain_key(key: Any) -> bool:
    return key is None or type(key) in (str, int, float, bool, bytes) or type(key) is tuple and all(map(_is_plain_key, key))


def _typed(name: str, value: Any) -> Any:
    """The value of a type that this program knows, or else the plain value."""
    known, _, detail = name.partition(":")
    try:
        if known == "collections.Counter" and isinstance(value, dict):
            return Counter(value)
        if known == _DEQUE:
            return deque(value, int(detail) if detail else None)
        if known == "complex":
            return complex(*value)
        if known == "dict":
            return dict(value)
        if known == "int":
            return int(value, 16)
        return _frameworks.type_of_name(known, value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return value


def _encodable(text: str, path: Path) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnstorableTypeError(f"{path_text(path)}: text that is not valid Unicode: {error}") from None
    return text


class _Path:
    """A path that becomes text only in an error: most tensors have none."""

    __slots__ = ("_keys",)

    def __init__(self, keys: tuple[Any, ...]) -> None:
        self._keys = keys

    def __str__(self) -> str:
        return path_text(self._keys)


def path_text(path: tuple[Any, ...]) -> str:
    """Returns a path as Python code, for errors."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def build(nodes: Iterable[Node], leaf: Callable[[str, Any], Any]) -> Any:
    """Rebuilds a state from the nodes of a decoded tree. ``leaf`` returns its tensors, bytes and files."""
    open_containers: list[tuple[str, Any, int, list[Any]]] = []
    for kind, value in nodes:
        if kind in ("dict", "list", "part", "tuple", "typed"):
            count = len(value) if kind in ("dict", "part") else 1 if kind == "typed" else value
            if count:
                open_containers.append((kind, value, count, []))
                continue
            done: Any = _container(kind, [], [])
        else:
            done = leaf(kind, value) if kind in ("tensor", "bytes", "file") else value
        while open_containers:
            kind, keys, count, values = open_containers[-1]
            values.append(done)
            if len(values) < count:
                break
            open_containers.pop()
            done = _container(kind, keys, values)
        else:
            return done
    raise ValueError("the tree has too few nodes")


def _container(kind: str, keys: Any, values: list[Any]) -> Any:
    if kind == "typed":
        return _typed(keys, values[0])
    if kind == "dict":
        made = dict(zip(keys, values, strict=True))
        return _subclasses.rebuilt(made) if _subclasses.CLASS in made else made
    if kind == "part":
        return Part(zip(keys, values, strict=True))
    return values if kind == "list" else tuple(values)


def merge(trees: list[Any], on_difference: Callable[[str], None]) -> Any:
    """Merges the states of ranks: mappings by key, parts of lists by position. Of other values in one place, that of the lowest rank
    counts. ``on_difference`` gets the path of each that another rank has with other bytes."""
    merged = trees[0]
    for tree in trees[1:]:
        merged = _merge(merged, tree, (), on_difference)
    return _whole_lists(merged, ())


def _merge(one: Any, other: Any, path: Path, on_difference: Callable[[str], None]) -> Any:
    if type(one) is type(other) and type(one) in (dict, Part):
        for key, value in other.items():
            one[key] = _merge(one[key], value, (*path, key), on_difference) if key in one else value
    elif not _has_same_bytes(one, other):
        on_difference(path_text(path))
    return one


def warn_of_differences(step: int, paths: list[str]) -> None:
    """Logs the paths of values that several ranks have saved with other bytes."""
    if paths:
        shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
        _log.warning(
            "step %s: ranks have saved different values of %s. The state has that of the lowest rank. Save values that differ under keys of "
            "their ranks, such as 'rank_3'",
            step,
            shown,
        )


def _has_same_bytes(one: Any, other: Any) -> bool:
    """Whether two values of loaded states are equal byte by byte, so that every NaN equals itself, and 0.0 is not -0.0."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_has_same_bytes, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_has_same_bytes(value, other[key]) for key, value in one.items())
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, io.BytesIO):
        return bool(one.getvalue() == other.getvalue())
    # Ranks that name one tensor have one object.
    return _frameworks.framework_of(one) is None and bool(one == other)


def _whole_lists(value: Any, path: Path) -> Any:
    if isinstance(value, Part):
        if sorted(value) != list(range(len(value))):
            raise CorruptionError(f"tc.tree: {path_text(path)}: no rank has some elements of this list [spec: tree 3.3]")
        return [_whole_lists(value[at], (*path, at)) for at in range(len(value))]
    if isinstance(value, dict):
        # Parts occur only in mappings and in other parts.
        for key, item in value.items():
            if isinstance(item, dict):
                value[key] = _whole_lists(item, (*path, key))
    return value


def optimizers_with_text_keys(state: Any, path: Path = ()) -> list[str]:
    """Returns the paths of optimizer states whose ``param_groups`` number their parameters, but whose ``state`` has text
    keys: ``"0"`` instead of ``0``. DCP turns keys into text. ``Optimizer.load_state_dict`` then finds no moments, without
    an error."""
    if not isinstance(state, dict):
        return []
    found = [inner for key, value in state.items() for inner in optimizers_with_text_keys(value, (*path, key))]
    slots, groups = state.get("state"), state.get("param_groups")
    if isinstance(slots, dict) and isinstance(groups, (list, tuple)):
        lists = [group.get("params") for group in groups if isinstance(group, dict)]
        numbers = {str(number) for params in lists if isinstance(params, (list, tuple)) for number in params if type(number) is int}
        if any(isinstance(key, str) and key in numbers for key in slots):
            found.append(path_text(path))
    return found


def name_of(path: Path) -> str:
    """Returns the name of a tensor or blob: its path of keys, joined by points. Different paths may have one name."""
    name = (path[0] if len(path) == 1 and type(path[0]) is str else ".".join(map(str, path))) or "#"
    return "#" + name if name.startswith("tc.") else name


def _claim(paths: dict[str, Path], name: str, path: Path) -> None:
    """Notes the path of a name. Refuses a second path."""
    first = paths.setdefault(name, path)
    if first is not path:
        raise InvalidValueError(
            f"{path_text(first)} and {path_text(path)}: both tensors would have the name `{name}` in a store. Rename one of the keys"
        )


def arrays_by_path(out: Any) -> dict[Path, Any]:
    """Returns the tensors of a state by their paths. Ignores other values."""
    found: dict[Path, Any] = {}

    def walk(value: Any, path: Path) -> None:
        inner = _frameworks.inner_tensors(value)
        if inner is not None:
            walk(inner, path)
        elif _frameworks.framework_of(value) is not None:
            found[path] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, (*path, key))
        elif isinstance(value, (list, tuple, deque)):
            for at, item in enumerate(value):
                walk(item, (*path, at))

    walk(out, ())
    return found


def flat_arrays(out: Any) -> dict[str, Any]:
    """Returns the tensors of a state by the names under which they are saved. Ignores other values."""
    found: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, value in arrays_by_path(out).items():
        name = name_of(path)
        _claim(paths, name, path)
        found[name] = value
    return found


def tensor_paths(nodes: Iterable[Node]) -> Iterator[tuple[Path, str]]:
    """Returns path and name of each tensor of a decoded tree."""
    # The keys that are still to come, of each open container, and the path to the container.
    open_containers: list[tuple[Path, Iterator[Any]]] = [((), iter((None,)))]
    for kind, value in nodes:
        key: Any
        while (key := next(open_containers[-1][1], _END)) is _END:
            open_containers.pop()
        path = open_containers[-1][0] if key is None else (*open_containers[-1][0], key)
        if kind == "typed":
            open_containers.append((path, iter((None,))))
            continue
        if kind == "tensor":
            yield path, value[0]
        elif kind in ("dict", "part", "list", "tuple"):
            open_containers.append((path, iter(value if kind in ("dict", "part") else range(value))))


_END = object()


def match(out: Any, trees: Iterable[list[Node]], names: Collection[str], step: int) -> dict[str, Any]:
    """Returns the tensors of a template by the names of the saved tensors that fill them.

    A tensor is found by its path, whatever its name is. A path that the trees lack is found by its name, if the name leads to one
    tensor only: DCP saves integer keys as text, and some states have no tree.
    """
    saved = {path: name for tree in trees for path, name in tensor_paths(tree)}
    by_name: dict[str, set[str]] = {}
    for path, name in saved.items():
        by_name.setdefault(name_of(path), set()).add(name)
    known = set(saved.values())
    found: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, value in arrays_by_path(out).items():
        name = name_of(path)
        candidates = {saved[path]} if path in saved else by_name.get(name, set() if name in known or name not in names else {name})
        if len(candidates) != 1:
            why = f"several tensors `{name}`; use the keys of the saved state" if candidates else f"no tensor `{name}`. Nothing was filled"
            raise TemplateError(f"out: {path_text(path)}: step {step} has {why}")
        (name,) = candidates
        first = paths.setdefault(name, path)
        if first is not path:
            raise TemplateError(f"out: {path_text(first)} and {path_text(path)} are both tensor `{name}` of step {step}. Leave one out")
        found[name] = value
    return found
