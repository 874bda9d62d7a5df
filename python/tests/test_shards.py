"""Conversions in shards: each step of a store, or each of many sources, and every part exactly once."""

import json
from pathlib import Path
from typing import Any

import pytest
import tensorcask
from tensorcask.__main__ import main


def run(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main([*words, "--json"])
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert code == 0, report
    return report


def state(number: int) -> dict[str, Any]:
    return {"w": tensorcask.RawTensor("u8", (4,), bytearray([number] * 4))}


def test_every_step_is_exported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store, target = tmp_path / "run", tmp_path / "files"
    for step in range(5):
        tensorcask.save(state(step), store, step=10 * step)
    parts = [run(capfd, "export", str(store), str(target), "--every-step", "--shard", f"{part}/2") for part in range(2)]
    assert [[row["step"] for row in part["steps"]] for part in parts] == [[0, 20, 40], [10, 30]]
    assert parts[1]["shard"] == "1/2" and not any(row["present"] for part in parts for row in part["steps"])
    whole = run(capfd, "export", str(store), str(target), "--every-step")
    assert all(row["present"] for row in whole["steps"]) and whole["shard"] is None
    for step in range(5):
        path = target / f"step-{10 * step}.safetensors"
        assert path.read_bytes().endswith(bytes([step] * 4))
    # A step that is missing again is written again, in another form, too.
    (target / "step-20.safetensors").unlink()
    again = run(capfd, "export", str(store), str(target), "--every-step")
    assert [row["step"] for row in again["steps"] if not row["present"]] == [20]
    split = run(capfd, "export", str(store), str(target), "--every-step", "--max-shard-bytes", "1000000")
    assert (target / "step-20/model.safetensors.index.json").exists() and not split["steps"][0]["present"]
    assert all(row["present"] for row in run(capfd, "export", str(store), str(target), "--every-step", "--max-shard-bytes", "1000000")["steps"])


def test_each_source_becomes_a_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sources = []
    for number in (3, 100, 20):
        tensorcask.save(state(number), tmp_path / "one", step=number)
        sources.append(str(tmp_path / f"checkpoint-{number}.safetensors"))
        run(capfd, "export", str(tmp_path / "one"), sources[-1], "--step", str(number))
    stores = tmp_path / "stores"
    parts = [run(capfd, "import", *sources, str(stores), "--each", "--shard", f"{part}/2")["stores"] for part in range(2)]
    assert [[row["step"] for row in part] for part in parts] == [[3, 20], [100]]
    for number in (3, 100, 20):
        loaded = tensorcask.Store(stores / f"checkpoint-{number}").snapshot("latest")
        assert loaded.step == number
    again = run(capfd, "import", *sources, str(stores), "--each")["stores"]
    assert all(row["present"] for row in again)


@pytest.mark.parametrize(
    "words",
    [
        ["import", "a.safetensors", "store", "--shard", "0/2", "--step", "1"],
        ["import", "a.safetensors", "store", "--each", "--shard", "2/2"],
        ["export", "store", "target", "--shard", "0/2"],
        ["export", "store", "target", "--every-step", "--step", "3"],
        ["export", "store", "target", "--every-step", "--shard", "x"],
    ],
)
def test_shards_that_make_no_sense_are_usage_errors(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "shard" in capfd.readouterr().err or "--step" in words


def test_names_must_differ_and_have_a_number(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["a/x-1.pt", "b/x-1.pt"], ["a/last.pt"]):
        assert main(["import", *words, str(tmp_path / "stores"), "--each"]) == 1
        assert "same store" in (error := capfd.readouterr().err) or "pass --step" in error
