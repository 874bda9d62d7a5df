"""The Trainer of Transformers with its state in a store: the real library."""

import json
import os
import sys
from pathlib import Path

import pytest
import tensorcask
import torch
import torch.distributed as dist
from ranks import on_ranks
from tensorcask.__main__ import main

transformers = pytest.importorskip("transformers")
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin  # noqa: E402
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


def gpt2(**options):
    """A small model. Its dropout needs the states of random number generators."""
    transformers.set_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, **options))


def train(folder, *callbacks, resume=None, model=None, scaler=None, **options):
    # With tied embeddings.
    model = gpt2() if model is None else model
    data = [{"input_ids": (torch.arange(16) * (i + 1)) % 32, "labels": (torch.arange(16) * (i + 1)) % 32} for i in range(16)]
    options = {"max_steps": STEPS, "save_strategy": "no", **options}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    losses = Losses()
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[losses, *callbacks])
    if scaler is not None:
        # Accelerate makes one for fp16, which needs a GPU.
        trainer.accelerator.scaler = scaler
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        pass
    return losses.losses, model


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_training_goes_on_as_if_it_had_not_stopped(options, tmp_path, url):
    assert checkpoint(url, tmp_path) is None
    whole, model = train(tmp_path / "whole", **options)
    before, _ = train(tmp_path / "run", Callback(url, every=2, policy="intermittent:4"), Stop(), **options)
    store = tensorcask.Store(url)
    assert [info.step for info in store.snapshots()] == [2, 4]
    folder = checkpoint(url, tmp_path / "resume")
    assert folder.endswith("checkpoint-4")
    after, resumed = train(tmp_path / "run", Callback(url, every=2, policy="intermittent:4"), resume=folder, **options)
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


def test_the_scale_of_the_loss_is_part_of_a_step(tmp_path, url):
    def scaler():
        # It grows every second step, overflows, and goes back.
        return torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=2)

    whole, model = train(tmp_path / "whole", scaler=(expected := scaler()))
    assert expected.get_scale() != 2.0**125
    train(tmp_path / "run", Callback(url, every=2), Stop(), scaler=scaler())
    assert {"scale", "growth_factor", "_growth_tracker"} <= tensorcask.load(url)["scaler"].keys()
    folder = checkpoint(url, tmp_path / "resume")
    after, resumed = train(tmp_path / "run", Callback(url, every=2), resume=folder, scaler=(found := scaler()))
    assert after == {step: loss for step, loss in whole.items() if step > 4}
    assert found.state_dict() == expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def with_adapter():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1))


def test_of_a_model_with_an_adapter_the_adapter_is_saved(tmp_path, url):
    whole, model = train(tmp_path / "whole", model=with_adapter())
    train(tmp_path / "run", Callback(url, every=2), Stop(), model=with_adapter())
    assert all("lora" in name for name in tensorcask.Store(url).snapshot().tensors() if name.startswith("model."))
    folder = checkpoint(url, tmp_path / "resume")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in Path(folder).iterdir()}
    after, resumed = train(tmp_path / "run", Callback(url, every=2), resume=folder, model=with_adapter())
    assert after == {step: loss for step, loss in whole.items() if step > 4}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_beside_an_adapter_nothing_that_is_trained_is_left_out(tmp_path, url):
    def trained_norm():
        model = with_adapter()
        model.base_model.model.transformer.ln_f.weight.requires_grad_(True)
        return model

    _, model = train(tmp_path / "whole", model=trained_norm())
    train(tmp_path / "run", Callback(url, every=2), Stop(), model=trained_norm())
    _, resumed = train(tmp_path / "run", Callback(url, every=2), resume=checkpoint(url, tmp_path / "resume"), model=trained_norm())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


class ShardingAccelerator(Accelerator):
    """Accelerate chooses DDP on every CPU, with a plugin of FSDP, too. The rest of its code for FSDP2 runs on a CPU."""

    def __init__(self, fsdp_plugin, **options):
        super().__init__(fsdp_plugin=fsdp_plugin, **options)
        self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = fsdp_plugin


def train_on_ranks(url, folder, kind):
    """One rank of a training: undisturbed, until it is stopped, and from there on."""
    rank, folder = dist.get_rank(), Path(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT="0")
    options = {"eval_strategy": "steps", "eval_steps": 1, "ddp_backend": "gloo", "max_steps": 6}
    if kind == "fsdp2":
        transformers.trainer.Accelerator = ShardingAccelerator
        options |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}

    def part(*callbacks, resume=None):
        losses, model = train(folder / "run", *callbacks, resume=resume, model=gpt2(tie_word_embeddings=False), **options)
        state = model.state_dict().items()
        return losses, {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state}

    losses, state = part()
    before, _ = part(Callback(url, every=2, keep_last=2), Stop())
    after, resumed = part(Callback(url, every=2, keep_last=2), resume=checkpoint(url, folder / "resume"))
    assert {**before, **after} == losses and set(after) == {5, 6}
    for name, tensor in state.items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_go_on_from_a_store(kind, tmp_path):
    url = str(tmp_path / "store")
    on_ranks(2, tmp_path, train_on_ranks, url, tmp_path, kind)
    store = tensorcask.Store(url)
    assert store.steps == [4, 6] and store.verify().is_clean and "loss" in store.snapshot().user
    folder = checkpoint(url, tmp_path / "other")
    assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= {path.name for path in Path(folder).iterdir()}
    if kind == "fsdp2":
        with pytest.raises(tensorcask.UnsupportedError, match="step 6 was saved with FSDP2 or DeepSpeed, and this Trainer has neither"):
            train(tmp_path / "run", resume=folder)
        # As in another process, which has not made the folder.
        moved = Path(folder).rename(tmp_path / "moved")
        with pytest.raises(tensorcask.UnsupportedError, match="has no tensors. Make it again in this process"):
            train(tmp_path / "run", resume=str(moved))


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
    with pytest.raises(tensorcask.UnsupportedError, match="fp16: the optimizer of this Trainer has no gradient scaler"):
        Callback(memory, every=1).on_train_begin(arguments, None, None)
    arguments.fp16, arguments.fsdp = False, True
    with pytest.raises(tensorcask.UnsupportedError, match="no transformers.Trainer has called"):
        Callback(memory, every=1).on_train_begin(arguments, None, None)


class Divided(transformers.Trainer):
    def begin(self, **attributes):
        """Begins a training whose model is divided in some other way."""
        vars(self).update(attributes)
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        self.callback_handler.on_train_begin(self.args, self.state, self.control)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"is_fsdp_enabled": True}, "cannot save FSDP1. Use FSDP2"),
        ({"is_fsdp_xla_enabled": True}, "cannot save FSDP of XLA. Use the Trainer's own"),
        ({"is_distributed_loading_by_transformers": True}, "that Transformers has divided"),
    ],
)
def test_other_divisions_are_refused(attributes, expected, tmp_path, memory):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(tensorcask.UnsupportedError, match=expected):
        Divided(gpt2(), arguments, callbacks=[Callback(memory, every=1)]).begin(**attributes)
