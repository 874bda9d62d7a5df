"""Copies tensors from a device into shared memory, by CUDA on a separate stream."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from . import _native


def is_on_device(tensor: Any) -> bool:
    """Whether the bytes of a torch tensor are outside of host memory."""
    return bool(tensor.device.type != "cpu")


class Arena:
    """Shared memory of one engine, registered with CUDA: copies to it are direct and asynchronous."""

    def __init__(self) -> None:
        self._known: _native.ArenaMapping | None = None
        self._streams: dict[Any, Any] = {}

    def forget(self) -> bool:
        """Unregisters the memory before it is freed. Returns whether it was registered. No copy may be running."""
        known, self._known = self._known, None
        if known is None:
            return False
        cudart = sys.modules["torch"].cuda.cudart()
        if code := int(cudart.cudaHostUnregister(known.address)):
            warnings.warn(f"cudaHostUnregister: error {code}", RuntimeWarning, stacklevel=2)
        return True

    def _register(self, mapping: _native.ArenaMapping) -> None:
        if self._known is not None and (self._known.address, self._known.bytes) == (mapping.address, mapping.bytes):
            return
        self.forget()
        cudart = sys.modules["torch"].cuda.cudart()
        if code := int(cudart.cudaHostRegister(mapping.address, mapping.bytes, 0)):
            # Copies to unregistered memory are correct, but slower.
            warnings.warn(f"cudaHostRegister of {mapping.bytes} bytes: error {code}; copies are slower", RuntimeWarning, stacklevel=2)
            return
        self._known = mapping

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
                    if mapping := saving.mapping():
                        self._register(mapping)
                    stream = self._streams.setdefault(source.device, torch.cuda.Stream(source.device))
                    stream.wait_stream(torch.cuda.current_stream(source.device))
                    copies.streams[source.device] = stream
                with torch.cuda.stream(copies.streams[source.device]):
                    target.copy_(source, non_blocking=True)
        except BaseException:
            copies.wait()
            raise
        return copies


class Copies:
    """Running copies. Keeps the memory that they read and write alive until they are done."""

    def __init__(self) -> None:
        self.streams: dict[Any, Any] = {}
        self.keep: list[Any] = []

    def wait(self) -> None:
        """Waits until all copies are done."""
        for stream in self.streams.values():
            stream.synchronize()
        self.streams.clear()
        self.keep.clear()

    def __del__(self) -> None:
        self.wait()
