"""Stores that users delete, move, share and replace. A new process loads every acknowledged save."""

import os
import pickle
import shutil
import subprocess
import sys
import textwrap

import pytest
import tensorcask
import torch


def state(value):
    # Several tensors, so that chunks are encoded in parallel.
    others = {f"layer.{at}": torch.arange(100.0) + at + value for at in range(8)}
    return {"w": torch.full((64, 8), float(value)), "step": value, **others}


def loads(url, value):
    """Returns whether a new process finds this state as the latest."""
    code = """
        import sys, tensorcask
        loaded = tensorcask.load(sys.argv[1])
        print(loaded["step"], float(loaded["w"].min()), float(loaded["w"].max()))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code), url], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(value), f"{value}.0", f"{value}.0"]
    return True


def in_child(act):
    """Runs a function in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_deleted_folder_is_made_again(url):
    tensorcask.save(state(1), url, step=1)
    shutil.rmtree(url)
    assert tensorcask.save(state(2), url, step=2).kind == "base"
    assert loads(url, 2)
    tensorcask.save(state(3), url, step=3)
    assert loads(url, 3)


def test_stores_of_one_process_and_its_children_are_one_job(url):
    store = tensorcask.Store(url)
    store.save(state(1), step=1)
    tensorcask.save(state(2), url, step=2)
    store.save(state(3), step=3)
    in_child(lambda: store.save(state(4), step=4))
    in_child(lambda: tensorcask.save(state(5), url, step=5))
    store.save(state(6), step=6)
    tensorcask.Store(url).save(state(7), step=7)
    tensorcask.save(state(8), url, step=8)
    assert loads(url, 8)
    assert [info.step for info in store.snapshots()] == list(range(1, 9))


def test_a_forked_child_loads_after_its_parent_did(url):
    """A forked child lacks the threads of the parent's pool and must not wait for them."""
    tensorcask.save(state(1), url, step=1)
    tensorcask.load(url)
    in_child(lambda: tensorcask.load(url))
    in_child(lambda: in_child(lambda: tensorcask.load(url)))


SAVES = """
    import pickle, sys, tensorcask
    step = int(sys.argv[2])
    store = pickle.loads(sys.stdin.buffer.read()) if sys.argv[1] == "-" else tensorcask.Store(sys.argv[1])
    store.save({"w": tensorcask.RawTensor("u8", (2,), bytearray([step, step]))}, step=step)
"""


def elsewhere(url, step, store=None):
    """Saves a step in another process: as a job of its own, or with a store that it receives by pickle."""
    given = None if store is None else pickle.dumps(store)
    subprocess.run([sys.executable, "-c", textwrap.dedent(SAVES), url, str(step)], input=given, check=True, timeout=120)


def test_a_pickled_store_saves_for_the_same_job(url):
    store = tensorcask.Store(url)
    store.save(state(1), step=1)
    elsewhere("-", 2, store)
    store.save(state(3), step=3)
    assert loads(url, 3)


def test_another_job_is_named_and_a_new_store_takes_over(url):
    store = tensorcask.Store(url)
    store.save(state(1), step=1)
    elsewhere(url, 2)
    for _ in range(2):
        with pytest.raises(tensorcask.FencedError, match=r"another job took over at step 2: writer [0-9a-f]{32} .*tensorcask\.Store\(url\)"):
            store.save(state(3), step=3)
    tensorcask.Store(url).save(state(4), step=4)
    store.save(state(5), step=5)
    assert loads(url, 5)


def test_a_store_that_another_job_made_in_its_place_is_left_to_it(url):
    store = tensorcask.Store(url)
    store.save(state(1), step=1)
    shutil.rmtree(url)
    elsewhere(url, 2)
    with pytest.raises(tensorcask.FencedError, match="deleted or replaced since this job last saved"):
        store.save(state(3), step=3)
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [2]


def test_a_step_is_replaced_only_where_asked(url):
    tensorcask.save(state(1), url, step=1)
    tensorcask.save(state(1), url, step=1)
    with pytest.raises(tensorcask.ConflictError, match=r"step 1 is saved already, with other content .*overwrite=True"):
        tensorcask.save(state(2), url, step=1)
    with pytest.raises(tensorcask.ConflictError):
        tensorcask.save({**state(1), "step": 2}, url, step=1)
    assert tensorcask.load(url, step=1)["step"] == 1
    tensorcask.save(state(2), url, step=1, overwrite=True)
    assert tensorcask.load(url, step=1)["step"] == 2 and loads(url, 2)


def test_dcp_replaces_a_step_only_where_asked(url):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    store = tensorcask.Store(url)
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=store.writer())
    with pytest.raises(CheckpointException, match="step 1 is saved already"):
        dcp.save(state(2), checkpoint_id="step-1", storage_writer=store.writer())
    dcp.save(state(3), checkpoint_id="step-1", storage_writer=store.writer(overwrite=True))
    loaded = state(0)
    dcp.load(loaded, checkpoint_id="step-1", storage_reader=store.reader())
    assert loaded["w"].unique().tolist() == [3.0]


def test_dcp_in_a_process_of_its_own_shares_the_store(url):
    """As in PROCESS checkpointing: the writer is pickled to another process, which commits."""
    store = tensorcask.Store(url)
    store.save(state(1), step=1)
    code = """
        import pickle, sys, torch
        import torch.distributed.checkpoint as dcp
        writer = pickle.loads(sys.stdin.buffer.read())
        dcp.save({"w": torch.full((64, 8), 2.0), "step": 2}, checkpoint_id="step-2", storage_writer=writer)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], input=pickle.dumps(store.writer()), check=True, timeout=120)
    store.save(state(3), step=3)
    assert loads(url, 3)


def test_a_forked_child_lets_go_of_stores_that_its_parent_opened(tmp_path):
    """A child has none of its parent's threads: dropping a store must not wait for them."""
    for at in range(9):
        tensorcask.save(state(at), tmp_path / str(at), step=1)
    # More stores than a process keeps open, so the child drops those of the parent.
    in_child(lambda: [tensorcask.save(state(at), tmp_path / f"child-{at}", step=1) for at in range(9)])
    assert loads(tmp_path / "child-8", 8)


def test_a_child_that_saves_before_its_parent_is_the_same_job(url):
    """Runs in a new process, because the first save of a process decides."""
    code = """
        import os, sys, torch, tensorcask
        url = sys.argv[1]
        store = tensorcask.Store(url)
        child = os.fork()
        if child == 0:
            store.save({"w": torch.ones(4), "step": 1}, step=1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.rename(url, url + ".away")
        store.save({"w": torch.ones(4), "step": 2}, step=2)
        os.rename(url, url + ".newer")
        os.rename(url + ".away", url)
        store.save({"w": torch.ones(4), "step": 3}, step=3)
        print(store.steps)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(url)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[-2] == "[1, 3]"
