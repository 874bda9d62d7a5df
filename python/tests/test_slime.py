"""Folders of weight deltas, written here by the documentation of slime and not by the code under test."""

import json
import zlib

import numpy as np
import pytest
import tensorcask
import torch
import xxhash
import zstandard
from safetensors import numpy as st_numpy
from safetensors.torch import load_file, save_file
from tensorcask.slime import export_deltas, import_deltas


def weights(step):
    made = torch.arange(4000, dtype=torch.float32).reshape(40, 100)
    made[step % 40] += 2**step
    return {"w": made.bfloat16(), "norm": torch.full((7,), float(min(step, 2))), "mask": torch.tensor([True, False])}


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy()


def publish(folder, step, encoding, algorithm="xxh3-128", spoil=None):
    """A version as slime's trainer writes it."""
    path = folder / f"weight_v{step:06d}"
    path.mkdir(parents=True)
    delta, sums = {}, {}
    for name, tensor in weights(step).items():
        new, old = raw(tensor), raw(weights(step - 1)[name])
        mask = new != old
        if not mask.any():
            continue
        if encoding == "xor":
            diff = new ^ old
        else:
            positions = np.flatnonzero(mask).astype("<u4")
            diff = np.concatenate([np.array([positions.size], "<u4").view(np.uint8), positions.view(np.uint8), new[mask]])
        if spoil:
            diff = spoil(diff.copy())
        delta[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(diff.tobytes()), dtype=np.uint8)
        sums[name] = xxhash.xxh3_128_hexdigest(new) if algorithm == "xxh3-128" else f"{zlib.adler32(new):08x}"
    (path / "model-00000-of-00001.safetensors").write_bytes(st_numpy.save(delta, metadata=sums))
    metadata = {"version": f"{step:06d}", "base_version": f"{step - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": algorithm}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(delta, "model-00000-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def same(state, step):
    return state.keys() == weights(step).keys() and all(torch.equal(state[name], tensor) for name, tensor in weights(step).items())


def test_published_versions_become_snapshots(tmp_path, url):
    save_file(weights(0), tmp_path / "base.safetensors")
    shared = tmp_path / "shared"
    for step, (encoding, algorithm) in enumerate([("xor", "xxh3-128"), ("overwrite", "xxh3-128"), ("overwrite", "adler32")], 1):
        publish(shared, step, encoding, algorithm)
    assert import_deltas(shared, url, base=tmp_path / "base.safetensors", policy="intermittent:8") == [1, 2, 3]
    # The folder has grown, and one version is still being written.
    publish(shared, 4, "xor")
    (shared / "weight_v000005").mkdir()
    assert import_deltas(shared, url, policy="intermittent:8") == [4]
    assert import_deltas(shared, url) == []
    store = tensorcask.Store(url)
    for step in range(5):
        assert same(store.load(step=step, framework="torch"), step), step
    assert [info.kind for info in store.snapshots()][:4] == ["base", "delta", "delta", "delta"]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_snapshots_become_versions_and_come_back(tmp_path, url, encoding, checksum):
    for step in (10, 20, 30):
        tensorcask.save({"model": weights(step), "optimizer": {"m": torch.ones(3)}}, url, step=step)
    folders = export_deltas(url, tmp_path / "out", tensors="model.*", strip="model.", encoding=encoding, checksum=checksum)
    assert [folder.name for folder in folders] == ["weight_v000000", "weight_v000001", "weight_v000002"]
    # The first version is a plain checkpoint.
    assert same(load_file(folders[0] / "model-00000-of-00001.safetensors"), 10)
    assert import_deltas(tmp_path / "out", tmp_path / "again") == [10, 20, 30]
    for step in (10, 20, 30):
        assert same(tensorcask.load(tmp_path / "again", step, framework="torch"), step)
    with pytest.raises(FileExistsError):
        export_deltas(url, tmp_path / "out", tensors="model.*")


def test_tied_tensors_may_part(tmp_path, url):
    one = torch.arange(6, dtype=torch.float32)
    tensorcask.save({"a": one, "b": one}, url, step=1)
    tensorcask.save({"a": one + 1, "b": one.clone()}, url, step=2)
    export_deltas(url, tmp_path / "out")
    import_deltas(tmp_path / "out", tmp_path / "again")
    for step in (1, 2):
        wanted, found = (tensorcask.load(store, step, framework="torch") for store in (url, tmp_path / "again"))
        assert all(torch.equal(wanted[name], found[name]) for name in ("a", "b"))


def test_a_training_that_began_anew_is_not_mixed_with_the_old(tmp_path, url):
    save_file(weights(0), tmp_path / "base.safetensors")
    publish(tmp_path / "old", 1, "xor")
    import_deltas(tmp_path / "old", url, base=tmp_path / "base.safetensors")
    publish(tmp_path / "new", 1, "overwrite")
    publish(tmp_path / "new", 2, "overwrite")
    with pytest.raises(tensorcask.ConflictError, match="step 1 differs from"):
        import_deltas(tmp_path / "new", url, base=tmp_path / "base.safetensors")
    save_file(weights(3), tmp_path / "base.safetensors")
    with pytest.raises(tensorcask.ConflictError, match="step 0 differs from the base"):
        import_deltas(tmp_path / "old", url, base=tmp_path / "base.safetensors")
    with pytest.raises(tensorcask.InvalidArgumentError, match="Pass another base_step"):
        import_deltas(tmp_path / "old", tmp_path / "third", base=tmp_path / "base.safetensors", base_step=1)


def test_a_delta_that_does_not_fit_is_refused(tmp_path, url):
    save_file(weights(0), tmp_path / "base.safetensors")

    def refused(match, error=tensorcask.CorruptionError, **options):
        folder = tmp_path / f"shared-{len(list(tmp_path.iterdir()))}"
        publish(folder, options.pop("step", 1), **{"encoding": "xor", **options})
        store = folder / "store"
        with pytest.raises(error, match=match):
            import_deltas(folder, store, base=tmp_path / "base.safetensors")
        assert [info.step for info in tensorcask.Store(store).snapshots()] == [0]

    def flip(diff):
        diff[-1] ^= 1
        return diff

    def far(diff):
        diff[4:8] = 0xFF
        return diff

    refused("checksum mismatch", spoil=flip)
    refused("checksum mismatch", spoil=flip, encoding="overwrite")
    refused("a difference of 3 bytes", spoil=lambda diff: diff[:3])
    refused("more than the possible", spoil=lambda diff: np.zeros(1 << 20, np.uint8))
    refused("with a count of", encoding="overwrite", spoil=lambda diff: diff[:-1])
    refused("position 4294967295 in", encoding="overwrite", spoil=far)
    refused("builds on version 1, but follows version 0", tensorcask.InvalidArgumentError, step=2)
    refused("xxh64", tensorcask.UnsupportedError, algorithm="xxh64")
    publish(tmp_path / "less", 1, "xor")
    index = tmp_path / "less" / "weight_v000001" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"weight_map": {', '"weight_map": {"mask": "model-00000-of-00001.safetensors", '))
    with pytest.raises(tensorcask.CorruptionError, match="disagree about tensor `mask`"):
        import_deltas(tmp_path / "less", tmp_path / "store-of-less", base=tmp_path / "base.safetensors")
    with pytest.raises(tensorcask.UnsupportedError, match="xxh64"):
        export_deltas(url, tmp_path / "out", checksum="xxh64")
