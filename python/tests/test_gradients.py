"""The gradients that chunks of first moments and momenta store, compared with those that real optimizers used."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorcask
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
WIDTH = 128


def trained(optimizer_of, clip=None, steps=6, compute=torch.bfloat16):
    """Trains a small network, whose gradients are computed in 16 bits. Yields the state of each step and the gradients that led to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(compute)
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = optimizer_of(list(masters.values()))
    for _ in range(steps):
        loss = (model(torch.randn(32, WIDTH, dtype=compute)) - 1).float().square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            masters[name].grad, parameter.grad = parameter.grad.float(), None
        if clip is not None:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        gradients = {name: p.grad.clone() for name, p in masters.items()}
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        moments = {
            key: {name: optimizer.state[p][key] for name, p in masters.items()}
            for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
            if key in optimizer.state[masters["0.weight"]]
        }
        yield {"master": {name: p.detach() for name, p in masters.items()}, **moments}, gradients


def assert_equal(found, used, moment):
    """Compares all gradients bit for bit, except those far smaller than their moments, which a shorter number may stand for."""
    differs = found != used
    assert not (differs & (used.abs() > 2**-10 * moment.abs())).any()
    assert ((found - used).abs() <= 2**-19 * torch.maximum(used.abs(), moment.abs())).all()


@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_gradients_of_adamw_are_restored_exactly(kernel, clip, memory):
    store = tensorcask.Store(memory)
    used = {}
    for step, (state, used[step]) in enumerate(trained(lambda p: torch.optim.AdamW(p, **{kernel: True}), clip), 1):
        store.save(state, step=step, policy="consecutive")
    for step in range(3, 7):
        snapshot = store.snapshot(step)
        for name in ("0.weight", "2.weight"):
            report = snapshot.gradient_report(f"master.{name}")
            assert report.moment == f"exp_avg.{name}"
            assert report.longest_bits <= 8
            assert report.estimated_elements == 0
            assert [rule == pytest.approx((0.9, 0.1)) for rule in report.rules] == [True]
            found = report.gradient
            assert found.dtype == torch.float32
            assert_equal(found, used[step][name], snapshot[f"exp_avg.{name}"])
            assert torch.equal(snapshot.gradient(f"exp_avg.{name}"), found)
            assert torch.equal(snapshot.gradient(f"master.{name}", (slice(3, 9), slice(None, 5))), found[3:9, :5])
            as_numpy = snapshot.gradient(f"master.{name}", slice(0, 2), framework="numpy")
            assert np.array_equal(as_numpy, found[:2].numpy())


def test_gradients_of_sgd_are_restored(memory):
    store = tensorcask.Store(memory)
    used = {}
    for step, (state, used[step]) in enumerate(trained(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)), 1):
        store.save({"master": state["master"], "momentum": state["momentum_buffer"]}, step=step, policy="consecutive")
    report = store.snapshot(6).gradient_report("master.2.weight")
    assert [rule == pytest.approx((0.9, 1.0)) for rule in report.rules] == [True]
    assert_equal(report.gradient, used[6]["2.weight"], store.snapshot(6)["momentum.2.weight"])


def test_gradients_of_f32_are_not_in_the_archive(memory):
    store, assigned = tensorcask.Store(memory), tensorcask.Store(f"{memory}-assigned")
    for step, (state, _) in enumerate(trained(torch.optim.AdamW, compute=torch.float32), 1):
        store.save(state, step=step, policy="consecutive")
        assigned.save(state, step=step, policy="consecutive", codecs=["exp_avg=tc.gradient"])
    with pytest.raises(tensorcask.NotFoundError, match="which holds none; save each step with the policy `consecutive`"):
        store.snapshot(6).gradient("master.0.weight")
    # They are not short. The assigned codec does not store them, or nothing proves its rule.
    with pytest.raises(tensorcask.NotFoundError, match="exp_avg.0.weight"):
        assigned.snapshot(6).gradient("master.0.weight")


def test_a_step_without_a_gradient_is_an_error(memory):
    store = tensorcask.Store(memory)
    for step, (state, _) in zip((1, 2, 4), trained(torch.optim.AdamW), strict=False):
        store.save({**state, "epoch": torch.zeros(3)}, step=step, policy="consecutive", codecs=["exp_avg=tc.gradient"])
    for step, name, words in [
        (1, "master.0.weight", "is stored as a base"),
        (4, "master.0.weight", "a delta against step 2, which is not the step before"),
        (2, "epoch", "has no first moment or momentum"),
    ]:
        with pytest.raises(tensorcask.NotFoundError, match=words):
            store.snapshot(step).gradient(name)
    with pytest.raises(tensorcask.TemplateError, match="no tensor"):
        store.snapshot(2).gradient("master.none")


def test_the_example_finds_the_bad_batch():
    command = [sys.executable, "-W", "ignore", ROOT / "examples" / "loss_spike.py", "--steps", "30", "--bad-step", "20"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [line.split(":") for line in shown.splitlines() if "usually" in line]
    assert {step for step, *_ in found} == {"step 20"}
    assert {"model.0.weight", "model.2.weight", "model.4.weight"} <= {name.strip() for _, name, *_ in found}
