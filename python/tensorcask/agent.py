"""The agent of :class:`tensorcask.Engine`, as ``python -m tensorcask.agent``; a trainer starts it by itself.

The ``tensorcask agent`` command does the same, and shows how an agent is doing.
"""

from __future__ import annotations

import argparse
import logging

from . import _native


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)


def main(arguments: list[str] | None = None) -> None:
    """Serves trainers until it is told to end."""
    parser = argparse.ArgumentParser(prog="python -m tensorcask.agent", description=__doc__)
    parser.add_argument("--folder", help="the engine's folder in shared memory [$TENSORCASK_ENGINE_DIR, else /dev/shm/tensorcask-UID]")
    parser.add_argument("--idle-exit", type=_seconds, default=0.0, help="end after so long without a trainer and without work, such as 15m")
    parser.add_argument("--drain", type=_seconds, default=300.0, help="when told to end, go on for so long with what waits")
    parser.add_argument("--nice", type=int, default=5, help="by how much to give way to the trainer: 0 to 19")
    parser.add_argument("--detach", action="store_true", help="leave the session of the process that starts it")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    waiting = _native.serve(given.folder, given.idle_exit, given.drain, given.nice, given.detach)
    if waiting:
        logging.getLogger("tensorcask").warning("%d states still wait in shared memory for the next agent", waiting)


if __name__ == "__main__":
    main()
