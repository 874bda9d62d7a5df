"""Programs that set a default device: `torch.set_default_device("cuda")`. The device `meta` stands for it, because every machine has it, and
a tensor that lands there has lost its data."""

import sys

import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from tensorcask import interchange, weights
from tensorcask.torch import register, unregister


@pytest.fixture(params=["set_default_device", "with"])
def elsewhere(request):
    """A default device that is not the CPU."""
    if request.param == "with":
        with torch.device("meta"):
            yield
    else:
        torch.set_default_device("meta")
        yield
        torch.set_default_device(None)


def numbers(value=1.0):
    return torch.arange(8, dtype=torch.float32, device="cpu") * value


def zeros():
    return torch.zeros(8, device="cpu")


def state(value=1.0):
    return {"model": {"w": numbers(value), "half": numbers(value).bfloat16()}, "pair": (numbers(), 1), "rng": torch.get_rng_state(), "none": torch.zeros(0, device="cpu")}


def check(loaded, value=1.0):
    assert str(loaded) == str(state(value)) and loaded["model"]["w"].device.type == "cpu"


def test_states(url, elsewhere, tmp_path):
    tensorcask.save(state(), url, step=1, codecs="*=tc.raw", policy="full")
    check(tensorcask.load(url))
    check(tensorcask.load(url, mmap=True))
    check(tensorcask.load(url, device="cpu"))
    assert tensorcask.load(url, dtype="bf16")["model"]["w"].dtype == torch.bfloat16
    assert torch.equal(tensorcask.load(url, slices={"model.w": slice(2, 4)})["model.w"], numbers()[2:4])
    template = {"model": {"w": zeros()}}
    tensorcask.load(url, out=template)
    turned = torch.zeros(2, 8, device="cpu").t()[:, 0]
    tensorcask.load(url, out={"model": {"w": turned}})
    assert torch.equal(template["model"]["w"], numbers()) and torch.equal(turned, numbers())
    tensorcask.save(state(2.0), url, step=2)
    tensorcask.load(url, 2, out=template, have=1)
    assert torch.equal(template["model"]["w"], numbers(2.0))
    assert torch.equal(tensorcask.Store(url).snapshot()["model.w"], numbers(2.0))
    for kind, file in (("torch", "a.pt"), ("safetensors", "a.safetensors"), ("dcp", "folder")):
        interchange.export(url, tmp_path / file, step=2, format=kind)
        interchange.import_(tmp_path / file, tmp_path / f"{kind}-store", step=1)
        assert torch.equal(tensorcask.load(tmp_path / f"{kind}-store", tensors="model.w")["model.w"], numbers(2.0))


def test_dcp(url, elsewhere):
    store = tensorcask.Store(url)
    writer = store.writer()
    for step, save in enumerate((dcp.save, dcp.async_save, dcp.async_save), 1):
        pending = save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
        if step > 1:
            pending.result()
        check(store.load(step), step)
        template = {"model": {"w": zeros(), "half": zeros().bfloat16()}}
        turned = torch.zeros(2, 8, device="cpu").t()[:, 0]
        template["model"]["w"] = turned if step == 2 else template["model"]["w"]
        dcp.load(template, storage_reader=store.reader(step=step), no_dist=True)
        assert torch.equal(template["model"]["w"], numbers(step))
    register(url)
    try:
        loaded = {"model": {"w": zeros()}}
        dcp.load(loaded, checkpoint_id=f"{url}/step-3", no_dist=True)
        assert torch.equal(loaded["model"]["w"], numbers(3))
    finally:
        unregister()


def test_weights(memory, elsewhere):
    publisher = weights.Publisher(memory)
    policy = weights.Subscriber(memory, {"w": zeros()})
    for version in (1, 2):
        publisher.publish({"w": numbers(version)}, version)
        assert policy.update() == version
        assert torch.equal(dict(policy.named_tensors())["w"], numbers(version))


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
@pytest.mark.parametrize("encode", ["agent", "inline"])
def test_the_engine(url, elsewhere, host_memory, encode):
    with tensorcask.Engine(url, encode=encode) as engine:
        engine.save(state(3.0), step=1)
        check(engine.restore().state, 3.0)
        out = state(0.0)
        engine.restore(out=out)
        check(out, 3.0)
        engine.finish()
        check(engine.store.load(), 3.0)
