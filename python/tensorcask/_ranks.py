"""What adapters of trainers share: the random generators of a rank, and the step from which all ranks go on."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

from . import _native
from ._frameworks import framework_of
from ._shard import is_part
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


def random_bytes() -> dict[str, Any]:
    """The result of :func:`random_states` without arrays."""
    found = random_states()
    name, keys, *rest = found["numpy"]
    found["numpy"] = (name, keys.tobytes(), *rest)
    return {key: value.numpy().tobytes() if hasattr(value, "numpy") else value for key, value in found.items()}


def set_random_bytes(found: Mapping[str, Any]) -> None:
    """Sets the random generators to the result of :func:`random_bytes`."""
    import numpy as np
    import torch

    name, keys, *rest = found["numpy"]
    devices = {key: torch.frombuffer(bytearray(value), dtype=torch.uint8) for key, value in found.items() if isinstance(value, bytes)}
    set_random_states({**found, **devices, "numpy": (name, np.frombuffer(keys, np.uint32), *rest)})


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


def save(engine: Engine, state: Mapping[str, Any], own: Mapping[str, Any], step: int, user: Mapping[str, Any] | None = None) -> None:
    """Saves a state that all ranks have, in shards or in copies, and values of this rank. The values may hold no tensors.

    The first rank of each host saves the tensors that all ranks have.
    """
    shared = state if is_leader(engine) else _without_copies(state)
    engine.save({**shared, _own_key(engine): own}, step=step, user=user)


def load(engine: Engine, state: Mapping[str, Any], step: int | str = "latest") -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Fills the tensors of a state that :func:`save` saved. Returns the step, the state with the saved values, and the values of this
    rank, empty if the job had fewer ranks; None if there is no step."""
    found = restore(engine, step, out=state)
    if found is None:
        return None
    values = found.state
    own = values.pop(_own_key(engine), {})
    return found.step, filled(state, values), own


def _own_key(engine: Engine) -> str:
    return f"rank_{engine.rank}"


def _without_copies(value: Any) -> Any:
    """A state without whole tensors. A list keeps its length."""
    if isinstance(value, Mapping):
        return {key: _without_copies(item) for key, item in value.items() if framework_of(item) is None or is_part(item)}
    if isinstance(value, (list, tuple)):
        return type(value)([None if framework_of(item) is not None and not is_part(item) else _without_copies(item) for item in value])
    return value


def filled(target: Any, saved: Any) -> Any:
    """The saved state with the tensors of the target."""
    if framework_of(target) is not None:
        return target
    if isinstance(target, Mapping) and isinstance(saved, Mapping):
        return {**saved, **{key: filled(value, saved.get(key, value)) for key, value in target.items()}}
    if isinstance(target, (list, tuple)) and isinstance(saved, (list, tuple)) and len(target) == len(saved):
        return type(target)([filled(value, item) for value, item in zip(target, saved, strict=True)])
    return saved
