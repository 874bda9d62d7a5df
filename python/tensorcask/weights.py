"""Policy weights from a trainer to inference engines, for reinforcement learning.

The trainer saves each version of its weights into a store. Each inference engine holds one version, and reads the difference::

    # trainer
    weights = tensorcask.weights.Publisher("s3://bucket/policy", keep_last=4)
    weights.publish(model.state_dict(), version)

    # inference
    policy = tensorcask.weights.Subscriber("s3://bucket/policy", model.state_dict())
    for version in policy.watch():
        model.load_weights(policy.named_tensors())       # as vLLM takes them; SGLang: update_weights_from_tensor

A subscriber keeps a copy of the weights in host memory, and updates it in place: ``named_tensors`` copies nothing. Every byte is compared
with its checksum. A version that is saved again, or was forgotten, is noticed, and the whole state is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from . import _native, _ranks
from ._state import flat_arrays
from ._store import Store, open_store
from .engine import Engine

__all__ = ["Publisher", "Subscriber"]

_log = logging.getLogger("tensorcask")


class Publisher:
    """Saves versions of weights. ``target``: a store or its URL, with ``options`` of :meth:`tensorcask.Store.save`; or an engine, through
    which :meth:`publish` returns after one copy.

    >>> import numpy as np
    >>> weights = Publisher("memory://weights-example")
    >>> weights.publish({"w": np.zeros(4, np.float32)}, 1)
    >>> policy = Subscriber("memory://weights-example", {"w": np.ones(4, np.float32)})
    >>> policy.update(), dict(policy.named_tensors())
    (1, {'w': array([0., 0., 0., 0.], dtype=float32)})
    """

    def __init__(self, target: Store | Engine | str, **options: Any) -> None:
        self._target = _ranks.open_target(target, options)
        self._options = {"policy": "consecutive", **options}

    def publish(self, weights: Mapping[str, Any], version: int, **facts: Any) -> None:
        """Saves a version. Versions ascend. ``facts`` are the ``user`` facts of the snapshot, such as the step of the trainer."""
        if isinstance(self._target, Engine):
            self._target.save(weights, step=version, user=facts)
        else:
            self._target.save(weights, step=version, user=facts, **self._options)


class Subscriber:
    """Holds one version of weights. ``out``: a state like the published one, on the CPU; it is filled and kept. ``prefix``: beginning of
    names that :meth:`named_tensors` leaves out."""

    def __init__(self, store: Store | str, out: Mapping[str, Any], *, prefix: str = "") -> None:
        self._store, self._out, self._prefix = open_store(store, None), out, prefix
        self._held: tuple[int, str] | None = None
        # Id of the snapshot that could not be read.
        self._damaged: str | None = None

    @property
    def version(self) -> int | None:
        """The version that is held; None before the first update, and after one that failed."""
        return None if self._held is None else self._held[0]

    def update(self, version: int | None = None) -> int | None:
        """Goes on to a version, by default to the newest. Returns it, or None if it is held already or none is published."""
        try:
            snapshot = self._store.snapshot("latest" if version is None else version)
        except _native.NotFoundError:
            if version is None:
                return None
            raise
        if self._held == (snapshot.step, snapshot.id):
            return None
        # After an error the tensors hold parts of two versions.
        held, self._held = self._held, None
        if held is not None and self._is_there(held):
            snapshot.load(out=self._out, have=held[0])
        else:
            snapshot.load(out=self._out)
        self._held = snapshot.step, snapshot.id
        return snapshot.step

    def watch(self, timeout: float | None = None, interval: float = 0.5) -> Iterator[int]:
        """Updates to each new version, and yields it. Versions that are published meanwhile are passed over. Ends after ``timeout``
        seconds without a new one. ``interval``: seconds between two looks at the store.

        Goes on if the storage fails, with a warning, and looks again. After ``timeout`` seconds, the last error is raised. A damaged
        version is passed over: the next one may be whole.
        """
        last, problem = time.monotonic(), None
        while timeout is None or time.monotonic() - last < timeout:
            try:
                version, problem = self._update_past_damage(), None
            except (_native.StorageError, _native.NotFoundError) as error:
                if problem is None:
                    _log.warning("%s does not answer; looking again every %s s: %s", self._store.url, interval, error)
                version, problem = None, error
            if version is None:
                time.sleep(interval)
                continue
            yield version
            last = time.monotonic()
        if problem is not None:
            raise problem

    def _update_past_damage(self) -> int | None:
        try:
            newest = self._store.snapshot()
        except _native.NotFoundError:
            return None
        if newest.id == self._damaged:
            return None
        try:
            return self.update()
        except _native.CorruptionError as error:
            _log.warning("version %s of %s is damaged, and passed over: %s", newest.step, self._store.url, error)
            self._damaged = newest.id
            return None

    def named_tensors(self) -> Iterator[tuple[str, Any]]:
        """Names and tensors, as inference engines load them. They share the memory of this object."""
        if self._held is None:
            raise ValueError("no version is held. Call update() first")
        for name, tensor in flat_arrays(self._out).items():
            if not name.startswith(self._prefix):
                raise ValueError(f"`{name}` does not begin with {self._prefix!r}")
            yield name[len(self._prefix) :], tensor

    def _is_there(self, held: tuple[int, str]) -> bool:
        try:
            return self._store.snapshot(held[0]).id == held[1]
        except _native.NotFoundError:
            return False
