"""Copies tensors from a device into shared memory, by CUDA on a separate stream."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from . import _native


def is_on_device(tensor: Any) -> bool:
    """Whether the bytes of a torch tensor are outside of host memory."""
    return bool(tensor.device.type != "cpu")


class Arena:
    """Shared memory of one engine, registered with CUDA: copies to it are direct and asynchronous.

    Registering takes about 0.3 s per GB. A thread registers the memory after the first copy, so the first copy is slower. A
    later copy waits for the thread.
    """

    def __init__(self) -> None:
        self._known: _native.ArenaMapping | None = None
        self._registering: threading.Thread | None = None
        self._refusal: str | None = None
        self._streams: dict[Any, Any] = {}

    def forget(self) -> bool:
        """Unregisters the memory before it is freed. Returns whether it was registered. No copy may be running."""
        self._join()
        known, self._known = self._known, None
        if known is None:
            return False
        cudart = sys.modules["torch"].cuda.cudart()
        if code := int(cudart.cudaHostUnregister(known.address)):
            warnings.warn(f"cudaHostUnregister: error {code}", RuntimeWarning, stacklevel=2)
        return True

    def is_registered(self) -> bool:
        """Whether memory is registered, once a thread that does it has ended."""
        self._join()
        return self._known is not None

    def _knows(self, mapping: _native.ArenaMapping) -> bool:
        self._join()
        return self._known is not None and (self._known.address, self._known.bytes) == (mapping.address, mapping.bytes)

    def _join(self) -> None:
        """Waits for a thread that registers memory."""
        if self._registering is not None:
            self._registering.join()
            self._registering = None
        if self._refusal is not None:
            # Copies to unregistered memory are correct, but slower.
            warnings.warn(self._refusal, RuntimeWarning, stacklevel=3)
            self._refusal = None

    def _register(self, mapping: _native.ArenaMapping, device: Any) -> None:
        """Begins to register memory. No copy may be running."""

        def register() -> None:
            torch = sys.modules["torch"]
            # A thread begins on the first device, and would take memory there.
            with torch.cuda.device(device):
                code = int(torch.cuda.cudart().cudaHostRegister(mapping.address, mapping.bytes, 0))
            if code:
                self._refusal = f"cudaHostRegister of {mapping.bytes} bytes: error {code}; copies are slower"
            else:
                self._known = mapping

        self.forget()
        self._registering = threading.Thread(target=register, name="tensorcask-register")
        self._registering.start()

    def copy(self, saving: _native.Saving, tensors: Iterable[Any]) -> Copies:
        """Starts to copy contiguous tensors into the buffers of a save, in order, after all work queued so far."""
        torch = sys.modules["torch"]
        copies = Copies()
        try:
            for (address, count), tensor in zip(saving.buffers(), tensors, strict=True):
                target = torch.frombuffer((ctypes.c_ubyte * count).from_address(address), dtype=torch.uint8)
                source = tensor.detach().reshape(-1).view(torch.uint8)
                copies.keep.append((target, source, saving))
                if source.device.type != "cuda":
                    target.copy_(source)
                    continue
                if source.device not in copies.streams:
                    mapping = saving.mapping()
                    if mapping is not None and copies.then is None and not self._knows(mapping):
                        copies.then = partial(self._register, mapping, source.device)
                    stream = self._streams.setdefault(source.device, torch.cuda.Stream(source.device))
                    stream.wait_stream(torch.cuda.current_stream(source.device))
                    copies.streams[source.device] = stream
                with torch.cuda.stream(copies.streams[source.device]):
                    target.copy_(source, non_blocking=True)
        except BaseException:
            copies.then = None
            copies.wait()
            raise
        return copies


class Copies:
    """Running copies. Keeps the memory that they read and write alive until they are done."""

    def __init__(self) -> None:
        self.streams: dict[Any, Any] = {}
        self.keep: list[Any] = []
        # Called once when all copies are done.
        self.then: Callable[[], None] | None = None

    def wait(self) -> None:
        """Waits until all copies are done."""
        self._synchronize()
        then, self.then = self.then, None
        if then is not None:
            then()

    def _synchronize(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()
        self.streams.clear()
        self.keep.clear()

    def __del__(self) -> None:
        self._synchronize()
