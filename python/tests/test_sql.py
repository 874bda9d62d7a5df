"""SQL over a store: its tables, damage, errors, the command. On S3 with a server: see test_sources.py."""

import json
import logging
import math
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import duckdb
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorcask
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SETTINGS = ("AWS_ENDPOINT", "AWS_REGION", "AWS_ALLOW_HTTP", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
TABLES = ("snapshots", "tensors", "chunks", "stats", "log")
on_s3 = pytest.mark.skipif("AWS_ENDPOINT" not in os.environ, reason="needs an S3 server: tests/servers/run")


def command(*words, code=0, **options):
    ended = subprocess.run([sys.executable, "-m", "tensorcask", "sql", *map(str, words)], capture_output=True, text=True, **options)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


def state_of(step):
    """A large tensor that changes, one that does not, and a tied one. Too large to lie in a log entry."""
    fixed = np.arange(30_000, dtype=np.float32)
    moving = np.random.default_rng(step).random(30_000, dtype=np.float32)
    return {"model": {"layers.3.w": moving, "embed": fixed, "tied": fixed}, "exp_avg": {"layers.3.w": moving * 2}}


def saved(url, steps=(10, 20, 30), **options):
    store = tensorcask.Store(url)
    for step in steps:
        store.save(state_of(step), step=step, **{"policy": "consecutive", "statistics": True, "user": {"loss": 1 / step}} | options)
    return store


def check_tables(store):
    """What every table says about the store of `saved`."""
    rows = store.sql("select step, kind, status, parent_step, pinned, user.loss from snapshots").fetchall()
    assert rows == [(10, "base", "live", None, False, 0.1), (20, "delta", "live", 10, False, 0.05), (30, "delta", "live", 20, False, 1 / 30)]
    infos = store.snapshots()
    assert store.sql("select tensor_bytes, stored_bytes from snapshots").fetchall() == [(info.tensor_bytes, info.stored_bytes) for info in infos]
    saves = store.sql("select encode_ms > 0, upload_ms >= 0, save_ms >= encode_ms + upload_ms, stall_ms from snapshots order by step").fetchall()
    # The next save records the upload of small casks, and how long the whole save took.
    assert saves == [(True, True, True, None)] * 2 + [(True, None, None, None)]
    times = store.sql("select epoch_ms(time) from snapshots").fetchall()
    assert [time for (time,) in times] == [info.time_ms for info in infos]

    rows = store.sql("select tensor, layer, role, dtype, shape, bytes, alias_of from tensors where step = 20 order by tensor").fetchall()
    assert rows == [
        ("exp_avg.layers.3.w", "exp_avg.layers.3", "exp_avg", "f32", [30_000], 120_000, None),
        ("model.embed", None, "model", "f32", [30_000], 120_000, None),
        ("model.layers.3.w", "model.layers.3", "model", "f32", [30_000], 120_000, None),
        ("model.tied", None, "model", "f32", [30_000], 0, "model.embed"),
    ]
    assert store.sql("select sum(bytes) from tensors group by step").fetchall() == [(360_000,)] * 3

    assert store.sql("select distinct kind, codec from chunks where step = 20 and tensor = 'model.embed'").fetchall() == [("unchanged", None)]
    assert store.sql("select distinct kind from chunks where step = 10").fetchall() == [("absolute",)]
    sums = "select step, tensor, sum(bytes), sum(stored_bytes) from {} where alias_of is null group by all order by all"
    chunks = store.sql(sums.format("chunks").replace("alias_of is null", "true")).fetchall()
    assert chunks == store.sql(sums.format("tensors")).fetchall() and len(chunks) == 9

    assert store.sql("select step, sum(changed) from stats where tensor = 'model.embed' group by step order by step").fetchall()[1:] == [(20, 0), (30, 0)]
    joined = "select count(*) from stats join chunks using (step, tensor, shard_offset, shard_shape, chunk)"
    assert store.sql(joined).fetchall() == store.sql("select count(*) from stats").fetchall() == [(9,)]

    rows = store.sql("select sequence, kind, what, steps from log").fetchall()
    assert rows == [
        (1, "opened", f"opened for writing by process {os.getpid()} on {socket.gethostname()}", []),
        (2, "added", "step 10, a base", [10]),
        (3, "added", "step 20, a delta on step 10", [20]),
        (4, "added", "step 30, a delta on step 20", [30]),
    ]


def test_tables_on_disk(url):
    check_tables(saved(url))


@on_s3
def test_tables_on_s3_with_the_settings_of_the_store(monkeypatch):
    url = f"{os.environ['TENSORCASK_TEST_STORE']}/sql/{uuid.uuid4().hex}"
    keys = {name.lower(): os.environ[name] for name in SETTINGS if name in os.environ}
    saved(url)
    assert command(url, "select count(*) as steps from snapshots", "--csv").stdout == "steps\n3\n"
    # Nothing comes from the environment.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    check_tables(tensorcask.Store(url, keys))


def test_results_are_those_of_duckdb(memory):
    store = saved(memory)
    found = store.sql("select step, count(*) as tensors from stats group by step order by step")
    assert found.columns == ["step", "tensors"] and found.filter("step > 10").fetchall() == [(20, 3), (30, 3)]
    assert pyarrow.table(found).to_pydict() == {"step": [10, 20, 30], "tensors": [3, 3, 3]}
    assert store.sql("select step from snapshots where step > $least", {"least": 10}).fetchall() == [(20,), (30,)]
    assert store.sql("select distinct step from stats", steps=[20]).fetchall() == [(20,)]
    with pytest.raises(tensorcask.NotFoundError, match="no step 25"):
        store.sql("select * from stats", steps=[25])
    for query in ("describe stats", "summarize stats", "from stats", "pivot stats on step using count(*)", "select 1; select * from STATS"):
        assert store.sql(query).fetchall(), query
    with_filter = "with best as (select step from snapshots order by user.loss limit 1) select count(*) from tensors where step in (from best)"
    assert store.sql(with_filter).fetchall() == [(4,)]


def test_only_named_tables_are_read(url):
    saved(url)
    asked = {}
    for query in ("select 1", "select log(10) as stats from snapshots", "select * from stats", "select * from chunks, log"):
        opened = tensorcask.Store(url)
        opened.sql(query)
        asked[query] = opened.native().io()[0]
    assert asked["select 1"] == 0 and asked["select log(10) as stats from snapshots"] < asked["select * from stats"]


def test_no_tensor_bytes_are_read(url):
    # Small casks are read as a whole, with their indexes.
    tensorcask.save({"w": np.random.default_rng(1).random(4_000_000, np.float32)}, url, step=1, statistics=True)
    store = tensorcask.Store(url)
    for table in TABLES:
        store.sql(f"select * from {table}")
    assert store.native().io()[1] < 1_000_000 < store.snapshots()[0].stored_bytes


def test_a_store_without_statistics(memory):
    store = saved(memory, statistics=False, user=None)
    assert store.sql("select * from stats").fetchall() == []
    assert store.sql("select count(*) from tensors").fetchall() == [(12,)]
    assert store.sql('select "user" from snapshots').fetchall() == [(None,)] * 3


def test_a_store_without_steps(memory):
    store = saved(memory, steps=(1,))
    store.forget([1])
    assert store.sql("select step, status from snapshots").fetchall() == [(1, "forgotten")]
    for table in ("tensors", "chunks", "stats"):
        assert store.sql(f"select * from {table}").fetchall() == [], table


@pytest.mark.parametrize("table", TABLES)
def test_no_store(url, table):
    with pytest.raises(tensorcask.NotFoundError):
        tensorcask.Store(url).sql(f"select * from {table}")
    assert not Path(url).exists()


def damage(url, folder, step):
    """Damages the objects of a step: all that the saves of other steps did not write."""
    known = set()
    store = tensorcask.Store(url)
    for at in (10, 20, 30):
        store.save(state_of(at), step=at, policy="full", statistics=True)
        paths = set(Path(url, folder).iterdir()) - known
        known |= paths
        if at == step:
            for path in paths:
                path.write_bytes(path.read_bytes()[:-7] + b"damaged")
    return tensorcask.Store(url)


@pytest.mark.parametrize(("folder", "tables"), [("casks", ("tensors", "chunks", "stats")), ("snapshots", ("tensors", "chunks", "stats", "snapshots"))])
def test_a_damaged_step_is_left_out_with_a_warning(url, folder, tables, caplog):
    store = damage(url, folder, 20)
    for table in tables:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tensorcask"):
            assert store.sql(f"select distinct step from {table} order by step").fetchall() == [(10,), (30,)], table
        assert any("left out" in line and "step=20" in line for line in caplog.messages), caplog.messages
    caplog.clear()
    assert {row["step"] for row in pyarrow.table(store.stats()).to_pylist()} == {10, 30}
    assert any("left out" in line and "step=20" in line for line in caplog.messages), caplog.messages
    with pytest.raises(tensorcask.CorruptionError):
        store.stats(step=20)
    ended = command(url, "select distinct step from stats order by step", "--csv")
    assert ended.stdout == "step\n10\n30\n" and "step=20" in ended.stderr


HOSTILE = ["a'b\"; drop table stats; --", "\x1b[31mred\n\r\t.7.w", "../../x", "%s{0}$1", "ü\U0001f600\u202e.12", "0", "1.2.3", "w1.x", ".5"]


def test_types_of_facts(memory):
    store = tensorcask.Store(memory)
    nan = float("nan")
    for step, facts in enumerate([{"loss": 1, "ok": True, "mixed": 1, "note": "nan"}, {"loss": nan, "mixed": True}, {"loss": -float("inf"), "note": "b"}]):
        store.save({"w": np.ones(2, np.float32)}, step=step, user=facts)
    assert store.sql("select step from snapshots where isnan(user.loss) or isinf(user.loss)").fetchall() == [(1,), (2,)]
    assert store.sql("select user.ok, user.mixed, user.note from snapshots").fetchall() == [(True, "1", "nan"), (None, "true", None), (None, None, "b")]


def test_facts_keep_their_types_in_the_catalog(memory):
    store = tensorcask.Store(memory)
    big = 2**64 - 1
    facts = [
        {"loss": np.float64("nan"), "big": np.uint64(big), "small": np.int64(-(2**63)), "f4": np.float32("inf"), "ok": np.bool_(True), "none": None},
        {"loss": 10.5, "big": big - 1, "small": 1, "f4": -float("inf"), "ok": False, "note": np.str_("x")},
        {"loss": torch.tensor(9.0), "big": 0, "small": 2, "f4": np.float16(0.5), "none": None},
    ]
    for step, user in enumerate(facts):
        store.save({"w": np.ones(2, np.float32)}, step=step, user=user)
    table = pyarrow.table(store.catalog())
    types = {name: str(table[f"user.{name}"].type) for name in ("loss", "big", "small", "f4", "ok", "note", "none")}
    assert types == {"loss": "double", "big": "uint64", "small": "int64", "f4": "double", "ok": "bool", "note": "string", "none": "double"}
    assert table["user.big"].to_pylist() == [big, big - 1, 0] and table["user.small"].to_pylist() == [-(2**63), 1, 2]
    assert math.isnan(table["user.loss"][0].as_py()) and table["user.f4"].to_pylist() == [math.inf, -math.inf, 0.5]
    assert store.sql("select max(user.loss) filter (not isnan(user.loss)), max(user.big) from snapshots").fetchall() == [(10.5, big)]
    assert store.sql("select step from snapshots where user.loss > 10 and not isnan(user.loss)").fetchall() == [(1,)]


def test_facts_that_have_no_type_are_refused_by_name(memory):
    store = tensorcask.Store(memory)
    for user, name in [({"a": {"b": 10**400}}, r"user\['a'\]\['b'\]"), ({"n": 2**64}, r"user\['n'\]"), ({"n": [-(2**63) - 1]}, r"user\['n'\]\[0\]")]:
        with pytest.raises(ValueError, match=name):
            store.save({"w": np.ones(2, np.float32)}, step=1, user=user)


def test_others_read_a_catalog_with_nan(tmp_path):
    store = tensorcask.Store(tmp_path / "run")
    for step in range(1, 33):
        for run in (0, 1):
            store.save({"w": np.full(2, step, np.float32)}, step=2 * step + run, user={"loss": float("nan") if step % 4 == 0 else float(step)})
    [file] = (tmp_path / "run" / "catalog").glob("*.parquet")
    rows = pyarrow.parquet.read_table(file)["user.loss"].to_pylist()
    count = sum(math.isnan(row) for row in rows)
    assert 0 < count < len(rows)
    # DuckDB believes the extremes of a file, which leave NaN out.
    query = f"""select count(*) from '{file}' where isnan("user.loss")"""
    assert duckdb.sql(query).fetchall() == [(count,)]
    metadata = pyarrow.parquet.ParquetFile(file).metadata
    columns = [metadata.row_group(0).column(at) for at in range(metadata.num_columns)]
    # fastparquet cannot read an empty dictionary.
    assert {column.path_in_schema for column in columns if not column.has_dictionary_page} >= {"roles"}


def test_hostile_names(url):
    store = tensorcask.Store(url)
    facts = {"loss": 1, "LOSS": 2, 'a"b': 3, "": 4, "x.y": "text", "step": 5}
    store.save({name: np.full(3, at, np.float32) for at, name in enumerate(HOSTILE)}, step=1, statistics=True, user=facts)
    for table in ("tensors", "chunks", "stats"):
        assert {name for (name,) in store.sql(f"select tensor from {table}").fetchall()} == set(HOSTILE)
    layers = dict(store.sql("select tensor, layer from stats where layer is not null").fetchall())
    assert layers == {"\x1b[31mred\n\r\t.7.w": "\x1b[31mred\n\r\t.7", "ü\U0001f600\u202e.12": "ü\U0001f600\u202e.12", "0": "0", "1.2.3": "1.2.3", ".5": ".5"}
    [(user, text)] = store.sql('select "user", user_json from snapshots').fetchall()
    assert user["LOSS"] == 2 and "loss" not in user, "SQL cannot tell them apart"
    assert user['a"b'] == 3 and user["x.y"] == "text" and json.loads(text)["loss"] == 1
    shown = command(url, "select tensor from stats").stdout
    assert "\x1b" not in shown and "red" in shown
    assert "\x1b" not in command(url, "select tensor from stats", "--csv").stdout
    rows = json.loads(command(url, "select tensor from stats", "--json").stdout)["rows"]
    assert {name for (name,) in rows} == set(HOSTILE)


def test_errors_say_what_to_do(memory, monkeypatch):
    store = saved(memory)
    with pytest.raises(tensorcask.InvalidArgumentError, match="statistics does not exist.*snapshots, tensors, chunks, stats, log"):
        store.sql("select * from statistics")
    with pytest.raises(duckdb.BinderException, match="nana"):
        store.sql("select nana from stats")
    with pytest.raises(duckdb.ParserException):
        store.sql("select (")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ImportError, match=r"pip install 'tensorcask\[sql\]'"):
        store.sql("select * from stats")


def test_a_query_can_change_nothing(url, tmp_path):
    store = saved(url)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    entry = sorted(Path(url, "log").iterdir())[-1]
    for query in (
        f"copy (select 1) to '{entry}'",
        f"copy (select 1) to '{tmp_path}/new.csv'",
        f"attach '{tmp_path}/new.db'",
        f"export database '{tmp_path}/new'",
        f"select * from read_text('{entry}')",
        "set enable_external_access = true",
        "install httpfs",
    ):
        with pytest.raises(duckdb.Error):
            store.sql(query)
    with pytest.raises(duckdb.Error):
        store.sql("select * from stats").write_parquet(str(tmp_path / "new.parquet"))
    # Changes only the database of this query.
    store.sql("delete from stats; drop table snapshots; select 1", steps=[10])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert store.sql("select count(*) from stats").fetchall() == [(9,)] and store.verify().is_clean


def test_the_command(url):
    saved(url)
    query = "select step, tensor, nan, 0.1 / 0 as infinite, null as nothing from stats where step = 10 order by tensor limit 1"
    shown = command(url, query).stdout
    assert "│     10 │ exp_avg.layers.3.w │" in shown and shown.count("\n") == 6
    assert command(url, "-", "--csv", input=query).stdout == "step,tensor,nan,infinite,nothing\n10,exp_avg.layers.3.w,0,inf,\n"
    told = json.loads(command(url, query, "--json").stdout)
    assert told == {"store": url, "columns": ["step", "tensor", "nan", "infinite", "nothing"], "rows": [[10, "exp_avg.layers.3.w", 0, "inf", None]]}
    assert json.loads(command(url, "select time, user from snapshots", "--json").stdout)["rows"][0][1] == {"loss": 0.1}
    assert command(url, "select distinct step from chunks order by step", "--csv", "--step", 10, "--step", 30).stdout == "step\n10\n30\n"
    assert "the tables of a store are snapshots" in command(url, "select * from nothing", code=1).stderr.lower()
    assert json.loads(command(url, "select (", "--json", code=1).stdout)["error"]["kind"] == "invalid_argument"
    assert "no store" in command(url + "-not", "from log", code=10).stderr
    assert command(url, code=2).stderr.startswith("usage: tensorcask sql")
    long = command(url, "select range as number from range(2000)").stdout
    assert long.count("│") == 2 * 2002 and "1999" in long


@pytest.mark.parametrize("step", [1000, 1001, 2400])
def test_statistics_equal_those_of_numpy(step, memory):
    """Tensors of real training: counts and extremes exactly, sums to 1e-12."""
    state = load_file(ROOT / "tests" / "data" / f"step-{step}.safetensors")
    store = tensorcask.Store(memory)
    store.save(state, step=step, statistics=True)
    query = """
        select tensor, sum(nan), sum(positive_infinity), sum(negative_infinity), sum(zero), sum(subnormal), sum(elements), min(min), max(max),
            sum(sum), sum(sum_squares) from stats group by tensor"""
    rows = store.sql(query).fetchall()
    assert sorted(row[0] for row in rows) == sorted(state)
    for tensor, *counts, least, greatest, total, squares in rows:
        values = state[tensor].float().numpy()
        finite = values[np.isfinite(values)].astype(np.float64)
        subnormal = (values != 0) & (np.abs(values) < np.finfo(np.float32).tiny)
        kinds = (np.isnan(values), values == np.inf, values == -np.inf, values == 0, subnormal, np.ones_like(values))
        assert counts == [int(kind.sum()) for kind in kinds], tensor
        assert (least, greatest) == (finite.min(), finite.max()), tensor
        assert total == pytest.approx(finite.sum(), rel=1e-12), tensor
        assert squares == pytest.approx((finite**2).sum(), rel=1e-12), tensor
