"""Detection of stores by the path that DCP gets without a ``storage_reader`` or ``storage_writer``.

PyTorch tries a fixed list of storages and has no registry. :func:`install` puts one more storage before that list.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import _storage_utils, state_dict_loader, state_dict_saver

from . import _native
from ._foreign import is_store
from ._handle import StoreHandle as Store
from ._steps import step_in

_log = logging.getLogger("tensorcask")

# Modules of PyTorch that hold the function which chooses a storage.
_MODULES = (_storage_utils, state_dict_loader, state_dict_saver)
_NAME = "_storage_setup"


@dataclass(frozen=True)
class StoreChoice:
    """Store that a checkpoint id belongs to, and the options of its writers."""

    store: Store
    options: Mapping[str, Any]
    # Whether the id is the store itself, and names no step.
    is_whole_store: bool


class Detection:
    """Stores that were registered, and stores that exist."""

    def __init__(self) -> None:
        self._registered: dict[str, tuple[Store, Mapping[str, Any]]] = {}
        self._found: dict[str, Store] = {}

    def add(self, stores: Sequence[Store], options: Mapping[str, Any]) -> None:
        """Adds stores that need not exist yet."""
        self._registered.update({_absolute(store.url): (store, options) for store in stores})

    def choose(self, checkpoint_id: str | os.PathLike[str]) -> StoreChoice | None:
        """The store of a checkpoint id: a registered one, or one that exists. None leaves the id to PyTorch."""
        whole = _absolute(os.fsdecode(checkpoint_id))
        parent = whole.rpartition("/")[0]
        for url, is_whole_store in ((whole, True), (parent, False)):
            if url in self._registered:
                store, options = self._registered[url]
                return StoreChoice(store, options, is_whole_store)
        names_step = step_in(whole) is not None
        for url, is_whole_store in ((parent, False), (whole, True)):
            # A remote path without a step costs no request.
            existing = self._existing(url) if url and (names_step or "://" not in url) else None
            if existing is not None:
                return StoreChoice(existing, {}, is_whole_store)
        return None

    def _existing(self, url: str) -> Store | None:
        if url in self._found:
            return self._found[url]
        if "://" not in url and not is_store(url):
            return None
        try:
            store = Store(url)
            store.native().snapshots()
        except (_native.NotFoundError, _native.UnsupportedError, _native.InvalidArgumentError):
            return None
        except _native.StorageError as error:
            if "://" not in url:
                raise
            # The id may be of another storage, which needs other credentials.
            _log.warning("cannot tell whether %s is a store, so PyTorch's own storages are tried: %s", url, error)
            return None
        self._found[url] = store
        return store


def install(make: Callable[[str | os.PathLike[str], bool], Any]) -> None:
    """Asks a function for a storage before PyTorch's own list is tried. It gets the id and whether a reader is wanted,
    and returns None to leave the id to PyTorch."""
    if any(not hasattr(module, _NAME) for module in _MODULES):
        raise _native.UnsupportedError("this version of PyTorch chooses storages in another way. Pass storage_reader= and storage_writer=")
    theirs = _MODULES[0].__dict__[_NAME]
    if hasattr(theirs, "tensorcask_replaces"):
        return

    @functools.wraps(theirs)
    def choose(storage: Any, checkpoint_id: str | os.PathLike[str] | None, reader: bool = False) -> Any:
        found = make(checkpoint_id, reader) if storage is None and checkpoint_id else None
        return theirs(found if found is not None else storage, checkpoint_id, reader)

    choose.tensorcask_replaces = theirs  # type: ignore[attr-defined]
    for module in _MODULES:
        setattr(module, _NAME, choose)
    _install_in_processes(make)


def uninstall() -> None:
    """Undoes :func:`install`."""
    for module in _MODULES:
        ours = getattr(module, _NAME)
        setattr(module, _NAME, getattr(ours, "tensorcask_replaces", ours))
    if (executor := _process_executor()) is not None:
        executor.execute_save = getattr(executor.execute_save, "tensorcask_replaces", executor.execute_save)


def _process_executor() -> Any:
    try:
        from torch.distributed.checkpoint._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
    except ImportError:
        return None
    return _ProcessBasedAsyncCheckpointExecutor


def _install_in_processes(make: Callable[[str | os.PathLike[str], bool], Any]) -> None:
    """The process of an asynchronous save has registered nothing, so it gets the writer."""
    executor = _process_executor()
    if executor is None:
        return
    theirs = executor.execute_save

    @functools.wraps(theirs)
    def execute_save(self: Any, staged: Any, **options: Any) -> Any:
        checkpoint_id = options.get("checkpoint_id")
        if options.get("storage_writer") is None and checkpoint_id:
            options["storage_writer"] = make(checkpoint_id, False)
        return theirs(self, staged, **options)

    execute_save.tensorcask_replaces = theirs  # type: ignore[attr-defined]
    executor.execute_save = execute_save


def _absolute(url: str) -> str:
    return _native.absolute_url(url).rstrip("/")
