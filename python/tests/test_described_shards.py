"""Tensors that tell DCP by themselves which parts of a larger tensor they hold: saved, staged, and through the engine."""

import importlib.util
import re
import sys

import pytest
import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard


def described(local, shape, offsets, local_offsets, sizes):
    """A `CheckpointableTensor` of PyTorch 2.15: a plain tensor with attributes."""
    local.global_shape, local.global_offsets, local.local_offsets, local.local_sizes = shape, offsets, local_offsets, sizes
    return local


def uneven(local, offset, mesh):
    """A DTensor with a chunk list of its own, as Megatron-FSDP makes it."""
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([8]), stride=(1,))
    chunk = ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=local.shape)

    def items(fqn, tensor):
        data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(tensor.to_local()), size=tensor.size())
        return [WriteItem(type=WriteItemType.SHARD, index=MetadataIndex(fqn, chunk.offsets), tensor_data=data)]

    made._local_tensor.__create_chunk_list__ = lambda: [chunk]
    made._local_tensor.__create_write_items__ = items
    return made


def part_of(rank, value=0.0, wrapped=True):
    """The part of a rank. All tensors are `arange(8)` together."""
    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.arange(8.0) + value
    halves = numbers[4 * rank : 4 * rank + 4].clone()
    # Two parts with padding around them.
    padded = torch.full((6,), -1.0)
    padded[1:3], padded[4:6] = numbers[2 * rank : 2 * rank + 2], numbers[4 + 2 * rank : 6 + 2 * rank]
    shared = numbers.clone()
    begin, end = ((0, 5), (5, 8))[rank]
    state = {
        "half": described(halves, (8,), ((4 * rank,),), ((0,),), ((4,),)),
        "padded": described(padded, (8,), ((2 * rank,), (4 + 2 * rank,)), ((1,), (4,)), ((2,), (2,))),
        # The same memory as other parts.
        "one": described(shared.detach(), (8,), ((4 * rank,),), ((4 * rank,),), ((4,),)),
        "uneven": uneven(numbers[begin:end].clone(), begin, mesh),
    }
    if wrapped:
        shards = [numbers[4 * rank : 4 * rank + 1].clone(), numbers[4 * rank + 1 : 4 * rank + 4].clone()]
        offsets = [(4 * rank,), (4 * rank + 1,)]
        state["wrapped"] = DTensor.from_local(LocalShardsWrapper(shards, offsets), mesh, [Shard(0)], run_check=False, shape=torch.Size([8]), stride=(1,))
    return state


def change(state):
    for tensor in state.values():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        for memory in local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]:
            memory.fill_(-7.0)


def whole(value=0.0):
    return torch.arange(8.0) + value


def check_store(store, step, value):
    for name, tensor in store.load(step).items():
        assert torch.equal(tensor, whole(value)), (name, tensor)


def save_and_load(folder, kind):
    rank = dist.get_rank()
    store = tensorcask.Store(f"{folder}/store")
    writer = store.writer()

    def parts(value=0.0, wrapped=True):
        state = part_of(rank, value, wrapped)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor) == (kind == "dtensors")}

    dcp.save(parts(10.0), checkpoint_id="step-1", storage_writer=writer)
    check_store(store, 1, 10.0)
    state = parts(20.0)
    saving = dcp.async_save(state, checkpoint_id="step-2", storage_writer=writer)
    change(state)
    saving.result()
    check_store(store, 2, 20.0)
    # PyTorch reads what it would have written.
    theirs, ours = parts(wrapped=False), parts(wrapped=False)
    dcp.save(parts(20.0, wrapped=False), checkpoint_id=f"{folder}/theirs")
    dcp.load(theirs, checkpoint_id=f"{folder}/theirs")
    dcp.load(ours, checkpoint_id="step-2", storage_reader=store.reader())
    for name, tensor in parts(20.0, wrapped=False).items():
        assert str(ours[name]) == str(theirs[name]), name
        part = slice(4 * rank, 4 * rank + 4) if name == "one" else slice(None)
        assert str(ours[name][part]) == str(tensor[part]), name


@pytest.mark.parametrize(
    "kind",
    [
        "dtensors",
        pytest.param(
            "attributes",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("torch.distributed.checkpoint.protocol") is None,
                reason="this PyTorch has no CheckpointableTensor: see the test of the refusal",
            ),
        ),
    ],
)
def test_dcp_saves_and_stages_the_parts(tmp_path, kind):
    on_ranks(2, tmp_path, save_and_load, tmp_path, kind)
    assert tensorcask.Store(tmp_path / "store").verify().is_clean


def through_the_engine(folder, memory):
    rank = dist.get_rank()
    with tensorcask.Engine(f"{folder}/store", rank=rank, world=2, folder=memory) as engine:
        engine.save(part_of(rank, 30.0, wrapped=False), step=1)
        assert engine.wait("durable", 60).reached
        out = {name: tensor for name, tensor in part_of(rank, wrapped=False).items() if name != "padded"}
        engine.restore(1, out=out, partial=True)
        for name, tensor in part_of(rank, 30.0, wrapped=False).items():
            part = slice(4 * rank, 4 * rank + 4) if name == "one" else slice(None)
            assert name == "padded" or str(out[name][part]) == str(tensor[part]), name
        dist.barrier()
        engine.finish()


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_the_engine_saves_the_parts(tmp_path, host_memory):
    on_ranks(2, tmp_path, through_the_engine, tmp_path, host_memory)
    check_store(tensorcask.Store(tmp_path / "store"), 1, 30.0)


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_an_older_pytorch_is_refused_that_takes_a_part_for_a_whole(tmp_path, monkeypatch, save):
    monkeypatch.setattr(tensorcask._refusals, "_dcp_plans_parts", lambda: False)
    half = described(torch.arange(4.0), (8,), ((4,),), ((0,),), ((4,),))
    store = tensorcask.Store(tmp_path / "store")
    with pytest.raises(BaseException, match="takes it for the whole tensor"):
        saving = save({"w": half}, checkpoint_id="step-1", storage_writer=store.writer(), no_dist=True)
        saving.result()


def test_a_part_is_never_saved_as_a_whole(memory):
    half = described(torch.arange(4.0), (8,), ((4,),), ((0,),), ((4,),))
    with pytest.raises(TypeError, match=re.escape("state['w']: a part of a tensor")):
        tensorcask.save({"w": half}, memory, step=1)


def strided(folder):
    store = tensorcask.Store(f"{folder}/store")
    numbers, rank = torch.arange(8), dist.get_rank()
    pieces = DTensor.from_local(numbers.view(2, 2, 2)[:, rank].flatten(), init_device_mesh("cpu", (2,)), [_StridedShard(0, split_factor=2)], run_check=False)
    for save in (dcp.save, dcp.async_save):
        with pytest.raises(BaseException, match="whose local part is 2 pieces of the tensor"):
            save({"w": pieces}, checkpoint_id="step-1", storage_writer=store.writer())
    # FSDP2 over tensor parallelism: one piece.
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    whole = DTensor.from_local(numbers[4 * rank : 4 * rank + 4].clone(), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False)
    dcp.save({"w": whole}, checkpoint_id="step-1", storage_writer=store.writer())
    assert torch.equal(store.load(1)["w"], numbers)
    with pytest.raises(BaseException, match="whose local part is 2 pieces of the tensor"):
        dcp.load({"w": pieces}, checkpoint_id="step-1", storage_reader=store.reader())


def test_a_strided_shard_of_several_pieces_is_refused(tmp_path):
    on_ranks(2, tmp_path, strided, tmp_path)


class Own(torch.Tensor):
    """A tensor with shards that only it can find."""

    def __get_tensor_shard__(self, index):
        return self


def test_what_a_stage_cannot_copy_is_refused(memory):
    store = tensorcask.Store(memory)
    tensor = torch.arange(4.0).as_subclass(Own)
    with pytest.raises(TypeError, match=re.escape("state['w']: a Own gives DCP its shards by methods of its own")):
        dcp.async_save({"w": tensor}, checkpoint_id="step-1", storage_writer=store.writer(), no_dist=True)
    dcp.save({"w": tensor}, checkpoint_id="step-1", storage_writer=store.writer(), no_dist=True)
    assert torch.equal(store.load(1)["w"], torch.arange(4.0))
