"""Behaviours of torch.distributed.checkpoint: each is one function that runs with PyTorch's own storage and with a store.

`dcp_parity.py` runs all rows, compares the outcomes, and writes the table of the book.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Row:
    section: str
    action: str
    world: int
    # Why the outcomes differ; None if they are equal.
    differs: str | None
    work: Callable[[Side], object]

    @property
    def name(self):
        return self.work.__name__


ROWS: list[Row] = []


def row(section, *, world=1, differs=None):
    """Adds a function to the rows. Its documentation is the action; its result is the outcome."""

    def add(work):
        ROWS.append(Row(section, " ".join(work.__doc__.split()), world, differs, work))
        return work

    return add


class Side:
    """PyTorch's own storage, or a store, in a folder."""

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, state, step=1, *, planner=None, no_dist=False, **options):
        """Saves and returns the metadata."""
        return dcp.save(state, checkpoint_id=self.id(step), storage_writer=self.writer(step, **options), planner=planner, no_dist=no_dist)

    def start(self, state, step=1, *, planner=None, options=None, **arguments):
        """Begins an asynchronous save."""
        writer = self.writer(step, **(options or {}))
        return dcp.async_save(state, checkpoint_id=self.id(step), storage_writer=writer, planner=planner, **arguments)

    def load(self, state, step=1, *, planner=None, no_dist=False):
        """Loads into a state and returns it."""
        dcp.load(state, checkpoint_id=self.id(step), storage_reader=self.reader(step), planner=planner, no_dist=no_dist)
        return state

    def load_keys(self, keys=None, step=1):
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        return _load_state_dict_from_keys(keys, checkpoint_id=self.id(step), storage_reader=self.reader(step))

    @property
    def is_ours(self):
        return self.name == "tensorcask"


class Theirs(Side):
    name = "PyTorch"

    def id(self, step):
        return str(self.folder / f"step-{step}")

    def writer(self, step=1, **options):
        return dcp.FileSystemWriter(self.id(step), **options)

    def reader(self, step=1):
        return dcp.FileSystemReader(self.id(step))

    def data_files(self):
        return sorted(self.folder.rglob("*.distcp"))


class Ours(Side):
    name = "tensorcask"

    def id(self, step):
        return f"step-{step}"

    @property
    def store(self):
        return tensorcask.Store(self.folder)

    def writer(self, step=1, **options):
        return self.store.writer(**options)

    def reader(self, step=1):
        return self.store.reader()

    def data_files(self):
        return sorted((self.folder / "casks").rglob("*.cask"))


SIDES = (Theirs, Ours)


def run(chosen: Row, side: Side) -> str:
    """Returns the outcome as text."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return text_of(chosen.work(side))


def text_of(value):
    return value if isinstance(value, str) else repr(plain(value))


def plain(value):
    """The value with tensors as dtype, shape and numbers."""
    if isinstance(value, DTensor):
        return ("DTensor", plain(value.full_tensor()))
    if isinstance(value, torch.Tensor):
        dense = value.detach()
        numbers = dense.contiguous().view(torch.uint8) if dense.dtype.itemsize == 1 else dense
        return (str(dense.dtype), list(dense.shape), numbers.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, io.BytesIO):
        return ("BytesIO", value.getvalue())
    return value


def error_of(action, *, full=False):
    """The ranks on which an action failed, with the first error if `full`."""
    try:
        action()
    except CheckpointException as failed:
        ranks = sorted(failed.failures)
        error = failed.failures[ranks[0]][0]
        return f"error of ranks {ranks}: {error}" if full else f"error of ranks {ranks}"
    except Exception as error:
        return f"error: {error}" if full else "error"
    return "no error"


def kind_of_error(action):
    """Name of the first error's type, or "loaded" and the like if there is none."""
    try:
        return action()
    except CheckpointException as failed:
        return type(next(iter(failed.failures.values()))[0]).__name__
    except Exception as error:
        return type(error).__name__


def collect(value):
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier():
    if dist.is_initialized():
        dist.barrier()


partial = functools.partial
