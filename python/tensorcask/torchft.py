"""Recovery of a replica of torchft from a peer, by a verified snapshot.

    from tensorcask.torchft import Transport

    transport = Transport(timeout=timedelta(seconds=60))
    manager = torchft.Manager(..., checkpoint_transport=transport)

torchft's own transports unpickle what they receive, and check nothing. Here the healthy replica writes a snapshot into shared memory, and
serves its files over HTTP. The recovering replica fetches them, compares every byte with its checksum, and loads the state without pickle.
The snapshot is a copy, so the healthy replica trains on while it is fetched.

A state holds tensors, containers, numbers, text and bytes. Of a DTensor, its local part is sent: pass ``state_dict``, a function that returns
a state of the same form, as torchft's ``PGTransport`` does. Recovery through a peer keeps no history; save with an engine, too, for the case
that all replicas are lost. As with torchft's own transports, anyone who reaches the port can read the state. Tested with torchft 0.2.
"""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchft.checkpointing.transport import CheckpointTransport  # pyright: ignore[reportMissingImports]

from . import _native
from ._shard import is_part
from ._store import Store

__all__ = ["Transport"]

_PREFIX, _LOCK = "tensorcask-torchft-", "lock"
_MOST_FILES = 100_000
_PIECE = 1 << 20


class Transport(CheckpointTransport[Any]):  # type: ignore[misc]
    """A ``checkpoint_transport`` for ``torchft.Manager``.

    ``timeout``: of each request. ``folder``: memory for snapshots; by default a new folder in ``/dev/shm``. ``state_dict``: a function that
    returns a state like the one to receive; needed for DTensors. ``options``: those of :meth:`tensorcask.Store.save`.
    """

    def __init__(
        self,
        timeout: timedelta,
        *,
        folder: str | os.PathLike[str] | None = None,
        state_dict: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        self._timeout, self._state_dict, self._options = timeout.total_seconds(), state_dict, {"policy": "full", **options}
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        root = Path(folder or shared or tempfile.gettempdir())
        _remove_abandoned(root)
        made = Path(tempfile.mkdtemp(prefix=".tensorcask-", dir=root))
        # Held until this process ends, and before the folder has its name.
        self._lock = open(made / _LOCK, "wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder = made.rename(root / f"{_PREFIX}{made.name.removeprefix('.tensorcask-')}")
        self._changed = threading.Condition()
        self._step: int | None = None
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, name="tensorcask-torchft", daemon=True).start()

    def metadata(self) -> str:
        """Address of this replica."""
        return f"http://{socket.gethostname()}:{self._server.server_address[1]}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Makes a snapshot, and serves it until the next one. The state may change as soon as this has returned."""
        path = self._folder / str(step)
        shutil.rmtree(path, ignore_errors=True)
        Store(path, fsync=False).save(_local(state_dict), step=step, **self._options)
        with self._changed:
            before, self._step = self._step, step
            self._changed.notify_all()
        if before not in (None, step):
            shutil.rmtree(self._folder / str(before), ignore_errors=True)

    def disallow_checkpoint(self) -> None:
        """Does nothing: what is served is a copy."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetches and checks the snapshot of a peer. ``CorruptionError`` if a byte differs."""
        place = Path(tempfile.mkdtemp(prefix="received-", dir=self._folder))
        try:
            for name, size in self._index(metadata, step, timeout.total_seconds()):
                self._fetch(f"{metadata}/{step}/{name}", place / name, size)
            state = Store(place).snapshot(step).load(framework="torch")
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return state if self._state_dict is None else _like(state, self._state_dict())

    def shutdown(self, wait: bool = True) -> None:
        """Ends the server, and removes the snapshots."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _index(self, address: str, step: int, seconds: float) -> list[tuple[str, int]]:
        """Files of a snapshot, with their sizes. Waits until the peer has it."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                with urllib.request.urlopen(f"{address}/{step}", timeout=self._timeout) as answer:
                    told = json.loads(answer.read(_MOST_FILES * 300))
                break
            except urllib.error.HTTPError as error:
                if error.code != 404 or time.monotonic() > deadline:
                    raise _native.StorageError(f"{address} does not serve step {step}: {error}") from None
        files = [(str(name), int(size)) for name, size in told]
        bad = next((name for name, _ in files if name.startswith("/") or ".." in Path(name).parts), None)
        if bad is not None:
            raise _native.CorruptionError(f"{address} serves a file outside of the snapshot: {bad!r}")
        return files

    def _fetch(self, address: str, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(address, timeout=self._timeout) as answer, open(path, "wb") as file:
            left = size
            while left > 0 and (piece := answer.read(min(left, _PIECE))):
                file.write(piece)
                left -= len(piece)
        if left:
            raise _native.CorruptionError(f"{address} is truncated: expected {size} bytes, found {size - left}. Recover again")


class _Server(http.server.ThreadingHTTPServer):
    """Serves ``/STEP``, the list of files of a snapshot, and ``/STEP/NAME``, one of them."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        super().__init__(("", 0), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        transport = self.server.transport
        _, step, *name = self.path.split("/", 2)
        with transport._changed:
            transport._changed.wait_for(lambda: str(transport._step) == step, timeout=1.0)
            is_there = str(transport._step) == step
        folder = transport._folder / step
        if not is_there:
            self.send_error(404, f"no snapshot of step {step} here")
            return
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        if not name:
            content = json.dumps([[found, path.stat().st_size] for found, path in files.items()]).encode()
            self._begin(len(content))
            self.wfile.write(content)
        elif name[0] in files:
            with open(files[name[0]], "rb") as file:
                self._begin(os.fstat(file.fileno()).st_size)
                shutil.copyfileobj(file, self.wfile, _PIECE)
        else:
            self.send_error(404, "no such file")

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: requests are not news."""

    def _begin(self, size: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()


def _remove_abandoned(root: Path) -> None:
    """Removes the folders of processes that were killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            with open(folder / _LOCK, "r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Of another user, in use, or just being made.
            continue


def _local(value: Any) -> Any:
    """A state with the local parts of its DTensors."""
    if is_part(value):
        return value.to_local().detach()
    if isinstance(value, Mapping):
        return {key: _local(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_local(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _like(value: Any, target: Any) -> Any:
    """A state whose tensors are distributed as those of the target."""
    if is_part(target):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            value.to(target.to_local().device),
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=target.stride(),
        )
    if isinstance(value, Mapping) and isinstance(target, Mapping):
        return {key: _like(item, target.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and isinstance(target, (list, tuple)) and len(value) == len(target):
        items = [_like(item, other) for item, other in zip(value, target, strict=True)]
        return items if isinstance(value, list) else tuple(items)
    return value
