"""An unpickler that runs no code of the pickle's classes.

A pickle asks for classes and functions by name. This unpickler hands out only those of a table (``known``), which the caller trusts.
Every other name gets a :class:`StandIn`, an inert class that collects what the pickle gives to an object: attributes, items,
arguments. :func:`plain` then replaces stand-ins by plain values: an object of a subclass of dict by a dict, an array of numpy by an
array that is made from its bytes.

The unpickler of the standard library is written in Python too (``pickle._Unpickler``). Its opcodes that call or change an object are
replaced here, so that a pickle cannot change a function of the table or call what it has not got from it. PyTorch's own
``weights_only`` unpickler is not enough: it refuses subclasses of list, and arrays of numpy.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import Any, ClassVar

_BLOCKED = ("os", "posix", "nt", "sys")


class StandIn:
    """An object of a class that is not loaded. ``vars()`` gives its attributes; ``arguments`` are those of its
    constructor, ``items`` its elements if it is a list or a mapping."""

    __slots__ = ("__dict__", "arguments", "items")
    arguments: tuple[Any, ...]
    items: list[Any] | dict[Any, Any] | None

    def __new__(cls, *arguments: Any, **named: Any) -> StandIn:
        made = super().__new__(cls)
        made.arguments = (*arguments, named) if named else arguments
        made.items = None
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # Attributes, or attributes and those of slots.
        parts: Any = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.__dict__.update(part or {})
        else:
            self.arguments = (*self.arguments, state)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__}{self.arguments} {vars(self)}>"

    def append_all(self, values: list[Any]) -> None:
        if self.items is None:
            self.items = []
        if not isinstance(self.items, list):
            raise pickle.UnpicklingError(f"{self!r} is a mapping and a list")
        self.items.extend(values)

    def set_all(self, pairs: list[Any]) -> None:
        if self.items is None:
            self.items = {}
        if not isinstance(self.items, dict):
            raise pickle.UnpicklingError(f"{self!r} is a mapping and a list")
        for at in range(0, len(pairs), 2):
            self.items[pairs[at]] = pairs[at + 1]

    def plain(self) -> Any:
        """The plain value that has all that the object has, or the object itself if there is none."""
        if self.arguments or self.items is not None and vars(self):
            return self
        return vars(self) if self.items is None else self.items


class _DefaultDict(StandIn):
    def plain(self) -> Any:
        return self.items or {}


class _Deque(StandIn):
    def plain(self) -> Any:
        return self.items or []


class _Path(StandIn):
    def plain(self) -> Any:
        return str(PurePosixPath(*self.arguments)) if all(isinstance(part, str) for part in self.arguments) else self


class _Bytes(StandIn):
    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        # Pickles of protocol 2 call the class for no bytes.
        return super().__new__(cls, *arguments, **named) if arguments or named else b""


class _BytesIO(StandIn):
    def plain(self) -> Any:
        state = self.arguments[-1] if self.arguments else None
        if not (isinstance(state, tuple) and len(state) == 3 and isinstance(state[0], bytes) and isinstance(state[1], int)):
            return self
        made = io.BytesIO(state[0])
        made.seek(state[1])
        return made


class _Dtype(StandIn):
    def made(self) -> Any:
        """The dtype; None for dtypes that are more than a kind of number."""
        import numpy as np

        name, *_ = (*self.arguments, None)
        state = next((found for found in self.arguments if isinstance(found, tuple)), None)
        if isinstance(name, type) and name.__module__ == "ml_dtypes":
            from ._dtypes import DTYPES, numpy_dtype

            return numpy_dtype(np, DTYPES[name.__name__], "dtype") if name.__name__ in DTYPES else None
        # State: version, byte order, subarray, names, fields, ...
        if not isinstance(name, str) or name[:1] not in "biufcO" or state is not None and (len(state) < 5 or any(state[2:5])):
            return None
        order = state[1] if state is not None and state[1] in ("<", ">") else ""
        return np.dtype(order + name)

    def plain(self) -> Any:
        return self


class _Scalar(StandIn):
    def plain(self) -> Any:
        dtype = self.arguments[0].made() if len(self.arguments) == 2 and isinstance(self.arguments[0], _Dtype) else None
        if dtype is None or dtype.hasobject or not isinstance(self.arguments[1], bytes):
            return self
        return _from_bytes(self.arguments[1], dtype, ())[()]


class _Array(StandIn):
    """Made by ``_reconstruct``, or by ``_frombuffer`` in pickles of protocol 5."""

    def plain(self) -> Any:
        state = self.arguments[-1] if self.arguments else None
        if isinstance(state, tuple) and len(state) == 5:
            _, shape, dtype, is_fortran, data = state
        elif len(self.arguments) == 4:
            data, dtype, shape, order = self.arguments
            is_fortran = order == "F"
        else:
            return self
        made = dtype.made() if isinstance(dtype, _Dtype) else None
        if made is None or not isinstance(shape, tuple):
            return self
        if made.hasobject:
            # A list of objects, as a nested list.
            return _nested(data, shape) if isinstance(data, list) else self
        return _from_bytes(data, made, shape[::-1]).T if is_fortran else _from_bytes(data, made, shape)


def _from_bytes(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import numpy as np

    array = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _nested(values: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return values[0]
    step = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])] if len(shape) > 1 else values


def _encoded(text: str, encoding: str = "utf-8") -> bytes:
    """``_codecs.encode`` as pickles of protocol 2 use it, for bytes."""
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise pickle.UnpicklingError(f"bytes encoded as {encoding}")
    return text.encode(encoding)


def _bytearray(data: Any = b"", *encoding: str) -> bytearray:
    if isinstance(data, int):
        # Would allocate as many bytes.
        raise pickle.UnpicklingError("a bytearray made from a number")
    return bytearray(data, *encoding)


def _reconstructed(cls: Any, base: Any, state: Any) -> Any:
    """``copyreg._reconstructor``."""
    made = cls()
    if isinstance(made, StandIn) and isinstance(state, dict):
        made.set_all([part for pair in state.items() for part in pair])
    elif isinstance(made, StandIn) and isinstance(state, list):
        made.append_all(state)
    elif isinstance(made, StandIn) and state is not None:
        made.arguments = (state,)
    return made


def _new(cls: Any, *arguments: Any) -> Any:
    return cls(*arguments)


def _new_named(cls: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return cls(*arguments, **named)


def _stand_in(name: str, base: type[StandIn] = StandIn) -> type[StandIn]:
    module, _, last = name.rpartition(".")
    return type(last, (base,), {"__module__": module, "__slots__": ()})


# Classes of the standard library and of numpy, and functions that make their objects. An object becomes a plain value without a word
# of the caller, because it is one.
_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "collections.defaultdict": _stand_in("collections.defaultdict", _DefaultDict),
    "collections.deque": _stand_in("collections.deque", _Deque),
    "_io.BytesIO": _stand_in("_io.BytesIO", _BytesIO),
    "_codecs.encode": _encoded,
    "builtins.bytearray": _bytearray,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    # Factories of a defaultdict, and bases of objects.
    **{f"builtins.{name}": _stand_in(f"builtins.{name}") for name in ("object", "dict", "list", "tuple", "int", "float", "str", "bool")},
    "builtins.bytes": _stand_in("builtins.bytes", _Bytes),
    "copyreg._reconstructor": _reconstructed,
    "copyreg.__newobj__": _new,
    "copyreg.__newobj_ex__": _new_named,
}
_NUMPY: dict[str, Any] = {
    "numpy.ndarray": _stand_in("numpy.ndarray"),
    "numpy.dtype": _stand_in("numpy.dtype", _Dtype),
    **{
        f"numpy.{core}.{name}": _stand_in(f"numpy.{core}.{name}", base)
        for core in ("core", "_core")
        for name, base in (("multiarray._reconstruct", _Array), ("multiarray.scalar", _Scalar), ("numeric._frombuffer", _Array))
    },
}
# Python 2 had other names for two modules. Python 3.13 writes a module of its own for paths, which older versions do not have.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}
_PATHS = {f"pathlib.{kind}" for kind in ("Path", "PosixPath", "PurePosixPath", "PurePath", "WindowsPath", "PureWindowsPath")}


# The class in Python, because the opcodes of the one in C cannot be replaced.
_InPython: Any = getattr(pickle, "_Unpickler")  # stubs do not have it


class Unpickler(_InPython):  # type: ignore[misc]
    """Loads one pickle. ``refused`` then lists the names that are not known and that were not allowed. Before it is used, call
    :func:`plain` on what was loaded.

    ``known``: trusted classes and functions by full name. ``allowed``: full names of classes to make stand-ins of without a word.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_InPython.dispatch)

    def __init__(self, file: Any, known: Mapping[str, Any], allowed: Collection[str] = (), **options: Any) -> None:
        super().__init__(file, **options)
        self._known, self._allowed = known, allowed
        self._classes: dict[str, Any] = {}
        self.refused: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        full = f"{module}.{name}"
        if full not in self._classes:
            self._classes[full] = self._find(full)
        return self._classes[full]

    def _find(self, full: str) -> Any:
        if full in self._allowed:
            return _stand_in(full, _Path if full in _PATHS else StandIn)
        if full in _PLAIN:
            return _PLAIN[full]
        is_numpy = full in _NUMPY or full.startswith("ml_dtypes.")
        if is_numpy and _has_numpy():
            return _NUMPY.get(full) or _stand_in(full)
        if full in self._known:
            return self._known[full]
        self.refused[full] = None
        return _stand_in(full)

    def is_blocked(self) -> bool:
        """Whether the pickle asks for functions of the system, which no checkpoint needs."""
        return any(name.partition(".")[0] in _BLOCKED for name in self.refused)

    def _check_call(self, function: Any) -> None:
        is_found = any(function is found for found in self._classes.values())
        if not is_found or not callable(function):
            raise pickle.UnpicklingError(f"a call of {function!r}")

    def _load_reduce(self) -> None:
        stack: list[Any] = self.stack
        arguments = stack.pop()
        function = stack[-1]
        self._check_call(function)
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("arguments that are no tuple")
        stack[-1] = function(*arguments)

    def _load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack.pop()
        self._check_call(cls)
        self.append(cls.__new__(cls, *arguments))

    def _load_newobj_ex(self) -> None:
        named = self.stack.pop()
        arguments = self.stack.pop()
        cls = self.stack.pop()
        self._check_call(cls)
        self.append(cls.__new__(cls, *arguments, **named))

    def _instantiate(self, cls: Any, arguments: Any) -> None:
        self._check_call(cls)
        self.append(cls(*arguments))

    def _load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, StandIn):
            made.__setstate__(state)
        elif type(made) is collections.OrderedDict:
            # Attributes of a state_dict, such as its versions. A class of the pickle cannot use them.
            if isinstance(state, dict):
                made.__dict__.update(state)
        elif any(type(made) is found for found in self._known.values()):
            self.build(made, state)
        else:
            raise pickle.UnpicklingError(f"a state for an object of {type(made).__name__}")

    def build(self, made: Any, state: Any) -> None:
        """Sets the state of an object of a known class."""
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return
        parts: Any = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            for name, value in (part or {}).items():
                object.__setattr__(made, name, value)

    def _append_all(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) in (list, bytearray):
            target.extend(values)
        elif isinstance(target, StandIn):
            target.append_all(values)
        else:
            raise pickle.UnpicklingError(f"elements for an object of {type(target).__name__}")

    def _load_append(self) -> None:
        value = self.stack.pop()
        self._append_all([value])

    def _load_appends(self) -> None:
        self._append_all(self.pop_mark())

    def _set_all(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, StandIn):
            target.set_all(pairs)
        elif type(target) in (dict, collections.OrderedDict, collections.Counter):
            for at in range(0, len(pairs), 2):
                target[pairs[at]] = pairs[at + 1]
        else:
            raise pickle.UnpicklingError(f"items for an object of {type(target).__name__}")

    def _load_setitem(self) -> None:
        value = self.stack.pop()
        self._set_all([self.stack.pop(), value])

    def _load_setitems(self) -> None:
        self._set_all(self.pop_mark())

    def _load_additems(self) -> None:
        values = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError("elements for what is no set")
        self.stack[-1].update(values)

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.NEWOBJ[0]] = _load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = _load_newobj_ex
    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.APPEND[0]] = _load_append
    dispatch[pickle.APPENDS[0]] = _load_appends
    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems
    dispatch[pickle.ADDITEMS[0]] = _load_additems


def _has_numpy() -> bool:
    if "numpy" not in sys.modules:
        try:
            import numpy  # noqa: F401
        except ImportError:
            return False
    return True


def plain(value: Any) -> Any:
    """The value with stand-ins replaced by plain values. An object that has more than a plain value could hold stays a stand-in."""
    return _plain(value, {})


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, StandIn):
        found = value.plain()
        # Both are kept, because a number is reused once its object is gone.
        seen[id(value)] = (value, found)
        return found if found is value else _plain(found, seen)
    if isinstance(value, dict):
        seen[id(value)] = (value, value)
        if any(isinstance(key, StandIn) for key in value):
            items = [(_plain(key, seen), item) for key, item in value.items()]
            value.clear()
            value.update(items)
        for key, item in list(value.items()):
            value[key] = _plain(item, seen)
        return value
    if isinstance(value, list):
        seen[id(value)] = (value, value)
        for at, item in enumerate(value):
            value[at] = _plain(item, seen)
        return value
    if type(value) is tuple:
        return tuple([_plain(item, seen) for item in value])
    return value
