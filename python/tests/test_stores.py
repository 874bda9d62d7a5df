"""Stores on disk: deltas, errors, damage, other processes."""

import http.server
import json
import logging
import math
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import tensorcask
import torch

KINDS = Path(__file__).parents[2] / "src" / "error.rs"


def in_process(code, *arguments):
    """Runs code in another Python; what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_loop_saves_deltas(url):
    w = torch.randn(400, 300)
    kinds = []
    for step in range(4):
        w[step] += 1
        saved = tensorcask.save({"w": w, "step": step}, url, step=step, policy="intermittent:3", user={"loss": 1 / (step + 1), "worst": math.nan})
        kinds.append(saved.kind)
    assert kinds == ["base", "delta", "delta", "base"]
    infos = tensorcask.Store(url).snapshots()
    assert [info.kind for info in infos] == kinds and infos[1].stored_bytes < infos[0].stored_bytes / 10
    why = {"reason": "policy", "since_base": 1, "estimate": None}
    times = infos[1].user.pop("tc.times")
    assert times["previous"]["step"] == 0 and times["previous"]["save_ms"] > 0 and times["encode_ms"] > 0
    assert infos[1].parent == infos[0].id and infos[1].user == {"loss": 0.5, "worst": "nan", "tc.policy": why}
    snapshot = tensorcask.Store(url).snapshot(1)
    assert snapshot.user["loss"] == 0.5 and [link[:2] for link in snapshot.chain] == [(1, "delta"), (0, "base")]
    assert snapshot.structure()[0] == {"w": snapshot.tensors()["w"], "step": 1}


def test_the_default_policy_bounds_a_restore(url):
    rng = np.random.default_rng(3)
    state = {f"w{number}": rng.integers(0, 256, 1 << 17, dtype=np.uint8) for number in range(10)}
    store, states, saves = tensorcask.Store(url), [], []
    for step in range(10):
        states.append(dict(state))
        saves.append(store.save(state, step=step))
        for number in range(4):
            state[f"w{(number + 4 * step) % 10}"] = rng.integers(0, 256, 1 << 17, dtype=np.uint8)
    # A base and four deltas of 0.4 take 2.6 bases; a fifth one would not fit into three.
    assert [saved.kind for saved in saves] == ["base", "delta", "delta", "delta", "delta"] * 2
    assert [saved.reason for saved in saves] == ["first", *["small_delta"] * 4, "large_chain", *["small_delta"] * 4]
    infos = store.snapshots()
    assert all(infos[step].parent == infos[step - 1].id for step in range(10) if step % 5)
    for step, expected in enumerate(states):
        found = tensorcask.load(url, step=step)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_statistics_are_those_of_numpy_and_find_a_nan(url):
    store = tensorcask.Store(url)
    random = np.random.default_rng(7)
    tensors = {
        "w": random.standard_normal((300, 1000), dtype=np.float32),
        "h": (random.standard_normal(5000) * 1e-6).astype(np.float16),
        "d": random.standard_normal(999) * 1e-3,
    }
    tensors["w"][3, :10] = 0
    store.save(tensors, step=1, statistics=True)
    tensors["w"][299, 999] = np.nan
    store.save(tensors, step=2, statistics=True, policy="consecutive")
    rows = pyarrow.table(store.stats()).to_pylist()
    assert len(rows) == len(store.stats()) == 8 and {row["step"] for row in rows} == {1, 2}
    assert [(row["step"], row["tensor"], row["chunk"]) for row in rows if row["nan"]] == [(2, "w", 1)]
    for name, array in tensors.items():
        of_tensor = [row for row in rows if row["step"] == 2 and row["tensor"] == name]
        finite = array[np.isfinite(array)].astype(np.float64)
        least = np.finfo(array.dtype).smallest_normal
        total = {key: sum(row[key] for row in of_tensor) for key in ("elements", "nan", "zero", "subnormal", "sum", "sum_squares")}
        assert total["elements"] == array.size and total["nan"] == np.isnan(array).sum() and total["zero"] == (array == 0).sum()
        assert total["subnormal"] == ((finite != 0) & (abs(finite) < least)).sum()
        assert min(row["min"] for row in of_tensor) == finite.min() and max(row["max"] for row in of_tensor) == finite.max()
        assert abs(total["sum"] - finite.sum()) <= 1e-12 * abs(finite).sum()
        assert abs(total["sum_squares"] - (finite**2).sum()) <= 1e-12 * (finite**2).sum()
    changed = {row["tensor"]: row["changed"] for row in rows if row["step"] == 2 and row["chunk"] == 0}
    assert changed == {"w": 0, "h": 0, "d": 0}
    assert len(store.stats(step=1)) == len(store.stats(step="latest")) == 4 and "nan" in store.stats().column_names


def test_the_catalog_is_arrow(url):
    store = tensorcask.Store(url)
    for step in (5, 6):
        store.save({"w": torch.ones(4)}, step=step, user={"loss": float(step)})
    table = pyarrow.table(store.catalog())
    assert table["step"].to_pylist() == [5, 6] and table["user.loss"].to_pylist() == [5.0, 6.0]
    assert len(store.catalog()) == 2 and "kind" in store.catalog().column_names
    assert pyarrow.table(store.catalog()).equals(table)
    del table


def test_errors_mirror_the_kinds_of_the_library(url):
    kinds = re.search(r"pub enum ErrorKind \{(.*?)\n\}", KINDS.read_text(), re.S)[1]
    names = [line.strip(" ,") for line in kinds.splitlines() if re.fullmatch(r"\s+\w+,", line)]
    rename = {"Corrupt": "CorruptionError", "Storage": "StorageError"}
    classes = [getattr(tensorcask, rename.get(name, name.removesuffix("Error") + "Error")) for name in names]
    assert len(classes) == 11 and all(issubclass(found, tensorcask.Error) for found in classes)
    with pytest.raises(tensorcask.NotFoundError) as caught:
        tensorcask.load(url)
    assert caught.value.kind == "not_found" and caught.value.clause is None
    with pytest.raises(tensorcask.InvalidArgumentError, match="not supported"):
        tensorcask.Store("ftp://x")
    for wrong, right in (("s3:/bucket/run", "s3://bucket/run"), ("GS:/bucket/run", "gs://bucket/run"), ("file:/run", "file:///run")):
        for call in (tensorcask.Store, tensorcask.load, lambda text: tensorcask.save({}, text, step=1)):
            with pytest.raises(tensorcask.InvalidArgumentError, match=re.escape(f"write `{right}`")):
                call(wrong)
    tensorcask.save({"w": torch.ones(1)}, url, step=1)
    with pytest.raises(tensorcask.NotFoundError):
        tensorcask.load(url, step=9)
    for step, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError), ("x", TypeError)):
        with pytest.raises(error):
            tensorcask.save({}, url, step=step)
    for options in ({"policy": "sometimes"}, {"policy": "full:3"}):
        with pytest.raises(tensorcask.InvalidArgumentError):
            tensorcask.save({}, url, step=1, **options)
    with pytest.raises(ValueError):
        tensorcask.save({}, url, step=1, base_cache="attic")
    with pytest.raises(tensorcask.InvalidArgumentError, match="reserved"):
        tensorcask.save({}, url, step=1, user={"tc.x": 1})


def damage(url, which):
    """A bit of one of the casks that hold the weights, by age."""
    large = [path for path in Path(url, "casks").iterdir() if path.stat().st_size > 4000]
    cask = sorted(large, key=lambda path: path.stat().st_mtime_ns)[which]
    data = bytearray(cask.read_bytes())
    data[200] ^= 1
    cask.chmod(0o644)
    cask.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "value"), [("aws_endpoint", "localhost:9000"), ("aws_session_token", "a\nb"), ("aws_region", "us east"), ("user_agent", "\u00fc\n")]
)
def test_a_setting_that_the_storage_library_cannot_use_is_an_error(name, value):
    config = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", name: value}
    with pytest.raises(tensorcask.InvalidArgumentError, match=name):
        tensorcask.save({"w": torch.ones(1)}, tensorcask.Store("s3://bucket/run", config), step=1)


def test_damage_is_an_error_or_an_older_step_and_a_warning(url, caplog):
    weights = {step: torch.randn(50_000) for step in (1, 2)}
    for step, w in weights.items():
        tensorcask.save({"w": w}, url, step=step, policy="full")
    damage(url, -1)
    store = tensorcask.Store(url)
    for step, strict in ((2, False), ("latest", True)):
        with pytest.raises(tensorcask.CorruptionError) as caught:
            store.load(step, strict=strict)
        assert caught.value.object.startswith("casks/") and caught.value.tensor == "w"
    with caplog.at_level(logging.WARNING, "tensorcask"):
        assert torch.equal(store.load()["w"], weights[1])
    assert "step 2" in caplog.text
    report = store.verify()
    assert not report.is_clean and any("casks/" in str(problem) for problem in report.problems)
    damage(url, 0)
    with pytest.raises(tensorcask.CorruptionError):
        store.load()


def test_warnings_of_the_library_are_logged(url, caplog):
    store = tensorcask.Store(url)
    store.save({"w": torch.randn(50_000)}, step=1, policy="consecutive", base_cache="none")
    damage(url, 0)
    with caplog.at_level(logging.INFO, "tensorcask"):
        assert store.save({"w": torch.zeros(50_000)}, step=2, policy="consecutive", base_cache="none").kind == "base"
    assert any(record.levelno == logging.WARNING and "saving a base instead" in record.getMessage() for record in caplog.records)
    assert any(record.levelno == logging.INFO and "committed" in record.getMessage() for record in caplog.records)


def test_another_job_fences_this_one(url):
    tensorcask.save({"w": torch.ones(3)}, url, step=1)
    in_process(
        """
        import sys, tensorcask
        tensorcask.save({"w": tensorcask.RawTensor("u8", (1,), bytearray(1))}, sys.argv[1], step=2)
        """,
        url,
    )
    for _ in range(2):
        with pytest.raises(tensorcask.FencedError, match="another job took over"):
            tensorcask.save({"w": torch.ones(3)}, url, step=3)


def test_a_child_process_opens_its_own(url):
    store = tensorcask.Store(url)
    store.save({"w": torch.ones(3)}, step=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if store.load()["w"].sum() == 3 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    again = pickle.loads(pickle.dumps(store))
    assert again.load()["w"].sum() == 3


def test_the_base_package_needs_nothing(url):
    blocked = """
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("numpy", "torch", "jax", "ml_dtypes"):
                    raise ImportError(name)
        sys.meta_path.insert(0, Block())
        import tensorcask
        """
    in_process(
        blocked
        + """
        state = {"w": tensorcask.RawTensor("bf16", (2, 3), bytearray(range(12))), "n": 1}
        tensorcask.save(state, sys.argv[1], step=1)
        assert tensorcask.load(sys.argv[1]) == state
        """,
        url,
    )
    tensorcask.save({"w": torch.ones(1)}, url, step=2)
    in_process(
        blocked
        + """
        try:
            tensorcask.load(sys.argv[1])
        except ImportError as error:
            assert "framework=" in str(error), error
        else:
            raise SystemExit("no error")
        assert tensorcask.load(sys.argv[1], framework="bytes")["w"].dtype == "f32"
        """,
        url,
    )


def test_ctrl_c_stops_a_long_save(url):
    """The signal comes when the first bytes of the step are on disk."""
    code = """
        import sys, threading, os, signal, tensorcask
        casks = os.path.join(sys.argv[1], "casks")
        big = {"w%d" % i: tensorcask.RawTensor("f32", (1 << 24,), bytearray(os.urandom(1 << 20) * 64)) for i in range(12)}
        store = tensorcask.Store(sys.argv[1])
        store.save({"small": 1}, step=0)
        before = set(os.listdir(casks))
        over = threading.Event()
        def is_writing():
            # On Linux, an unfinished cask has no name.
            try:
                return any(os.readlink(f"/proc/self/fd/{fd}").startswith(casks) for fd in os.listdir("/proc/self/fd"))
            except OSError:
                return False
        def interrupt():
            while not over.wait(0.001):
                if set(os.listdir(casks)) - before or is_writing():
                    return os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            store.save(big, step=1)
        except KeyboardInterrupt:
            print("interrupted")
        finally:
            over.set()
        assert [info.step for info in store.snapshots()] == [0]
        store.save({"small": 2}, step=2)
        assert store.load() == {"small": 2} and store.verify().is_clean
        """
    assert in_process(code, url).split() == ["interrupted"]


def test_the_lock_is_released_while_saving():
    """Another thread runs while a save waits: it answers the requests of the save."""
    answered = threading.Event()

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_any(self):
            answered.set()
            self.send_error(403)

        do_GET = do_HEAD = do_PUT = do_POST = do_any

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            config = {"aws_endpoint": f"http://127.0.0.1:{server.server_port}", "aws_allow_http": "true", "aws_region": "none"}
            config |= {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
            with pytest.raises(tensorcask.Error, match="403"):
                tensorcask.Store("s3://bucket/run", config).save({"w": torch.randn(100)}, step=1)
        finally:
            server.shutdown()
    assert answered.is_set()


def test_files_of_the_command_line_are_read(tmp_path, url):
    """What was saved without a tree comes back flat."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[2] / "target"))
    binary = next((path for profile in ("debug", "release") if (path := target / profile / "tensorcask").exists()), target / "absent")
    data = Path(__file__).parents[2] / "tests" / "data" / "step-2400.safetensors"
    if not binary.exists():
        pytest.skip("the command line is not built")
    subprocess.run([binary, "save", url, "--step", "2400", data], check=True, capture_output=True)
    from safetensors.torch import load_file

    expected, loaded = load_file(data), tensorcask.load(url)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    tensorcask.save(loaded, url, step=2401, user={"from": "python"})
    shown = subprocess.run([binary, "ls", url, "--json"], check=True, capture_output=True, text=True).stdout
    assert json.loads(shown) and '"from"' in shown
    subprocess.run([binary, "verify", url], check=True, capture_output=True)
