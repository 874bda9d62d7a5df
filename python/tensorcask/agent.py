"""Runs the agent of :class:`tensorcask.Engine`: ``python -m tensorcask.agent``. A trainer starts it automatically.

The ``tensorcask agent`` command does the same, and shows the status of an agent.
"""

from __future__ import annotations

import argparse
import logging

from . import _native


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)


def main(arguments: list[str] | None = None) -> None:
    """Serves trainers until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m tensorcask.agent", description=__doc__)
    parser.add_argument("--folder", help="the engine's folder in shared memory [$TENSORCASK_ENGINE_DIR, else /dev/shm/tensorcask-UID]")
    parser.add_argument("--idle-exit", type=_seconds, default=0.0, help="exit after this time without a trainer and without work, such as 15m")
    parser.add_argument("--drain", type=_seconds, default=300.0, help="time to finish waiting work after a request to stop")
    parser.add_argument("--nice", type=int, default=5, help="niceness of the agent: 0 to 19")
    parser.add_argument("--detach", action="store_true", help="run in a new session, detached from the process that starts the agent")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    waiting = _native.serve(given.folder, given.idle_exit, given.drain, given.nice, given.detach)
    if waiting:
        logging.getLogger("tensorcask").warning("%d states are still in shared memory, for the next agent", waiting)


if __name__ == "__main__":
    main()
