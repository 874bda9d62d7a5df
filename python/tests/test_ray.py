"""Shards of one store and tasks for many, on a Ray cluster of four workers that this test starts. ``bash .ci/thorough ray`` runs it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorcask

ray = pytest.importorskip("ray")

import tensorcask.ray as fleet  # noqa: E402

SNAPSHOTS = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "store"
    weights = bytearray(os.urandom(200_000))
    opened = tensorcask.Store(path, fsync=False)
    for step in range(SNAPSHOTS):
        weights[step] ^= 1
        opened.save({"model": {"w": tensorcask.RawTensor("u8", (len(weights),), weights)}}, step=step)
    return path


def command(*words: str) -> dict[str, Any]:
    ended = subprocess.run([sys.executable, "-m", "tensorcask", *words, "--json"], stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def same(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("seconds", "shard")}


class Killer(threading.Thread):
    """Kills the worker that runs the first command with these words."""

    def __init__(self, *words: str) -> None:
        super().__init__(daemon=True)
        self.words, self.killed = words, False

    def run(self) -> None:
        while not self.killed:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    words = (process / "cmdline").read_bytes().decode().split("\0")
                    parent = int((process / "stat").read_text().rsplit(") ", 1)[1].split()[1])
                    if all(word in words for word in self.words) and b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes():
                        os.kill(parent, signal.SIGKILL)
                        self.killed = True
                        return
                except (OSError, IndexError, UnicodeDecodeError):
                    continue
            time.sleep(0.005)


def test_a_lost_worker_changes_nothing_in_the_report(cluster: None, store: Path) -> None:
    expected = command("verify", str(store))
    assert expected["clean"] and expected["snapshots"] == SNAPSHOTS
    killer, seen = Killer("verify", "--shard", "5/8"), []
    killer.start()
    found = fleet.verify(str(store), shards=8, progress=lambda done, of: seen.append((done, of)))
    assert killer.killed and found.retried == 1 and found.ok
    assert same(found.result) == same(expected)
    assert seen == [(done, 8) for done in range(1, 9)]


def test_damage_is_found_once(cluster: None, store: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    found = fleet.copy(str(store), str(copied), shards=4)
    assert found.ok and found.result["snapshots"] == SNAPSHOTS
    assert fleet.copy(str(store), str(copied), shards=2).result["present"] == SNAPSHOTS
    victim = max((copied / "casks").iterdir(), key=lambda cask: cask.stat().st_size)
    damaged = bytearray(victim.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    victim.write_bytes(damaged)
    found, expected = fleet.verify(str(copied), shards=4), command("verify", str(copied))
    assert not found.ok and found.code == 3
    assert sorted(map(json.dumps, found.result["problems"])) == sorted(map(json.dumps, expected["problems"]))
    assert same({**found.result, "problems": None}) == same({**expected, "problems": None})


def test_many_stores_are_one_task_each(cluster: None, tmp_path: Path) -> None:
    sources = []
    for number in range(6):
        sources.append(str(tmp_path / f"checkpoint-{number * 100}.safetensors"))
        tensorcask.save({"w": tensorcask.RawTensor("f32", (2,), bytearray(8))}, tmp_path / "one", step=number)
        command("export", str(tmp_path / "one"), sources[-1], "--step", str(number))
    imported = fleet.import_each(sources, str(tmp_path / "stores"), shards=3)
    assert imported.ok and [row["step"] for row in imported.result["stores"]] == [number * 100 for number in range(6)]
    assert all(row["present"] for row in fleet.import_each(sources, str(tmp_path / "stores"), shards=2).result["stores"])
    stores = [row["store"] for row in imported.result["stores"]]
    collected = fleet.gc([*stores, str(tmp_path / "nothing")], options=["--apply"])
    assert collected.code == 10 and collected.result[str(tmp_path / "nothing")]["error"]["kind"] == "not_found"
    assert all(collected.result[store]["applied"] for store in stores)
    assert fleet.compact(stores).ok
    exported = fleet.export_steps(str(tmp_path / "one"), str(tmp_path / "files"), shards=3)
    assert [row["step"] for row in exported.result["steps"]] == list(range(6))
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [f"step-{number}.safetensors" for number in range(6)]
    with pytest.raises(RuntimeError, match="failed"):
        fleet.verify(str(tmp_path / "nothing"), shards=2)
