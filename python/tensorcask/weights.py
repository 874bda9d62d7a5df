"""Policy weights from a trainer to inference engines, for reinforcement learning.

The trainer saves each version of its weights into a store. Each inference engine holds one version, and reads the difference::

    # trainer
    weights = tensorcask.weights.Publisher("s3://bucket/policy", keep_last=4)
    weights.publish(model.state_dict(), version)

    # inference
    policy = tensorcask.weights.Subscriber("s3://bucket/policy", model.state_dict())
    for version in policy.watch():
        model.load_weights(policy.named_tensors())       # as vLLM takes them; SGLang: update_weights_from_tensor

An engine that takes single elements (vLLM's sparse updates, or ``tensor.view(-1)[indices] = values`` on the device) gets them from
``changes``, so that only these are copied to the device::

    for name, change in policy.changes():
        if isinstance(change, tensorcask.weights.Change):
            on_device[name].view(-1)[change.indices.to(device)] = change.values.to(device)
        else:
            on_device[name].copy_(change)

A subscriber keeps a copy of the weights in host memory, and updates it in place: ``named_tensors`` copies nothing. Every byte is compared
with its checksum. A version that is saved again, or was forgotten, is noticed, and the whole state is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import _native, _ranks
from ._frameworks import framework_of
from ._options import Compare, LoadOptions
from ._snapshot import Snapshot
from ._state import flat_arrays
from ._store import Store, open_store
from .engine import Engine

__all__ = ["Change", "Publisher", "Subscriber"]

_log = logging.getLogger("tensorcask")


class Change(NamedTuple):
    """Changed elements of a tensor. ``indices``: their places in the flattened tensor, ascending, as 64-bit integers. ``values``: their
    new values, in the dtype of the tensor. Both are tensors of the framework of the tensor."""

    indices: Any
    values: Any


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

    @property
    def id(self) -> str | None:
        """Id of the snapshot that is held; None as in ``version``."""
        return None if self._held is None else self._held[1]

    def update(self, version: int | None = None) -> int | None:
        """Goes on to a version, by default to the newest. Returns it, or None if it is held already or none is published."""
        snapshot = self._next(version)
        if snapshot is None:
            return None
        self._go_to(snapshot, None)
        return snapshot.step

    def changes(self, version: int | None = None, *, limit: float = 0.25) -> list[tuple[str, Any]]:
        """Goes on to a version as :meth:`update` does, and returns what changed: pairs of a name and a :class:`Change`, or a name and the
        tensor itself, if more than the share ``limit`` of its elements changed. Without a new version, the list is empty.

        An element has changed if one of its bits has. Unchanged tensors are left out; of tied tensors, each name has its pair. After an
        error, and for the first version, the next call returns all tensors whole. The tensors share the memory of this object.

        >>> import numpy as np
        >>> weights = Publisher("memory://changes-of-weights")
        >>> weights.publish({"w": np.float32([1, 2, 3, 4]), "b": np.float32([0])}, 1)
        >>> policy = Subscriber("memory://changes-of-weights", {"w": np.zeros(4, np.float32), "b": np.zeros(1, np.float32)})
        >>> [name for name, _ in policy.changes()]
        ['w', 'b']
        >>> weights.publish({"w": np.float32([1, 2, 9, 4]), "b": np.float32([0])}, 2)
        >>> policy.changes()
        [('w', Change(indices=array([2]), values=array([9.], dtype=float32)))]
        """
        snapshot = self._next(version)
        if snapshot is None:
            return []
        compare = self._go_to(snapshot, Compare(limit))
        if compare is None:
            return list(self.named_tensors())
        tensors = snapshot.tensors()
        # Tied tensors have one entry.
        places_of = {tensors[name].alias_of or name: places for name, places in compare.places.items()}
        changed: list[tuple[str, Any]] = []
        for name, tensor in self.named_tensors():
            stored = self._prefix + name
            places = places_of[tensors[stored].alias_of or stored]
            if places is None:
                changed.append((name, tensor))
            elif places:
                changed.append((name, _change_of(tensor, places)))
        return changed

    def _next(self, version: int | None) -> Snapshot | None:
        """The snapshot of a version; None if it is held already, or none is published."""
        try:
            snapshot = self._store.snapshot("latest" if version is None else version)
        except (_native.NotFoundError, _native.TemplateError):
            if version is None:
                return None
            raise
        return None if self._held == (snapshot.step, snapshot.id) else snapshot

    def _go_to(self, snapshot: Snapshot, compare: Compare | None) -> Compare | None:
        """Returns ``compare``, filled; None if the version was read whole."""
        # After an error the tensors hold parts of two versions.
        held, self._held = self._held, None
        if held is not None and self._is_there(held):
            snapshot.load_with(LoadOptions(out=self._out, have=held[0], compare=compare))
        else:
            snapshot.load(out=self._out)
            compare = None
        self._held = snapshot.step, snapshot.id
        return compare

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
            except (_native.StorageError, _native.NotFoundError, _native.ConflictError) as error:
                if problem is None:
                    _log.warning("%s cannot be read now; looking again every %s s: %s", self._store.url, interval, error)
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
        except (_native.NotFoundError, _native.TemplateError):
            # Nothing was published yet, or only versions are left of which tensors were dropped.
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


def _change_of(tensor: Any, places: bytearray) -> Any:
    """The tensor itself if its framework has no indices."""
    framework = framework_of(tensor)
    if framework == "numpy":
        import numpy as np

        places_in_array = np.frombuffer(places, np.int64)
        return Change(places_in_array, tensor.reshape(-1)[places_in_array])
    if framework != "torch":
        return tensor
    import torch

    indices = torch.frombuffer(places, dtype=torch.int64)
    flat = tensor.detach().reshape(-1)
    # PyTorch does not index all 8-bit types.
    values = flat.view(torch.uint8)[indices].view(flat.dtype) if flat.element_size() == 1 else flat[indices]
    return Change(indices, values)
