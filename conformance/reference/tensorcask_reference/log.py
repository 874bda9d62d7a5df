"""The log (log 2 to 4): entries, and the state that follows from them."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import check_features, corrupt, unsupported
from .sealed import (
    COMMON,
    Fields,
    check_fields,
    end_of_seal,
    inside,
    is_digest,
    is_id,
    is_ids,
    is_number,
    is_object,
    is_text,
    is_texts,
    or_null,
    read_object,
    unseal,
)

ENTRY_NAME = re.compile(r"[0-9]{20}\.json")
STORE: Fields = COMMON | {"run": is_id}
ENTRY: Fields = COMMON | {
    "sequence": is_number, "previous": or_null(is_digest), "token": is_id, "writer": is_id, "job": or_null(is_object), "time_ms": is_number,
    "event": is_object,
}
JOB: Fields = {"host": is_text, "process": is_number, "agent": or_null(is_number)}
LEADER: Fields = {"session": is_id, "after": is_number, "attempt": is_number, "term": is_number, "above": or_null(is_number)}
LEADERSHIP: Fields = {
    "leader": is_object, "writer": is_id, "attempts": lambda value: isinstance(value, list), "newest": lambda value: value is None or is_number(value),
}
ATTEMPT: Fields = {"attempt": is_number, "since": is_number}
EVENTS: dict[str, Fields] = {
    "opened": {"leader": or_null(is_object)},
    "added": {"snapshot": is_id, "step": is_number, "parent": or_null(is_id), "manifest": is_digest, "inline": or_null(is_number), "roles": or_null(is_texts)},
    "forgotten": {"snapshots": is_ids},
    "pinned": {"snapshot": is_id, "pinned": lambda value: isinstance(value, bool)},
    "compacted": {"snapshot": is_id, "parent": or_null(is_id), "manifest": is_digest, "roles": or_null(is_texts)},
    "collecting": {"snapshots": is_ids},
    "upgraded": {"must_understand": is_texts, "may_ignore": is_texts},
}


@dataclass
class Record:
    """What the log says of a snapshot."""

    id: str
    step: int
    parent: str | None
    manifest: str
    sequence: int
    time_ms: int
    revision: int
    status: str = "live"
    pinned: bool = False
    roles: list[str] | None = None
    inline: int | None = None

    def manifest_name(self) -> str:
        """manifest 1"""
        digest = f"-{self.manifest}" if self.revision != self.sequence else ""
        return f"{self.step}-{self.id}{digest}.json"


@dataclass
class State:
    """The state of a store after an entry (log 4)."""

    sequence: int = 0
    digest: str | None = None
    snapshots: dict[str, Record] = field(default_factory=dict)
    writer: str | None = None
    writer_sequence: int | None = None
    leadership: dict[str, Any] | None = None
    must_understand: set[str] = field(default_factory=set)
    may_ignore: set[str] = field(default_factory=set)

    def live(self) -> dict[int, Record]:
        return {record.step: record for record in self.snapshots.values() if record.status == "live"}

    def latest(self) -> Record | None:
        whole = [record for record in self.live().values() if record.roles is None]
        return max(whole, key=lambda record: record.sequence, default=None)

    def known(self, id: str) -> Record:
        if id not in self.snapshots:
            raise corrupt("log 3.4", f"snapshot {id} was not added before")
        return self.snapshots[id]

    def apply(self, entry: dict[str, Any], digest: str) -> None:
        event = entry["event"]
        if entry["sequence"] != self.sequence + 1:
            raise corrupt("log 3.1", f"entry {self.sequence + 1} says it is {entry['sequence']}")
        if entry["previous"] != self.digest:
            raise corrupt("log 3.2", f"entry {entry['sequence']} does not continue the one before")
        self.sequence, self.digest = entry["sequence"], digest
        self.may_ignore.update(entry["may_ignore"])
        getattr(self, "_" + event["kind"])(entry, event)

    def _opened(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        self.writer, self.writer_sequence = entry["writer"], entry["sequence"]
        old, leader = self.leadership, event["leader"]
        if leader is None:
            self.leadership = None
            return
        same = old is not None and old["leader"]["session"] == leader["session"]
        attempts: list[dict[str, int]] = list(old["attempts"]) if old and same else []
        if not attempts or attempts[-1]["attempt"] != leader["attempt"]:
            attempts.append({"attempt": leader["attempt"], "since": entry["sequence"]})
        newest = old["newest"] if old and same and old["leader"]["attempt"] == leader["attempt"] else None
        if leader["above"] is not None:
            newest = max(newest or 0, leader["above"])
        self.leadership = {"leader": leader, "writer": entry["writer"], "attempts": attempts, "newest": newest}

    def _added(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        """log 8.1"""
        self.writer, self.writer_sequence = entry["writer"], entry["sequence"]
        if (old := self.leadership) is not None:
            newest = max(old["newest"] or 0, event["step"])
            self.leadership = old | {"newest": newest} if old["writer"] == entry["writer"] else None
        id, step, parent = event["snapshot"], event["step"], event["parent"]
        if id in self.snapshots:
            raise corrupt("log 3.4", f"snapshot {id} is added twice")
        if parent is not None:
            self.known(parent)
        if (roles := event["roles"]) is not None:
            check_roles(id, roles)
        pinned = False
        if step in (live := self.live()):
            pinned = live[step].pinned
            live[step].status, live[step].pinned = "superseded", False
        sequence, inline = entry["sequence"], event["inline"]
        self.snapshots[id] = Record(
            id, step, parent, event["manifest"], sequence, entry["time_ms"], sequence, pinned=pinned, roles=roles, inline=inline,
        )

    def _forgotten(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        for id in event["snapshots"]:
            record = self.known(id)
            record.status = "collected" if record.status == "collected" else "forgotten"

    def _pinned(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        self.known(event["snapshot"]).pinned = event["pinned"]

    def _compacted(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        record, parent = self.known(event["snapshot"]), event["parent"]
        if parent is not None:
            self.known(parent)
        if parent not in (None, record.parent):
            raise corrupt("log 3.5", f"snapshot {record.id} never had the parent {parent}")
        if (roles := event["roles"]) is not None:
            check_roles(record.id, roles)
            if not set(roles) <= set(record.roles or roles):
                raise corrupt("log 3.6", f"snapshot {record.id} cannot have the roles {roles}")
            record.roles = roles
        record.parent, record.manifest, record.revision, record.inline = parent, event["manifest"], entry["sequence"], None

    def _collecting(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        for id in event["snapshots"]:
            self.known(id).status = "collected"

    def _upgraded(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        check_features(event["must_understand"], "the store")
        self.may_ignore.update(event["may_ignore"])


def check_roles(id: str, roles: list[str]) -> None:
    """log 3.6"""
    if not roles or any(a >= b for a, b in zip(roles, roles[1:])):
        raise corrupt("log 3.6", f"snapshot {id} cannot have the roles {roles}")


def check_leadership(leadership: Any) -> None:
    """log 6.3: `tensorcask.leadership`"""
    check_fields(leadership, LEADERSHIP, "a leadership")
    check_fields(leadership["leader"], LEADER, "a leader")
    for attempt in leadership["attempts"]:
        check_fields(attempt, ATTEMPT, "an attempt")


def parse_store_file(data: bytes) -> dict[str, Any]:
    """log 2"""
    value, _ = unseal(data, "tensorcask-store")
    check_fields(value, STORE, "store.json")
    return value


def parse_entry(data: bytes) -> tuple[dict[str, Any], str]:
    """An entry and its digest (log 3); what it holds by log 3.7 is left alone."""
    end = end_of_seal(data)
    entry, digest = unseal(data[:end], "tensorcask-log")
    check_fields(entry, ENTRY, "an entry")
    if entry["job"] is not None:
        check_fields(entry["job"], JOB, "a job")
    kind = entry["event"].get("kind")
    if not is_text(kind):
        raise corrupt("log 1.3", "kind of an event")
    if kind not in EVENTS:
        raise unsupported("log 3.3", f"event {kind!r}")
    check_fields(entry["event"], {"kind": is_text} | EVENTS[kind], "an event")
    if (leader := entry["event"].get("leader")) is not None:
        check_fields(leader, LEADER, "a leader")
    if end != len(data) and entry["event"].get("inline") is None:
        raise corrupt("log 1.2", "bytes after the seal of an entry")
    return entry, digest


def inline_parts(root: Path, record: Record) -> tuple[bytes, bytes]:
    """The manifest that an entry holds, and the casks together (log 3.7)."""
    data = read_object(entry_path(root, record.sequence), "max_entry_bytes", "log 3.1")
    held = data[end_of_seal(data):]
    if len(held) < record.inline:
        raise corrupt("log 3.7", "the entry ends in the manifest")
    return held[: record.inline], held[record.inline:]


def read_store_file(root: Path) -> None:
    path = root / "store.json"
    data = read_object(path, "max_entry_bytes", "log 2.1")
    with inside(path):
        parse_store_file(data)


def last_listed(root: Path) -> int:
    """The highest number of an entry in `log/`."""
    names = (path.name for path in (root / "log").glob("*.json"))
    return max((int(name[:20]) for name in names if ENTRY_NAME.fullmatch(name)), default=0)


def entry_path(root: Path, sequence: int) -> Path:
    return root / "log" / f"{sequence:020}.json"


def apply_entry(root: Path, state: State) -> None:
    path = entry_path(root, state.sequence + 1)
    data = read_object(path, "max_entry_bytes", "log 3.1")
    with inside(path):
        state.apply(*parse_entry(data))
