"""Preemption: signals and notices that announce the end of this process, and the drain before it ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Protocol

from . import _native

_log = logging.getLogger("tensorcask")


class _Engine(Protocol):
    """The part of the engine that a drain needs."""

    def wait(self, until: str = ..., timeout: float | None = ...) -> Any: ...

    def set_ending(self, is_ending: bool) -> None: ...


@dataclass(frozen=True)
class Drained:
    """What a drain has reached."""

    level: str
    """Level of the last save: ``durable``, ``replicated``, ``encoded`` or ``copied``."""
    problem: str | None
    """Reason why it is not durable, if one is known."""


class Preempted(SystemExit):
    """The job was told to end, and its last save is drained. If nobody catches it, the process ends with exit code 0."""

    def __init__(self, drained: Drained, reason: str) -> None:
        super().__init__(0)
        self.drained = drained
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: the last save is {self.drained.level}"


class _Arrivals:
    """Tells when a signal arrives. Python runs its handlers later, while the main thread is in a long call of a library."""

    def __init__(self, numbers: Sequence[int], on_arrival: Callable[[int], None]) -> None:
        self._numbers = frozenset(int(number) for number in numbers)
        self._on_arrival = on_arrival
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._is_set = previous == -1
        if not self._is_set:
            # An event loop has it. The handlers alone tell.
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
            self._reader.close()
            return
        # Signals of a forked process are its own.
        os.register_at_fork(after_in_child=self._leave)
        threading.Thread(target=self._read, name="tensorcask-signals", daemon=True).start()

    def _read(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(4096):
                for number in numbers:
                    if number in self._numbers:
                        self._on_arrival(number)

    def _leave(self) -> None:
        if self._is_set:
            self._is_set = False
            signal.set_wakeup_fd(-1)

    def close(self) -> None:
        if self._is_set and threading.current_thread() is threading.main_thread():
            self._leave()
        # The thread reads the end.
        self._writer.close()


class Preemption:
    """Watches for the announced end of this process: see :meth:`tensorcask.Engine.on_preemption`.

    A signal sets a flag and nothing else. The training loop looks at it between steps, so no save is cut off. Once half of
    the time is over, a save that waits for a slot is skipped: the wait would use up the time of the drain.
    """

    def __init__(
        self,
        engine: _Engine,
        signals: Sequence[int],
        grace: float,
        callback: Callable[[], bool] | None,
        poll: float,
    ) -> None:
        if grace < 0 or poll <= 0:
            raise ValueError("grace and poll are seconds: 0 or more, and more than 0")
        if signals and threading.current_thread() is not threading.main_thread():
            raise ValueError("signal handlers can be set in the main thread only: call on_preemption there, or pass signals=()")
        self._engine = engine
        self._grace = grace
        self._notice: tuple[float, str] | None = None
        self._closed = threading.Event()
        self._previous: dict[int, Any] = {}
        self._arrivals = _Arrivals(signals, self._on_arrival) if signals else None
        for number in signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        if callback is not None:
            threading.Thread(target=self._watch, args=(callback, poll), name="tensorcask-preemption", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def _on_arrival(self, number: int) -> None:
        self.request(signal.Signals(number).name)

    def _watch(self, callback: Callable[[], bool], poll: float) -> None:
        """Asks the user's callback until it says that the end is announced."""
        while not self._closed.is_set() and self._notice is None:
            try:
                if callback():
                    self.request("callback")
                    return
            except Exception:
                _log.warning("the callback of on_preemption failed; it is asked again", exc_info=True)
            self._closed.wait(poll)

    def request(self, reason: str = "request") -> None:
        """Announces the end of the process, for example after a notice of the cloud. Threads and signal handlers may call it."""
        if self._notice is None:
            self._notice = (time.monotonic(), reason)
            # The newest state is worth a wait, but the drain needs time, too.
            ending = threading.Timer(self._grace / 2, self._engine.set_ending, (True,))
            ending.daemon = True
            ending.start()

    @property
    def requested(self) -> bool:
        """Whether the end of this process is announced."""
        return self._notice is not None

    @property
    def reason(self) -> str | None:
        """Cause of the announced end, such as ``SIGTERM``; None before."""
        return None if self._notice is None else self._notice[1]

    def agree(self, group: Any = None) -> bool:
        """Whether the end of any rank's process is announced. All ranks of ``group`` call it at the same step, and get the same
        answer: one small ``all_reduce``. Without an initialised ``torch.distributed``, same as :attr:`requested`.
        """
        dist = getattr(sys.modules.get("torch"), "distributed", None)
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return self.requested
        import torch

        device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        flag = torch.tensor([int(self.requested)], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        announced = bool(flag.item())
        if announced:
            self.request("another rank")
        # Not `requested`: a signal may have come since, and the other ranks would not see it at this step.
        return announced

    def time_left(self) -> float:
        """Seconds that are left; all of ``grace`` before the end is announced."""
        passed = 0.0 if self._notice is None else time.monotonic() - self._notice[0]
        return max(0.0, self._grace - passed)

    def drain(self) -> Drained:
        """Waits until the last save is durable, at most for the time that is left; returns its level.

        The agent goes on after this process, as long as nobody kills it.
        """
        waited = self._engine.wait("durable", self.time_left())
        if waited.reached:
            return Drained("durable", None)
        level = next((level for level in ("replicated", "encoded") if self._has_reached(level)), "copied")
        failure = waited.failures[-1][1] if waited.failures else None
        return Drained(level, waited.problem or failure)

    def _has_reached(self, level: str) -> bool:
        try:
            return bool(self._engine.wait(level, 0.0).reached)
        except (ValueError, _native.InvalidArgumentError):
            # No save of this engine reaches the level.
            return False

    def check(self, group: Any = None) -> None:
        """Drains and raises :class:`Preempted` if the end of any rank's process is announced: see :meth:`agree`."""
        if self.agree(group):
            raise Preempted(self.drain(), self.reason or "request")

    def close(self) -> None:
        """Sets the previous signal handlers again, and asks the callback no more."""
        self._closed.set()
        self._engine.set_ending(False)
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        for number, previous in self._previous.items():
            # None: the handler was not set from Python.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
