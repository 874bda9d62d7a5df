"""Loads with mmap=True: tensors over the files of a local store, which no write changes."""

import gc
import logging
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorcask
import torch
from tensorcask._options import writer_options

SMALL = 64 << 10
CHUNK = 1 << 18
RAW = "*=tc.raw"


def torch_state():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (300, 1001), generator=generator, dtype=torch.int16)
    tied = torch.randn(64, 64, generator=generator)
    return {
        "model": {"w": bits.view(torch.bfloat16), "tied": tied, "head": tied, "mask": torch.tensor([True, False] * 40)},
        "moments": [torch.randn(700, 900, generator=generator), torch.randn(5, generator=generator, dtype=torch.complex64)],
        "f8": torch.randn(999, generator=generator).to(torch.float8_e4m3fn),
        "f4": torch.randint(0, 256, (6, 8), generator=generator, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "step": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "epoch": 3,
    }


def flat(state, path=""):
    if isinstance(state, dict):
        state = list(state.items())
    elif isinstance(state, list):
        state = list(enumerate(state))
    else:
        return {path: state}
    return {name: leaf for key, value in state for name, leaf in flat(value, f"{path}.{key}".lstrip(".")).items()}


def bytes_of(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def assert_equal(found, expected):
    found, expected = flat(found), flat(expected)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert bytes_of(found[name]) == bytes_of(value), name


def plain(value):
    return value if isinstance(value, torch.Tensor) else np.asarray(value)


def mapped_names(snapshot):
    """Names of the tensors that a file holds as they are."""
    return {name for name in snapshot if [part.reason for part in snapshot.parts(name)] == [None]}


def files_of(url):
    return {path: path.read_bytes() for path in Path(url).rglob("*") if path.is_file()}


def is_over_a_file(address):
    """Whether an address belongs to a map of a cask."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return ".cask" in line and line.split()[1].startswith("rw-p")
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_raw_tensors_are_mapped_and_equal(url):
    state = torch_state()
    store = tensorcask.Store(url)
    store.save(state, step=1, codecs=RAW)
    snapshot = store.snapshot()
    assert mapped_names(snapshot) == set(snapshot) - {"empty"}
    for loaded in (tensorcask.load(url, mmap=True), store.load(mmap=True), snapshot.load(mmap=True)):
        assert_equal(loaded, state)
        assert loaded["model"]["tied"] is loaded["model"]["head"], "tied tensors are one tensor"
        tensors = [value for value in flat(loaded).values() if isinstance(value, torch.Tensor) and value.numel()]
        assert all(is_over_a_file(tensor.data_ptr()) for tensor in tensors)
    read = flat(store.load())["model.w"]
    assert not is_over_a_file(read.data_ptr())
    part = store.load(tensors="moments.*", mmap=True)
    assert list(part) == ["moments.0", "moments.1"]
    assert is_over_a_file(part["moments.0"].data_ptr())


@linux
@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_each_framework_takes_mapped_memory(url, framework):
    rng = np.random.default_rng(0)
    state = {
        "w": rng.standard_normal((70, 1000), np.float32),
        "h": rng.standard_normal((33, 17), np.float32).astype(ml_dtypes.bfloat16),
        "i": rng.integers(-9, 9, (4096,), np.int32),
        "scalar": np.array(2.5, np.float32),
    }
    state["big"] = rng.standard_normal((SMALL,), np.float32)
    tensorcask.save(state, url, step=1, codecs=RAW)
    mapped, read = (tensorcask.load(url, framework=framework, mmap=mmap) for mmap in (True, False))
    for name in state:
        assert type(mapped[name]) is type(read[name])
        assert bytes_of(plain(mapped[name])) == bytes_of(plain(read[name])), name
    if framework == "numpy":
        assert is_over_a_file(mapped["w"].ctypes.data)
        assert mapped["w"].flags.writeable


def test_writes_never_reach_the_file(url):
    state = torch_state()
    store = tensorcask.Store(url)
    store.save(state, step=1, codecs=RAW)
    before = files_of(url)
    first, second = store.load(mmap=True), store.load(mmap=True)
    for value in flat(first).values():
        if isinstance(value, torch.Tensor):
            value.view(torch.uint8).zero_() if value.dim() else value.zero_()
    assert not first["moments"][0].any()
    assert files_of(url) == before
    assert_equal(second, state)
    assert_equal(store.load(mmap=True), state)
    assert store.verify().is_clean


def test_an_array_outlives_snapshot_store_and_file(url):
    state = torch_state()
    store = tensorcask.Store(url)
    store.save(state, step=1, codecs=RAW, policy="full")
    loaded = store.snapshot().load(mmap=True)
    store.save({"other": torch.zeros(SMALL)}, step=2, policy="full")
    store.forget([1])
    assert store.gc(older_than="0s", apply=True).deleted
    assert len(list(Path(url, "casks").iterdir())) < len(state)
    del store
    gc.collect()
    assert_equal(loaded, state)


def test_chunks_of_a_chain_say_where_they_are(url):
    store = tensorcask.Store(url)
    generator = np.random.default_rng(0)
    state = {"w": generator.integers(0, 256, 3 * CHUNK, np.uint8), "same": generator.integers(0, 256, 2 * CHUNK, np.uint8)}
    state["zeros"] = np.zeros(CHUNK, np.float32)
    store.save(state, step=1, policy="consecutive")
    state["w"][CHUNK] ^= 1
    store.save(state, step=2, policy="consecutive")
    snapshot = store.snapshot()
    base = store.snapshot(1)
    first, changed, last = snapshot.parts("w")
    assert [(part.start, part.stop, part.size) for part in (first, changed, last)] == [
        (0, CHUNK, CHUNK),
        (CHUNK, 2 * CHUNK, CHUNK),
        (2 * CHUNK, 3 * CHUNK, CHUNK),
    ]
    assert (first.reason, changed.reason, last.reason) == (None, "delta", None)
    assert (first.path, first.offset, first.shape) == (base.parts("w")[0].path, (0,), (3 * CHUNK,))
    assert changed.path is None
    assert changed.first_byte is None
    assert first.path.read_bytes()[first.first_byte : first.first_byte + first.size] == state["w"][:CHUNK].tobytes()
    assert snapshot.parts("same") == base.parts("same"), "an unchanged tensor is in the file of the base"
    assert [part.reason for part in snapshot.parts("zeros")] == ["codec tc.constant"]
    with pytest.raises(tensorcask.NotFoundError, match="absent"):
        snapshot.parts("absent")
    loaded = store.load(mmap=True)
    assert_equal(loaded, state)
    if sys.platform == "linux":
        assert is_over_a_file(loaded["same"].ctypes.data)
        assert not is_over_a_file(loaded["w"].ctypes.data)


def test_a_tensor_of_two_shards_is_read(url):
    store = tensorcask.Store(url)
    whole = torch.arange(8 * SMALL, dtype=torch.int32).reshape(8, SMALL)
    shards = [("w", "i32", (8, SMALL), (row, 0), (4, SMALL), whole[row : row + 4].view(torch.uint8).reshape(-1).numpy()) for row in (0, 4)]
    store.with_writer(writer_options("full", codecs=RAW), lambda writer: writer.save(1, shards, [], "{}", {}))
    parts = store.snapshot().parts("w")
    assert [(part.offset, part.shape, part.start, part.stop, part.reason) for part in parts] == [
        ((0, 0), (4, SMALL), 0, 4 * SMALL, None),
        ((4, 0), (4, SMALL), 0, 4 * SMALL, None),
    ]
    assert torch.equal(store.load(mmap=True, framework="torch")["w"], whole)


def test_what_cannot_be_mapped_is_read(url, memory):
    state = {"model": {"w": torch.randn(100, 1000)}, "packed": tensorcask.RawTensor("int4", (3,), bytearray(b"\x21\x03"))}
    for where, reason in ((url, None), (memory, "not local")):
        store = tensorcask.Store(where)
        store.save(state, step=1, codecs=RAW)
        assert [part.reason for part in store.snapshot().parts("model.w")] == [reason]
        loaded = store.load(mmap=True, framework="bytes")
        assert isinstance(loaded["model"]["w"].data, bytearray)
        assert torch.equal(store.load(tensors="model.w", mmap=True)["model.w"], state["model"]["w"])
        packed = store.load(tensors="packed", framework="numpy", mmap=True)["packed"]
        assert packed.tolist() == [1, 2, 3]
        rows = store.load(slices={"model.w": slice(3, 5)}, mmap=True)["model.w"]
        assert torch.equal(rows, state["model"]["w"][3:5])
        halves = store.load(tensors="model.w", dtype="bf16", map_location="cpu", mmap=True)["model.w"]
        assert torch.equal(halves, state["model"]["w"].bfloat16())
        doubles = store.load(tensors="model.w", dtype="f64", mmap=True)["model.w"]
        assert torch.equal(doubles, state["model"]["w"].double())
    small = tensorcask.Store(url + "-small")
    small.save({"w": torch.arange(9.0)}, step=1, codecs=RAW)
    assert [part.reason for part in small.snapshot().parts("w")] == ["log entry"]
    assert torch.equal(small.load(mmap=True)["w"], torch.arange(9.0))
    with pytest.raises(ValueError, match="out= fills yours. Pass one of them"):
        small.load(out={"w": torch.zeros(9)}, mmap=True)


def test_damage_is_found_before_a_tensor_is_returned(url):
    store = tensorcask.Store(url)
    state = {"w": torch.randint(0, 256, (3 * CHUNK,), dtype=torch.uint8)}
    store.save(state, step=1, codecs=RAW, policy="full")
    store.save({"w": state["w"] + 1}, step=2, codecs=RAW, policy="full")
    (part,) = store.snapshot(2).parts("w")
    whole = part.path.read_bytes()
    damaged = bytearray(whole)
    damaged[part.first_byte + CHUNK + 9] ^= 1
    part.path.write_bytes(damaged)
    with pytest.raises(tensorcask.CorruptionError) as caught:
        store.load(2, mmap=True)
    assert (caught.value.tensor, caught.value.chunk) == ("w", 1)
    assert caught.value.object == str(part.path.relative_to(Path(url).resolve()))
    # The newest step that can be mapped whole.
    assert_equal(store.load(mmap=True), state)
    part.path.write_bytes(whole[: part.first_byte + CHUNK])
    with pytest.raises(tensorcask.CorruptionError, match="truncated"):
        store.snapshot(2).load(mmap=True)


def test_a_file_that_cannot_be_mapped_is_left_to_the_reader(url, caplog):
    store = tensorcask.Store(url)
    store.save({"w": torch.randn(SMALL)}, step=1, codecs=RAW)
    snapshot = store.snapshot()
    (part,) = snapshot.parts("w")
    part.path.unlink()
    with caplog.at_level(logging.WARNING, "tensorcask"), pytest.raises(tensorcask.NotFoundError) as mapped:
        snapshot.load(mmap=True)
    with pytest.raises(tensorcask.NotFoundError) as read:
        snapshot.load()
    assert str(mapped.value) == str(read.value)
    assert [f"{part.path} cannot be mapped" in record.message for record in caplog.records] == [True]
