#!/usr/bin/env bash
# fastparquet 2026.9.0 cannot read a column of nulls only if it is not compressed and has a dictionary.
#
# The dictionary of such a column is empty, so without compression its page has 0 bytes. pyarrow 26.0.1 and the Rust library
# parquet (here in datafusion 55.0.0) write such files. fastparquet stops with "TypeError: an integer is required" and reads no
# column of the file, unless the caller leaves this one out. Without a dictionary, or with compression, it reads the nulls.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" fastparquet==2026.9.0 pyarrow==26.0.1 datafusion==55.0.0 <<'PYTHON'
import datafusion
import fastparquet
import pyarrow
import pyarrow.parquet

table = pyarrow.table({"note": pyarrow.array([None, None], pyarrow.string()), "step": [1, 2]})
pyarrow.parquet.write_table(table, "pyarrow.parquet", compression="none")
datafusion.SessionContext().from_arrow(table).write_parquet("datafusion.parquet", compression="uncompressed")
pyarrow.parquet.write_table(table, "no dictionary.parquet", compression="none", use_dictionary=False)
pyarrow.parquet.write_table(table, "compressed.parquet", compression="snappy")


def read(name, columns=None):
    try:
        return len(fastparquet.ParquetFile(f"{name}.parquet").to_pandas(columns))
    except TypeError as error:
        return str(error)


for name, wanted in (("pyarrow", "an integer is required"), ("datafusion", "an integer is required"), ("no dictionary", 2), ("compressed", 2)):
    found = read(name), read(name, ["step"])
    print(f"{name}: rows of all columns: {found[0]}; rows of `step` alone: {found[1]}")
    assert found == (wanted, 2)
PYTHON
