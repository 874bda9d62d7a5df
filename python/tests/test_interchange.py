"""Other formats: import, export, and import again."""

import argparse
import collections
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensorcask import interchange
from tensorcask.__main__ import main
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
    with pytest.raises(tensorcask.UnsupportedError, match="cannot be loaded without running code.*posix.mkdir"):
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
    with pytest.raises(BaseException, match="No index of a checkpoint needs it"):
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
    with pytest.raises(ValueError, match="2 files"):
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
        # This process has saved there.
        done = run("import", tmp_path / target, url, "--step", number, "--take-over")
        assert done.returncode == 0 and f"step {number}: a " in done.stdout, done.stderr
    same(tensorcask.load(url)["model"], tensors)
    assert run("export", url, tmp_path / "shards", "--max-shard-bytes", 100).returncode == 0
    assert run("import", tmp_path / "shards", url, "--step", 9).returncode == 0
    failed = run("export", url, tmp_path / "a.safetensors")
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and "exists already" in failed.stderr
    assert run("import", tmp_path / "a.safetensors", url).returncode == 2


def test_swapped_arguments_are_named(url, tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match="new does not exist.*did you mean .*a.pt"):
        import_(tmp_path / "new", tmp_path / "a.pt", step=1)
    import_(tmp_path / "a.pt", tmp_path / "new", step=1)
    with pytest.raises(ValueError, match="is a store of tensorcask.*did you mean .*a.pt"):
        import_(tmp_path / "new", tmp_path / "a.pt", step=1)
    with pytest.raises(FileNotFoundError, match="b.npz does not exist$"):
        import_(tmp_path / "b.npz", url, step=1)
    ended = subprocess.run([sys.executable, "-m", "tensorcask", "import", tmp_path / "no.pt", url, "--step", "1", "--json"], capture_output=True, text=True)
    assert (ended.returncode, "no.pt does not exist" in ended.stdout) == (10, True)


def test_formats_are_told_by_name(url, tmp_path):
    tensorcask.save({"w": torch.ones(1)}, url, step=1)
    with pytest.raises(ValueError, match="does not tell the format"):
        export(url, tmp_path / "x.npz")
    with pytest.raises(ValueError, match="use 'safetensors'"):
        export(url, tmp_path / "x", format="zip")


class Config:
    """A class that exists only in the program that saved."""

    def __init__(self):
        self.lr, self.sub = 0.1, argparse.Namespace(layers=[1, 2])


class Trap:
    """Copies a file when it is unpickled."""

    def __reduce__(self):
        return (shutil.copyfile, (__file__, "trapped"))


def with_objects():
    shared = argparse.Namespace(seed=7)
    return {"w": torch.ones(2), "args": argparse.Namespace(lr=0.1, names=["a"]), "config": Config(), "pair": (shared, shared), "date": collections.deque([1])}


def command(*words):
    return subprocess.run([sys.executable, "-m", "tensorcask", *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize("how", ["zip", "old", "dcp"])
def test_objects_of_allowed_classes_are_plain_values(tmp_path, url, how):
    state = with_objects()
    del state["date"]
    path = tmp_path / ("a" if how == "dcp" else "a.pt")
    if how == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(tensorcask.UnsupportedError, match="holds objects of .*(argparse.Namespace|test_interchange.Config).*allow=.*--allow"):
        import_(path, url, step=1)
    names = ["argparse.Namespace", f"{Config.__module__}.Config"]
    import_(path, url, step=1, allow=names)
    loaded = tensorcask.load(url)
    assert (loaded.pop("w") == 1).all()
    assert loaded == {"args": {"lr": 0.1, "names": ["a"]}, "config": {"lr": 0.1, "sub": {"layers": [1, 2]}}, "pair": ({"seed": 7}, {"seed": 7})}
    # No class stays allowed afterwards.
    with pytest.raises(tensorcask.UnsupportedError, match="holds objects"):
        import_(path, url, step=2)
    with pytest.raises(ValueError, match="full name of a class"):
        import_(path, url, step=2, allow=["Namespace"])


def test_a_class_that_the_process_allows_is_not_used_either(tmp_path, url):
    class Namespace(argparse.Namespace):
        def __setstate__(self, state):
            raise AssertionError("code of the class ran")

    Namespace.__module__, Namespace.__qualname__ = "argparse", "Namespace"
    torch.save({"args": argparse.Namespace(lr=0.1)}, tmp_path / "a.pt")
    before = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([Namespace]):
        import_(tmp_path / "a.pt", url, step=1, allow=["argparse.Namespace"])
        assert Namespace in torch.serialization.get_safe_globals()
    assert tensorcask.load(url) == {"args": {"lr": 0.1}}
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_a_refused_file_tells_the_command_to_run(tmp_path, url):
    state = {"w": torch.ones(2), "args": argparse.Namespace(lr=0.1), "a b": Config()}
    torch.save(state, tmp_path / "a b.pt")
    refused = command("import", tmp_path / "a b.pt", url, "--step", 4, "--policy", "full")
    assert refused.returncode == 1 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
    told = shlex.split(refused.stderr.partition("or run: ")[2].partition(". Neither")[0])
    assert told[0] == "tensorcask" and {"argparse.Namespace", f"{Config.__module__}.Config"} <= set(told)
    done = command(*told[1:])
    assert done.returncode == 0, done.stderr
    assert tensorcask.load(url, 4)["args"] == {"lr": 0.1}


def test_values_that_cannot_be_stored_are_left_out_or_replaced(tmp_path, url):
    torch.save(with_objects(), tmp_path / "a.pt")
    names = ["argparse.Namespace", f"{Config.__module__}.Config", "collections.deque"]
    torch.save({"w": torch.ones(2), "set": {1}, "list": [{2}, 3], "of": Trap()}, tmp_path / "b.pt")
    allowed = [word for name in ("shutil.copyfile", *names) for word in ("--allow", name)]
    failed = command("import", tmp_path / "b.pt", url, "--step", 1, *allowed)
    assert failed.returncode == 1 and "state['set']: builtins.set cannot be stored; store sorted(value). To leave such values out, add --on-unsupported skip" in failed.stderr
    done = command("import", tmp_path / "b.pt", url, "--step", 1, *allowed, "--on-unsupported", "skip")
    assert done.returncode == 0, done.stderr
    loaded = tensorcask.load(url)
    assert loaded.keys() == {"w", "list"} and loaded["list"] == [None, 3]
    import_(tmp_path / "b.pt", url, step=2, allow=["shutil.copyfile"], on_unsupported=lambda path, value: getattr(value, "arguments", path))
    loaded = tensorcask.load(url)
    assert loaded["set"] == "state['set']" and loaded["of"] == (__file__, "trapped")
    # Allowing a class by name does not run code.
    assert not Path("trapped").exists()
    with pytest.raises(ValueError, match="on_unsupported"):
        import_(tmp_path / "b.pt", url, step=3, allow=["shutil.copyfile"], on_unsupported="ignore")
    with pytest.raises(tensorcask.UnsupportedError, match="holds objects of.*shutil.copyfile"):
        import_(tmp_path / "b.pt", url, step=3)


def test_damaged_files_are_refused(tmp_path, url):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.pt").write_bytes(whole[:length])
        with pytest.raises(tensorcask.Error, match=r"a.pt(: PyTorch cannot read this file| is damaged)"):
            import_(tmp_path / "a.pt", url, step=1)


def test_objects_that_hold_themselves_are_refused(tmp_path, url):
    args = argparse.Namespace()
    args.me, args.list = args, [args]
    torch.save({"args": args}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="does the state contain itself"):
        import_(tmp_path / "a.pt", url, step=1, allow=["argparse.Namespace"])


def test_export_of_some_tensors_under_other_names(tmp_path, url):
    state = {"model": {"a": torch.arange(6.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "ä": torch.zeros(1)}, "opt": torch.ones(3)}
    snapshot = tensorcask.Store(url)
    snapshot.save(state, step=1)
    export(url, tmp_path / "one.safetensors", tensors="model.*", strip_prefix="model.")
    one = load_file(tmp_path / "one.safetensors")
    assert one.keys() == {"a", "b", "ä"} and torch.equal(one["a"], state["model"]["a"]) and torch.equal(one["b"], state["model"]["b"])
    mapping = {"a": 2, "b": 1, "ä": 2}
    export(snapshot.snapshot(), tmp_path / "hf", tensors=["model.*"], strip_prefix="model.", fqn_to_index_mapping=mapping)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert load_file(tmp_path / "hf/model-00002-of-00002.safetensors").keys() == {"a", "ä"}
    # It can be imported again.
    import_(tmp_path / "hf", tmp_path / "again", step=1)
    assert tensorcask.load(tmp_path / "again", framework="torch").keys() == {"a", "b", "ä"}


def test_arguments_of_export_that_do_not_fit_are_named(tmp_path, url):
    tensorcask.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "opt": torch.ones(3)}, url, step=1)
    for says, arguments in (
        ("strip_prefix='model.': tensor 'opt' does not begin", {"strip_prefix": "model."}),
        ("has no file for tensor 'model.b'", {"tensors": "model.*", "fqn_to_index_mapping": {"model.a": 1}}),
        (r"files \[1, 3\]; their numbers must be", {"tensors": "model.*", "fqn_to_index_mapping": {"model.a": 1, "model.b": 3}}),
        ("are for safetensors", {"format": "torch", "tensors": "model.*"}),
    ):
        with pytest.raises(ValueError, match=says):
            export(url, tmp_path / "target", **({"format": "safetensors"} | arguments))
        assert not (tmp_path / "target").exists()
    with pytest.raises(tensorcask.TemplateError, match="no tensor that matches `absent"):
        export(url, tmp_path / "target.safetensors", tensors="absent.*")


@pytest.fixture
def full_disk():
    """A folder whose disk is too small. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    folder = tempfile.mkdtemp()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        os.rmdir(folder)
        pytest.skip("no mounts here")
    yield Path(folder)
    subprocess.run(["umount", folder], check=True)
    os.rmdir(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts")
def test_an_export_to_a_full_disk_leaves_nothing(tmp_path, url, full_disk, capsys):
    tensorcask.save({"a": torch.randn(300_000), "b": torch.randn(300_000)}, url, step=1)
    for name, words in (("a.safetensors", []), ("a.pt", []), ("dcp", []), ("shards", ["--max-shard-bytes", "1200000"])):
        (full_disk / "empty").mkdir()
        for target in (full_disk / name, full_disk / "empty" if not Path(name).suffix else full_disk / name):
            assert main(["export", url, str(target), *words]) == 1
            assert "No space left on device" in capsys.readouterr().err
            assert [path.name for path in full_disk.rglob("*")] == ["empty"], name
        (full_disk / "empty").rmdir()


def test_an_export_fills_an_empty_folder(tmp_path, url):
    tensorcask.save({"a": torch.ones(3), "b": torch.zeros(3)}, url, step=1)
    for name, options in (("dcp", {}), ("shards", {"max_shard_bytes": 12})):
        (tmp_path / name).mkdir()
        export(url, tmp_path / name, **options)
        assert not [path for path in (tmp_path / name).iterdir() if path.is_dir()]
        import_(tmp_path / name, f"{url}-{name}", step=1)
        same(tensorcask.load(f"{url}-{name}", framework="torch"), {"a": torch.ones(3), "b": torch.zeros(3)})


def test_a_shard_has_no_header_that_readers_refuse(tmp_path, url, monkeypatch):
    monkeypatch.setattr(interchange, "_MOST_HEADER_BYTES", 1000)
    state = {f"a name of some length {at}": torch.ones(1) for at in range(20)}
    tensorcask.save(state, url, step=1)
    export(url, tmp_path / "shards", max_shard_bytes=1 << 30)
    files = list((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 1 and all(path.stat().st_size < 1100 for path in files)
    import_(tmp_path / "shards", f"{url}-2", step=1)
    same(tensorcask.load(f"{url}-2", framework="torch"), state)


def test_a_name_that_safetensors_uses_itself_is_refused(tmp_path, url):
    tensorcask.save({"__metadata__": torch.ones(1), "w": torch.ones(1)}, url, step=1)
    with pytest.raises(tensorcask.UnsupportedError, match="__metadata__"):
        export(url, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()
    export(url, tmp_path / "b.safetensors", tensors="w")
