"""The model of lost and damaged stores, for some sequences: see ``python/tests/model``."""

import os
import re
import subprocess
import sys
from pathlib import Path


def test_nothing_is_lost_and_what_a_save_acknowledges_a_fresh_process_loads():
    """Runs in a process of its own, because the model forks: processes without torch fork in a fraction of the time."""
    url = os.environ.get("TENSORCASK_TEST_STORE")
    script = Path(__file__).parent / "run_model.py"
    place = ["--sequences", "40", "--url", f"{url}/model"] if url else ["--sequences", "40"]
    run = subprocess.run([sys.executable, script, "--jobs", "2", *place], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-10_000:]
    sequences = int(re.search(r"^(\d+) sequences, 0 violations$", run.stdout, re.M)[1])
    saved = sum(map(int, re.findall(r"^ *(\d+) .*: saved$", run.stdout, re.M)))
    assert saved > sequences, run.stdout
