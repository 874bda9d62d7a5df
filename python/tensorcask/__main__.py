"""The ``tensorcask`` command, which is also ``python -m tensorcask``.

It runs the same code as the ``tensorcask`` binary. Only ``import``, ``export`` and ``sql`` are written in Python, because
they need Python's frameworks and DuckDB.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import math
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import _native
from ._dtypes import UnstorableTypeError
from ._options import Step

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command in this process, and returns its exit code."""
    _open_standard_files()
    # Ctrl-C ends the process at once, as it ends the binary: native code does not run Python's signal handlers.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) == 2 and words[0] == "help":
        words = [words[1], "--help"]
    verb = next((word for word in words if word != "--json"), "")
    if verb in _VERBS:
        words.remove(verb)
        return _run_here(verb, words)
    return _native.run_command(["tensorcask", *words])


def _import(parser: _Parser, words: Sequence[str]) -> tuple[dict[str, Any], str]:
    from ._folders import step_in
    from .interchange import _format_of_folder, import_

    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="safetensors, an index, a .pt file, or a folder")
    parser.add_argument("store", metavar="STORE", help="path or URL")
    parser.add_argument("--step", type=int, help="the training step [of a trainer's folder: its own]; for slime folders, the step of --base")
    parser.add_argument("--format", choices=["safetensors", "torch", "dcp", "trainer", "slime"], help="[told by the source's name or content]")
    parser.add_argument("--policy", default="adaptive", help="when to write a base [adaptive]")
    parser.add_argument("--base", help="for slime folders: the checkpoint that the first delta builds on")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="class whose objects a .pt file or DCP folder may hold, such as argparse.Namespace; repeatable. Its code does not run: "
        "the attributes become plain values",
    )
    parser.add_argument(
        "--on-unsupported", choices=["error", "skip"], default="error", help="what to do with values that cannot be stored [error]"
    )
    parser.add_argument("--each", action="store_true", help="save each SOURCE into a store of its own, STORE/NAME; the last number in NAME is the step")
    parser.add_argument("--shard", type=_part, metavar="I/N", help="with --each: part i of n of the sources, with i from 0")
    parser.add_argument("--take-over", action="store_true", help="take the store over from a job that saves to it: its next save fails")
    given = parser.parse(words)
    if given.shard and not given.each:
        parser.error("--shard is for --each: one snapshot has one writer")
    if given.each:
        from ._conversions import import_each

        options = {name: getattr(given, name) for name in ("format", "policy", "allow", "on_unsupported", "take_over")}
        stores = import_each(given.sources, given.store, step=given.step, shard=given.shard, **options)
        names = [name for row in stores for name in row["left_out"]]
        report = {"store": given.store, "shard": _shard_text(given.shard), "stores": stores, "left_out": names}
        return report, _counted(stores, "source", "sources")
    first = Path(given.sources[0])
    kind = given.format or (_format_of_folder(first) if first.is_dir() else None)
    report = {"store": given.store, "steps": [], "kind": None, "tensor_bytes": None, "stored_bytes": None, "left_out": []}
    if kind == "slime":
        from .slime import import_deltas

        if len(given.sources) != 1:
            parser.error("give one folder of weight deltas")
        steps = import_deltas(first, given.store, base=given.base, base_step=given.step or 0, policy=given.policy)
        return {**report, "steps": steps}, f"steps {', '.join(map(str, steps))}" if steps else "nothing new"
    step = step_in(first) if given.step is None and kind == "trainer" else given.step
    if step is None:
        parser.error("pass --step: these formats do not store the training step")
    left_out: list[str] = []
    saved = import_(
        given.sources,
        given.store,
        step=step,
        format=kind,
        policy=given.policy,
        allow=given.allow,
        on_unsupported=given.on_unsupported,
        left_out=left_out,
        take_over=given.take_over,
    )
    facts = {"steps": [saved.step], "kind": saved.kind, "tensor_bytes": saved.tensor_bytes, "stored_bytes": saved.stored_bytes}
    line = f"step {saved.step}: a {saved.kind}; {saved.tensor_bytes} bytes of tensors, {saved.stored_bytes} bytes stored"
    return {**report, **facts, "left_out": left_out}, f"{line}; left out: {', '.join(left_out)}" if left_out else line


def _export(parser: _Parser, words: Sequence[str]) -> tuple[dict[str, Any], str]:
    from .interchange import export

    parser.add_argument("store", metavar="STORE", help="path or URL")
    parser.add_argument("target", metavar="TARGET", help="a file, or a folder that is missing or empty")
    parser.add_argument("--step", type=int, help="[the newest]")
    parser.add_argument("--format", choices=["safetensors", "torch", "dcp"], help="[told by the target's name]")
    parser.add_argument("--max-shard-bytes", type=int, metavar="N", help="split safetensors into shards with an index, in a folder")
    parser.add_argument("--every-step", action="store_true", help="write every step, each as TARGET/step-N")
    parser.add_argument("--shard", type=_part, metavar="I/N", help="with --every-step: part i of n of the steps, with i from 0")
    given = parser.parse(words)
    if given.shard and not given.every_step:
        parser.error("--shard is for --every-step")
    if given.every_step:
        from ._conversions import export_steps

        if given.step is not None:
            parser.error("--step and --every-step: give one of them")
        steps = export_steps(given.store, given.target, format=given.format, max_shard_bytes=given.max_shard_bytes, shard=given.shard)
        report = {"store": given.store, "target": given.target, "shard": _shard_text(given.shard), "steps": steps}
        return report, _counted(steps, "step", "steps")
    step: Step = "latest" if given.step is None else given.step
    export(given.store, given.target, step=step, format=given.format, max_shard_bytes=given.max_shard_bytes)
    return {"store": given.store, "target": given.target}, given.target


def _part(text: str) -> tuple[int, int]:
    """Parses ``--shard``."""
    from ._conversions import parse_part

    try:
        return parse_part(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _shard_text(shard: tuple[int, int] | None) -> str | None:
    return None if shard is None else f"{shard[0]}/{shard[1]}"


def _counted(rows: list[dict[str, Any]], one: str, many: str) -> str:
    """Counts what was converted, and what was there before."""
    present = sum(row["present"] for row in rows)
    return f"{len(rows) - present} {one if len(rows) - present == 1 else many} converted, {present} present before"


def _sql(parser: _Parser, words: Sequence[str]) -> tuple[dict[str, Any], str]:
    from ._store import Store

    parser.add_argument("store", metavar="STORE", help="path or URL")
    parser.add_argument("query", metavar="QUERY", help="SQL over snapshots, tensors, chunks, stats and log; - reads it from stdin")
    parser.add_argument("--step", type=int, action="append", metavar="N", help="read only this step of tensors, chunks and stats; repeatable")
    parser.add_argument("--csv", action="store_true", help="comma-separated values instead of a table")
    given = parser.parse(words)
    if given.csv and given.json:
        parser.error("--csv and --json: give one of them")
    query = sys.stdin.read() if given.query == "-" else given.query
    try:
        found = Store(given.store).sql(query, steps=given.step)
        if given.json:
            rows = [[_json_cell(cell) for cell in row] for row in found.fetchall()]
            return {"store": given.store, "columns": found.columns, "rows": rows}, ""
        return {}, _csv_of(found) if given.csv else _table_of(found)
    except _errors_of_duckdb() as error:
        raise ValueError(str(error)) from error


def _errors_of_duckdb() -> tuple[type[Exception], ...]:
    """Returns the class of DuckDB's errors, if a query has loaded DuckDB."""
    duckdb = sys.modules.get("duckdb")
    return () if duckdb is None else (duckdb.Error,)


def _csv_of(found: DuckDBPyRelation) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found.columns)
    writer.writerows(found.fetchall())
    return text.getvalue().rstrip("\n")


def _table_of(found: DuckDBPyRelation) -> str:
    """Returns a result as DuckDB shows it. A pipe gets every row and every column."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WHOLE
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found.show(max_width=width, max_rows=_WHOLE, max_col_width=_WHOLE)
    return text.getvalue().rstrip("\n")


def _json_cell(cell: Any) -> Any:
    """Returns a cell of a result as JSON can hold it. NaN, infinities, times and decimals become text."""
    if isinstance(cell, dict):
        return {str(key): _json_cell(value) for key, value in cell.items()}
    if isinstance(cell, list | tuple):
        return [_json_cell(value) for value in cell]
    if cell is None or isinstance(cell, str | int) or (isinstance(cell, float) and math.isfinite(cell)):
        return cell
    return str(cell)


_WHOLE = 1_000_000
_Verb = Callable[["_Parser", Sequence[str]], tuple[dict[str, Any], str]]
_VERBS: dict[str, tuple[_Verb, str]] = {
    "import": (_import, "Saves a checkpoint of another format as a snapshot, or each version of a slime folder."),
    "export": (_export, "Writes a snapshot in another format."),
    "sql": (_sql, "Queries snapshots, tensors, chunks, statistics and the log of a store with SQL, by DuckDB."),
}
# Kinds and exit codes of errors, as the binary has them.
_KINDS: list[tuple[type[BaseException], str, int]] = [
    (_native.CorruptionError, "corrupt", 3),
    (_native.NotFoundError, "not_found", 10),
    (FileNotFoundError, "not_found", 10),
    (_native.TemplateError, "template", 1),
    (_native.ConflictError, "conflict", 11),
    (_native.FencedError, "fenced", 11),
    (_native.StorageError, "storage", 1),
    (OSError, "storage", 1),
    (ImportError, "unsupported", 1),
]
# The exit code of an import that left out a part of its source.
_IN_PART = 4
# Errors of torch for files that it cannot read.
_OF_TORCH = (RuntimeError, EOFError, pickle.UnpicklingError)


class _Parser(argparse.ArgumentParser):
    """Parser of one verb. With ``--json``, its usage errors are JSON too."""

    json = False

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        self.json = "--json" in words
        self.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text, for errors too")
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        if self.json:
            _print_json_error("usage", message)
        super().error(message)


def _run_here(verb: str, words: list[str]) -> int:
    """Runs a verb that is written in Python."""
    import logging

    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")
    run, description = _VERBS[verb]
    try:
        code = _outcome(run, _Parser(prog=f"tensorcask {verb}", description=description), words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe. Without this, Python would fail when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _outcome(run: _Verb, parser: _Parser, words: list[str]) -> int:
    try:
        report, line = run(parser, words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except (_native.Error, OSError, ValueError, ImportError, *_OF_TORCH) as error:
        kind, code = next(((kind, code) for found, kind, code in _KINDS if isinstance(error, found)), ("invalid_argument", 1))
        message = str(error)
        if isinstance(error, ImportError) and error.name == "torch":
            message = "this format needs PyTorch: pip install 'tensorcask[torch]'"
        if isinstance(error, UnstorableTypeError):
            message += ". To leave such values out, add --on-unsupported skip"
        if parser.json:
            _print_json_error(getattr(error, "kind", kind), message)
        sys.stderr.write(f"error: {_printable(message)}\n")
        return code
    print(json.dumps(report) if parser.json else _printable(line))
    return _IN_PART if report.get("left_out") else 0


def _print_json_error(kind: str, message: str) -> None:
    print(json.dumps({"error": {"kind": kind, "message": message, "object": None, "tensor": None, "clause": None}}))


def _printable(text: str) -> str:
    """Returns text with the control characters of terminals escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _open_standard_files() -> None:
    """Opens /dev/null for each closed one of stdin, stdout and stderr. Otherwise a cask could be opened under that number, and
    text could be printed into the cask."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    sys.exit(main())
