"""Tensors on a device: copied straight into shared memory, by CUDA on a stream of its own."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from . import _native


def is_on_device(tensor: Any) -> bool:
    """Whether a torch tensor's bytes are not in this process's memory."""
    return bool(tensor.device.type != "cpu")


class Arena:
    """The shared memory of one engine, as CUDA knows it: pages that it knows are copied to without a detour, and while the host goes on."""

    def __init__(self) -> None:
        self._known: _native.ArenaMapping | None = None
        self._streams: dict[Any, Any] = {}

    def forget(self) -> bool:
        """Before the memory goes, or another takes its place; whether CUDA knew it. No copy may be under way."""
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
            # Copies to memory that CUDA does not know are right as well, but slower.
            warnings.warn(f"cudaHostRegister of {mapping.bytes} bytes: error {code}; copies are slower", RuntimeWarning, stacklevel=2)
            return
        self._known = mapping

    def copy(self, saving: _native.Saving, tensors: Iterable[Any]) -> Copies:
        """Begins to copy contiguous tensors to where they go, in their order: as they are when the work that has been queued so far is done."""
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
    """Copies under way. What they read and write stays where it is until they are done."""

    def __init__(self) -> None:
        self.streams: dict[Any, Any] = {}
        self.keep: list[Any] = []

    def wait(self) -> None:
        """Until all are done."""
        for stream in self.streams.values():
            stream.synchronize()
        self.streams.clear()
        self.keep.clear()

    def __del__(self) -> None:
        self.wait()
