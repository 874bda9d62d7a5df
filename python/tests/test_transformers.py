"""The Trainer of Transformers with its state in a store: the real library."""

import json
import sys
from pathlib import Path

import pytest
import tensorcask
import torch
from tensorcask.__main__ import main

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


def train(folder, *callbacks, resume=None, **options):
    transformers.set_seed(1)
    # The model has tied embeddings. Its dropout needs the states of random number generators.
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": (torch.arange(16) * (i + 1)) % 32, "labels": (torch.arange(16) * (i + 1)) % 32} for i in range(16)]
    options = {"max_steps": STEPS, "save_strategy": "no", **options}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    losses = Losses()
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[losses, *callbacks])
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
    assert (facts["loss"], facts["loss_step"]) == (whole[4], 4)
    # Tied weights are stored once.
    tensors = store.snapshot().tensors()
    assert tensors["model.lm_head.weight"].alias_of == "model.transformer.wte.weight" or tensors["model.transformer.wte.weight"].alias_of


class Watch(transformers.TrainerCallback):
    """Notes what depends on evaluations."""

    def __init__(self):
        self.rates, self.best, self.last = {}, None, 0

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.rates[state.global_step] = optimizer.param_groups[0]["lr"]

    def on_train_end(self, args, state, control, **kwargs):
        self.best, self.last = state.best_metric, state.global_step


class StopAfter(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


NEVER_BETTER = {"metric_for_best_model": "loss", "greater_is_better": False, "eval_strategy": "steps"}
PLATEAU = {"patience": 0, "factor": 0.1, "threshold": 10.0, "threshold_mode": "abs"}


@pytest.mark.parametrize(
    ("options", "patience"),
    [
        # Evaluations at the step of a save, at others, and at the end of an epoch, which has four steps.
        ({"eval_steps": 4}, 2),
        ({"eval_steps": 3}, 2),
        ({"eval_strategy": "epoch"}, 3),
        ({"eval_steps": 4, "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": PLATEAU}, None),
    ],
)
def test_evaluations_are_part_of_a_step(options, patience, tmp_path, url):
    options = {**NEVER_BETTER, "max_steps": 12, "learning_rate": 0.01, "restore_callback_states_from_checkpoint": patience is not None, **options}

    def trained(*callbacks, resume=None):
        watch = Watch()
        stopping = [] if patience is None else [transformers.EarlyStoppingCallback(patience, 10.0)]
        _, model = train(tmp_path / "run", watch, *callbacks, *stopping, resume=resume, **options)
        return watch, model

    whole, model = trained()
    trained(Callback(url, every=4), StopAfter(8))
    watch, resumed = trained(Callback(url, every=4), resume=checkpoint(url, tmp_path / "resume", step=4))
    assert (watch.best, watch.last) == (whole.best, whole.last)
    assert watch.rates == {step: rate for step, rate in whole.rates.items() if step >= 4}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


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


def test_a_checkpoint_of_the_trainer_is_imported_whole(tmp_path, url, capsys):
    whole, model = train(tmp_path / "run", save_strategy="steps", save_steps=4)
    source = tmp_path / "run" / "checkpoint-4"
    capsys.readouterr()
    # The step is in the folder.
    assert main(["import", str(source), url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [4]
    loaded = tensorcask.load(url)
    assert {"model", "optimizer", "scheduler", "rng", "trainer_state"} <= loaded.keys()
    assert loaded["files"]["config.json"] == (source / "config.json").read_bytes() and "training_args.bin" in loaded["files"]
    folder = checkpoint(url, tmp_path / "resume")
    assert {path.name for path in Path(folder).iterdir()} == {path.name for path in source.iterdir()}
    after, resumed = train(tmp_path / "again", resume=folder)
    assert after == {step: loss for step, loss in whole.items() if step > 4}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    # What cannot be kept is named.
    capsys.readouterr()
    (source / "global_step4").mkdir()
    assert main(["import", str(source), f"{url}-2", "--json"]) == 4
    told = capsys.readouterr()
    assert json.loads(told.out)["left_out"] == [f"{source}/global_step4/"]
    assert main(["import", str(source), f"{url}-3"]) == 4
    assert f"left out: {source / 'global_step4'}/" in capsys.readouterr().out


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
