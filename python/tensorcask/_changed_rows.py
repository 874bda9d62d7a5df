"""``changed_rows=`` of a save: rows that the caller names, or a source that has recorded them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ._native import InvalidArgumentError
from ._options import changed_row_lists

_T = TypeVar("_T")
# Rows by tensor name. None: not known in this save, but later saves name them.
Rows = Mapping[str, list[int] | None]
_log = logging.getLogger("tensorcask")


@dataclass(frozen=True)
class Claim:
    """Rows that a source names for one save."""

    # Writer that saves. Each writer has a base of its own.
    writer: Hashable
    # Number of the save among all saves of the source.
    number: int
    # Tensors that are missing or have no rows are compared with their base.
    rows: Rows
    # Tables that the state has.
    tables: frozenset[int]


class RowSource(ABC):
    """Records which rows change, for ``changed_rows=`` of a save."""

    @abstractmethod
    def claim(self, writer: Hashable, tensors: Mapping[str, Any]) -> Claim:
        """Returns the rows that may have changed since this writer last saved, for the tensors of a state by name.

        Call it when the values to save are final: rows that change later belong to the next save.
        """

    @abstractmethod
    def confirm(self, claim: Claim) -> None:
        """Notes that the writer has saved. Without this, the rows are named again in the next save."""

    @abstractmethod
    def distrust(self) -> None:
        """Names no rows any more, because a save has found one that was left out."""


def save_with_rows(
    given: Mapping[str, Sequence[int]] | RowSource | None,
    writer: Hashable,
    tensors: Callable[[], Mapping[str, Any]],
    save: Callable[[Rows], _T],
) -> _T:
    """Saves with the rows that the caller names, or that a source has recorded."""
    if not isinstance(given, RowSource):
        return save(changed_row_lists(given))
    return save_claimed(given, given.claim(writer, tensors()), save)


def rows_of_save(
    given: Mapping[str, Sequence[int]] | RowSource | None, writer: Hashable, tensors: Callable[[], Mapping[str, Any]]
) -> tuple[Rows, Callable[[], None]]:
    """Returns the rows for a save that does not fail if one is left out, and a function to call once it has succeeded."""
    if not isinstance(given, RowSource):
        return changed_row_lists(given), lambda: None
    claim = given.claim(writer, tensors())
    return claim.rows, lambda: given.confirm(claim)


def save_claimed(
    source: RowSource, claim: Claim, save: Callable[[Rows], _T], names: Mapping[str, str] | None = None
) -> _T:
    """Saves with claimed rows. If the save finds a row that the source left out, saves without them.

    ``names``: the names of tensors in the save, by their names in the claim; all others are left out.
    """
    names = {name: name for name in claim.rows} if names is None else names
    rows = {names[name]: found for name, found in claim.rows.items() if name in names}
    try:
        saved = save(rows)
    except InvalidArgumentError as error:
        if all(found is None for found in rows.values()):
            raise
        saved = save({})
        _log.warning("some rows changed without the optimizer, so this save compared all rows, and so do later saves: %s", error)
        source.distrust()
    source.confirm(claim)
    return saved
