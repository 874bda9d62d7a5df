"""Every optimizer and schedule goes on from a loaded state as if it had not stopped, bit for bit."""

import inspect
import itertools
import warnings

import pytest
import tensorcask
import tensorcask.interchange
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler

warnings.filterwarnings("ignore", message=".*(lr_scheduler|sequence|epoch parameter).*")


def optimizers():
    found = [cls for _, cls in inspect.getmembers(torch.optim, inspect.isclass) if issubclass(cls, torch.optim.Optimizer)]
    return sorted((cls for cls in found if cls is not torch.optim.Optimizer), key=lambda cls: cls.__name__)


def of_torchao():
    try:
        import torchao.optim as found
    except ImportError:
        return []
    return [getattr(found, name) for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8", "_AdamW")]


def of_bitsandbytes():
    try:
        import bitsandbytes.optim as found
    except ImportError:
        return []
    return [getattr(found, name) for name in ("AdamW8bit", "Adam8bit", "Lion8bit", "SGD8bit", "RMSprop8bit", "Adagrad8bit", "AdamW", "AdEMAMix8bit")]


def made(kind):
    torch.manual_seed(0)
    sparse = kind.__name__ == "SparseAdam"
    model = torch.nn.Embedding(64, 128, sparse=True) if sparse else torch.nn.Linear(128, 64, bias=kind.__name__ != "Muon")
    options = {"lr": 1e-2} | ({"momentum": 0.9} if kind.__name__ in ("SGD", "SGD8bit") else {})
    return model, kind(model.parameters(), **options)


def train(model, optimizer, steps):
    for step in steps:
        batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
        given = torch.arange(4) + step if isinstance(model, torch.nn.Embedding) else batch

        def loss(given=given):
            optimizer.zero_grad()
            found = model(given).square().mean()
            found.backward()
            return found

        optimizer.step(loss)


def equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize("how", ["load", "out"])
@pytest.mark.parametrize("kind", [*optimizers(), *of_torchao(), *of_bitsandbytes()], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_an_optimizer_goes_on(kind, how, memory):
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    tensorcask.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, memory, step=3)
    train(model, optimizer, range(3, 5))
    other, again = made(kind)
    out = None
    if how == "out":
        train(other, again, range(7, 10))
        out = {"model": other.state_dict(), "optimizer": again.state_dict()}
    loaded = tensorcask.load(memory, out=out)
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    train(other, again, range(3, 5))
    equal(model.state_dict(), other.state_dict())


def named(model, optimizer):
    parts, moments = get_state_dict(model, optimizer)
    return {"model": parts, "optimizer": moments}


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("kind", of_torchao(), ids=lambda kind: kind.__name__)
def test_moments_made_of_tensors_go_through_dcp(kind, how, memory):
    store = tensorcask.Store(memory)
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    saved = getattr(dcp, how)(named(model, optimizer), storage_writer=store.writer(step=3), no_dist=True)
    train(model, optimizer, range(3, 5))
    if how == "async_save":
        saved.result()
    other, again = made(kind)
    train(other, again, range(7, 10))
    state = named(other, again)
    dcp.load(state, storage_reader=store.reader(), no_dist=True)
    set_state_dict(other, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(other, again, range(3, 5))
    equal(model.state_dict(), other.state_dict())
    # Any other reader has the same state.
    moment = tensorcask.load(memory)["optimizer"]["state"]["weight"]["exp_avg"]
    assert type(moment) is type(again.state[other.weight]["exp_avg"])


def test_moments_of_a_class_that_is_not_allowed_are_an_error_of_dcp(memory, monkeypatch):
    kind = next(iter(of_torchao()), None)
    if kind is None:
        pytest.skip("torchao is not installed")
    store = tensorcask.Store(memory)
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    state = named(model, optimizer)
    dcp.save(state, storage_writer=store.writer(step=3), no_dist=True)
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)
    with pytest.raises(CheckpointException, match=r"exp_avg'\]: a torchao.*add_safe_globals"):
        dcp.load(state, storage_reader=store.reader(), no_dist=True)


def double(epoch):
    return 0.9**epoch


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, double),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=double, scale_mode="cycle"),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 12),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.StepLR(o, 2, 0.5)], [3]),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_schedule_goes_on(steps, name, memory):
    def built():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, SCHEDULES[name](optimizer)

    def rates(optimizer, schedule, count):
        found = []
        for value in itertools.islice(itertools.cycle([3.0, 2.0, 2.5, 4.0]), count):
            optimizer.step()
            schedule.step(*([value] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, schedule = built()
    rates(optimizer, schedule, steps)
    tensorcask.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, memory, step=steps)
    other, again = built()
    loaded = tensorcask.load(memory)
    other.load_state_dict(loaded["optimizer"])
    again.load_state_dict(loaded["schedule"])
    assert rates(other, again, 6) == rates(optimizer, schedule, 6)


def test_all_schedules_are_tried():
    found = {name for name, cls in inspect.getmembers(lr_scheduler, inspect.isclass) if issubclass(cls, lr_scheduler.LRScheduler)}
    assert found - {"LRScheduler", "_LRScheduler"} <= SCHEDULES.keys()


def test_tensors_made_of_tensors_keep_their_class(memory, tmp_path):
    """Only where PyTorch lets the class in. Any other reader has a mapping."""
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    state = {"m": OptimState8bit.zeros((64, 64))}
    tensorcask.save(state, memory, step=1)
    assert type(tensorcask.load(memory)["m"]) is OptimState8bit
    assert tensorcask.load(memory, framework="numpy")["m"].keys() == {"codes", "scale", "qmap", "#class"}
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        assert tensorcask.load(memory)["m"].keys() == {"codes", "scale", "qmap", "#class"}
    finally:
        torch.serialization.add_safe_globals(allowed)
    # A file of torch.save is imported as the same.
    torch.save(state, tmp_path / "a.pt")
    tensorcask.interchange.import_(tmp_path / "a.pt", memory + "-2", step=1)
    found = tensorcask.load(memory + "-2")["m"]
    assert type(found) is OptimState8bit and torch.equal(found.codes, state["m"].codes)
    # A mapping of the user that only looks like one stays what it is.
    tensorcask.save({"m": {"#class": ["builtins.dict", [], [1], [1]], "w": torch.ones(1)}}, memory + "-3", step=1)
    assert tensorcask.load(memory + "-3")["m"]["#class"][0] == "builtins.dict"
