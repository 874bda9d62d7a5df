"""Other formats: in, out, and in again."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensorcask.interchange import export, import_

DATA = Path(__file__).parents[2] / "tests" / "data"


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name


@pytest.fixture
def tensors():
    state = load_file(DATA / "step-1000.safetensors")
    return state | {"f8": torch.arange(8.0).to(torch.float8_e4m3fn), "bool": torch.tensor([True, False]), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}


def test_safetensors(tensors, tmp_path, url):
    source = tmp_path / "source.safetensors"
    save_file(tensors, source, {"format": "pt", "note": "ünicode"})
    import_(source, url, step=3, user={"loss": 1.0})
    assert tensorcask.Store(url).snapshot().user["loss"] == 1.0
    same(tensorcask.load(url, framework="torch"), tensors)
    export(url, tmp_path / "again.safetensors")
    same(load_file(tmp_path / "again.safetensors"), tensors)
    with safe_open(tmp_path / "again.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ünicode"}
    with pytest.raises(FileExistsError):
        export(url, tmp_path / "again.safetensors")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_sharded_safetensors(tensors, tmp_path, url):
    save_file(tensors, tmp_path / "source.safetensors")
    import_(tmp_path / "source.safetensors", url, step=1)
    export(url, tmp_path / "model", max_shard_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert len(files) > 3 and files[-1] == "model.safetensors.index.json"
    import_(tmp_path / "model" / "model.safetensors.index.json", url, step=2)
    same(tensorcask.load(url, 2, framework="torch"), tensors)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(tensorcask.InvalidArgumentError, match="outside"):
        import_(index, url, step=3)


def test_files_of_torch(tensors, tmp_path, url):
    state = {"model": tensors, "epoch": 3, "lr": [0.1, None, "x"], "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "a.pt")
    import_(tmp_path / "a.pt", url, step=1)
    export(url, tmp_path / "b.pt")
    again = torch.load(tmp_path / "b.pt", weights_only=True)
    same(again["model"], tensors)
    assert again["epoch"] == 3 and again["lr"] == [0.1, None, "x"]

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    torch.save({"trap": Trap()}, tmp_path / "bad.pt")
    with pytest.raises(tensorcask.UnsupportedError, match="runs code"):
        import_(tmp_path / "bad.pt", url, step=2)
    assert not (tmp_path / "trapped").exists()


def test_folders_of_dcp(tensors, tmp_path, url):
    state = {"model": tensors, "step": 5, "list": [torch.ones(2), {"x": "y"}], "lr": [0.1, 2]}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    import_(tmp_path / "a", url, step=1)
    loaded = tensorcask.load(url)
    same(loaded["model"], tensors)
    assert loaded["step"] == 5 and loaded["lr"] == [0.1, 2] and loaded["list"][1] == {"x": "y"}
    export(url, tmp_path / "b")
    template = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, "step": 0}
    dcp.load(template, checkpoint_id=tmp_path / "b", no_dist=True)
    same(template["model"], tensors)
    assert template["step"] == 5

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(BaseException, match="no need of"):
        import_(tmp_path / "a", url, step=2)
    assert not (tmp_path / "trapped").exists()


def test_folders_are_told_by_what_they_hold(tensors, tmp_path, url):
    state = {"model": tensors}
    tensorcask.save(state, url, step=1)
    export(url, tmp_path / "sharded", max_shard_bytes=100)
    (tmp_path / "one").mkdir()
    export(url, tmp_path / "one" / "model.safetensors")
    for step, folder in enumerate(("sharded", "one"), 2):
        import_(tmp_path / folder, url, step=step)
        same({name.removeprefix("model."): tensor for name, tensor in tensorcask.load(url, step=step).items()}, tensors)
    (tmp_path / "one" / "more.safetensors").write_bytes((tmp_path / "one" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="2 of"):
        import_(tmp_path / "one", url, step=9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no checkpoint"):
        import_(tmp_path / "empty", url, step=9)


def test_from_the_command_line(tensors, tmp_path, url):
    def run(*words):
        return subprocess.run([sys.executable, "-m", "tensorcask", *map(str, words)], capture_output=True, text=True)

    state = {"model": tensors, "step": 5}
    tensorcask.save(state, url, step=5)
    for number, target in enumerate(("a.safetensors", "b.pt", "c"), 6):
        assert run("export", url, tmp_path / target, "--step", 5).returncode == 0
        done = run("import", tmp_path / target, url, "--step", number)
        assert done.returncode == 0 and f"step {number}: a " in done.stdout, done.stderr
    same(tensorcask.load(url)["model"], tensors)
    assert run("export", url, tmp_path / "shards", "--max-shard-bytes", 100).returncode == 0
    assert run("import", tmp_path / "shards", url, "--step", 9).returncode == 0
    failed = run("export", url, tmp_path / "a.safetensors")
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and "there already" in failed.stderr
    assert run("import", tmp_path / "a.safetensors", url).returncode == 2


def test_formats_are_told_by_name(url, tmp_path):
    tensorcask.save({"w": torch.ones(1)}, url, step=1)
    with pytest.raises(ValueError, match="cannot tell"):
        export(url, tmp_path / "x.npz")
    with pytest.raises(ValueError, match="use 'safetensors'"):
        export(url, tmp_path / "x", format="zip")
