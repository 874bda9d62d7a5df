"""Checkpoints of PyTorch and of trainers, imported: every kind of value that they hold, and no code of theirs."""

import argparse
import collections
import io
import pathlib
import pickle
import random
import shlex
import tarfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from tensorcask.__main__ import main
from tensorcask.interchange import import_
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

DATA = Path(__file__).parent / "data"


class AttributeDict(dict):
    pass


class Items(list):
    pass


class Both(dict):
    def __init__(self, *items):
        super().__init__(*items)
        self.name = "both"


class Slots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 1, [2]


def imported(state, tmp_path, **options):
    torch.save(state, tmp_path / "a.pt", **options.pop("save", {}))
    import_(tmp_path / "a.pt", tmp_path / "store", step=1, **options)
    return tensorcask.load(tmp_path / "store")


def unpacked(name, tmp_path):
    with tarfile.open(DATA / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / name


def test_a_folder_of_an_old_torch_is_read(tmp_path, url):
    """Written by torch 2.2.2, which had a class of the index elsewhere."""
    import_(unpacked("dcp-torch-2.2", tmp_path), url, step=1)
    loaded = tensorcask.load(url)
    assert loaded["model"]["weight"].shape == (3, 4) and loaded["note"] == "hello" and loaded["lr"] == 0.1 and loaded["step"] == 7


def test_a_folder_of_a_new_megatron_is_read(tmp_path, url):
    """Written by Megatron Core 0.19.2 on two ranks. Its index holds the plans of the save."""
    folder = unpacked("megatron-0.19", tmp_path)
    assert b"SavePlan" in (folder / ".metadata").read_bytes()
    import_(folder, url, step=7)
    loaded = tensorcask.load(url)
    assert torch.equal(loaded["w"], torch.arange(8.0).reshape(4, 2)) and loaded["norm"].dtype == torch.bfloat16
    assert loaded["common_state/shard_0_1"] == [{"iteration": 7, "args": {"lr": 0.1}}]
    assert [loaded[f"rng/shard_{rank}_2"][0]["seed"] for rank in (0, 1)] == [0, 1]


class OfTrainer(Metadata):
    """The class of an index, as older versions of Megatron had one."""


def test_an_index_of_a_class_of_a_trainer_is_read(tmp_path, url):
    dcp.save({"w": torch.ones(3), "epoch": 2}, checkpoint_id=tmp_path / "a", no_dist=True)
    found = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    metadata = OfTrainer(found.state_dict_metadata, found.planner_data, found.storage_data)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    import_(tmp_path / "a", url, step=1)
    loaded = tensorcask.load(url)
    assert torch.equal(loaded["w"], torch.ones(3)) and loaded["epoch"] == 2


def test_objects_that_an_index_holds_besides_are_left_alone(tmp_path, url):
    """No code of their classes runs: a stand-in collects them."""
    dcp.save({"w": torch.ones(3), "epoch": 2}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    whole = metadata.state_dict_metadata["w"]
    data = TensorWriteData(whole.chunks[0], whole.properties, whole.size)
    metadata.all_local_plans = [SavePlan([WriteItem(MetadataIndex("w"), WriteItemType.TENSOR, tensor_data=data)])]
    metadata.note = argparse.Namespace(anything=1)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    import_(tmp_path / "a", url, step=1)
    loaded = tensorcask.load(url)
    assert torch.equal(loaded["w"], torch.ones(3)) and loaded["epoch"] == 2
    # What the import needs must be of the known classes.
    metadata.storage_data = {key: argparse.Namespace(relative_path="x") for key in metadata.storage_data}
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(tensorcask.UnsupportedError, match="a storage writer that tensorcask does not know"):
        import_(tmp_path / "a", url, step=2)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(argparse.Namespace()))
    with pytest.raises(tensorcask.UnsupportedError, match="is not the index of a checkpoint.*asks for argparse.Namespace"):
        import_(tmp_path / "a", url, step=2)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata)[:-20])
    with pytest.raises(tensorcask.CorruptionError, match="is damaged"):
        import_(tmp_path / "a", url, step=2)


def test_an_index_names_no_files_outside_of_its_folder(tmp_path, url):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    (file,) = (tmp_path / "a").glob("*.distcp")
    file.rename(tmp_path / file.name)
    for place in metadata.storage_data.values():
        place.relative_path = f"../{file.name}"
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(tensorcask.UnsupportedError, match="outside of its folder"):
        import_(tmp_path / "a", url, step=1)


NUMPY = {
    "float": np.float64(0.25),
    "nan": np.float32("nan"),
    "int": np.int64(-3),
    "bool": np.bool_(True),
    "complex": np.complex64(1 + 2j),
    "bf16": np.ones(3, ml_dtypes.bfloat16),
    "matrix": np.arange(6.0).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "big": np.arange(4, dtype=">i4"),
    "none": np.zeros((0, 3), np.float32),
    "scalar": np.array(2.5, np.float16),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_of_numpy_are_imported_as_they_are_saved(protocol, tmp_path, url):
    state = {"w": torch.ones(2), "values": NUMPY, "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}}
    found = imported(state, tmp_path, save={"pickle_protocol": protocol})
    state["values"] = {**NUMPY, "big": NUMPY["big"].astype("=i4")}
    tensorcask.save(state, url, step=1)
    saved = tensorcask.load(url)
    assert found["rng"]["python"] == saved["rng"]["python"] and np.array_equal(found["rng"]["numpy"][1], state["rng"]["numpy"][1])
    assert found["values"].keys() == saved["values"].keys()
    for name, value in saved["values"].items():
        assert type(found["values"][name]) is type(value), name
        assert np.asarray(found["values"][name]).dtype == np.asarray(value).dtype, name
        assert np.asarray(found["values"][name]).tobytes() == np.asarray(value).tobytes(), name


@pytest.mark.parametrize("how", ["zip", "old", "dcp"])
def test_values_of_numpy_in_other_forms(how, tmp_path, url):
    state = {"w": torch.ones(2), "best": np.float64(0.25), "table": [np.arange(3)]}
    if how == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=how == "zip")
    import_(tmp_path / ("a" if how == "dcp" else "a.pt"), url, step=1)
    loaded = tensorcask.load(url)
    assert loaded["best"] == 0.25 and loaded["table"][0].tolist() == [0, 1, 2]


def test_subclasses_of_containers_are_containers(tmp_path):
    state = {
        "default": collections.defaultdict(list, {"loss": [0.5]}),
        "nested": collections.defaultdict(dict),
        "deque": collections.deque([0.5, 1.5], maxlen=3),
        "ordered": collections.OrderedDict(a=1),
        "file": io.BytesIO(b"abc"),
    }
    found = imported(state, tmp_path)
    assert found["default"] == {"loss": [0.5]} and found["nested"] == {} and list(found["deque"]) == [0.5, 1.5] and found["ordered"] == {"a": 1}
    assert found["file"].read() == b"abc"


def test_objects_of_allowed_subclasses_are_containers(tmp_path):
    state = {"hyper": AttributeDict(lr=0.1), "list": Items([1, Items([2])]), "slots": Slots(), "empty": AttributeDict(), "path": pathlib.PurePosixPath("a/b")}
    names = [f"{__name__}.{name}" for name in ("AttributeDict", "Items", "Slots")]
    found = imported(state, tmp_path, allow=[*names, "pathlib.PurePosixPath"])
    assert found == {"hyper": {"lr": 0.1}, "list": [1, [2]], "slots": {"a": 1, "b": [2]}, "empty": {}, "path": "a/b"}
    # Items and attributes do not fit into one plain value.
    with pytest.raises(TypeError, match=r"state\['both'\]: .*Both cannot be stored"):
        imported({"both": Both({"a": 1})}, tmp_path, allow=[f"{__name__}.Both"])


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_of_any_python_is_imported(module, tmp_path, url):
    """Python 3.13 pickles a path by the name of a module that other versions do not have."""
    body = b"\x80\x02}X\x04\x00\x00\x00pathc" + module.encode() + b"\nPurePosixPath\nX\x01\x00\x00\x00aX\x01\x00\x00\x00b\x86Rs."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, content in {"data.pkl": body, "version": "3\n", "byteorder": "little"}.items():
            archive.writestr(f"a/{name}", content)
    with pytest.raises(tensorcask.UnsupportedError, match=r"holds objects of pathlib.PurePosixPath\."):
        import_(tmp_path / "a.pt", url, step=1)
    import_(tmp_path / "a.pt", url, step=1, allow=["pathlib.PurePosixPath"])
    assert tensorcask.load(url) == {"path": "a/b"}


class Tagged(torch.Tensor):
    pass


def test_a_tensor_of_an_unknown_class_is_a_tensor(tmp_path):
    with pytest.raises(tensorcask.UnsupportedError, match=rf"holds objects of {__name__}.Tagged"):
        imported({"w": torch.ones(3).as_subclass(Tagged)}, tmp_path)
    found = imported({"w": torch.ones(3).as_subclass(Tagged)}, tmp_path, allow=[f"{__name__}.Tagged"])
    assert type(found["w"]) is torch.Tensor and torch.equal(found["w"], torch.ones(3))


HARD = {
    "lightning": lambda: {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": AttributeDict(lr=0.1, path=pathlib.Path("a"), kind=WriteItemType.TENSOR)},
    "set": lambda: {"w": torch.ones(2), "args": argparse.Namespace(names={1, 2}), "types": [torch.nn.ReLU], "device": torch.device("cpu")},
    "rng": lambda: {"w": torch.ones(2), "generator": np.random.default_rng(1), "text": np.array(["a"]), "when": np.datetime64("2020-01-01")},
    "both": lambda: {"w": torch.ones(2), "both": Both({"a": 1}), "objects": np.array([None, {"a": 1}], dtype=object)},
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("how", ["zip", "old", "dcp"])
def test_each_advice_leads_to_the_end(name, how, tmp_path, url, capsys):
    path = tmp_path / ("a" if how == "dcp" else "a.pt")
    if how == "dcp":
        dcp.save(HARD[name](), checkpoint_id=path, no_dist=True)
    else:
        torch.save(HARD[name](), path, _use_new_zipfile_serialization=how == "zip")
    words = ["import", str(path), url, "--step", "1"]
    # One advice for the classes, one for what cannot be stored.
    for advices in range(3):
        code = main(words)
        error = capsys.readouterr().err
        if code == 0:
            break
        assert code == 1 and "damaged" not in error, error
        if "or run: " in error:
            words = shlex.split(error.partition("or run: ")[2].partition(". Neither")[0])[1:]
        else:
            words += shlex.split(error.strip().rpartition(", add ")[2])
    # DCP takes mappings apart, whatever their class is.
    assert code == 0 and (advices > 0 or how == "dcp")
    loaded = tensorcask.load(url)
    assert torch.equal((loaded.get("state_dict") or loaded)["w"], torch.ones(2))


def test_files_whose_checksums_do_not_match_are_refused(tmp_path, url):
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(tensorcask.CorruptionError, match="a.pt is damaged: the checksum of its record a/data/0 does not match"):
        import_(tmp_path / "a.pt", url, step=1)
    dcp.save({"w": torch.arange(1000.0), "text": "x" * 1000}, checkpoint_id=tmp_path / "a", no_dist=True)
    (file,) = (tmp_path / "a").glob("*.distcp")
    whole = file.read_bytes()
    for place in (whole.index(torch.arange(1000.0).numpy().tobytes()) + 8, whole.index(b"x" * 1000) + 9):
        file.write_bytes(whole[:place] + b"\1" + whole[place + 1 :])
        with pytest.raises(tensorcask.CorruptionError, match="is damaged: the checksum of its record|cannot read this file"):
            import_(tmp_path / "a", url, step=1)
    # torch.save can be told to write none.
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(1000.0)}, tmp_path / "b.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert not any(record.CRC for record in archive.infolist())
    import_(tmp_path / "b.pt", url, step=1)


class Reduced:
    """What its ``__reduce__`` returns is in the pickle."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def test_a_pickle_calls_and_changes_only_what_it_may(tmp_path):
    before = dict(vars(torch._utils._rebuild_tensor_v2))
    for value, error in (
        (Reduced(getattr, (torch._utils._rebuild_tensor_v2, "__call__")), "builtins.getattr"),
        (Reduced(bytearray, (1 << 60,)), "PyTorch cannot read this file"),
        (Reduced(eval, ("1",)), "builtins.eval"),
        (Reduced(collections.OrderedDict, (), None, iter([1])), "PyTorch cannot read this file: elements for an object of OrderedDict"),
    ):
        with pytest.raises(tensorcask.Error, match=error):
            imported({"w": torch.ones(1), "value": value}, tmp_path)
    # A pickle by hand: the state of a function.
    for state in (b"}(X\x01\x00\x00\x00aK\x01u", b"N}(X\x0c\x00\x00\x00__defaults__)u\x86"):
        body = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + state + b"b."
        with zipfile.ZipFile(tmp_path / "hand.pt", "w") as archive:
            archive.writestr("hand/data.pkl", body)
            archive.writestr("hand/version", "3\n")
            archive.writestr("hand/byteorder", "little")
        with pytest.raises(tensorcask.CorruptionError, match="a state for an object of function"):
            import_(tmp_path / "hand.pt", tmp_path / "store", step=1)
    assert vars(torch._utils._rebuild_tensor_v2) == before


def test_archives_with_code_are_refused(tmp_path, url):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "a.pt"))
    with pytest.raises(tensorcask.UnsupportedError, match="a TorchScript archive"):
        import_(tmp_path / "a.pt", url, step=1)
    with tarfile.open(tmp_path / "b.pt", "w") as archive:
        archive.add(tmp_path / "a.pt", "storages")
    with pytest.raises(tensorcask.UnsupportedError, match="before 0.1.10"):
        import_(tmp_path / "b.pt", url, step=1)


def test_the_setting_of_pytorch_is_named(tmp_path, url, monkeypatch):
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(tensorcask.UnsupportedError, match="TORCH_FORCE_WEIGHTS_ONLY_LOAD is set"):
        import_(tmp_path / "a.pt", url, step=1)
