"""Transformers' Trainer: a GPT-2 with dropout. The variant is the kind of training, `-store` saves without an engine.

DDP by default, with tied weights; `bf16`, `lora` (adapters of PEFT), `fsdp2`, `zero1` to `zero3` (DeepSpeed), `zero2-bf16` and so on.
"""

import os

# Before DeepSpeed is imported: it looks for an accelerator.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import tensorcask
import torch
import transformers
import transformers.trainer
from accelerate import DistributedType
from common import EVERY, STEPS, Run, optimizer_tensors
from tensorcask.transformers import Callback, checkpoint

run = Run()
words = os.environ["VARIANT"].split("-")


class Losses(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            run.loss(state.global_step, logs["loss"])

    # Later than the callback that saves.
    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = True


class ShardingAccelerator(transformers.trainer.Accelerator):
    """Accelerate chooses DDP on every CPU, with a plugin of FSDP, too. The rest of its code for FSDP2 runs on a CPU."""

    def __init__(self, fsdp_plugin, **options):
        super().__init__(fsdp_plugin=fsdp_plugin, **options)
        self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = fsdp_plugin


zero = next((word for word in words if word.startswith("zero")), None)
options = {"bf16": "bf16" in words}
if "fsdp2" in words:
    transformers.trainer.Accelerator = ShardingAccelerator
    wrapped = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "reshard_after_forward": True}
    options |= {"fsdp": True, "fsdp_config": {"version": 2, **wrapped}}
elif zero:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    sharding = {"stage": int(zero.removeprefix("zero")), "stage3_param_persistence_threshold": 30}
    options["deepspeed"] = {**dict.fromkeys(names, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": sharding}
arguments = transformers.TrainingArguments(
    run.work, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", report_to=[],
    eval_strategy="steps", eval_steps=3, use_cpu=True, disable_tqdm=True, ddp_backend="gloo", learning_rate=1e-2, **options,
)  # fmt: skip
transformers.set_seed(1)
sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings="fsdp2" not in words))
if "lora" in words:
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1))
data = [{"input_ids": (torch.arange(16) * (i + 1)) % 32, "labels": (torch.arange(16) * (i + 1)) % 32} for i in range(32)]


def tensors(trainer):
    """All that is trained, whole."""
    if not zero:
        return {**dict(trainer.model.named_parameters()), **optimizer_tensors(trainer.optimizer)}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(optimizer := trainer.model_wrapped.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links states to parameters after the first step of the first group, when other groups have no states yet.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    trained = [(name, parameter) for name, parameter in trainer.model_wrapped.module.named_parameters() if parameter.requires_grad]
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in trained}
    for key in ("exp_avg", "exp_avg_sq"):
        found |= {f"{key}.{name}": safe_get_full_optimizer_state(parameter, key) for name, parameter in trained}
    return found


def trained(target):
    callbacks = [Callback(target, every=EVERY), Losses()]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    folder = checkpoint(target, run.work)
    if folder and isinstance(target, str):
        run.write(resumed=int(folder.rpartition("-")[2]), source="store")
    trainer.train(resume_from_checkpoint=folder)
    return trainer


if "store" in words:
    trainer = trained(run.store)
    run.end(tensors(trainer))

# ANCHOR: lines
engine = tensorcask.Engine(run.store, rank=arguments.process_index, world=arguments.world_size)
trainer = transformers.Trainer(
    model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[Callback(engine, every=EVERY), Losses()]
)
folder = checkpoint(engine, run.work)
trainer.train(resume_from_checkpoint=folder)
engine.finish()
# ANCHOR_END: lines
run.end(tensors(trainer))
