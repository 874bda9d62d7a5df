"""Stores: save, load, list and check the snapshots of one training run."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from . import _collector, _foreign, _native, _precision, _source, _state
from ._changed_rows import Rows, RowSource, save_with_rows
from ._errors import InvalidValueError
from ._frameworks import RawTensor
from ._native import Saved
from ._options import (
    BaseCache,
    Check,
    Device,
    DType,
    Framework,
    Free,
    LoadOptions,
    Objective,
    Policy,
    Slices,
    Step,
    check_step,
    retention_of,
    step_or_latest,
    text_values,
    user_json,
    writer_options,
)
from ._progress import Progress, watching
from ._reports import CopyReport
from ._snapshot import Snapshot
from ._state import TREE, OnUnsupported
from ._upkeep import Upkeep

if TYPE_CHECKING:
    from .torch import Reader, Writer

# RawTensor is here for the examples.
__all__ = ["RawTensor", "Store", "open_store"]

_log = logging.getLogger("tensorcask")
_T = TypeVar("_T")


class Store(Upkeep):
    """The snapshots of one training run, below one URL.

    Opening a store reads and creates nothing.

    Args:
        url: Path, ``file:///path``, ``s3://bucket/prefix`` (or ``s3a://``), ``gs://``, ``az://`` (or
            ``abfss://container@account.dfs.core.windows.net/prefix``), ``http(s)://`` or ``memory://name``; or a store of
            obstore (local, S3, GCS, Azure), whose settings are used.
        config: Settings that override those of the environment, such as ``aws_region`` and ``aws_endpoint``. The keys
            ``contact_timeout`` (``"5s"``) and ``retry_timeout`` (1 to 3 minutes) limit how long the first request to a server
            and later requests are retried.
        credential_provider: For S3 and Azure, a ``boto3.Session``, or a function that returns credentials as providers
            of obstore do (``access_key_id``, ``secret_access_key``, ``token``, ``expires_at``). It is asked again
            before they expire.
        fsync: Whether files on local disk are synced. False is faster, and a power loss may then lose snapshots.

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
        codecs: str | Sequence[str] = (),
        roles: str | Sequence[str] = (),
        precision: str | Sequence[str] = "lossless",
        gradients: Mapping[str, Any] | None = None,
        statistics: bool = False,
        check: Check = None,
        frozen: str | Sequence[str] = (),
        changed_rows: Mapping[str, Sequence[int]] | RowSource | None = None,
        overwrite: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_weights_every: int | None = None,
        free: Free = "next_save",
        progress: Progress = None,
    ) -> Saved:
        """Saves a state: nested dicts, lists and tuples of tensors, numbers, text, bytes and None.

        The snapshot is durable when this returns: a new process can load it. The first save takes the store over.
        Another job that was writing to the store gets a ``FencedError`` at its next save. All stores of one process,
        its forked children, and processes that received a pickled ``Store`` are one job. If the folder was deleted,
        moved or replaced since the last save, the save starts again with a base.

        A subclass of dict, list, tuple, int, float or str comes back as the type it is a subclass of; so do enums of
        int and str. A numpy scalar comes back as an array without dimensions. A subclass of a torch tensor that is made
        of other tensors (quantized weights, for example) is stored as a dict of these; ``load(out=...)`` fills the
        tensors of the given one.

        Tensors that are the same view of the same memory (tied weights) are stored once, and are one tensor again when
        they are loaded together. Views that overlap but differ in offset, shape, strides or dtype are stored
        separately, and no longer share memory after a load. ``torch.save`` keeps such sharing. To keep it here, save
        the whole tensor and make the views after the load.

        Args:
            state: State to save.
            step: Training step.
            policy: When to write a base instead of a delta: ``adaptive``, ``full``, ``one_shot``, ``consecutive``,
                ``intermittent``, or ``intermittent:8`` for a base at every eighth save. ``adaptive`` makes the smaller of two
                deltas, against the previous save or the last base, as long as a restore reads at most three times as
                much as that of a base.
            user: Facts about the step, such as loss and tokens. They become columns of the catalog.
            metadata: Text that an export to safetensors carries.
            on_unsupported: What to do with a value that cannot be stored: ``"error"``, ``"skip"``, or a function of its
                path and the value that returns a replacement.
            base_cache: Where the base of the next delta is kept: ``memory``, ``encoded``, ``disk:FOLDER`` or ``none``.
            verify_after_encode: Whether each encoded chunk is decoded again and compared before it is written.
            objective: Goal of the choice of codecs: ``smallest``, ``balanced``, ``fastest``, ``auto`` (the save is durable as
                early as possible, by measured rates of encoding and uploading), or weights of size, speed and precision,
                such as ``"0.6,0.4,0"``.
            codecs: Rules ``"PATTERN=CODEC"``, one or a list, that assign a codec of :func:`tensorcask.codec.codecs` to tensors,
                such as ``"model=tc.bitmask"``. A pattern is a role or a glob of names; the last rule that matches wins. A
                chunk that the codec cannot encode, such as a chunk of a base for ``tc.bitmask``, gets another codec.
            roles: Rules ``"GLOB=ROLE"`` or ``"GLOB=ROLE:PARAM"``, one or a list, that state the role of tensors (``model``,
                ``master``, ``exp_avg``, ``exp_avg_sq``, ``momentum``, ``ema``) whose names tell none, or a wrong one. Tensors of
                one parameter have the same ``PARAM``, as in ``"app.optim.fp32.*=master:*"``: they are stored by one another,
                which is much smaller. The last rule that matches wins. Without rules, roles are guessed from names.
            precision: Which tensors are rounded before they are stored; see below.
            gradients: Gradients by name of a tensor or parameter, of f32, bf16 or f16. They are not stored: the setting
                ``kmeans`` with ``sensitive`` weighs errors by them. Without them it takes Adam's second moments.
            statistics: Whether the snapshot gets statistics of its tensors, which :meth:`stats` returns.
            check: What to do with a state whose parameters or moments hold NaN or infinities: ``"finite"`` refuses it with an
                ``InvalidArgumentError`` that names tensor and chunk; ``"tag"`` saves it and marks the step
                (``Saved.finite``, ``user["tc.finite"]``). Tensors whose name contains ``mask`` may hold negative infinities.
            frozen: Patterns of names of parameters that are not trained. All other parameters with a moment in the state are
                trained. If a trained parameter stays the same for two more saves, a warning is logged once, and
                ``Saved.unchanged`` names it with the step since when.
            changed_rows: Indices (first dimension) of the rows that may have changed since this store object last saved
                the tensor, by tensor name; or a :class:`tensorcask.torch.TouchedRows`, which records them. With
                ``base_cache="none"`` these tensors then need no base, if the first save names rows, too (``[]`` will do).
                A row that changed and is left out fails the save.
            overwrite: Whether to replace a step that exists. Without it, saving other content for an existing step is a
                ``ConflictError``; saving the same content again is not.
            keep_last: Number of live steps to keep; reduced ones do not count. After the commit, older steps are forgotten, except pinned ones.
                ``free`` says when their disk space is free. If all kept steps are known to hold NaN or infinities (``check="tag"`` or
                ``statistics=True``), the newest finite step stays too, with a warning. If forgetting fails, a warning is
                logged, the step stays saved, and the next save with ``keep_last`` tries again.
            keep_every: Interval of steps to keep besides the last ones: the multiples of this number.
            keep_weights_every: Interval of steps of which only the weights (roles ``model`` and ``ema``) are kept.
            free: When the objects of forgotten steps are deleted: ``"next_save"``, with the save after the one that forgot a step,
                once no kept step needs it as a parent; or ``"gc"``, by :meth:`gc`. A reader that takes longer than one save for a
                step has to :meth:`pin` it before. Garbage collection also deletes what failed and killed saves leave.
            progress: A function of the bytes read and written so far, called a few times a second from another thread;
                or True for a bar of tqdm. In a notebook with tqdm and ipywidgets, operations of more than a
                second show the bar by default; False leaves it out.

        ``precision`` is one word or a list: a profile, followed by rules. Profiles are ``lossless``, ``near`` (masters
        to 8 bits beyond their bf16 weights, moments to 2.2 %) and ``compact`` (4 bits, 4.3 %). ``auto`` chooses one of
        them for each save, by measured errors and the stage of the training; ``saved.precision`` and
        ``saved.precision_reason`` tell which and why. Several ranks cannot use it. A rule is
        ``"PATTERN=SETTING"`` or ``"PATTERN=SETTING<=BOUND"``; the last rule that matches a tensor wins. A pattern is a
        role (``master``, ``exp_avg``, ``exp_avg_sq``) or a glob of names. A setting is ``lossless``,
        ``loguniform:STEPS``, ``remainder:BITS``, ``cluster``, ``kmeans`` or ``blockwise8``. A bound is the greatest
        relative error. A rule may name several settings, such as ``"exp_avg=cluster|blockwise8"``: the weights of
        ``objective`` choose one for each tensor. :meth:`Snapshot.rounding` reports the rounding errors.

        >>> import struct
        >>> store = Store("memory://precision-example")
        >>> moments = {"w": RawTensor("f32", (4,), bytearray(struct.pack("<4f", 1.0, 1.1, -3.0, 0.0)))}
        >>> _ = store.save({"exp_avg": moments}, step=1, precision=["near", "exp_avg=loguniform:4"])
        >>> [(errors.name, errors.setting, errors.elements) for errors in store.snapshot().rounding()]
        [('exp_avg.w', 'loguniform:4', 3)]

        With ``changed_rows``, one row of a table is stored:

        >>> store = Store("memory://rows-example")
        >>> table = bytearray(number * number % 251 for number in range(64 * 1024))
        >>> _ = store.save({"table": RawTensor("u8", (1024, 64), table)}, step=1, base_cache="none", changed_rows={"table": []})
        >>> table[64 * 7:64 * 8] = bytes(range(64))
        >>> store.save({"table": RawTensor("u8", (1024, 64), table)}, step=2, base_cache="none", changed_rows={"table": [7]}).chunks
        {'tc.rows': 1}
        """
        retention = retention_of(keep_last, keep_every, keep_weights_every, free)
        with _collector.paused():
            flat = _state.flatten(state, on_unsupported)
            blobs = [*flat.blobs.items(), (TREE, _native.encode_tree(flat.nodes))]
            tensors = flat.whole_tensors()
            lent_gradients = _precision.lend_gradients(gradients)
        options = writer_options(policy, base_cache, verify_after_encode, objective, precision, statistics, check, frozen, codecs, roles)
        arguments = (check_step(step), tensors, blobs, user_json(user), text_values(metadata, "metadata"))

        def save(rows: Rows) -> Saved:
            return self.with_writer(options, lambda writer: writer.save(*arguments, rows, overwrite=overwrite, gradients=lent_gradients))

        with watching(self.native(), progress, f"save step {arguments[0]}"):
            if retention is not None:
                self._retain(self.begin_retention)
            saved = save_with_rows(changed_rows, id(self), lambda: _state.flat_arrays(state), save)
            if retention is not None:
                self._retain(lambda: self.retain_steps(retention))
            return saved

    def _retain(self, act: Callable[[], None]) -> None:
        try:
            act()
        except _native.Error as error:
            _log.warning("older steps could not be forgotten, reduced or freed; the next save tries again: %s", error)

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
        map_location: Device | None = None,
        strip_prefix: str | None = None,
        mmap: bool = False,
        progress: Progress = None,
    ) -> Any:
        """Loads a state, or a part of it; see :func:`load`."""
        options = LoadOptions(
            tensors=tensors,
            slices=slices,
            out=out,
            device=device,
            framework=framework,
            dtype=dtype,
            have=have,
            max_error=max_error,
            map_location=map_location,
            strip_prefix=strip_prefix,
            mmap=mmap,
        )
        with watching(self.native(), progress, f"load step {step}"):
            return self.read_step(step, lambda snapshot: snapshot.load_with(options), strict=strict)

    def read_step(self, step: Step, read: Callable[[Snapshot], _T], *, strict: bool = False) -> _T:
        """Returns what a function reads from the snapshot of a step. If the newest step is damaged, calls it for the step before; if
        a job has forgotten and freed the step meanwhile, for the newest one."""
        wanted = step_or_latest(step)
        if wanted is not None or strict:
            return read(self.snapshot("latest" if wanted is None else wanted))
        passed_over: list[str] = []
        first: _native.CorruptionError | None = None
        freed = 0
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
                return read(snapshot)
            except _native.CorruptionError as error:
                # Its indexes are intact, some pages are not.
                _log.warning("step %d cannot be rebuilt; trying an older step: %s", snapshot.step, error)
                first = first or error
                passed_over.append(snapshot.id)
            except _native.ConflictError as error:
                if freed == _MOST_FREED or any(info.id == snapshot.id for info in self.snapshots()):
                    raise
                _log.warning("step %d was forgotten while it was read; reading a newer step: %s", snapshot.step, error)
                freed += 1

    def copy_to(
        self,
        destination: str | os.PathLike[str] | Store | Any,
        *,
        steps: Sequence[int] | None = None,
        take_over: bool = False,
        progress: Progress = None,
    ) -> CopyReport:
        """Copies all live steps, or only ``steps``, and the snapshots that they need into another store.

        ``destination`` is a URL or an open store, empty or an earlier copy. A URL takes its settings from the environment;
        ``store.at(url)`` is a store with the settings of this one. Snapshots keep their ids and bytes, and every byte is
        checked at the destination. Copying again adds new snapshots and completes an interrupted copy. If a job saves to the
        destination, this is a ``ConflictError``, unless ``take_over``: the next save of that job then fails with ``FencedError``.
        A step that was saved at the destination, or is pinned there, is never replaced: that is a ``ConflictError``, too.

        >>> store = Store("memory://copy-example")
        >>> for step in (1, 2):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([step, 2, 3]))}, step=step)
        >>> store.copy_to("memory://copy-example-2").snapshots, Store("memory://copy-example-2").steps
        (2, [1, 2])
        """
        into = open_store(destination, None)
        wanted = None if steps is None else [check_step(step) for step in steps]
        with watching(self.native(), progress, "copy"):
            return CopyReport(**_native.copy_to(self.native(), into.native(), wanted, take_over))

    def fork(
        self,
        destination: str | os.PathLike[str] | Store | Any,
        *,
        step: int | None = None,
        share: bool = True,
        progress: Progress = None,
    ) -> Store:
        """Begins a new run in ``destination`` with ``step`` of this store, or the latest, and returns its store.

        The fork has that step and the base of its chain, and later saves there are deltas on them. It needs nothing of this store
        afterwards: this store may forget, collect and lose what it likes. On one file system, both share files by hard links, which
        take no space; in one bucket, the storage copies the objects itself; otherwise, or without ``share``, all bytes are transferred
        and checked. Forking again resumes an interrupted fork. ``destination`` is a URL or an open store, as for :meth:`copy_to`. If another
        run has saved there, this is a ``ConflictError``.

        >>> store = Store("memory://fork-example")
        >>> for step in (1, 2, 3):
        ...     _ = store.save({"w": RawTensor("u8", (3,), bytearray([step, 2, 3]))}, step=step)
        >>> sweep = store.fork("memory://fork-example-2", step=2)
        >>> _ = sweep.save({"w": RawTensor("u8", (3,), bytearray([9, 2, 3]))}, step=3)
        >>> sweep.steps, bytes(sweep.load(3)["w"].data), bytes(store.load(3)["w"].data)
        ([2, 3], b'\\t\\x02\\x03', b'\\x03\\x02\\x03')
        """
        into = open_store(destination, None)
        with watching(self.native(), progress, "fork"):
            _native.fork(self.native(), into.native(), None if step is None else check_step(step), share)
        return into

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
        codecs: str | Sequence[str] = (),
        roles: str | Sequence[str] = (),
        precision: str | Sequence[str] = "lossless",
        statistics: bool = False,
        check: Check = None,
        overwrite: bool = False,
        on_unsupported: OnUnsupported = None,
        max_failed_saves: int = 3,
        cache_staged_state_dict: bool = True,
        after_commit: Callable[[Snapshot], object] | None = None,
        changed_rows: RowSource | None = None,
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
            codecs=codecs,
            roles=roles,
            precision=precision,
            statistics=statistics,
            check=check,
            overwrite=overwrite,
            on_unsupported=on_unsupported,
            max_failed_saves=max_failed_saves,
            cache_staged_state_dict=cache_staged_state_dict,
            after_commit=after_commit,
            changed_rows=changed_rows,
        )

    def reader(self, *, step: Step | None = None, process_group: Any = None) -> Reader:
        """Makes a ``storage_reader`` for ``torch.distributed.checkpoint``; see :class:`tensorcask.torch.Reader`."""
        from .torch import Reader

        return Reader(self, step=step, process_group=process_group)


# Number of times that a load of the newest step begins again, because a job has freed the step meanwhile.
_MOST_FREED = 16
_OPEN_STORES = 8
_stores: OrderedDict[Any, Store] = OrderedDict()
_stores_lock = threading.Lock()


def open_store(url: str | os.PathLike[str] | Store, config: Mapping[str, str] | None) -> Store:
    """Returns the store at a URL, still open if it was used recently."""
    if isinstance(url, Store):
        if config is not None:
            raise InvalidValueError("config= needs a URL; this Store is already open")
        return url
    provider = None
    if _source.is_obstore(url):
        url, theirs, provider = _source.of_obstore(url)
        config = {**theirs, **(config or {})}
    text, config = _source.check_url(url), text_values(config, "config")
    # An open store keeps its provider alive, so that no other provider gets the same id.
    key = (_native.absolute_url(text), tuple(sorted(config.items())), id(provider))
    with _stores_lock:
        store = _stores.pop(key, None) or Store(key[0], config, credential_provider=provider)
        _stores[key] = store
        while len(_stores) > _OPEN_STORES:
            _stores.popitem(last=False)
    return store
