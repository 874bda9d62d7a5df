"""Orbax checkpoints in a tensorcask store, for API v1 of Orbax (``orbax.checkpoint.experimental.v1``).

    with ocp.training.Checkpointer("/ckpt") as checkpointer:
        checkpointer.save_checkpointables(step, {"state": State(tree)})
        tree = checkpointer.load_checkpointables(step, {"state": State(tree)})["state"].tree

:class:`State` is a ``StatefulCheckpointable``, so Orbax needs no handler for it, and takes it under any name: also in
``ocp.save_checkpointables`` and ``ocp.load_checkpointables``, beside other checkpointables. ``Checkpointer.save`` and
``load`` take plain trees only. They write Orbax's own format.

The copy of the arrays, the store, the marker in the folder of a step, and saves through the engine are those of
:mod:`tensorcask.orbax`. The store of the checkpointable ``state`` is ``<folder of the checkpointer>/tensorcask``, and
``tensorcask-<name>`` for another name. :func:`tidy` takes a ``Checkpointer``, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from ._store import Store
from .engine import Engine
from .orbax import Restore, Save, _begin_save, _restore, tidy

__all__ = ["State", "tidy"]


@dataclasses.dataclass
class State:
    """A tree to save, or to load. ``load`` replaces ``tree`` by the stored tree, in the form and the sharding of the former one
    (``jax.ShapeDtypeStruct`` is enough), or as nested dicts of numpy arrays if there was none.

    ``store``: the store, if not beside the steps. ``step``: needed if the folder's name is not a step. ``options``: those of
    :meth:`tensorcask.Store.save`. ``engine``: saves and loads through this engine, which has the store and its own options.
    """

    tree: Any = None
    store: Store | str | None = None
    step: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Engine | None = None

    async def save(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax. Copies the tree. The returned awaitable saves the copy."""
        finish = _begin_save(Path(os.fspath(directory.path)), Save(self.tree, self.store, self.step, self.options, self.engine))

        async def finish_in_folder() -> None:
            await directory.await_creation()
            await asyncio.to_thread(finish)

        return finish_in_folder()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax. Reads the tree at once, because Orbax hides the error of an awaitable behind another."""
        self.tree = _restore(Path(os.fspath(directory)), Restore(self.tree, self.store, self.engine))
        return asyncio.sleep(0)
