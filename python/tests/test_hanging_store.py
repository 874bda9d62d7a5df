"""A local store whose file system hangs: reads neither return nor fail. Ctrl-C and close() work all the same."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_engine import folder  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")

# Stands in for such a file system; see its comment.
SOURCE = Path(__file__).resolve().parents[2] / "cli/tests/engine/hang.c"

BEGIN = """
import sys
import threading
from pathlib import Path
import numpy as np
import tensorcask

url, folder, gate = sys.argv[1:]
state = {"w": np.full(1000, 1, np.float32)}


def interrupted(call):
    try:
        print("waits", flush=True)
        call()
    except KeyboardInterrupt:
        return
    raise AssertionError("it returned")


"""

RESTORE = """
with tensorcask.Engine(url, folder=folder) as engine:
    engine.save(state, step=1)
    engine.finish()
engine = tensorcask.Engine(url, folder=folder, store_timeout=3600)
Path(gate).touch()
interrupted(engine.restore)
engine.close()
print("closed", flush=True)
"""

SAVE = """
engine = tensorcask.Engine(url, folder=folder)
engine.save(state, step=1)
engine.wait()
Path(gate).touch()
engine.save(state, step=2)
interrupted(engine.wait)
interrupted(engine.finish)
engine.close()
print("closed", flush=True)
"""

CLOSE = """
with tensorcask.Engine(url, folder=folder) as engine:
    engine.save(state, step=1)
    engine.finish()
engine = tensorcask.Engine(url, folder=folder, store_timeout=3600)
Path(gate).touch()


def read():
    try:
        engine.restore()
    except tensorcask.Error:
        pass


threading.Thread(target=read, daemon=True).start()
while not Path(gate + ".reached").exists():
    pass
engine.close()
print("closed", flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None or not SOURCE.exists():
        pytest.skip("needs a C compiler, and the sources of the project")
    built = tmp_path_factory.mktemp("hang") / "hang.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)
    return built


@pytest.mark.parametrize("script", [RESTORE, SAVE, CLOSE], ids=["restore", "save", "close"])
def test_a_process_ends_although_its_store_hangs(library, tmp_path, folder, script):  # noqa: F811
    url, gate = tmp_path / "run", tmp_path / "gate"
    environment = {**os.environ, "LD_PRELOAD": str(library), "TEST_HANG": str(gate), "TEST_HANG_BELOW": str(url)}
    command = [sys.executable, "-c", BEGIN + script, url, folder, gate]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    # Keeps a failing test from hanging.
    alarm = threading.Timer(180, process.kill)
    alarm.start()
    said = []
    try:
        for line in process.stdout:
            said.append(line.strip())
            if said[-1] == "waits":
                while not Path(f"{gate}.reached").exists() and process.poll() is None:
                    os.sched_yield()
                process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        alarm.cancel()
        process.kill()
        process.communicate()
        # The agent of this test hangs, too.
        gate.unlink(missing_ok=True)
    assert (process.returncode, said[-1]) == (0, "closed"), said
