"""Tensors on a device, without a GPU: what is registered with CUDA, and restores into memory that is not the host's.

Here, tensors of the CPU stand for tensors on a device. `test_gpu.py` has the tests with a GPU.
"""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import tensorcask
import torch
from tensorcask import _convert, _device, _frameworks, _native


class Runtime:
    """Notes what is registered; `refused` is the address from which on it refuses."""

    def __init__(self, refused=None):
        self.registered, self.refused, self.calls = {}, refused, 0
        self.entered, self.block = threading.Event(), None

    def cudaHostRegister(self, address, count, _flags):
        self.calls += 1
        self.entered.set()
        if self.block is not None:
            self.block.wait()
        if self.refused is not None and address >= self.refused:
            return 2
        self.registered[address] = count
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.registered.pop(address, None) else 1


MAPPING = SimpleNamespace(address=1 << 40, bytes=1000)


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(_device, "PIECE_BYTES", 256)
    return found


def test_memory_is_registered_in_pieces_and_forgotten(runtime):
    arena = _device.Arena()
    arena._rest_to_register(MAPPING, "cuda:0")()
    assert arena.is_registered() and arena._rest_to_register(MAPPING, "cuda:0") is None
    assert runtime.registered == {MAPPING.address + at: min(256, 1000 - at) for at in range(0, 1000, 256)}
    assert arena.forget() and not runtime.registered and not arena.is_registered()


def test_a_copy_stops_the_thread_and_the_next_one_goes_on(runtime):
    arena = _device.Arena()
    runtime.block = threading.Event()
    arena._rest_to_register(MAPPING, "cuda:0")()
    runtime.entered.wait()
    stopping = threading.Thread(target=arena._stop)
    stopping.start()
    arena._pause.wait()
    runtime.block.set()
    stopping.join()
    assert runtime.registered == {MAPPING.address: 256} and arena._registered == 256
    assert list(arena._spans(MAPPING.address + 100, 400)) == [(0, 156), (156, 244)]
    arena._rest_to_register(MAPPING, "cuda:0")()
    assert arena.is_registered() and len(runtime.registered) == 4


def test_a_piece_that_is_refused_is_not_tried_again(runtime):
    runtime.refused = MAPPING.address + 512
    arena = _device.Arena()
    arena._rest_to_register(MAPPING, "cuda:0")()
    with pytest.warns(RuntimeWarning, match="registered 512 of 1000 bytes"):
        assert not arena.is_registered()
    assert runtime.calls == 3 and arena._rest_to_register(MAPPING, "cuda:0") is None
    assert arena.forget() and not runtime.registered


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("out", [torch.zeros(40, 50), torch.zeros(50, 40).t(), torch.zeros(()), torch.zeros(0, 3)])
def test_a_tensor_is_filled_from_memory(monkeypatch, is_known, out):
    monkeypatch.setattr(_device, "PIECE_BYTES", 256)
    source = torch.randn(out.shape)
    arena = _device.Arena()
    if is_known:
        arena._mapping = SimpleNamespace(address=source.data_ptr() - 72, bytes=source.nbytes + 1000)
    arena.fill(out, source.data_ptr(), source.nbytes)
    assert torch.equal(out, source)


def test_no_copy_crosses_the_end_of_a_piece(monkeypatch):
    monkeypatch.setattr(_device, "PIECE_BYTES", 256)
    arena = _device.Arena()
    arena._mapping = MAPPING
    spans = list(arena._spans(MAPPING.address + 250, 600))
    assert spans == [(0, 6), (6, 256), (262, 256), (518, 82)]
    assert list(arena._spans(MAPPING.address - 250, 600)) == [(0, 600)], "other memory is not divided"


def state_of(value):
    tied = torch.full((30, 20), value)
    return {"a": tied, "b": tied, "view": torch.full((8, 6), value * 2).t(), "none": torch.zeros(0), "one": torch.tensor(value), "n": 3}


@pytest.mark.parametrize("source", ["slot", "tier"])
def test_a_restore_fills_memory_that_is_not_the_hosts(url, host_memory, tmp_path, monkeypatch, source):
    monkeypatch.setattr(_frameworks, "is_on_device", lambda _tensor: True)
    with tensorcask.Engine(url, folder=host_memory) as engine:
        engine.save(state_of(1.5), step=1)
        assert engine.wait("durable", 120).reached
        if source == "slot":
            out = state_of(0.0)
            found = engine.restore(out=out)
    if source == "tier":
        with tensorcask.Engine(url, folder=tmp_path / "elsewhere") as engine:
            out = state_of(0.0)
            found = engine.restore(out=out)
    assert found.source == source
    for name, expected in state_of(1.5).items():
        assert found.state[name] is out[name] if name != "n" else found.state[name] == 3
        assert name == "n" or torch.equal(out[name], expected), name


def test_tensors_of_a_device_are_read_window_by_window(memory, monkeypatch):
    monkeypatch.setattr(_device, "WINDOW_BYTES", 1 << 20)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5000, 1000, generator=generator)

    def state(step):
        moved = weights + step * torch.randn(5000, 1000, generator=generator) * 1e-3
        rest = {"bias": torch.randn(7), "flags": torch.arange(1001) % 3 == step % 3, "none": torch.zeros(0, 3), "one": torch.tensor(float(step))}
        return {"model.w": moved.bfloat16(), "master.w": moved, "part": moved[:50], **rest}

    saved = {step: state(step) for step in (1, 2)}
    for step, one in saved.items():
        assert tensorcask.save(one, memory, step=step, policy="consecutive").kind == ("base" if step == 1 else "delta")
    for step, one in saved.items():
        outs = {name: torch.zeros_like(value) for name, value in one.items()}
        snapshot = tensorcask.Store(memory).snapshot(step)
        windows = _native.windows(snapshot._native, list(outs), 1 << 20)
        assert len(windows) > 4 and sum(map(len, windows)) > len(outs), "large tensors are divided"
        _device.read_whole(snapshot._native, outs)
        for name, expected in one.items():
            assert torch.equal(outs[name], expected), name


def test_a_load_makes_tensors_on_a_device(memory, monkeypatch):
    """Here, the CPU is a device that is not the host's memory."""
    monkeypatch.setattr(_convert, "is_remote", lambda device: device == "cpu")
    tensorcask.save(state_of(1.5), memory, step=1)
    reads = noted_reads(monkeypatch)
    loaded = tensorcask.load(memory, device="cpu")
    assert reads.pop() == {"a", "none", "one", "view"}
    assert list(loaded) == list(state_of(1.5)) and loaded["a"] is loaded["b"]
    assert_state(loaded, 1.5)
    tensors = tensorcask.load(memory, device="cpu", tensors=["one", "view"])
    assert reads.pop() == {"one", "view"} and list(tensors) == ["one", "view"] and torch.equal(tensors["view"], state_of(1.5)["view"])
    # Converted tensors come through the host: the device never holds both forms. A scalar is not converted.
    halves = tensorcask.load(memory, device="cpu", dtype="f16")
    assert reads.pop() == {"one"} and halves["a"].dtype == torch.float16 and halves["a"] is halves["b"]


def test_a_load_fills_tensors_of_a_device(memory, monkeypatch):
    for module, name in ((_frameworks, "is_on_device"), (_device, "is_on_device")):
        monkeypatch.setattr(module, name, lambda _tensor: True)
    monkeypatch.setattr(_device, "reads_directly", lambda tensor: isinstance(tensor, torch.Tensor) and _device.is_plain(tensor))
    tensorcask.save(state_of(1.5), memory, step=1)
    reads = noted_reads(monkeypatch)
    out = state_of(0.0)
    loaded = tensorcask.load(memory, out=out)
    # "b" is tied to "a"; the elements of "view" are not in order.
    assert reads.pop() == {"a", "none", "one"}
    assert_state(loaded, 1.5)
    assert_state(out, 1.5)
    assert all(loaded[name] is out[name] for name in ("a", "b", "view", "none", "one"))
    with pytest.raises(tensorcask.InvalidArgumentError, match="`one` of|shape"):
        tensorcask.load(memory, out=state_of(0.0) | {"one": torch.zeros(2)})


def test_tensors_of_a_device_that_share_memory_are_refused(memory):
    both = torch.zeros(2, 100)
    tensorcask.save({"first": torch.ones(100), "second": torch.full((100,), 2.0)}, memory, step=1)
    snapshot = tensorcask.Store(memory).snapshot()
    _device.read_whole(snapshot._native, {"first": both[0], "second": both[1]})
    assert both[0].eq(1).all() and both[1].eq(2).all()
    flat = both.flatten()
    with pytest.raises(tensorcask.InvalidArgumentError, match="`first` and `second` share memory on cpu"):
        _device.read_whole(snapshot._native, {"first": flat[:100], "second": flat[50:150]})


def noted_reads(monkeypatch):
    """Names of the tensors of each read into tensors of a device."""
    reads, read_whole = [], _device.read_whole
    monkeypatch.setattr(_device, "read_whole", lambda native, outs: (reads.append(set(outs)), read_whole(native, outs)))
    return reads


def assert_state(found, value):
    for name, expected in state_of(value).items():
        assert name == "n" or torch.equal(found[name], expected), name
