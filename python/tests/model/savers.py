"""Savers: stores of one process, its children, other processes, the command line, the engine.

The loader is always a new process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import tensorcask

# A state of a step from here on is too large to be stored in a log entry: it has casks and a directory.
LARGE = 100_000


def shapes_of(step: int) -> dict[str, tuple[int, ...]]:
    rows = 40 if step < LARGE else 640
    return {"model.w": (rows, 16), "optimizer.exp_avg.w": (rows, 16), "optimizer.step": ()}


def tensors_of(step: int) -> dict[str, bytearray]:
    """Returns the bytes of each tensor at a step. A few rows change from step to step; of large states, everything at each fourth step."""
    found = {}
    for name, shape in shapes_of(step).items():
        count = math.prod(shape)
        if step < LARGE:
            data = bytearray(struct.pack(f"<{count}f", *(1.0 + at % 7 for at in range(count))))
        else:
            data = bytearray(Random(step // 4).randbytes(4 * count))
        for at in range(step % 5, count, 37):
            struct.pack_into("<f", data, 4 * at, float(step + at % 7))
        struct.pack_into("<f", data, 0, float(step))
        found[name] = data
    return found


def state_of(step: int) -> dict[str, tensorcask.RawTensor]:
    shapes = shapes_of(step)
    return {name: tensorcask.RawTensor("f32", shapes[name], data) for name, data in tensors_of(step).items()}


def content_error(step: int, state: Mapping[str, Any]) -> str:
    """Says what a loaded state has instead of the content of a step; nothing if it is right."""
    wrong = [name for name, data in tensors_of(step).items() if name not in state or bytes(state[name].data) != bytes(data)]
    return f"step {step} holds other bytes: {wrong}" if wrong or len(state) != 3 else ""


def step_in(state: Mapping[str, Any]) -> int:
    """Returns the step of which a state is."""
    return int(struct.unpack("<f", bytes(state["optimizer.step"].data))[0])


def check_step(url: str, step: int) -> None:
    """Loads a step, checks that the step is the newest, and compares the content."""
    store = tensorcask.Store(url)
    newest = store.snapshot()
    if newest.step != step:
        raise AssertionError(f"the newest step is {newest.step}, {step} was saved last")
    if wrong := content_error(step, store.load(step, framework="bytes")):
        raise AssertionError(wrong)


def read_steps(url: str, steps: list[int]) -> dict[int, str]:
    """Loads steps. Returns what went wrong with each, and fails if one holds other numbers."""
    found = {}
    for step in steps:
        try:
            state = tensorcask.Store(url).load(step, framework="bytes")
        except tensorcask.Error as error:
            found[step] = f"{type(error).__name__}: {error}"
            continue
        if wrong := content_error(step, state):
            raise AssertionError(wrong)
    return found


def read_newest(url: str) -> int:
    """Loads the newest step that can be loaded. Returns its number."""
    state = tensorcask.Store(url).load(framework="bytes")
    step = step_in(state)
    if wrong := content_error(step, state):
        raise AssertionError(f"as the newest: {wrong}")
    return step


def run_command(words: list[str]) -> tuple[int, str]:
    """Runs the command line in this process. Returns its exit code and what it printed."""
    from tensorcask.__main__ import main

    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        code = main(words)
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def start_engine(url: str, step: int) -> tuple[str, str]:
    """A job starts with the engine, restores the newest step and saves another one. Returns what it restored, and an error of the save."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        engine = tensorcask.Engine(url, folder=folder, agent_idle_exit=1.0)
        try:
            try:
                restored = engine.restore(framework="bytes")
                found = str(step_in(restored.state))
                if wrong := content_error(int(found), restored.state):
                    raise AssertionError(f"the engine restored: {wrong}")
            except tensorcask.Error as error:
                found = f"{type(error).__name__}: {error}"
            engine.save(state_of(step), step=step)
            return found, _problem(engine)
        finally:
            engine.close()
            _stop_agent(folder)


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


def save_by_command(command: list[str], url: str, step: int) -> None:
    """Saves with the command line. Raises its error as an exception."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state.safetensors")
        header, data = {}, bytearray()
        for name, content in tensors_of(step).items():
            header[name] = {"dtype": "F32", "shape": shapes_of(step)[name], "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        arguments = [*command, "--json", "save", url, "--step", str(step), "--take-over", str(file)]
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

    def try_save(self, step: int) -> str:
        """Saves. Returns a problem of the agent, which then tries again."""
        self._engine.save(state_of(step), step=step)
        return _problem(self._engine)

    def last_outcome(self) -> tuple[bool, str]:
        """Waits for the end of the last save: whether the store has it, or why not."""
        waited = self._engine.wait("durable", timeout=120)
        return waited.reached, str(waited)

    def close(self) -> None:
        self._engine.close()
        _stop_agent(self._folder.name)
        self._folder.cleanup()


def _problem(engine: tensorcask.Engine) -> str:
    """Waits until the store has the last save. Returns the problem if there is one; the agent tries again then."""
    for _ in range(240):
        waited = engine.wait("durable", timeout=0.5)
        if waited.reached or waited.failures or waited.problem:
            break
    return "" if waited.reached else str(waited)


def _stop_agent(folder: str) -> None:
    """Kills an agent that is of no more use: told to stop, it would go on with uploads to a damaged store."""
    lock = Path(folder, "agent.lock")
    if lock.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(lock.read_text()), signal.SIGKILL)


def command_line() -> list[str]:
    """The command line of the package that is being tested; ``TENSORCASK_COMMAND`` names another."""
    given = os.environ.get("TENSORCASK_COMMAND")
    return [given] if given else [sys.executable, "-P", "-m", "tensorcask"]


VERBS: dict[str, Callable[..., Any]] = {
    "check": check_step,
    "save": save,
    "save by command": lambda url, step: save_by_command(command_line(), url, step),
    "steps": read_steps,
    "newest": read_newest,
    "command": run_command,
    "engine": start_engine,
}
