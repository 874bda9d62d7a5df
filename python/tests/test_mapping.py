"""Snapshots as mappings, and arguments under the names that users of PyTorch know."""

import asyncio
import threading

import pytest
import tensorcask
import torch
from tensorcask import RawTensor


@pytest.fixture
def store(memory):
    store = tensorcask.Store(memory)
    state = {"model": {"w": torch.arange(4.0), "b*": torch.ones(2), "bc": torch.zeros(2)}, "head": torch.full((1,), 7.0), "epoch": 3}
    store.save(state, step=1)
    store.save(state, step=2, policy="consecutive")
    return store


def test_a_snapshot_is_a_mapping_of_its_tensors(store):
    snapshot = store.snapshot()
    assert list(snapshot) == list(snapshot.keys()) and sorted(snapshot) == ["head", "model.b*", "model.bc", "model.w"] and len(snapshot) == 4
    assert "model.w" in snapshot and "absent" not in snapshot and snapshot.get("absent") is None
    assert torch.equal(snapshot["model.w"], torch.arange(4.0)) and snapshot["head"].item() == 7
    # The name of a tensor may look like a pattern of others.
    assert torch.equal(snapshot["model.b*"], torch.ones(2))
    assert {name: tensor.shape for name, tensor in snapshot.items()}["model.w"] == (4,)
    assert len(dict(snapshot)) == len(list(snapshot.values())) == 4
    with pytest.raises(KeyError, match="step 2 has no tensor 'absent'"):
        snapshot["absent"]
    # A comparison reads nothing.
    before = store.native().io()
    assert snapshot == snapshot and snapshot != store.snapshot() and hash(snapshot) == hash(snapshot)
    assert len({snapshot, snapshot}) == 1 and store.native().io()[1] - before[1] < 100_000


def test_repr_shows_step_sizes_and_chain(memory):
    store = tensorcask.Store(memory)
    tied = torch.arange(65536, dtype=torch.uint8)
    for step in range(1, 8):
        store.save({"w": tied, "tied": tied}, step=step, policy="consecutive")
        if step == 1:
            assert repr(store.snapshot()).startswith("Snapshot(step=1, kind='base', 2 tensors of 64.0 KiB, ")
            assert repr(store.snapshot()).endswith("stored, chain 1)")
    assert repr(store.snapshot(3)).endswith("chain 1 <- 2 <- 3)") and repr(store.snapshot(7)).endswith("chain 1 <- ... <- 5 <- 6 <- 7)")


def test_map_location_is_device(store):
    for load in (tensorcask.load, tensorcask.Store.load):
        assert load(store, map_location="cpu")["head"].device.type == "cpu"
        assert load(store, map_location=torch.device("meta"))["head"].is_meta
    assert store.snapshot().load(map_location="meta")["head"].is_meta
    with pytest.raises(ValueError, match="device= and map_location= are one argument"):
        store.load(device="cpu", map_location="cpu")
    for wrong in (lambda storage, location: storage, {"cuda:1": "cuda:0"}):
        with pytest.raises(TypeError, match="map_location: tensorcask takes a device"):
            store.load(map_location=wrong)


def test_a_prefix_is_stripped(store):
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(4))
    weights = store.load(strip_prefix="model.")
    assert weights.keys() == {"w", "b*", "bc"}
    model.load_state_dict({"w": weights["w"]})
    assert store.load(tensors="model.w", strip_prefix="model.").keys() == {"w"}
    with pytest.raises(ValueError, match="strip_prefix='model.': tensor 'head' does not begin with it"):
        store.load(tensors="*", strip_prefix="model.")
    with pytest.raises(tensorcask.TemplateError, match="absent"):
        store.load(strip_prefix="absent.")
    for arguments in ({"out": {"head": torch.zeros(1)}}, {"slices": {"head": slice(0, 1)}}):
        with pytest.raises(ValueError, match="strip_prefix= is for whole tensors"):
            store.load(strip_prefix="model.", **arguments)
    for wrong in ("", 5):
        with pytest.raises(TypeError, match="strip_prefix"):
            store.load(strip_prefix=wrong)


def test_coroutines_leave_the_event_loop_free(tmp_path):
    """A save waits in a progress function until the loop has set an event, which a blocked loop could not."""
    loop_ran, waited = threading.Event(), []

    async def program():
        state = {"w": RawTensor("u8", (1 << 20,), bytearray(1 << 20))}
        saving = asyncio.create_task(tensorcask.save_async(state, tmp_path / "store", step=1, progress=lambda *_: waited.append(loop_ran.wait(60))))
        await asyncio.sleep(0)
        loop_ran.set()
        saved = await saving
        loads = await asyncio.gather(*(tensorcask.load_async(tmp_path / "store", framework="bytes") for _ in range(3)))
        with pytest.raises(tensorcask.NotFoundError):
            await tensorcask.load_async(tmp_path / "absent")
        return saved.step, [len(state["w"].data) for state in loads]

    assert asyncio.run(program()) == (1, [1 << 20] * 3) and waited and all(waited)
