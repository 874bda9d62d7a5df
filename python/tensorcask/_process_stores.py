"""Stores and rank writers of this process, for DCP. They keep the bases of deltas when each save unpickles its writer."""

from __future__ import annotations

from typing import Any

from . import _native
from ._handle import StoreHandle as Store
from ._options import WriterOptions

_stores: dict[Any, Store] = {}
_rank_writers: dict[Any, _native.RankWriter] = {}


def shared(store: Store) -> Store:
    """The store of this process that was opened in the same way, or else the given one."""
    return _stores.setdefault(store.key, store)


def rank_writer(store: Store, rank: int, world: int, options: WriterOptions) -> _native.RankWriter:
    """The writer of a rank for this store and these options. It stays open between saves."""
    key = (store.key, rank, world, options)
    if key not in _rank_writers:
        _rank_writers[key] = store.native().rank_writer(rank, world, *options)
    return _rank_writers[key]


def forget_rank_writers() -> None:
    """Drops all rank writers, after a save that was interrupted at an unknown point."""
    _rank_writers.clear()
