"""Rows of one process: planners, metadata, steps, asynchronous saves, interfaces, tools. See `dcp_rows`."""

import inspect
import io
import pickle
import warnings

import torch
import torch.distributed.checkpoint as dcp
from dcp_rows import collect, error_of, kind_of_error, plain, row
from dcp_rows_of_values import nested, weights
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse


@row("Planners")
def without_flattening(side):
    """Both planners with `flatten_state_dict=False` and `flatten_sharded_tensors=False`: values are stored whole."""
    side.save(nested(3.0), planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    return side.load(nested(0.0), planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))


@row("Planners", differs="PyTorch's load planner changes a copy of the template.")
def without_flattening_of_one_kind(side):
    """Both planners with `flatten_state_dict=False` alone."""
    side.save(nested(3.0), planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    loaded = side.load(nested(0.0), planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    return "loaded" if torch.equal(loaded["model"]["w"], nested(3.0)["model"]["w"]) else "nothing is loaded, without an error"


@row("Planners", differs="A store can describe a state both ways.")
def flat_to_whole(side):
    """Saved flattened, loaded with `flatten_state_dict=False`."""
    side.save(nested(3.0))
    return kind_of_error(lambda: [side.load(nested(0.0), planner=dcp.DefaultLoadPlanner(flatten_state_dict=False)), "loaded"][1])


@row("Planners", differs="A store can describe a state both ways.")
def whole_to_flat(side):
    """Saved with `flatten_state_dict=False`, loaded flattened."""
    side.save(nested(3.0), planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    return kind_of_error(lambda: [side.load(nested(0.0)), "loaded"][1])


class HalfPlanner(dcp.DefaultSavePlanner):
    def transform_object(self, write_item, object):
        object = super().transform_object(write_item, object)
        return object * 2 if isinstance(object, torch.Tensor) else object


@row("Planners")
def own_transform(side):
    """A save planner that changes tensors in `transform_object`."""
    side.save({"w": torch.arange(3.0), "n": 5}, planner=HalfPlanner())
    return side.load({"w": torch.zeros(3), "n": 0})


class BytesPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return found if isinstance(found, torch.Tensor) else io.BytesIO(b"text of the planner")


class BytesLoader(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@row("Planners")
def own_load_bytes(side):
    """A load planner that unpickles values itself in `load_bytes`."""
    side.save({"w": torch.ones(2), "n": [1, 2]})
    return side.load({"w": torch.zeros(2), "n": None}, planner=BytesLoader())


class ScratchLoader(dcp.DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        self.scratch = torch.zeros_like(super().resolve_tensor(read_item))
        return self.scratch

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor * 10)


@row("Planners")
def own_resolve_and_commit(side):
    """A load planner that reads into memory of its own and copies in `commit_tensor`."""
    side.save(weights(2.0))
    return side.load(weights(0.0), planner=ScratchLoader())


class Renamer(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {"old." + key: value for key, value in self.state_dict.items()}


@row("Planners")
def renamed_keys(side):
    """A load planner that renames keys."""
    side.save({"old": weights(2.0)})
    return side.load(weights(0.0), planner=Renamer())


class OnlyWeights(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        plan.items[:] = [item for item in plan.items if item.index.fqn.startswith("model")]
        return plan


@row("Planners")
def filtering_planner(side):
    """A save planner that leaves items out."""
    side.save(nested(2.0), planner=OnlyWeights())
    return side.load({"model": weights(0.0)}), error_of(lambda: side.load({"text": ""}))


@row("Planners")
def plan_cache(side):
    """`enable_plan_caching=True`: later saves of the same structure."""

    class CachingPlanner(dcp.DefaultSavePlanner):
        pass

    CachingPlanner.__name__ = f"CachingPlannerOf{side.name}"
    for step in (1, 2, 3):
        side.save(weights(float(step)), step=step, planner=CachingPlanner(enable_plan_caching=True))
    return [side.load(weights(0.0), step=step) for step in (1, 2, 3)]


@row("Planners")
def planner_storage_meta(side):
    """The save planner gets `storage_meta` with the id of the checkpoint."""
    told = []

    class Asking(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            told.append(str(storage_meta.checkpoint_id) == side.id(1))
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    side.save(weights(), planner=Asking())
    return told


@row("Metadata")
def metadata_of_a_save(side):
    """`dcp.save` returns metadata: sizes, dtypes, `planner_data`, `version`."""
    found = side.save(nested(2.0))
    described = {key: (type(value).__name__, getattr(value, "size", None)) for key, value in found.state_dict_metadata.items()}
    return sorted(described.items()), sorted(found.planner_data.items()), found.version


@row("Metadata")
def metadata_of_a_checkpoint(side):
    """`read_metadata()` of a reader: sizes, dtypes, `planner_data`, `version`."""
    side.save(nested(2.0))
    reader = side.reader()
    reader.reset(side.id(1))
    found = reader.read_metadata()
    described = {key: (type(value).__name__, getattr(value, "size", None)) for key, value in found.state_dict_metadata.items()}
    return sorted(described.items()), sorted(found.planner_data.items()), found.version


@row("Metadata")
def storage_meta(side):
    """`storage_meta` has `checkpoint_id`, the `save_id` of the writer and the `load_id` of the reader."""
    writer, reader = side.writer(), side.reader()
    dcp.save(weights(), checkpoint_id=side.id(1), storage_writer=writer)
    reader.reset(side.id(1))
    found = reader.read_metadata().storage_meta
    first = reader.load_id
    reader.reset(side.id(1))
    return str(found.checkpoint_id) == side.id(1), found.save_id == writer.save_id is not None, found.load_id == first, first != reader.load_id


@row("Metadata", differs="The store knows where each chunk is.")
def storage_data(side):
    """`storage_data`: files and offsets of the shards."""
    return type(side.save(weights()).storage_data).__name__


@row("Metadata")
def checkpoint_ids(side):
    """`validate_checkpoint_id` takes `step-1`, and refuses `abc://x/final`."""
    return [side.writer().validate_checkpoint_id(name) for name in ("step-1", "abc://x/final")]


@row("Metadata", differs="A name must say its step, or `step=` must: two names of one step would replace each other.")
def names_without_a_step(side):
    """A `checkpoint_id` that names no step."""
    name = str(side.folder / "final")
    return kind_of_error(lambda: [dcp.save(weights(), checkpoint_id=name, storage_writer=side.writer()), "saved"][1])


@row("Steps")
def several_steps(side):
    """One writer saves several checkpoints, and each is loaded."""
    writer = side.writer()
    for step in (1, 2):
        dcp.save(weights(float(step)), checkpoint_id=side.id(step), storage_writer=writer)
    return [side.load(weights(0.0), step=step) for step in (1, 2)]


@row("Steps", differs="PyTorch announces this default for a later version. Pass `overwrite=True`.")
def existing_step(side):
    """A step that exists is saved again with the default of `overwrite`."""
    side.save(weights(1.0))
    return kind_of_error(lambda: [side.save(weights(2.0)), "replaced, with a warning"][1])


@row("Steps")
def overwrite(side):
    """`overwrite=True` replaces a step."""
    side.save(weights(1.0))
    side.save(weights(2.0), overwrite=True)
    return side.load(weights(0.0))


@row("Steps")
def no_overwrite(side):
    """`overwrite=False` refuses, and the old checkpoint stays."""
    side.save(weights(1.0))
    refused = error_of(lambda: side.save(weights(2.0), overwrite=False))
    return refused, side.load(weights(0.0))


class FailingPlanner(dcp.DefaultSavePlanner):
    """Fails at the second tensor, after the first was handed out."""

    def resolve_data(self, write_item):
        if write_item.index.fqn == "w":
            raise RuntimeError("no data")
        return super().resolve_data(write_item)


@row("Steps", differs="A commit replaces a step as a whole, or not at all.")
def failed_overwrite(side):
    """Replacing a step fails half way. Is the old checkpoint still there?"""
    side.save(weights(1.0), overwrite=True)
    error_of(lambda: side.save(weights(2.0), overwrite=True, planner=FailingPlanner()))
    return kind_of_error(lambda: "the old one loads" if torch.equal(side.load(weights(0.0))["w"], weights(1.0)["w"]) else "other values load")


@row("Steps")
def failed_first_save(side):
    """A save that fails leaves nothing that loads."""
    failed = error_of(lambda: side.save(weights(), planner=FailingPlanner()), full=True)
    return failed, error_of(lambda: side.load(weights(0.0)))


@row("Steps", differs="Each page has a checksum, and each tensor too.")
def damaged_data(side):
    """One flipped bit in the data of a tensor."""
    whole = torch.rand(256, 256)
    side.save({"w": whole})
    file = max(side.data_files(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return kind_of_error(lambda: "loaded" if torch.equal(side.load({"w": torch.zeros(256, 256)})["w"], whole) else "loaded wrong values")


@row("Steps")
def lost_data(side):
    """A lost data file is an error."""
    side.save({"w": torch.full((64, 64), 0.1)})
    max(side.data_files(), key=lambda path: path.stat().st_size).unlink()
    return error_of(lambda: side.load({"w": torch.zeros(64, 64)}))


@row("Asynchronous saves")
def async_save(side):
    """`async_save` returns a future of the metadata."""
    found = side.start(weights(2.0)).result()
    return type(found).__name__, sorted(found.state_dict_metadata), side.load(weights(0.0))


@row("Asynchronous saves")
def later_changes(side):
    """Changes after `async_save` has returned do not reach the checkpoint."""
    state = {"w": torch.ones(3), "n": [1]}
    future = side.start(state)
    state["w"].fill_(9)
    state["n"][0] = 9
    future.result()
    return side.load({"w": torch.zeros(3), "n": None})


@row("Asynchronous saves")
def default_stager(side):
    """`async_stager=DefaultStager(...)`, staging before the return."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    side.start(weights(2.0), async_stager=stager).result()
    stager.close()
    return side.load(weights(0.0))


@row("Asynchronous saves")
def staging_in_the_background(side):
    """`DefaultStager` with `use_async_staging=True`: `async_save` returns an `AsyncSaveResponse`."""
    stager = DefaultStager(StagingOptions(False, False, True, False))
    response = side.start(weights(2.0), async_stager=stager)
    response.staging_completion.result()
    response.upload_completion.result()
    stager.close()
    return isinstance(response, AsyncSaveResponse), side.load(weights(0.0))


@row("Asynchronous saves")
def stager_of_shared_memory(side):
    """`DefaultStager` with `use_shared_memory=True`, two saves that reuse its storages."""
    stager = DefaultStager(StagingOptions(False, True, False, False))
    for step in (1, 2):
        side.start(weights(float(step)), step=step, async_stager=stager).result()
    stager.close()
    return [side.load(weights(0.0), step=step) for step in (1, 2)]


@row("Asynchronous saves")
def blocking_stager(side):
    """`async_stager=BlockingAsyncStager()`."""
    side.start(weights(2.0), async_stager=BlockingAsyncStager()).result()
    return side.load(weights(0.0))


@row("Asynchronous saves", differs="PyTorch pins the cached memory, and this machine has no accelerator.")
def cached_stages(side):
    """`cache_staged_state_dict=True` of the writer: two saves share the memory of their stages."""

    def save_twice():
        writer = side.writer(cache_staged_state_dict=True)
        for step in (1, 2):
            dcp.async_save(weights(float(step)), checkpoint_id=side.id(step), storage_writer=writer).result()
        return "saved" if all(torch.equal(side.load(weights(0.0), step=step)["w"], weights(float(step))["w"]) for step in (1, 2)) else "wrong values"

    return kind_of_error(save_twice)


@row("Asynchronous saves")
def uncached_stages(side):
    """`cache_staged_state_dict=False` of the writer."""
    writer = side.writer(cache_staged_state_dict=False)
    for step in (1, 2):
        dcp.async_save(weights(float(step)), checkpoint_id=side.id(step), storage_writer=writer).result()
    return [side.load(weights(0.0), step=step) for step in (1, 2)]


class SlowStager:
    should_synchronize_after_execute = True

    def __init__(self):
        self.calls = []

    def stage(self, state_dict):
        self.calls.append("stage")
        return {key: value.clone() for key, value in state_dict.items()}

    def synchronize_staging(self):
        self.calls.append("synchronize_staging")

    def close(self):
        self.calls.append("close")


@row("Asynchronous saves")
def own_stager(side):
    """A stager of the program that wants `synchronize_staging` after the start."""
    stager = SlowStager()
    side.start(weights(2.0), async_stager=stager).result()
    return stager.calls, side.load(weights(0.0))


@row("Asynchronous saves")
def failed_async_save(side):
    """`result()` raises the error of a failed save."""
    return error_of(lambda: side.start(weights(), planner=FailingPlanner()).result(), full=True)


@row("Asynchronous saves")
def save_after_a_failed_one(side):
    """The save after a failed one succeeds."""
    error_of(lambda: side.start(weights(), planner=FailingPlanner()).result())
    side.start(weights(2.0), step=2).result()
    return side.load(weights(0.0), step=2)


@row("Interfaces")
def kinds_of_storage(side):
    """The writer is a `StorageWriter` and an `AsyncStager`, the reader a `StorageReader`."""
    return isinstance(side.writer(), dcp.StorageWriter), isinstance(side.writer(), AsyncStager), isinstance(side.reader(), dcp.StorageReader)


@row("Interfaces")
def pickled_writers(side):
    """A writer can be sent to another process."""
    dcp.save(weights(2.0), checkpoint_id=side.id(1), storage_writer=pickle.loads(pickle.dumps(side.writer())))
    return side.load(weights(0.0))


@row("Interfaces", differs="Each save has a policy and objective instead, and uploads in parallel by itself.")
def options_of_files(side):
    """`thread_count`, `single_file_per_rank`, `per_thread_copy_ahead` and `sync_files`."""
    names = ("thread_count", "single_file_per_rank", "per_thread_copy_ahead", "sync_files")
    known = inspect.signature(type(side.writer()).__init__).parameters
    return "arguments" if all(name in known for name in names) else "no arguments"


@row("Interfaces", differs="The codecs of the format compress by default, with checksums. Encrypt below the store.")
def stream_extensions(side):
    """`_extensions`: streams that compress or encrypt."""
    return "an argument" if "_extensions" in inspect.signature(type(side.writer()).__init__).parameters else "no argument"


@row("Interfaces")
def path_alone(side):
    """`dcp.save` and `dcp.load` with a `checkpoint_id` alone; for stores after `tensorcask.torch.register()`."""
    import tensorcask.torch

    path = str(side.folder / "step-1")
    if side.is_ours:
        tensorcask.torch.register(side.folder)
    try:
        dcp.save(weights(2.0), checkpoint_id=path)
        loaded = weights(0.0)
        dcp.load(loaded, checkpoint_id=path)
    finally:
        tensorcask.torch.unregister()
    return loaded


@row("Interfaces")
def unknown_scheme(side):
    """An id of an unknown scheme is an error, with and without `register()`."""
    import tensorcask.torch

    if side.is_ours:
        tensorcask.torch.register(side.folder)
    try:
        return [error_of(lambda work=work: work(weights(), checkpoint_id="abc://abc.abc"), full=True) for work in (dcp.save, dcp.load)]
    finally:
        tensorcask.torch.unregister()


@row("Tools")
def to_one_file(side):
    """`dcp_to_torch_save`, and `interchange.export`: one file of `torch.save`."""
    from tensorcask import interchange
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    side.save(nested(2.0))
    path = side.folder / "whole.pt"
    if side.is_ours:
        interchange.export(side.store, path)
    else:
        dcp_to_torch_save(side.id(1), path)
    return sorted(plain(torch.load(path, weights_only=True)).items())


@row("Tools")
def from_one_file(side):
    """`torch_save_to_dcp`, and `interchange.import_`: a file of `torch.save`."""
    from tensorcask import interchange
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    side.folder.mkdir(parents=True)
    path = side.folder / "whole.pt"
    torch.save(nested(2.0), path)
    if side.is_ours:
        interchange.import_(path, side.store, step=1)
    else:
        torch_save_to_dcp(path, side.id(1))
    return side.load(nested(0.0))


def consolidated(side, state, mapping, **options):
    """Saves and consolidates to safetensors, and returns the folder."""
    from tensorcask import interchange
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    folder = side.folder / "hf"
    if side.is_ours:
        side.save(state, after_commit=lambda snapshot: interchange.export(snapshot, folder, fqn_to_index_mapping=mapping))
    else:
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=True)
        dcp.save(state, storage_writer=writer)
    return folder


def model_files(folder):
    """Names and contents of the safetensors files of a model."""
    import json

    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: plain(dict(sorted(load_file(path).items()))) for path in sorted(folder.glob("*.safetensors"))}
    return sorted(index["weight_map"].items()), index["metadata"]["total_size"], files


@row("Tools")
def consolidation(side):
    """`HuggingFaceStorageWriter` with consolidation, and `after_commit=` with `interchange.export`: the same files."""
    state = {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.ones(4).bfloat16(), "head": torch.zeros(2).half()}
    return model_files(consolidated(side, state, {"model.a": 1, "model.b": 2, "head": 1}))


@row("Tools", differs="PyTorch's consolidation asks for the bits of a floating-point dtype.")
def consolidation_of_integers(side):
    """Consolidation of a state with an integer tensor."""
    return kind_of_error(lambda: [consolidated(side, {"n": torch.arange(3)}, {"n": 1}), "consolidated"][1])


@row("Tools")
def read_consolidated(side):
    """`HuggingFaceStorageReader` reads the consolidated files."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    folder = consolidated(side, weights(2.0), {"w": 1, "b": 2})
    loaded = weights(0.0)
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)))
    return loaded


@row("Tools", differs="A load that drops all moments is seldom meant.")
def unused_moments(side):
    """A template without moments, for a checkpoint that has them, loads none."""
    import logging

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    side.save({"optimizer": optimizer.state_dict()})
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    logging.getLogger("tensorcask").addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            side.load({"optimizer": torch.optim.AdamW(torch.nn.Linear(2, 1).parameters()).state_dict()})
    finally:
        logging.getLogger("tensorcask").removeHandler(handler)
    return "a warning" if heard else "silence"


__all__ = ["FailingPlanner", "collect", "nested", "weights"]
