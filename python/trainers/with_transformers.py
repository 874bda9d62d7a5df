"""Transformers' Trainer with DDP: a GPT-2 with dropout and tied weights."""

import tensorcask
import torch
import transformers
from common import EVERY, STEPS, Run, optimizer_tensors
from tensorcask.transformers import Callback, checkpoint

run = Run()


class Losses(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            run.loss(state.global_step, logs["loss"])

    # Later than the callback that saves. Only the first rank logs.
    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = True


transformers.set_seed(1)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
data = [{"input_ids": (torch.arange(16) * (i + 1)) % 32, "labels": (torch.arange(16) * (i + 1)) % 32} for i in range(32)]
arguments = transformers.TrainingArguments(
    run.work, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", report_to=[],
    use_cpu=True, disable_tqdm=True, ddp_backend="gloo",
)  # fmt: skip

# ANCHOR: lines
engine = tensorcask.Engine(run.store, rank=arguments.process_index, world=arguments.world_size)
trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Callback(engine, every=EVERY), Losses()])
folder = checkpoint(engine, run.work)
trainer.train(resume_from_checkpoint=folder)
engine.finish()
# ANCHOR_END: lines
run.end({**dict(model.named_parameters()), **optimizer_tensors(trainer.optimizer)})
