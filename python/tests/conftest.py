import contextlib
import itertools
import shutil
import tempfile

import pytest
import tensorcask

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
    """A folder of the engine in shared memory. Its agent is told to end with the test."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    monkeypatch.setenv("TENSORCASK_ENGINE_DIR", folder)
    yield folder
    end_agent(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_agent(folder):
    """Tells the agent of a folder to end, if one runs."""
    from tensorcask.engine import stop_agent

    with contextlib.suppress(tensorcask.NotFoundError):
        stop_agent(folder)
