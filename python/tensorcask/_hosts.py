"""The hosts of a run: the ranks on this host, and a name for this start of the job."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from dataclasses import dataclass

from . import _native


@dataclass(frozen=True)
class Hosts:
    """A run on many hosts, for :class:`tensorcask.Engine`.

    ``session`` names this start of the job, the same on all hosts; no other start may use it. ``local_ranks``: the ranks on this
    host, consecutive numbers, the same on all of them. ``patience``: shortest time, in seconds, without a commit after which
    another host looks whether the leading one is gone.

    >>> Hosts("job 7, start 2", range(8, 16))
    Hosts(session='job 7, start 2', local_ranks=range(8, 16), patience=10.0)
    """

    session: str
    local_ranks: range
    patience: float = 10.0

    def __post_init__(self) -> None:
        if self.local_ranks.step != 1:
            raise ValueError(f"local_ranks={self.local_ranks}: the ranks of a host have consecutive numbers")

    @property
    def round(self) -> str:
        """A name for this start in :meth:`tensorcask.Engine.agree_by_store`."""
        return hashlib.sha256(self.session.encode()).hexdigest()[:32]


def find_hosts(rank: int, world: int) -> Hosts | None:
    """Finds session and local ranks in the variables of ``torchrun`` or Slurm; None if all ranks are on one host.

    With ``torch.distributed``, rank 0 broadcasts a random session: launchers do not count all restarts.
    """
    found = _native.hosts_from_variables(rank, dict(os.environ)) if world > 1 else None
    if found is None or found[2] - found[1] >= world:
        return None
    session, first, end = found
    session = _broadcast_name(rank, world) or session
    if not session:
        raise ValueError(
            "this start of the job has no name: torchrun runs without --rdzv-id. Initialise torch.distributed before the engine "
            "starts, pass --rdzv-id with a value of its own for each start, or pass hosts=tensorcask.engine.Hosts(...)"
        )
    return Hosts(session, range(first, end))


def _broadcast_name(rank: int, world: int) -> str | None:
    """A random name from rank 0; None if this process is in no group of all ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (rank, world):
        return None
    names = [secrets.token_hex(16) if rank == 0 else None]
    dist.broadcast_object_list(names, src=0)
    return names[0]
