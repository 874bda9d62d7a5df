"""A rank of a job without training: its state follows from step and rank, so a wrong or mixed step is found at once."""

import json
import os
import time
from pathlib import Path

import numpy as np
import tensorcask
from telling import tell

SIZE = 200_000


def part(rank, step):
    """Floats of which a step changes about a tenth."""
    values = np.random.Generator(np.random.Philox(key=[rank, step // 10])).normal(size=SIZE).astype(np.float32)
    changed = np.random.Generator(np.random.Philox(key=[rank, 1 << 32 | step]))
    values[changed.integers(SIZE, size=SIZE // 10)] *= np.float32(1.0 + step * 2**-10)
    return values


def state(rank, step):
    return {f"part-{rank}": part(rank, step), "step": step}


def is_at_least(path, step):
    return path.exists() and json.loads(path.read_text()) >= step


def main(rank, *, url, scratch, job, world, local, steps, variables, tls, master=None):
    os.environ.update(variables)
    scratch, first = Path(scratch), rank // local * local
    hosts = tensorcask.Hosts(f"start {job}", range(first, first + local), patience=1.0)
    addresses = json.loads((scratch / "addresses").read_text())
    engine = tensorcask.Engine(url, rank=rank, world=world, hosts=hosts, peers=tensorcask.Peers(addresses, tls=tls))
    done = engine.agree_by_store() or 0
    if done:
        found = engine.restore(done)
        assert found.state["step"] == done == found.step
        assert np.array_equal(np.asarray(found.state[f"part-{rank}"]), part(rank, done)), f"rank {rank}: step {done} has other numbers"
    tell(scratch, f"resumed-{job}-{rank}", {"step": done, "source": found.source if done else None})
    for step in range(done + 1, steps + 1):
        # As a collective does: no rank begins with a step before all have ended the one before.
        while step > done + 1 and not all(is_at_least(scratch / f"saved-{job}-{other}", step - 1) for other in range(world)):
            time.sleep(0.01)
        outcome = engine.save(state(rank, step), step=step)
        assert outcome.saved and not outcome.failures, outcome
        tell(scratch, f"saved-{job}-{rank}", step)
        # A step never becomes replicated if hosts chose different parents when the server went away.
        if step > done + 1 and engine.wait("replicated", 20, step=step - 1).reached:
            tell(scratch, f"replicated-{job}-{rank}", step - 1)
    engine.finish()
