"""Lightning's Trainer with DDP, or with FSDP2 as variant fsdp2: a model with dropout."""

import functools
import os

import lightning.pytorch as pl
import torch
from common import EVERY, STEPS, Run, optimizer_tensors
from tensorcask.lightning import LATEST, DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

run = Run()


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.1), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5))

    def configure_model(self):
        if os.environ["VARIANT"] == "fsdp2" and not hasattr(self.layers, "unshard"):
            for layer in (self.layers[0], self.layers[4]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return (self.layers(batch) ** 2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS), "interval": "step"}]


class Losses(pl.Callback):
    """Reports the loss of a step after ModelCheckpoint, the last of all callbacks, has saved the step."""

    loss = None

    def on_train_batch_start(self, trainer, module, batch, index):
        if self.loss is not None:
            run.loss(trainer.global_step, self.loss)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.loss = outputs["loss"]

    def on_train_end(self, trainer, module):
        run.loss(trainer.global_step, self.loss)


data = torch.randn(STEPS * 8, 12, generator=torch.Generator().manual_seed(3))
# With a generator of its own, a loader takes no numbers from the one of dropout when it starts.
loader = StatefulDataLoader(data, batch_size=4, generator=torch.Generator())
keep = pl.callbacks.ModelCheckpoint(run.work, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1)
sharded = functools.partial(ModelParallelStrategy, data_parallel_size=run.world, tensor_parallel_size=1)
strategy = sharded if os.environ["VARIANT"] == "fsdp2" else DDPStrategy
options = dict(
    default_root_dir=run.work, accelerator="cpu", devices=run.world, callbacks=[Losses(), keep], max_epochs=1, enable_progress_bar=False,
    enable_model_summary=False, logger=False,
)  # fmt: skip
module = Module()

# ANCHOR: lines
trainer = pl.Trainer(strategy=strategy(run.store), **options)
trainer.fit(module, loader, ckpt_path=LATEST)
# ANCHOR_END: lines
run.end({**dict(module.named_parameters()), **optimizer_tensors(trainer.optimizers[0])})
