"""Stores: saving and loading states."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from . import _frameworks, _native, _precision, _source, _state
from ._native import Catalog, Saved
from ._precision import TensorRounding
from ._progress import Progress, watching
from ._reports import CompactReport, CopyReport, GcReport
from ._reports import SnapshotInfo as SnapshotInfo
from ._reports import TensorInfo as TensorInfo
from ._reports import VerifyReport as VerifyReport
from ._source import CredentialProvider
from ._state import OnUnsupported

if TYPE_CHECKING:
    from .torch import Reader, Writer

_log = logging.getLogger("tensorcask")

_TREE = "tc.tree"
Slices = Mapping[str, "slice | tuple[slice, ...]"]
# Policy, its number, where the base is kept, whether chunks are decoded again, what codecs are chosen for, what is rounded.
WriterOptions = tuple[str, "int | None", str, bool, str, tuple[str, ...]]
_T = TypeVar("_T")


class Store:
    """The snapshots of one training run, below one URL.

    ``url``: a path, ``file:///path``, ``s3://bucket/prefix`` (or ``s3a://``), ``gs://``, ``az://`` (or
    ``abfss://container@account.dfs.core.windows.net/prefix``), ``http(s)://`` or ``memory://name``; or a store of obstore (local, S3,
    GCS, Azure), whose settings are taken over. Nothing is read or created yet. ``config`` overrides settings of the environment
    (``aws_region``, ``aws_endpoint``, ...); its keys ``contact_timeout`` (``"5s"``) and ``retry_timeout`` (``"3m"``) say for how long
    the first and later requests to a server are retried. ``credential_provider``, for
    S3 and Azure: a function that returns credentials as obstore's providers do (``access_key_id``, ``secret_access_key``, ``token``,
    ``expires_at``), or a ``boto3.Session``; it is asked again before they expire, for what is opened from then on. ``fsync=False`` gives
    up durability on local disk for speed.

    >>> store = Store("memory://store-example")
    >>> for step in (1, 2):
    ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([step, 2, 3]))}, step=step)
    >>> [info.step for info in store.snapshots()]
    [1, 2]
    >>> store.load(step=1)["w"].data
    bytearray(b'\\x01\\x02\\x03')
    >>> store.verify().is_clean
    True
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Any,
        config: Mapping[str, str] | None = None,
        *,
        credential_provider: CredentialProvider | None = None,
        fsync: bool = True,
    ) -> None:
        if _source.is_obstore(url):
            url, theirs, provider = _source.of_obstore(url)
            config, credential_provider = {**theirs, **(config or {})}, credential_provider or provider
        self._url = os.fspath(url)
        self._config = dict(config) if config else None
        self._provider = credential_provider
        self._credentials = None if credential_provider is None else _source.Credentials(self._url, credential_provider)
        self._fsync = fsync
        self._lock = threading.RLock()
        self._native = self._opened()
        self._pid = os.getpid()
        self._writer: tuple[WriterOptions, _native.Writer] | None = None

    @property
    def key(self) -> Any:
        """Equal for stores that were opened alike in this process."""
        provider = None if self._provider is None else id(self._provider)
        return (os.getpid(), self._url, tuple(sorted((self._config or {}).items())), self._fsync, provider)

    def __reduce__(self) -> Any:
        return (_store_again, (self._url, self._config, self._fsync, self._provider, _native.job_id()))

    def __repr__(self) -> str:
        return f"Store({self._url!r})"

    @property
    def url(self) -> str:
        """Where it lies."""
        return self._url

    def at(self, url: str) -> Store:
        """Another store, with the settings and credentials of this one."""
        return Store(url, self._config, credential_provider=self._provider, fsync=self._fsync)

    def native(self) -> _native.Store:
        """The store below; opened again in a process that was forked, which has none of its parent's threads."""
        if self._pid != os.getpid():
            self._lock = threading.RLock()
            # Never dropped: it would wait for threads that this process does not have.
            _of_parents.append((self._native, self._writer))
            self._native, self._writer, self._pid = self._opened(), None, os.getpid()
        elif self._credentials is not None and self._credentials.are_old:
            with self._lock:
                if self._credentials.are_old:
                    self._native, self._writer = self._opened(), None
        return self._native

    def _opened(self) -> _native.Store:
        settings = {} if self._credentials is None else self._credentials.ask()
        return _native.Store(self._url, {**settings, **(self._config or {})} or None, self._fsync)

    def save(
        self,
        state: Any,
        *,
        step: int,
        policy: str = "adaptive",
        user: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        on_unsupported: OnUnsupported = None,
        base_cache: str = "memory",
        verify_after_encode: bool = True,
        objective: str = "balanced",
        precision: str | Sequence[str] = "lossless",
        changed_rows: Mapping[str, Sequence[int]] | None = None,
        overwrite: bool = False,
        keep_last: int | None = None,
        progress: Progress = None,
    ) -> Saved:
        """Saves a state: nested dicts, lists and tuples of tensors, numbers, strings, bytes and None.

        When it returns, the snapshot is durable, and a new process can load it. The first call takes the store over: another job that was
        writing to it is told so at its next save (``FencedError``). All stores of one process, its forked children, and processes that
        were sent a pickled ``Store`` are one job. If the folder was deleted, moved or replaced since the last save, the save begins anew
        with a base in what lies there now. Tensors that share memory are stored once; a subclass of dict, list, tuple, int, float or str comes back as
        what it is a subclass of, a numpy scalar as an array without dimensions. A subclass of a torch tensor that is made of others
        (quantized weights, for example) is a dict of these; ``load(out=...)`` fills those of the one that is given.

        ``policy``: ``adaptive``, ``full``, ``one_shot``, ``consecutive``, ``intermittent`` or ``intermittent:8``.
        ``user``: facts of the step (loss, tokens), columns of the catalog. ``metadata``: strings that a safetensors export
        carries. ``on_unsupported``: what to do with a value that cannot be stored: ``"error"``, ``"skip"``, or a function of
        its path and the value that returns what to store instead. ``base_cache``: where the base of the next delta is kept:
        ``memory``, ``encoded``, ``disk:FOLDER`` or ``none``. ``objective``: what codecs are chosen for: ``smallest``,
        ``balanced``, ``fastest``, or the weights of size, speed and precision as ``"0.6,0.4,0"``.

        ``precision``: which tensors of f32 are rounded before they are stored, one word or several: a profile, ``lossless``,
        ``near`` (masters to 8 bits beyond their bf16 weights, moments to 2.2 %) or ``compact`` (4 bits, 4.3 %), and after it
        rules, ``"PATTERN=SETTING"`` or ``"PATTERN=SETTING<=BOUND"``, of which the last that fits a tensor counts. A pattern is a
        role (``master``, ``exp_avg``, ``exp_avg_sq``) or a glob of names; a setting is ``lossless``, ``loguniform:STEPS``,
        ``remainder:BITS``, ``cluster``, ``kmeans`` or ``blockwise8``; a bound is the greatest relative error.
        :meth:`Snapshot.rounding` tells what came of it.

        >>> import struct
        >>> store = Store("memory://precision-example")
        >>> moments = {"w": RawTensor("f32", (4,), bytearray(struct.pack("<4f", 1.0, 1.1, -3.0, 0.0)))}
        >>> _ = store.save({"exp_avg": moments}, step=1, precision=["near", "exp_avg=loguniform:4"])
        >>> [(errors.name, errors.setting, errors.elements) for errors in store.snapshot().rounding()]
        [('exp_avg.w', 'loguniform:4', 3)]

        ``changed_rows``: of some tensors, by name, the indices (first dimension) of the rows that may have changed since this
        store object saved the tensor last; all others are taken to be equal. With ``base_cache="none"`` no base is read back
        for them then. A row that changed and is left out fails the save, or makes that part of the snapshot unreadable.

        ``overwrite``: whether a step that is saved already is replaced. Without it, saving the step again with another content is a
        ``ConflictError``; saving the same content again is not.

        ``keep_last``: number of live steps to keep. After the commit, all older live steps are forgotten, except pinned ones, as
        ``tensorcask forget --keep-last`` does. Forgetting deletes nothing: :meth:`gc` frees the disk. If forgetting fails, the step is
        saved all the same: a warning is logged, and the next save with ``keep_last`` forgets those steps too.

        ``progress``: a function that is called a few times a second, from another thread, with the bytes read and written so far; or
        True, for a bar of tqdm.

        >>> store = Store("memory://rows-example")
        >>> table = bytearray(number * number % 251 for number in range(64 * 1024))
        >>> _ = store.save({"table": RawTensor("u8", (1024, 64), table)}, step=1, base_cache="none")
        >>> table[64 * 7:64 * 8] = bytes(range(64))
        >>> store.save({"table": RawTensor("u8", (1024, 64), table)}, step=2, base_cache="none", changed_rows={"table": [7]}).chunks
        {'tc.rows': 1}
        """
        if keep_last is not None:
            keep_last = check_count("keep_last", keep_last)
        flat = _state.flatten(state, on_unsupported)
        blobs = [*flat.blobs.items(), (_TREE, _native.encode_tree(flat.nodes))]
        tensors = [(name, t.dtype, t.shape, [0] * len(t.shape), t.shape, t.buffer) for name, t in flat.tensors.items()]
        options = (*parse_policy(policy), base_cache, verify_after_encode, objective, _precision.words(precision))
        rows = {name: [int(row) for row in indices] for name, indices in (changed_rows or {}).items()}
        arguments = (check_step(step), tensors, blobs, user_json(user), dict(metadata or {}), rows)
        with watching(self.native(), progress, f"save step {arguments[0]}"):
            saved = self.with_writer(options, lambda writer: writer.save(*arguments, overwrite=overwrite))
            if keep_last is not None:
                self._retain(keep_last)
            return saved

    def with_writer(self, options: WriterOptions, use: Callable[[_native.Writer], _T]) -> _T:
        """Uses the writer of this store, which stays open from call to call."""
        native = self.native()
        with self._lock:
            if self._writer is None or self._writer[0] != options:
                self._writer = (options, native.writer(*options))
            try:
                return use(self._writer[1])
            except _native.OutcomeUnknownError:
                # The next save opens the store anew, and finds out.
                self._writer = None
                raise
            except _native.Error:
                raise
            except BaseException:
                # Interrupted somewhere: what the writer remembers may not be what the store has.
                self._writer = None
                raise

    def load(
        self,
        step: int | str = "latest",
        *,
        tensors: str | Sequence[str] | None = None,
        slices: Slices | None = None,
        out: Any = None,
        device: Any = None,
        framework: str | None = None,
        strict: bool = False,
        dtype: Any = None,
        have: int | None = None,
        max_error: float | None = None,
        progress: Progress = None,
    ) -> Any:
        """Loads a state, or a part of it; see :func:`load`."""
        with watching(self.native(), progress, f"load step {step}"):
            return self._load(step, tensors, slices, out, device, framework, strict, dtype, have, max_error)

    def _load(
        self,
        step: int | str,
        tensors: str | Sequence[str] | None,
        slices: Slices | None,
        out: Any,
        device: Any,
        framework: str | None,
        strict: bool,
        dtype: Any,
        have: int | None,
        max_error: float | None,
    ) -> Any:
        def load(snapshot: Snapshot) -> Any:
            return snapshot.load(
                tensors=tensors,
                slices=slices,
                out=out,
                device=device,
                framework=framework,
                dtype=dtype,
                have=have,
                max_error=max_error,
            )

        if step != "latest" or strict:
            return load(self.snapshot(step))
        passed_over: list[str] = []
        first: _native.CorruptionError | None = None
        while True:
            try:
                native, skipped = self.native().recover(passed_over)
            except _native.Error:
                if first is not None:
                    raise first from None
                raise
            passed_over += [id for _, id, _ in skipped]
            snapshot = Snapshot(native, self.native())
            try:
                return load(snapshot)
            except _native.CorruptionError as error:
                # Its indexes are whole, its pages are not.
                _log.warning("step %d cannot be rebuilt; trying the one before: %s", snapshot.step, error)
                first = first or error
                passed_over.append(snapshot.id)

    def snapshot(self, step: int | str = "latest") -> Snapshot:
        """Opens the snapshot of a step, or the newest by commit."""
        native = self.native()
        return Snapshot(native.snapshot(None if step == "latest" else check_step(step)), native)

    def snapshots(self) -> list[SnapshotInfo]:
        """All live snapshots, in the order of their commits."""
        return [SnapshotInfo(**{**row, "user": json.loads(row["user"])}) for row in self.native().snapshots()]

    def catalog(self) -> Catalog:
        """All snapshots as a table that reads as an Arrow stream: ``pyarrow.table(store.catalog())``, polars, DuckDB."""
        return self.native().catalog()

    def verify(self, depth: str = "full", *, step: int | None = None, progress: Progress = None) -> VerifyReport:
        """Checks the store: its ``log``, also every byte (``pages``), also every chunk decoded (``full``)."""
        with watching(self.native(), progress, "verify"):
            return VerifyReport(**self.native().verify(depth, step))

    def pin(self, step: int) -> None:
        """Protects a step: it cannot be forgotten until it is unpinned."""
        self.native().pin(check_step(step))

    def unpin(self, step: int) -> None:
        """Ends the protection of a step."""
        self.native().unpin(check_step(step))

    def forget(self, steps: Sequence[int]) -> None:
        """Gives steps up."""
        self.native().forget([check_step(step) for step in steps])

    @property
    def steps(self) -> list[int]:
        """All live steps, in the order of their commits: the last is ``latest``.

        >>> store = Store("memory://steps-example")
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
        """Collects garbage: gives up forgotten steps that no chain needs, and deletes objects that nothing has needed for ``older_than``.

        A dry run by default: ``apply=True`` does it. ``older_than``: ``"30m"``, ``"24h"``, ``"7d"`` or a ``timedelta``. The first call
        gives steps up, and their objects stay for ``older_than``, so a later call deletes them. Writers rely on 24 hours: do not go below
        while one runs. ``directories`` also deletes directories that nothing names; no writer may run meanwhile.

        >>> store = Store("memory://gc-example")
        >>> for step in (1, 2):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([step, 2, 3]))}, step=step, policy="full", keep_last=1)
        >>> report = store.gc()
        >>> report.applied, report.collected, report.freed_bytes
        (False, [1], 0)
        """
        with watching(self.native(), progress, "gc"):
            return GcReport(**_native.gc(self.native(), parse_duration(older_than), apply, directories))

    def compact(self, step: int | str = "latest", *, progress: Progress = None) -> CompactReport:
        """Folds the chain of a step into a base, which needs no other step. All steps restore to what they did before.

        The old objects stay until :meth:`forget` and :meth:`gc` let go of them. Safe beside a running writer.

        >>> store = Store("memory://compact-example")
        >>> for step in (1, 2):
        ...     _ = store.save({"w": RawTensor("u8", (4096,), bytearray([step, 2, 3, 4] * 1024))}, step=step, policy="consecutive")
        >>> report = store.compact()
        >>> report.step, report.changed, report.links, store.snapshot().kind
        (2, True, 2, 'base')
        """
        with watching(self.native(), progress, f"compact step {step}"):
            return CompactReport(**_native.compact(self.native(), None if step == "latest" else check_step(step)))

    def copy_to(
        self, destination: str | os.PathLike[str] | Store | Any, *, steps: Sequence[int] | None = None, progress: Progress = None
    ) -> CopyReport:
        """Copies all live steps, or only ``steps``, and what they are rebuilt from into another store.

        ``destination``: a URL or an open store; an empty place, or an earlier copy. A URL takes its settings from the environment;
        ``store.at(url)`` is a store with the settings of this one. Snapshots keep their ids and bytes, and every byte is checked at the
        destination. Copying again adds what is new, and completes a copy that was interrupted.

        >>> store = Store("memory://copy-example")
        >>> for step in (1, 2):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([step, 2, 3]))}, step=step)
        >>> store.copy_to("memory://copy-example-2").snapshots, Store("memory://copy-example-2").steps
        (2, [1, 2])
        """
        into = _open(destination, None)
        wanted = None if steps is None else [check_step(step) for step in steps]
        with watching(self.native(), progress, "copy"):
            return CopyReport(**_native.copy_to(self.native(), into.native(), wanted))

    def _retain(self, keep_last: int) -> None:
        try:
            _native.retain(self.native(), keep_last)
        except _native.Error as error:
            _log.warning("the step is saved, but older steps could not be forgotten; the next save tries again: %s", error)

    def writer(self, **options: Any) -> Writer:
        """A ``storage_writer`` for ``torch.distributed.checkpoint``; see :class:`tensorcask.torch.Writer`."""
        from .torch import Writer

        return Writer(self, **options)

    def reader(self, **options: Any) -> Reader:
        """A ``storage_reader`` for ``torch.distributed.checkpoint``; see :class:`tensorcask.torch.Reader`."""
        from .torch import Reader

        return Reader(self, **options)


class Snapshot:
    """A committed state at one step."""

    def __init__(self, native: _native.Snapshot, store: _native.Store) -> None:
        self._native = native
        self._store = store
        self._tensors = {row[0]: TensorInfo(row[0], row[1], tuple(row[2]), *row[3:]) for row in native.tensors()}

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}, kind={self.kind!r}, {len(self._tensors)} tensors)"

    @property
    def native(self) -> _native.Snapshot:
        """The snapshot below."""
        return self._native

    @property
    def step(self) -> int:
        """The training step."""
        return self._native.step

    @property
    def id(self) -> str:
        """Its id in the log."""
        return self._native.id

    @property
    def kind(self) -> str:
        """``base`` or ``delta``."""
        return self._native.kind

    @property
    def user(self) -> dict[str, Any]:
        """What the user said of it."""
        found: dict[str, Any] = json.loads(self._native.user)
        return found

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the state as a safetensors file carries it."""
        return self._native.metadata

    @property
    def chain(self) -> list[tuple[int, str, int]]:
        """Step, kind and stored bytes of each snapshot that it is rebuilt from, newest first."""
        return self._native.chain()

    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors, by name."""
        return dict(self._tensors)

    def blobs(self) -> list[tuple[int, str]]:
        """Rank and name of each blob."""
        return self._native.blobs()

    def blob(self, name: str, *, rank: int = 0) -> bytes:
        """The bytes of a blob."""
        return self._native.read_blob(rank, name)

    def rounding(self) -> list[TensorRounding]:
        """How far the tensors that were rounded are from what was saved, by name; empty where nothing was lost. Reads no tensor."""
        return [TensorRounding.of(*row) for row in self._native.rounding()]

    def verify(self) -> None:
        """Decodes and checks everything; an error if something is wrong."""
        self._native.verify()

    def load(
        self,
        *,
        tensors: str | Sequence[str] | None = None,
        slices: Slices | None = None,
        out: Any = None,
        device: Any = None,
        framework: str | None = None,
        dtype: Any = None,
        have: int | None = None,
        max_error: float | None = None,
    ) -> Any:
        """Loads the state, or a part of it; see :func:`load`."""
        if max_error is not None:
            if not max_error >= 0:
                raise ValueError(f"max_error {max_error!r}: use a relative error, such as 0.05")
            self._native.check_rounding(max_error)
        targets = {} if out is None else _targets(out)
        missing = [name for name in targets if name not in self._tensors]
        if missing:
            raise _native.NotFoundError(f"out: step {self.step} has no tensor `{missing[0]}`")
        partial = tensors is not None or slices is not None
        patterns = [tensors] if isinstance(tensors, str) else list(tensors or [])
        wanted = self._matching(patterns) if partial else list(self._tensors)
        rects = {name: self._rect(name, wanted_slice) for name, wanted_slice in (slices or {}).items()}
        twice = next((name for name in rects if name in targets), None)
        if twice is not None:
            raise ValueError(f"`{twice}`: a slice cannot be read into out")

        # A part needs the tree only for the frameworks of its tensors.
        trees = [] if partial and framework else self._trees()
        saved_as = {value[0]: value[1] for tree in trees for kind, value in tree if kind == "tensor"}
        unknown = next((name for name in saved_as if name not in self._tensors), None)
        if unknown is not None:
            raise _native.CorruptionError(f"tc.tree: names tensor `{unknown}`, which is not there [spec: tree 2.7]")
        if not partial:
            self._native.check_content()

        def kind_of(name: str) -> str:
            return framework or saved_as.get(name) or _frameworks.default_framework()

        places: dict[str, _frameworks.Place] = {}
        requests: list[tuple[str, Sequence[int], Sequence[int], Any]] = []
        rounded: list[tuple[str, Sequence[int], Sequence[int], Any]] = []
        as_bf16 = _frameworks.is_bf16(dtype)

        def is_rounded(name: str) -> bool:
            return as_bf16 and self._tensors[name].dtype == "f32" and kind_of(name) != "bytes"

        held: list[tuple[str, Any]] = []
        tied: dict[str, str] = {}
        stored: dict[str, str] = {}
        for name in wanted:
            if name in rects:
                continue
            info = self._tensors[name]
            if name not in targets:
                # Tied tensors were one, and are one again.
                first = stored.setdefault(info.alias_of or name, name)
                if first != name and kind_of(first) == kind_of(name):
                    tied[name] = first
                    continue
                if is_rounded(name):
                    places[name] = _frameworks.place(kind_of(name), "bf16", info.shape, name)
                    rounded.append((name, [0] * len(info.shape), info.shape, places[name].buffer))
                    continue
                places[name] = _frameworks.place(kind_of(name), info.dtype, info.shape, name)
            else:
                places[name] = _frameworks.place_in(targets[name], info.dtype, info.shape, name)
                if have is not None:
                    held.append((name, places[name].buffer))
                    continue
            requests.append((name, [0] * len(info.shape), info.shape, places[name].buffer))
        for name, (offset, shape) in rects.items():
            places[name] = _frameworks.place(kind_of(name), "bf16" if is_rounded(name) else self._tensors[name].dtype, shape, name)
            (rounded if is_rounded(name) else requests).append((name, offset, shape, places[name].buffer))

        if have is not None:
            if out is None:
                raise ValueError("have= says what `out` holds, and `out` is missing")
            self._native.update_into(self._store.snapshot(have), self._without_ties(held))
        self._native.read_into(self._without_ties(requests))
        if rounded:
            self._native.read_as_bf16_into(rounded)
        loaded = {name: place.finish() for name, place in places.items()}
        if dtype is not None or device is not None:
            loaded = {
                name: value if name in targets else _frameworks.convert(value, dtype, device) for name, value in loaded.items()
            }
        loaded.update({name: loaded[first] for name, first in tied.items()})
        if partial or not trees:
            return loaded
        return _state.merge([self._nested(rank, tree, loaded) for rank, tree in trees_by_rank(trees, self._tree_ranks)])

    def structure(self) -> tuple[Any, list[str]]:
        """The state with a :class:`TensorInfo` in place of each tensor. Reads no tensor."""
        trees = self._trees()
        if not trees:
            return dict(self._tensors), list(self._tensors)
        nested = [self._nested(rank, tree, self._tensors) for rank, tree in trees_by_rank(trees, self._tree_ranks)]
        return _state.merge(nested), list(self._tensors)

    def _without_ties(self, requests: list[Any]) -> list[Any]:
        """Tied tensors that go into the same memory are read once."""
        seen: set[tuple[str, int]] = set()
        kept = []
        for request in requests:
            name, buffer = request[0], request[-1]
            address = _address(buffer)
            key = (self._tensors[name].alias_of or name, address)
            if address and key in seen:
                continue
            seen.add(key)
            kept.append(request)
        return kept

    def _trees(self) -> list[list[_state.Node]]:
        self._tree_ranks = sorted(rank for rank, name in self._native.blobs() if name == _TREE)
        return [_native.decode_tree(self._native.read_blob(rank, _TREE)) for rank in self._tree_ranks]

    def _nested(self, rank: int, tree: list[_state.Node], tensors: Mapping[str, Any]) -> Any:
        def leaf(kind: str, value: Any) -> Any:
            if kind == "tensor":
                return tensors[value[0]]
            data = self._native.read_blob(rank, value)
            if kind == "bytes":
                return data
            import io

            return io.BytesIO(data)

        return _state.build(tree, leaf)

    def _matching(self, patterns: list[str]) -> list[str]:
        names = list(self._tensors)
        matches, unused = _native.matching(names, patterns)
        if unused:
            raise _native.NotFoundError(f"step {self.step} has no tensor that matches `{unused[0]}`")
        return [name for name, matched in zip(names, matches, strict=True) if matched]

    def _rect(self, name: str, wanted: slice | tuple[slice, ...]) -> tuple[list[int], list[int]]:
        info = self._tensors.get(name)
        if info is None:
            raise _native.NotFoundError(f"step {self.step} has no tensor `{name}`")
        ranges = wanted if isinstance(wanted, tuple) else (wanted,)
        if len(ranges) > len(info.shape):
            raise _native.InvalidArgumentError(f"`{name}`: {len(ranges)} slices for shape {list(info.shape)}")
        offset, shape = [0] * len(info.shape), list(info.shape)
        for dimension, part in enumerate(ranges):
            start, stop, stride = part.indices(info.shape[dimension])
            if stride != 1:
                raise _native.InvalidArgumentError(f"`{name}`: a slice with step {stride}; only 1 can be read")
            offset[dimension], shape[dimension] = start, max(stop - start, 0)
        return offset, shape


def trees_by_rank(trees: list[list[_state.Node]], ranks: list[int]) -> list[tuple[int, list[_state.Node]]]:
    """Each tree with the rank whose blob it was."""
    return list(zip(ranks, trees, strict=True))


def save(state: Any, url: str | os.PathLike[str] | Store, *, step: int, config: Mapping[str, str] | None = None, **options: Any) -> Saved:
    """Saves a state into the store at a URL, which is created if it is not there; see :meth:`Store.save`.

    The process keeps the store open: the second save of a training loop is a delta on the first.

    >>> save({"w": RawTensor("f32", (4,), bytearray(16)), "epoch": 1}, "memory://save-example", step=1).kind
    'base'
    >>> save({"w": RawTensor("f32", (4,), bytearray(16)), "epoch": 2}, "memory://save-example", step=2).kind
    'delta'
    """
    return _open(url, config).save(state, step=step, **options)


def load(
    url: str | os.PathLike[str] | Store,
    step: int | str = "latest",
    *,
    tensors: str | Sequence[str] | None = None,
    slices: Slices | None = None,
    out: Any = None,
    device: Any = None,
    framework: str | None = None,
    strict: bool = False,
    dtype: Any = None,
    have: int | None = None,
    max_error: float | None = None,
    progress: Progress = None,
    config: Mapping[str, str] | None = None,
) -> Any:
    """Loads a state as it was saved: ``step``, or the newest that can be rebuilt (``strict``: the newest, or an error).

    ``tensors`` (names, ``*`` for any characters) and ``slices`` (a slice, or one per leading dimension, by name) read only
    what they name, and give a flat dict. ``out``, a state like the one that was saved, gives the memory: its tensors are
    filled in place and stand in the result; after an error they hold parts of either state. ``have`` says that they hold
    the state of that step, and reads only what lies between. ``framework``: ``torch``, ``numpy``, ``jax`` or ``bytes``;
    otherwise each tensor comes back as it was saved. ``dtype`` converts floating-point tensors (f32 read as ``"bf16"``: where they were stored so that their roundings
    are enough, only those are read), ``device`` moves tensors. ``max_error`` refuses a snapshot in which some tensor was rounded
    by more than this relative error. ``progress`` is that of :meth:`Store.save`.

    >>> _ = save({"w": RawTensor("u8", (4, 2), bytearray(range(8)))}, "memory://load-example", step=3)
    >>> load("memory://load-example", slices={"w": slice(1, 3)}, framework="bytes")["w"].data
    bytearray(b'\\x02\\x03\\x04\\x05')
    """
    return _open(url, config).load(
        step,
        tensors=tensors,
        slices=slices,
        out=out,
        device=device,
        framework=framework,
        strict=strict,
        dtype=dtype,
        have=have,
        max_error=max_error,
        progress=progress,
    )


_OPEN_STORES = 8
_of_parents: list[Any] = []
_stores: OrderedDict[Any, Store] = OrderedDict()
_stores_lock = threading.Lock()


def _open(url: str | os.PathLike[str] | Store, config: Mapping[str, str] | None) -> Store:
    """The store at a URL, open since the last call where it was there."""
    if isinstance(url, Store):
        if config is not None:
            raise ValueError("config= belongs to a URL; this store is open")
        return url
    provider = None
    if _source.is_obstore(url):
        url, theirs, provider = _source.of_obstore(url)
        config = {**theirs, **(config or {})}
    text = os.fspath(url)
    # A store holds its provider: no other can have its id meanwhile.
    key = (text if _source.is_url(text) else os.path.abspath(text), tuple(sorted((config or {}).items())), id(provider))
    with _stores_lock:
        store = _stores.pop(key, None) or Store(key[0], config, credential_provider=provider)
        _stores[key] = store
        while len(_stores) > _OPEN_STORES:
            _stores.popitem(last=False)
    return store


def _store_again(url: str, config: dict[str, str] | None, fsync: bool, provider: CredentialProvider | None, job: str) -> Store:
    # Whoever was sent a store saves for the job that sent it.
    _native.join_job(job)
    return Store(url, config, fsync=fsync, credential_provider=provider)


def check_step(step: Any) -> int:
    """A step, or an error that says what it is."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step {step!r}: use an integer")
    found = int(step.__index__())
    if found < 0:
        raise ValueError(f"step {found}: use 0 or more")
    return found


def check_count(name: str, count: Any) -> int:
    """A number from 1 on, or an error that says what it is."""
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"{name}={count!r}: use an integer")
    found = int(count.__index__())
    if found < 1:
        raise ValueError(f"{name}={found}: use 1 or more")
    return found


def parse_duration(duration: str | timedelta) -> timedelta:
    """``30s``, ``5m``, ``24h``, ``7d`` as the command line reads them, or what it is already."""
    if isinstance(duration, timedelta):
        if duration < timedelta():
            raise ValueError(f"{duration!r}: use a time of 0 or more")
        return duration
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    number, unit = (duration[:-1], duration[-1:]) if duration != "0" else ("0", "s")
    if unit not in units or not (number.isascii() and number.isdigit()):
        raise ValueError(f"{duration!r}: write a number and s, m, h or d, such as '24h', or pass a timedelta")
    return timedelta(**{units[unit]: int(number)})


def parse_policy(policy: str) -> tuple[str, int | None]:
    """``intermittent:8`` is a policy with its number."""
    name, _, every = policy.partition(":")
    return name, int(every) if every else None


def user_json(user: Mapping[str, Any] | None) -> str:
    """Facts of the user as JSON; numbers that JSON cannot say, as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if not isinstance(value, (str, int, float, bool, type(None))) and hasattr(value, "item"):
            value = value.item()
        return repr(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(user or {}), allow_nan=False)


def _targets(out: Any) -> dict[str, Any]:
    return {name: lent for name, lent in _flat_arrays(out)}


def _flat_arrays(out: Any) -> list[tuple[str, Any]]:
    """Tensors of a state by the names that saving gives them; other values do not matter."""
    found: dict[str, Any] = {}
    flattener = _state._Flattener("skip")

    def walk(value: Any, path: tuple[str | int, ...]) -> None:
        inner = _frameworks.inner_tensors(value)
        if inner is not None:
            walk(inner, path)
        elif _frameworks.framework_of(value) is not None:
            found[flattener.name(path, found)] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, (*path, key))
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                walk(item, (*path, at))

    walk(out, ())
    return list(found.items())


def _address(buffer: Any) -> int:
    """Where a buffer lies; 0 for one that nobody else has."""
    interface = getattr(buffer, "__array_interface__", None)
    return int(interface["data"][0]) if interface else 0


# For the examples above.
RawTensor = _frameworks.RawTensor
