"""The checkpointer and the optimizers of torchtitan, for a small model that FSDP2 shards."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import EVERY, STEPS, Run
from tensorcask.torchtitan import CheckpointManager
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

run = Run()
dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 32))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[1], model[4]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)


class Counter(torch.utils.data.IterableDataset, Stateful):
    """An endless text, another one on each rank."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield torch.randint(32, (9,), generator=torch.Generator().manual_seed(1000 * run.rank + self.at))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Progress(Stateful):
    """What torchtitan's Trainer keeps of itself."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


progress = Progress()
loader = ParallelAwareDataloader(Counter(), run.rank, run.world, batch_size=4)
optimizers = default_adamw(lr=1e-2, fused=False).build(model_parts=[model])
schedules = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=STEPS)
parts = dict(
    # torchtitan cannot load its data loader on another number of ranks.
    dataloader=None if run.arguments.only_load else loader,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedules,
    states={"train_state": progress},
    sd_adapter=None,
    base_folder=run.work,
)


def tensors():
    return {**dict(model.named_parameters()), **{key: value for key, value in optimizers.state_dict().items() if torch.is_tensor(value)}}


# ANCHOR: lines
config = CheckpointManager.Config(enable=True, interval=EVERY, store=run.store, last_save_model_only=False)
checkpointer = config.build(**parts)
checkpointer.load()
# ANCHOR_END: lines
run.steps(progress.step, tensors)
batches = iter(loader)
while progress.step < STEPS:
    tokens = next(batches)
    progress.step += 1
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    checkpointer.maybe_wait_for_staging()
    optimizers.step()
    schedules.step()
    optimizers.zero_grad()
    checkpointer.save(progress.step, last_step=progress.step == STEPS)
    run.loss(progress.step, loss)
checkpointer.close()
run.end(tensors())
