"""SQL over the tables of a store, by DuckDB.

A query runs in a database in memory that has the tables of the store. Only tables that the query names are read. The
database cannot open files, so a query cannot change the store, or anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import InvalidValueError

if TYPE_CHECKING:
    import duckdb
    import pyarrow

_INSTALL = "SQL needs DuckDB and pyarrow: pip install 'tensorcask[sql]'"

# The longest part of a name that ends in a number, up to a dot or to the end.
_LAYER = r"nullif(regexp_extract(tensor, '^((?:.*\.)?[0-9]+)(?:\.|$)', 1, 's'), '')"
_WITH_LAYER = f"select step, tensor, {_LAYER} as layer, * exclude (step, tensor) from loaded"
# No time for a forged number beyond the year 9999.
_TIME = "case when {0}.time_ms < 253402300800000 then epoch_ms({0}.time_ms::bigint) end as time"
_SNAPSHOTS = f"""
    select one.step, one.kind, one.status, {_TIME.format("one")}, one.tensor_bytes, one.stored_bytes, parent.step as parent_step,
        one.stall_ms, one.encode_ms, one.upload_ms, one.save_ms, one.pinned, one."user", one.roles, one.sequence, one.snapshot, one.user_json
    from loaded as one left join loaded as parent on parent.snapshot = one.parent order by one.sequence"""
_LOG = f"select sequence, {_TIME.format('loaded')}, kind, what, steps, writer from loaded order by sequence"


def run(
    store: _native.Store, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None, steps: Sequence[int] | None
) -> duckdb.DuckDBPyRelation:
    """Runs a query over the tables of a store."""
    try:
        import duckdb
        import pyarrow
    except ImportError as error:
        raise ImportError(_INSTALL, name=error.name) from error
    database = duckdb.connect()
    for name in sorted(_tables_in(database, query)):
        load, definition = _TABLES[name]
        database.register("loaded", load(pyarrow, store, steps))
        database.execute(f"create table {name} as {definition}")
        database.unregister("loaded")
    database.execute("set enable_external_access = false")
    database.execute("set lock_configuration = true")
    try:
        found = database.sql(query, params=parameters)
    except duckdb.CatalogException as error:
        line = str(error).splitlines()[0].removeprefix("Catalog Error: ")
        if not line.startswith("Table"):
            raise
        raise InvalidValueError(f"{line} The tables of a store are {', '.join(_TABLES)}") from None
    if found is None:
        raise InvalidValueError("the statement is not a query: begin it with select, from, with, describe or summarize")
    return found


def _tables_in(database: duckdb.DuckDBPyConnection, query: str) -> set[str]:
    """Returns the tables of a store that a query names."""
    import duckdb

    try:
        names = database.get_table_names(query)
    except duckdb.Error:
        # Several statements, a pivot, or an error that the query itself will show. A name too many costs only time.
        names = set(re.findall(r"\w+", query))
    return {name.lower() for name in names} & set(_TABLES)


def _snapshots(arrow: Any, store: _native.Store, _: Sequence[int] | None) -> pyarrow.Table:
    """Returns the catalog, with the facts of users as one column of structs."""
    table = arrow.table(store.catalog())
    facts: dict[str, Any] = {}
    for column in table.column_names:
        name = column.removeprefix("user.")
        # Facts of the library are in the JSON only, and so are names that SQL cannot tell apart.
        if name != column and name and not name.startswith("tc.") and name.lower() not in {other.lower() for other in facts}:
            facts[name] = table[column].combine_chunks()
    user = arrow.StructArray.from_arrays(list(facts.values()), list(facts)) if facts else arrow.nulls(len(table))
    columns = [name for name in table.column_names if name != "user" and not name.startswith("user.")]
    found = table.select(columns).append_column("user", user).append_column("user_json", table["user"])
    for name, times in _times_of_saves(table).items():
        found = found.append_column(name, arrow.array(times, arrow.float64()))
    return found


def _times_of_saves(table: Any) -> dict[str, list[float | None]]:
    """Returns the times of the save of each row. Of replaced snapshots, only those of the newest one are known."""
    steps, sequences = table["step"].to_pylist(), table["sequence"].to_pylist()
    order = sorted(range(len(steps)), key=lambda row: sequences[row])
    users = table["user"].to_pylist()
    known = _native.times_of_saves([(steps[row], users[row]) for row in order])
    newest = {steps[row]: row for row in order}
    rows = [known.get(step) if newest[step] == row else None for row, step in enumerate(steps)]
    return {name: [None if times is None else times[at] for times in rows] for at, name in enumerate(_TIMES)}


_TIMES = ("stall_ms", "encode_ms", "upload_ms", "save_ms")
_Load = Callable[[Any, _native.Store, Sequence[int] | None], "pyarrow.Table"]
_TABLES: dict[str, tuple[_Load, str]] = {
    "snapshots": (_snapshots, _SNAPSHOTS),
    "tensors": (lambda arrow, store, steps: arrow.table(store.tensors(steps)), _WITH_LAYER),
    "chunks": (lambda arrow, store, steps: arrow.table(store.chunks(steps)), _WITH_LAYER),
    "stats": (lambda arrow, store, steps: arrow.table(store.stats(steps)), _WITH_LAYER),
    "log": (lambda arrow, store, _: arrow.table(store.log()), _LOG),
}
