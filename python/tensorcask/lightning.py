"""Lightning checkpoints in a tensorcask store.

Through the engine, a save stops the training for one copy in memory::

    import tensorcask.lightning

    trainer = Trainer(strategy=tensorcask.lightning.DDPStrategy("s3://bucket/run42"))
    trainer.fit(model, ckpt_path=tensorcask.lightning.LATEST)     # from the start, if no step is saved

:class:`ModelParallelStrategy` does the same for FSDP2 and tensor parallelism. Both keep the random states of each rank, so a resumed
training continues bit for bit, if its data does. Hooks of the module and of callbacks may leave out, rename or add tensors of a checkpoint, as
``WeightAveraging`` does. ``ckpt_path`` may also name a file that ``ModelCheckpoint`` wrote.

Without the engine, a plugin saves the checkpoints of any strategy of Lightning, one after the other::

    trainer = Trainer(plugins=[tensorcask.lightning.CheckpointIO("s3://bucket/run42")])
    trainer.fit(model, ckpt_path="checkpoints/epoch=3-step=400.ckpt")

Each checkpoint is a snapshot of its ``global_step``, small where the snapshot is a delta. At the path that Lightning
chose, a small file names the snapshot, so callbacks can list, link, move and delete checkpoints as usual. Deleting or
overwriting the file forgets its snapshot. Through the engine, all files of one step name one snapshot, with all of the state. With the
plugin, a second file for one step goes into a second store beside the first,
``s3://bucket/run42-2`` and so on. A file of weights alone causes this, and so does ``save_last=True``; use
``save_last="link"`` instead.

Values other than tensors, containers, numbers, text and bytes are an error with their path, unless ``on_unsupported``
says otherwise. ``save_hyperparameters`` works with plain values, but not with objects. Loading runs no code.
``LightningModule.load_from_checkpoint`` does not use plugins and cannot read the file: load the state by
:func:`tensorcask.load`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from . import _native, _ranks
from ._files import write_whole
from ._options import check_step
from ._snapshot import Snapshot
from ._store import Store, open_store
from .engine import Engine

__all__ = ["LATEST", "CheckpointIO", "DDPStrategy", "ModelParallelStrategy"]

# A ckpt_path: the newest step that all ranks can load, from memory or from the store; the start of the training, if there is none.
LATEST = "tensorcask:latest"

_log = logging.getLogger("tensorcask")
_FORMAT = "tensorcask"
_MOST_STORES = 16


@dataclass(frozen=True)
class _Marker:
    """The snapshot that a file names."""

    store: str
    step: int
    snapshot: str


class CheckpointIO(_CheckpointIO):  # type: ignore[misc]
    """A plugin for ``Trainer`` and ``Fabric``. ``options``: those of :meth:`tensorcask.Store.save`, such as
    ``policy``."""

    def __init__(self, store: Store | str | os.PathLike[str], **options: Any) -> None:
        first = open_store(store, None)
        self._stores = {first.url: first}
        self._first = first
        # Lightning overwrites files of the same name.
        self._options = {"overwrite": True, **options}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("CheckpointIO does not use storage_options. Pass options to CheckpointIO(...)")
        if "global_step" not in checkpoint:
            raise ValueError(f"{path}: the checkpoint has no global_step, which is the step of its snapshot. Add it")
        step = check_step(checkpoint["global_step"])
        file = Path(path).absolute()
        before = _read(file)
        store = self._store_for(step, file)
        saved = store.save(checkpoint, step=step, user={"file": str(file)}, **self._options)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"format": _FORMAT, "store": store.url, "step": step, "snapshot": saved.id}))
        if before is not None and (before.store, before.step) != (store.url, step):
            self._forget(before)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The state that the file names, or an error. ``weights_only`` has no effect, because loading never runs
        code."""
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} does not exist")
        marker = _read(Path(path))
        if marker is None:
            raise _native.UnsupportedError(f"{path} was not written by tensorcask.lightning. Load it without this plugin")
        store = self._store_at(marker.store)
        snapshot = store.snapshot(marker.step)
        if snapshot.id != marker.snapshot:
            again = f"step {marker.step} of {store.url} was saved again since"
            raise _native.ConflictError(f"{path} names snapshot {marker.snapshot}, but {again}. Use tensorcask.load() for the new snapshot")
        found = snapshot.load(device=map_location if isinstance(map_location, (str, torch.device)) else None)
        if not isinstance(found, dict):
            raise _native.CorruptionError(f"step {marker.step} of {store.url} is not a Lightning checkpoint")
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        file = Path(path).absolute()
        marker = _read(file)
        if marker is not None:
            file.unlink(missing_ok=True)
            self._forget(marker)

    def _forget(self, marker: _Marker) -> None:
        """Forgets the snapshot of a file, if it belongs to this run and was not replaced."""
        if not self._is_ours(marker.store):
            return
        store = self._store_at(marker.store)
        snapshot = _live(store, marker.step)
        if snapshot is not None and snapshot.id == marker.snapshot:
            try:
                store.forget([marker.step])
            except _native.Error as error:
                _log.warning("step %d stays in %s: %s", marker.step, store.url, error)

    def _is_ours(self, url: str) -> bool:
        rest = url.removeprefix(self._first.url)
        return url == self._first.url + rest and (rest == "" or rest[0] == "-" and rest[1:].isdigit())

    def _store_at(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = self._first.at(url) if self._is_ours(url) else open_store(url, None)
        return self._stores[url]

    def _store_for(self, step: int, file: Path) -> Store:
        """The first store in which no other file names the step."""
        for number in range(1, _MOST_STORES + 1):
            store = self._store_at(self._first.url if number == 1 else f"{self._first.url}-{number}")
            snapshot = _live(store, step)
            if snapshot is None:
                return store
            other = Path(str(snapshot.user.get("file", "")))
            if other == file or _read(other) != _Marker(store.url, step, snapshot.id):
                return store
        raise _native.ConflictError(f"{_MOST_STORES} files name step {step}. Delete some of them")


class _ThroughEngine(Strategy):  # type: ignore[misc]
    """The part of a strategy that saves and loads through an engine, on all ranks."""

    # Of the strategies that run several processes.
    global_rank: int
    world_size: int

    def _begin(self, store: str | os.PathLike[str], engine: Mapping[str, Any] | None) -> None:
        self._store, self._engine_options = store, dict(engine or {})
        self._running: Engine | None = None
        # Step of the last save, and whether it had the states of the optimizers.
        self._last_step: int | None = None
        self._last_is_whole = False
        # Steps of deleted files that were not in the store yet.
        self._unwanted: set[int] = set()

    @property
    def engine(self) -> Engine:
        """The engine of this rank, which starts at its first use."""
        if self._running is None:
            self._running = Engine(self._store, rank=self.global_rank, world=self.world_size, **self._engine_options)
        return self._running

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: tensors of the model and of the optimizers are filled in place."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = get_model_state_dict(self._module())
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        found = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if _ranks.needs_closure(found):
            state: dict[str, Any] = found.state_dict()
            return state
        return _ranks.optimizer_state(self._module(), found)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what hooks have left in the checkpoint. Tensors of the model itself are filled already."""
        saved = checkpoint["state_dict"]
        if strict and (missing := get_model_state_dict(self._module()).keys() - saved.keys()):
            raise _native.TemplateError(
                f"the saved state has no tensor `{min(missing)}` of the model. Add it in on_load_checkpoint, or set strict_loading=False"
            )
        # PyTorch renames the keys of the mapping that it gets.
        set_model_state_dict(self._module(), dict(saved), options=StateDictOptions(strict=strict))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if _ranks.needs_closure(optimizer):
                optimizer.load_state_dict(saved)
            else:
                _ranks.set_optimizer_state(saved, self._module(), optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("this strategy does not use storage_options. Pass options of the engine to it")
        step = check_step(checkpoint["global_step"])
        is_whole = "optimizer_states" in checkpoint
        # A second file of a step names the same snapshot. Weights alone are part of a whole state.
        if step != self._last_step or is_whole and not self._last_is_whole:
            state = {key: value for key, value in checkpoint.items() if key in _SHARED}
            others = {key: value for key, value in checkpoint.items() if key not in _SHARED}
            _ranks.save(self.engine, state, {"checkpoint": others, "random": _ranks.random_states()}, step)
            self._last_step, self._last_is_whole = step, is_whole
        if self.is_global_zero:
            self._unwanted.discard(step)
            self._forget_unwanted()
            file = Path(filepath).absolute()
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"format": _FORMAT, "store": self.engine.store.url, "step": step, "snapshot": _ANY}))

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        step: int | str | None = None
        if self.is_global_zero:
            marker = None if checkpoint_path == LATEST else _read(Path(checkpoint_path))
            step = "latest" if checkpoint_path == LATEST else None if marker is None else marker.step
        step = self.broadcast(step)
        if step is None:
            raise _native.UnsupportedError(f"{checkpoint_path} was not written by this strategy. Load it with another one")
        # A trainer that tests a model may still have the optimizers of an earlier training.
        lightning_module: Any = self.lightning_module
        is_training = lightning_module.trainer.state.fn == TrainerFn.FITTING
        module, optimizers = self._module(), self.optimizers if is_training else []

        # Names and optimizers of the saved state that have no tensors here to fill.
        unknown: set[str] = set()
        unfilled: set[int] = set()

        def template(saved: Mapping[str, Any]) -> dict[str, Any]:
            # Hooks may have left out or renamed some.
            names, own = saved["state_dict"].keys(), get_model_state_dict(module)
            unknown.update(names - own.keys())
            target = {"state_dict": {name: tensor for name, tensor in own.items() if name in names}}
            if "optimizer_states" not in saved:
                return target
            states = list(zip(optimizers, saved["optimizer_states"], strict=False))
            unfilled.update(at for at, (optimizer, _) in enumerate(states) if _ranks.needs_closure(optimizer))
            templates = [{} if at in unfilled else _ranks.optimizer_template(state, module, found) for at, (found, state) in enumerate(states)]
            return {**target, "optimizer_states": templates}

        with _ranks.untouched(optimizers):
            found = _ranks.load(self.engine, template, step, partial=True)
            if found is None:
                return _Nothing({"pytorch-lightning_version": pl.__version__})
        state = found.state
        if unknown or unfilled:
            whole = self._whole(found.step, unknown, unfilled)
            state["state_dict"] = {name: whole["state_dict"].get(name, tensor) for name, tensor in state["state_dict"].items()}
            for at, states in whole["optimizer_states"].items():
                state["optimizer_states"][at] = states
        if found.is_own:
            _ranks.set_random_states(found.own["random"])
        return {**state, **found.own["checkpoint"]}

    def _whole(self, step: int, names: set[str], optimizers: set[int]) -> dict[str, Any]:
        """Tensors of these names and states of these optimizers, as new tensors on all ranks. Of what is divided among ranks there are none."""
        sent: list[Any] = [None]
        if self.is_global_zero:
            state = self.engine.restore(step).state
            sent[0] = {
                "state_dict": {name: state["state_dict"][name] for name in names},
                "optimizer_states": {at: state["optimizer_states"][at] for at in optimizers},
            }
        found: dict[str, Any] = self.broadcast(sent[0])
        return found

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        if not self.is_global_zero:
            return
        file = Path(filepath).absolute()
        marker = _read(file)
        if marker is None or marker.store != self.engine.store.url:
            return
        file.unlink(missing_ok=True)
        others = [other for path in file.parent.iterdir() if (other := _read(path)) is not None]
        if not any((other.store, other.step) == (marker.store, marker.step) for other in others):
            self._unwanted.add(marker.step)
        self._forget_unwanted()

    def teardown(self) -> None:
        try:
            if self._running is not None:
                engine, self._running = self._running, None
                trainer = getattr(self.lightning_module, "trainer", None)
                if trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED:
                    engine.finish()
                    self._forget_unwanted(engine)
                engine.close()
        finally:
            super().teardown()

    def _module(self) -> Any:
        return self.model if self.model is not None else self.lightning_module

    def _forget_unwanted(self, engine: Engine | None = None) -> None:
        """Forgets snapshots without a file, as soon as they are in the store."""
        store = (engine or self.engine).store
        for step in sorted(self._unwanted):
            if _live(store, step) is not None:
                try:
                    store.forget([step])
                except _native.Error as error:
                    _log.warning("step %d stays in %s: %s", step, store.url, error)
                self._unwanted.discard(step)


class DDPStrategy(_ThroughEngine, _DDPStrategy):  # type: ignore[misc]
    """DDP that saves through the engine, on one process or many.

    ``store``: URL of the store. ``engine``: options of :class:`tensorcask.Engine`. ``options``: those of Lightning's ``DDPStrategy``.
    """

    def __init__(self, store: str | os.PathLike[str], engine: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._begin(store, engine)


class ModelParallelStrategy(_ThroughEngine, _ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 and tensor parallelism, saved through the engine: each rank saves its shards. Arguments as of :class:`DDPStrategy`."""

    def __init__(self, store: str | os.PathLike[str], engine: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._begin(store, engine)


class _Nothing(dict[str, Any]):
    """What is loaded if no step is saved. Lightning restores nothing from a checkpoint that is false."""

    def __bool__(self) -> bool:
        return False


_SHARED = ("state_dict", "optimizer_states")
# In the file of a snapshot that was not in the store yet.
_ANY = ""


def _live(store: Store, step: int) -> Snapshot | None:
    try:
        return store.snapshot(step)
    except _native.NotFoundError:
        return None


def _read(file: Path) -> _Marker | None:
    """The snapshot that a file names; None for other files."""
    try:
        with open(file, "rb") as opened:
            told = json.loads(opened.read(4096))
        return _Marker(str(told["store"]), int(told["step"]), str(told["snapshot"])) if told["format"] == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
