"""One object for a training run: what it saves, how, and where to go on."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from . import _native, _ranks
from ._errors import InvalidValueError
from ._hosts import gather
from ._options import Step, check_step
from ._preemption import Preemption
from ._run_parts import Parts, has_state
from ._run_saver import OneByOne, ThroughEngine, can_run_engine, checked_options
from ._store import Store
from .engine import Engine

__all__ = ["Run"]

_log = logging.getLogger("tensorcask")


class Run:
    """A training run: saves models, optimizers and all else that a training continues with, and resumes it in place.

        with tensorcask.Run("s3://bucket/run42", model=model, optimizer=optimizer, scheduler=scheduler) as run:
            for step in range(run.resume(), steps):
                loss = train(step)
                if step % 100 == 0:
                    run.save(step, loss=loss)

    The random states of this process are always part of the state: those of Python, numpy and torch, and of the current CUDA
    device. A resumed training continues bit for bit, if its data does.

    With ``torch.distributed``, each rank makes its run after ``init_process_group``, and all ranks call each method together. Tensors of
    models and optimizers are stored once (DDP), or each rank stores its shards (FSDP2, tensor parallelism). Another number of ranks
    can resume them. All other parts, and the random states, are each rank's own.

    Args:
        url: Path or URL of the store; without the engine also an open :class:`Store`, or a store of obstore.
        model: A ``torch.nn.Module``. Its parameters and buffers are filled in place.
        optimizer: A ``torch.optim.Optimizer`` of this model, or a list of several.
        scheduler: A learning rate schedule, or a list of several.
        scaler: A ``torch.amp.GradScaler``.
        loader: A data loader with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``. Another number of ranks
            starts it anew.
        engine: Whether to save through :class:`Engine`: in the background, through shared memory. ``"auto"`` does so on Linux with
            ``/dev/shm``, unless the store is in memory or already open. Without it, a save is durable when it returns, and only one
            rank can save.
        others: Further parts by name: modules, optimizers, objects with ``state_dict`` and ``load_state_dict``, generators of torch,
            or lists of these. None stands for a part that this run does not have. All other keywords are options of
            :class:`Engine` (without it, of :meth:`Store.save`), such as ``keep_last``, ``policy`` and ``precision``.

    A snapshot has ``model`` and ``optimizer``, whose tensors have the names of ``torch.distributed.checkpoint.state_dict``, and ``rank_0`` and so
    on with the values of each rank. A model of another name has its own ``model`` and ``optimizer`` below that name. Tensors of
    values are stored as bytes, without deltas: make a large one a buffer of a module.

    Raises:
        UnsupportedError: An optimizer of parameters that no model has; FSDP1; several ranks without the engine; no engine here,
            although it was asked for.
        InvalidArgumentError: A part that has no state, or an unknown option.

    >>> import torch
    >>> def started():
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     return model, optimizer, Run("memory://run-example", model=model, optimizer=optimizer)
    >>> model, optimizer, run = started()
    >>> with run:
    ...     for step in range(run.resume(), 3):
    ...         loss = model(torch.ones(4, 2)).square().sum()
    ...         loss.backward()
    ...         optimizer.step()
    ...         saved = run.save(step, loss=loss, epoch=1)
    >>> again, optimizer, run = started()
    >>> run.resume(), torch.equal(again.weight, model.weight), run.facts["epoch"]
    (3, True, 1)
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store | Any,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        engine: bool | Literal["auto"] = "auto",
        **others: Any,
    ) -> None:
        if engine not in (True, False, "auto"):
            raise InvalidValueError(f"engine={engine!r}: use True, False or 'auto'")
        through_engine = can_run_engine(url) if engine == "auto" else bool(engine)
        known = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}
        named = known | {name: value for name, value in others.items() if has_state(value)}
        options = checked_options({name: value for name, value in others.items() if name not in named}, through_engine)
        self._parts = Parts(named)
        rank, world = _place_of_process()
        # Facts of the step that `resume` has loaded, such as `loss`.
        self.facts: dict[str, Any] = {}
        self._saver = ThroughEngine(url, rank, world, options) if through_engine else OneByOne(url, world, options)
        self._preemption: Preemption | None = None
        # Whether a resume has failed, which may have filled a part of the state.
        self._is_mixed = False
        self._has_ended = False

    @property
    def store(self) -> Store:
        """The store, for reading, pinning and upkeep. Saves that the engine has not committed yet are not in it."""
        return self._saver.store

    @property
    def engine(self) -> Engine | None:
        """The engine, or None if this run saves without it."""
        return self._saver.engine

    def resume(self, step: Step = "latest") -> int:
        """Fills all parts from the newest step that all ranks can load, or from a given one. Returns the number of the next step: that
        step plus 1, or 0 if no step is saved.

        From then on, saves may replace the later steps of the store.

        Raises:
            NotFoundError: The given step is not saved.
            TemplateError: The step has other tensors, shapes or parts than this run. Never take that for a first start.
            CorruptionError: The given step is damaged. Without ``step``, an older step is loaded, with a warning.
        """
        parts = self._parts

        def template(saved: Mapping[str, Any]) -> dict[str, Any]:
            self._is_mixed = True
            parts.check_saved(saved, self._saver.rank)
            return parts.tensors(saved)

        with _ranks.untouched(optimizer for _, optimizers in parts.models.values() for optimizer in optimizers):
            found = self._saver.load(template, step)
            if found is not None:
                parts.fill_models(found.state)
        if found is not None:
            parts.fill_values(found, self._saver.world)
        self._is_mixed = False
        self.facts = {} if found is None else found.user
        return 0 if found is None else found.step + 1

    def save(self, step: int, **facts: Any) -> bool:
        """Saves all parts as a step, between two steps of the optimizer. Everything may change as soon as it returns.

        ``facts``: numbers, text, or tensors of one element, which become columns of the catalog; on several ranks, those of rank 0. After
        a restart, :attr:`facts` has those of the step that was resumed.
        Returns whether the step was saved: False only if no slot of the engine was free and ``back_pressure`` says to skip.

        With the engine, the step survives the end of this process, and is in the store once the agent has committed it. A later failure is
        logged by the next save.

        Raises:
            ConflictError: The store has this step or later ones, and this run has not resumed: a wrong URL, or a forgotten
                :meth:`resume`. ``overwrite=True`` of the run allows it. Also if the last :meth:`resume` has failed.
            FencedError: Another job has taken the store over.
            StorageError: The store, or the shared memory, failed or is full.
        """
        number = check_step(step)
        if self._is_mixed:
            raise _native.ConflictError(
                f"step {step} is not saved: the last resume has failed, and may have filled a part of the state. Resume a step first"
            )
        own = {"random": _ranks.random_states(), "world": self._saver.world, "parts": self._parts.values_now()}
        return self._saver.save(self._parts.tensors(), own, number, facts)

    def best(self, fact: str, mode: Literal["min", "max"] = "min") -> int:
        """Returns the live step with the least (or greatest) value of a fact, the newest of equal ones: ``run.resume(run.best("loss"))``.

        Waits until the last save is in the store. Steps whose fact is no number or not finite do not count.

        Raises:
            NotFoundError: No live step has such a number.
        """
        if mode not in ("min", "max"):
            raise InvalidValueError(f"mode={mode!r}: use 'min' or 'max'")
        self._saver.wait("durable")
        found = _best(self.store, fact, mode) if self._saver.rank == 0 else None
        # Another rank may see another store.
        told = gather(found, self._saver.rank, self._saver.world) or [found]
        if told[0] is None:
            raise _native.NotFoundError(f"no step of {self.store.url} has a finite number as the fact `{fact}`")
        step: int = told[0]
        return step

    def preempted(self, grace: float = 25.0) -> bool:
        """Whether the end of any rank's process is announced by SIGTERM or SIGUSR1. Call it once per step, on all ranks::

            stop = run.preempted()
            if stop or step % 100 == 0:
                run.save(step)
            if stop:
                break

        From the first call on, these signals no longer end the process. ``grace``: seconds from the signal to the end of the process; leave some of
        the scheduler's time. The ``with`` block then waits no longer than that for the last save. Call it in the main thread.
        """
        if self._preemption is None:
            signals = (signal.SIGTERM, signal.SIGUSR1)
            self._preemption = Preemption(self._saver, signals, grace, None, poll=5.0)
        return self._preemption.agree()

    def finish(self) -> None:
        """Waits until all saves are in the store, frees shared memory, and ends the run. Raises an error if the last save has failed.

        After an announced end of the process, waits only for the time that is left. The agent then goes on, and so does the next start.
        """
        if self._has_ended:
            return
        preemption = self._preemption
        if preemption is not None and preemption.requested:
            try:
                self._saver.finish(preemption.time_left())
            except _native.StorageError as error:
                _log.warning("%s: %s", preemption.reason, error)
        else:
            self._saver.finish(None)
        self.close()

    def close(self) -> None:
        """Ends the run at once. No save is lost: the agent goes on, and the next start resumes from shared memory or from the store."""
        self._has_ended = True
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        self._saver.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()


def _place_of_process() -> tuple[int, int]:
    """Rank and number of ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise InvalidValueError(f"WORLD_SIZE is {world}, but torch.distributed is not initialized: call init_process_group before the run is made")
    return 0, 1


def _best(store: Store, fact: str, mode: str) -> int | None:
    """The live step with the least or greatest finite number; the newest of equal ones."""
    found: tuple[float, int] | None = None
    try:
        snapshots = store.snapshots()
    except _native.NotFoundError:
        # No step is saved.
        return None
    for info in snapshots:
        value = info.user.get(fact)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            order = float(value) if mode == "min" else -float(value)
            if found is None or order <= found[0]:
                found = (order, info.step)
    return None if found is None else found[1]
