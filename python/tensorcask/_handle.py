"""A store as one process holds it open: through forks, pickles and credentials that expire."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from . import _foreign, _native, _source
from ._options import Retention, Step, WriterOptions, step_or_latest, text_values
from ._snapshot import Snapshot
from ._source import CredentialProvider

_T = TypeVar("_T")
# Stores of the process that this one was forked from.
_of_parents: list[Any] = []


class StoreHandle:
    """Part of a :class:`tensorcask.Store` that writers and readers need."""

    def __init__(
        self,
        url: str | os.PathLike[str] | Any,
        config: Mapping[str, str] | None = None,
        *,
        credential_provider: CredentialProvider | None = None,
        fsync: bool = True,
    ) -> None:
        if _source.is_obstore(url):
            url, theirs, provider = _source.of_obstore(url)
            config, credential_provider = {**theirs, **(config or {})}, credential_provider or provider
        self._url = _source.check_url(url)
        self._config = text_values(config, "config") or None
        self._provider = credential_provider
        self._credentials = None if credential_provider is None else _source.Credentials(self._url, credential_provider)
        self._fsync = fsync
        self._lock = threading.RLock()
        self._native = self._opened()
        self._pid = os.getpid()
        self._claim = "job"
        self._writer: tuple[WriterOptions, _native.Writer] | None = None
        self._retainer: _native.Retainer | None = None

    @property
    def key(self) -> Any:
        """Key that is equal for stores opened in the same way in this process."""
        provider = None if self._provider is None else id(self._provider)
        return (os.getpid(), self._url, tuple(sorted((self._config or {}).items())), self._fsync, provider)

    def __reduce__(self) -> Any:
        return (_open_again, (type(self), self._url, self._config, self._fsync, self._provider, _native.job_id()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def url(self) -> str:
        """URL or path of the store."""
        return self._url

    def at(self, url: str) -> Self:
        """Opens another store with the settings and credentials of this store."""
        return type(self)(url, self._config, credential_provider=self._provider, fsync=self._fsync)

    def by_hand(self, take_over: bool) -> Self:
        """Opens the store again for one save by hand, which is refused while a job saves to the store, unless it takes over."""
        store = self.at(self._url)
        store._claim = "once_taking_over" if take_over else "once"
        return store

    def native(self) -> _native.Store:
        """Returns the native store. Opens it again in a forked process, which has none of its parent's threads."""
        if self._pid != os.getpid():
            self._lock = threading.RLock()
            # Never dropped: dropping waits for threads that this process does not have.
            _of_parents.append((self._native, self._writer, self._retainer))
            self._native, self._writer, self._retainer, self._pid = self._opened(), None, None, os.getpid()
        elif self._credentials is not None and self._credentials.are_old:
            with self._lock:
                if self._credentials.are_old:
                    self._native, self._writer, self._retainer = self._opened(), None, None
        return self._native

    def _opened(self) -> _native.Store:
        settings = {} if self._credentials is None else self._credentials.ask()
        return _native.Store(self._url, {**settings, **(self._config or {})} or None, self._fsync)

    def with_writer(self, options: WriterOptions, use: Callable[[_native.Writer], _T]) -> _T:
        """Calls a function with the writer of this store. The writer stays open between calls."""
        native = self.native()
        with self._lock:
            if self._writer is None or self._writer[0] != options:
                with _foreign.explained(self._url):
                    self._writer = (options, native.writer(*options, claim=self._claim))
            try:
                return use(self._writer[1])
            except _native.OutcomeUnknownError:
                # The next save opens the store again, and sees whether the commit is there.
                self._writer = None
                raise
            except _native.Error:
                raise
            except BaseException:
                # Interrupted at an unknown point: the writer's view of the store may be wrong.
                self._writer = None
                raise

    def begin_retention(self) -> None:
        """Looks at the store before the first save of this process, which then frees what an earlier one has forgotten."""
        native = self.native()
        with self._lock:
            if self._retainer is None:
                retainer = _native.Retainer(native)
                retainer.begin()
                self._retainer = retainer

    def retain_steps(self, retention: Retention) -> None:
        """Forgets and reduces steps. A failure changes nothing for the writer: what it knows of the store stays right."""
        native = self.native()
        with self._lock:
            if self._retainer is None:
                self._retainer = _native.Retainer(native)
            self._retainer.apply(retention)

    def snapshot(self, step: Step = "latest") -> Snapshot:
        """Opens the snapshot of a step, or the newest by commit."""
        native = self.native()
        with _foreign.explained(self._url):
            return Snapshot(native.snapshot(step_or_latest(step)), native)


def _open_again(
    kind: type[StoreHandle], url: str, config: dict[str, str] | None, fsync: bool, provider: CredentialProvider | None, job: str
) -> StoreHandle:
    # A process that receives a pickled store saves for the job of the sender.
    _native.join_job(job)
    return kind(url, config, fsync=fsync, credential_provider=provider)
