"""Small tables for notebooks: plain HTML without scripts, whose colours are those of the page.

Every text comes from a store, which anybody may have written. So each one is made printable, cut and escaped.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from ._reports import ChainLink, SnapshotInfo, TensorInfo

# Rows of a table, columns of facts, and characters of a cell.
_ROWS, _FACTS, _CHARACTERS = 10, 6, 200


def of_store(url: str, infos: Sequence[SnapshotInfo]) -> str:
    """Returns the newest steps of a store as a table."""
    if not infos:
        return _section(f"Store {url}", "no steps")
    shown = infos[: -_ROWS - 1 : -1]
    step_of = {info.id: info.step for info in infos}
    facts = list(dict.fromkeys(name for info in shown for name in info.user if not name.startswith("tc.")))[:_FACTS]
    rows = []
    for info in shown:
        parent = "" if info.parent is None else step_of.get(info.parent, "forgotten")
        kind = f"{info.kind}, pinned" if info.pinned else info.kind
        sizes = (bytes_text(info.tensor_bytes), bytes_text(info.stored_bytes))
        rows.append([info.step, kind, parent, *sizes, _time(info.time_ms), *(info.user.get(name, "") for name in facts)])
    total = bytes_text(sum(info.stored_bytes for info in infos))
    summary = f"{counted(len(infos), 'live step')}, {total} stored{_left_out(len(shown), len(infos), 'newest')}"
    return _section(f"Store {url}", summary, ["step", "kind", "parent", "tensors", "stored", "saved (UTC)", *facts], rows)


def of_snapshot(step: int, tensors: Mapping[str, TensorInfo], chain: Sequence[ChainLink]) -> str:
    """Returns the tensors of a snapshot as a table."""
    rows = [[t.name, t.dtype, f"[{', '.join(map(str, t.shape))}]", t.role, t.alias_of or ""] for t in islice(tensors.values(), _ROWS)]
    headings = ["tensor", "dtype", "shape", "role", "tied to"]
    if not any(row[-1] for row in rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    links = " ← ".join(f"{link.step} ({link.kind})" for link in reversed(chain[:_ROWS]))
    more = "… ← " if len(chain) > _ROWS else ""
    summary = f"{counted(len(tensors), 'tensor')}{_left_out(len(rows), len(tensors), 'first')}; chain: {more}{links}"
    return _section(f"Snapshot of step {step}", summary, headings, rows)


def of_error(title: str, error: Exception) -> str:
    """Returns the message of an error in place of a table."""
    return _section(title, f"cannot be read: {error}")


def _section(title: str, summary: str, headings: Sequence[str] = (), rows: Sequence[Sequence[Any]] = ()) -> str:
    lines = [f"<div><strong>{_text(title)}</strong><br>{_text(summary, 1000)}"]
    if rows:
        lines.append(f"<table><thead><tr>{''.join(f'<th>{_text(heading)}</th>' for heading in headings)}</tr></thead><tbody>")
        lines += [f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows]
        lines.append("</tbody></table>")
    return "\n".join([*lines, "</div>"])


def _text(value: Any, characters: int = _CHARACTERS) -> str:
    """Escapes a text for HTML. A control character, also one that changes the direction of text, is shown as its code."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    cut = text if len(text) <= characters else f"{text[:characters]}…"
    return html.escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut))


def bytes_text(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1023.95 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        # A forged time beyond the year 9999.
        return ""


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _left_out(shown: int, all_rows: int, which: str) -> str:
    return "" if shown == all_rows else f" (the {which} {shown} are shown)"
