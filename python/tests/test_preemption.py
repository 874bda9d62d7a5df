"""Preemption: processes that get the signals of schedulers drain their last save and end with success."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorcask

TRAINER = Path(__file__).parent / "preempted_trainer.py"


def start(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.Popen([*command, str(TRAINER), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    """Waits until a trainer has saved a step."""
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def drained(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"ended-{rank}.json").read_text())
    assert found["level"] == "durable", found
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_drains_the_last_save(number: signal.Signals, tmp_path: Path) -> None:
    process = start([sys.executable], tmp_path)
    wait_for(tmp_path / "step-0", process)
    # Slurm signals each process of a job step, and repeats nothing.
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    found = drained(tmp_path)
    assert found["reason"] == number.name
    assert tensorcask.Store(tmp_path / "store").snapshot("latest").step == found["step"]


def test_timeout_ends_a_job_cleanly(tmp_path: Path) -> None:
    process = start(["timeout", "-s", "TERM", "1000", sys.executable], tmp_path)
    wait_for(tmp_path / "step-0", process)
    # `timeout` passes the signal on.
    process.terminate()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert drained(tmp_path)["reason"] == "SIGTERM"


def test_a_notice_of_the_cloud_counts(tmp_path: Path) -> None:
    process = start([sys.executable], tmp_path)
    wait_for(tmp_path / "step-0", process)
    (tmp_path / "notice").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert drained(tmp_path)["reason"] == "callback"


def test_all_ranks_of_torchrun_end_at_the_same_step(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "0"]
    steps = []
    for _ in range(2):
        process = start([*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"], tmp_path)
        for rank in range(2):
            wait_for(tmp_path / f"step-{rank}", process)
        # `torchrun` sends SIGTERM to all ranks, and kills after 30 s those that remain.
        process.terminate()
        process.communicate()
        found = [drained(tmp_path, rank) for rank in range(2)]
        assert found[0]["step"] == found[1]["step"], found
        steps.append(found[0]["step"])
        assert tensorcask.Store(tmp_path / "store").snapshot("latest").step == steps[-1]
        for rank in range(2):
            (tmp_path / f"step-{rank}").unlink()
            (tmp_path / f"ended-{rank}.json").unlink()
    assert steps[1] > steps[0], "the second start goes on where the first ended"


class FakeEngine:
    """Waits that end at once."""

    def wait(self, until: str = "durable", timeout: float | None = None) -> Any:
        return tensorcask.engine.Waited(reached=until == "encoded", failures=[], problem="the store does not answer")

    def set_ending(self, is_ending: bool) -> None:
        pass


def test_a_drain_that_is_too_short_says_how_far_it_came() -> None:
    preemption = tensorcask.Preemption(FakeEngine(), (), 0.0, None, 1.0)
    assert not preemption.requested and preemption.reason is None
    preemption.check()
    preemption.request("maintenance")
    assert preemption.requested and preemption.time_left() == 0
    with pytest.raises(tensorcask.Preempted, match="maintenance: the last save is encoded") as raised:
        preemption.check()
    assert raised.value.code == 0 and raised.value.drained.problem == "the store does not answer"


def test_handlers_are_set_in_the_main_thread_and_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with tensorcask.Preemption(FakeEngine(), [signal.SIGUSR1], 5.0, None, 1.0) as preemption:
        signal.raise_signal(signal.SIGUSR1)
        assert preemption.requested and preemption.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            tensorcask.Preemption(FakeEngine(), [signal.SIGUSR1], 5.0, None, 1.0)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_signal_that_comes_after_the_ranks_have_asked_counts_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with tensorcask.Preemption(FakeEngine(), (), 1.0, None, 1.0) as preemption:
            all_reduce = dist.all_reduce

            def signalled(*arguments: Any, **options: Any) -> None:
                all_reduce(*arguments, **options)
                preemption.request("SIGTERM")

            monkeypatch.setattr(dist, "all_reduce", signalled)
            assert not preemption.agree() and preemption.requested
            assert preemption.agree()
    finally:
        dist.destroy_process_group()


def test_the_grace_counts_from_the_signal_although_its_handler_runs_later() -> None:
    """The main thread is in a call of a library, where Python runs no handler, until another thread has seen the notice."""
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)  # more than any pthread_mutex_t; zeros are an unlocked mutex
    left: list[float] = []
    with tensorcask.Preemption(FakeEngine(), [signal.SIGUSR1], 3600.0, None, 1.0) as preemption:

        def signal_and_look() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            end = time.monotonic() + 60
            while not preemption.requested and time.monotonic() < end:
                time.sleep(0.001)
            if preemption.requested:
                left.append(preemption.time_left())
            library.pthread_mutex_unlock(mutex)

        library.pthread_mutex_lock(mutex)
        thread = threading.Thread(target=signal_and_look)
        thread.start()
        # Returns after the unlock. No signal interrupts it.
        library.pthread_mutex_lock(mutex)
        thread.join()
        assert left, "the arrival was noted while the main thread was in the call"
        assert preemption.time_left() <= left[0], "the handler that ran since has not moved the begin"
        assert preemption.reason == "SIGUSR1"
