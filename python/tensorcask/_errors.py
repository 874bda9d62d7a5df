"""Errors about arguments.

Each is an ``InvalidArgumentError``, as the library raises it, and also the built-in error that Python programmers
expect.
"""

from __future__ import annotations

from ._native import InvalidArgumentError


class InvalidValueError(InvalidArgumentError, ValueError):
    """An argument of the right type with a value that is not accepted."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        _describe(self, message)


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument of a type that is not accepted."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        _describe(self, message)


def _describe(error: InvalidArgumentError, message: str) -> None:
    """Sets the attributes that errors of the library have."""
    error.kind, error.message = "invalid_argument", message
    error.object = error.tensor = error.clause = None
    error.chunk = error.offset = None
