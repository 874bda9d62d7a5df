"""Progress of an operation: bytes read and written so far, reported a few times a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import _native
from ._errors import InvalidTypeError

# A function of the bytes read and the bytes written since the operation began; True for a bar of tqdm.
Progress = Callable[[int, int], object] | bool | None

_INTERVAL_SECONDS = 0.1
_log = logging.getLogger("tensorcask")


@contextmanager
def watching(store: _native.Store, progress: Progress, what: str) -> Iterator[None]:
    """Calls ``progress`` from another thread while the block runs, and once more at its end."""
    if not progress:
        yield
        return
    if progress is not True and not callable(progress):
        raise InvalidTypeError(f"progress: {progress!r}; use True for a bar, or a function of the bytes read and written")
    report, close = _bar(what) if progress is True else (progress, None)
    _, read_before, written_before = store.io()
    done = threading.Event()

    def tell() -> None:
        _, read, written = store.io()
        report(read - read_before, written - written_before)

    def run() -> None:
        try:
            while not done.wait(_INTERVAL_SECONDS):
                tell()
        except Exception:
            _log.exception("the progress function failed; it is not called again for this operation")

    thread = threading.Thread(target=run, name="tensorcask-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        try:
            tell()
        except Exception:
            _log.exception("the progress function failed at its last call")
        if close is not None:
            close()


def _bar(what: str) -> tuple[Callable[[int, int], object], Callable[[], object]]:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ModuleNotFoundError("progress=True needs tqdm, which is not installed. Install tqdm, or pass a function") from None
    bar = tqdm(desc=what, unit="B", unit_scale=True, leave=False)

    def report(read: int, written: int) -> None:
        bar.update(read + written - bar.n)

    return report, bar.close
