"""Conversions of many checkpoints: each step of a store, or many sources, in shards."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _native
from ._store import Store, open_store
from .interchange import export, import_


def parse_part(text: str) -> tuple[int, int]:
    """Parses ``i/n`` with i from 0 to n - 1."""
    part, _, of = text.partition("/")
    if not (part.isdecimal() and of.isdecimal() and int(part) < int(of)):
        raise ValueError("write i/n with i from 0 to n-1, such as 0/4")
    return int(part), int(of)


def export_steps(
    store: str, target: str, *, format: str | None, max_shard_bytes: int | None, shard: tuple[int, int] | None
) -> list[dict[str, Any]]:
    """Writes each step of a store into the folder ``target``, as ``step-N`` with the suffix of the format. A step that is there stays, so an
    interrupted export is resumed by another. Returns step and path of each, and whether it was there."""
    part, of = shard or (0, 1)
    kind = format or "safetensors"
    suffix = "" if max_shard_bytes is not None else _SUFFIXES.get(kind, "")
    opened = open_store(store, None)
    Path(target).mkdir(parents=True, exist_ok=True)
    found = []
    for step in opened.steps[part::of]:
        path = Path(target) / f"step-{step}{suffix}"
        present = path.exists() and (path.is_file() or any((path / name).exists() for name in _LAST_FILES))
        if not present:
            export(opened, path, step=step, format=kind, max_shard_bytes=max_shard_bytes)
        found.append({"step": step, "target": str(path), "present": present})
    return found


def import_each(
    sources: Sequence[str], stores: str, *, step: int | None, shard: tuple[int, int] | None, **options: Any
) -> list[dict[str, Any]]:
    """Saves each source as a snapshot of a store of its own, which has the name of the source without its suffix, below ``stores``. The
    step is the last number in that name, unless ``step`` gives one for all. A step that the store has already is left alone."""
    part, of = shard or (0, 1)
    named: dict[str, str] = {}
    for source in sources:
        name = Path(source).name.split(".")[0]
        if other := named.get(name):
            raise ValueError(f"{other} and {source} would be the same store, {name}")
        named[name] = source
    found = []
    for name, source in list(named.items())[part::of]:
        numbers = re.findall(r"\d+", name)
        if step is None and not numbers:
            raise ValueError(f"{source}: pass --step, because its name has no number")
        number = int(numbers[-1]) if step is None else step
        store = Store(f"{os.fspath(stores).rstrip('/')}/{name}")
        present = number in _steps_of(store)
        left_out: list[str] = []
        if not present:
            import_(source, store, step=number, left_out=left_out, **options)
        found.append({"source": source, "store": store.url, "step": number, "present": present, "left_out": left_out})
    return found


def _steps_of(store: Store) -> list[int]:
    try:
        return store.steps
    except _native.NotFoundError:
        return []


_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt"}
# Files that an export into a folder writes last.
_LAST_FILES = ("model.safetensors.index.json", ".metadata")
