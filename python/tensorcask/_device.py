"""Copies tensors between a device and host memory: saves on a separate stream of CUDA, restores and loads on the current one."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from . import _native
from ._errors import InvalidValueError


def is_on_device(tensor: Any) -> bool:
    """Whether the bytes of a torch tensor are outside of host memory."""
    return bool(tensor.device.type != "cpu")


def written(tensor: Any) -> Any:
    """Returns a torch tensor whose memory is about to be filled, after telling PyTorch of the change."""
    increment = getattr(sys.modules["torch"].autograd.graph, "increment_version", None)
    if increment is not None and not tensor.is_inference():
        increment(tensor)
    return tensor


# A load reads a state into host memory in windows of at most this size. A single larger part exceeds it.
WINDOW_BYTES = 128 << 20
# Begins of tensors in a window are multiples of this.
ALIGNMENT = 64


def read_whole(native: _native.Snapshot, outs: Mapping[str, Any]) -> None:
    """Reads whole tensors into contiguous tensors on devices.

    Needs two host buffers of a window each: one is filled while the other is copied to the device.
    """
    torch = sys.modules["torch"]
    _check_apart(outs)
    names = list(outs)
    windows = _native.windows(native, names, WINDOW_BYTES - (1 << 20))
    memory = [flat_bytes(torch, written(out)) for out in outs.values()]

    def room(count: int) -> int:
        return -(-count // ALIGNMENT) * ALIGNMENT

    most = max((sum(room(part[4]) for part in window) for window in windows), default=0)
    buffers = [_pinned(most) for _ in windows[:2]]
    copied: list[list[Any]] = [[], []]
    for number, window in enumerate(windows):
        buffer, events = buffers[number % 2], copied[number % 2]
        while events:
            events.pop().synchronize()
        at, requests, copies = 0, [], []
        for item, offset, shape, begin, count in window:
            if count:
                part = buffer[at : at + count]
                requests.append((names[item], offset, shape, part.numpy()))
                copies.append((memory[item][begin : begin + count], part))
                at += room(count)
        native.read_into(requests)
        for target, part in copies:
            target.copy_(part, non_blocking=target.is_cuda)
        for device in {target.device for target, _ in copies if target.is_cuda}:
            events.append(torch.cuda.current_stream(device).record_event())
    for events in copied:
        for event in events:
            event.synchronize()


def _check_apart(outs: Mapping[str, Any]) -> None:
    """Refuses tensors that share memory: one would overwrite the other."""
    spans = [(str(out.device), out.data_ptr(), out.data_ptr() + out.nbytes, name) for name, out in outs.items() if out.nbytes]
    for (device, _, end, name), (other_device, begin, _, other) in itertools.pairwise(sorted(spans)):
        if device == other_device and begin < end:
            raise InvalidValueError(f"out: `{name}` and `{other}` share memory on {device}")


def reads_directly(out: Any) -> bool:
    """Whether :func:`read_whole` can fill this array: a plain torch tensor on a GPU."""
    return getattr(getattr(out, "device", None), "type", None) == "cuda" and is_plain(out)


def flat_bytes(torch: Any, tensor: Any) -> Any:
    """Returns a view of the bytes of a contiguous tensor, of one dimension."""
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    if flat.numel() == 1:
        # It is contiguous with any stride, and a view of another type needs a stride of 1.
        flat = flat.as_strided((1,), (1,))
    return (flat.detach() if flat.requires_grad else flat).view(torch.uint8)


def is_plain(tensor: Any) -> bool:
    """Whether the memory of a torch tensor has its elements in order."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def _pinned(count: int) -> Any:
    """Host memory from which copies to a GPU are asynchronous, if there is a GPU and the system allows it."""
    torch = sys.modules["torch"]
    try:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
    except RuntimeError:
        return torch.empty(count, dtype=torch.uint8, device="cpu")


# CUDA holds work of all threads up while it registers memory: about 10 ms for this much.
PIECE_BYTES = 32 << 20


class Arena:
    """Shared memory of one engine, registered with CUDA: copies to it are direct and asynchronous.

    Registering takes about 0.3 s per GB. A thread registers the memory piece by piece between the copies, so the first copies are
    slower, and training goes on between the pieces. No copy crosses the end of a piece.
    """

    def __init__(self) -> None:
        self._mapping: _native.ArenaMapping | None = None
        # Size of the registered part, which begins where the mapping does.
        self._registered = 0
        self._is_refused = False
        self._thread: threading.Thread | None = None
        self._pause = threading.Event()
        self._streams: dict[Any, Any] = {}

    def forget(self) -> bool:
        """Unregisters the memory before it is freed. Returns whether some was registered. No copy may be running."""
        self._stop()
        mapping, count = self._mapping, self._registered
        self._mapping, self._registered, self._is_refused = None, 0, False
        if mapping is None or count == 0:
            return False
        cudart = sys.modules["torch"].cuda.cudart()
        codes = [int(cudart.cudaHostUnregister(address)) for address, _ in _pieces(mapping.address, count, mapping.address)]
        if code := next(filter(None, codes), 0):
            warnings.warn(f"cudaHostUnregister: error {code}", RuntimeWarning, stacklevel=2)
        return True

    def is_registered(self) -> bool:
        """Waits for a thread that registers memory. Returns whether all memory is registered."""
        if self._thread is not None:
            self._thread.join()
        self._stop()
        return self._mapping is not None and self._registered == self._mapping.bytes

    def _stop(self) -> None:
        """Ends a thread that registers memory, after the piece at which it is."""
        if self._thread is None:
            return
        self._pause.set()
        self._thread.join()
        self._thread = None
        if self._is_refused and self._mapping is not None:
            # Copies to unregistered memory are correct, but slower.
            message = f"CUDA registered {self._registered} of {self._mapping.bytes} bytes (cudaHostRegister); copies of the rest are slower"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _rest_to_register(self, mapping: _native.ArenaMapping, device: Any) -> Callable[[], None] | None:
        """Returns a function that registers the rest of the memory after a copy; None if that is done, or was refused."""
        known = self._mapping
        if known is None or (known.address, known.bytes) != (mapping.address, mapping.bytes):
            return partial(self._register, mapping, device)
        if self._is_refused or self._registered == known.bytes:
            return None
        return partial(self._register, known, device)

    def _register(self, mapping: _native.ArenaMapping, device: Any) -> None:
        """Begins to register memory, or goes on with it. No copy may be running."""

        def register() -> None:
            torch = sys.modules["torch"]
            # A thread begins on the first device, and would take memory there.
            with torch.cuda.device(device):
                cudart = torch.cuda.cudart()
                begin = mapping.address + self._registered
                for address, count in _pieces(begin, mapping.bytes - self._registered, mapping.address):
                    begun = time.perf_counter()
                    if int(cudart.cudaHostRegister(address, count, 0)):
                        self._is_refused = True
                        return
                    self._registered += count
                    # Training gets half of the time.
                    if self._pause.wait(time.perf_counter() - begun):
                        return

        self._stop()
        if self._mapping is not mapping:
            self.forget()
            self._mapping = mapping
        self._pause.clear()
        self._thread = threading.Thread(target=register, name="tensorcask-register")
        self._thread.start()

    def _spans(self, address: int, count: int) -> Iterator[tuple[int, int]]:
        """Divides memory at the ends of registered pieces. Yields offset and size of each part."""
        known = self._mapping
        if known is None or not known.address <= address < known.address + known.bytes:
            yield 0, count
            return
        for begin, size in _pieces(address, count, known.address):
            yield begin - address, size

    def fill(self, out: Any, address: int, count: int) -> None:
        """Copies memory, the elements of a tensor in order, into a tensor on a device. Waits until it is copied."""
        if not count:
            return
        self._stop()
        torch = sys.modules["torch"]
        source = _bytes_at(address, count)
        with torch.no_grad():
            target = out if is_plain(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            memory = flat_bytes(torch, target)
            for begin, size in self._spans(address, count):
                memory[begin : begin + size].copy_(source[begin : begin + size])
            if target is not out:
                out.copy_(target)

    def copy(self, saving: _native.Saving, tensors: Iterable[Any]) -> Copies:
        """Starts to copy contiguous tensors into the buffers of a save, in order, after all work queued so far."""
        torch = sys.modules["torch"]
        self._stop()
        copies = Copies()
        try:
            for (address, count), tensor in zip(saving.buffers(), tensors, strict=True):
                target = _bytes_at(address, count)
                source = flat_bytes(torch, tensor)
                copies.keep.append((target, source, saving))
                if source.device.type != "cuda":
                    target.copy_(source)
                    continue
                if source.device not in copies.streams:
                    mapping = saving.mapping()
                    if mapping is not None and copies.then is None:
                        copies.then = self._rest_to_register(mapping, source.device)
                    stream = self._streams.setdefault(source.device, torch.cuda.Stream(source.device))
                    stream.wait_stream(torch.cuda.current_stream(source.device))
                    copies.streams[source.device] = stream
                with torch.cuda.stream(copies.streams[source.device]):
                    for begin, size in self._spans(address, count):
                        target[begin : begin + size].copy_(source[begin : begin + size], non_blocking=True)
        except BaseException:
            copies.then = None
            copies.wait()
            raise
        return copies


def _pieces(begin: int, size: int, origin: int) -> Iterator[tuple[int, int]]:
    """Divides memory at multiples of the size of a piece from ``origin`` on. Yields address and size of each part."""
    end = begin + size
    while begin < end:
        stop = min(end, begin + PIECE_BYTES - (begin - origin) % PIECE_BYTES)
        yield begin, stop - begin
        begin = stop


def _bytes_at(address: int, count: int) -> Any:
    """A tensor on this memory, which must stay mapped while the tensor is used."""
    torch = sys.modules["torch"]
    return torch.frombuffer((ctypes.c_ubyte * count).from_address(address), dtype=torch.uint8)


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
