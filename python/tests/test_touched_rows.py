"""Rows that TouchedRows records in training: saves name them, and every restored state is the saved one."""

import copy
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import stop
from ranks import on_ranks
from tensorcask.engine import agent_status
from tensorcask.torch import TouchedRows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

linux = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")

ROWS, WIDTH = 3000, 16
POLICIES = ["one_shot", "consecutive", "intermittent:3", "adaptive"]


class Model(nn.Module):
    """Two tables, the second summed over bags, and a layer that is trained by another optimizer."""

    def __init__(self, sparse, **options):
        super().__init__()
        torch.manual_seed(1)
        self.items = nn.Embedding(ROWS, WIDTH, sparse=sparse, padding_idx=0, **options)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum")
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, rows):
        return self.out(self.items(rows).mean(1) + self.bags(rows))


def tables(model):
    return [model.items.weight, model.bags.weight]


OPTIMIZERS = {
    "sgd": (False, lambda weights: torch.optim.SGD(weights, lr=0.5)),
    "sparse_sgd": (True, lambda weights: torch.optim.SGD(weights, lr=0.5)),
    "adagrad": (False, lambda weights: torch.optim.Adagrad(weights, lr=0.5)),
    "sparse_adagrad": (True, lambda weights: torch.optim.Adagrad(weights, lr=0.5)),
    "sparse_adam": (True, lambda weights: torch.optim.SparseAdam(weights, lr=0.5)),
}


class Training:
    """A model and its optimizers. Each step reads a few rows, which depend on the step alone."""

    def __init__(self, kind="sparse_adam", **options):
        sparse, make = OPTIMIZERS[kind]
        self.model = Model(sparse, **options)
        self.optimizer = make(tables(self.model))
        self.dense = torch.optim.AdamW(self.model.out.parameters())

    def step(self, number):
        rows = torch.randint(ROWS, (8, 5), generator=torch.Generator().manual_seed(number))
        rows[0, 0] = 0
        self.model(rows).square().mean().backward()
        for optimizer in (self.optimizer, self.dense):
            optimizer.step()
            optimizer.zero_grad()
        return set(rows.flatten().tolist())

    def state(self):
        return {"model": self.model.state_dict(), "tables": self.optimizer.state_dict(), "dense": self.dense.state_dict()}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["tables"])
        self.dense.load_state_dict(state["dense"])


def assert_equal(found, expected, path="state"):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, path
        assert torch.equal(found.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal(found[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{path}[{at}]")
    else:
        assert found == expected, path


class Spy(TouchedRows):
    """Keeps the rows of each claim."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.claims = []

    def claim(self, writer, tensors):
        claim = super().claim(writer, tensors)
        self.claims.append({name: rows for name, rows in claim.rows.items() if rows is not None})
        return claim


@pytest.fixture(autouse=True)
def no_warning(caplog, request):
    """No save finds a row that was left out, unless the test says so."""
    yield
    if "leaves_rows_out" not in request.fixturenames:
        assert not [record for record in caplog.records if "without the optimizer" in record.message]


@pytest.fixture
def leaves_rows_out():
    return None


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_states_come_back_whatever_optimizer_and_policy(tmp_path, kind, policy):
    training, store = Training(kind), tensorcask.Store(tmp_path)
    saved = {}
    with Spy(training.model, training.optimizer) as touched:
        for step in range(1, 8):
            rows = training.step(2 * step) | training.step(2 * step + 1)
            store.save(training.state(), step=step, policy=policy, base_cache="none", changed_rows=touched)
            saved[step] = copy.deepcopy(training.state())
            if step > 1:
                # Every row that was read, except padding. Values of a gradient may be zero by chance.
                found = touched.claims[-1]
                assert set(found["model.bags.weight"]) <= rows and len(found["model.bags.weight"]) > 0.8 * len(rows)
                assert set(found["model.items.weight"]) <= rows - {0}
                moments = {"sgd": 0, "sparse_sgd": 0, "adagrad": 2, "sparse_adagrad": 2, "sparse_adam": 4}[kind]
                assert len([name for name in found if name.startswith("tables.")]) == moments
    for step, state in saved.items():
        assert_equal(store.load(step), state)
    assert store.verify("full").is_clean


@pytest.mark.parametrize("base_cache", ["memory", "encoded", "none"])
def test_rows_of_a_failed_save_count_in_the_next(tmp_path, base_cache):
    training, store = Training(), tensorcask.Store(tmp_path)
    options = {"policy": "consecutive", "base_cache": base_cache}
    with Spy(training.model, training.optimizer) as touched:
        for step in range(1, 9):
            rows = training.step(step)
            if step in (3, 6):
                # The first fails before the writer sees it, the second in the commit.
                state = training.state() | ({"odd": object()} if step == 3 else {})
                with pytest.raises((TypeError, tensorcask.ConflictError)):
                    store.save(state, step=1 if step == 6 else step, changed_rows=touched, **options)
                failed = rows
                continue
            store.save(training.state(), step=step, changed_rows=touched, **options)
            if step in (4, 7):
                assert len(touched.claims[-1]["model.bags.weight"]) > 0.8 * len(rows | failed)
            assert_equal(store.load(step), training.state())


def test_one_object_serves_two_stores_with_intervals_of_their_own(tmp_path):
    training, often, seldom = Training("sparse_sgd"), tensorcask.Store(tmp_path / "often"), tensorcask.Store(tmp_path / "seldom")
    saved = {}
    with TouchedRows(training.model, training.optimizer, training.dense) as touched:
        for step in range(1, 10):
            training.step(step)
            often.save(training.state(), step=step, policy="consecutive", base_cache="none", changed_rows=touched)
            if step % 3 == 0:
                seldom.save(training.state(), step=step, policy="consecutive", base_cache="none", changed_rows=touched)
            saved[step] = copy.deepcopy(training.state())
    for step, state in saved.items():
        assert_equal(often.load(step), state)
        if step % 3 == 0:
            assert_equal(seldom.load(step), state)


def test_tied_tables_are_one_table(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
            self.other.weight = self.one.weight

        def forward(self, rows):
            # The last use is none of the modules'.
            return self.one(rows[0]).sum() + 2 * self.other(rows[1]).sum() + nn.functional.embedding(rows[2], self.one.weight).sum()

    model, store = Tied(), tensorcask.Store(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Spy(model, optimizer) as touched:
        for step in range(1, 5):
            rows = torch.randint(ROWS, (3, 7), generator=torch.Generator().manual_seed(step))
            model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            store.save(model.state_dict(), step=step, policy="consecutive", base_cache="none", changed_rows=touched)
            assert_equal(store.load(step), dict(model.state_dict()))
            if step > 1:
                assert set(touched.claims[-1]["one.weight"]) == set(rows.flatten().tolist())


def test_changes_outside_of_a_step_are_compared(tmp_path):
    training, store = Training("adagrad"), tensorcask.Store(tmp_path)
    options = {"policy": "consecutive", "base_cache": "none"}
    first = copy.deepcopy(training.state())

    def edit():
        with torch.no_grad():
            training.model.items.weight[5:9] += 1

    def load_in_place():
        store.load(1, out={"model": training.model.state_dict()})

    def moments():
        training.optimizer.state[training.model.items.weight]["sum"][3] = 2.0

    def decay():
        training.optimizer.param_groups[0]["weight_decay"] = 0.1
        training.step(77)
        training.optimizer.param_groups[0]["weight_decay"] = 0

    with Spy(training.model, training.optimizer) as touched:
        step = 0
        for change in (edit, lambda: training.load(first), load_in_place, moments, decay):
            for act in (lambda: None, change, lambda: None):
                training.step(step := step + 1)
                act()
                store.save(training.state(), step=step, changed_rows=touched, **options)
                assert_equal(store.load(step), training.state())
                assert ("model.items.weight" in touched.claims[-1]) == (act is not change and step > 1), step


def test_a_row_that_is_left_out_makes_no_wrong_snapshot(tmp_path, caplog, leaves_rows_out):
    training, store = Training("sgd"), tensorcask.Store(tmp_path)
    with Spy(training.model, training.optimizer) as touched:
        for step in range(1, 6):
            training.step(step)
            if step == 3:
                training.model.items.weight.data[100:120] += 1
            with caplog.at_level(logging.WARNING, "tensorcask"):
                store.save(training.state(), step=step, policy="consecutive", base_cache="none", changed_rows=touched)
            assert_equal(store.load(step), training.state())
            assert (touched.claims[-1] == {}) == (step in (1, 4, 5))
    assert [record.message for record in caplog.records if "without the optimizer" in record.message]
    assert store.verify("full").is_clean


def test_a_resumed_training_starts_again(tmp_path):
    training = Training()
    with TouchedRows(training.model, training.optimizer) as touched:
        for step in range(1, 4):
            training.step(step)
            tensorcask.Store(tmp_path).save(training.state(), step=step, changed_rows=touched, policy="consecutive")
    resumed, store = Training(), tensorcask.Store(tmp_path)
    with Spy(resumed.model, resumed.optimizer) as touched:
        resumed.load(store.load())
        for step in range(4, 8):
            for one in (training, resumed):
                one.step(step)
            store.save(resumed.state(), step=step, changed_rows=touched, policy="consecutive", base_cache="none")
            assert_equal(store.load(step), training.state())
    assert touched.claims[0] == {} and all(claim for claim in touched.claims[1:])


def test_gradients_are_accumulated_and_steps_are_skipped(tmp_path):
    training, store = Training("sparse_sgd"), tensorcask.Store(tmp_path)
    with TouchedRows(training.model, training.optimizer) as touched:
        for step in range(1, 6):
            for micro in range(3):
                rows = torch.randint(1, ROWS, (4, 3), generator=torch.Generator().manual_seed(10 * step + micro))
                training.model(rows).sum().backward()
            if step != 3:
                training.optimizer.step(lambda: 0.0)
            training.optimizer.zero_grad(set_to_none=step % 2 == 0)
            store.save(training.state(), step=step, policy="one_shot", base_cache="none", changed_rows=touched)
            assert_equal(store.load(step), training.state())


def test_a_removed_object_names_nothing(tmp_path):
    training, store = Training(), tensorcask.Store(tmp_path)
    touched = Spy(training.model, training.optimizer)
    for step in range(1, 5):
        training.step(step)
        if step == 3:
            touched.remove()
        store.save(training.state(), step=step, policy="consecutive", changed_rows=touched)
        assert_equal(store.load(step), training.state())
    assert [bool(claim) for claim in touched.claims] == [False, True, False, False]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda weights: torch.optim.Adam(weights), "is Adam"),
        (lambda weights: torch.optim.AdamW(weights), "is AdamW"),
        (lambda weights: torch.optim.SGD(weights, lr=1, momentum=0.9), "momentum=0.9"),
        (lambda weights: torch.optim.SGD(weights, lr=1, weight_decay=0.1), "weight_decay=0.1"),
        (lambda weights: torch.optim.Adagrad(weights, weight_decay=0.1), "weight_decay=0.1"),
        (lambda weights: torch.optim.Adagrad(weights, eps=0), "eps=0"),
        (lambda weights: torch.optim.SGD(weights, lr=1, maximize=True), "maximize=True"),
        (lambda weights: type("Mine", (torch.optim.SGD,), {})(weights, lr=1), "is Mine"),
    ],
)
def test_optimizers_that_change_other_rows_are_refused(make, reason):
    model = Model(False)
    with pytest.raises(ValueError, match=reason):
        TouchedRows(model, make(model.parameters()))
    with pytest.raises(ValueError, match="no optimizer has the weight"):
        TouchedRows(model, make(model.out.parameters()))


def test_tables_that_are_renormalized_in_the_forward_pass_are_compared(tmp_path):
    training, store = Training("sgd", max_norm=0.5), tensorcask.Store(tmp_path)
    with Spy(training.model, training.optimizer) as touched:
        for step in range(1, 5):
            training.step(step)
            store.save(training.state(), step=step, policy="consecutive", base_cache="none", changed_rows=touched)
            assert_equal(store.load(step), training.state())
    assert all("model.items.weight" not in claim for claim in touched.claims)
    assert "model.bags.weight" in touched.claims[-1]


def test_negative_zeros_in_a_gradient_count(tmp_path):
    model, store = nn.Embedding(ROWS, WIDTH), tensorcask.Store(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with torch.no_grad():
        model.weight[7] = -0.0
    with Spy(model, optimizer) as touched:
        for step in (1, 2):
            model.weight.grad = torch.zeros(ROWS, WIDTH)
            model.weight.grad[7] = -0.0
            optimizer.step()
            store.save(model.state_dict(), step=step, base_cache="none", policy="consecutive", changed_rows=touched)
            assert_equal(store.load(step), dict(model.state_dict()))
    assert touched.claims[-1] == {"weight": [7]}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_dcp_names_rows(tmp_path, asynchronous, policy):
    training, store = Training(), tensorcask.Store(tmp_path)
    saved = {}
    with Spy(training.model, training.optimizer) as touched:
        writer = store.writer(policy=policy, base_cache="none", changed_rows=touched)
        pending = None
        for step in range(1, 8):
            rows = training.step(step)
            if pending is not None:
                pending.result()
            state = {"model": training.model.state_dict(), "sums": dict(enumerate(training.optimizer.state_dict()["state"].values()))}
            saved[step] = copy.deepcopy(state)
            if step == 4:
                # Fails before anything is uploaded. Its rows count in the next save.
                with pytest.raises(ValueError):
                    dcp.save(state, checkpoint_id="latest", storage_writer=writer, no_dist=True)
                del saved[step]
                continue
            if not asynchronous:
                dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
            else:
                pending = dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
            if step > 2:
                found = next(rows for rows in touched.claims[-1].values())
                assert len(found) >= 0.8 * len(rows)
        if pending is not None:
            pending.result()
    for step, state in saved.items():
        loaded = store.load(step)
        assert_equal(loaded["model"], dict(state["model"]))
        assert_equal(loaded["sums"], {str(key): value for key, value in state["sums"].items()})
    assert store.verify("full").is_clean


def train_on_ranks(url):
    """Each rank reads other rows. Gradients are reduced, so each rank changes the rows of both."""
    training, store = Training("sgd"), tensorcask.Store(url)
    reduced = nn.parallel.DistributedDataParallel(training.model)
    with Spy(training.model, training.optimizer) as touched:
        writer = store.writer(policy="intermittent:4", base_cache="none", changed_rows=touched)
        for step in range(1, 8):
            own = torch.randint(1, ROWS, (4, 3), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            reduced(own).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            state = {"model": training.model.state_dict()}
            dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            if dist.get_rank() == 0:
                assert_equal(store.load(step)["model"], dict(state["model"]))
        named = [None, None]
        dist.all_gather_object(named, {name: rows for claim in touched.claims[-1:] for name, rows in claim.items()})
        found = {**named[0], **named[1]}
        both = torch.cat([torch.randint(1, ROWS, (4, 3), generator=torch.Generator().manual_seed(70 + rank)) for rank in (0, 1)])
        assert len(found["model.bags.weight"]) > 0.8 * both.unique().numel() and set(found["model.bags.weight"]) <= set(both.flatten().tolist())


def test_gradients_reduced_over_ranks(tmp_path):
    on_ranks(2, tmp_path, train_on_ranks, tmp_path / "store")


def test_dcp_refuses_lists_of_rows(tmp_path):
    with pytest.raises(TypeError, match="TouchedRows"):
        tensorcask.Store(tmp_path).writer(changed_rows={"w": [1]})


def codecs_of(store, step):
    """Codecs of the chunks of the tables and of their moments."""
    rows = store.sql(f"select tensor, codec from chunks where step = {step}").fetchall()
    return {codec for tensor, codec in rows if tensor in ("model.items.weight", "model.bags.weight") or tensor.startswith("tables.")}


@linux
@pytest.mark.parametrize("encode", ["agent", "inline"])
@pytest.mark.parametrize("keep_base_decoded", [False, True])
def test_the_engine_takes_rows(url, host_memory, encode, keep_base_decoded):
    options = {"policy": "consecutive", "encode": encode, "keep_base_decoded": keep_base_decoded}
    training, store, saved = Training("sparse_adam"), tensorcask.Store(url), {}
    with tensorcask.Engine(url, **options) as engine, Spy(training.model, training.optimizer) as touched:
        for step in range(1, 8):
            rows = training.step(step)
            outcome = engine.save(training.state(), step=step, changed_rows=touched)
            assert outcome.saved and outcome.failures == []
            saved[step] = copy.deepcopy(training.state())
            assert engine.wait("durable", 60).reached
            if step > 1:
                assert rows >= set(touched.claims[-1]["model.bags.weight"]) > set()
                # With a decoded base, smaller codecs may be found.
                assert codecs_of(store, step) == {"tc.rows"} or keep_base_decoded
        assert_equal(engine.restore().state, saved[7])
    for step, state in saved.items():
        assert_equal(store.load(step), state)
    assert "left out" not in Path(host_memory, "agent.log").read_text()


@linux
@pytest.mark.parametrize("back_pressure", ["wait", "skip", "drop_oldest_uncommitted"])
def test_rows_of_states_that_no_agent_encodes_are_not_lost(url, host_memory, back_pressure):
    options = {"policy": "consecutive", "back_pressure": back_pressure, "keep_base_decoded": False}
    training, store, saved = Training("sparse_sgd"), tensorcask.Store(url), {}
    lock = Path(host_memory, "agent.lock")
    with tensorcask.Engine(url, **options) as engine, TouchedRows(training.model, training.optimizer) as touched:
        for step in range(1, 25):
            training.step(step)
            engine.save(training.state(), step=step, changed_rows=touched)
            saved[step] = copy.deepcopy(training.state())
            if step % 6 == 0:
                stop(int(lock.read_text()))
        assert engine.wait("durable", 60).reached
    stored = [snapshot.step for snapshot in store.snapshots()]
    assert stored and (back_pressure != "wait" or stored == list(range(1, 25)))
    for step in stored:
        assert_equal(store.load(step), saved[step])
    assert store.verify("full").is_clean
    assert "left out" not in Path(host_memory, "agent.log").read_text()


@linux
def test_a_row_that_is_left_out_fails_no_save_of_the_engine(url, host_memory):
    training, store, saved = Training("sgd"), tensorcask.Store(url), {}
    with tensorcask.Engine(url, policy="consecutive") as engine, TouchedRows(training.model, training.optimizer) as touched:
        for step in range(1, 6):
            training.step(step)
            if step == 3:
                training.model.items.weight.data[100:120] += 1
            engine.save(training.state(), step=step, changed_rows=touched)
            saved[step] = copy.deepcopy(training.state())
            waited = engine.wait("durable", 60)
            assert waited.reached and waited.failures == []
    for step, state in saved.items():
        assert_equal(store.load(step), state)
    assert Path(host_memory, "agent.log").read_text().count("left out") == 1


@linux
def test_the_engine_takes_a_mapping_of_rows(url, host_memory):
    table = np.random.default_rng(1).integers(0, 256, (4000, 64), np.uint8)
    with tensorcask.Engine(url, policy="consecutive", keep_base_decoded=False) as engine:
        for step in range(1, 5):
            table[step] += 1
            # Without a comparison, all the rows that are named are stored.
            engine.save({"table": table, "other": step}, step=step, changed_rows={"table": [step, *range(1000, 2000)]})
            assert engine.wait("durable", 60).reached
            (run,) = agent_status(host_memory)["runs"]
            (size,) = [save["bytes_out"] for save in run["saves"] if save["step"] == step]
            assert step == 1 or 64_000 < size < 128_000
            assert (tensorcask.load(url)["table"] == table).all()
        for wrong, error in (({"tables": [1]}, tensorcask.NotFoundError), ({"table": [4000]}, tensorcask.InvalidArgumentError), ({"table": "x"}, TypeError)):
            with pytest.raises(error):
                engine.save({"table": table}, step=5, changed_rows=wrong)


@linux
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))])
def test_tables_on_a_device_name_their_rows(url, host_memory, device, monkeypatch):
    # Tensors on the CPU take the same path here, except for streams.
    monkeypatch.setattr("tensorcask._device.is_on_device", lambda tensor: tensor.device.type == device)
    model, store, saved = nn.Embedding(ROWS, WIDTH, sparse=True, device=device), tensorcask.Store(url), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with tensorcask.Engine(url, policy="consecutive", keep_base_decoded=False) as engine, TouchedRows(model, optimizer) as touched:
        for step in range(1, 6):
            model(torch.tensor([step, 100 * step], device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saving = engine.begin_save({"model": model.state_dict(), "step": step}, step=step, changed_rows=touched)
            saved[step] = model.weight.detach().cpu().clone()
            saving.wait()
            assert engine.wait("durable", 60).reached
    for step, weight in saved.items():
        assert torch.equal(store.load(step)["model"]["weight"], weight)
        codecs = store.sql(f"select distinct codec from chunks where step = {step} and tensor = 'model.weight'").fetchall()
        assert step == 1 or codecs == [("tc.rows",)]
    assert "left out" not in Path(host_memory, "agent.log").read_text()


def shards_name_rows(url, folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    tables = {"table": torch.arange(4000.0 * 16).reshape(4000, 16), "row": torch.zeros(1, 16)}
    with tensorcask.Engine(url, folder=folder, rank=rank, world=world, policy="consecutive", keep_base_decoded=False) as engine:
        for step in range(1, 5):
            for table in tables.values():
                table[-1] += step
            tables["table"][step] += 1
            state = {name: distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None) for name, table in tables.items()}
            # The second rank has no part of the table of one row.
            engine.save(state, step=step, changed_rows={"table": [step, 3999], "row": [0]})
            assert engine.wait("durable", 60).reached
            dist.barrier()
            for name, table in tables.items():
                assert torch.equal(tensorcask.load(url)[name], table)
            dist.barrier()


@linux
def test_ranks_name_the_rows_of_whole_tables(url, host_memory, tmp_path):
    on_ranks(2, tmp_path, shards_name_rows, url, host_memory)
    codecs = tensorcask.Store(url).sql("select distinct codec from chunks where step > 1 and tensor = 'table'").fetchall()
    assert codecs == [("tc.rows",)]
    assert "left out" not in Path(host_memory, "agent.log").read_text()
