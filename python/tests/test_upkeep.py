"""Maintenance of stores on disk: retention, garbage collection, compaction, copies."""

import datetime
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorcask


def disk_bytes(url):
    return sum(path.stat().st_size for path in Path(url).rglob("*") if path.is_file())


def state_of(step):
    return {"w": np.random.default_rng(step).integers(0, 255, 100_000, np.uint8), "step": step}


def save(store, steps, **options):
    for step in steps:
        store.save(state_of(step), step=step, **{"policy": "full"} | options)


def check(store, *steps):
    assert store.steps == list(steps)
    for step in steps:
        assert (store.load(step)["w"] == state_of(step)["w"]).all()
    assert store.verify().is_clean


def collect(store, older_than="0s", apply=True):
    """Collects until objects are deleted: their age is more than 0 once the clock has moved on."""
    for _ in range(1000):
        report = store.gc(apply=apply, older_than=older_than)
        if report.deleted:
            return report
    raise AssertionError("nothing is old enough")


def test_steps_and_length(url):
    store = tensorcask.Store(url)
    assert store, "true without a request"
    with pytest.raises(tensorcask.NotFoundError):
        len(store)
    save(store, (3, 1, 2))
    assert store.steps == [3, 1, 2] and len(store) == 3, "in the order of commits"
    store.forget([1])
    assert store.steps == [3, 2] and len(store) == 2
    store.forget([3, 2])
    assert store.steps == [] and len(store) == 0 and store


def test_gc_is_a_dry_run_unless_applied(url):
    store = tensorcask.Store(url)
    save(store, range(4))
    before = disk_bytes(url)
    store.forget([0, 1, 2])
    told = store.gc(older_than="0s")
    assert (told.applied, told.collected, disk_bytes(url) <= before + 1000) == (False, [0, 1, 2], True)
    assert told.collected_bytes > 300_000 and store.gc(older_than="0s").collected == [0, 1, 2], "nothing was done"
    young = store.gc(apply=True)
    assert (young.applied, young.collected, young.deleted) == (True, [0, 1, 2], []), "nothing is 24 hours old"
    assert young.waiting_bytes >= 300_000 and young.waiting_bytes == sum(size for _, size in young.waiting)
    freed = collect(store)
    assert freed.freed_bytes == sum(size for _, size in freed.deleted) > 300_000
    assert disk_bytes(url) < before - 300_000 + 10_000
    check(store, 3)


def test_gc_keeps_what_a_chain_needs_until_it_is_compacted(url):
    store = tensorcask.Store(url)
    w = state_of(0)["w"]
    for step in range(3):
        w[step] ^= 1
        store.save({"w": w}, step=step, policy="consecutive")
    store.forget([0, 1])
    held = store.gc(older_than="0s")
    assert (held.collected, held.held) == ([], [0, 1]) and held.held_bytes > 90_000
    for step in ("latest", 2):
        report = store.compact(step)
        assert (report.step, report.id) == (2, store.snapshot().id)
        assert report.changed == (step == "latest") and report.links == (3 if report.changed else 1)
        assert report.stored_bytes > 90_000 and report.chain_bytes >= report.stored_bytes
    assert store.snapshot().kind == "base" and (store.load()["w"] == w).all()
    before = disk_bytes(url)
    assert store.gc(apply=True).collected == [0, 1]
    collect(store)
    assert disk_bytes(url) < before - 90_000
    assert (store.load()["w"] == w).all() and store.verify().is_clean
    with pytest.raises(tensorcask.NotFoundError, match=r"tensorcask ls"):
        store.compact(1)


@pytest.mark.parametrize("wrong", ["", "24", "h", "-1h", "1 fortnight", "²h", datetime.timedelta(seconds=-1)])
def test_gc_refuses_ages_it_cannot_read(url, wrong):
    with pytest.raises(ValueError):
        tensorcask.Store(url).gc(older_than=wrong)


def test_gc_reads_ages(url):
    store = tensorcask.Store(url)
    save(store, (0, 1))
    store.forget([0])
    store.gc(apply=True)
    for age in ("0", "0h", datetime.timedelta()):
        assert collect(store, older_than=age, apply=False).freed_bytes > 90_000
    for age in ("3600s", "60m", "2h", "7d", datetime.timedelta(days=1)):
        report = store.gc(older_than=age)
        assert report.deleted == [] and report.waiting


def test_keep_last_forgets_older_steps_but_no_pinned_one(url):
    store = tensorcask.Store(url)
    save(store, range(3))
    store.pin(1)
    before = disk_bytes(url)
    save(store, (3, 4), keep_last=2, free="gc")
    check(store, 1, 3, 4)
    assert disk_bytes(url) > before, "forgetting frees nothing"
    assert store.gc(apply=True).collected == [0, 2]
    before = disk_bytes(url)
    collect(store)
    assert disk_bytes(url) < before - 190_000
    check(store, 1, 3, 4)
    tensorcask.save(state_of(5), url, step=5, keep_last=1)
    assert store.steps == [1, 5]


def stored_steps(folder):
    """Steps whose manifests are there."""
    return sorted(int(path.name.split("-")[0]) for path in folder.glob("snapshots/*"))


@pytest.mark.parametrize("through", ["store", "engine"])
def test_a_job_deletes_what_it_has_forgotten(tmp_path, through):
    large = {"w": np.random.default_rng(0).random(40_000)}
    folder = tmp_path / "run"
    if through == "store":
        store = tensorcask.Store(folder)
        for step in range(1, 10):
            store.save({"w": large["w"] + step}, step=step, policy="full", keep_last=2)
            assert stored_steps(folder) == list(range(max(1, step - 2), step + 1)), "two steps, and the one that was forgotten last"
        for step in (10, 11):
            store.save({"w": large["w"] + step}, step=step, policy="full", keep_last=2, free="gc")
        assert stored_steps(folder) == [7, 8, 9, 10, 11]
    else:
        with tensorcask.Engine(folder, folder=tmp_path / "memory", policy="full", keep_last=2) as engine:
            for step in range(1, 10):
                engine.save({"w": large["w"] + step}, step=step)
                engine.wait()
        # The last retention may still be under way.
        assert stored_steps(folder)[-3:] == [7, 8, 9]
        assert len(stored_steps(folder)) <= 4
    assert tensorcask.Store(folder).verify().is_clean
    with pytest.raises(tensorcask.InvalidArgumentError, match="free 'soon': use 'next_save' or 'gc'"):
        tensorcask.save(large, folder, step=20, keep_last=1, free="soon")


@pytest.mark.parametrize("way", ["a process for each save", "other options each time"])
def test_what_others_forgot_is_freed_too(tmp_path, way):
    folder = tmp_path / "run"
    store = tensorcask.Store(folder)
    for step in range(1, 10):
        # A new object knows as little of the store as a new process.
        saver = tensorcask.Store(folder) if way == "a process for each save" else store
        keep_every = 1000 if step % 2 and saver is store else None
        saver.save({"w": np.random.default_rng(step).random(40_000)}, step=step, policy="full", keep_last=2, keep_every=keep_every)
        assert stored_steps(folder) == list(range(max(1, step - 2), step + 1))
    assert store.verify().is_clean and store.steps == [8, 9]


def test_a_load_of_the_newest_step_begins_again_if_a_job_frees_it(url):
    job, reader, seen = tensorcask.Store(url), tensorcask.Store(url), []

    def save_large(step):
        # Opening a step reads a small cask as a whole.
        job.save({"w": np.random.default_rng(step).integers(0, 255, 400_000, np.uint8)}, step=step, policy="full", keep_last=1)

    def read(snapshot):
        if not seen:
            for step in (2, 3, 4):
                save_large(step)
        seen.append(snapshot.step)
        return snapshot.load()["w"]

    save_large(1)
    assert (reader.read_step("latest", read) == job.load(4)["w"]).all()
    assert seen == [1, 4]

    def ask_for_more(snapshot):
        raise tensorcask.NotFoundError(f"step {snapshot.step} has no such part")

    with pytest.raises(tensorcask.NotFoundError, match="step 4 has no such part"):
        reader.read_step("latest", ask_for_more)


def test_a_late_reader_learns_why_its_step_is_gone(url):
    """The reader knows the index of the step from before, so the first missing object is that of a blob or a tensor."""
    store = tensorcask.Store(url)
    save(store, [1], keep_last=1)
    store.load()
    late = store.snapshot(1)
    save(store, [2, 3, 4], keep_last=1)
    with pytest.raises(tensorcask.ConflictError, match="step 1 was forgotten since .* pin it first"):
        late.load()


def test_keep_last_counts_commits_and_not_step_numbers(url):
    store = tensorcask.Store(url)
    save(store, (10, 20, 5), keep_last=2)
    assert store.steps == [20, 5]


def test_keep_last_keeps_the_chain_of_a_delta(url):
    store = tensorcask.Store(url)
    w = state_of(0)["w"]
    for step in range(6):
        w[step] ^= 1
        store.save({"w": w}, step=step, policy="intermittent:4", keep_last=1)
        store.gc(apply=True, older_than="0s")
        assert store.steps == [step] and (store.load()["w"] == w).all()
    assert [kind for _, kind, _ in store.snapshot().chain] == ["delta", "base"] and store.verify().is_clean


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError), ("2", TypeError)])
def test_keep_last_is_checked_before_anything_is_saved(url, wrong, error):
    with pytest.raises(error, match="keep_last"):
        tensorcask.save({"w": np.ones(3)}, url, step=1, keep_last=wrong)
    assert not os.path.exists(url)


def test_a_save_stands_if_older_steps_cannot_be_forgotten(url, caplog, monkeypatch):
    store = tensorcask.Store(url)
    save(store, (1, 2))

    def fail(*_):
        raise tensorcask.StorageError("the network is down")

    monkeypatch.setattr(tensorcask.Store, "retain_steps", fail)
    with caplog.at_level(logging.WARNING, "tensorcask"):
        save(store, [3], keep_last=1)
    assert "the network is down" in caplog.text and store.steps == [1, 2, 3]
    monkeypatch.undo()
    save(store, [4], keep_last=1)
    check(store, 4)


def test_a_copy_is_whole_and_goes_on(url, tmp_path):
    store = tensorcask.Store(url)
    save(store, range(3))
    store.pin(0)
    copy = tmp_path / "copy"
    report = store.copy_to(copy)
    assert (report.snapshots, report.present) == (3, 0) and report.bytes > 300_000 and report.objects >= 6
    assert disk_bytes(copy) > 300_000
    save(store, [3])
    again = store.copy_to(tensorcask.Store(copy))
    assert (again.snapshots, again.present) == (1, 3) and 100_000 < again.bytes < 200_000
    shutil.rmtree(url)
    check(tensorcask.Store(copy), 0, 1, 2, 3)
    assert [info.step for info in tensorcask.Store(copy).snapshots() if info.pinned] == [0]


def test_a_copy_of_some_steps(url, tmp_path):
    store = tensorcask.Store(url)
    w = state_of(0)["w"]
    for step in range(4):
        w[step] ^= 1
        store.save({"w": w}, step=step, policy="consecutive")
    copy = tensorcask.Store(tmp_path / "copy")
    assert store.copy_to(copy, steps=[1, 0]).snapshots == 2
    assert copy.steps == [0, 1]
    assert store.copy_to(copy, steps=[3]).snapshots == 2
    assert copy.steps == [0, 1, 3], "what only the chain needs is not a step of the copy; what was a step stays one"
    assert (copy.load(3)["w"] == w).all() and copy.verify().is_clean
    with pytest.raises(tensorcask.NotFoundError, match="step 9"):
        store.copy_to(tmp_path / "other", steps=[0, 9])
    with pytest.raises(tensorcask.InvalidArgumentError, match="no step"):
        store.copy_to(tmp_path / "other", steps=[])
    with pytest.raises(tensorcask.InvalidArgumentError, match="another run"):
        foreign = tensorcask.Store(tmp_path / "foreign")
        save(foreign, [1])
        store.copy_to(foreign)


def test_progress(url, tmp_path):
    store = tensorcask.Store(url)
    save(store, range(2), policy="consecutive")
    for work in (store.gc, store.compact, lambda progress: store.copy_to(tmp_path / "copy", progress=progress)):
        told = []
        work(progress=lambda read, written: told.append((read, written)))
        assert told and told[-1][0] > 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("work", ["gc()", "compact()", "copy_to('memory://copy')", "save({}, step=1, keep_last=1)"])
def test_ctrl_c_ends_upkeep(work):
    """A wait for a server that never answers ends with the signal."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = {"aws_endpoint": f"http://127.0.0.1:{server.getsockname()[1]}", "aws_allow_http": "true", "aws_region": "none"}
        config |= {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
        code = f"import tensorcask; tensorcask.Store('s3://bucket/run', {config}).{work}"
        run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
        connection.close()
    assert "KeyboardInterrupt" in said and run.returncode == -signal.SIGINT


def test_advice_uses_the_times_of_saves(memory):
    store = tensorcask.Store(memory)
    for step in (100, 200, 300):
        store.save({"w": np.full(1000, step, np.float32)}, step=step)
    advice = store.advise(mtbf="8h", stall="500ms", step_time=datetime.timedelta(seconds=2), restore="measure", torch_save="2m")
    assert (advice.interval_steps, advice.interval_s, advice.limited_by_saves) == (85, 170.0, False)
    assert 0 < advice.lost_share < advice.torch_save_lost_share < 1
    assert advice.keep_last == 100 and advice.keep_every % 85 == 0
    assert {name: time.origin for name, time in advice.times.items()} == {
        "stall": "given", "save": "measured", "stage": "given", "restore": "measured", "step": "given", "torch_save": "given"
    }
    assert store.advise(mtbf="8h").times["stall"].how == "time from the call of a save to its commit, median of 2 saves"
    for wrong in ({"mtbf": "soon"}, {"mtbf": "0"}, {"mtbf": "8h", "stall": "fast"}):
        with pytest.raises(tensorcask.InvalidArgumentError):
            store.advise(**wrong)
    with pytest.raises(tensorcask.NotFoundError, match="no store"):
        tensorcask.Store(memory + "-nowhere").advise(mtbf="8h")
