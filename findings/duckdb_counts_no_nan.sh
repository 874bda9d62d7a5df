#!/usr/bin/env bash
# DuckDB 2.0.1 counts no NaN in a Parquet column whose statistics leave NaN out.
#
# The Parquet format tells writers to leave NaN out of the minimum and maximum of a column, and readers not to conclude from
# them that there is no NaN. pyarrow 26.0.1 writes [NaN, 0.1, 0.2] with the statistics 0.1 to 0.2. DuckDB orders NaN above all
# numbers, but takes 0.2 for the greatest value of the column:
#
#     count(*) where isnan(x)    0, and there is 1
#     count(*) where x > 1.0     0, and NaN is above 1.0 in the order of DuckDB
#     count(*) where x < 1.0     3, and 2 are below 1.0
#
# The same rows in a table of DuckDB, or with disabled_optimizers='statistics_propagation,filter_pushdown', give 1, 1 and 2.
# So tensorcask keeps numbers of NaN in a column of their own.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" duckdb==2.0.1 pyarrow==26.0.1 <<'PYTHON'
import math

import duckdb
import pyarrow
import pyarrow.parquet

pyarrow.parquet.write_table(pyarrow.table({"x": [math.nan, 0.1, 0.2]}), "x.parquet")
statistics = pyarrow.parquet.read_metadata("x.parquet").row_group(0).column(0).statistics
print("statistics:", statistics.min, statistics.max)


def counts(source):
    return [duckdb.sql(f"select count(*) from {source} where {where}").fetchall()[0][0] for where in ("isnan(x)", "x > 1.0", "x < 1.0")]


duckdb.sql("create table x as select * from (values ('NaN'::double), (0.1), (0.2)) rows(x)")
of_table, of_file = counts("x"), counts("'x.parquet'")
duckdb.sql("set disabled_optimizers = 'statistics_propagation,filter_pushdown'")
of_file_without = counts("'x.parquet'")
print("isnan(x), x > 1.0, x < 1.0:", f"table {of_table}, file {of_file}, file without these optimizers {of_file_without}")
assert (of_table, of_file, of_file_without) == ([1, 1, 2], [0, 0, 3], [1, 1, 2])
PYTHON
