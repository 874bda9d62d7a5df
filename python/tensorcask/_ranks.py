"""What adapters of trainers share: the random generators of a rank, and the step from which all ranks go on."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

from . import _native
from ._store import Store, open_store
from .engine import Engine, Restored

Target = Store | Engine | str | os.PathLike[str]


def open_target(target: Target, options: Mapping[str, Any]) -> Store | Engine:
    """Opens a store; an engine stays as it is. Options of a save belong to the engine, if there is one."""
    if not isinstance(target, Engine):
        return open_store(target, None)
    if options:
        raise TypeError(f"{', '.join(options)}: pass options of saves to tensorcask.Engine")
    return target


def random_states() -> dict[str, Any]:
    """States of the random generators of Python, numpy and torch, in the form that trainers of PyTorch use."""
    import numpy as np
    import torch

    found = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_states(found: Mapping[str, Any]) -> None:
    """Sets the random generators to the result of :func:`random_states`, as it comes from a store."""
    import numpy as np
    import torch

    random.setstate(found["python"])
    np.random.set_state(with_array(found)["numpy"])
    torch.random.set_rng_state(found["cpu"].cpu())
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"].cpu())


def with_array(found: Mapping[str, Any]) -> dict[str, Any]:
    """Random states in which numpy's state is an array of numpy again, also if it was loaded as one of torch."""
    import numpy as np

    name, keys, *rest = found["numpy"]
    return {**found, "numpy": (name, np.asarray(keys), *rest)}


def is_leader(engine: Engine) -> bool:
    """Whether this rank is the first of its host. It saves the values that all ranks have."""
    return engine.rank == (0 if engine.hosts is None else engine.hosts.local_ranks.start)


def restore(engine: Engine, step: int | str = "latest", *, out: Any = None) -> Restored | None:
    """Restores the newest step that all ranks can load, or a given step; None if there is none. Call it on all ranks."""
    if step == "latest" and engine.world > 1:
        common = engine.agree()
        if common is None:
            return None
        step = common
    try:
        return engine.restore(step, out=out)
    except _native.NotFoundError:
        if step == "latest":
            return None
        raise


def barrier(engine: Engine) -> None:
    """Waits for all ranks."""
    if engine.world > 1:
        import torch.distributed as dist

        dist.barrier()
