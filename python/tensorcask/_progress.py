"""Progress of an operation: bytes read and written so far, reported a few times a second."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import _native
from ._errors import InvalidTypeError

# A function of the bytes read and the bytes written since the operation began; True for a bar of tqdm; False for none; None for a
# bar in notebooks that have tqdm and ipywidgets.
Progress = Callable[[int, int], object] | bool | None

_INTERVAL_SECONDS = 0.1
# A bar that nobody asked for appears only in operations that take longer.
_DELAY_SECONDS = 1.0
_log = logging.getLogger("tensorcask")


@contextmanager
def watching(store: _native.Store, progress: Progress, what: str) -> Iterator[None]:
    """Calls ``progress`` from another thread while the block runs, and once more at its end."""
    by_default = progress is None
    if by_default:
        progress = _has_place_for_bar()
    if progress is False:
        yield
        return
    if progress is not True and not callable(progress):
        raise InvalidTypeError(f"progress: {progress!r}; use True for a bar, or a function of the bytes read and written")
    report, close = _bar(what, _DELAY_SECONDS if by_default else 0) if progress is True else (progress, None)
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


def _has_place_for_bar() -> bool:
    """Whether this is the main thread of a notebook's kernel, with tqdm and the widgets that it draws with."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel") or threading.current_thread() is not threading.main_thread():
        return False
    return all(importlib.util.find_spec(name) is not None for name in ("tqdm", "ipywidgets"))


def _bar(what: str, delay: float) -> tuple[Callable[[int, int], object], Callable[[], object]]:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ModuleNotFoundError("progress=True needs tqdm, which is not installed. Install tqdm, or pass a function") from None
    bar = tqdm(desc=what, unit="B", unit_scale=True, leave=False, delay=delay)

    def report(read: int, written: int) -> None:
        bar.update(read + written - bar.n)

    return report, bar.close
