"""What stores report about their snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot, as listed by :meth:`Store.snapshots`."""

    step: int
    id: str
    kind: str
    parent: str | None
    sequence: int
    pinned: bool
    time_ms: int
    tensor_bytes: int
    stored_bytes: int
    user: dict[str, Any]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a snapshot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    param: str
    alias_of: str | None


@dataclass(frozen=True)
class VerifyReport:
    """Result of a verification: numbers of checked objects, and step, object and message of each problem."""

    entries: int
    snapshots: int
    casks: int
    chunks: int
    problems: list[tuple[int | None, str | None, str]]

    @property
    def is_clean(self) -> bool:
        """Whether there are no problems."""
        return not self.problems
