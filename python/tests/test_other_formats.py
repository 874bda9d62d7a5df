"""Loading files of another tool: the error names their format and the command that imports them."""

import subprocess
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

W = {"w": torch.ones(4, 4)}


def told(path, call=tensorcask.load):
    with pytest.raises(tensorcask.NotFoundError) as caught:
        call(path)
    assert caught.value.kind == "not_found" and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "write", "says"),
    [
        ("m.pt", lambda path: torch.save(W, path), "torch.save"),
        ("weights", lambda path: torch.save(W, path), "torch.save"),
        ("x.safetensors", lambda path: save_file(W, path), "safetensors file"),
        ("model", lambda path: path.mkdir() or save_file(W, path / "model.safetensors"), "safetensors"),
        ("dcp", lambda path: dcp.save(dict(W), checkpoint_id=path, no_dist=True), "torch.distributed.checkpoint"),
    ],
)
def test_a_checkpoint_that_can_be_imported_is_named_with_the_command(name, write, says, tmp_path):
    path = tmp_path / name
    write(path)
    for call in (tensorcask.load, lambda path: tensorcask.load(path, 7), lambda path: tensorcask.Store(path).snapshots()):
        text = told(path, call)
        assert says in text and f"tensorcask import {path}" in text
    assert says in told(path, lambda path: tensorcask.load(path.as_uri()))
    # The command in the error imports the files.
    kind = {"weights": ["--format", "torch"]}.get(name, [])
    command = [sys.executable, "-m", "tensorcask", "import", path, tmp_path / "store", "--step", "7", *kind]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    assert torch.equal(tensorcask.load(tmp_path / "store")["w"], W["w"])


def test_a_file_is_no_place_to_save(tmp_path):
    path = tmp_path / "m.pt"
    torch.save(W, path)
    with pytest.raises(tensorcask.Error, match="torch.save"):
        tensorcask.save(W, path, step=1)


def test_an_orbax_folder_is_named(tmp_path):
    tree = {"w": jnp.ones(3)}
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))
    for path in (tmp_path / "manager", tmp_path / "manager" / "5", tmp_path / "manager" / "5" / "default"):
        text = told(path)
        assert "Orbax" in text and "tensorcask.save" in text


def test_a_folder_that_names_a_snapshot_says_where_it_is(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        import tensorcask.orbax

        manager.save(5, args=tensorcask.orbax.Save({"w": jnp.ones(3)}))
    text = told(tmp_path / "5" / "default")
    assert "step 5" in text and str(tmp_path / "tensorcask") in text
    assert tensorcask.load(tmp_path / "tensorcask", 5)["w"].tolist() == [1, 1, 1]


def test_a_folder_of_something_else_has_no_store(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        assert "no store here" in told(path)
    (tmp_path / "notes.txt").write_text("w")
    assert "no store here" in told(tmp_path)
    # A store with such files beside its own is still a store.
    torch.save(W, tmp_path / "m.pt")
    tensorcask.save(W, tmp_path, step=1)
    with pytest.raises(tensorcask.NotFoundError, match="step 9"):
        tensorcask.load(tmp_path, 9)
