"""A rank of a job: FSDP2 trains the small GPT of the examples, and saves each step with the engine."""

import dataclasses
import datetime
import os
import sys
import threading
from pathlib import Path

import tensorcask
import torch
import torch.distributed as dist
from telling import tell
from tensorcask._hosts import find_hosts

sys.path.append(str(Path(__file__).resolve().parents[2] / "python/tests"))

from gpt_training import Training  # noqa: E402


def main(rank, *, url, scratch, job, world, local, steps, master, variables, pause=None, tls=None, peers=None, engine=None):
    """Trains as one rank. ``local``: ranks on each host. ``pause``: a step, and a level that it must reach before the rank waits
    to be killed. ``tls``: a folder of certificates, perhaps with `{host}`; with it, hosts copy each other's memory. ``peers`` and
    ``engine``: more options of both."""
    # As torchrun sets them.
    os.environ.update(TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT=str(job), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local), GLOO_SOCKET_IFNAME="train")
    os.environ.update(MASTER_ADDR=master.split(":")[0])
    os.environ.update(variables)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"tcp://{master}", rank=rank, world_size=world, timeout=timeout)
    options = {"patience": 1.0, **(engine or {})}
    if tls is not None:
        options["peers"] = tensorcask.Peers(tls=tls.format(host=rank // local), **(peers or {}))
    train(rank, url, Path(scratch), job, world, steps, pause, **options)
    dist.barrier()
    # Threads of gloo may abort a process that ends: pytorch/pytorch#179291.
    os._exit(0)


def train(rank, url, scratch, job, world, steps, pause, patience, **options):
    training = Training(rank, world)
    hosts = dataclasses.replace(find_hosts(rank, world), patience=patience)
    engine = tensorcask.Engine(url, rank=rank, world=world, hosts=hosts, **options)
    done = 0
    agreed = engine.agree()
    if agreed is not None:
        found = engine.restore(agreed, out=training.state(0))
        training.load(found.state)
        done = found.state["step"]
        assert done == agreed == found.step
    tell(scratch, f"resumed-{job}-{rank}", {"step": done, "source": None if agreed is None else found.source})
    losses = {}
    for step in range(done + 1, steps + 1):
        losses[step] = training.step()
        outcome = engine.save(training.state(step), step=step, user={"loss": losses[step]} if rank == 0 else None)
        assert outcome.saved and not outcome.failures, outcome
        if rank == 0:
            tell(scratch, f"losses-{job}", losses)
        tell(scratch, f"saved-{job}-{rank}", step)
        # A step never becomes replicated if hosts chose different parents when the server went away.
        if "peers" in options and step > done + 1 and engine.wait("replicated", 20, step=step - 1).reached:
            tell(scratch, f"replicated-{job}-{rank}", step - 1)
        if pause is not None and step == pause["step"]:
            assert engine.wait(pause["level"], 120).reached
            tell(scratch, f"paused-{job}-{rank}")
            threading.Event().wait()
    engine.finish()
