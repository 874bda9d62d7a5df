"""Asynchronous saves in processes of their own: failures reach every rank, and killed processes commit nothing.

TENSORCASK_TEST_RANKS sets the number of ranks.
"""

import os
import signal

import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = int(os.environ.get("TENSORCASK_TEST_RANKS", "2"))


class FailsOnTheLastRank(dcp.DefaultSavePlanner):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def create_local_plan(self):
        self._fail("plan")
        return super().create_local_plan()

    def resolve_data(self, write_item):
        self._fail("data")
        return super().resolve_data(write_item)

    def _fail(self, where):
        if where == self.where and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError(f"no {where}")


def state(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((RANKS * 4, 3), value), mesh, [Shard(0)], src_data_rank=None), "step": value}


def save(store, value, planner=None):
    kind = AsyncCheckpointerType.PROCESS
    options = {"storage_writer": store.writer(policy="consecutive"), "planner": planner, "async_checkpointer_type": kind}
    return dcp.async_save(state(value), checkpoint_id=f"step-{int(value)}", **options)


def every(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def work(url):
    last = dist.get_world_size() - 1
    store = tensorcask.Store(url)
    save(store, 1.0).result()
    for where in ("plan", "data"):
        failures = {}
        try:
            save(store, 2.0, FailsOnTheLastRank(where)).result()
        except CheckpointException as failed:
            failures = {rank: str(error) for rank, (error, _) in failed.failures.items()}
        # Every rank learns which rank failed, and why.
        assert every(failures) == [{last: f"no {where}"}] * (last + 1)
    save(store, 2.0).result()
    loaded = state(0.0)
    dcp.load(loaded, checkpoint_id="step-2", storage_reader=store.reader())
    assert (loaded["w"].full_tensor() == 2).all() and loaded["step"] == 2.0
    # On the way to another process, PyTorch loses the attributes that say which part of a tensor a rank has.
    part = torch.full((4,), 1.0)
    part.global_shape, part.global_offsets, part.local_offsets, part.local_sizes = (4 * (last + 1),), ((4 * dist.get_rank(),),), ((0,),), ((4,),)
    try:
        options = {"storage_writer": store.writer(), "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        dcp.async_save({"part": part}, checkpoint_id="step-9", **options).result()
        told = ""
    except BaseException as error:
        told = str(error)
    assert all("state['part']: a tensor that tells DCP by its attributes" in text for text in every(told)), told
    dist.barrier()
    # The process of one rank is killed: that rank learns of it, the others of the broken connection.
    if dist.get_rank() == last:
        process = _async_process_executor._CHECKPOINT_PROCESS._save_process
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    dist.barrier()
    try:
        save(store, 3.0).result()
        told = None
    except BaseException as error:
        told = type(error).__name__
    assert None not in every(told), every(told)


def test_failures_reach_every_rank_and_nothing_is_committed(tmp_path):
    on_ranks(RANKS, tmp_path, work, tmp_path / "store")
    store = tensorcask.Store(tmp_path / "store")
    assert [(info.step, info.kind) for info in store.snapshots()] == [(1, "base"), (2, "delta")]
    assert store.verify().is_clean and (store.load(2)["w"] == 2).all()
