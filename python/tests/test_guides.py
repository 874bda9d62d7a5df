"""The examples of the guides about statistics, SQL and trackers, with the results that the pages show."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorcask

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "src" / "guides"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the store of the guide, made as the guide says."""
    folder = tmp_path_factory.mktemp("guides")
    subprocess.run([sys.executable, ROOT / "examples" / "broken_run.py", "runs/broken"], cwd=folder, check=True)
    return folder


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (GUIDES / page).read_text(), re.DOTALL | re.MULTILINE)


def cells(table):
    """Returns the rows of a table as DuckDB shows it, without the row of the types."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line.startswith("│")]
    return [rows[0], *rows[2:]]


def questions():
    """Returns heading, query and result of each section with a query."""
    found = re.findall(r"^### (.*?)\n.*?^```sql\n(.*?)^```\n\n```text\n(.*?)^```$", (GUIDES / "sql.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == len(blocks("sql.md", "sql")) == 10
    return found


@pytest.mark.parametrize(("heading", "query", "result"), questions(), ids=[heading for heading, _, _ in questions()])
def test_queries_of_the_guide(heading, query, result, folder):
    found = tensorcask.Store(folder / "runs" / "broken").sql(query)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        found.show(max_width=200)
    expected, actual = cells(result), cells(shown.getvalue())
    if "time" in heading:
        # Times differ from run to run.
        expected, actual = ([row[0] for row in rows] + rows[0] for rows in (expected, actual))
    if "codecs" in heading:
        # A codec tries first what it found for another chunk, so threads decide which of two codecs stores a small delta.
        expected, actual = ([row for row in rows if row[0] != "delta"] for rows in (expected, actual))
    assert actual == expected


@pytest.mark.parametrize("page", ["sql.md", "statistics.md"])
def test_python_examples(page, folder):
    [example] = blocks(page, "python")
    ended = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, check=True)
    printed = re.findall(r"^print\(.*\) +# (.*)$", example, re.MULTILINE)
    assert printed and [line for line in ended.stdout.splitlines() if line in printed] == printed, ended.stdout


def test_the_guide_to_dcp(tmp_path):
    """Runs the examples of the page as one program, twice: the second run resumes."""
    program = "\n".join(block for block in blocks("dcp.md", "python") if "moments[" not in block and "#include" not in block)
    for _ in range(2):
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, check=True)
        shutil.rmtree(tmp_path / "runs" / "hf")
        shutil.rmtree(tmp_path / "runs" / "by-path")
        tensorcask.Store(tmp_path / "runs" / "dcp").forget([200])
    assert tensorcask.Store(tmp_path / "runs" / "dcp").steps == [3, 6]


def test_the_example_of_fsdp2(tmp_path):
    """Two ranks; one is killed after step 5. The next run goes on from step 4 or 5, to the losses of a run that was not killed."""

    def losses(store, *options):
        program = [ROOT / "examples" / "train_fsdp2.py", "--steps", "8", "--store", store, *options]
        ended = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program], cwd=tmp_path, capture_output=True, text=True
        )
        assert (ended.returncode == 0) == (not options), ended.stderr
        return dict(re.findall(r"^step (\d+): (.*)$", ended.stdout, re.MULTILINE))

    whole = losses("whole")
    killed, resumed = losses("killed", "--kill-at", "5"), losses("killed")
    assert list(killed) == list("12345") and list("678") == list(resumed)[-3:] and "4" not in resumed
    assert whole == killed | resumed == resumed | killed


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_the_guide_to_runs(tmp_path, host_memory):
    """A process that trains further, and two ranks: one is killed, and the next start goes on to the losses of a run that was not."""
    alone, ranks, *_ = blocks("run.md", "python")
    for last in (5, 8):
        subprocess.run([sys.executable, "-c", alone.replace("run.resume(), 5", f"run.resume(), {last}")], cwd=tmp_path, check=True)
        assert tensorcask.Store(tmp_path / "runs" / "guide").steps == list(range(last))

    def is_successful(store, kill=""):
        program = "import os, signal, torch\ntorch.manual_seed(0)\n" + ranks.replace("runs/fsdp2", store).replace("loss=loss)\n", f"loss=loss)\n{kill}")
        (tmp_path / "train.py").write_text(program)
        torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
        return subprocess.run(torchrun, cwd=tmp_path).returncode == 0

    assert is_successful("whole")
    assert not is_successful("killed", "        if step == 7 and os.environ['RANK'] == '0':\n            os.kill(os.getpid(), signal.SIGKILL)\n")
    assert is_successful("killed")
    whole, killed = ({info.step: info.user["loss"] for info in tensorcask.Store(tmp_path / store).snapshots()} for store in ("whole", "killed"))
    assert list(whole) == list(range(20)) and killed == whole


def run_example(folder, name, **variables):
    """Runs the example of the guide to trackers that names a module."""
    [example] = [block for block in blocks("trackers.md", "python") if name in block]
    subprocess.run([sys.executable, "-c", example], cwd=folder, env=os.environ | variables, check=True, stdout=subprocess.DEVNULL)


def test_statistics_in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_example(folder, "tensorboard")
    events = EventAccumulator(str(folder / "tensorboard" / "broken"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    rows = tensorcask.Store(folder / "runs" / "broken").sql("from stats").fetchall()
    assert len(events.Tags()["scalars"]) == 2 * len({row[1] for row in rows})
    nans = {event.step: event.value for event in events.Scalars("nan/model.layers.1.down.weight")}
    assert [step for step, count in nans.items() if count] == [50, 55, 60] and nans[50] == 1 and len(nans) == 12
    [first] = [row for row in rows if row[:2] == (5, "model.head.weight")]
    histogram = events.Histograms("exponents/model.head.weight")[0]
    assert histogram.step == 5 and histogram.histogram_value.num == sum(first[18])
    assert events.Scalars("norm/model.head.weight")[0].value == pytest.approx(first[17] ** 0.5)


def test_statistics_in_wandb_offline(folder):
    # No account, no network, no files in the home folder.
    home = {name: str(folder / "wandb-home") for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    run_example(folder, "wandb", WANDB_SILENT="true", WANDB__DISABLE_STATS="true", **home)
    [written] = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert b"nan/model.layers.1.down.weight" in written.read_bytes()


def test_guards(folder):
    """Runs all examples of the page in order. A command is followed by what it prints."""
    page = (GUIDES / "guards.md").read_text()
    found = re.findall(r"^```(python|sh)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page, re.DOTALL | re.MULTILINE)
    assert [language for language, _, _ in found] == ["sh", "sh", "python", "sh"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for language, example, expected in found:
        command = [sys.executable, "-c", example] if language == "python" else ["bash", "-c", example]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        if language == "python":
            expected = "".join(f"{line}\n" for line in re.findall(r"^ *print\(.*\) +# (.*)$", example, re.MULTILINE))
        assert ended.stdout == expected


def test_commands_of_the_guide(folder):
    [commands] = [block for block in blocks("sql.md", "sh") if "tensorcask sql" in block]
    (folder / "query.sql").write_text("select count(*) as steps\nfrom snapshots")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for line in commands.splitlines():
        if line.startswith("tensorcask "):
            subprocess.run(["bash", "-c", line], cwd=folder, env=environment, check=True)
    assert (folder / "result.csv").read_text() == "steps\n12\n"
