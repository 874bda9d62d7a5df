"""Trains a small model with FSDP2, saves each step while it trains, and goes on from the newest saved step.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --steps 20 --kill-at 12   # kills itself after step 12
    torchrun --nproc-per-node 2 examples/train_fsdp2.py --steps 20                # goes on
"""

import argparse
import os
import signal

import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="runs/fsdp2", help="folder or URL, such as s3://bucket/run42")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--kill-at", type=int, help="rank 0 kills itself after this step")
arguments = parser.parse_args()

# ANCHOR: program
dist.init_process_group("gloo")                           # with GPUs: "cpu:gloo,cuda:nccl"
group = dist.new_group(backend="gloo")                    # of its own, because saves run beside training
store = tensorcask.Store(arguments.store)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))   # "cuda" with GPUs
optimizer = torch.optim.AdamW(model.parameters())


def state(step):
    weights, moments = get_state_dict(model, optimizer)   # creates the moments of a new optimizer
    return {"model": weights, "optimizer": moments, "step": step}


first = 1
try:
    steps = store.steps
except tensorcask.NotFoundError:
    steps = []                                            # no store: the very first start
if steps:
    loaded = state(0)
    dcp.load(loaded, storage_reader=store.reader())       # fills `loaded` from the newest step
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    first = loaded["step"] + 1

future = None
for step in range(first, arguments.steps + 1):
    torch.manual_seed(1000 * step + dist.get_rank())      # the data of this step and rank
    loss = (model(torch.randn(8, 256)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item()!r}", flush=True)
    if future is not None:
        future.result()                                   # raises an error if the previous save failed
    writer = store.writer(policy="consecutive")
    future = dcp.async_save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer, process_group=group)
    # ANCHOR_END: program
    if step == arguments.kill_at and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
# ANCHOR: end
future.result()
if dist.get_rank() == 0:
    print("saved steps", store.steps)
del group, future                                         # so that the group's threads end before Python does
dist.destroy_process_group()
# ANCHOR_END: end
