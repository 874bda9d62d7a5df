"""Training steps in the names of checkpoints.

The last part of a path decides, and all of it must be a step:

| name | step |
|---|---|
| ``100``, ``step-100``, ``step_100``, ``step=100``, ``step100`` | 100 |
| ``global_step100``, ``iter_0000100``, ``iteration-100``, ``checkpoint-100``, ``ckpt_100`` | 100 |
| ``/ckpts/step-100``, ``s3://bucket/run-7/step-100/`` | 100 |
| ``step=100-loss=0.25``, ``epoch=3-step=400.ckpt``, ``model-100``, ``step-100.pt``, ``final`` | none |

A guess would be dangerous: two checkpoints that are taken for the same step replace each other.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath

_STEP = re.compile(r"(?:(?:global_step|step|iteration|iter|checkpoint|ckpt)[-_=]?)?([0-9]{1,18})")


def step_in(name: str | os.PathLike[str]) -> int | None:
    """The step that a name or path ends with, or None."""
    found = _STEP.fullmatch(PurePath(os.fsdecode(name)).name)
    return None if found is None else int(found[1])


def step_of(name: str | os.PathLike[str], advice: str) -> int:
    """The step that a name or path ends with, or an error with ``advice``: what to do instead."""
    step = step_in(name)
    if step is None:
        last = PurePath(os.fsdecode(name)).name
        whole = os.fsdecode(name)
        raise ValueError(f"{whole!r} names no training step: {last!r} does not have the form step-100, global_step100 or 100. {advice}")
    return step
