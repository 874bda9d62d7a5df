"""Errors about arguments.

Each is an ``InvalidArgumentError``, as the library raises it, and also the built-in error that Python programmers
expect.
"""

from __future__ import annotations

from ._native import (
    ConflictError,
    CorruptionError,
    Error,
    FencedError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    OutcomeUnknownError,
    StorageError,
    TemplateError,
    UnsafeStoreError,
    UnsupportedError,
)

_KINDS: dict[type[Error], str] = {
    ConflictError: "conflict",
    CorruptionError: "corrupt",
    FencedError: "fenced",
    InvalidArgumentError: "invalid_argument",
    LimitExceededError: "limit_exceeded",
    NotFoundError: "not_found",
    OutcomeUnknownError: "outcome_unknown",
    StorageError: "storage",
    TemplateError: "template",
    UnsafeStoreError: "unsafe_store",
    UnsupportedError: "unsupported",
}


class _Text:
    """The text of an error, unless the library has set another message."""

    def __get__(self, error: Error | None, owner: type[Error]) -> str:
        return "" if error is None else str(error)


# Errors that Python code raises have the attributes of the library's errors.
for _kind in _KINDS:
    _kind.kind = _KINDS[_kind]
Error.message = _Text()  # type: ignore[assignment]
Error.object = Error.tensor = Error.clause = None
Error.chunk = Error.offset = None


class InvalidValueError(InvalidArgumentError, ValueError):
    """An argument of the right type with a value that is not accepted."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument of a type that is not accepted."""
