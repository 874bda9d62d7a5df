"""Folders of trainers and of models: every file is imported or named."""

import json
import random

import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tensorcask import _folders
from tensorcask.__main__ import main
from tensorcask.interchange import import_


def test_a_state_of_accelerate_is_imported_whole(tmp_path, url):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(torch.nn.BatchNorm1d(2))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    scheduler.step()
    for safe in (True, False):
        folder, store = tmp_path / f"state-{safe}", f"{url}-{safe}"
        accelerator.save_state(str(folder), safe_serialization=safe)
        import_(folder, store, step=1)
        loaded = tensorcask.load(store)
        assert loaded.keys() == {"model", "optimizer", "scheduler", "random_states_0", "custom_checkpoint_0"}
        assert torch.equal(loaded["model"]["weight"], model.weight)
        moments = optimizer.state_dict()["state"]
        assert all(torch.equal(loaded["optimizer"]["state"][key][name], value) for key in moments for name, value in moments[key].items())
        assert loaded["scheduler"] == scheduler.state_dict()
        assert loaded["random_states_0"]["random_state"] == random.getstate()
        assert np.array_equal(loaded["random_states_0"]["numpy_random_seed"][1], np.random.get_state()[1])


def test_a_folder_of_a_model_is_imported_whole(tmp_path, url, capsys, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / ".gitattributes").write_text("of another tool")
    assert main(["import", str(folder), url, "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == []
    snapshot = tensorcask.Store(url).snapshot()
    assert snapshot.blobs() == [(0, "config.json")] and snapshot.blob("config.json") == b"{}"
    assert tensorcask.load(url).keys() == {"w"}
    # A file that is too large to be a blob.
    monkeypatch.setattr(_folders, "_MOST_BYTES", 10)
    (folder / "model.onnx").write_bytes(bytes(11))
    (folder / "original").mkdir()
    assert main(["import", str(folder), url, "--step", "2"]) == 4
    assert f"left out: {folder}/model.onnx, {folder}/original/" in capsys.readouterr().out
    # The same for many sources.
    assert main(["import", "--each", str(folder), f"{url}-each", "--step", "2", "--json"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert report["left_out"] == report["stores"][0]["left_out"] == [f"{folder}/model.onnx", f"{folder}/original/"]


def test_files_beside_a_folder_of_dcp_are_named(tmp_path, url, capsys):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    torch.save({"iteration": 3}, tmp_path / "a" / "common.pt")
    (tmp_path / "a" / "metadata.json").write_text("{}")
    assert main(["import", str(tmp_path / "a"), url, "--step", "1"]) == 0
    assert torch.load(tensorcask.load(url)["common.pt"])["iteration"] == 3
    (tmp_path / "a" / "train_state.pt").write_bytes(b"x")
    assert main(["import", str(tmp_path / "a"), url, "--step", "2"]) == 4
    assert "left out" in capsys.readouterr().out


def test_parts_in_shards_and_many_ranks_are_imported(tmp_path, url):
    """The folder of a Trainer with FSDP, and one of two ranks and two models."""
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    for rank in (0, 1):
        torch.save({"cpu": torch.get_rng_state(), "numpy": np.random.get_state()}, folder / f"rng_state_{rank}.pth")
        save_file({"w": torch.full((2,), float(rank))}, folder / ("model.safetensors" if rank == 0 else "model_1.safetensors"))
    (folder / "trainer_state.json").write_text('{"global_step": 5, "best_metric": Infinity}')
    assert main(["import", str(folder), url]) == 0
    loaded = tensorcask.load(url, 5)
    assert loaded.keys() == {"pytorch_model_fsdp_0", "rng_0", "rng_1", "model", "model_1", "trainer_state"}
    assert torch.equal(loaded["pytorch_model_fsdp_0"]["model"]["w"], torch.ones(2)) and torch.equal(loaded["model_1"]["w"], torch.ones(2))


def test_sharded_weights_of_a_trainer(tmp_path, url):
    (tmp_path / "a").mkdir()
    for kind, save in (("safetensors", save_file), ("bin", torch.save)):
        names = {f"w{at}": f"{'model' if kind == 'safetensors' else 'pytorch_model'}-0000{at}-of-00002.{kind}" for at in (1, 2)}
        for path in (tmp_path / "a").iterdir():
            path.unlink()
        for at, file in enumerate(names.values(), 1):
            save({f"w{at}": torch.full((2,), float(at))}, tmp_path / "a" / file)
        prefix = "model" if kind == "safetensors" else "pytorch_model"
        (tmp_path / "a" / f"{prefix}.{kind}.index.json").write_text(json.dumps({"weight_map": names}))
        torch.save({"state": {}, "param_groups": []}, tmp_path / "a" / "optimizer.pt")
        import_(tmp_path / "a", f"{url}-{kind}", step=1)
        loaded = tensorcask.load(f"{url}-{kind}")
        assert loaded.keys() == {"model", "optimizer"} and {name: tensor[0].item() for name, tensor in loaded["model"].items()} == {"w1": 1, "w2": 2}
