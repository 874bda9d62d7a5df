"""Asynchronous saves through shared memory, and restores out of it. Linux.

    with tensorcask.Engine("s3://bucket/run42") as engine:
        try:
            state = engine.restore(out=state).state
        except tensorcask.NotFoundError:
            pass
        for step in ...:
            engine.save(state, step=step)      # returns after one copy
        engine.finish()                        # everything is in the store; memory is freed

A save costs one copy into shared memory. An *agent*, a process of its own that outlives this one, encodes it, keeps the last
snapshots in memory and commits them to the store. A trainer that was killed restores from memory;
``docs/src/guides/engine-failures.md`` lists the data that survives each failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from . import _device, _frameworks, _native, _precision, _state
from ._changed_rows import RowSource, rows_of_save
from ._hosts import Hosts, find_hosts, gather_on_cpu
from ._options import Check, Free, check_step, codec_rules, parse_policy, retention_of, role_rules, user_json
from ._peers import Peers, resolve
from ._preemption import Preemption
from ._snapshot import address_of
from ._state import TREE, OnUnsupported, flat_arrays
from ._store import Store

__all__ = ["Engine", "Loadable", "Outcome", "Restored", "Saving", "Waited", "agent_status", "stop_agent"]

_AGENT_VARIABLE = "TENSORCASK_AGENT"


@dataclass(frozen=True)
class Outcome:
    """Result of a save. The state survives the end of this process; it is in the store once the agent has committed it.

    ``saved`` is False if no slot was free and the save was skipped. ``stall``: seconds that the save took. ``copy``:
    seconds of these for the copy. ``dropped``: step of the waiting state that this save replaced. ``failures``: step
    and reason of earlier saves of this process that failed for good since the last call. ``problem``: current problem of
    uploads to the store; they are retried.
    """

    step: int
    saved: bool
    stall: float
    copy: float
    dropped: int | None
    failures: list[tuple[int, str]]
    problem: str | None
    queue_depth: int


@dataclass(frozen=True)
class Waited:
    """Result of a wait: whether the goal was reached, the saves that failed for good, the current problem, and whether the save that
    was waited for is one of those that failed."""

    reached: bool
    failures: list[tuple[int, str]]
    problem: str | None
    failed: bool = False


@dataclass(frozen=True)
class Loadable:
    """A step that can be restored here, from ``slot`` (raw), ``memory`` (encoded), ``hosts`` (memory of all hosts) or ``tier``,
    which has a ``url``."""

    step: int
    source: str
    url: str | None


@dataclass(frozen=True)
class Restored:
    """A state that was restored, every byte compared with its checksum.

    ``source`` is ``slot`` (raw in shared memory), ``memory`` (encoded there), ``hosts`` (encoded in the memory of all hosts) or
    ``tier``, which has a ``url``. ``passed_over``: source, step and reason of nearer or newer states that could not be used.
    """

    state: Any
    step: int
    source: str
    url: str | None
    seconds: float
    user: dict[str, Any]
    metadata: dict[str, str]
    passed_over: list[tuple[str, int | None, str]]


class Engine:
    """The trainer's side of the engine: one for each process and rank, for as long as it trains.

    ``store``: path or URL of the first tier, in which snapshots are committed first. ``next_tiers``: further stores,
    each filled from the previous one in the background. ``run``: name of the run on this host; by default the URL of
    the store.

    ``rank``, ``world``: number of this process, and number of processes that save one state together. Each passes its
    part of the state, and its shard of each DTensor. Replicas of a tensor must be equal, and are stored once. Each rank restores its
    own numbers, text and bytes. A reader of the whole state, and a rank that is new, gets those of the lowest rank that has them,
    with a warning if ranks differ.

    ``hosts``: a run on many hosts, each with an agent of its own; a :class:`tensorcask.Hosts`, or None for one host. By default
    (``auto``) found in the variables of the launcher, if this host has fewer than ``world`` ranks. If
    ``torch.distributed`` is initialised then, all ranks must make their engine, because rank 0 broadcasts a name for this
    start. Many hosts cannot have ``encode="inline"``. :attr:`hosts` tells what was found.
    ``docs/src/guides/engine-hosts.md`` tells more.

    ``peers``: replicas in the memory of other hosts: a :class:`tensorcask.Peers`, or only its ``addresses``. A job that loses a
    host goes on from them, even if the store does not answer. Ignored on one host.

    ``slots``: raw states in shared memory. ``keep``: encoded snapshots there, besides those that the store does not have yet;
    ``memory_cap``: bytes of these. ``back_pressure``: with no slot free, ``wait``, ``skip`` the save, or
    ``drop_oldest_uncommitted``. ``on_agent_loss``: ``restart``, or ``fail``. ``encode``: ``agent``, or ``inline``, which encodes in
    this process straight into memory. ``keep_base_decoded=False`` saves memory for time. ``policy``, ``objective``,
    ``codecs``, ``roles``, ``precision``, ``statistics``, ``check``: as in :meth:`tensorcask.Store.save`; raw states in memory are exact. A save that
    ``check="finite"`` refuses is one of the ``failures`` of the next call.

    ``keep_last``, ``keep_every``, ``keep_weights_every``, ``free``: steps to keep in each tier, as in :meth:`tensorcask.Store.save`.
    The agent forgets the others after each upload, and deletes them with the next one. With ``hosts``, garbage collection deletes them.

    ``agent``: the agent's program and first arguments; this Python, if neither that nor ``$TENSORCASK_AGENT`` is set. It ends
    after ``agent_idle_exit`` seconds without work. ``folder``: in shared memory; ``$TENSORCASK_ENGINE_DIR``, or
    ``/dev/shm/tensorcask-<uid>``. ``store_timeout``: seconds to wait for the store to tell whether memory is up to date.

    ``overwrite``: whether an engine that has restored no step may replace the steps that are there. By default, its first save of such
    a step is a ``ConflictError``: a program that takes a later start for the first one would replace them all. After a restore, later
    steps are saved again as the training goes on.

    Making one takes the run over: a job elsewhere that was writing to the store finds out at its next save.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        next_tiers: Sequence[str | os.PathLike[str]] = (),
        config: Mapping[str, str] | None = None,
        fsync: bool = True,
        run: str | None = None,
        rank: int = 0,
        world: int = 1,
        hosts: Hosts | Literal["auto"] | None = "auto",
        peers: Peers | str | Sequence[str] | None = None,
        slots: int = 2,
        keep: int = 2,
        memory_cap: int | None = None,
        policy: str = "adaptive",
        objective: str = "balanced",
        codecs: str | Sequence[str] = (),
        roles: str | Sequence[str] = (),
        precision: str | Sequence[str] = "lossless",
        statistics: bool = False,
        check: Check = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_weights_every: int | None = None,
        free: Free = "next_save",
        keep_base_decoded: bool = True,
        back_pressure: str = "wait",
        on_agent_loss: str = "restart",
        encode: str = "agent",
        copy_threads: int = 0,
        agent: Sequence[str] | None = None,
        agent_idle_exit: float = 900.0,
        folder: str | os.PathLike[str] | None = None,
        store_timeout: float = 5.0,
        overwrite: bool = False,
    ) -> None:
        if isinstance(store, Store):
            raise TypeError("the engine opens the store by itself, in another process: pass its url, and config=")
        if not hasattr(_native, "Engine"):
            raise _native.UnsupportedError("the engine needs Linux; use tensorcask.save")
        if agent is None:
            agent = [] if os.environ.get(_AGENT_VARIABLE) else [sys.executable, "-P", "-m", "tensorcask.agent"]
        name, every = parse_policy(policy)
        self._rank, self._world, self._inline = rank, world, encode == "inline"
        if not (hosts is None or hosts == "auto" or isinstance(hosts, Hosts)):
            raise TypeError(f"hosts={hosts!r}: pass a tensorcask.Hosts, None for one host, or 'auto'")
        self._hosts = find_hosts(rank, world) if hosts == "auto" else hosts
        self._store = Store(store, config, fsync=fsync)
        self._arena = _device.Arena()
        self._saving: Saving | None = None
        # Number of agreements through the store.
        self._agreed = 0
        self._native = _native.Engine(
            os.fspath(store),
            {
                "next_tiers": [os.fspath(tier) for tier in next_tiers],
                "config": dict(config or {}),
                "fsync": fsync,
                "run": run,
                "rank": rank,
                "world": world,
                "hosts": _native_hosts(self._hosts),
                "peers": resolve(peers, self._hosts, rank, world),
                "slots": slots,
                "keep": keep,
                "memory_cap": memory_cap,
                "policy": name,
                "every": every,
                "objective": objective,
                "codecs": list(codec_rules(codecs)),
                "roles": list(role_rules(roles)),
                "precision": list(_precision.words(precision)),
                "statistics": bool(statistics),
                "check": check,
                "retention": retention_of(keep_last, keep_every, keep_weights_every, free),
                "keep_base_decoded": keep_base_decoded,
                "overwrite": overwrite,
                "back_pressure": back_pressure,
                "on_agent_loss": on_agent_loss,
                "encode": encode,
                "copy_threads": copy_threads,
                "agent": list(agent),
                "agent_idle_exit": agent_idle_exit,
                "folder": None if folder is None else os.fspath(folder),
                "store_timeout": store_timeout,
            },
        )

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._rank

    @property
    def world(self) -> int:
        """Number of processes that save one state together."""
        return self._world

    @property
    def store(self) -> Store:
        """The store of the first tier, for reading."""
        return self._store

    @property
    def hosts(self) -> Hosts | None:
        """Session and local ranks of a run on many hosts; None on one host."""
        return self._hosts

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def save(
        self,
        state: Any,
        *,
        step: int,
        user: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        on_unsupported: OnUnsupported = None,
        changed_rows: Mapping[str, Sequence[int]] | RowSource | None = None,
    ) -> Outcome:
        """Copies a state into shared memory and returns; arguments as in :meth:`tensorcask.Store.save`.

        Tensors may change as soon as it has returned. ``FencedError`` once another job has taken the store over. ``ConflictError`` if
        this training has restored nothing, and ``step`` is not newer than those that were stored when the engine started: see
        :meth:`discard_after`.

        ``changed_rows``: indices (first dimension) of the rows that may have changed since the save of this engine before, by tensor
        name; or a :class:`tensorcask.torch.TouchedRows`, which records them. Skipped saves count as saves, and so do those that
        fail while they copy. The agent checks all other rows. If one has changed, it logs a warning and compares all rows of this
        rank until the job starts again. With ``keep_base_decoded=False``, the agent then needs no base of these tables.
        """
        options: dict[str, Any] = {"user": user, "metadata": metadata, "on_unsupported": on_unsupported, "changed_rows": changed_rows}
        return self.begin_save(state, step=step, **options).wait()

    def begin_save(
        self,
        state: Any,
        *,
        step: int,
        user: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        on_unsupported: OnUnsupported = None,
        changed_rows: Mapping[str, Sequence[int]] | RowSource | None = None,
    ) -> Saving:
        """Saves like :meth:`save`, but returns while tensors of a GPU are still being copied, on a stream of their own.

        Forward and backward may go on; call :meth:`Saving.wait` before anything of the state changes::

            saving = engine.begin_save(state, step=step)
            loss = model(batch).sum()
            loss.backward()
            saving.wait()
            optimizer.step()

        Tensors of the CPU are copied before it returns. The next call of this engine waits, too.
        """
        self._settle()
        named, confirm = rows_of_save(changed_rows, id(self), lambda: _state.flat_arrays(state))
        flat = _state.flatten(state, on_unsupported, sharded=True, deferred=None if self._inline else _device.is_on_device)
        tensors: list[Any] = []
        deferred: list[Any] = []
        sources: list[Any] = []
        places: dict[int, int] = {}
        for name, lent in ((name, lent) for name, first in flat.tensors.items() for lent in (first, *first.others)):
            if lent.is_empty_shard:
                continue
            row = (name, lent.dtype, lent.whole or lent.shape, lent.offset or [0] * len(lent.shape), lent.shape)
            if lent.buffer is not None:
                tensors.append((*row, lent.buffer))
                continue
            tied = places.setdefault(id(lent.keep), len(deferred))
            if tied == len(deferred):
                sources.append(lent.keep)
            deferred.append((*row, None if tied == len(deferred) else tied))
        blobs = [*flat.blobs.items(), (TREE, _native.encode_tree(flat.nodes))]
        arguments = (check_step(step), self._rank, tensors, blobs, user_json(user), dict(metadata or {}))
        # This rank may have no element of a tensor, which is then not saved here.
        saved_here = {row[0] for row in (*tensors, *deferred)}
        rows = {name: found for name, found in named.items() if name in saved_here or name not in flat.tensors}
        if not deferred:
            return Saving(self, None, None, _confirmed(Outcome(**self._native.save(*arguments, rows)), confirm), confirm)
        try:
            native = self._native.begin_save(*arguments, deferred, rows)
        except _native.StorageError:
            # Memory that CUDA knows stays until it is told otherwise, and may be what a larger arena lacks.
            if not self._arena.forget():
                raise
            # Other ranks may not repeat this step.
            self._native.forget_failed_save()
            native = self._native.begin_save(*arguments, deferred, rows)
        copies = _device.Copies() if native.is_skipped else self._arena.copy(native, sources)
        self._saving = saving = Saving(self, native, copies, None, confirm)
        return saving

    def _settle(self) -> None:
        """Ends a save that has begun."""
        if self._saving is not None:
            self._saving.wait()

    def restore(
        self, step: int | str = "latest", *, out: Any = None, partial: bool = False, framework: str | None = None
    ) -> Restored:
        """Restores a step, or the newest, from the nearest place that has it whole: raw memory, encoded memory, then the tiers.

        Passes over damaged states and reports them in ``passed_over``. ``latest`` may then restore an older step.
        Raises ``NotFoundError`` if no step is saved, and ``TemplateError``
        if a step is saved that cannot fill ``out``: never take that for a first start. ``out`` is a state like the saved one: its tensors are filled in
        place and are in the result, a DTensor as its placements say. A job on another number of ranks restores in this
        way. Ranks :meth:`agree` on a step first. ``partial``: tensors that ``out`` lacks are not read, and are None in the
        result; without it, they are an error. ``framework`` as in :func:`tensorcask.load`.
        """
        self._settle()
        targets = {} if out is None else dict(flat_arrays(out))
        wanted = {name: _frameworks.wanted_part(target, f"out, `{name}`") for name, target in targets.items()}
        parts = None if out is None else [(name, part.whole, part.offset, part.extent) for name, part in wanted.items() if part]
        finished: dict[str, _frameworks.Place] = {}
        trees: list[tuple[int, list[_state.Node]]] = []
        blobs: dict[tuple[int, str], bytes] = {}
        tied: dict[str, str] = {}

        def places(step: int, rows: list[Any], found_blobs: list[tuple[int, str, bytes]]) -> list[Any]:
            # Of a state before, which turned out to be damaged.
            for known in (finished, trees, blobs, tied):
                known.clear()
            blobs.update({(rank, name): data for rank, name, data in found_blobs})
            own = [rank for rank, name in blobs if name == TREE and rank == self._rank]
            ranks = own or sorted(rank for rank, name in blobs if name == TREE)
            trees.extend((rank, _native.decode_tree(blobs[(rank, TREE)])) for rank in ranks)
            nodes = [value for _, tree in trees for kind, value in tree if kind == "tensor"]
            saved_as = {value[0]: value[1] for value in nodes}
            # Before anything is filled.
            missing = next((name for name in saved_as if out is not None and not partial and name not in targets), None)
            if missing is not None:
                raise _native.TemplateError(
                    f"out: step {step} has a tensor `{missing}`, and `out` has none of that name. Nothing was filled. Restore without out= "
                    "and load the state that is returned, or add the tensor: a new optimizer has none before its first step"
                )
            if out is not None:
                # Tensors were asked for by name. Earlier versions gave some names by the order of keys.
                matching = _state.match(out, [tree for _, tree in trees], {*saved_as, *targets}, step)
                other = next((name for name, target in matching.items() if targets.get(name) is not target), None)
                if other is not None:
                    raise _native.TemplateError(
                        f"out: step {step} has tensor `{other}` at another path. Nothing was filled. Restore without out= and load the state "
                        "that is returned"
                    )
            buffers: list[Any] = []
            given: set[tuple[str, int, int]] = set()
            for name, dtype, shape, _, extent, first, same_bytes in rows:
                if out is None and list(shape) != list(extent):
                    raise ValueError(f"tensor `{name}`: this rank holds a part of it; pass out= to say where it goes")
                if out is None and trees and name not in saved_as:
                    # Another rank's own.
                    buffers.append(None)
                    continue
                part = wanted.get(name)
                if part is not None:
                    place = _frameworks.place_in(part.memory, dtype, extent, name, self._arena.fill)
                    address = address_of(place.buffer)
                    key = (same_bytes, address, memoryview(place.buffer).nbytes if address else 0)
                    if address and key in given:
                        # One memory here, too.
                        buffers.append(None)
                        continue
                    given.add(key)
                elif first in finished and saved_as.get(first) == saved_as.get(name):
                    tied[name] = first
                    buffers.append(None)
                    continue
                else:
                    kind = framework or saved_as.get(name) or _frameworks.default_framework()
                    place = _frameworks.place(kind, dtype, extent, name)
                finished[name] = place
                buffers.append(place.buffer)
            return buffers

        facts = self._native.restore(None if step == "latest" else check_step(step), parts, places)
        loaded: dict[str, Any] = {name: place.finish() for name, place in finished.items()}
        loaded.update({name: loaded[first] for name, first in tied.items()})
        loaded.update(targets)
        if partial:
            loaded = {**dict.fromkeys(name for _, tree in trees for name in _tensors_of(tree)), **loaded}
        differing: list[str] = []
        state = loaded
        if trees:
            state = _state.merge([_state.build(tree, _leaf(rank, loaded, blobs)) for rank, tree in trees], differing.append)
            _state.warn_of_differences(facts["step"], differing)
        source, url = facts.pop("source")
        passed_over = [(place[1] or place[0], step, why) for place, step, why in facts.pop("passed_over")]
        user = json.loads(facts.pop("user"))
        return Restored(state=state, source=source, url=url, user=user, passed_over=passed_over, **facts)

    def prepare(self, state_bytes: int) -> None:
        """Takes shared memory for states of about this many bytes, in the background, before the first save.

        Without this, the first save takes the memory as it copies, and is several times slower than later ones. Memory
        from an earlier start is kept. If a state turns out larger, its save makes more room.
        """
        self._native.prepare(state_bytes)

    def loadable(self) -> list[Loadable]:
        """Lists the steps that can be restored here, newest first, each from the nearest place. Reads no tensor."""
        return [Loadable(step, source, url) for step, (source, url) in self._native.loadable()]

    def agree(self, group: Any = None) -> int | None:
        """Returns the newest step that all ranks can load, through ``torch.distributed``; None if there is none.

        Call it on all ranks of the group, before :meth:`restore`: when the job starts, and when it returns to an older step
        later. Newer raw states, which some rank lacks, are discarded.
        """
        import torch.distributed as dist

        offer = self._native.offer()
        offers: list[Any]
        if group is None:
            offers = gather_on_cpu(offer, dist.get_backend() == "gloo")
        else:
            offers = [None] * dist.get_world_size(group)
            dist.all_gather_object(offers, offer, group=group)
        return self._native.agree(offers)

    def agree_by_store(self, round: str | None = None, timeout: float = 300.0) -> int | None:
        """Works like :meth:`agree` without a collective: each rank writes its list into the first tier, or with ``peers`` to its agent.

        ``round`` names this agreement, such as the number of the attempt. No other agreement may use the same name. On many
        hosts, it follows by default from the session and the number of earlier calls. ``timeout``: seconds to wait for the lists of other ranks; then raises
        ``NotFoundError``.
        """
        if round is None:
            if self._hosts is None:
                raise ValueError("agree_by_store: name this start of the job, for example by the number of the attempt")
            round = f"{self._hosts.round}-{self._agreed}" if self._agreed else self._hosts.round
        step = self._native.agree_by_store(round, timeout)
        self._agreed += 1
        return step

    def discard_after(self, step: int) -> int:
        """Discards raw states of later steps, which other ranks do not have. Returns their number.

        Says also that the training continues from ``step``: a job that has loaded the step by itself calls it before it saves.
        """
        return self._native.discard_after(check_step(step))

    def wait(self, until: str = "durable", timeout: float | None = None, *, step: int | None = None) -> Waited:
        """Waits until the last save, or the last save of ``step``, has reached a level or failed.

        Levels: ``copied`` (in this host's memory, as soon as a save returns), ``encoded`` (encoded there), ``replicated`` (with
        ``peers``: other hosts have checked copies, or it is durable), ``durable`` (committed in the first tier). ``timeout``:
        seconds. Raises ``NotFoundError`` if ``step`` is not among the last 1024 saves of this process.
        """
        if until not in ("copied", "encoded", "replicated", "durable"):
            raise ValueError(f"until={until!r}: use 'copied', 'encoded', 'replicated' or 'durable'")
        self._settle()
        return Waited(*self._native.wait(until, timeout, None if step is None else check_step(step)))

    def on_preemption(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        grace: float = 25.0,
        callback: Callable[[], bool] | None = None,
        poll: float = 5.0,
    ) -> Preemption:
        """Watches for the announced end of this process, so that a training loop can drain its last save and end cleanly.

            with engine.on_preemption(grace=110) as preemption:   # Slurm: --signal=USR1@120
                for step in steps:
                    train(state)
                    engine.save(state, step=step)
                    preemption.check()                            # drains, then raises Preempted, a SystemExit with code 0

        From now on, these signals no longer end the process. Call it in the main thread. ``grace``: seconds from the signal to
        the end of the drain; leave some of the scheduler's time for the end of the process. ``callback``: asked every ``poll``
        seconds in a thread of its own; True if the cloud has announced the end of this machine.
        """
        return Preemption(self, signals, grace, callback, poll)

    def finish(self, timeout: float | None = None) -> None:
        """Ends a run: waits until everything is in the first tier, then frees its shared memory.

        ``timeout``: seconds to wait. After it, raises ``StorageError`` with the current problem and frees nothing: the agent goes on,
        and :meth:`finish` may be called again.
        If the last save has failed for good, raises an error and frees nothing. If ranks end with different last steps, the
        steps that some ranks lack are given up; the ranks that saved them get the error.
        """
        self._settle()
        self._native.end_saves()
        waited = self.wait("durable", timeout)
        if not waited.reached and not waited.failed:
            problem = waited.problem or "the agent is still working"
            raise _native.StorageError(f"the last save is not in the store after {timeout} s, and memory is kept: {problem}")
        self._arena.forget()
        self._native.finish()

    def renew_credentials(self, config: Mapping[str, str] | None = None) -> None:
        """Tells the agent renewed credentials of the stores: those in ``os.environ`` as it is now, and ``config``.

        A job that starts again does this by itself. ``InvalidArgumentError`` if another setting has changed, such as the endpoint.
        """
        self._native.renew_credentials(dict(config or {}))

    def set_ending(self, is_ending: bool) -> None:
        """Says whether this process is about to end: a save that finds no free slot is then skipped instead of waiting.

        :meth:`on_preemption` does this by itself.
        """
        self._native.set_ending(is_ending)

    def close(self) -> None:
        """Disconnects from the run. Shared memory stays, and the agent continues with it."""
        try:
            self._settle()
        finally:
            self._arena.forget()
            self._native.close()


class Saving:
    """A save that :meth:`Engine.begin_save` has begun."""

    def __init__(
        self,
        engine: Engine,
        native: _native.Saving | None,
        copies: _device.Copies | None,
        outcome: Outcome | None,
        confirm: Callable[[], None],
    ) -> None:
        self._engine, self._native, self._copies, self._outcome, self._confirm = engine, native, copies, outcome, confirm

    def wait(self) -> Outcome:
        """Waits until everything is copied. The state is then safe, and its tensors may change."""
        if self._outcome is not None:
            return self._outcome
        native, self._native = self._native, None
        if native is None or self._copies is None:
            raise ValueError("this save has failed")
        self._engine._saving = None
        self._copies.wait()
        self._outcome = _confirmed(Outcome(**self._engine._native.finish_save(native)), self._confirm)
        return self._outcome


def _confirmed(outcome: Outcome, confirm: Callable[[], None]) -> Outcome:
    if outcome.saved:
        confirm()
    return outcome


def _native_hosts(hosts: Hosts | None) -> tuple[str, int, int, list[int], float] | None:
    if hosts is None:
        return None
    return hosts.session, hosts.local_ranks.start, hosts.local_ranks.stop, list(hosts.first_ranks), hosts.patience


def _tensors_of(tree: list[_state.Node]) -> list[str]:
    return [value[0] for kind, value in tree if kind == "tensor"]


def _leaf(rank: int, tensors: Mapping[str, Any], blobs: Mapping[tuple[int, str], bytes]) -> Any:
    def leaf(kind: str, value: Any) -> Any:
        if kind == "tensor":
            if value[0] not in tensors:
                raise _native.CorruptionError(f"tc.tree: tensor `{value[0]}` is not there [spec: tree 2.7]")
            return tensors[value[0]]
        data = blobs.get((rank, value))
        if data is None:
            raise _native.CorruptionError(f"tc.tree: blob `{value}` of rank {rank} is not there [spec: tree 2.7]")
        if kind == "bytes":
            return data
        import io

        return io.BytesIO(data)

    return leaf


def agent_status(folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns the status of runs, saves and tiers, as ``tensorcask agent status --json`` shows it."""
    found: dict[str, Any] = json.loads(_native.status(None if folder is None else os.fspath(folder)))
    return found


def stop_agent(folder: str | os.PathLike[str] | None = None) -> None:
    """Tells the agent to finish the waiting work, and to end."""
    _native.stop(None if folder is None else os.fspath(folder))
