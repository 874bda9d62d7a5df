"""Accelerate with a loop of one's own: a model with dropout under DDP, or under FSDP2 as variant fsdp2."""

import os

import accelerate
import tensorcask
import torch
from accelerate import Accelerator
from common import EVERY, STEPS, Run, optimizer_tensors
from tensorcask.accelerate import load_state, save_state
from torch import nn

run = Run()
accelerate.utils.set_seed(1)
plugin = None
if os.environ.get("VARIANT") == "fsdp2":
    os.environ["FSDP_VERSION"] = "2"
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
if plugin is not None:
    # Accelerate chooses DDP on every CPU, with a plugin of FSDP, too. The rest of its code for FSDP2 runs on a CPU.
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
model = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.1), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(STEPS * 8, 12, generator=torch.Generator().manual_seed(3))
# With a generator of its own, a loader takes no numbers from the one of dropout when it starts.
loader = torch.utils.data.DataLoader(data, batch_size=4, generator=torch.Generator())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


def tensors():
    return {**dict(model.named_parameters()), **optimizer_tensors(optimizer.optimizer)}


def batches(done):
    run.steps(done, tensors)
    return enumerate(accelerator.skip_first_batches(loader, done), done + 1)


def train(batch):
    loss = (model(batch) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss


# ANCHOR: lines
engine = tensorcask.Engine(run.store, rank=accelerator.process_index, world=accelerator.num_processes)
done = load_state(accelerator, engine) or 0
for step, batch in batches(done):
    loss = train(batch)
    if step % EVERY == 0:
        save_state(accelerator, engine, step=step)
    # ANCHOR_END: lines
    run.loss(step, loss)
engine.finish()
run.end(tensors())
