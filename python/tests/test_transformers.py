"""The Trainer of Transformers with its state in a store: the real library."""

import sys

import pytest
import tensorcask
import torch

transformers = pytest.importorskip("transformers")
from tensorcask.transformers import Callback, checkpoint  # noqa: E402

STEPS = 8


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.losses = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


class Stop(transformers.TrainerCallback):
    """Interrupts a training before it can save at its end."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def train(folder, *callbacks, resume=None):
    transformers.set_seed(1)
    # The model has tied embeddings. Its dropout needs the states of random number generators.
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": (torch.arange(16) * (i + 1)) % 32, "labels": (torch.arange(16) * (i + 1)) % 32} for i in range(16)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )  # fmt: skip
    losses = Losses()
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[losses, *callbacks])
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        pass
    return losses.losses, model


def test_a_training_goes_on_as_if_it_had_not_stopped(tmp_path, url):
    assert checkpoint(url, tmp_path) is None
    whole, model = train(tmp_path / "whole")
    before, _ = train(tmp_path / "run", Callback(url, every=2, policy="intermittent:4"), Stop())
    store = tensorcask.Store(url)
    assert [info.step for info in store.snapshots()] == [2, 4]
    folder = checkpoint(url, tmp_path / "resume")
    assert folder.endswith("checkpoint-4")
    after, resumed = train(tmp_path / "run", Callback(url, every=2, policy="intermittent:4"), resume=folder)
    assert {**before, **after} == whole and set(after) == set(range(5, STEPS + 1))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert [info.step for info in store.snapshots()] == [2, 4, 6, 8]
    facts = store.snapshots()[1].user
    assert (facts["loss"], facts["loss_step"]) == (whole[3], 3)
    # Tied weights are stored once.
    tensors = store.snapshot().tensors()
    assert tensors["model.lm_head.weight"].alias_of == "model.transformer.wte.weight" or tensors["model.transformer.wte.weight"].alias_of


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_a_training_goes_on_through_the_engine(tmp_path, url, host_memory):
    whole, model = train(tmp_path / "whole")
    with tensorcask.Engine(url) as engine:
        assert checkpoint(engine, tmp_path) is None
        before, _ = train(tmp_path / "run", Callback(engine, every=2), Stop())
    with tensorcask.Engine(url) as engine:
        after, resumed = train(tmp_path / "run", Callback(engine, every=2), resume=checkpoint(engine, tmp_path / "resume"))
        assert {**before, **after} == whole and set(after) == set(range(5, STEPS + 1))
        engine.finish()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    # A store that the engine has filled can be read without an engine, too.
    assert checkpoint(url, tmp_path / "later").endswith(f"checkpoint-{STEPS}")
    with tensorcask.Engine(url) as engine, pytest.raises(TypeError, match="policy: pass options of saves to"):
        Callback(engine, every=2, policy="full")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with tensorcask.Engine(f"{url}-2", rank=1, world=2, hosts=None) as engine, pytest.raises(ValueError, match="rank 1 of 2, but the Trainer"):
        Callback(engine, every=1).on_train_begin(arguments, None, None)


def test_what_is_no_training_is_refused(tmp_path, memory):
    tensorcask.save({"w": torch.ones(2)}, memory, step=1)
    with pytest.raises(tensorcask.UnsupportedError, match="not saved by tensorcask.transformers"):
        checkpoint(memory, tmp_path)
    with pytest.raises(ValueError, match="every=0"):
        Callback(memory, every=0)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    arguments.fp16 = True
    with pytest.raises(tensorcask.UnsupportedError, match="with fp16"):
        Callback(memory, every=1).on_train_begin(arguments, None, None)
