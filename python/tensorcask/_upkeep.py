"""Listing, checking and freeing what a store holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import _foreign, _html, _native, _sql
from ._frameworks import RawTensor
from ._handle import StoreHandle
from ._native import Catalog, Statistics
from ._options import Step, VerifyDepth, check_step, parse_duration, step_or_latest
from ._progress import Progress, watching
from ._reports import Advice, BisectReport, CompactReport, GcReport, MatchedTensor, Problem, SnapshotInfo, TimeEstimate, VerifyReport

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation

# RawTensor is here for the examples.
__all__ = ["RawTensor", "Upkeep"]

_log = logging.getLogger("tensorcask")


class Upkeep(StoreHandle):
    """The part of :class:`Store` that lists, checks, forgets, compacts and collects snapshots."""

    def _repr_html_(self) -> str:
        # For notebooks. Reads the log; a store that cannot be read is shown with its error.
        try:
            return _html.of_store(self.url, self.snapshots())
        except (_native.Error, OSError) as error:
            return _html.of_error(f"Store {self.url}", error)

    def snapshots(self) -> list[SnapshotInfo]:
        """Lists all live snapshots, in commit order."""
        with _foreign.explained(self._url):
            rows = self.native().snapshots()
        return [SnapshotInfo(**{**row, "user": json.loads(row["user"])}) for row in rows]

    def catalog(self) -> Catalog:
        """Returns all snapshots as a table for Arrow: ``pyarrow.table(store.catalog())``, polars or DuckDB."""
        with _foreign.explained(self._url):
            return self.native().catalog()

    def stats(self, *, step: Step | None = None) -> Statistics:
        """Returns the statistics of all live steps, or of one, as a table for Arrow: one row for each chunk that was
        saved with ``statistics=True``. Reads no tensor.

        If all steps are read, damaged steps are left out with a warning.
        """
        with _foreign.explained(self._url):
            if step is None:
                return self.native().stats()
            return self.native().snapshot(step_or_latest(step)).stats()

    def bisect(self, first: str, *, tensor: str | None = None, progress: Progress = None) -> BisectReport:
        """Finds the first step with a tensor whose statistics satisfy ``first``, such as ``"nan > 0"``. Reads no tensor.

        ``first`` compares columns with numbers, joined by ``and`` and ``or``; ``and`` binds tighter. Columns: ``nan``,
        ``positive_infinity``, ``negative_infinity``, ``inf``, ``nonfinite``, ``zero``, ``subnormal``, ``min``, ``max``, ``sum``,
        ``sum_squares``, ``norm``, ``elements``, and ``changed``, ``change_squares``, ``change_norm``, ``change_ulps`` since the
        parent of a delta.

        Steps are read in ascending order up to the first match. Steps that are damaged, have no statistics, or whose statistics
        do not decide ``first`` are reported: one of them may match earlier.

        Args:
            first: Predicate on the statistics of a tensor.
            tensor: Pattern of the names of tensors to look at; ``*`` stands for any characters.
            progress: See :meth:`save`.

        >>> import math, struct, tensorcask
        >>> store = tensorcask.Store("memory://bisect-example")
        >>> for step, number in enumerate([0.5, 0.25, math.nan, math.nan]):
        ...     w = RawTensor("f32", (1,), bytearray(struct.pack("<f", number)))
        ...     _ = store.save({"w": w}, step=step, statistics=True)
        >>> found = store.bisect("nan > 0")
        >>> found.step, [found.tensor for found in found.tensors], found.last_good
        (2, ['w'], 1)
        """
        with watching(self.native(), progress, "bisect"), _foreign.explained(self._url):
            found = self.native().bisect(first, tensor)
        return BisectReport(**{**found, "tensors": [MatchedTensor(*match) for match in found["tensors"]]})

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        steps: Sequence[int] | None = None,
        progress: Progress = None,
    ) -> DuckDBPyRelation:
        """Runs an SQL query over the store, and returns a relation of DuckDB: ``.show()``, ``.fetchall()``,
        ``.arrow()``, ``.df()``, ``.pl()``. Needs ``pip install 'tensorcask[sql]'``.

        The tables are ``snapshots``, ``tensors``, ``chunks``, ``stats`` and ``log``. Only tables that the query names
        are read, and no tensor bytes. A query cannot change the store. Damaged steps are left out with a warning.

        Args:
            query: One or more statements; the last one is the result.
            parameters: Values of ``?`` or ``$name`` in the query.
            steps: Steps to read for ``tensors``, ``chunks`` and ``stats``. Default: all live steps.
            progress: See :meth:`save`.

        >>> import tensorcask
        >>> store = tensorcask.Store("memory://sql-example")
        >>> for step in (1, 2):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([step, 2, 3]))}, step=step, user={"loss": 1 / step})
        >>> store.sql("select step, user.loss from snapshots where user.loss < ?", [0.7]).fetchall()
        [(2, 0.5)]
        """
        wanted = None if steps is None else [check_step(step) for step in steps]
        with watching(self.native(), progress, "sql"), _foreign.explained(self._url):
            return _sql.run(self.native(), query, parameters, wanted)

    def verify(self, depth: VerifyDepth = "full", *, step: int | None = None, progress: Progress = None) -> VerifyReport:
        """Checks the store.

        ``depth``: ``log`` checks the log only, ``pages`` also every checksum of a page, ``full`` also every decoded
        chunk.
        """
        with watching(self.native(), progress, "verify"), _foreign.explained(self._url):
            facts: dict[str, Any] = self.native().verify(depth, step)
            facts["problems"] = [Problem(*row) for row in facts["problems"]]
            return VerifyReport(**facts)

    def pin(self, step: int) -> None:
        """Protects a step: it cannot be forgotten until it is unpinned."""
        self.native().pin(check_step(step))

    def unpin(self, step: int) -> None:
        """Ends the protection of a step."""
        self.native().unpin(check_step(step))

    def forget(self, steps: Sequence[int]) -> None:
        """Forgets steps: they can no longer be loaded. :meth:`gc` frees their disk space."""
        self.native().forget([check_step(step) for step in steps])

    @property
    def steps(self) -> list[int]:
        """All live steps in commit order; the last one is ``latest``.

        >>> import tensorcask
        >>> store = tensorcask.Store("memory://steps-example")
        >>> for step in (1, 2, 3):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray(3))}, step=step, keep_last=2)
        >>> store.steps, len(store)
        ([2, 3], 2)
        """
        return [info.step for info in self.snapshots()]

    def __len__(self) -> int:
        """Number of live steps."""
        return len(self.steps)

    def __bool__(self) -> bool:
        # A store without steps is still a store, and asking needs no request.
        return True

    def gc(
        self,
        *,
        older_than: str | timedelta = "24h",
        apply: bool = False,
        directories: bool = False,
        progress: Progress = None,
    ) -> GcReport:
        """Collects garbage: forgotten steps that no chain needs, and objects that were unneeded for ``older_than``.

        This is a dry run unless ``apply=True``. ``older_than`` is ``"30m"``, ``"24h"``, ``"7d"`` or a ``timedelta``. The first
        call removes steps from the log; a call after ``older_than`` deletes their objects. Writers rely on 24 hours: use no
        shorter time while one runs. ``directories`` also deletes unreferenced directories; no writer may run then.

        >>> import tensorcask
        >>> store = tensorcask.Store("memory://gc-example")
        >>> for step in (1, 2):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([step, 2, 3]))}, step=step, policy="full", keep_last=1)
        >>> report = store.gc()
        >>> report.applied, report.collected, report.freed_bytes
        (False, [1], 0)
        """
        with watching(self.native(), progress, "gc"):
            return GcReport(**_native.gc(self.native(), parse_duration(older_than), apply, directories))

    def compact(self, step: Step = "latest", *, progress: Progress = None) -> CompactReport:
        """Folds the chain of a step into a base, which needs no other step. The state of every step stays the same.

        The old objects stay until :meth:`forget` and :meth:`gc` free them. A writer may run meanwhile.

        >>> import tensorcask
        >>> store = tensorcask.Store("memory://compact-example")
        >>> for step in (1, 2):
        ...     _ = store.save({"w": RawTensor("u8", (4096,), bytearray([step, 2, 3, 4] * 1024))}, step=step, policy="consecutive")
        >>> report = store.compact()
        >>> report.step, report.changed, report.links, store.snapshot().kind
        (2, True, 2, 'base')
        """
        with watching(self.native(), progress, f"compact step {step}"):
            return CompactReport(**_native.compact(self.native(), step_or_latest(step)))

    def advise(
        self,
        *,
        mtbf: str | timedelta,
        stall: str | timedelta | None = None,
        restore: str | timedelta | None = None,
        step_time: str | timedelta | None = None,
        torch_save: str | timedelta | None = None,
        progress: Progress = None,
    ) -> Advice:
        """Advises how often to save and how many steps to keep, from the times that saves recorded.

        Args:
            mtbf: Mean time between failures of the whole job, such as ``"8h"``.
            stall: Time for which a save stops the training. Default: as recorded.
            restore: Time of a restore, or ``"measure"`` to read, decode and check the newest step now. Default: as long
                as a save.
            step_time: Time of a training step. Default: from the times between saves.
            torch_save: Time of ``torch.save``, for the comparison. Default: all tensors at 1 GB/s.
            progress: See :meth:`save`.

        >>> import tensorcask
        >>> store = tensorcask.Store("memory://advise-example-2")
        >>> for step in (100, 200):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([1, 2, 3]))}, step=step)
        >>> advice = store.advise(mtbf="8h", stall="500ms", step_time="2s")
        >>> advice.interval_steps, advice.times["stall"].origin, advice.times["restore"].origin
        (85, 'given', 'assumed')
        """
        def parsed(time: str | timedelta | None) -> timedelta | None:
            return None if time is None else parse_duration(time)

        measure = restore == "measure"
        given = (parsed(stall), parsed(None if measure else restore), parsed(step_time), parsed(torch_save))
        with watching(self.native(), progress, "advise"), _foreign.explained(self._url):
            found = _native.advise(self.native(), parse_duration(mtbf), given, measure)
        times = {name: None if time is None else TimeEstimate(*time) for name, time in found.pop("times").items()}
        return Advice(**found, times=times)
