"""The hosts of a run: the ranks on this host, and a name for this start of the job."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _native


@dataclass(frozen=True)
class Hosts:
    """A run on many hosts, for :class:`tensorcask.Engine`.

    ``session`` names this start of the job, the same on all hosts; no other start may use it. ``local_ranks``: the ranks on this
    host, consecutive numbers, the same on all of them. ``patience``: shortest time, in seconds, without a commit after which
    another host looks whether the leading one is gone. ``first_ranks``: first rank of each host, if the hosts have different
    numbers of ranks; empty if each has as many as this one.

    >>> Hosts("job 7, start 2", range(8, 16))
    Hosts(session='job 7, start 2', local_ranks=range(8, 16), patience=10.0, first_ranks=())
    """

    session: str
    local_ranks: range
    patience: float = 10.0
    first_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.local_ranks.step != 1:
            raise ValueError(f"local_ranks={self.local_ranks}: the ranks of a host have consecutive numbers")

    @property
    def round(self) -> str:
        """A name for this start in :meth:`tensorcask.Engine.agree_by_store`."""
        return hashlib.sha256(self.session.encode()).hexdigest()[:32]

    @property
    def number(self) -> int:
        """Number of this host, from 0."""
        first = self.local_ranks.start
        return self.first_ranks.index(first) if self.first_ranks else first // len(self.local_ranks)

    def count(self, world: int) -> int:
        """Number of hosts of a job with this many ranks."""
        return len(self.first_ranks) or -(-world // len(self.local_ranks))


def find_hosts(rank: int, world: int) -> Hosts | None:
    """Finds session and local ranks in the variables of ``torchrun``, Slurm, DeepSpeed's launcher or Open MPI; None if all ranks are on
    one host.

    With ``torch.distributed``, the ranks tell each other a random session from rank 0, because launchers do not count all
    restarts, and the layout of the hosts.
    """
    if world <= 1:
        return None
    variables = dict(os.environ)
    launched = None if "TORCHELASTIC_RUN_ID" in variables else _launched(rank, world, variables)
    if launched is not None:
        return _hosts_of(launched, rank, world)
    found = _native.hosts_from_variables(rank, variables)
    if found is None or found[2] - found[1] >= world:
        return None
    session, first, end, first_ranks = found
    told = gather((secrets.token_hex(16), first), rank, world)
    if told is not None:
        session, first_ranks = told[0][0], sorted({first for _, first in told})
    return _made(session, range(first, end), first_ranks, world)


def _made(session: str, local_ranks: range, first_ranks: list[int], world: int) -> Hosts:
    if not session:
        raise ValueError(
            "this start of the job has no name: its launcher gives it none, or torchrun runs without --rdzv-id. Initialise "
            "torch.distributed before the engine starts, pass --rdzv-id with a value of its own for each start, or pass "
            "hosts=tensorcask.engine.Hosts(...)"
        )
    sizes = {after - before for before, after in zip(first_ranks, [*first_ranks[1:], world], strict=bool(first_ranks))}
    return Hosts(session, local_ranks, first_ranks=tuple(first_ranks) if len(sizes) > 1 else ())


@dataclass(frozen=True)
class _Launched:
    """What a launcher tells a rank that is not a task of the launcher's own."""

    node: int
    nodes: int
    # Empty if the launcher does not name this start of the job.
    session: str


def _launched(rank: int, world: int, variables: Mapping[str, str]) -> _Launched | None:
    """Finds the node of a rank, if its launcher counts nodes instead of ranks."""

    def number(name: str) -> int | None:
        text = variables.get(name, "")
        return int(text) if text.isdecimal() else None

    node, nodes = number("CROSS_RANK"), number("CROSS_SIZE")
    if node is not None and nodes is not None and "LOCAL_SIZE" in variables:
        # DeepSpeed's launcher, also within a task of Slurm.
        return _Launched(node, nodes, "")
    local, count = number("OMPI_COMM_WORLD_LOCAL_RANK"), number("OMPI_COMM_WORLD_LOCAL_SIZE")
    if local is not None and count and number("OMPI_COMM_WORLD_SIZE") == world:
        return _Launched((rank - local) // count, -(-world // count), "")
    tasks = [
        int(count)
        for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(min(int(repeated or 1), _MOST_NODES))
    ]
    node, job = number("SLURM_NODEID"), variables.get("SLURM_JOB_ID")
    if node is None or job is None or not tasks or sum(tasks) == world:
        return None
    # The tasks start the ranks, by `torch.multiprocessing.spawn` for example.
    session = f"slurm {job} {variables.get('SLURM_STEP_ID', '')} {variables.get('SLURM_RESTART_COUNT', '0')}"
    return _Launched(node, len(tasks), session)


def _hosts_of(launched: _Launched, rank: int, world: int) -> Hosts | None:
    if launched.nodes <= 1:
        return None
    told = gather((secrets.token_hex(16), launched.node), rank, world)
    session = launched.session if told is None else told[0][0]
    if told is not None:
        nodes = [node for _, node in told]
    else:
        # Each node starts as many ranks.
        nodes = [other * launched.nodes // world for other in range(world)] if world % launched.nodes == 0 else []
    first_ranks = [other for other in range(len(nodes)) if other == 0 or nodes[other] != nodes[other - 1]]
    if len(first_ranks) != len(set(nodes)) or not nodes or nodes[rank] != launched.node:
        raise _native.UnsupportedError(
            f"rank {rank} of {world} is on node {launched.node} of {launched.nodes}, and the engine cannot tell which ranks that node has. "
            "Give each node consecutive ranks, and initialise torch.distributed before the engine starts; or pass "
            "hosts=tensorcask.engine.Hosts(session, local_ranks)"
        )
    at = nodes.index(launched.node)
    return _made(session, range(at, at + nodes.count(launched.node)), first_ranks, world)


def gather(value: Any, rank: int, world: int) -> list[Any] | None:
    """The values of all ranks, in rank order; None if this process is in no group of all ranks. All ranks call it.

    Uses the CPU: with NCCL, a process may not have chosen its device yet.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (rank, world):
        return None
    return gather_on_cpu(value, dist.get_backend() == "gloo")


def gather_on_cpu(value: Any, default_group_is_on_cpu: bool) -> list[Any]:
    """Gathers through the default group, or through a group of its own, which takes a moment to make."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    if default_group_is_on_cpu:
        dist.all_gather_object(values, value)
        return values
    group: Any = dist.new_group(backend="gloo")
    try:
        dist.all_gather_object(values, value, group=group)
    finally:
        dist.destroy_process_group(group)
    return values


_MOST_NODES = 100_000
