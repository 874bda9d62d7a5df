"""Makes the catalogs of the cases `catalog/*`, with pyarrow, from the logs of `catalog/none` and
`catalog/led-none`. They are made once and kept.

    conformance/reference/.venv/bin/python conformance/catalogs.py
"""

import io
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "reference"))

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from forged_pages import forged  # noqa: E402
from tensorcask_reference.log import State, apply_entry  # noqa: E402
from tensorcask_reference.sealed import unseal  # noqa: E402

CASES = HERE / "cases" / "valid" / "catalog"
OUT = HERE / "src" / "generate" / "vectors" / "catalogs"
TYPES = {
    "sequence": pa.uint64(), "revision": pa.uint64(), "step": pa.uint64(), "snapshot": pa.string(), "kind": pa.string(), "parent": pa.string(),
    "manifest": pa.string(), "status": pa.string(), "pinned": pa.bool_(), "roles": pa.string(), "tensor_bytes": pa.uint64(),
    "stored_bytes": pa.uint64(), "ratio": pa.float64(), "time_ms": pa.uint64(), "user": pa.string(),
}  # fmt: skip


def catalog(sequence, case="none"):
    """Keys and rows of the catalog of an entry (log 6.3, 6.5)."""
    store, state = CASES / case / "input", State()
    while state.sequence < sequence:
        apply_entry(store, state)
    rows = []
    for record in state.snapshots.values():
        # Manifests of earlier revisions are there too.
        manifest, _ = unseal((store / "snapshots" / record.manifest_name()).read_bytes(), "tensorcask-snapshot")
        stored = sum(cask["bytes"] for cask in manifest["casks"])
        rows.append(
            {
                "sequence": record.sequence, "revision": record.revision, "step": record.step, "snapshot": record.id,
                "kind": "base" if record.parent is None else "delta", "parent": record.parent, "manifest": record.manifest,
                "status": record.status, "pinned": record.pinned, "roles": record.roles and json.dumps(record.roles),
                "tensor_bytes": manifest["tensor_bytes"], "stored_bytes": stored, "ratio": stored / max(manifest["tensor_bytes"], 1),
                "time_ms": record.time_ms, "user": json.dumps(manifest["user"]),
            }
        )  # fmt: skip
    said = {"writer": state.writer, "writer_sequence": state.writer_sequence}
    said |= {name: sorted(getattr(state, name)) for name in ("must_understand", "may_ignore")}
    keys = {"sequence": str(sequence), "entry": state.digest, "state": json.dumps(said)}
    return keys | ({"leadership": json.dumps(state.leadership)} if state.leadership else {}), rows


def table(keys, rows, types=TYPES):
    users = [json.loads(row["user"] or "{}") for row in rows]
    columns = {name: pa.array([row[name] for row in rows], type) for name, type in types.items()}
    for key in sorted({key for user in users for key in user}):
        values = [user[key] for user in users if key in user]
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            integers = all(isinstance(value, int) for value in values)
            columns[f"user.{key}"] = pa.array([user.get(key) for user in users], pa.int64() if integers else pa.float64())
        else:
            texts = all(isinstance(value, str) for value in values)
            shown = [user.get(key) if texts or key not in user else json.dumps(user[key]) for user in users]
            columns[f"user.{key}"] = pa.array(shown, pa.string())
    metadata = {f"tensorcask.{key}": value for key, value in keys.items()}
    return pa.table(columns).replace_schema_metadata(metadata)


def write(name, made, **options):
    out = io.BytesIO()
    pq.write_table(made, out, **{"compression": "snappy", **options})
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.parquet").write_bytes(out.getvalue())
    print(name, len(out.getvalue()))


def main():
    keys, rows = catalog(9)
    write("newest", table(keys, rows))
    older_keys, older = catalog(5)
    write("older", table(older_keys, older))
    more = table(keys | {"directory": "0" * 64, "another": "key"}, rows)
    more = more.append_column("another", pa.array(range(len(rows)), pa.int32())).select(sorted(more.column_names + ["another"]))
    write("other-forms", more, compression="none", row_group_size=2, use_dictionary=False, data_page_version="2.0", version="2.6")
    write("wrong-type", table(keys, rows, TYPES | {"step": pa.int64()}))
    write("null-status", table(keys, [row | {"status": None} for row in rows]))
    write("missing-column", table(keys, rows).drop_columns(["pinned"]))
    write("wrong-entry", table(keys | {"entry": "ab" * 32}, rows))
    forgotten = next(row for row in rows if row["status"] == "forgotten")
    write("wrong-status", table(keys, [row | {"status": "live"} if row is forgotten else row for row in rows]))
    write("wrong-roles", table(keys, [row | {"roles": None} for row in rows]))
    write("wrong-writer", table(keys | {"state": json.dumps(json.loads(keys["state"]) | {"writer": "ee" * 16})}, rows))
    write("missing-row", table(keys, rows[:-1]))
    write("circle", table(keys, [row | {"parent": row["snapshot"]} if row["parent"] else row for row in rows]))
    (OUT / "pages-of-gigabytes.parquet").write_bytes(forged(table(keys, rows)))
    write("of-another-entry", table(older_keys | {"sequence": "6"}, older))
    led, rows = catalog(7, "led-none")
    leadership = json.loads(led["leadership"])
    write("led", table(led, rows))
    write("led-no-more", table(*catalog(11, "led-none")))
    write("led-unknown-field", table(led | {"leadership": json.dumps(leadership | {"another": 1})}, rows))
    write("led-wrong-newest", table(led | {"leadership": json.dumps(leadership | {"newest": 30})}, rows))
    write("led-absent", table({key: value for key, value in led.items() if key != "leadership"}, rows))


main()
