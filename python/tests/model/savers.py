"""Savers: stores of one process, its children, other processes, the command line, the engine.

The loader is always a new process.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorcask

SHAPES = {"model.w": (40, 16), "optimizer.exp_avg.w": (40, 16), "optimizer.step": ()}


def tensors_of(step: int) -> dict[str, bytearray]:
    """Returns the bytes of each tensor at a step. A few rows change from step to step."""
    found = {}
    for name, shape in SHAPES.items():
        count = 1
        for extent in shape:
            count *= extent
        values = [1.0 + at % 7 for at in range(count)]
        for at in range(step % 5, count, 37):
            values[at] += step
        values[0] = float(step)
        found[name] = bytearray(struct.pack(f"<{count}f", *values))
    return found


def state_of(step: int) -> dict[str, tensorcask.RawTensor]:
    return {name: tensorcask.RawTensor("f32", SHAPES[name], data) for name, data in tensors_of(step).items()}


def check_step(url: str, step: int) -> None:
    """Loads a step, checks that the step is the newest, and compares the content."""
    store = tensorcask.Store(url)
    newest = store.snapshot()
    if newest.step != step:
        raise AssertionError(f"the newest step is {newest.step}, {step} was saved last")
    loaded = store.load(step, framework="bytes")
    expected = tensors_of(step)
    if {name: bytes(tensor.data) for name, tensor in loaded.items()} != {name: bytes(data) for name, data in expected.items()}:
        raise AssertionError(f"step {step} holds other bytes")


def in_child(act: Callable[[], Any]) -> Any:
    """Runs a function in a forked child. Returns its value or its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            outcome: Any = (True, act())
        except BaseException as error:
            outcome = (False, error)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0 or not data:
        raise AssertionError(f"a child ended with status {status}")
    worked, value = pickle.loads(data)
    if not worked:
        raise value
    return value


class Fresh:
    """Forks processes that have never seen a store: each loads or saves once, like a new process of a user."""

    def __init__(self) -> None:
        here, there = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(here[1])
            os.close(there[0])
            self._serve(os.fdopen(here[0], "rb"), os.fdopen(there[1], "wb"))
            os._exit(0)
        os.close(here[0])
        os.close(there[1])
        self._ask, self._answers = os.fdopen(here[1], "wb"), os.fdopen(there[0], "rb")

    def _serve(self, requests: Any, answers: Any) -> None:
        while True:
            try:
                verb, arguments = pickle.load(requests)
            except EOFError:
                return
            try:
                outcome: Any = (True, in_child(lambda verb=verb, arguments=arguments: VERBS[verb](*arguments)))
            except BaseException as error:
                outcome = (False, error)
            pickle.dump(outcome, answers)
            answers.flush()

    def run(self, verb: str, *arguments: Any) -> Any:
        pickle.dump((verb, arguments), self._ask)
        self._ask.flush()
        worked, value = pickle.load(self._answers)
        if not worked:
            raise value
        return value

    def close(self) -> None:
        self._ask.close()
        os.waitpid(self._pid, 0)


def save(url: str, step: int) -> str:
    return tensorcask.Store(url).save(state_of(step), step=step).kind


VERBS: dict[str, Callable[..., Any]] = {"check": check_step, "save": save}


def save_by_command(command: list[str], url: str, step: int) -> None:
    """Saves with the command line. Raises its error as an exception."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state.safetensors")
        header, data = {}, bytearray()
        for name, content in tensors_of(step).items():
            header[name] = {"dtype": "F32", "shape": SHAPES[name], "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        arguments = [*command, "--json", "save", url, "--step", str(step), str(file)]
        run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        error = json.loads(run.stdout)["error"]
        raise KINDS[error["kind"]](error["message"])


KINDS: dict[str, type[Exception]] = {
    "corrupt": tensorcask.CorruptionError,
    "conflict": tensorcask.ConflictError,
    "fenced": tensorcask.FencedError,
    "not_found": tensorcask.NotFoundError,
    "outcome_unknown": tensorcask.OutcomeUnknownError,
    "invalid_argument": tensorcask.InvalidArgumentError,
    "storage": tensorcask.StorageError,
    "unsafe_store": tensorcask.UnsafeStoreError,
    "unsupported": tensorcask.UnsupportedError,
    "limit_exceeded": tensorcask.LimitExceededError,
}


class EngineSaver:
    """An engine with an agent of its own; a save counts once the store has it."""

    def __init__(self, url: str) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._engine = tensorcask.Engine(url, folder=self._folder.name, policy="consecutive", agent_idle_exit=1.0)

    def save(self, step: int) -> None:
        self._engine.save(state_of(step), step=step)
        waited = self._engine.wait("durable", timeout=120)
        if not waited.reached:
            raise tensorcask.StorageError(f"step {step} did not reach the store: {waited}")

    def close(self) -> None:
        from tensorcask.engine import stop_agent

        self._engine.close()
        stop_agent(self._folder.name)
        self._folder.cleanup()


def command_line() -> list[str]:
    """The command line of the package that is being tested; ``TENSORCASK_COMMAND`` names another."""
    given = os.environ.get("TENSORCASK_COMMAND")
    return [given] if given else [sys.executable, "-P", "-m", "tensorcask"]
