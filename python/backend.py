"""Build backend of the package: maturin, and the completions and man pages of the command.

The command writes these files, so a wheel is built twice, the second time with the files. Cargo then has nothing to compile.
They are in `tensorcask._native.data`, which is where maturin looks for files to install below the prefix of an environment.

    python backend.py WHEEL       # writes tensorcask._native.data from a wheel, as python/wheel does
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from maturin import (  # noqa: F401 - the other hooks of a backend
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from maturin import build_wheel as build_with_maturin

DATA = Path(__file__).parent / "tensorcask._native.data"
# Folders below the prefix in which shells look for completions.
COMPLETIONS = {
    "bash": "share/bash-completion/completions/tensorcask",
    "zsh": "share/zsh/site-functions/_tensorcask",
    "fish": "share/fish/vendor_completions.d/tensorcask.fish",
}


def build_wheel(wheel_directory: str, config_settings: Mapping[str, object] | None = None, metadata_directory: str | None = None) -> str:
    """Builds a wheel. A hook of PEP 517."""
    shutil.rmtree(DATA, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_data(Path(scratch) / build_with_maturin(scratch, config_settings, metadata_directory))
    return build_with_maturin(wheel_directory, config_settings, metadata_directory)


def write_data(wheel: Path) -> None:
    """Writes the completions and the man pages of the command in a wheel."""
    shutil.rmtree(DATA, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        zipfile.ZipFile(wheel).extractall(scratch)
        command = [sys.executable, "-m", "tensorcask"]
        environment = os.environ | {"PYTHONPATH": scratch}
        for shell, path in COMPLETIONS.items():
            file = DATA / "data" / path
            file.parent.mkdir(parents=True)
            made = subprocess.run([*command, "completions", shell], env=environment, cwd=scratch, stdout=subprocess.PIPE, check=True)
            file.write_bytes(made.stdout)
        pages = DATA.resolve() / "data" / "share" / "man" / "man1"
        subprocess.run([*command, "man", pages], env=environment, cwd=scratch, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    write_data(Path(sys.argv[1]).resolve())
