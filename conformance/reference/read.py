"""`read.py PATH`: the adapter, with the packages of `.venv` if this Python has none."""

import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = HERE / ".venv" / "bin" / "python3"

if importlib.util.find_spec("numpy") is None and PYTHON.exists() and Path(sys.prefix) != PYTHON.parents[1]:
    os.execv(PYTHON, [str(PYTHON), __file__, *sys.argv[1:]])
sys.path.insert(0, str(HERE))

from tensorcask_reference.__main__ import main  # noqa: E402

sys.exit(main(["read", *sys.argv[1:]]))
