"""An Accelerator through the engine: the real library. `python/trainers` tests it on several ranks, killed."""

import sys

import pytest
import tensorcask
import torch

accelerate = pytest.importorskip("accelerate")
from tensorcask.accelerate import load_state, save_state  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")


class Counter:
    """An object of the user."""

    def __init__(self):
        self.count, self.mean = 0, torch.zeros(2)

    def state_dict(self):
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state):
        self.count, self.mean = state["count"], state["mean"]


def prepared():
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    return accelerator, model, optimizer, schedule, counter


def train(accelerator, model, optimizer, schedule, counter, steps):
    losses = []
    for _ in range(steps):
        loss = (model(torch.ones(5, 3)) ** 2).sum()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.count += 1
        counter.mean = counter.mean + loss.item()
        losses.append(loss.item())
    return losses


def test_an_accelerator_goes_on_as_if_it_had_not_stopped(url, host_memory):
    whole = prepared()
    with tensorcask.Engine(url) as engine:
        assert load_state(whole[0], engine) is None
        train(*whole, 3)
        save_state(whole[0], engine, step=3, user={"epoch": 1})
        expected = train(*whole, 3)
    resumed = prepared()
    with tensorcask.Engine(url) as engine:
        assert load_state(resumed[0], engine) == 3
        assert train(*resumed, 3) == expected
        assert resumed[4].count == 6 and torch.equal(resumed[4].mean, whole[4].mean)
        assert resumed[3].get_last_lr() == whole[3].get_last_lr()
        engine.finish()
    found = tensorcask.Store(url).snapshot()
    assert found.user["epoch"] == 1 and "optimizers.0.state.0.weight.exp_avg" in found.tensors()


def test_what_cannot_be_saved_is_refused(url, host_memory, monkeypatch):
    accelerator = prepared()[0]
    with tensorcask.Engine(url, rank=1, world=2, hosts=None) as engine, pytest.raises(ValueError, match="rank 1 of 2, but the accelerator"):
        save_state(accelerator, engine, step=1)
    with tensorcask.Engine(f"{url}-2") as engine:
        monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.DEEPSPEED)
        with pytest.raises(tensorcask.UnsupportedError, match="cannot save DEEPSPEED"):
            save_state(accelerator, engine, step=1)
        monkeypatch.undo()
