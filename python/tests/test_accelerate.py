"""An Accelerator through the engine: the real library. `python/trainers` tests it on several ranks, killed."""

import collections
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
        self.kinds, self.last = collections.Counter(), collections.deque(maxlen=2)

    def state_dict(self):
        return {"count": self.count, "mean": self.mean, "kinds": self.kinds, "last": self.last}

    def load_state_dict(self, state):
        self.count, self.mean, self.kinds, self.last = state["count"], state["mean"], state["kinds"], state["last"]


class Model(torch.nn.Sequential):
    """Uses its first layers, whatever others it has."""

    def forward(self, batch):
        for layer in self[:3]:
            batch = layer(batch)
        return batch


def prepared(**others):
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = Model(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    for name, layer in others.items():
        model.add_module(name, layer)
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
        counter.kinds.update([counter.count % 2])
        counter.last.append(counter.count)
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
        assert repr((resumed[4].kinds, resumed[4].last)) == "(Counter({1: 3, 0: 3}), deque([5, 6], maxlen=2))"
        assert resumed[3].get_last_lr() == whole[3].get_last_lr()
        engine.finish()
    found = tensorcask.Store(url).snapshot()
    assert found.user["epoch"] == 1 and "optimizers.0.state.0.weight.exp_avg" in found.tensors()


def bits(prepared):
    """Everything that a training step depends on."""
    _, model, optimizer, schedule, _ = prepared
    return str(([(name, p.tolist(), p.grad) for name, p in model.named_parameters()], optimizer.state_dict(), schedule.state_dict(), torch.get_rng_state().tolist()))


def test_a_look_and_a_save_change_nothing(url, host_memory):
    """PyTorch describes a new optimizer by a step that counts."""
    expected = train(*prepared(), 3)
    looked = prepared()
    before = bits(looked)
    with tensorcask.Engine(url) as engine:
        assert load_state(looked[0], engine) is None
        assert bits(looked) == before
        save_state(looked[0], engine, step=0)
        assert bits(looked) == before
        assert train(*looked, 3) == expected
        engine.wait("durable", 60)
    resumed = prepared()
    with tensorcask.Engine(url) as engine:
        assert load_state(resumed[0], engine) == 0
        assert bits(resumed) == before and train(*resumed, 3) == expected
        # A template that cannot be filled: the training can still begin, and the error is not that of a first start.
        grown = prepared(added=torch.nn.Linear(1, 1))
        before = bits(grown)
        with pytest.raises(tensorcask.TemplateError, match="added"):
            load_state(grown[0], engine)
        assert bits(grown) == before


def test_a_parameter_that_never_had_a_gradient_has_no_moments(url, host_memory):
    whole = prepared(unused=torch.nn.Linear(2, 2))
    with tensorcask.Engine(url) as engine:
        train(*whole, 2)
        save_state(whole[0], engine, step=2)
        expected = train(*whole, 2)
        resumed = prepared(unused=torch.nn.Linear(2, 2))
        assert load_state(resumed[0], engine) == 2
        assert train(*resumed, 2) == expected
        assert bits(resumed) == bits(whole)


def test_what_cannot_be_saved_is_refused(url, host_memory, monkeypatch):
    accelerator = prepared()[0]
    with tensorcask.Engine(url, rank=1, world=2, hosts=None) as engine, pytest.raises(ValueError, match="rank 1 of 2, but the accelerator"):
        save_state(accelerator, engine, step=1)
    with tensorcask.Engine(f"{url}-2") as engine:
        monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.DEEPSPEED)
        with pytest.raises(tensorcask.UnsupportedError, match="cannot save DEEPSPEED"):
            save_state(accelerator, engine, step=1)
        monkeypatch.undo()
