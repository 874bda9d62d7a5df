"""Small files that other tools read."""

from __future__ import annotations

import os
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that appears complete or not at all. Its content is on disk before its name appears."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())

    into_place(path, write)
