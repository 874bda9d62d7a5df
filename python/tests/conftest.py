import itertools
import os
import select
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

_number = itertools.count()


@pytest.fixture
def url(tmp_path):
    """A store on local disk that is not there yet."""
    return str(tmp_path / "store")


@pytest.fixture
def memory():
    """A store in memory."""
    return f"memory://test-{next(_number)}"


@pytest.fixture
def host_memory(monkeypatch):
    """A folder of the engine in shared memory. Its agent ends with the test."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    monkeypatch.setenv("TENSORCASK_ENGINE_DIR", folder)
    yield folder
    end_agent(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_agent(folder):
    """Kills the agent of a folder, if one runs."""
    lock = Path(folder, "agent.lock")
    if lock.exists():
        stop(int(lock.read_text()))


def stop(pid):
    """Kills an agent of this test and waits until it is gone. It may have ended already."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
        os.waitid(os.P_PIDFD, process, os.WEXITED)
    except (ProcessLookupError, ChildProcessError):
        # The agent ended before, or is a child of another process.
        pass
    finally:
        os.close(process)
