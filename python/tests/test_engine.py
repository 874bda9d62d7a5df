"""The asynchronous engine from Python: real agents, killed trainers, ranks on gloo."""

import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed as dist
from conftest import stop
from ranks import on_ranks
from tensorcask.engine import Waited, agent_status, stop_agent
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")


@pytest.fixture
def folder():
    """A folder in shared memory; its agent ends with the test."""
    made = tempfile.mkdtemp(dir="/dev/shm")
    yield made
    lock = Path(made, "agent.lock")
    if lock.exists():
        stop(int(lock.read_text()))
    shutil.rmtree(made)


def pause(pid):
    """Stops a process, and returns once all its threads have stopped: one on another core may run a little longer."""
    os.kill(pid, signal.SIGSTOP)

    def is_running(thread):
        try:
            return ") T " not in (thread / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    while any(is_running(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        os.sched_yield()


def once_it_waits(engine, act):
    """Calls a function from a signal handler as soon as a call of the engine is under way in this thread."""

    def ring(*_):
        try:
            engine.wait(timeout=0)
        except tensorcask.ConflictError:
            act()
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def state_of(step):
    return {
        "model": {"w": torch.arange(50_000, dtype=torch.float32).reshape(100, 500) * step, "half": torch.full((7,), step).bfloat16()},
        "numpy": np.full((3, 2), step, np.int64),
        "step": step,
        "notes": ["text", None, 0.5, (1, 2)],
        "rng": bytes([step]),
    }


def check(state, step):
    expected = state_of(step)
    assert torch.equal(state["model"]["w"], expected["model"]["w"])
    assert torch.equal(state["model"]["half"], expected["model"]["half"])
    assert (state["numpy"] == step).all() and isinstance(state["numpy"], np.ndarray)
    assert (state["step"], state["notes"], state["rng"]) == (step, expected["notes"], bytes([step]))


def test_a_state_comes_back_from_memory_and_from_the_store(url, folder):
    with tensorcask.Engine(url, folder=folder) as engine:
        with pytest.raises(tensorcask.NotFoundError):
            engine.restore()
        for step in (1, 2, 3):
            saved = engine.save(state_of(step), step=step, user={"loss": 0.5 * step}, metadata={"format": "pt"})
            assert saved.saved and saved.stall >= saved.copy and saved.failures == []
        raw = engine.restore()
        assert (raw.step, raw.source, raw.url) == (3, "slot", None)
        assert raw.user == {"loss": 1.5} and raw.metadata == {"format": "pt"} and raw.passed_over == []
        check(raw.state, 3)
        assert engine.wait("encoded", 60).reached and engine.wait("durable", 60).reached
        assert [found.step for found in engine.loadable()] == [3, 2, 1]
        first = engine.restore(1)
        assert first.source in ("memory", "tier")
        check(first.state, 1)
        with pytest.raises(tensorcask.NotFoundError, match="step 7"):
            engine.restore(7)
        (run,) = agent_status(folder)["runs"]
        assert run["last_commit_step"] == 3 and run["failed_saves"] == 0
        engine.finish()
    check(tensorcask.load(url), 3)
    with tensorcask.Engine(url, folder=folder) as engine:
        found = engine.restore()
        assert (found.source, found.url) == ("tier", url)
        check(found.state, 3)
    with pytest.raises(ValueError, match="closed"):
        engine.loadable()
    stop_agent(folder)


def test_restored_into_the_memory_of_the_caller(url, folder):
    out = {"model": {"w": torch.zeros(100, 500), "half": torch.zeros(7).bfloat16()}, "numpy": np.zeros((3, 2), np.int64)}
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state_of(4), step=4)
        found = engine.restore(out=out)
        assert found.state["model"]["w"] is out["model"]["w"] and found.state["numpy"] is out["numpy"]
        check(found.state, 4)
        engine.wait()
        out["model"]["w"] = torch.zeros(100, 499)
        with pytest.raises(tensorcask.TemplateError, match=r"model.w.*\[100, 500\].*\[100, 499\]") as refused:
            engine.restore(out=out)
        assert refused.value.kind == "template" and not isinstance(refused.value, tensorcask.NotFoundError)
        out["model"]["w"] = torch.zeros(100, 500).bfloat16()
        with pytest.raises(ValueError, match="model.w"):
            engine.restore(out=out)
        del out["model"]["w"]
        out["model"]["half"].zero_()
        with pytest.raises(tensorcask.TemplateError, match=r"`model.w`.*Nothing was filled"):
            engine.restore(out=out)
        # A new layer is no first start, whatever place has the step.
        more = {"model": {**out["model"], "w": torch.zeros(100, 500), "lora": torch.zeros(2)}, "numpy": out["numpy"]}
        with pytest.raises(tensorcask.TemplateError, match="model.lora"):
            engine.restore(out=more)
        with pytest.raises(tensorcask.InvalidArgumentError, match="model.lora"):
            engine.restore(4, out=more)
        assert not out["model"]["half"].any(), "a part was filled before the error"
        engine.finish()
    with tensorcask.Engine(url, folder=folder) as engine, pytest.raises(tensorcask.TemplateError, match="model.lora"):
        engine.restore(out=more)
    stop_agent(folder)


def of_model(model, step):
    return {"model": model.state_dict(), "tied": model.weight, "late": model.weight.t(), "scalar": model.bias[0].clone(), "step": step}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))])
def test_tensors_of_a_device_go_straight_into_shared_memory(url, folder, device, monkeypatch):
    # Tensors on the CPU take the same path here, except for streams.
    monkeypatch.setattr("tensorcask._device.is_on_device", lambda tensor: tensor.device.type == device)
    model = torch.nn.Linear(700, 500, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with tensorcask.Engine(url, folder=folder) as engine:
        expected = {}
        for step in range(1, 6):
            state = of_model(model, step)
            expected[step] = {name: value.detach().cpu().clone() for name, value in {**state["model"], **state}.items() if hasattr(value, "cpu")}
            saving = engine.begin_save(state, step=step)
            optimizer.zero_grad()
            model(torch.randn(64, 700, device=device)).square().sum().backward()
            outcome = saving.wait()
            assert (outcome.step, outcome.saved, saving.wait()) == (step, True, outcome)
            optimizer.step()
            assert not torch.equal(model.weight.detach().cpu(), expected[step]["weight"])
        found = engine.restore()
        assert (found.step, found.source) == (5, "slot")
        assert engine.wait("durable", 60).reached
        # The next call waits for the save.
        engine.begin_save(of_model(model, 6), step=6)
        assert engine.restore().step == 6
        assert found.state["tied"] is found.state["model"]["weight"]
        out = of_model(torch.nn.Linear(700, 500, device=device), 0)
        assert torch.equal(engine.restore(out=out).state["model"]["weight"].detach().cpu(), model.weight.detach().cpu())
        assert out["model"]["weight"].device.type == device
        engine.begin_save(of_model(model, 7), step=7)
    store = tensorcask.Store(url)
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.finish()
    for step, tensors in expected.items():
        loaded = store.load(step)
        assert torch.equal(loaded["model"]["weight"], tensors["weight"]) and torch.equal(loaded["tied"], tensors["weight"])
        assert torch.equal(loaded["late"], tensors["weight"].t()) and torch.equal(loaded["scalar"], tensors["bias"][0])
    assert store.load(7)["step"] == 7
    stop_agent(folder)


def write_over(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"damage")


def test_what_was_begun_of_a_damaged_state_does_not_stay(url, folder):
    noise = np.random.default_rng(7)
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save({"a": noise.random(300_000), "only": {"one": 1}}, step=1)
        assert engine.wait("durable", 60).reached
        engine.save({"a": noise.random(300_000), "only": {"two": noise.random(9)}, "bytes": b"2"}, step=2)
        assert engine.wait("durable", 60).reached
        expected = tensorcask.load(url, step=1)
    (run,) = agent_status(folder)["runs"]
    memory = Path(folder, run["key"])
    newest = max((memory / "memory-0" / "casks").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    write_over(newest, newest.stat().st_size // 2)
    (memory / "rank-0" / "arena").unlink()
    os.rename(url, url + ".away")
    with tensorcask.Engine(url, folder=folder) as engine:
        found = engine.restore()
        assert (found.step, found.source) == (1, "memory")
        assert any(step == 2 and "checksum" in why for _, step, why in found.passed_over), found.passed_over
        assert found.state.keys() == {"a", "only"} and found.state["only"] == {"one": 1}
        assert (found.state["a"] == expected["a"]).all()


def test_tied_tensors_are_one_again(url, folder):
    w = torch.arange(10_000.0).reshape(100, 100)
    state = {"a": w, "b": w, "c": w.t(), "d": w.t(), "alone": w.clone(), "n": np.ones(3)}
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state, step=1)
        engine.save({**state, "b": w + 1}, step=2)
        assert engine.wait("durable", 60).reached
        for step in (1, 2):
            out = {name: torch.zeros(100, 100) for name in "abcd"} | {"alone": torch.zeros(100, 100), "n": np.zeros(3)}
            for restored in (engine.restore(step), engine.restore(step, out=out)):
                for name, value in state.items():
                    assert torch.equal(torch.as_tensor(restored.state[name]), torch.as_tensor(value) + (step == 2 and name == "b"))
            loaded = engine.restore(step).state
            assert (loaded["a"] is loaded["b"]) == (step == 1) and loaded["c"] is loaded["d"] and loaded["a"] is not loaded["alone"]
            shared, turned = torch.zeros(100, 100), torch.zeros(100, 100)
            out = {"a": shared, "b": shared, "c": turned, "d": turned, "alone": torch.zeros(100, 100), "n": np.zeros(3)}
            if step == 2:
                with pytest.raises(ValueError, match="share memory"):
                    engine.restore(step, out=out)
                continue
            assert engine.restore(step, out=out).state["b"] is shared
            assert torch.equal(shared, w) and torch.equal(turned, w.t())
        engine.finish()
    with tensorcask.Engine(url, folder=folder) as engine:
        found = engine.restore(1)
        assert found.source == "tier" and found.state["a"] is found.state["b"]
        engine.finish()


def test_a_save_that_fails_while_it_is_copied_leaves_nothing(url, folder, monkeypatch):
    monkeypatch.setattr("tensorcask._device.is_on_device", lambda tensor: True)
    with tensorcask.Engine(url, folder=folder) as engine:
        engine.save(state_of(1), step=1)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "frombuffer", lambda *args, **named: torch.empty(1))
            with pytest.raises(RuntimeError, match="shape"):
                engine.save(state_of(2), step=2)
        check(engine.restore().state, 1)
        engine.save(state_of(3), step=3)
        check(engine.restore().state, 3)
        engine.finish()
    assert [snapshot.step for snapshot in tensorcask.Store(url).snapshots()] == [1, 3]


def test_a_killed_trainer_goes_on_from_memory(url, folder):
    trainer = textwrap.dedent(
        f"""
        import os, signal, sys
        import numpy as np, tensorcask
        engine = tensorcask.Engine({url!r}, folder={folder!r})
        for step in range(1, 100):
            engine.save({{"w": np.full(100_000, step, np.int32)}}, step=step)
            if step == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    killed = subprocess.run([sys.executable, "-c", trainer, "5"], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    with tensorcask.Engine(url, folder=folder) as engine:
        found = engine.restore()
        assert (found.step, found.source) == (5, "slot") and (found.state["w"] == 5).all()
    # Kills the agent as well. Shared memory holds the state, and the next agent uploads it to the store.
    stop(int(Path(folder, "agent.lock").read_text()))
    with tensorcask.Engine(url, folder=folder) as engine:
        assert engine.restore().source == "slot"
        engine.save({"w": np.full(100_000, 6, np.int32)}, step=6)
        assert engine.wait(timeout=60).reached
        engine.finish()
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [1, 2, 3, 4, 5, 6]


def test_a_second_trainer_is_refused_and_a_forked_process_has_none(url, folder):
    with tensorcask.Engine(url, folder=folder) as engine:
        with pytest.raises(tensorcask.ConflictError, match="being trained by another process"):
            tensorcask.Engine(url, folder=folder)
        engine.save({"w": np.ones(10)}, step=1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                engine.save({"w": np.ones(10)}, step=2)
            except tensorcask.InvalidArgumentError as error:
                code = 0 if "parent process of this fork" in str(error) else 2
            del engine
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        engine.save({"w": np.ones(10)}, step=2)
        assert engine.wait(timeout=60).reached


def test_options_are_checked_and_told(url, folder):
    words = {"back_pressure": "hurry", "encode": "never", "on_agent_loss": "cry", "precision": "vague", "codecs": "w=tc.x"}
    for wrong in (*({name: word} for name, word in words.items()), {"rank": 2, "world": 2}):
        with pytest.raises((ValueError, tensorcask.Error)):
            tensorcask.Engine(url, folder=folder, **wrong)
    with pytest.raises(TypeError, match="url"):
        tensorcask.Engine(tensorcask.Store(url), folder=folder)
    with pytest.raises(tensorcask.Error, match="could not be started"):
        tensorcask.Engine(url, folder=folder, agent=["/no/such/program"])
    with tensorcask.Engine(url, folder=folder, precision="near", codecs="*=tc.raw", policy="intermittent:4", back_pressure="skip") as engine:
        engine.save({"exp_avg": {"w": torch.rand(1000)}}, step=1)
        assert engine.wait(timeout=60).reached
        assert [errors.setting for errors in tensorcask.Store(url).snapshot().rounding()] == ["loguniform:16"]
        assert tensorcask.Store(url).sql("SELECT DISTINCT codec FROM chunks").fetchall() == [("tc.raw",)]


def test_a_save_that_waits_is_ended_by_a_signal(url, folder):
    class Rang(Exception):
        pass

    def ring():
        raise Rang

    with tensorcask.Engine(url, folder=folder) as engine:
        state = {"w": np.zeros(1000, np.uint8)}
        engine.save(state, step=1)
        agent = int(Path(folder, "agent.lock").read_text())
        assert engine.wait(timeout=60).reached
        pause(agent)
        before = signal.getsignal(signal.SIGALRM)
        try:
            engine.save(state, step=2)
            engine.save(state, step=3)
            with pytest.raises(Rang):
                once_it_waits(engine, ring)
                engine.save(state, step=4)
        finally:
            signal.signal(signal.SIGALRM, before)
            os.kill(agent, signal.SIGCONT)
        engine.save(state, step=5)
        assert engine.wait(timeout=60).reached
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [1, 2, 3, 5]


def test_a_handler_of_a_signal_cannot_use_an_engine_that_waits(url, folder):
    told = []

    with tensorcask.Engine(url, folder=folder) as engine:
        state = {"w": np.zeros(1000, np.uint8)}

        def ring():
            try:
                engine.save(state, step=9)
            except tensorcask.ConflictError as error:
                told.append(str(error))
            os.kill(agent, signal.SIGCONT)

        engine.save(state, step=1)
        agent = int(Path(folder, "agent.lock").read_text())
        assert engine.wait(timeout=60).reached
        pause(agent)
        before = signal.getsignal(signal.SIGALRM)
        try:
            engine.save(state, step=2)
            engine.save(state, step=3)
            once_it_waits(engine, ring)
            engine.save(state, step=4)
        finally:
            signal.signal(signal.SIGALRM, before)
            os.kill(agent, signal.SIGCONT)
        assert engine.wait(timeout=60).reached
    assert len(told) == 1 and "in use" in told[0]
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [1, 2, 3, 4]


WHOLE = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)


def sharded(mesh, step):
    return {
        "w": distribute_tensor(WHOLE * step, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(WHOLE.bfloat16() * step, mesh, [Shard(1)], src_data_rank=None),
        "copies": distribute_tensor(WHOLE + step, mesh, [Replicate()], src_data_rank=None),
        "one_row": distribute_tensor(torch.full((1, 4), float(step)), mesh, [Shard(0)], src_data_rank=None),
        "plain": torch.full((3,), float(step)),
        f"rng-{dist.get_rank()}": torch.full((2,), dist.get_rank()),
        "step": step,
    }


def check_sharded(state, step):
    assert torch.equal(state["w"].full_tensor(), WHOLE * step)
    assert torch.equal(state["columns"].full_tensor(), WHOLE.bfloat16() * step)
    assert torch.equal(state["copies"].full_tensor(), WHOLE + step)
    assert torch.equal(state["one_row"].full_tensor(), torch.full((1, 4), float(step)))
    assert (state["plain"] == step).all() and state["step"] == step


def ranks_save(url, folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    with tensorcask.Engine(url, folder=folder, rank=rank, world=world) as engine:
        assert engine.agree() is None
        for step in (1, 2, 3):
            engine.save(sharded(mesh, step), step=step)
        assert engine.wait(timeout=60).reached
        # A step that only one rank has.
        if rank == 0:
            engine.save(sharded(mesh, 4), step=4)
        step = engine.agree()
        assert step == 3, step
        found = engine.restore(step, out=sharded(mesh, 0))
        assert found.source == "slot", found
        check_sharded(found.state, 3)
        assert (found.state[f"rng-{rank}"] == rank).all()
        with pytest.raises(ValueError, match="pass out="):
            engine.restore(step)
        dist.barrier()


def ranks_restore(url, folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    out = sharded(mesh, 0)
    del out[f"rng-{rank}"]
    tree_of_two = {f"rng-{other}": torch.zeros(2, dtype=torch.int64) for other in range(2)}
    with tensorcask.Engine(url, folder=folder, rank=rank, world=world, run="another number of ranks") as engine:
        step = engine.agree()
        assert step == 3, step
        found = engine.restore(step, out={**out, **tree_of_two})
        assert found.source == "tier", found
        check_sharded({**out, **found.state}, 3)
        dist.barrier()


def differing(url, folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    with tensorcask.Engine(url, folder=folder, rank=rank, world=world) as engine:
        engine.save({"mine": torch.full((2,), rank)}, step=1)
        dist.barrier()
        waited = engine.wait(timeout=60)
        assert not waited.reached and "rank 1 has other values than rank 0" in waited.failures[0][1], waited
        dist.barrier()


def test_ranks_save_one_state_agree_and_another_number_of_them_restores_it(url, folder, tmp_path):
    on_ranks(2, tmp_path, ranks_save, url, folder)
    whole = tensorcask.load(url)
    assert torch.equal(whole["w"], WHOLE * 3) and torch.equal(whole["copies"], WHOLE + 3)
    assert (whole["plain"] == 3).all() and whole["step"] == 3 and (whole["rng-1"] == 1).all()
    on_ranks(3, tmp_path, ranks_restore, url, folder)


def test_ranks_that_differ_in_what_should_be_one_tensor_are_told(url, folder, tmp_path):
    on_ranks(2, tmp_path, differing, url, folder)


@pytest.mark.parametrize("encode", ["agent", "inline"])
def test_snapshots_have_statistics(encode, url, folder):
    with tensorcask.Engine(url, folder=folder, encode=encode, statistics=True) as engine:
        for step in (1, 2, 3):
            w = torch.full((1000,), float(step))
            w[7] = float("nan") if step == 3 else 0
            engine.save({"w": w}, step=step)
            assert engine.wait("durable", timeout=120).reached
    store = tensorcask.Store(url)
    assert store.sql("select step, nan, zero from stats order by step").fetchall() == [(1, 0, 1), (2, 0, 1), (3, 1, 0)]
    found = store.bisect("nan > 0")
    assert (found.step, found.last_good, found.is_certain) == (3, 2, True)


def test_snapshots_record_how_long_saves_stopped_the_trainer(url, folder):
    with tensorcask.Engine(url, folder=folder) as engine:
        for step in (1, 2):
            engine.save({"w": torch.full((1000,), float(step))}, step=step)
            assert engine.wait("durable", timeout=120).reached
    store = tensorcask.Store(url)
    times = store.snapshot(2).user["tc.times"]
    assert times["encode_ms"] > 0 and "upload_ms" not in times
    previous = times["previous"]
    assert previous["step"] == 1 and set(previous) == {"step", "stall_ms", "encode_ms", "upload_ms", "save_ms"}
    assert previous["save_ms"] >= previous["upload_ms"] > 0
    advice = store.advise(mtbf="8h")
    assert advice.times["stall"].how == "time for which a save stopped the training, median of 1 save"


def test_values_may_differ_between_ranks(url, folder, caplog):
    """Each rank restores its own. A reader of the whole state gets that of the lowest rank, and is warned."""

    def of_rank(rank):
        return {"w": torch.ones(4), "clock": {"elapsed": 100.0 + rank, "list": [rank]}, "nan": float("nan"), "file": io.BytesIO(b"same"), f"rank_{rank}": rank}

    def restored(rank, world):
        with tensorcask.Engine(url, folder=folder, rank=rank, world=world) as engine:
            return engine.restore().state

    engines = [tensorcask.Engine(url, folder=folder, rank=rank, world=2) for rank in range(2)]
    for rank, engine in enumerate(engines):
        engine.save(of_rank(rank), step=1)
    for engine in engines:
        assert engine.wait("durable", 60) == Waited(True, [], None)
    with caplog.at_level(logging.WARNING, "tensorcask"):
        assert [engine.restore().state["clock"] for engine in engines] == [{"elapsed": 100.0, "list": [0]}, {"elapsed": 101.0, "list": [1]}]
        assert not [record for record in caplog.records if "clock" in record.getMessage()]
    ends = [threading.Thread(target=engine.finish) for engine in engines]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    for engine in engines:
        engine.close()
    with caplog.at_level(logging.WARNING, "tensorcask"):
        state = tensorcask.load(url)
    (warning,) = (text for record in caplog.records if "ranks have saved" in (text := record.getMessage()))
    assert "step 1: ranks have saved different values of state['clock']['elapsed'], state['clock']['list']. " in warning
    assert state["clock"] == {"elapsed": 100.0, "list": [0]} and state["rank_1"] == 1 and state["file"].read() == b"same"
    assert restored(2, 3)["clock"]["elapsed"] == 100.0 and restored(0, 1)["clock"]["elapsed"] == 100.0


def test_two_tensors_of_one_name_are_refused(url, folder):
    with tensorcask.Engine(url, folder=folder) as engine:
        with pytest.raises(ValueError, match="both tensors would have the name `a.b`"):
            engine.save({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, step=1)
        engine.save({"a.b": torch.ones(2)}, step=2)
        out = {"a.b": torch.zeros(2)}
        engine.restore(out=out)
        assert torch.equal(out["a.b"], torch.ones(2))
        with pytest.raises(tensorcask.TemplateError, match="new"):
            engine.restore(out={**out, "new": torch.zeros(1)})
