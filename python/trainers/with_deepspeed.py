"""DeepSpeed with ZeRO: the stage is the variant. A model with dropout."""

import os

# Before DeepSpeed is imported: it looks for an accelerator.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import tensorcask
import torch
import torch.distributed as dist
from common import EVERY, STEPS, Run
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tensorcask.deepspeed import load_checkpoint, save_checkpoint
from torch import nn

run = Run()
deepspeed.init_distributed("gloo")
torch.manual_seed(1)
stage, _, kind = os.environ["VARIANT"].removeprefix("zero").partition("-")
config = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 30}, "bf16": {"enabled": kind == "bf16"},
    "zero_allow_untested_optimizer": True,
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": STEPS, "warmup_num_steps": 3, "warmup_max_lr": 1e-2}},
}  # fmt: skip
model = nn.Sequential(nn.Linear(12, 25), nn.Dropout(0.1), nn.GELU(), nn.LayerNorm(25), nn.Linear(25, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
dtype = torch.bfloat16 if kind == "bf16" else torch.float32


def train(step):
    batch = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + run.rank)).to(dtype)
    loss = (model_engine(batch) ** 2).mean()
    model_engine.backward(loss)
    model_engine.step()
    return loss


def tensors():
    names = list(model_engine.module.named_parameters())
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in names}
    for key in ("exp_avg", "exp_avg_sq"):
        found |= {f"{key}.{name}": safe_get_full_optimizer_state(parameter, key) for name, parameter in names}
    return found


def steps(done):
    return run.steps(done, tensors)


# ANCHOR: lines
engine = tensorcask.Engine(run.store, rank=dist.get_rank(), world=dist.get_world_size())
done = load_checkpoint(model_engine, engine) or 0
for step in steps(done):
    loss = train(step)
    if step % EVERY == 0:
        save_checkpoint(model_engine, engine, step=step)
    # ANCHOR_END: lines
    run.loss(step, loss)
engine.finish()
run.end(tensors())
