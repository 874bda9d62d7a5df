"""The installed ``tensorcask`` command, as a process."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorcask
from safetensors.numpy import load_file, save_file

COMMAND = str(Path(sys.executable).with_name("tensorcask"))
ROOT = Path(__file__).parents[2]


def run(*arguments, **options):
    settings = {"capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run([COMMAND, *map(str, arguments)], **settings)


def told(*arguments, code=0):
    """Returns the JSON that a command prints."""
    ended = run(*arguments, "--json")
    assert ended.returncode == code, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    # Too large to lie in a log entry, where nothing is ever freed.
    save_file({"w": np.random.default_rng(1).random(50_000, dtype=np.float32)}, path)
    return path


def disk_bytes(url):
    return sum(path.stat().st_size for path in Path(url).rglob("*") if path.is_file())


def test_a_store_is_kept_from_the_command_line(model, url, tmp_path):
    ended = run("save", url, "--step", 1, "--policy", "full", model)
    assert ended.returncode == 0 and "base" in ended.stdout and ended.stderr == ""
    tensorcask.save({"w": np.ones(50_000, np.float32)}, url, step=2, policy="full")
    assert [row["step"] for row in told("ls", url)["snapshots"]] == [1, 2]
    assert told("verify", url)["clean"] and run("verify", url).stdout.startswith("ok")
    assert told("forget", url, "--keep-last", 1)["forgotten"][0]["step"] == 1
    before = disk_bytes(url)
    assert not told("gc", url, "--older-than", "0s")["applied"] and disk_bytes(url) == before
    assert told("gc", url, "--apply")["collected"][0]["step"] == 1
    while disk_bytes(url) >= before - 10_000:
        told("gc", url, "--apply", "--older-than", "0s")
    assert run("restore", url, "-o", tmp_path / "out.safetensors").returncode == 0
    assert (load_file(tmp_path / "out.safetensors")["w"] == 1).all()
    assert told("copy", url, tmp_path / "copy")["snapshots"] == 1


@contextlib.contextmanager
def running_job(url):
    """A process that has saved step 1, and stays until the end of the block."""
    program = "import sys, tensorcask; tensorcask.save({'w': b'1'}, sys.argv[1], step=1); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        job.stdout.readline()
        try:
            yield job
        finally:
            job.stdin.close()


def test_what_is_done_by_hand_ends_no_running_job(model, url, tmp_path):
    copy = str(tmp_path / "copy")
    with running_job(url) as job:
        for words in (["save", url, "--step", 2, model], ["import", model, url, "--step", 2]):
            refused = told(*words, code=11)["error"]
            assert f"process {job.pid} on host" in refused["message"], refused
            assert refused["kind"] == "conflict"
        assert tensorcask.Store(url).copy_to(copy).snapshots == 1
        assert told("import", model, url, "--step", 2, "--take-over")["steps"] == [2]
    with running_job(copy):
        with pytest.raises(tensorcask.ConflictError, match="take_over=True"):
            tensorcask.Store(url).copy_to(copy)
        assert tensorcask.Store(url).copy_to(copy, take_over=True).snapshots == 1
    with running_job(copy):
        pass
    # The process that has ended owns nothing.
    assert told("save", copy, "--step", 3, model)["step"] == 3
    assert sorted(tensorcask.Store(copy).steps) == [1, 2, 3]


def test_python_m_is_the_same_command(model, url):
    module = [sys.executable, "-m", "tensorcask"]
    for words in (["--help"], ["--version"], ["import", "--help"], ["save", "--help"], ["save"], ["ls", "/nowhere"]):
        one, other = (subprocess.run([*command, *words], capture_output=True, text=True) for command in ([COMMAND], module))
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    subprocess.run([*module, "import", model, url, "--step", "3"], check=True)
    assert tensorcask.Store(url).steps == [3]


def test_the_package_installs_completions_and_man_pages(tmp_path):
    share = Path(sys.prefix) / "share"
    scripts = {"bash": "bash-completion/completions/tensorcask", "zsh": "zsh/site-functions/_tensorcask"}
    scripts["fish"] = "fish/vendor_completions.d/tensorcask.fish"
    for shell, path in scripts.items():
        script = (share / path).read_text()
        assert script == run("completions", shell).stdout and "bisect" in script
    for page in told("man", tmp_path / "man1")["files"]:
        assert (share / "man" / "man1" / Path(page).name).read_bytes() == Path(page).read_bytes()
    assert (share / "man" / "man1" / "tensorcask-save.1").is_file()


def test_help_and_version():
    assert run("--version").stdout.split() == ["tensorcask", tensorcask.__version__]
    words = run("--help").stdout
    for verb in ("save", "restore", "verify", "ls", "gc", "compact", "copy", "forget", "import", "export", "sql", "doctor"):
        assert f"\n  {verb} " in words, verb
    for verb in ("import", "export", "sql"):
        for asked in ([verb, "--help"], ["help", verb]):
            ended = run(*asked)
            assert ended.returncode == 0 and f"usage: tensorcask {verb}" in ended.stdout and "--step" in ended.stdout
    assert "python -m" not in run("import", "--help").stdout


def test_import_and_export(model, url, tmp_path):
    report = told("import", model, url, "--step", 7)
    assert (report["steps"], report["kind"], report["tensor_bytes"]) == ([7], "base", 200_000)
    target = tmp_path / "out.safetensors"
    assert told("--json", "export", url, target) == {"store": url, "target": str(target)}
    assert (load_file(target)["w"] == load_file(model)["w"]).all()
    ended = run("export", url, tmp_path / "again.safetensors")
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path / 'again.safetensors'}\n")


def test_import_and_export_of_torch(url, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.arange(5.0), "step": 3}, tmp_path / "in.pt")
    assert run("import", tmp_path / "in.pt", url, "--step", 3).stdout.startswith("step 3: a base")
    assert run("export", url, tmp_path / "out.pt").returncode == 0
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(loaded["w"], torch.arange(5.0)) and loaded["step"] == 3


def test_damaged_files_of_torch_are_errors(url, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    ended = run("import", tmp_path / "garbage.pt", url, "--step", 2)
    assert ended.returncode == 3 and ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr
    assert told("import", tmp_path, url, "--step", 2, "--format", "dcp", code=10)["error"]["kind"] == "not_found"


def damage(url):
    (cask,) = [path for path in Path(url, "casks").iterdir() if path.stat().st_size > 4000]
    data = bytearray(cask.read_bytes())
    data[200] ^= 1
    cask.chmod(0o644)
    cask.write_bytes(data)


def test_exit_codes(model, url, tmp_path):
    told("save", url, "--step", 1, model)
    for words in (["ls", url, "--nonsense"], ["import"], ["import", model, url], ["export", url], ["nonsense"], []):
        assert run(*words).returncode == 2, words
        if words:
            assert told(*words, code=2)["error"]["kind"] == "usage"
    nowhere = tmp_path / "nowhere"
    for words in (["ls", nowhere], ["export", nowhere, tmp_path / "x.pt"], ["import", tmp_path / "no.safetensors", url, "--step", 2]):
        ended = run(*words)
        assert ended.returncode == 10 and ended.stderr.startswith("error: ") and ended.stdout == "", words
        assert told(*words, code=10)["error"]["kind"] == "not_found"
    other = tmp_path / "other.safetensors"
    save_file({"w": np.zeros(50_000, np.float32)}, other)
    for words in (["save", url, "--step", 1, other], ["import", other, url, "--step", 1]):
        assert told(*words, code=11)["error"]["kind"] == "conflict"
    for words in (["ls", "ftp://x"], ["export", url, model], ["import", tmp_path, url, "--step", 2]):
        ended = run(*words)
        assert ended.returncode == 1 and ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr
        assert told(*words, code=1)["error"]["message"]
    damage(url)
    for words in (["restore", url, "-o", tmp_path / "x", "--step", 1], ["export", url, tmp_path / "x.safetensors"]):
        assert told(*words, code=3)["error"]["kind"] == "corrupt"
    assert not told("verify", url, code=3)["clean"]


def test_warnings_are_lines_on_stderr(model, url, tmp_path):
    told("save", url, "--step", 1, "--policy", "full", model)
    tensorcask.save({"w": np.random.default_rng(2).random(50_000, dtype=np.float32)}, url, step=2, policy="full")
    casks = sorted(Path(url, "casks").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    casks[-1].unlink()
    ended = run("restore", url, "-o", tmp_path / "out.safetensors")
    assert ended.returncode == 0 and ended.stderr.startswith("warning: "), ended.stderr


def test_errors_name_commands_that_are_there(url):
    tensorcask.save({"w": np.ones(3)}, url, step=1)
    with pytest.raises(tensorcask.NotFoundError, match=r"`tensorcask ls`"):
        tensorcask.load(url, step=9)
    assert run("ls", url).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_closed_pipe_is_no_error(model, url):
    told("save", url, "--step", 1, model)
    for number, words in enumerate((["ls", url], ["log", url, "--json"], ["--help"], ["import", "--help"], ["import", model, url, "--step", "2"])):
        read, write = os.pipe()
        os.close(read)
        ended = run(*words, capture_output=False, stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        assert (ended.returncode, ended.stderr) == (0, ""), (number, words)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_closed_standard_files_do_no_harm(model, url, tmp_path):
    """With closed standard streams, no file of the store gets their descriptors and receives output."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    save = 'exec "$0" save "$1" --step 1 "$2" --blob "b=$3" <&- >&- 2>&-'
    started = subprocess.Popen(["sh", "-c", save, COMMAND, url, str(model), str(pipe)])
    with open(pipe, "wb"):
        # The command waits for the blob.
        assert [os.readlink(f"/proc/{started.pid}/fd/{descriptor}") for descriptor in range(3)] == ["/dev/null"] * 3
    assert started.wait(timeout=60) == 0
    assert told("verify", url)["clean"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("verb", ["save", "import"])
def test_ctrl_c_ends_the_command(verb, model, url, tmp_path):
    if verb == "import":
        pytest.importorskip("torch")
    pipe = tmp_path / ".metadata"
    os.mkfifo(pipe)
    words = ["import", tmp_path, url, "--step", "1"] if verb == "import" else ["save", url, "--step", "1", model, "--blob", f"b={pipe}"]
    started = subprocess.Popen([COMMAND, *map(str, words)], stderr=subprocess.PIPE, text=True)
    with open(pipe, "wb"):
        # The command has opened the pipe, and waits for data that never comes.
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=60)
    assert (started.returncode, said) == (-signal.SIGINT, "")


@pytest.fixture
def folder():
    """A folder in shared memory for an engine."""
    made = tempfile.mkdtemp(dir="/dev/shm")
    yield made
    shutil.rmtree(made)


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_an_agent(url, folder):
    assert told("agent", "status", "--folder", folder, code=10)["error"]["kind"] == "not_found"
    with tensorcask.Engine(url, folder=folder, agent=[COMMAND, "agent"]) as engine:
        engine.save({"w": np.ones(1000)}, step=1)
        engine.wait()
        status = told("agent", "status", "--folder", folder)
        assert status["runs"][0]["last_commit_step"] == 1
        assert "last commit" in run("agent", "status", "--folder", folder).stdout
        watch = subprocess.Popen([COMMAND, "agent", "status", "--watch", "--folder", folder], stdout=subprocess.PIPE, text=True)
        assert watch.stdout.readline().startswith("agent ")
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=60)
        assert watch.returncode == -signal.SIGINT
    assert (tensorcask.load(url)["w"] == 1).all()
    assert told("agent", "stop", "--folder", folder)["pid"] == status["pid"]
    # The engine of this process reaps its agent.
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.waitpid(status["pid"], 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_an_agent_ends_on_ctrl_c(url, folder):
    agent = subprocess.Popen([COMMAND, "agent", "--folder", folder, "--json"], stdout=subprocess.PIPE, text=True)
    while run("agent", "status", "--folder", folder).returncode == 10:
        assert agent.poll() is None
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save({"w": np.ones(1000)}, step=1)
        engine.wait()
        assert told("agent", "status", "--folder", folder)["pid"] == agent.pid, "the engine uses the agent that runs"
    agent.send_signal(signal.SIGINT)
    ended, _ = agent.communicate(timeout=60)
    assert (agent.returncode, json.loads(ended)) == (0, {"ended": "drained", "waiting": 0})
