"""Waits of the engine that end: after failures, by signals, and while the agent does not answer."""

import logging
import os
import shutil
import signal
import sys
import threading

import numpy as np
import pytest
import tensorcask
from tensorcask.engine import agent_status
from test_engine import folder, pause  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")


def state_of(step):
    return {"w": np.full(1000, step, np.float32)}


@pytest.fixture
def interrupts():
    """Raises KeyboardInterrupt in this thread after a moment, as Ctrl-C does."""

    def ring(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, ring)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.3)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def put_in_the_way(url):
    """Puts a file where a store was. The agent may make its folder again meanwhile."""
    while True:
        try:
            with open(url, "x") as no_folder:
                no_folder.write("in the way of the store")
            return
        except FileExistsError:
            shutil.rmtree(url)


def test_finish_with_a_timeout_ends_after_an_earlier_failure(url, folder):  # noqa: F811
    engine = tensorcask.Engine(url, folder=folder, check="finite")
    engine.save({"w": np.full(10, np.nan, np.float32)}, step=1)
    waited = engine.wait()
    assert waited.failed and [step for step, _ in waited.failures] == [1]
    os.rename(url, f"{url}.kept")
    put_in_the_way(url)
    engine.save(state_of(2), step=2)
    assert not engine.wait(timeout=0).failed
    with pytest.raises(tensorcask.StorageError, match=r"not in the store after 0.2 s, and memory is kept"):
        engine.finish(timeout=0.2)
    os.remove(url)
    os.rename(f"{url}.kept", url)
    engine.finish()
    assert tensorcask.load(url)["w"][0] == 2


def test_an_agent_that_does_not_answer_is_a_problem_and_no_hang(url, folder):  # noqa: F811
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state_of(1), step=1)
        engine.wait()
        agent = agent_status(folder)["pid"]
        pause(agent)
        engine.save(state_of(2), step=2)
        for _ in range(2):
            waited = engine.wait(timeout=0.1)
            assert not waited.reached and "does not answer" in waited.problem, waited
        os.kill(agent, signal.SIGCONT)
        assert engine.wait().reached
        engine.finish()


def test_what_a_signal_handler_raises_in_a_log_call_is_raised(url, folder):  # noqa: F811
    class Rings(logging.Handler):
        def emit(self, record):
            os.kill(os.getpid(), signal.SIGUSR2)

    def ring(*_):
        raise KeyboardInterrupt

    log, rings, previous = logging.getLogger("tensorcask"), Rings(), signal.signal(signal.SIGUSR2, ring)
    try:
        with tensorcask.Engine(url, folder=folder, check="finite") as engine:
            engine.save({"w": np.full(10, np.nan, np.float32)}, step=1)
            engine.wait()
            log.addHandler(rings)
            with pytest.raises(KeyboardInterrupt):
                engine.save(state_of(2), step=2)
            log.removeHandler(rings)
            assert engine.wait().reached
            engine.finish()
    finally:
        log.removeHandler(rings)
        signal.signal(signal.SIGUSR2, previous)


def test_a_signal_ends_an_agreement(url, folder, interrupts):  # noqa: F811
    with tensorcask.Engine(url, folder=folder, rank=0, world=2) as engine:
        interrupts()
        with pytest.raises(KeyboardInterrupt):
            # Rank 1 never comes.
            engine.agree_by_store("first", timeout=3600)


def test_a_signal_ends_a_start(url, folder, interrupts):  # noqa: F811
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state_of(1), step=1)
        engine.wait()
    agent = agent_status(folder)["pid"]
    pause(agent)
    interrupts()
    with pytest.raises(KeyboardInterrupt):
        tensorcask.Engine(url, folder=folder)
    os.kill(agent, signal.SIGCONT)
    with tensorcask.Engine(url, folder=folder) as engine:
        assert engine.restore().step == 1


def test_a_signal_ends_a_restore_and_a_store_that_hangs_keeps_no_process(url, folder, interrupts):  # noqa: F811
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state_of(1), step=1)
        engine.finish()
    os.rename(f"{url}/store.json", f"{url}/kept.json")
    # A read blocks until somebody writes, as that of a file on a server that is gone.
    os.mkfifo(f"{url}/store.json")
    with tensorcask.Engine(url, folder=folder, store_timeout=0.2) as engine:
        with pytest.raises(tensorcask.Error):
            engine.restore()
    interrupts()
    with pytest.raises((KeyboardInterrupt, tensorcask.Error)):
        tensorcask.Engine(url, folder=folder, store_timeout=3600).restore()


def test_a_save_that_waits_is_skipped_once_the_end_is_announced(url, folder):  # noqa: F811
    with tensorcask.Engine(url, folder=folder, slots=1) as engine:
        engine.save(state_of(1), step=1)
        engine.wait()
        agent = agent_status(folder)["pid"]
        pause(agent)
        assert engine.save(state_of(2), step=2).saved
        with engine.on_preemption(signals=(signal.SIGUSR1,), grace=0.0) as preemption:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert not engine.save(state_of(3), step=3).saved
            assert preemption.requested and preemption.reason == "SIGUSR1"
        os.kill(agent, signal.SIGCONT)
        assert engine.save(state_of(4), step=4).saved
        engine.finish()
    assert tensorcask.load(url)["w"][0] == 4


def test_a_training_that_restored_nothing_replaces_no_stored_step(url, folder):  # noqa: F811
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state_of(5), step=5)
        engine.finish()
    with tensorcask.Engine(url, folder=folder) as engine:
        with pytest.raises(tensorcask.TemplateError):
            engine.restore(out={**state_of(0), "lora": np.zeros(3, np.float32)})
        with pytest.raises(tensorcask.ConflictError, match="step 5 is stored, and this training has restored nothing"):
            engine.save(state_of(1), step=1)
        assert engine.restore().step == 5
        engine.save(state_of(1), step=1)
        engine.finish()
    assert tensorcask.load(url, step=5)["w"][0] == 5


def test_an_engine_may_be_told_to_replace_stored_steps_and_to_state_roles(url, folder):  # noqa: F811
    for _ in range(2):
        with tensorcask.Engine(url, folder=folder, overwrite=True, roles="w=ema:parameter") as engine:
            engine.save(state_of(5), step=5)
            engine.finish()
    tensor = tensorcask.Store(url).snapshot().tensors()["w"]
    assert (tensor.role, tensor.param) == ("ema", "parameter")


def test_views_of_one_memory_keep_their_types_and_shapes(url, folder):  # noqa: F811
    torch = pytest.importorskip("torch")

    def views(memory):
        return {"flat": memory, "matrix": memory.view(4, 4), "numbers": memory.view(torch.int32), "tied": memory.view(4, 4)}

    state = views(torch.arange(16.0))
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state, step=1)
        found = engine.restore()
        assert found.source == "slot"
        for name, saved in state.items():
            assert found.state[name].dtype == saved.dtype and torch.equal(found.state[name], saved), name
        assert found.state["matrix"] is found.state["tied"]
        # One memory of the caller is filled once.
        out = views(torch.zeros(16))
        engine.restore(out=out)
        assert all(torch.equal(out[name], saved) for name, saved in state.items())
        engine.finish()


def test_ranks_that_restore_the_newest_step_without_an_agreement_are_warned(url, folder, caplog):  # noqa: F811
    with tensorcask.Engine(url, folder=folder, rank=0, world=2) as engine:
        with pytest.raises(tensorcask.NotFoundError):
            engine.restore()
        assert "call agree on all ranks first" in caplog.text
