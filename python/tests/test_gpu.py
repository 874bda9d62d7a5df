"""States on a GPU: saved through the engine, by `save` and by DCP, and restored to where they were."""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from tensorcask import _device
from tensorcask.engine import agent_status

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_gpt import Training, add_sizes, read_text  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def folder(host_memory):
    return host_memory


def new_training():
    parser = argparse.ArgumentParser()
    add_sizes(parser, layers=2, width=64, length=64, device="cuda")
    return Training(parser.parse_args([]), read_text(None))


def assert_equal(found, expected, path=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal(found[key], value, f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected.cpu()), path
    else:
        assert found == expected, path


def copy_of(state):
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else state


def test_saves_overlap_with_training_and_keep_every_bit(url, folder):
    training, saved = new_training(), {}
    with tensorcask.Engine(url, folder=folder, back_pressure="wait") as engine:
        for step in range(1, 11):
            state = training.state()
            saved[step] = copy_of(state)
            saving = engine.begin_save(state, step=step)
            training.gradients()
            saving.wait()
            training.update()
        assert engine.wait("durable", 120).reached
        assert engine._arena.is_registered(), "the memory was not registered with CUDA"
        assert_equal(engine.restore().state, saved[10])
    for step, state in saved.items():
        assert_equal(tensorcask.load(url, step=step), state)
    assert tensorcask.Store(url).verify().is_clean


def test_a_save_waits_for_the_work_of_the_current_stream(url, folder):
    with tensorcask.Engine(url, folder=folder) as engine:
        for step, stream in enumerate((torch.cuda.default_stream(), torch.cuda.Stream()), 1):
            with torch.cuda.stream(stream):
                factor = torch.full((4096, 4096), 1 / 4096, device="cuda")
                tensor = torch.ones(4096, 4096, device="cuda")
                # Work of some milliseconds is queued, and the save begins before it is done.
                for _ in range(50):
                    tensor = tensor @ factor
                outcome = engine.save({"tensor": tensor, "view": tensor.t(), "part": tensor[:7, 3:9]}, step=step)
                tensor.zero_()
            assert outcome.saved
            state = engine.restore().state
            assert all(bool((value == 1).all()) for value in state.values()), {key: value.unique() for key, value in state.items()}


def test_memory_that_cannot_be_registered_is_filled_all_the_same(url, folder, monkeypatch):
    runtime = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, *arguments):
            return 2

        def __getattr__(self, name):
            return getattr(runtime, name)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    state = {"a": torch.randn(1000, 1000, device="cuda"), "b": torch.arange(9, device="cuda")}
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state, step=1)
        with pytest.warns(RuntimeWarning, match="registered 0 of"):
            assert not engine._arena.is_registered()
        assert_equal(engine.restore().state, copy_of(state))


def test_a_state_that_grows_moves_the_registered_memory(url, folder):
    with tensorcask.Engine(url, folder=folder) as engine:
        for step, count in enumerate((1_000, 3_000_000, 10, 30_000_000), 1):
            state = {"a": torch.randn(count, device="cuda")}
            engine.save(state, step=step)
            assert_equal(engine.restore().state, copy_of(state))
        assert engine.wait("durable", 120).reached
    assert_equal(tensorcask.load(url, step=2, map_location="cpu").keys(), state.keys())


def test_a_restore_fills_tensors_of_the_device(url, folder):
    training = new_training()
    training.one_step()
    expected = copy_of(training.state())
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(training.state(), step=1)
        other = new_training()
        other.one_step()
        other.one_step()
        out = other.state()
        weights = out["model"]["blocks.0.up.weight"]
        weights.zero_()
        found = engine.restore(out=out)
        assert found.source == "slot" and weights.device.type == "cuda"
        assert_equal(found.state, expected)
        assert torch.equal(weights.cpu(), expected["model"]["blocks.0.up.weight"])
        assert engine.wait("durable", 120).reached
    for loaded in (tensorcask.load(url, device="cuda"), tensorcask.load(url, map_location="cuda:0")):
        assert loaded["model"]["blocks.0.up.weight"].device == torch.device("cuda", 0)
        assert_equal(loaded, expected)
    weights.zero_()
    assert_equal(tensorcask.load(url, out=out), expected)
    assert torch.equal(weights.cpu(), expected["model"]["blocks.0.up.weight"])


def test_save_and_dcp_take_tensors_of_the_device(url):
    training = new_training()
    training.one_step()
    state = training.state()
    expected = copy_of(state)
    tensorcask.save(state, url, step=1)
    training.one_step()
    assert_equal(tensorcask.load(url, step=1), expected)
    store = tensorcask.Store(url)
    flat = {"model": training.model.state_dict(), "master": training.master}
    expected = copy_of(flat)
    saving = dcp.async_save(flat, checkpoint_id="step-2", storage_writer=store.writer())
    saving.result()
    training.one_step()
    loaded = {key: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()} for key, tensors in flat.items()}
    dcp.load(loaded, storage_reader=store.reader(step=2))
    assert loaded["model"]["wte.weight"].device.type == "cuda"
    assert_equal(loaded, expected)


TRAINER = """
import json, os, signal, sys
import torch, tensorcask
from test_gpu import new_training

url, folder, steps, kill_at, losses_file = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
torch.use_deterministic_algorithms(True)
training, losses = new_training(), {}
with tensorcask.Engine(url, folder=folder) as engine:
    try:
        found = engine.restore()
    except tensorcask.NotFoundError:
        print("new run", flush=True)
    else:
        training.restore(found.state)
        losses = {step: loss for step, loss in json.load(open(losses_file)).items() if int(step) <= training.step}
        print("resumed from", training.step, found.source, flush=True)
    saving = None
    while training.step < steps:
        loss = training.gradients()
        if saving is not None:
            saving.wait()
        if training.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        training.update()
        losses[str(training.step)] = loss.item()
        json.dump(losses, open(losses_file + ".new", "w"))
        os.replace(losses_file + ".new", losses_file)
        saving = engine.begin_save(training.state(), step=training.step)
"""


def test_a_killed_run_resumes_with_the_same_losses(tmp_path, folder):
    def train(name, kill_at=-1):
        command = [sys.executable, "-c", TRAINER, str(tmp_path / name), folder, "20", str(kill_at), str(tmp_path / f"{name}.json")]
        environment = {"PYTHONPATH": str(Path(__file__).parent), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for variable, value in environment.items():
                patch.setenv(variable, value, prepend=":" if variable == "PYTHONPATH" else None)
            return subprocess.run(command, capture_output=True, text=True)

    whole = train("whole")
    assert whole.returncode == 0, whole.stderr
    killed = train("killed", kill_at=12)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = train("killed")
    assert resumed.returncode == 0 and "resumed from 12 slot" in resumed.stdout, resumed.stdout + resumed.stderr
    losses = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed")]
    assert len(losses[0]) == 20 and losses[0] == losses[1]


def test_an_engine_forgets_the_registered_memory_when_it_closes(url, folder):
    arena = _device.Arena()
    assert not arena.forget()
    engine = tensorcask.Engine(url, folder=folder)
    engine.save({"a": torch.zeros(100, device="cuda")}, step=1)
    known = engine._arena
    engine.close()
    assert not known.forget() and agent_status(folder)["runs"]
    # The same memory can be registered again by the next engine.
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save({"a": torch.ones(100, device="cuda")}, step=2)
        assert engine._arena.is_registered()
        assert bool((engine.restore().state["a"] == 1).all())
