"""Stores: saving and loading states."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from . import _foreign, _frameworks, _native, _source, _state
from ._errors import InvalidValueError
from ._native import Catalog, Saved
from ._options import (
    BaseCache,
    Device,
    DType,
    Framework,
    LoadOptions,
    Objective,
    Policy,
    Slices,
    Step,
    VerifyDepth,
    WriterOptions,
    changed_row_lists,
    check_slices,
    check_step,
    parse_policy,
    step_or_latest,
    text_values,
    user_json,
    writer_options,
)
from ._precision import TensorErrors
from ._progress import Progress, watching
from ._source import CredentialProvider
from ._state import OnUnsupported

if TYPE_CHECKING:
    from .torch import Reader, Writer

_log = logging.getLogger("tensorcask")

_TREE = "tc.tree"
_T = TypeVar("_T")


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot, as listings show it."""

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
    """What a verification looked at, and what is wrong: step, object and message of each problem."""

    entries: int
    snapshots: int
    casks: int
    chunks: int
    problems: list[tuple[int | None, str | None, str]]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


class Store:
    """The snapshots of one training run, below one URL.

    ``url``: a path, ``file://``, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``memory://name``, or a store of obstore (local, S3,
    GCS, Azure), whose settings are taken over. Nothing is read or created
    yet. ``config`` overrides settings that the environment gives (``aws_region``, ``aws_endpoint``, ...). ``credential_provider``, for
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
        self._url = _source.check_url(url)
        self._config = text_values(config, "config") or None
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
        policy: Policy = "adaptive",
        user: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        on_unsupported: OnUnsupported = None,
        base_cache: BaseCache = "memory",
        verify_after_encode: bool = True,
        objective: Objective = "balanced",
        precision: str | Sequence[str] = "lossless",
        changed_rows: Mapping[str, Sequence[int]] | None = None,
        overwrite: bool = False,
        progress: Progress = None,
    ) -> Saved:
        """Saves a state: nested dicts, lists and tuples of tensors, numbers, text, bytes and None.

        The snapshot is durable when this returns: a new process can load it. The first save takes the store over. Another job that
        was writing to the store gets a ``FencedError`` at its next save. All stores of one process, its forked children, and
        processes that received a pickled ``Store`` are one job. If the folder was deleted, moved or replaced since the last save,
        the save starts again with a base.

        A subclass of dict, list, tuple, int, float or str comes back as the type it is a subclass of; so do enums of int and str. A
        numpy scalar comes back as an array without dimensions. A subclass of a torch tensor that is made of other tensors
        (quantized weights, for example) is stored as a dict of these; ``load(out=...)`` fills the tensors of the given one.

        Tensors that are the same view of the same memory (tied weights) are stored once, and are one tensor again when they are
        loaded together. Views that overlap but differ in offset, shape, strides or dtype are stored separately, and no longer share memory after
        a load. ``torch.save`` keeps such sharing. To keep it here, save the whole tensor and make the views after the load.

        Args:
            step: Training step.
            policy: When to write a base instead of a delta: ``adaptive``, ``full``, ``one_shot``, ``consecutive``, ``intermittent``, or
                ``intermittent:8`` for a base at every eighth save.
            user: Facts about the step, such as loss and tokens. They become columns of the catalog.
            metadata: Text that an export to safetensors carries.
            on_unsupported: What to do with a value that cannot be stored: ``"error"``, ``"skip"``, or a function of its path and the
                value that returns a replacement.
            base_cache: Where the base of the next delta is kept: ``memory``, ``encoded``, ``disk:FOLDER`` or ``none``.
            verify_after_encode: Whether each encoded chunk is decoded again and compared before it is written.
            objective: Goal of the choice of codecs: ``smallest``, ``balanced``, ``fastest``, or weights of size, speed and precision, such
                as ``"0.6,0.4,0"``.
            precision: Which f32 tensors are rounded before they are stored; see below.
            changed_rows: Indices (first dimension) of the rows that may have changed since this store object last saved the tensor, by
                tensor name. All other rows are taken to be equal. With ``base_cache="none"`` these tensors then need no base. A row that
                changed and is left out fails the save, or makes that part of the snapshot unreadable.
            overwrite: Whether to replace a step that exists. Without it, saving other content for an existing step is a
                ``ConflictError``; saving the same content again is not.
            progress: A function of the bytes read and written so far, called a few times a second from another thread; or True for a
                bar of tqdm.

        ``precision`` is one word or a list: a profile, followed by rules. Profiles are ``lossless``, ``near`` (masters to 8 bits beyond
        their bf16 weights, moments to 2.2 %) and ``compact`` (4 bits, 4.3 %). A rule is ``"PATTERN=SETTING"`` or
        ``"PATTERN=SETTING<=BOUND"``; the last rule that matches a tensor wins. A pattern is a role (``master``, ``exp_avg``,
        ``exp_avg_sq``) or a glob of names. A setting is ``lossless``, ``loguniform:STEPS``, ``remainder:BITS``, ``cluster``, ``kmeans`` or
        ``blockwise8``. A bound is the greatest relative error. :meth:`Snapshot.errors` reports the rounding errors.

        >>> import struct
        >>> store = Store("memory://precision-example")
        >>> moments = {"w": RawTensor("f32", (4,), bytearray(struct.pack("<4f", 1.0, 1.1, -3.0, 0.0)))}
        >>> _ = store.save({"exp_avg": moments}, step=1, precision=["near", "exp_avg=loguniform:4"])
        >>> [(errors.name, errors.setting, errors.elements) for errors in store.snapshot().errors()]
        [('exp_avg.w', 'loguniform:4', 3)]

        With ``changed_rows``, one row of a table is stored:

        >>> store = Store("memory://rows-example")
        >>> table = bytearray(number * number % 251 for number in range(64 * 1024))
        >>> _ = store.save({"table": RawTensor("u8", (1024, 64), table)}, step=1, base_cache="none")
        >>> table[64 * 7:64 * 8] = bytes(range(64))
        >>> store.save({"table": RawTensor("u8", (1024, 64), table)}, step=2, base_cache="none", changed_rows={"table": [7]}).chunks
        {'tc.rows': 1}
        """
        flat = _state.flatten(state, on_unsupported)
        blobs = [*flat.blobs.items(), (_TREE, _native.encode_tree(flat.nodes))]
        tensors = [(name, t.dtype, t.shape, [0] * len(t.shape), t.shape, t.buffer) for name, t in flat.tensors.items()]
        options = writer_options(policy, base_cache, verify_after_encode, objective, precision)
        rows = changed_row_lists(changed_rows)
        arguments = (check_step(step), tensors, blobs, user_json(user), text_values(metadata, "metadata"), rows)
        with watching(self.native(), progress, f"save step {arguments[0]}"):
            return self.with_writer(options, lambda writer: writer.save(*arguments, overwrite=overwrite))

    def with_writer(self, options: WriterOptions, use: Callable[[_native.Writer], _T]) -> _T:
        """Uses the writer of this store, which stays open from call to call."""
        native = self.native()
        with self._lock:
            if self._writer is None or self._writer[0] != options:
                with _foreign.explained(self._url):
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
        step: Step = "latest",
        *,
        tensors: str | Sequence[str] | None = None,
        slices: Slices | None = None,
        out: Any = None,
        device: Device | None = None,
        framework: Framework | None = None,
        strict: bool = False,
        dtype: DType | Mapping[str, DType] | None = None,
        have: int | None = None,
        max_error: float | None = None,
        progress: Progress = None,
    ) -> Any:
        """Loads a state, or a part of it; see :func:`load`."""
        options = LoadOptions(tensors, slices, out, device, framework, dtype, have, max_error)
        wanted = step_or_latest(step)
        with watching(self.native(), progress, f"load step {step}"):
            return self._load(wanted, strict, options)

    def _load(self, step: int | None, strict: bool, options: LoadOptions) -> Any:
        if step is not None or strict:
            return self.snapshot("latest" if step is None else step).load_with(options)
        passed_over: list[str] = []
        first: _native.CorruptionError | None = None
        while True:
            try:
                with _foreign.explained(self._url):
                    native, skipped = self.native().recover(passed_over)
            except _native.Error:
                if first is not None:
                    raise first from None
                raise
            passed_over += [id for _, id, _ in skipped]
            snapshot = Snapshot(native, self.native())
            try:
                return snapshot.load_with(options)
            except _native.CorruptionError as error:
                # Its indexes are whole, its pages are not.
                _log.warning("step %d cannot be rebuilt; trying the one before: %s", snapshot.step, error)
                first = first or error
                passed_over.append(snapshot.id)

    def snapshot(self, step: Step = "latest") -> Snapshot:
        """Opens the snapshot of a step, or the newest by commit."""
        native = self.native()
        with _foreign.explained(self._url):
            return Snapshot(native.snapshot(step_or_latest(step)), native)

    def snapshots(self) -> list[SnapshotInfo]:
        """All live snapshots, in the order of their commits."""
        with _foreign.explained(self._url):
            rows = self.native().snapshots()
        return [SnapshotInfo(**{**row, "user": json.loads(row["user"])}) for row in rows]

    def catalog(self) -> Catalog:
        """All snapshots as a table that reads as an Arrow stream: ``pyarrow.table(store.catalog())``, polars, DuckDB."""
        with _foreign.explained(self._url):
            return self.native().catalog()

    def verify(self, depth: VerifyDepth = "full", *, step: int | None = None, progress: Progress = None) -> VerifyReport:
        """Checks the store: its ``log``, also every byte (``pages``), also every chunk decoded (``full``)."""
        with watching(self.native(), progress, "verify"), _foreign.explained(self._url):
            return VerifyReport(**self.native().verify(depth, step))

    def pin(self, step: int, pinned: bool = True) -> None:
        """Protects a step from being forgotten, or no longer."""
        self.native().pin(check_step(step), pinned)

    def forget(self, steps: Sequence[int]) -> None:
        """Gives steps up."""
        self.native().forget([check_step(step) for step in steps])

    def writer(
        self,
        *,
        step: int | None = None,
        policy: Policy = "adaptive",
        user: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        metadata: Mapping[str, str] | None = None,
        base_cache: BaseCache = "memory",
        verify_after_encode: bool = True,
        objective: Objective = "balanced",
        precision: str | Sequence[str] = "lossless",
        overwrite: bool = False,
        max_failed_saves: int = 3,
    ) -> Writer:
        """Makes a ``storage_writer`` for ``torch.distributed.checkpoint``; see :class:`tensorcask.torch.Writer`."""
        from .torch import Writer

        return Writer(
            self,
            step=step,
            policy=policy,
            user=user,
            metadata=metadata,
            base_cache=base_cache,
            verify_after_encode=verify_after_encode,
            objective=objective,
            precision=precision,
            overwrite=overwrite,
            max_failed_saves=max_failed_saves,
        )

    def reader(self, *, step: Step | None = None, process_group: Any = None) -> Reader:
        """Makes a ``storage_reader`` for ``torch.distributed.checkpoint``; see :class:`tensorcask.torch.Reader`."""
        from .torch import Reader

        return Reader(self, step=step, process_group=process_group)


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

    def errors(self) -> list[TensorErrors]:
        """How far the tensors that were rounded are from what was saved, by name; empty where nothing was lost. Reads no tensor."""
        return [TensorErrors.of(*row) for row in self._native.errors()]

    def verify(self) -> None:
        """Decodes and checks everything; an error if something is wrong."""
        self._native.verify()

    def load(
        self,
        *,
        tensors: str | Sequence[str] | None = None,
        slices: Slices | None = None,
        out: Any = None,
        device: Device | None = None,
        framework: Framework | None = None,
        dtype: DType | Mapping[str, DType] | None = None,
        have: int | None = None,
        max_error: float | None = None,
    ) -> Any:
        """Loads the state, or a part of it; see :func:`load`."""
        return self.load_with(LoadOptions(tensors, slices, out, device, framework, dtype, have, max_error))

    def load_with(self, options: LoadOptions) -> Any:
        """Loads the state, or a part of it, by options that are checked."""
        if options.max_error is not None:
            self._native.check_errors(options.max_error)
        out, framework, have, device = options.out, options.framework, options.have, options.device
        targets = {} if out is None else _targets(out)
        missing = [name for name in targets if name not in self._tensors]
        if missing:
            raise _native.NotFoundError(f"out: step {self.step} has no tensor `{missing[0]}`")
        partial = options.is_partial
        wanted = self._matching(options.patterns) if partial else list(self._tensors)
        rects = {name: self._rect(name, check_slices(name, parts)) for name, parts in (options.slices or {}).items()}
        dtypes = options.conversions(list(self._tensors.values()))
        twice = next((name for name in rects if name in targets), None)
        if twice is not None:
            raise InvalidValueError(f"`{twice}`: a slice cannot be read into out")

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

        def is_rounded(name: str) -> bool:
            return dtypes.get(name) == "bf16" and self._tensors[name].dtype == "f32"

        for name in [*wanted, *rects]:
            if name in targets:
                continue
            if name in dtypes and kind_of(name) == "bytes":
                raise InvalidValueError(f"dtype: `{name}` is loaded as bytes; pass framework='torch', 'numpy' or 'jax' to convert it")
            if device is not None:
                _frameworks.check_device(kind_of(name), device)

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
                if first != name and kind_of(first) == kind_of(name) and dtypes.get(first) == dtypes.get(name):
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
            self._native.update_into(self._store.snapshot(have), self._without_ties(held))
        self._native.read_into(self._without_ties(requests))
        if rounded:
            self._native.read_as_bf16_into(rounded)
        loaded = {name: place.finish() for name, place in places.items()}
        for name in loaded.keys() - targets.keys() if dtypes or device is not None else ():
            loaded[name] = _frameworks.convert(loaded[name], dtypes.get(name), device)
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

    def _rect(self, name: str, ranges: tuple[slice, ...]) -> tuple[list[int], list[int]]:
        info = self._tensors.get(name)
        if info is None:
            raise _native.NotFoundError(f"step {self.step} has no tensor `{name}`")
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


def save(
    state: Any,
    url: str | os.PathLike[str] | Store,
    *,
    step: int,
    config: Mapping[str, str] | None = None,
    policy: Policy = "adaptive",
    user: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    on_unsupported: OnUnsupported = None,
    base_cache: BaseCache = "memory",
    verify_after_encode: bool = True,
    objective: Objective = "balanced",
    precision: str | Sequence[str] = "lossless",
    changed_rows: Mapping[str, Sequence[int]] | None = None,
    overwrite: bool = False,
    progress: Progress = None,
) -> Saved:
    """Saves a state into the store at a URL. Creates the store if it does not exist.

    The process keeps the store open: the second save of a training loop is a delta on the first. ``config`` overrides settings of
    the environment, as for :class:`Store`. :meth:`Store.save` describes all other arguments.

    >>> save({"w": RawTensor("f32", (4,), bytearray(16)), "epoch": 1}, "memory://save-example", step=1).kind
    'base'
    >>> save({"w": RawTensor("f32", (4,), bytearray(16)), "epoch": 2}, "memory://save-example", step=2).kind
    'delta'
    """
    return _open(url, config).save(
        state,
        step=step,
        policy=policy,
        user=user,
        metadata=metadata,
        on_unsupported=on_unsupported,
        base_cache=base_cache,
        verify_after_encode=verify_after_encode,
        objective=objective,
        precision=precision,
        changed_rows=changed_rows,
        overwrite=overwrite,
        progress=progress,
    )


def load(
    url: str | os.PathLike[str] | Store,
    step: Step = "latest",
    *,
    tensors: str | Sequence[str] | None = None,
    slices: Slices | None = None,
    out: Any = None,
    device: Device | None = None,
    framework: Framework | None = None,
    strict: bool = False,
    dtype: DType | Mapping[str, DType] | None = None,
    have: int | None = None,
    max_error: float | None = None,
    progress: Progress = None,
    config: Mapping[str, str] | None = None,
) -> Any:
    """Loads a state as it was saved, or a part of it.

    Returns the nested dicts, lists, tuples and values that were saved, with a tensor of its framework for each tensor. With
    ``tensors`` or ``slices``, returns a flat dict of tensors by name.

    Args:
        url: Path, URL or open :class:`Store`.
        step: Training step, or ``"latest"``: the newest step that can be rebuilt. A newer one that is damaged is passed over with a
            warning.
        tensors: Names or patterns (``*`` for any characters) of the tensors to read.
        slices: For each tensor name a slice of the first dimension, or a tuple with one slice per leading dimension. Only these
            parts are read.
        out: A state like the saved one. Its tensors are filled in place and stand in the result. After an error they hold parts of
            either state.
        device: Device to move tensors to (torch), or device or sharding (jax). Tensors of ``out`` stay.
        framework: ``torch``, ``numpy``, ``jax`` or ``bytes`` for all tensors, instead of the framework each was saved from.
        strict: Whether a damaged newest step is an error instead of a reason to load an older one.
        dtype: Floating-point dtype to convert to, or a mapping of patterns to dtypes; see below.
        have: Step whose state the tensors of ``out`` hold now. Reads only the changes since then.
        max_error: Greatest relative error: refuses a snapshot in which some tensor was rounded by more.
        progress: A function of the bytes read and written so far, called a few times a second from another thread; or True for a bar
            of tqdm.
        config: Settings that override those of the environment, as for :class:`Store`.

    ``dtype`` converts floating-point tensors: weights, masters, moments. These keep their dtype: tensors without dimensions, tensors
    with the role ``step`` or whose last name is ``step`` (step counters), integers, complex numbers, elements smaller than a byte,
    and tensors of ``out``. A dtype may be one of torch, numpy or jax, or a name: ``"bf16"``. A mapping chooses by role or name:
    ``{"model": "bf16", "*.bias": None}``. The last pattern that matches a tensor wins; None leaves it as it was saved. A full name
    converts also a tensor without dimensions and a step counter. If f32 weights were stored so that their bf16 roundings
    can be read alone, ``"bf16"`` reads only those.

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
            raise InvalidValueError("config= belongs to a URL; this store is open")
        return url
    provider = None
    if _source.is_obstore(url):
        url, theirs, provider = _source.of_obstore(url)
        config = {**theirs, **(config or {})}
    text, config = _source.check_url(url), text_values(config, "config")
    # A store holds its provider: no other can have its id meanwhile.
    key = (text if "://" in text else os.path.abspath(text), tuple(sorted(config.items())), id(provider))
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
