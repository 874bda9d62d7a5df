"""A job of two hosts with two ranks each: FSDP2 trains the small GPT of the examples, and saves each step with the engine."""

import datetime
import json
import os
import threading
import time
from pathlib import Path

import tensorcask
import torch
import torch.distributed as dist
from gpt_training import Training
from tensorcask._hosts import find_hosts, gather_on_cpu

HOSTS, RANKS, WORLD = 2, 2, 4


def main(url, folder, scratch, start, rank, steps, stop_at, gates=None, peers=None, endpoint=None):
    """Trains as one rank. `stop_at`: step after which host 1 waits to be killed. `gates`: levels and names of steps at which all
    ranks wait for the level, and then for the test."""
    local_rank = rank % RANKS
    if endpoint is not None:
        # The server that forks this process may have started before the test set it.
        os.environ["AWS_ENDPOINT"] = endpoint
    # As torchrun sets them.
    os.environ.update(TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT=str(start), RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rendezvous = f"file://{scratch}/rendezvous-{start}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=120))
    train(url, folder, Path(scratch), start, rank, steps, stop_at, gates or {}, peers)
    dist.destroy_process_group()
    # See ranks.py.
    os._exit(0)


def train(url, folder, scratch, start, rank, steps, stop_at, gates, peers):
    training = Training(rank, WORLD)
    engine = tensorcask.Engine(url, folder=folder, rank=rank, world=WORLD, peers=peers)
    host = rank // RANKS
    assert engine.hosts is not None and engine.hosts.local_ranks == range(host * RANKS, (host + 1) * RANKS)
    done = 0
    agreed = engine.agree()
    if agreed is not None:
        found = engine.restore(agreed, out=training.state(0))
        training.load(found.state)
        done = found.state["step"]
        assert done == agreed == found.step
        (scratch / f"resumed-{start}-{rank}").write_text(str(done))
        (scratch / f"source-{start}-{rank}").write_text(found.source)
    losses = {}
    for step in range(done + 1, steps + 1):
        losses[step] = training.step()
        if rank == 0:
            (scratch / f"losses-{start}").write_text(json.dumps(losses))
        engine.save(training.state(step), step=step, user={"loss": losses[step]} if rank == 0 else None)
        if step in gates:
            level, name = gates[step]
            waited = engine.wait(level, 120, step=step)
            assert waited.reached, waited
            (scratch / f"{name}-{rank}").touch()
            while not (scratch / f"{name}-opened").exists():
                time.sleep(0.02)
        if step == stop_at:
            # Two steps before are durable, whatever happens now.
            assert peers is not None or engine.wait("durable", 120, step=step - 2).reached
            (scratch / f"stopped-{rank}").touch()
            if host == 1:
                threading.Event().wait()
    engine.finish()


def exchange(rank, scratch):
    """Tells the other of two ranks a few values."""
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=2)
    # Twice: with NCCL, each exchange makes a group of its own.
    for is_on_cpu in (True, False, False):
        assert gather_on_cpu((rank, is_on_cpu), is_on_cpu) == [(0, is_on_cpu), (1, is_on_cpu)]
    (scratch / f"told-{rank}").touch()
    os._exit(0)


LAUNCHERS = {
    # Nodes of 1, 2 and 1 ranks.
    "slurm": lambda rank: dict(SLURM_JOB_ID=7, SLURM_STEP_ID=0, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE="1(x3)", SLURM_NODEID=(0, 1, 1, 2)[rank]),
    "deepspeed": lambda rank: dict(
        CROSS_RANK=(0, 1, 1, 2)[rank], CROSS_SIZE=3, LOCAL_SIZE=(1, 2, 2, 1)[rank], LOCAL_RANK=rank % (1, 2, 2, 1)[rank],
        SLURM_JOB_ID=7, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE="1(x3)", SLURM_NODEID=(0, 1, 1, 2)[rank],
    ),
    # Two nodes of two ranks.
    "mpi": lambda rank: dict(OMPI_COMM_WORLD_LOCAL_RANK=rank % 2, OMPI_COMM_WORLD_LOCAL_SIZE=2, OMPI_COMM_WORLD_SIZE=4),
}  # fmt: skip


def find_together(launcher):
    """Finds the nodes of four ranks, by the variables of a launcher."""
    rank = dist.get_rank()
    os.environ.update({name: str(value) for name, value in LAUNCHERS[launcher](rank).items()})
    found = find_hosts(rank, 4)
    if launcher == "mpi":
        first = rank // 2 * 2
        expected = (range(first, first + 2), ())
    else:
        expected = ((range(1), range(1, 3), range(1, 3), range(3, 4))[rank], (0, 1, 3))
    assert (found.local_ranks, found.first_ranks) == expected
    sessions = [None] * 4
    dist.all_gather_object(sessions, found.session)
    assert len(set(sessions)) == 1 and len(found.session) == 32
