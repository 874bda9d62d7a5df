"""Sealed JSON (log 1): `store.json`, log entries and manifests."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from math import isinf
from pathlib import Path
from typing import Any

from .errors import LIMITS, Reject, check_features, check_version, corrupt

SEAL = re.compile(rb"sha256:([0-9a-f]{64})\n\Z")
SEAL_BYTES = 72
VERSION = re.compile(r"(0|[1-9][0-9]{0,4})\.(0|[1-9][0-9]{0,4})")
TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
MAX_NESTING = 127
MAY_BE_ABSENT = ("parent", "previous", "roles", "inline", "job", "agent", "leader", "above", "finite", "encode_us", "upload_us")
Fields = dict[str, Callable[[Any], bool]]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def is_id(value: Any) -> bool:
    return is_text(value) and re.fullmatch("[0-9a-f]{32}", value) is not None


def is_digest(value: Any) -> bool:
    return is_text(value) and re.fullmatch("[0-9a-f]{64}", value) is not None


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_id, value))


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: is_text(value) and value in values


COMMON: Fields = {"format": is_text, "version": is_text, "must_understand": is_texts, "may_ignore": is_texts}


def check_fields(value: Any, fields: Fields, what: str) -> None:
    """log 1.3: exactly the fields of the table; some fields may be absent instead of null."""
    if not is_object(value):
        raise corrupt("log 1.3", f"{what} is no object")
    for name in MAY_BE_ABSENT:
        if name in fields:
            value.setdefault(name, None)
    if value.keys() != fields.keys():
        raise corrupt("log 1.3", f"unknown or missing fields of {what}: {sorted(value.keys() ^ fields.keys())}")
    for name, check in fields.items():
        if not check(value[name]):
            raise corrupt("log 1.3", f"field {name} of {what}")


class _Parser:
    """RFC 8259, and what log 1.3 adds to it. A breach of the latter is kept, because the version is judged before it (log 1.4)."""

    def __init__(self, data: bytes) -> None:
        self.fault: Reject | None = None
        try:
            text = data.decode("utf-8")
            check_nesting(text)
            self.value = json.loads(
                text, object_pairs_hook=self._object, parse_int=self._integer, parse_float=self._number, parse_constant=_constant
            )
        except ValueError as error:
            raise corrupt("log 1.3", f"not JSON: {error}") from None
        try:
            json.dumps(self.value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            self._note("half of a surrogate pair")

    def _note(self, what: str) -> None:
        self.fault = self.fault or corrupt("log 1.3", what)

    def _integer(self, text: str) -> int | float:
        value = int(text) if len(text) <= 20 else 1 << 64
        return value if text != "-0" and -(1 << 63) <= value < 1 << 64 else self._number(text)

    def _number(self, text: str) -> float:
        value = float(text)
        if isinf(value):
            self._note(f"{text[:20]}... is beyond binary64")
        return value

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            self._note("a key stands twice")
        return result


def _constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def check_nesting(text: str) -> None:
    """Bounds the nesting before a recursive parser sees it."""
    depth = 0
    for token in TOKENS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_NESTING:
            raise corrupt("log 1.3", f"nested more than {MAX_NESTING} deep")


def parse(data: bytes) -> Any:
    parser = _Parser(data)
    if parser.fault:
        raise parser.fault
    return parser.value


def end_of_seal(data: bytes) -> int:
    """Where the first line ends that begins with `sha256:` (log 1.2); 0 if there is none."""
    line = data.find(b"\nsha256:") + 1
    return line + SEAL_BYTES if line else 0


def unseal(data: bytes, format: str) -> tuple[dict[str, Any], str]:
    """Checks seal, format, version and features (log 1.2 to 1.4); returns the object and its digest."""
    seal = SEAL.match(data[-SEAL_BYTES:])
    if not seal or end_of_seal(data) != len(data) or sha256(data[:-SEAL_BYTES]).hexdigest() != seal[1].decode():
        raise corrupt("log 1.2", f"seal of a {format}")
    parser = _Parser(data[: -SEAL_BYTES - 1])
    value = parser.value
    if not is_object(value):
        raise corrupt("log 1.3", f"{format} is no object")
    if value.get("format") != format:
        raise corrupt("log 1.4", f"format {value.get('format')!r} in place of {format}")
    version = VERSION.fullmatch(value["version"]) if is_text(value.get("version")) else None
    if not version or max(int(part) for part in version.groups()) > 65535:
        raise corrupt("README 3.2", f"version of a {format}")
    check_version(int(version[1]), format)
    if not is_texts(value.get("must_understand")):
        raise corrupt("log 1.3", "must_understand")
    check_features(value["must_understand"], format)
    if parser.fault:
        raise parser.fault
    return value, seal[1].decode()


@contextmanager
def inside(path: Path) -> Iterator[None]:
    """Says which object is at fault."""
    try:
        yield
    except Reject as reject:
        raise Reject(reject.kind, reject.clause, f"{path.parent.name}/{path.name}: {reject.what}") from None


def read_object(path: Path, limit_name: str, missing: str) -> bytes:
    """Reads an object whose size is bounded (limits 2); `missing` is the clause that asks for it."""
    try:
        with open(path, "rb") as file:
            LIMITS.check(limit_name, file.seek(0, 2))
            file.seek(0)
            return file.read()
    except FileNotFoundError:
        raise corrupt(missing, f"{path.parent.name}/{path.name} is missing") from None
