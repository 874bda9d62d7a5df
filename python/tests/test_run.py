"""One object for a training run: real trainings, killed and resumed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import run_training
import tensorcask
import torch
import torch.multiprocessing as mp
from ranks import on_ranks
from run_training import Training, result, train
from tensorcask import Run
from torch import nn

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
ENGINE = [False, pytest.param(True, marks=needs_linux)]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(url, engine=False, seed=0, **options):
    """A small training that has taken a step, and its run."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer, Run(url, model=model, optimizer=optimizer, engine=engine, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()


def weight(model):
    return model.weight.detach().clone()


def check_same(whole, killed, first, rank=0):
    """Compares a run that was killed after step 7 and went on from ``first`` with one that was not."""
    losses, weights = result(whole, rank)
    assert [at for at, _ in losses] == list(range(10))
    found, ended = result(killed, rank)
    assert [at for at, _ in found] == [*range(8), *range(first, 10)]
    assert found == losses[:8] + losses[first:] and ended == weights


@pytest.mark.parametrize("engine", ENGINE)
def test_a_killed_process_goes_on_bit_for_bit(engine, tmp_path, host_memory):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    train("plain", whole, engine=False)
    command = [sys.executable, "-W", "ignore", run_training.__file__, killed, "7", json.dumps({"engine": engine})]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    train("plain", killed, engine=engine)
    check_same(whole, killed, 6)
    store = tensorcask.Store(killed / "store")
    assert store.steps == [2, 5, 8] and store.verify().is_clean


def rank_trains(kind, folder, memory, kill_at="-1"):
    train(kind, folder, int(kill_at), folder=memory)


@needs_linux
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_killed_ranks_go_on_bit_for_bit(kind, tmp_path, host_memory, caplog):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    on_ranks(2, whole, rank_trains, kind, whole, host_memory)
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        on_ranks(2, killed, rank_trains, kind, killed, host_memory, 7)
    on_ranks(2, killed, rank_trains, kind, killed, host_memory)
    for rank in range(2):
        check_same(whole, killed, 6, rank)
    store = tensorcask.Store(killed / "store")
    assert store.steps == [2, 5, 8] and store.verify().is_clean
    # Of tensors that both ranks have, one copy is stored.
    assert len({name.split(".")[0] for name in store.snapshot()}) == 2
    # One process resumes the same weights.
    training = Training(kind, alone=True)
    random = torch.get_rng_state()
    without = {name: part for name, part in training.parts().items() if name != "optimizer"}
    with pytest.raises(tensorcask.TemplateError, match="has a tensor `optimizer.state"):
        Run(killed / "store", **without, engine=False).resume()
    assert Run(killed / "store", **training.parts(), engine=False).resume() == 9
    assert "saved by 2 ranks, and 1 go on" in caplog.text and torch.equal(random, torch.get_rng_state()) and training.loader.done == 0
    assert training.scheduler.last_epoch == 9
    on_ranks(2, whole, rank_loads, kind, killed / "store", host_memory, tmp_path)
    assert json.loads((tmp_path / "loaded").read_text()) == training.weights()


def rank_loads(kind, store, memory, folder):
    training = Training(kind)
    with Run(store, **training.parts(), folder=memory) as run:
        assert run.best("loss") == run.best("loss", "min") and run.resume(step=8) == 9
        weights = training.weights()
        if torch.distributed.get_rank() == 0:
            Path(folder, "loaded").write_text(json.dumps(weights))


@pytest.mark.parametrize("engine", ENGINE)
def test_a_first_start_replaces_no_steps_and_a_resumed_one_does(engine, url, host_memory):
    model, optimizer, run = made(url, engine)
    with run:
        assert run.resume() == 0 and run.facts == {}
        for at in range(1, 6):
            step(model, optimizer)
            assert run.save(at, loss=1 / at, notes="a")
            if at == 3:
                third = weight(model)
    other, _, run = made(url, engine, seed=1)
    with run:
        with pytest.raises(tensorcask.ConflictError, match="could replace stored steps: step 5 is stored"):
            run.save(5)
        assert run.resume(step=3) == 4 and torch.equal(weight(other), third)
        assert run.facts == {"loss": 1 / 3, "notes": "a"}
        run.save(4, loss=7.0)
    store = tensorcask.Store(url)
    assert sorted(store.steps) == [1, 2, 3, 4, 5] and store.snapshot(4).user["loss"] == 7.0
    _, _, run = made(url, engine, overwrite=True)
    with run:
        run.save(1)
        with pytest.raises(tensorcask.NotFoundError, match="step 9"):
            run.resume(step=9)


@pytest.mark.parametrize("engine", ENGINE)
def test_an_error_loses_no_save(engine, url, host_memory):
    model, optimizer, run = made(url, engine)
    with pytest.raises(KeyError, match="a bug"), run:
        run.save(0)
        step(model, optimizer)
        run.save(1)
        raise KeyError("a bug")
    again, _, run = made(url, engine, seed=1)
    with run:
        assert run.resume() == 2 and torch.equal(weight(again), weight(model))


@pytest.mark.parametrize("engine", ENGINE)
def test_the_best_live_step(engine, url, host_memory):
    model, optimizer, run = made(url, engine, keep_last=5)
    with run:
        with pytest.raises(tensorcask.NotFoundError):
            run.best("loss")
        for at, loss in enumerate([0.1, 3.0, torch.tensor(0.5), float("nan"), 0.5, "none", 2.0, True]):
            step(model, optimizer)
            run.save(at, loss=loss, accuracy=-at)
            if at == 4:
                best = weight(model)
        # Steps 0 to 2 are forgotten.
        assert run.best("loss") == run.best("loss", "min") == 4 and run.best("loss", "max") == 6 and run.best("accuracy", "max") == 3
        with pytest.raises(tensorcask.NotFoundError, match="the fact `los`"):
            run.best("los")
        with pytest.raises(tensorcask.InvalidArgumentError, match="mode='least'"):
            run.best("loss", "least")
        assert run.resume(run.best("loss")) == 5 and torch.equal(weight(model), best)
        # A pinned step stays.
        run.store.pin(run.best("loss"))
        for at in range(5, 12):
            run.save(at)
    assert run.store.steps[0] == 4


def test_moments_are_those_of_their_weights(memory):
    """Deltas are small where the writer knows which tensors belong together."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(3, 2), nn.Linear(2, 2)
    both = [torch.optim.Adam([actor.weight]), torch.optim.SGD([actor.bias], lr=0.1, momentum=0.9)]
    average = torch.optim.swa_utils.AveragedModel(actor)
    run = Run(memory, model=actor, optimizer=both, critic=critic, critic_optimizer=torch.optim.AdamW(critic.parameters()), average=average)
    critic(actor(torch.randn(5, 3))).sum().backward()
    for optimizer in (*both, *run._parts.models["critic"][1]):
        optimizer.step()
    run.save(1)
    found = {info.name: (info.role, info.param) for info in tensorcask.Store(memory).snapshot().tensors().values()}
    assert found["model.weight"] == ("model", "weight") and found["optimizer.state.weight.exp_avg"] == ("exp_avg", "weight")
    assert found["optimizer.state.bias.momentum_buffer"] == ("momentum", "bias")
    assert found["critic.model.weight"] == ("model", "critic.weight")
    assert found["critic.optimizer.state.weight.exp_avg_sq"] == ("exp_avg_sq", "critic.weight")
    assert "average.model.module.weight" in found
    for part in (actor, critic, average):
        nn.init.zeros_(next(part.parameters()))
    other = Run(memory, **{name: model for name, (model, _) in run._parts.models.items()}, a=both[0], b=both[1], c=run._parts.models["critic"][1])
    assert other.resume() == 2 and all(next(part.parameters()).any() for part in (actor, critic, average))


class Notes:
    """An object that has tensors only once it has been used."""

    def __init__(self):
        self.seen = {}

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state


def test_parts_of_many_kinds(memory, caplog):
    def everything():
        model = nn.Linear(3, 2)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        tied = nn.Sequential(model, frozen)
        optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
        schedules = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10, cycle_momentum=False), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]
        other = nn.Linear(2, 1)
        parts = {"model": tied, "optimizer": optimizer, "scheduler": schedules, "scaler": None, "notes": Notes(), "shuffle": torch.Generator()}
        return parts | {"other": other, "lbfgs": torch.optim.LBFGS(other.parameters()), "ema": None}

    parts = everything()
    run = Run(memory, **parts)
    # Before the first step: optimizers have no moments.
    run.save(0)
    again = everything()
    assert Run(memory, **again).resume() == 1 and not again["optimizer"].state and not again["lbfgs"].state

    def closure():
        parts["lbfgs"].zero_grad()
        loss = (parts["other"](torch.ones(1, 2)) - 3).square().sum()
        loss.backward()
        return loss

    parts["lbfgs"].step(closure)
    parts["model"](torch.ones(1, 3)).sum().backward()
    parts["optimizer"].step()
    parts["scheduler"][0].step()
    parts["scheduler"][1].step(0.5)
    parts["notes"].seen = {"mean": torch.ones(2), "count": 3}
    drawn = torch.rand(2, generator=parts["shuffle"])
    run.save(1)
    expected = (torch.rand(2, generator=parts["shuffle"]), torch.rand(2))
    again = everything()
    assert Run(memory, **again).resume() == 2
    assert str(again["notes"].seen) == str(parts["notes"].seen) and not torch.equal(drawn, expected[0])
    assert all(map(torch.equal, expected, (torch.rand(2, generator=again["shuffle"]), torch.rand(2))))
    for name in ("optimizer", "lbfgs"):
        assert str(again[name].state_dict()) == str(parts[name].state_dict())
    assert [one.state_dict() for one in again["scheduler"]] == [one.state_dict() for one in parts["scheduler"]]
    # Fewer parts are told, more parts are refused before anything is filled.
    fewer = everything()
    del fewer["notes"]
    Run(memory, **fewer).resume()
    assert "has a part `notes`, which this run does not have" in caplog.text
    more = everything() | {"counter": Notes()}
    before = weight(more["other"])
    with pytest.raises(tensorcask.TemplateError, match="no part `counter`"):
        Run(memory, **more).resume()
    assert torch.equal(before, weight(more["other"]))
    run = Run(memory, **everything() | {"scheduler": more["scheduler"][:1]})
    with pytest.raises(tensorcask.TemplateError, match="another number of `scheduler` than 1"):
        run.resume()
    # The failed resume is no first start.
    with pytest.raises(tensorcask.ConflictError, match="the last resume has failed"):
        run.save(9)


def test_a_damaged_newest_step_is_passed_over(url, caplog):
    model = nn.Linear(200, 200)
    run = Run(url, model=model, engine=False, policy="full")
    run.save(1)
    first, before = weight(model), set(Path(url, "casks").iterdir())
    nn.init.uniform_(model.weight)
    run.save(2)
    newest = max(set(Path(url, "casks").iterdir()) - before, key=lambda path: path.stat().st_size)
    data = bytearray(newest.read_bytes())
    data[len(data) // 3] ^= 1
    newest.write_bytes(data)
    assert run.resume() == 2 and torch.equal(weight(model), first) and "step 2 cannot be rebuilt" in caplog.text


@needs_linux
def test_a_run_that_cannot_resume_saves_nothing(url, host_memory):
    _, _, run = made(url, True)
    with run:
        run.save(5)
    model = nn.Linear(3, 3)
    with Run(url, model=model, optimizer=torch.optim.AdamW(model.parameters())) as run:
        with pytest.raises(tensorcask.TemplateError, match="model.bias"):
            run.resume()
        with pytest.raises(tensorcask.ConflictError, match="the last resume has failed"):
            run.save(5)
        run.finish()
    assert run.store.steps == [5]


@needs_linux
def test_a_failed_save_is_logged(url, host_memory, caplog):
    model, optimizer, run = made(url, True, check="finite")
    with run:
        run.save(1)
        kept = weight(model)
        with torch.no_grad():
            model.weight[0, 0] = float("nan")
        run.save(2)
        assert run.engine.wait().failed
        with torch.no_grad():
            model.weight.copy_(kept)
        run.save(3)
        assert "step 2 is not in the store" in caplog.text and "model.weight" in caplog.text
    assert run.store.steps == [1, 3]


@pytest.mark.parametrize("engine", ENGINE)
def test_an_announced_end_ends_the_loop(engine, url, host_memory):
    before = signal.getsignal(signal.SIGTERM)
    model, optimizer, run = made(url, engine)
    with run:
        for at in range(run.resume(), 9):
            step(model, optimizer)
            if at == 2:
                signal.raise_signal(signal.SIGTERM)
            stop = run.preempted(grace=3600)
            run.save(at)
            if stop:
                break
    assert at == 2 and signal.getsignal(signal.SIGTERM) is before
    assert run.store.steps == [0, 1, 2]


@needs_linux
def test_where_the_engine_runs_by_itself(url, memory, host_memory, monkeypatch):
    model = nn.Linear(1, 1)
    with Run(url, model=model) as run:
        assert run.engine is not None and run.engine.store is run.store
    assert Run(memory, model=model).engine is None
    assert Run(tensorcask.Store(f"{url}-2"), model=model).engine is None
    monkeypatch.delattr("tensorcask._native.Engine")
    assert Run(url, model=model).engine is None
    with pytest.raises(tensorcask.UnsupportedError, match="needs Linux"):
        Run(url, model=model, engine=True)


def test_wrong_arguments(memory, monkeypatch):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    wrong = [
        ({}, "a run without parts"),
        ({"model": model.parameters()}, "model=.*use a torch.nn.Module"),
        ({"model": model, "optimizer": model}, "optimizer=.*use a torch.optim.Optimizer"),
        ({"model": model, "loader": [1, 2]}, "loader=.*no state_dict.*Use a stateful loader"),
        ({"model": model, "sheduler": 3}, "sheduler=3.*Store.save.*`sheduler` is not one of these"),
        ({"model": model, "step": 3}, "`step` is not one"),
        ({"model": model, "slots": 3}, "`slots` is not one"),
        ({"model": model, "rank_0": model}, "those of ranks"),
        ({"model": model, "engine": "no"}, "engine='no'"),
    ]
    for arguments, message in wrong:
        with pytest.raises(tensorcask.InvalidArgumentError, match=message):
            Run(memory, **arguments)
    with pytest.raises(tensorcask.InvalidArgumentError, match="base_cache.*tensorcask.Engine"):
        Run("runs/none", model=model, engine=True, base_cache="none")
    with pytest.raises(tensorcask.InvalidArgumentError, match="config= needs a URL"):
        Run(tensorcask.Store(memory), model=model, config={"a": "b"})
    with pytest.raises(tensorcask.UnsupportedError, match="parameters of several models, or of none"):
        Run(memory, optimizer=optimizer)
    run = Run(memory, model=model, optimizer=optimizer)
    with pytest.raises(TypeError, match="step 'new'"):
        run.save("new")
    with pytest.raises(tensorcask.InvalidArgumentError, match="loss"):
        run.save(1, loss=model)
    assert run.resume() == 0
    tensorcask.save({"model": model.state_dict()}, memory, step=1)
    with pytest.raises(tensorcask.TemplateError, match="not one of tensorcask.Run"):
        run.resume()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2.*init_process_group"):
        Run(memory, model=model)


def test_fsdp1_is_refused(memory):
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(tensorcask.UnsupportedError, match="FSDP1"):
        Run(memory, model=nn.Sequential(FullyShardedDataParallel()))
