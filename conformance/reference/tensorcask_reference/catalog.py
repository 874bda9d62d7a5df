"""Catalogs (log 6): what they say must follow from the log. Needs pyarrow; without it they are passed over."""

import importlib.util
import io
import json
import re
from hashlib import sha256
from math import inf, isclose, nan
from pathlib import Path
from typing import Any

from .chain import Snapshots
from .errors import LIMITS, Reject, corrupt
from .log import State, check_leadership
from .sealed import parse, read_object

NAME = re.compile(r"([0-9]{20})-([0-9a-f]{64})\.parquet")
U64, TEXT, BOOL, F64 = "uint64", "string", "bool", "double"
TYPES = {
    "sequence": U64, "revision": U64, "step": U64, "snapshot": TEXT, "kind": TEXT, "parent": TEXT, "manifest": TEXT, "status": TEXT, "pinned": BOOL, "roles": TEXT,
    "tensor_bytes": U64, "stored_bytes": U64, "ratio": F64, "time_ms": U64, "user": TEXT,
}
# Numbers that JSON does not have, by their texts.
NOT_FINITE = {"nan": nan, "inf": inf, "-inf": -inf}
# Bound on the texts of all rows: so many bytes, and so many for each byte of the file.
FREE_TEXT, TEXT_RATIO = 16 << 20, 64


def find_catalogs(root: Path) -> dict[int, list[Path]]:
    """Catalogs by sequence (log 6.1); objects with other names are none."""
    found: dict[int, list[Path]] = {}
    if (root / "catalog").is_dir() and importlib.util.find_spec("pyarrow") is not None:
        for path in sorted((root / "catalog").iterdir()):
            if match := NAME.fullmatch(path.name):
                found.setdefault(int(match[1]), []).append(path)
    return found


def read_catalog(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Keys and rows; None if the catalog is damaged, and so skipped (log 6.2, 6.3)."""
    # Only now: it takes longer to load than most stores to read.
    import pyarrow as pa
    import pyarrow.parquet as pq

    sequence, digest = NAME.fullmatch(path.name).groups()
    try:
        data = read_object(path, "max_catalog_bytes", "log 6.2")
        if sha256(data).hexdigest() != digest:
            return None
        file = pq.ParquetFile(io.BytesIO(data))
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        LIMITS.check("max_catalog_bytes", sum(group.total_byte_size for group in groups))
        if {group.column(i).compression for group in groups for i in range(group.num_columns)} - {"UNCOMPRESSED", "SNAPPY"}:
            return None
        if file.metadata.num_rows > len(data):
            return None
        # One thread: those of pyarrow may outlive the interpreter, which then aborts.
        table = file.read(use_threads=False)
        pairs = file.metadata.metadata or {}
        keys = {key: pairs[b"tensorcask." + key.encode()].decode() for key in ("sequence", "entry", "state")}
        state = parse(keys["state"].encode())
        leadership = parse(pairs[b"tensorcask.leadership"]) if b"tensorcask.leadership" in pairs else None
        if leadership is not None:
            check_leadership(leadership)
    except (Reject, KeyError, ValueError, OSError, pa.ArrowException):
        return None
    types = {column.name: str(column.type) for column in table.schema}
    if any(types.get(name) != type for name, type in TYPES.items()) or not isinstance(state, dict) or keys["sequence"] != str(int(sequence)):
        return None
    if types.get("inline", U64) != U64:
        return None
    if any(table[name].null_count for name in TYPES if name not in ("parent", "roles")):
        return None
    rows = table.to_pylist()
    if sum(len((row[name] or "").encode()) for row in rows for name in ("user", "roles")) > FREE_TEXT + TEXT_RATIO * len(data):
        return None
    for row in rows:
        if (row["kind"] == "delta") != (row["parent"] is not None) or not isclose(row["ratio"], row["stored_bytes"] / max(row["tensor_bytes"], 1)):
            return None
    seen: set[str] = set()
    for row in rows:
        if row["parent"] not in seen | {None}:
            return None
        seen.add(row["snapshot"])
    return keys | {"state": state, "leadership": leadership}, rows


def expected_rows(state: State, snapshots: Snapshots) -> list[dict[str, Any]]:
    """log 6.3; without what only a manifest says that may be gone: of a snapshot collected or compacted since"""
    rows = []
    for record in state.snapshots.values():
        names = ("sequence", "revision", "step", "parent", "manifest", "status", "pinned", "inline", "time_ms")
        facts = {name: getattr(record, name) for name in names} | {"roles": record.roles}
        facts |= {"snapshot": record.id, "kind": "base" if record.parent is None else "delta"}
        if (snapshot := snapshots.by_id.get(record.id)) and snapshot.record.revision == record.revision:
            manifest = snapshot.manifest
            facts |= {"tensor_bytes": manifest["tensor_bytes"], "user": manifest["user"]}
            facts["stored_bytes"] = sum(cask["bytes"] for cask in manifest["casks"])
        rows.append(facts)
    return rows


def check_user_columns(rows: list[dict[str, Any]], users: list[dict[str, Any]]) -> None:
    """log 6.5"""
    for key in {key for user in users for key in user}:
        values = [value for user in users if (value := user.get(key)) is not None]
        numbers = all(is_number(value) for value in values)
        as_it_is = all(isinstance(value, bool) for value in values) or all(isinstance(value, str) for value in values)
        for row, user in zip(rows, users):
            found, value = row.get(f"user.{key}"), user.get(key)
            if value is None:
                fits = found is None
            elif numbers:
                fits = is_same(found, NOT_FINITE.get(value, value))
            elif as_it_is:
                fits = is_same(found, value)
            else:
                fits = isinstance(found, str) and json.loads(found) == value
            if not fits:
                raise corrupt("log 6.5", f"column user.{key} of a catalog")


def is_number(value: Any) -> bool:
    return value in NOT_FINITE if isinstance(value, str) else type(value) in (int, float)


def is_same(found: Any, wanted: Any) -> bool:
    return isinstance(found, bool) == isinstance(wanted, bool) and (found == wanted or (found != found and wanted != wanted))


def check_catalog(path: Path, state: State | None, snapshots: Snapshots) -> None:
    """log 6.4: `state` is that after the catalog's entry, None if the log does not have it."""
    if (catalog := read_catalog(path)) is None:
        return
    keys, rows = catalog
    if state is None:
        raise corrupt("log 6.4", f"{path.name}: the log does not have that entry")
    said = {"writer": state.writer, "writer_sequence": state.writer_sequence}
    said |= {name: sorted(getattr(state, name)) for name in ("must_understand", "may_ignore")}
    found = {name: sorted(value) if isinstance(value, list) else value for name, value in keys["state"].items()}
    if keys["entry"] != state.digest or found != said or keys["leadership"] != state.leadership:
        raise corrupt("log 6.4", f"{path.name}: entry or state is not the log's")
    try:
        facts = [{name: row[name] for name in TYPES if name != "ratio"} | {"inline": row.get("inline")} for row in rows]
        for fact in facts:
            fact["user"] = parse(fact["user"].encode())
            fact["roles"] = fact["roles"] and json.loads(fact["roles"])
    except (Reject, ValueError):
        return
    wanted = expected_rows(state, snapshots)
    if len(facts) != len(wanted) or any(fact[name] != want[name] for fact, want in zip(facts, wanted) for name in want):
        raise corrupt("log 6.4", f"{path.name}: rows are not the log's")
    check_user_columns(rows, [fact["user"] for fact in facts])
