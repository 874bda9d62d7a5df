"""Training steps in the names of checkpoints: one rule for every place that reads a name."""

from pathlib import Path

import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from tensorcask._steps import step_in
from tensorcask.torch import Reader, Writer

NAMED = {
    "100": 100,
    "step-100": 100,
    "step_100": 100,
    "step=100": 100,
    "global_step100": 100,
    "iter_0000100": 100,
    "checkpoint-100": 100,
    "runs/7/ckpt_20": 20,
    "/ckpts-3/step-100/": 100,
    "s3://bucket/run-7/global_step100": 100,
}
AMBIGUOUS = ["step=100-loss=0.25", "epoch=3-step=400.ckpt", "epoch-3", "model-100", "step-100.pt", "step--1", "final", "step-", "run-7/final", "1.5", "3.0/x9y", ""]


@pytest.mark.parametrize("name", NAMED)
def test_the_last_part_of_a_name_is_the_step(name):
    assert step_in(name) == step_in(Path(name)) == NAMED[name]
    assert Writer.validate_checkpoint_id(name) and Reader.validate_checkpoint_id(name)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_other_names_are_no_steps(name, memory):
    assert step_in(name) is None
    assert not Writer.validate_checkpoint_id(name) and not Reader.validate_checkpoint_id(name)
    store = tensorcask.Store(memory)
    with pytest.raises(ValueError, match="names no training step.*pass step= to store.writer"):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=store.writer())
    store.save({"w": torch.ones(1)}, step=1)
    with pytest.raises(BaseException, match="names no training step.*pass step= to store.reader"):
        dcp.load({"w": torch.ones(1)}, checkpoint_id=name, storage_reader=store.reader())


def test_a_second_save_does_not_hide_the_first(memory):
    """Regression test: both names once became step 25."""
    store = tensorcask.Store(memory)
    writer = store.writer(overwrite=True)
    for name in ("step=100-loss=0.25", "step=200-loss=0.25"):
        with pytest.raises(ValueError, match="names no training step"):
            dcp.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=writer)
    for step, name in ((100, "step=100-loss=0.25"), (200, "step=200-loss=0.25")):
        dcp.save({"w": torch.full((1,), float(step))}, checkpoint_id=name, storage_writer=store.writer(step=step))
    assert [info.step for info in store.snapshots()] == [100, 200]
    out = {"w": torch.zeros(1)}
    dcp.load(out, checkpoint_id="step=100-loss=0.25", storage_reader=store.reader(step=100))
    assert out["w"] == 100


def test_a_save_needs_a_step(memory):
    with pytest.raises(BaseException, match=r"no training step. Pass checkpoint_id='step-100', or step="):
        dcp.save({"w": torch.ones(1)}, storage_writer=tensorcask.Store(memory).writer())


def test_megatron_and_orbax_follow_the_rule():
    megatron = pytest.importorskip("tensorcask.megatron")
    assert megatron._step(Path("ckpt/iter_0000100")) == 100
    with pytest.raises(ValueError, match="names no training step.*iter_0000100"):
        megatron._step(Path("ckpt/epoch=3-step=400"))
    orbax = pytest.importorskip("tensorcask.orbax")
    suffix = ".orbax-checkpoint-tmp"
    assert orbax._step_of(Path(f"run/100{suffix}/net2{suffix}"), None) == (Path(f"run/100{suffix}"), 100)
    assert orbax._step_of(Path("exp_1/checkpoint_100"), None) == (Path("exp_1/checkpoint_100"), 100)
    assert orbax._step_of(Path("exp_1/checkpoint_100/net2"), None) == (Path("exp_1/checkpoint_100"), 100)
    with pytest.raises(ValueError, match=r"names no training step.*Pass step= to Save or State"):
        orbax._step_of(Path("exp_1/epoch=3-step=400"), None)
    assert orbax._step_of(Path("exp_1/epoch=3-step=400"), 7) == (Path("exp_1/epoch=3-step=400"), 7)
