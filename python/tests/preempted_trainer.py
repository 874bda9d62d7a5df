"""Trains until it is preempted: a rank of a job, or a process alone. Writes what it has drained to a file."""

import json
import os
import sys
from pathlib import Path

import tensorcask

folder = Path(sys.argv[1])
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def announced() -> bool:
    return (folder / "notice").exists()


engine = tensorcask.Engine(
    str(folder / "store"), rank=rank, world=world, folder=folder / "engine", hosts=None, agent_idle_exit=5.0, fsync=False
)
step = engine.agree() if world > 1 else None
first = 0 if step is None else step + 1
weights = bytearray(100_000)
try:
    with engine.on_preemption(grace=120.0, callback=announced, poll=0.05) as preemption:
        for step in range(first, 1_000_000):
            weights[step % len(weights)] = 1 + step % 255
            engine.save({f"w{rank}": tensorcask.RawTensor("u8", (len(weights),), weights)}, step=step)
            if world == 1 or step > 0:
                (folder / f"step-{rank}").write_text(str(step))
            preemption.check()
except tensorcask.Preempted as preempted:
    report = {"step": step, "level": preempted.drained.level, "problem": preempted.drained.problem, "reason": preempted.reason}
    (folder / f"ended-{rank}.json").write_text(json.dumps(report))
    raise
