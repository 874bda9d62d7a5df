"""Megatron Core's distributed checkpoints in a tensorcask store.

    from tensorcask import megatron

    megatron.save(sharded_state_dict, "ckpt/iter_0000100")
    state = megatron.load(sharded_state_dict, megatron.latest("ckpt"))

Through the engine, a save stops the training for one copy in memory, and a killed job resumes from memory::

    engine = tensorcask.Engine("ckpt/tensorcask", rank=dist.get_rank(), world=dist.get_world_size())
    calls = megatron.core.dist_checkpointing.strategies.async_utils.AsyncCallsQueue()
    calls.schedule_async_request(megatron.save(sharded_state_dict, "ckpt/iter_0000100", engine=engine))
    calls.maybe_finalize_async_calls()      # at each step, as Megatron-LM does: writes the tracker once the step is in the store
    folder = megatron.latest("ckpt", engine=engine)
    state = megatron.load(sharded_state_dict, folder, engine=engine)

Code that calls ``megatron.core.dist_checkpointing`` itself passes ``sharded_strategy=megatron.SaveStrategy()`` to save, or
``megatron.SaveStrategy(engine=engine)`` and ``async_sharded_save=True``. It passes ``sharded_strategy=megatron.LoadStrategy()``
to load. A script that calls ``megatron.training.pretrain``, such as ``pretrain_gpt.py``, calls :func:`install` first.
Tensors and sharded objects of all ranks become one snapshot in the store.
The parallel layout may change between save and load, as with Megatron's own formats. Tested with Megatron Core 0.16 to 0.19.

The folder's name is the step, such as ``iter_0000100``. The store is ``<parent of the folder>/tensorcask``, unless
``TENSORCASK_URL`` or an argument names another store. The folder holds Megatron's ``metadata.json`` and ``common.pt``,
and a marker, ``tensorcask.json``, which names the snapshot. The store keeps ``common.pt`` too, so :func:`load` can
rebuild a lost folder. Megatron Core 0.19 no longer writes ``common.pt``, but reads it; this module writes it then.

Values in sharded objects are stored without pickle (``spec/tree.md``): tensors, arrays, containers, dtypes, numbers,
text and bytes. An error names the path of any other value. Megatron itself writes and reads ``common.pt`` by
``torch.save`` and ``torch.load``.

| variable | meaning |
|---|---|
| ``TENSORCASK_URL`` | the store |
| ``TENSORCASK_POLICY`` | policy of :meth:`tensorcask.Store.save` |
| ``TENSORCASK_EVERY`` | *n*: every *n*-th save is a base, the others are deltas; short for the policy ``intermittent:n`` |
| ``TENSORCASK_OBJECTIVE`` | objective of :meth:`tensorcask.Store.save` |
| ``TENSORCASK_CODECS`` | rules that assign codecs, separated by spaces |
| ``TENSORCASK_ROLES`` | rules that state roles of tensors, separated by spaces |
| ``TENSORCASK_PRECISION`` | words of its precision, separated by spaces |

Arguments override variables. All ranks need the same settings.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shutil
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, package_info
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, maybe_load_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from . import _dtypes, _markers, _native, _ranks
from ._dcp_reader import read_tensors, resolve
from ._files import write_whole
from ._reports import TensorInfo
from ._shard import Shard, Shards
from ._snapshot import Snapshot
from ._steps import step_of
from ._store import Store
from .engine import Engine
from .torch import Writer

__all__ = ["BACKEND", "TRACKER", "LoadStrategy", "SaveStrategy", "install", "latest", "load", "save"]

BACKEND = "tensorcask"
TRACKER = "latest_checkpointed_iteration.txt"
_VERSION = 1
_COMMON = "common.pt"
# Key of the object that holds the plain values since Megatron Core 0.19. Earlier versions write common.pt themselves.
_COMMON_STATE = "common_state" if tuple(map(int, package_info.VERSION[:2])) >= (0, 19) else None
# File that marks a folder of Megatron's own format.
_OWN_METADATA = ".metadata"
# Keys of objects that another rank saves, too.
_COPIES = "tensorcask.copies_of_rank_"
# Seconds between two looks at the state of a save.
_INTERVAL = 0.05
_VARIABLES = {"policy": "TENSORCASK_POLICY", "objective": "TENSORCASK_OBJECTIVE"}
# Words separated by spaces.
_LISTS = {"codecs": "TENSORCASK_CODECS", "roles": "TENSORCASK_ROLES", "precision": "TENSORCASK_PRECISION"}


def save(
    sharded_state_dict: Any,
    checkpoint_dir: str | os.PathLike[str],
    *,
    strategy: SaveStrategy | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Any:
    """Saves by ``dist_checkpointing.save`` into a store, then writes the tracker file beside the folder. Call it on all
    ranks.

    Pass the same ``strategy`` to each save, or none: the process then keeps one. With ``engine``, returns an ``AsyncRequest`` for
    Megatron's queue of asynchronous calls; the tracker file is written when it is finalized. ``options`` are those of
    ``dist_checkpointing.save``.
    """
    if engine is not None and strategy is not None:
        raise TypeError("pass a strategy or an engine: SaveStrategy(engine=engine) has both")
    folder = Path(checkpoint_dir)
    step = _step(folder)
    chosen = SaveStrategy(engine=engine) if engine is not None else strategy or _default()
    uses = _uses(chosen, SaveStrategy)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _unmark(folder)
    dist.barrier()

    def write_tracker() -> None:
        if dist.get_rank() == 0:
            write_whole(folder.parent / TRACKER, str(step))
        dist.barrier()

    if engine is not None:
        options["async_sharded_save"] = True
    request: Any = dist_checkpointing.save(sharded_state_dict, str(folder), sharded_strategy=chosen, **options)
    if _uses(chosen, SaveStrategy) == uses:
        if dist.get_rank() == 0:
            _unmark(folder)
        raise _native.UnsupportedError(f"{folder}: {_ignored('wrote its own files')}")
    if request is not None:
        request.add_finalize_fn(write_tracker)
        return request
    write_tracker()
    return None


def load(
    sharded_state_dict: Any,
    checkpoint_dir: str | os.PathLike[str],
    *,
    strategy: LoadStrategy | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Any:
    """Loads by ``dist_checkpointing.load`` from a store, or with ``engine`` from the nearest place. Call it on all ranks. A missing
    folder is rebuilt."""
    if engine is not None and strategy is not None:
        raise TypeError("pass a strategy or an engine: LoadStrategy(engine=engine) has both")
    folder = Path(checkpoint_dir)
    strategy = strategy or LoadStrategy(engine=engine)
    uses = _uses(strategy, LoadStrategy)
    # Rank 0 rebuilds a shared folder. If the folder is not shared, every rank does; repeating it is harmless.
    for is_mine in (dist.get_rank() == 0, True):
        failures: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, _inner(strategy).try_folder(folder) if is_mine else None)
        failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None:
            raise failure
    loaded = dist_checkpointing.load(sharded_state_dict, str(folder), sharded_strategy=strategy, **options)
    if _uses(strategy, LoadStrategy) == uses:
        raise _native.UnsupportedError(f"{folder}: {_ignored('read its own files')}")
    return loaded


def latest(root: str | os.PathLike[str], *, engine: Engine | None = None) -> Path:
    """The folder of the iteration that the tracker file names. With ``engine``, that of the newest iteration that all ranks can load;
    it may be in memory only. ``NotFoundError`` if there is none."""
    if engine is not None:
        step = engine.agree()
        if step is None:
            raise _native.NotFoundError(f"{root}: no iteration is saved")
        return Path(root) / f"iter_{step:07}"
    tracker = Path(root) / TRACKER
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise ValueError(f"{tracker}: {text!r} is not the number of an iteration")
    return Path(root) / f"iter_{int(text):07}"


def install(*, save: SaveStrategy | None = None, load: LoadStrategy | None = None) -> None:
    """Makes ``megatron.training`` save and load through these strategies, or through new ones. Call it before
    ``megatron.training.pretrain``, such as at the start of ``pretrain_gpt.py``, on all ranks.

    ``pretrain`` itself takes no strategy. Use ``--ckpt-format torch_dist``; with other formats, Megatron would write its own
    files, so they are refused. ``--async-save`` needs ``save=SaveStrategy(engine=engine)``. Checkpoints that Megatron has
    saved in the format ``torch_dist`` still load.
    """
    from megatron.training import checkpointing  # pyright: ignore[reportMissingImports] - not in every wheel

    given = {"TorchDistSaveShardedStrategy": save or SaveStrategy(), "TorchDistLoadShardedStrategy": load or LoadStrategy()}
    if not all(hasattr(checkpointing, name) for name in (*given, "generate_state_dict")):
        raise _native.UnsupportedError(f"megatron.training of Megatron Core {package_info.__shortversion__} makes its strategies in another way")
    for name, strategy in given.items():
        setattr(checkpointing, name, lambda *_, _strategy=strategy, **__: _strategy)
    generate = checkpointing.generate_state_dict

    @functools.wraps(generate)
    def generate_state_dict(args: Any, *rest: Any, **options: Any) -> Any:
        if args.ckpt_format != "torch_dist":
            raise _native.UnsupportedError(f"--ckpt-format {args.ckpt_format} does not use tensorcask. Use --ckpt-format torch_dist")
        return generate(args, *rest, **options)

    checkpointing.generate_state_dict = generate_state_dict


# Megatron Core 0.17 and later ignore a strategy that is not of this class.
class SaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A ``sharded_strategy`` for ``dist_checkpointing.save``. Use one strategy for all saves, so that deltas find their
    base.

    ``store``: a store or its URL. ``options``: those of :class:`tensorcask.torch.Writer`; they override the variables.
    ``engine``: saves go through this engine, with its store and options; ``async_sharded_save=True`` needs it.
    """

    def __init__(self, store: Store | str | None = None, *, engine: Engine | None = None, **options: Any) -> None:
        super().__init__(BACKEND, _VERSION)
        if engine is not None and (store is not None or options):
            raise TypeError("pass the store and the options of saves to tensorcask.Engine")
        self._store, self._engine = store, engine
        # Megatron overwrites the folder of an iteration that it reaches again.
        self._options = {"overwrite": True, **_from_environment(), **options}
        self._writers: dict[str, Writer] = {}
        self._uses = 0

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], async_strategy: str = "mcore") -> Any:
        self._uses += 1
        if self._engine is None:
            raise _native.UnsupportedError("async_sharded_save=True needs an engine: SaveStrategy(engine=tensorcask.Engine(...))")
        folder = Path(checkpoint_dir)
        step, engine = _step(folder), self._engine
        if dist.get_rank() == 0:
            _unmark(folder)
        sharded_state_dict, common = _take_common(sharded_state_dict, folder)
        objects, shards = _values(sharded_state_dict, is_wanted=lambda value: is_main_replica(value.replica_id))
        copies, _ = _values(sharded_state_dict, is_wanted=lambda value: isinstance(value, ShardedObject) and not is_main_replica(value.replica_id))
        state: dict[str, Any] = {**_ranks.without_tensors(objects), **{key: Shards(tuple(map(_shard, found))) for key, found in shards.items()}}
        if common is not None:
            state[_COMMON] = common
        # A rank that restores from its own memory needs the objects that other ranks save.
        engine.save({**state, _copies_of(engine): _ranks.without_tensors(copies)}, step=step)
        return _request_of(engine, folder, step, _request_class(async_strategy))

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        if self._engine is not None:
            self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
            return
        self._uses += 1
        folder = Path(checkpoint_dir)
        step = _step(folder)
        store, address = _store_of(self._store, folder)
        if store.url not in self._writers:
            self._writers[store.url] = store.writer(**self._options)
        writer = self._writers[store.url]
        if dist.get_rank() == 0:
            _unmark(folder)
        sharded_state_dict, common = _take_common(sharded_state_dict, folder)
        objects, shards = _values(sharded_state_dict, is_wanted=lambda value: is_main_replica(value.replica_id))
        state: dict[str, Any] = dict(objects)
        state.update({key: _Shards(found) for key, found in shards.items()})
        if common is not None:
            state[_COMMON] = common
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner)
        if writer.saved is not None:
            _markers.write(folder, address, step, writer.saved.id)


class LoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """A ``sharded_strategy`` for ``dist_checkpointing.load``. Each rank reads its own shards, into its own tensors: from the store,
    or through ``engine`` from the nearest place. A folder in Megatron's own format is read by Megatron."""

    def __init__(self, store: Store | str | None = None, *, engine: Engine | None = None) -> None:
        super().__init__()
        self._store, self._engine = store if engine is None else engine.store, engine
        self._restored: tuple[int, dict[str, Any]] | None = None
        self._uses = 0
        # Since Megatron Core 0.19: otherwise a strategy has to fill quantized tensors, such as fp8 weights.
        self.stream_ckpt_dequant = False

    def check_backend_compatibility(self, loaded_backend: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as Megatron calls it
        if loaded_backend not in (BACKEND, "torch_dist"):
            raise _native.UnsupportedError(f"the checkpoint has backend {loaded_backend!r}; this strategy reads {BACKEND!r}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != _VERSION:
            raise _native.UnsupportedError(
                f"the checkpoint has version {loaded_version} of backend {BACKEND!r}; this package reads version {_VERSION}"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], async_strategy: str = "mcore") -> Any:
        self._uses += 1
        folder = Path(checkpoint_dir)
        if (folder / _OWN_METADATA).exists():
            return super().load(sharded_state_dict, folder)
        if self._engine is not None:
            return self._load_through(self._engine, sharded_state_dict, _step(folder))
        snapshot = self._snapshot(folder)
        stored = _stored(snapshot)
        common = stored.pop(_COMMON, None)
        if isinstance(common, io.BytesIO) and common.getvalue() != (folder / _COMMON).read_bytes():
            raise _native.CorruptionError(f"{folder / _COMMON} does not belong to step {snapshot.step}. Remove the folder and load again")
        wanted = []
        for value in nested_values(sharded_state_dict):
            key = value.unique_key if isinstance(value, ShardedObject) else value.key
            if key not in stored or isinstance(value, ShardedTensor) != isinstance(stored[key], TensorInfo):
                raise _native.TemplateError(f"step {snapshot.step} has no {type(value).__name__} `{key}`")
            if isinstance(value, ShardedTensor):
                wanted.append(_request(value, stored[key]))
            else:
                value.data = _decoded(_ranks.with_tensors(resolve(snapshot, stored[key])[0]))
        read_tensors(snapshot, wanted)
        loaded: Any = dict_list_map_inplace(lambda value: value.data, sharded_state_dict)
        return loaded

    def _load_through(self, engine: Engine, sharded_state_dict: Any, step: int) -> Any:
        values = self._values_of(engine, step)
        stored: dict[str, Any] = {}
        rounds: list[dict[str, Shard]] = []
        flexible: list[ShardedTensor] = []
        for value in nested_values(sharded_state_dict):
            if isinstance(value, ShardedObject):
                found = values.get(value.unique_key)
                if found is None:
                    # Another rank of another layout has saved it.
                    stored = stored or _stored(engine.store.snapshot(step))
                    if value.unique_key not in stored:
                        raise _native.TemplateError(f"step {step} has no ShardedObject `{value.unique_key}`")
                    found = resolve(engine.store.snapshot(step), stored[value.unique_key])
                value.data = _decoded(_ranks.with_tensors(found[0]))
                continue
            if value.data is None:
                value.init_data("cpu")
            if value.allow_shape_mismatch:
                flexible.append(value)
                continue
            # A restore fills one part of each tensor.
            free = next((shards for shards in rounds if value.key not in shards), None)
            if free is None:
                rounds.append(free := {})
            free[value.key] = _shard(value)
        for shards in rounds:
            engine.restore(step, out=shards, partial=True)
        for value in flexible:
            try:
                engine.restore(step, out={value.key: _shard(value)}, partial=True)
            except (_native.Error, ValueError):
                # It has another shape there, such as a vocabulary that is padded for other ranks.
                snapshot = engine.store.snapshot(step)
                read_tensors(snapshot, [_request(value, _stored(snapshot)[value.key])])
        loaded: Any = dict_list_map_inplace(lambda value: value.data, sharded_state_dict)
        return loaded

    def _values_of(self, engine: Engine, step: int) -> dict[str, Any]:
        """Values of a step other than tensors, which this rank has saved, or all ranks if there are more or fewer of them now."""
        if self._restored is None or self._restored[0] != step:
            found = engine.restore(step, out={}, partial=True).state
            self._restored = step, {**found, **found.get(_copies_of(engine), {})}
        return self._restored[1]

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str], metadata: Any = None) -> Any:
        if metadata is not None or (Path(checkpoint_dir) / _OWN_METADATA).exists():
            return super().load_tensors_metadata(Path(checkpoint_dir), metadata)  # pyright: ignore[reportArgumentType] - None is its default
        return {key: value for key, value in self.load_sharded_metadata(checkpoint_dir).items() if isinstance(value, ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        if (Path(checkpoint_dir) / _OWN_METADATA).exists():
            return super().load_sharded_metadata(Path(checkpoint_dir))
        found: dict[str, Any] = {}
        for key, value in _stored(self._snapshot(Path(checkpoint_dir))).items():
            if key == _COMMON:
                continue
            if isinstance(value, TensorInfo):
                empty = torch.empty(_shape(value), dtype=_dtypes.torch_dtype(torch, value.dtype, key), device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, empty).without_data()
            else:
                found[key] = ShardedObject.empty_from_unique_key(key)
        return found

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        raise _native.UnsupportedError(f"{checkpoint_dir}: tensors cannot be removed from a snapshot. Save the others as a new step")

    def try_folder(self, folder: Path) -> Exception | None:
        """Rebuilds a folder that is not whole. Returns the error of a failure."""
        try:
            if maybe_load_config(str(folder)) is None:
                self.make_folder(folder)
        except Exception as error:
            return error
        return None

    def make_folder(self, folder: Path) -> None:
        """Writes the files that Megatron reads in a folder."""
        if self._engine is not None:
            common = self._values_of(self._engine, _step(folder)).get(_COMMON)
            if isinstance(common, io.BytesIO):
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / _COMMON, common.getvalue())
                write_whole(folder / CONFIG_FNAME, json.dumps(dataclasses.asdict(CheckpointingConfig(BACKEND, _VERSION))))
                return
            # Only the first rank has it in memory, and all read what it has written if they share the folder.
            if maybe_load_config(str(folder)) is not None:
                return
        store, address = _store_of(self._store, folder)
        snapshot = store.snapshot(_step(folder))
        nested, _ = snapshot.structure()
        common = nested.get(_COMMON) if isinstance(nested, dict) else None
        if not isinstance(common, io.BytesIO):
            raise _native.NotFoundError(f"{store.url}: step {snapshot.step} has no {_COMMON}, so Megatron did not save it")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _COMMON, common.getvalue())
        _markers.write(folder, address, snapshot.step, snapshot.id)
        write_whole(folder / CONFIG_FNAME, json.dumps(dataclasses.asdict(CheckpointingConfig(BACKEND, _VERSION))))

    def _snapshot(self, folder: Path) -> Snapshot:
        return _markers.snapshot_in(folder, self._store) or _store_of(self._store, folder)[0].snapshot(_step(folder))


def _check_megatron() -> None:
    """Refuses a Megatron Core that takes strategies of other classes. It would ignore these, and write files of its own."""
    for function, strategy in ((dist_checkpointing.save, SaveStrategy), (dist_checkpointing.load, LoadStrategy)):
        accepted = typing.get_type_hints(function).get("sharded_strategy")
        if not any(isinstance(kind, type) and issubclass(strategy, kind) for kind in (accepted, *typing.get_args(accepted))):
            raise _native.UnsupportedError(f"Megatron Core {package_info.__shortversion__} takes no strategy of tensorcask, but {accepted}")
    try:
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    except ImportError:
        return
    # Megatron Core 0.16 finds the strategy by the backend in a checkpoint's metadata.json.
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, _VERSION, LoadStrategy())


_check_megatron()


def _inner(strategy: Any) -> Any:
    """The strategy in Megatron's wrappers for fully parallel saves and loads."""
    return getattr(strategy, "base_strategy", strategy)


def _uses(strategy: Any, kind: type) -> int:
    """Number of times that Megatron has called a strategy."""
    inner = _inner(strategy)
    if not isinstance(inner, kind):
        raise TypeError(f"strategy is a {type(inner).__name__}: pass a tensorcask.megatron.{kind.__name__}")
    uses: int = inner._uses  # type: ignore[attr-defined]
    return uses


def _ignored(deed: str) -> str:
    return f"Megatron Core {package_info.__shortversion__} ignored the strategy of tensorcask and {deed}. Use a version that tensorcask is tested with"


def _take_common(sharded_state_dict: Any, folder: Path) -> tuple[Any, io.BytesIO | None]:
    """The state without the plain values, and on rank 0 their file `common.pt`, which is in the folder afterwards."""
    plain = None if _COMMON_STATE is None else sharded_state_dict.get(_COMMON_STATE)
    if plain is not None:
        sharded_state_dict = {key: value for key, value in sharded_state_dict.items() if key != _COMMON_STATE}
    if dist.get_rank() != 0:
        return sharded_state_dict, None
    if plain is not None:
        content = io.BytesIO()
        torch.save(plain.data, content)
        write_whole(folder / _COMMON, content.getvalue())
        return sharded_state_dict, io.BytesIO(content.getvalue())
    is_there = (folder / _COMMON).exists()
    return sharded_state_dict, io.BytesIO((folder / _COMMON).read_bytes()) if is_there else None


def _request_class(async_strategy: str) -> Any:
    """The class of requests for the caller's queue. That of `nvrx` is in the package nvidia-resiliency-ext; without it, there is
    only Megatron's own queue."""
    if async_strategy == "nvrx":
        try:
            from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest as Request  # pyright: ignore[reportMissingImports]
        except ImportError:
            return AsyncRequest
        return Request
    return AsyncRequest


class _Shards(torch.Tensor):  # type: ignore[misc]
    """The shards of one tensor on this rank, in the form that PyTorch's planner expects."""

    def __new__(cls, shards: Sequence[Any]) -> _Shards:
        made: _Shards = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shards[0].global_shape), dtype=shards[0].dtype)
        return made

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = {torch.Size(shard.global_offset): _with_all_axes(shard) for shard in shards}

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        items = []
        for offset, data in self._shards.items():
            chunk = ChunkStorageMetadata(offsets=offset, sizes=data.shape)
            described = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(data), size=self.shape)
            items.append(WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=described))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "DCP asks for a shard by its offset"
        return self._shards[index.offset]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of shards")


def _with_all_axes(shard: Any) -> torch.Tensor:
    """The data of a shard with the axes that Megatron prepends."""
    data: torch.Tensor = shard.data.detach()
    return data.view((1,) * shard.prepend_axis_num + tuple(data.shape))


def _values(sharded_state_dict: Any, *, is_wanted: Callable[[Any], bool]) -> tuple[dict[str, Any], dict[str, list[ShardedTensor]]]:
    """Objects by unique key, and shards of tensors by key."""
    objects: dict[str, Any] = {}
    shards: dict[str, list[ShardedTensor]] = {}
    for value in nested_values(sharded_state_dict):
        if not is_wanted(value):
            continue
        if isinstance(value, ShardedObject):
            # A tuple is one value to the planner. A bare tensor would be stored as a tensor of the model.
            objects[value.unique_key] = (_encoded(value.data),)
            continue
        if value.flattened_range is not None:
            raise _native.UnsupportedError(f"`{value.key}`: flattened_range is an old form of Megatron. Save the unflattened tensor")
        if value.data is None:
            raise ValueError(f"`{value.key}`: the shard has no data")
        shards.setdefault(value.key, []).append(value)
    twice = next((key for key in shards if key in objects), None)
    if twice is not None:
        raise ValueError(f"`{twice}` names a tensor and an object. Rename one of them")
    return objects, shards


def _shard(value: Any) -> Shard:
    return Shard(_with_all_axes(value), tuple(value.global_shape), tuple(value.global_offset))


def _copies_of(engine: Engine) -> str:
    return f"{_COPIES}{engine.rank}"


def _request_of(engine: Engine, folder: Path, step: int, kind: Any) -> Any:
    """A request that is done once the step is in the store, or cannot get there any more. Megatron finalizes it on all ranks."""
    # The thread removes the file when it knows: that needs no space on a disk.
    waiting = Path(tempfile.mkdtemp(prefix="tensorcask-")) / "waiting"
    waiting.touch()
    failures: list[str] = ["the process ends"]

    def watch() -> None:
        try:
            failures[:] = _failures_of(engine, step)
        except Exception as error:
            failures[:] = [f"{type(error).__name__}: {error}"]
        finally:
            shutil.rmtree(waiting.parent, ignore_errors=True)

    def finalize() -> None:
        watcher.join()
        if failures:
            raise _native.StorageError(f"{folder}: the step did not get into {engine.store.url}: {failures[0]}. See `tensorcask agent status`")
        if dist.get_rank() == 0:
            _markers.write(folder, _native.absolute_url(engine.store.url), step, engine.store.snapshot(step).id)

    watcher = threading.Thread(target=watch, name=f"tensorcask-step-{step}", daemon=True)
    watcher.start()
    return kind(_wait_for, (str(waiting), os.getpid()), [finalize])


def _failures_of(engine: Engine, step: int) -> list[str]:
    """Waits until a step is in the store; returns why it cannot get there, if so."""
    while True:
        try:
            # Without Engine.wait, which would end a save that the trainer is beginning.
            reached, failures, _, _ = engine._native.wait("durable", 0.0, step)
        except (_native.Error, ValueError) as error:
            # The engine is closed. finish() closes it when all steps are in the store; after close(), nobody tells when one gets there.
            is_there = step in engine.store.steps
            return [] if is_there else [f"{error} before it was there. Finalize the calls before close(), or call finish()"]
        if reached:
            return []
        mine = [message for failed, message in failures if failed == step]
        if mine:
            return mine
        time.sleep(_INTERVAL)


def _wait_for(waiting: str, trainer: int) -> None:
    """Waits in a process of Megatron until the trainer knows what became of a step, or is gone."""
    while Path(waiting).exists() and trainer in (os.getpid(), os.getppid()):
        time.sleep(_INTERVAL)


def _request(shard: Any, info: TensorInfo) -> tuple[TensorInfo, list[int], list[int], torch.Tensor]:
    """The tensor, offset and shape to read for a shard, and the memory to fill."""
    stored, wanted = list(_shape(info)), list(shard.global_shape)
    if stored != wanted and not (shard.allow_shape_mismatch and len(stored) == len(wanted)):
        raise _native.InvalidArgumentError(f"`{shard.key}` has shape {stored} in the store, but {wanted} is requested")
    if shard.data is None:
        shard.init_data("cpu")
    target = _with_all_axes(shard)
    offset, shape = list(shard.global_offset), list(target.shape)
    if stored != wanted:
        # As in Megatron, elements that are not stored are zero.
        target.zero_()
        shape = [max(min(end - start, length), 0) for start, length, end in zip(offset, shape, stored, strict=True)]
        offset = [min(start, end) for start, end in zip(offset, stored, strict=True)]
        for axis, length in enumerate(shape):
            target = target.narrow(axis, 0, length)
    return info, offset, shape, target


def _stored(snapshot: Snapshot) -> dict[str, Any]:
    """Tensors and objects by key."""
    nested, _ = snapshot.structure()
    return {key: value for key, value in nested.items() if not key.startswith(_COPIES)}


def _unmark(folder: Path) -> None:
    """Removes the files that mark a folder as whole. During a save it holds files of two saves."""
    for name in (CONFIG_FNAME, _OWN_METADATA, _markers.NAME):
        (folder / name).unlink(missing_ok=True)


_PAIRS, _DTYPE = "#pairs", "#dtype"


def _encoded(value: Any) -> Any:
    """An object in a form that can be stored: dtypes by name, and mappings with other keys than text and integers as
    pairs."""
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        items = [(key, _encoded(item)) for key, item in value.items()]
        if all(type(key) in (str, int) and key not in (_PAIRS, _DTYPE) for key in value):
            return dict(items)
        return {_PAIRS: [(_encoded(key), item) for key, item in items]}
    if isinstance(value, tuple):
        return tuple(_encoded(item) for item in value)
    return [_encoded(item) for item in value] if isinstance(value, list) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_DTYPE}:
            found = getattr(torch, str(value[_DTYPE]), None)
            if not isinstance(found, torch.dtype):
                raise _native.CorruptionError(f"torch has no dtype {value[_DTYPE]!r}")
            return found
        if value.keys() == {_PAIRS}:
            return {_decoded(key): _decoded(item) for key, item in value[_PAIRS]}
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_decoded(item) for item in value)
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _shape(info: TensorInfo) -> tuple[int, ...]:
    return tuple(_dtypes.torch_shape(info.dtype, info.shape, info.name))


def _step(folder: Path) -> int:
    return step_of(folder, "Name the folder iter_0000100")


def _store_of(given: Store | str | None, folder: Path) -> tuple[Store, str]:
    return _markers.store_for(given or os.environ.get("TENSORCASK_URL"), folder, folder.absolute().parent / "tensorcask")


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {option: os.environ[name] for option, name in _VARIABLES.items() if name in os.environ}
    found |= {option: os.environ[name].split() for option, name in _LISTS.items() if name in os.environ}
    every = os.environ.get("TENSORCASK_EVERY")
    if every is not None:
        if "policy" in found:
            raise ValueError("TENSORCASK_EVERY and TENSORCASK_POLICY are both set. Set only one")
        if not every.isdigit() or int(every) == 0:
            raise ValueError(f"TENSORCASK_EVERY={every!r}: use an integer of 1 or more")
        found["policy"] = f"intermittent:{every}"
    return found


_of_process: dict[Any, SaveStrategy] = {}


def _default() -> SaveStrategy:
    """The strategy of this process for the current environment variables."""
    key = (os.getpid(), os.environ.get("TENSORCASK_URL"), json.dumps(_from_environment()))
    return _of_process.setdefault(key, SaveStrategy())
