"""Megatron-FSDP, whose states are DTensors with uneven shards, through `torch.distributed.checkpoint`: real ranks on gloo."""

import pytest
import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_on_cpu import shard_without_cuda
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard")
from megatron.core import package_info  # noqa: E402


def made(seed):
    from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    # Gradients are summed: gloo has no weighted mean, which Megatron takes otherwise.
    return fully_shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), calculate_per_token_loss=True, dp_shard_dim="dp", tp_dim="tp",
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp")), device=torch.device("cuda:0"),
        fsdp_unit_modules=[torch.nn.Linear], overlap_grad_reduce=False, overlap_param_gather=False,
    )  # fmt: skip


def step(model, optimizer, number):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number * 10 + dist.get_rank()))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model, optimizer):
    moments = {f"{at}.{key}": value for at, state in optimizer.state_dict()["state"].items() for key, value in state.items()}
    found = {**model.state_dict(), **moments}
    assert any(isinstance(value, DTensor) for value in moments.values())
    return {name: (value.to_local() if isinstance(value, DTensor) else value).clone() for name, value in found.items()}


def is_same(one, other):
    assert one.keys() == other.keys() and not [name for name in one if not torch.equal(one[name], other[name])]


def resumes(url):
    shard_without_cuda()
    store = tensorcask.Store(url)
    model, optimizer = made(seed=1)
    for number in (1, 2):
        step(model, optimizer, number)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id="step-2", storage_writer=store.writer())
    saved = tensors(model, optimizer)
    step(model, optimizer, 3)
    fresh, fresh_optimizer = made(seed=2)
    state = {"model": fresh.state_dict(), "optimizer": fresh_optimizer.state_dict()}
    dcp.load(state, checkpoint_id="step-2", storage_reader=store.reader())
    fresh.load_state_dict(state["model"])
    fresh_optimizer.load_state_dict(state["optimizer"])
    is_same(tensors(fresh, fresh_optimizer), saved)
    step(fresh, fresh_optimizer, 3)
    is_same(tensors(fresh, fresh_optimizer), tensors(model, optimizer))


@pytest.mark.skipif(package_info.VERSION[:2] < (0, 17), reason="Megatron Core 0.16 keeps moments that are no DTensors")
def test_megatron_fsdp_resumes(tmp_path, url):
    on_ranks(2, tmp_path, resumes, url)
    assert tensorcask.Store(url).verify().is_clean
