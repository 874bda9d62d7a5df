"""Small files that other tools read."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path


def into_place(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file that appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def folder_into_place(path: Path, write: Callable[[Path], object], last: str) -> None:
    """Writes a folder that appears complete or not at all. ``path`` may be an empty folder, such as the root of a disk: then the file
    ``last`` marks the folder as complete."""
    is_there = path.is_dir()
    temporary = (path / f".{uuid.uuid4().hex}") if is_there else path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        for file in temporary.iterdir():
            _sync(file)
        if not is_there:
            os.rename(temporary, path)
            return
        moved: list[Path] = []
        try:
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == last):
                os.rename(file, path / file.name)
                moved.append(path / file.name)
        except BaseException:
            for file in moved:
                file.unlink(missing_ok=True)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(file: Path) -> None:
    """Waits until a file is on disk."""
    with open(file, "rb+") as opened:
        os.fsync(opened.fileno())


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that appears complete or not at all. Its content is on disk before its name appears."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())

    into_place(path, write)
