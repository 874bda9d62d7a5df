"""Reports about snapshots, tensors and upkeep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


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
class StoredPart:
    """Consecutive elements of one shard of a tensor, as listed by :meth:`Snapshot.parts`.

    ``offset`` and ``shape`` are the shard in the tensor. ``start`` and ``stop`` count elements of the shard in
    row-major order. ``size`` is in bytes. If a file of the store holds exactly these bytes, ``path`` is the file,
    ``first_byte`` the position in the file, and ``reason`` is None. Otherwise a read copies the bytes, and ``reason``
    says why.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    size: int
    path: Path | None
    first_byte: int | None
    reason: str | None


@dataclass(frozen=True)
class StepGradient:
    """Gradient of one step, as read by :meth:`Snapshot.gradient_report`.

    ``gradient``: tensor of dtype f32 in the shape of the slice. ``moment``: name of the first moment or momentum that stores it.

    ``rules``: decay and weight of ``decay * moment + weight * gradient``, as the writer found them: beta1 and 1 - beta1 for Adam. If
    the optimizer used others, the gradients are not those of the optimizer. ``longest_bits``: most significant bits of a stored gradient, before
    the factor of the step: 8 or fewer if all of them are bf16 numbers times one factor, 11 or fewer for f16. ``mean_bits``: their
    mean. ``estimated_elements``: number of elements stored without a gradient; theirs are estimated from both moments. These four
    cover the whole chunks that the slice touches.
    """

    gradient: Any
    moment: str
    rules: list[tuple[float, float]]
    longest_bits: int
    mean_bits: float
    estimated_elements: int


class ChainLink(NamedTuple):
    """A snapshot of a chain."""

    step: int
    kind: str
    stored_bytes: int


class Problem(NamedTuple):
    """A problem found by a verification: the step in which it was found and its object, if any, a message, and all checked steps
    that need the object."""

    step: int | None
    object: str | None
    message: str
    steps: list[int]


@dataclass(frozen=True)
class VerifyReport:
    """Result of a verification: numbers of checked objects, and the problems found."""

    entries: int
    snapshots: int
    casks: int
    chunks: int
    problems: list[Problem]

    @property
    def is_clean(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


class MatchedTensor(NamedTuple):
    """A tensor whose statistics match, and the first chunk that matches on its own: the offset and the shape of its shard, and its
    number in the shard. ``first_chunk`` is None if only the whole tensor matches."""

    tensor: str
    first_chunk: tuple[list[int], list[int], int] | None


@dataclass(frozen=True)
class BisectReport:
    """Result of :meth:`Store.bisect`.

    ``step``: first step that matches, or None. ``tensors``: its tensors that match. ``last_good``: last step before it that does not
    match. ``examined``: number of steps whose statistics were read. ``without_statistics`` and ``damaged``: earlier steps that may
    match as well, because their statistics are missing or damaged.
    """

    step: int | None
    tensors: list[MatchedTensor]
    last_good: int | None
    examined: int
    without_statistics: list[int]
    damaged: list[int]

    @property
    def is_certain(self) -> bool:
        """Whether the statistics of all earlier steps were read."""
        return not self.without_statistics and not self.damaged


@dataclass(frozen=True)
class GcReport:
    """Result of :meth:`Store.gc`; of a dry run, what would be done. An object is a path below the store and its bytes.

    ``collected``: steps given up in the log because no chain needs them. ``deleted``: objects deleted, ``freed_bytes`` in total.
    ``waiting``: objects that nothing needs, but that are not old enough. ``held``: forgotten steps that chains of other steps need.
    ``held_by``: the steps to compact, so that they no longer need those.
    """

    applied: bool
    collected: list[int]
    collected_bytes: int
    deleted: list[tuple[str, int]]
    freed_bytes: int
    waiting: list[tuple[str, int]]
    waiting_bytes: int
    held: list[int]
    held_bytes: int
    held_by: list[int]


@dataclass(frozen=True)
class CompactReport:
    """Result of :meth:`Store.compact`.

    ``changed``: whether the step was a delta. ``links``: snapshots in its chain before, with ``chain_bytes`` in total. ``stored_bytes``:
    bytes of the step now.
    """

    step: int
    id: str
    changed: bool
    links: int
    chain_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class CopyReport:
    """Result of :meth:`Store.copy_to`.

    ``snapshots``: number of snapshots copied now. ``present``: number of snapshots that the destination had already.
    ``forgotten``: number of snapshots that the destination has had and forgotten; it never takes them back. ``objects`` and
    ``bytes``: objects written now.
    """

    snapshots: int
    present: int
    forgotten: int
    objects: int
    bytes: int


class TimeEstimate(NamedTuple):
    """A time that advice rests on: seconds; ``measured``, ``given`` or ``assumed``; how it was found."""

    seconds: float
    origin: str
    how: str


@dataclass(frozen=True)
class Advice:
    """Result of :meth:`Store.advise`.

    ``interval_s``: best time of training between two saves; ``interval_steps``: the same in steps, if the time of a step is
    known. ``limited_by_saves``: whether saves cannot be written as often as the formula asks. ``lost_share``: expected share
    of time that is lost, from 0 to 1; ``torch_save_lost_share``: the same with ``torch.save`` every 1,000 steps. ``keep_last``:
    number of newest steps to keep; ``keep_every``: older steps to keep are its multiples. ``times``: the times that the advice
    rests on: ``stall``, ``save``, ``stage`` (the slowest of a save), ``restore``, ``step``, ``torch_save``.
    """

    mtbf_s: float
    interval_s: float
    interval_steps: int | None
    limited_by_saves: bool
    lost_share: float
    torch_save_lost_share: float | None
    keep_last: int
    keep_every: int | None
    times: dict[str, TimeEstimate | None]
