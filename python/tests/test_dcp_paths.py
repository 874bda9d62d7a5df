"""DCP with a checkpoint_id alone, functions after the commit, and memory of stages."""

import functools
import logging

import pytest
import tensorcask
import tensorcask.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from safetensors.torch import load_file
from tensorcask import interchange
from torch.distributed.checkpoint import _storage_utils, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


@pytest.fixture
def registered():
    """The function that registers stores; undone after the test."""
    yield tensorcask.torch.register
    tensorcask.torch.unregister()


def state(value):
    return {"model": {"w": torch.full((3, 2), value)}, "step": int(value)}


def loaded(checkpoint_id):
    found = state(0.0)
    dcp.load(found, checkpoint_id=checkpoint_id)
    return found["model"]["w"][0, 0].item(), found["step"]


def test_a_store_need_not_exist_if_it_is_registered(registered, tmp_path):
    store = tmp_path / "new"
    registered(store, policy="consecutive", user={"run": 7})
    for step in (1, 2):
        dcp.save(state(float(step)), checkpoint_id=store / f"step-{step}")
    assert [info.kind for info in tensorcask.Store(store).snapshots()] == ["base", "delta"]
    assert tensorcask.Store(store).snapshot(2).user["run"] == 7
    assert loaded(f"{store}/step-1") == (1.0, 1)
    # The store itself is its newest step.
    assert loaded(store) == (2.0, 2)
    with pytest.raises(ValueError, match="is a store. Name the step to save"):
        dcp.save(state(3.0), checkpoint_id=store)
    with pytest.raises(ValueError, match="'final' does not have the form step-100"):
        dcp.save(state(3.0), checkpoint_id=store / "final")


def test_a_store_that_exists_is_found(registered, tmp_path, memory):
    registered()
    for url in (str(tmp_path / "store"), memory):
        tensorcask.save(state(1.0), url, step=1)
        dcp.save(state(2.0), checkpoint_id=f"{url}/step-2")
        assert tensorcask.Store(url).steps == [1, 2]
        assert loaded(f"{url}/1") == (1.0, 1)


def test_other_paths_are_left_to_pytorch(registered, tmp_path):
    registered(tmp_path / "store")
    dcp.save(state(1.0), checkpoint_id=tmp_path / "theirs" / "step-1")
    assert (tmp_path / "theirs/step-1/.metadata").exists()
    assert loaded(tmp_path / "theirs/step-1") == (1.0, 1)
    with pytest.raises(RuntimeError, match="Cannot detect"):
        dcp.save(state(1.0), checkpoint_id="abc://abc/step-1")
    # A storage that is passed is used as it is.
    other = tmp_path / "other"
    dcp.save(state(1.0), checkpoint_id=tmp_path / "store/step-1", storage_writer=dcp.FileSystemWriter(other))
    assert not (tmp_path / "store/store.json").exists()


def test_unregister_gives_pytorch_its_functions_back(registered, tmp_path):
    modules = (_storage_utils, state_dict_loader, state_dict_saver)
    before = [module._storage_setup for module in modules]
    registered(tmp_path / "store")
    registered(tmp_path / "other")
    assert all(module._storage_setup is not theirs for module, theirs in zip(modules, before, strict=True))
    tensorcask.torch.unregister()
    assert [module._storage_setup for module in modules] == before
    dcp.save(state(1.0), checkpoint_id=tmp_path / "store/step-1")
    assert (tmp_path / "store/step-1/.metadata").exists()


def test_unknown_options_of_a_registered_store_are_an_error_at_once(tmp_path):
    with pytest.raises(TypeError, match="polcy"):
        tensorcask.torch.register(tmp_path / "store", polcy="full")


def in_a_process(folder):
    tensorcask.torch.register(f"{folder}/store")
    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save(state(1.0), checkpoint_id=f"{folder}/store/step-1", async_checkpointer_type=kind).result()
    dcp.async_save(state(2.0), checkpoint_id=f"{folder}/store/step-2").result()
    assert loaded(f"{folder}/store") == (2.0, 2) and loaded(f"{folder}/store/step-1") == (1.0, 1)
    dist.barrier()


def test_the_process_of_an_asynchronous_save_uses_the_store_too(tmp_path):
    on_ranks(2, tmp_path, in_a_process, tmp_path)
    assert tensorcask.Store(tmp_path / "store").steps == [1, 2]


def export_weights(folder, snapshot):
    interchange.export(snapshot, f"{folder}/hf-{snapshot.step}", tensors="model.*", strip_prefix="model.", fqn_to_index_mapping={"w": 1})


def export_on_ranks(folder):
    writer = tensorcask.Store(f"{folder}/store").writer(after_commit=functools.partial(export_weights, folder))
    dcp.save(state(1.0), checkpoint_id="1", storage_writer=writer)
    dcp.async_save(state(2.0), checkpoint_id="2", storage_writer=writer).result()
    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save(state(3.0), checkpoint_id="3", storage_writer=writer, async_checkpointer_type=kind).result()
    # The target exists, so the export fails; the step is saved.
    again = tensorcask.Store(f"{folder}/store").writer(after_commit=functools.partial(export_weights, folder), overwrite=True)
    with pytest.raises(CheckpointException, match="step 3 is saved, but after_commit failed: .*exists already"):
        dcp.save(state(4.0), checkpoint_id="3", storage_writer=again)


def test_a_function_after_the_commit_exports_the_weights(tmp_path):
    on_ranks(2, tmp_path, export_on_ranks, tmp_path)
    for step in (1, 2, 3):
        weights = load_file(tmp_path / f"hf-{step}/model-00001-of-00001.safetensors")
        assert weights.keys() == {"w"} and (weights["w"] == step).all()
    assert tensorcask.load(tmp_path / "store", 3)["step"] == 4


def test_stages_are_freed_without_a_cache(memory):
    store = tensorcask.Store(memory)
    for cached, kept in ((True, 1), (False, 0)):
        writer = store.writer(cache_staged_state_dict=cached, overwrite=True)
        dcp.async_save(state(1.0), checkpoint_id="1", storage_writer=writer).result()
        assert len(writer._arenas) == kept
    # The stall of a save is recorded all the same.
    dcp.async_save(state(2.0), checkpoint_id="2", storage_writer=writer).result()
    dcp.async_save(state(3.0), checkpoint_id="3", storage_writer=writer).result()
    assert store.snapshot(3).user["tc.times"]["previous"]["stall_ms"] > 0


class Doubling(dcp.DefaultSavePlanner):
    def transform_object(self, write_item, object):
        return super().transform_object(write_item, object)


class Odd:
    pass


class OwnBytes(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        import io

        found = super().resolve_data(write_item)
        return found if isinstance(found, torch.Tensor) else io.BytesIO(b"PK\x03\x04 but no archive")


def test_values_of_planners_that_extend_the_default_one(memory):
    store = tensorcask.Store(memory)
    dcp.save({"n": [1, {"lr": 0.5}]}, checkpoint_id="1", storage_writer=store.writer(), planner=Doubling())
    assert store.load(1) == {"n": [1, {"lr": 0.5}]}
    with pytest.raises(CheckpointException, match=r"state\['odd'\]: the planner has pickled a value that cannot be stored"):
        dcp.save({"odd": Odd()}, checkpoint_id="2", storage_writer=store.writer(), planner=Doubling())
    dcp.save({"n": 1}, checkpoint_id="2", storage_writer=store.writer(), planner=OwnBytes())
    assert store.load(2)["n"].read() == b"PK\x03\x04 but no archive"


def test_arrays_of_numpy_load_into_tensors_and_arrays(memory, caplog):
    import numpy as np

    store = tensorcask.Store(memory)
    store.save({"a": np.arange(4.0), "b": np.arange(3)}, step=1)
    caplog.set_level(logging.ERROR)
    found = {"a": torch.zeros(4), "b": None}
    dcp.load(found, storage_reader=store.reader())
    assert torch.equal(found["a"], torch.arange(4.0)) and isinstance(found["b"], np.ndarray) and found["b"].tolist() == [0, 1, 2]
