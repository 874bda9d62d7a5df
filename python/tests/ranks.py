"""Real ranks for tests: processes on gloo."""

import datetime
import itertools
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks are forked from a process that has imported these: importing PyTorch takes longer than most tests.
multiprocessing.set_forkserver_preload(
    ["numpy", "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor", "tensorcask.torch", "pytest"]
    + ["megatron.core.dist_checkpointing"]
)
_calls = itertools.count()


def _main(rank, world, rendezvous, work, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=timeout, init_method=rendezvous, rank=rank, world_size=world)
    try:
        work(*arguments)
    finally:
        dist.destroy_process_group()
    # Threads of gloo may still hold Python objects, and abort the process while the interpreter ends:
    # pytorch/pytorch#179291. The output of the rank is complete by then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def on_ranks(world, folder, work, *arguments):
    """Runs a function in `world` processes. Its arguments arrive as text."""
    rendezvous = f"file://{folder}/rendezvous-{next(_calls)}"
    mp.start_processes(_main, (world, rendezvous, work, tuple(map(str, arguments))), nprocs=world, start_method="forkserver")
