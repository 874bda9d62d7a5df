"""Maintenance of stores on a Ray cluster: shards of one store, or one task for each of many stores.

    import ray, tensorcask.ray
    ray.init("auto")
    report = tensorcask.ray.verify("s3://bucket/run42", shards=64)
    assert report.ok, report.result["problems"]

Each task runs one ``tensorcask`` command with ``--json`` in a process of its own. The same commands run in a Slurm array or in
Kubernetes Jobs: see ``docs/src/guides/fleets.md``. A task whose worker was lost, or whose storage failed, is run again, up to
``attempts`` times. Every worker needs tensorcask, and the credentials of the stores in its environment.

This needs ``ray``: ``pip install ray``. Without ``ray.init``, a cluster on this machine is started.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FleetReport", "compact", "copy", "export_steps", "gc", "import_each", "run", "verify"]

Progress = Callable[[int, int], None] | None
"""Called after each task with the number of finished tasks and of all tasks."""


@dataclass(frozen=True)
class FleetReport:
    """One report of all tasks."""

    result: dict[str, Any]
    """The reports of all tasks as one: that of the command without ``--shard``, or of each store by its URL."""
    code: int
    """The exit code of the command; the highest of all tasks."""
    tasks: int
    """Number of tasks."""
    retried: int
    """Number of tasks that were run again."""

    @property
    def ok(self) -> bool:
        """Whether all tasks ended with exit code 0."""
        return self.code == 0


def verify(store: str, *, shards: int, depth: str = "full", attempts: int = 3, cpus: float = 1.0, progress: Progress = None) -> FleetReport:
    """Checks a store in ``shards`` parts. The result is that of ``tensorcask verify STORE --json``."""
    commands = [["verify", store, "--depth", depth, "--shard", f"{part}/{shards}"] for part in range(shards)]
    reports, code, retried = _run(commands, attempts, cpus, progress)
    merged = dict(reports[0])
    problems = []
    for report in reports:
        # Every part checks the log and all manifests, and finds their problems.
        problems += [problem for problem in report["problems"] if problem not in problems]
    sums = {key: sum(report[key] for report in reports) for key in ("casks", "cask_bytes", "chunks", "seconds")}
    merged.update(sums, clean=not problems, problems=problems, shard=None)
    return FleetReport(merged, code, len(commands), retried)


def copy(source: str, destination: str, *, shards: int, attempts: int = 3, cpus: float = 1.0, progress: Progress = None) -> FleetReport:
    """Copies a store: the casks in ``shards`` parts, then one task that commits the snapshots. The result is that of ``tensorcask copy
    SOURCE DESTINATION --json``."""
    commands = [["copy", source, destination, "--shard", f"{part}/{shards}"] for part in range(shards)]
    parts, code, retried = _run(commands, attempts, cpus, _shifted(progress, 0, shards + 1))
    if code != 0:
        return FleetReport(parts[0], code, len(commands), retried)
    [committed], code, again = _run([["copy", source, destination]], attempts, cpus, _shifted(progress, shards, shards + 1))
    for part in parts:
        committed["objects"] += part["objects"]
        committed["bytes"] += part["bytes"]
    return FleetReport(committed, code, len(commands) + 1, retried + again)


def export_steps(
    store: str, target: str, *, shards: int, format: str = "safetensors", attempts: int = 3, cpus: float = 1.0, progress: Progress = None
) -> FleetReport:
    """Writes every step of a store in another format, in ``shards`` parts. ``target``: a folder that all workers share."""
    words = ["export", store, target, "--every-step", "--format", format]
    reports, code, retried = _run([[*words, "--shard", f"{part}/{shards}"] for part in range(shards)], attempts, cpus, progress)
    steps = sorted((row for report in reports for row in report["steps"]), key=lambda row: int(row["step"]))
    return FleetReport({**reports[0], "steps": steps, "shard": None}, code, shards, retried)


def import_each(
    sources: Sequence[str], stores: str, *, shards: int, attempts: int = 3, cpus: float = 1.0, progress: Progress = None
) -> FleetReport:
    """Saves each source as a snapshot of a store of its own below ``stores``, in ``shards`` parts."""
    words = ["import", *sources, stores, "--each"]
    reports, code, retried = _run([[*words, "--shard", f"{part}/{shards}"] for part in range(shards)], attempts, cpus, progress)
    found = sorted((row for report in reports for row in report["stores"]), key=lambda row: str(row["store"]))
    return FleetReport({**reports[0], "stores": found, "shard": None}, code, shards, retried)


def compact(stores: Sequence[str], *, options: Sequence[str] = (), attempts: int = 3, cpus: float = 1.0, progress: Progress = None) -> FleetReport:
    """Runs ``tensorcask compact STORE``, with further ``options``, once for each store."""
    return _each("compact", stores, options, attempts, cpus, progress)


def gc(stores: Sequence[str], *, options: Sequence[str] = (), attempts: int = 3, cpus: float = 1.0, progress: Progress = None) -> FleetReport:
    """Runs ``tensorcask gc STORE``, with further ``options`` such as ``--apply``, once for each store."""
    return _each("gc", stores, options, attempts, cpus, progress)


def run(commands: Sequence[Sequence[str]], *, attempts: int = 3, cpus: float = 1.0, progress: Progress = None) -> list[dict[str, Any]]:
    """Runs ``tensorcask`` commands, each as one task; returns their reports in the same order. An error is a report with ``error``."""
    return _run(commands, attempts, cpus, progress)[0]


def _each(verb: str, stores: Sequence[str], options: Sequence[str], attempts: int, cpus: float, progress: Progress) -> FleetReport:
    reports, code, retried = _run([[verb, store, *options] for store in stores], attempts, cpus, progress, errors=True)
    return FleetReport(dict(zip(stores, reports, strict=True)), code, len(stores), retried)


def _run(
    commands: Sequence[Sequence[str]], attempts: int, cpus: float, progress: Progress, errors: bool = False
) -> tuple[list[dict[str, Any]], int, int]:
    """Runs commands until each has ended, or has failed ``attempts`` times. Returns their reports, the highest exit code, and the number
    of commands that were run again."""
    # Not `import ray`: type checkers would take this module for it.
    ray: Any = importlib.import_module("ray")

    if not commands:
        raise ValueError("give one shard or store, or more")
    # Ray's own retries would hide the loss of a worker.
    task = ray.remote(max_retries=0, num_cpus=cpus)(_command)
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    running = {task.remote(list(words), environment): number for number, words in enumerate(commands)}
    tries, reports, code = [1] * len(commands), [dict[str, Any]() for _ in commands], 0
    finished = 0
    while running:
        [ended], _ = ray.wait(list(running), num_returns=1)
        number = running.pop(ended)
        try:
            ended_with, report = ray.get(ended)
            failed = "error" in report and report["error"]["kind"] in _TRANSIENT
            cause = report["error"]["message"] if failed else ""
        except ray.exceptions.RayError as error:
            ended_with, failed, cause = 1, True, str(error)
            report = {"error": {"kind": "storage", "message": f"the worker was lost: {error}"}}
        if failed and tries[number] < attempts:
            tries[number] += 1
            running[task.remote(list(commands[number]), environment)] = number
            continue
        if "error" in report and not errors:
            for other in running:
                ray.cancel(other, force=True)
            words = " ".join(commands[number])
            raise RuntimeError(f"tensorcask {words} failed {tries[number]} times: {cause or report['error']['message']}")
        reports[number], code = report, max(code, ended_with)
        finished += 1
        if progress is not None:
            progress(finished, len(commands))
    return reports, code, sum(count > 1 for count in tries)


def _command(words: list[str], environment: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Runs one command on a worker; returns its exit code and its report."""
    ended = subprocess.run(
        [sys.executable, "-m", "tensorcask", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=_die_with_worker if sys.platform == "linux" else None,
    )
    try:
        report: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        message = ended.stderr.strip()[-1000:] or f"exit code {ended.returncode}"
        report = {"error": {"kind": "storage", "message": message}}
    return ended.returncode, report


def _die_with_worker() -> None:
    """The command ends when its worker is killed: another worker may run it again."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _shifted(progress: Progress, before: int, of: int) -> Progress:
    return None if progress is None else lambda done, _: progress(before + done, of)


_PR_SET_PDEATHSIG = 1
# Errors after which another attempt may succeed.
_TRANSIENT = ("storage", "outcome_unknown")
# Variables that a worker gets from the process that submits.
_PASSED = ("PYTHONPATH",)
