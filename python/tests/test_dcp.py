"""torch.distributed.checkpoint through a store: real ranks on gloo."""

import io
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}


def expected(step):
    """Returns values that differ at every place. Each step changes some."""
    values = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    values[step % 7] += step
    return values


def state_of(mesh, placement, step, fill):
    def tensor(dtype):
        whole = expected(step).to(dtype) if fill else torch.full((7, 10), -1, dtype=dtype)
        return distribute_tensor(whole, mesh, [PLACEMENTS[placement]], src_data_rank=None)

    return {
        "model": {"w": tensor(torch.bfloat16), "small": distribute_tensor(torch.full((2,), float(step) if fill else -1.0), mesh, [Shard(0)], src_data_rank=None)},
        "optim": {"state": {"w": {"master": tensor(torch.float32), "exp_avg": tensor(torch.float32), "step": torch.tensor(float(step if fill else -1))}}},
        "plain": torch.full((3,), float(step) if fill else -1.0),
        "step": step if fill else None,
        "lr": [0.1, "text", None] if fill else None,
        "pair": (1, torch.ones(2) * step) if fill else None,
        "list": [torch.full((1,), float(step) if fill else -1.0), 5 if fill else 0],
        "extra": io.BytesIO(b"rng") if fill else None,
    }


def check(state, step):
    for key in ("w",):
        assert torch.equal(state["model"][key].full_tensor(), expected(step).bfloat16())
    assert torch.equal(state["model"]["small"].full_tensor(), torch.full((2,), float(step)))
    for key in ("master", "exp_avg"):
        assert torch.equal(state["optim"]["state"]["w"][key].full_tensor(), expected(step))
    assert state["optim"]["state"]["w"]["step"] == step and (state["plain"] == step).all()
    assert state["step"] == step and state["lr"] == [0.1, "text", None]
    assert state["pair"][0] == 1 and (state["pair"][1] == step).all()
    assert state["list"][0] == step and state["list"][1] == 5 and state["extra"].read() == b"rng"


def save_steps(url, placement, first, count):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    store = tensorcask.Store(url)
    writer = store.writer(policy="intermittent:3", user=lambda step: {"loss": 1 / step})
    for step in range(int(first), int(first) + int(count)):
        dcp.save(state_of(mesh, placement, step, True), checkpoint_id=f"step-{step}", storage_writer=writer)
        assert (writer.saved is not None) == (dist.get_rank() == 0)


def load_steps(url, placement, first, count):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for step in range(int(first), int(first) + int(count)):
        state = state_of(mesh, placement, step, False)
        # With a process group, one rank reads the description for all.
        group = dist.group.WORLD if step % 2 else None
        dcp.load(state, checkpoint_id=f"step-{step}", storage_reader=tensorcask.Store(url).reader(process_group=group))
        check(state, step)


def load_all(url, world, count):
    """Loads the saves of every world size, with every placement."""
    for saved_world in "123":
        for saved in PLACEMENTS:
            for placement in PLACEMENTS:
                load_steps(f"{url}-{saved_world}-{saved}", placement, 1, count)


def test_what_any_ranks_saved_any_ranks_load(tmp_path):
    url = tmp_path / "store"
    for world in (1, 2, 3):
        on_ranks(world, tmp_path, save_placements, url, world)
    for world in (1, 2, 3):
        on_ranks(world, tmp_path, load_all, url, world, 2)
    for world in (1, 2, 3):
        for placement in PLACEMENTS:
            store = tensorcask.Store(f"{url}-{world}-{placement}")
            assert [info.kind for info in store.snapshots()] == ["base", "delta"]
            assert store.snapshots()[1].user["loss"] == 0.5
            whole = store.load()
            assert torch.equal(whole["model"]["w"], expected(2).bfloat16()) and whole["step"] == 2
            assert torch.equal(whole["optim"]["state"]["w"]["master"], expected(2))
            assert whole["pair"][0] == 1 and whole["lr"] == [0.1, "text", None] and whole["extra"].read() == b"rng"
            assert store.verify().is_clean
            assert {info.role for info in store.snapshot().tensors().values()} >= {"model", "master", "exp_avg"}


def save_placements(url, world):
    for placement in PLACEMENTS:
        save_steps(f"{url}-{world}-{placement}", placement, 1, 2)


def test_a_run_goes_on_with_other_ranks(tmp_path):
    """Another number of ranks continues a store that holds deltas."""
    url = tmp_path / "store"
    on_ranks(2, tmp_path, save_steps, url, "rows", 1, 2)
    on_ranks(3, tmp_path, save_steps, url, "columns", 3, 2)
    on_ranks(1, tmp_path, load_steps, url, "copies", 1, 4)
    assert tensorcask.Store(url).verify().is_clean


def fsdp_run(url):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model, optimizer, steps):
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def state(model, optimizer):
        found, optim = get_state_dict(model, optimizer)
        return {"model": found, "optim": optim}

    store = tensorcask.Store(url)
    model, optimizer = make(0)
    train(model, optimizer, 3)
    # The save and the training communicate at the same time.
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(state(model, optimizer), checkpoint_id="3", storage_writer=store.writer(), process_group=group)
    losses = train(model, optimizer, 3)
    future.result()
    other, other_optimizer = make(7)
    loaded = state(other, other_optimizer)
    dcp.load(loaded, checkpoint_id="3", storage_reader=store.reader())
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    assert train(other, other_optimizer, 3) == losses


def test_fsdp2_resumes_bit_for_bit(tmp_path):
    on_ranks(2, tmp_path, fsdp_run, tmp_path / "store")


def fail_one_rank(url):
    """A rank that cannot save makes the whole save fail. The next save succeeds."""
    mesh = init_device_mesh("cpu", (2,))
    store = tensorcask.Store(url)
    writer = store.writer(policy="consecutive")
    dcp.save(state_of(mesh, "rows", 1, True), checkpoint_id="1", storage_writer=writer)
    bad = state_of(mesh, "rows", 2, True)
    if dist.get_rank() == 1:
        bad["only here"] = {1, 2}
    try:
        dcp.save(bad, checkpoint_id="2", storage_writer=writer)
    except BaseException as error:
        assert "only here" in str(error)
    else:
        raise AssertionError("no error")
    for step in (3, 4):
        dcp.save(state_of(mesh, "rows", step, True), checkpoint_id=str(step), storage_writer=writer)
    assert [info.step for info in store.snapshots()] == [1, 3, 4]
    assert [info.kind for info in store.snapshots()] == ["base", "delta", "delta"]


def test_a_failed_rank_commits_nothing(tmp_path):
    on_ranks(2, tmp_path, fail_one_rank, tmp_path / "store")
    assert tensorcask.Store(tmp_path / "store").verify().is_clean


def fail_in_the_background(url):
    writer = tensorcask.Store(url).writer(max_failed_saves=2)
    good = {"w": torch.ones(2)}
    for step in range(1, 5):
        # A set cannot be stored. Only one rank has one.
        state = good | ({"bad": {1}} if dist.get_rank() == 1 else {})
        future = dcp.async_save(state, checkpoint_id=str(step), storage_writer=writer)
        try:
            future.result()
        except BaseException as error:
            assert "bad" in str(error)
        else:
            raise AssertionError("no error")
    dcp.async_save(good, checkpoint_id="5", storage_writer=writer).result()


def test_a_rank_that_fails_again_and_again_does_not_leave_the_others_waiting(tmp_path):
    on_ranks(2, tmp_path, fail_in_the_background, tmp_path / "store")
    assert [info.step for info in tensorcask.Store(tmp_path / "store").snapshots()] == [5]


def pipeline(url):
    """Each rank has tensors and values that no other has."""
    rank = dist.get_rank()
    state = {"stage": {f"layer{rank}": {"w": torch.full((4,), float(rank)), "name": f"of rank {rank}"}}, "step": 1}
    dcp.save(state, checkpoint_id="1", storage_writer=tensorcask.Store(url).writer())
    group = dist.group.WORLD
    try:
        dcp.load({"step": 0}, checkpoint_id="2", storage_reader=tensorcask.Store(url).reader(process_group=group))
    except BaseException as error:
        assert "not_found" in str(error)
    else:
        raise AssertionError("no error")
    mine = {"stage": {f"layer{rank}": {"w": torch.zeros(4), "name": ""}}, "step": 0}
    dcp.load(mine, checkpoint_id="1", storage_reader=tensorcask.Store(url).reader())
    assert (mine["stage"][f"layer{rank}"]["w"] == rank).all() and mine["stage"][f"layer{rank}"]["name"] == f"of rank {rank}"


def test_ranks_may_have_different_values(tmp_path):
    on_ranks(3, tmp_path, pipeline, tmp_path / "store")
    whole = tensorcask.load(tmp_path / "store")
    assert {key: value["name"] for key, value in whole["stage"].items()} == {f"layer{rank}": f"of rank {rank}" for rank in range(3)}


def process_async(url):
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    mesh = init_device_mesh("cpu", (2,))
    store = tensorcask.Store(url)
    for step in (1, 2, 3):
        future = dcp.async_save(
            state_of(mesh, "rows", step, True) | {"extra": None},
            checkpoint_id=str(step),
            storage_writer=store.writer(policy="consecutive"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result()
    state = state_of(mesh, "columns", 3, False) | {"extra": None}
    dcp.load(state, checkpoint_id="3", storage_reader=store.reader())
    state["extra"] = io.BytesIO(b"rng")
    check(state, 3)
    assert [info.kind for info in store.snapshots()] == ["base", "delta", "delta"]
    times = [store.snapshot(step).user["tc.times"] for step in (2, 3)]
    assert all(of_step["previous"]["stall_ms"] > 0 for of_step in times)


def test_saving_in_another_process(tmp_path):
    on_ranks(2, tmp_path, process_async, tmp_path / "store")


# One process, without torch.distributed.


def test_async_saves_store_what_was_staged(url):
    store = tensorcask.Store(url)
    writer = store.writer(policy="consecutive")
    state = {"w": torch.zeros(300_000), "turned": torch.zeros(500, 400).t(), "n": [0], "step": torch.tensor(0)}
    state["tied"] = state["w"]
    futures = []
    for step in range(1, 5):
        for tensor in (state["w"], state["turned"], state["step"]):
            tensor.fill_(step)
        state["n"][0] = step
        futures.append(dcp.async_save(state, checkpoint_id=f"run-7/step_{step}", storage_writer=writer))
        # Later changes of the tensors do not reach the save.
        for tensor in (state["w"], state["turned"], state["step"]):
            tensor.fill_(-1)
        state["n"][0] = -1
        futures[-1].result()
        # The thread of a save holds its tensors until it ends.
        for thread in threading.enumerate():
            if thread.name.startswith("AsyncCheckpointExecutor"):
                thread.join()
    for step in range(1, 5):
        loaded = store.load(step)
        assert (loaded["w"] == step).all() and (loaded["turned"] == step).all() and loaded["n"] == [step] and loaded["tied"] is loaded["w"]
    assert len(writer._arenas) == 1, "each save reuses the memory"


def test_saves_record_their_times_and_stale_weights_are_named(url, caplog):
    store = tensorcask.Store(url)
    writer = store.writer(policy="consecutive")
    state = {"model": {"a": torch.zeros(1000), "b": torch.zeros(1000)}, "optimizer": {"exp_avg": {"a": torch.ones(1000), "b": torch.ones(1000)}}}
    for step in range(1, 5):
        state["model"]["a"].fill_(step)
        if step == 1:
            dcp.save(state, checkpoint_id=f"step_{step}", storage_writer=writer)
        else:
            dcp.async_save(state, checkpoint_id=f"step_{step}", storage_writer=writer).result()
    assert writer.saved.unchanged == [("model.b", 1)]
    assert sum("tensor `model.b` has not changed since step 1" in record.getMessage() for record in caplog.records) == 1
    times = [store.snapshot(step).user["tc.times"] for step in range(1, 5)]
    assert all(of_step["encode_ms"] > 0 and of_step["upload_ms"] >= 0 for of_step in times)
    previous = [of_step.get("previous") for of_step in times]
    assert previous[0] is None and [of_step["step"] for of_step in previous[1:]] == [1, 2, 3]
    assert all(of_step["save_ms"] >= times[at]["encode_ms"] for at, of_step in enumerate(previous[1:]))
    # `dcp.save` stops the training for the whole save, `async_save` for the copy.
    assert "stall_ms" not in previous[1] and previous[2]["stall_ms"] > 0
    advice = store.advise(mtbf="8h", step_time="1s")
    assert advice.times["stall"].how == "time for which a save stopped the training, median of 2 saves"


def test_a_stall_belongs_to_the_state_that_was_staged(url):
    def user(step):
        if step == 1:
            raise RuntimeError("no facts")
        return {}

    store = tensorcask.Store(url)
    writer = store.writer(policy="consecutive", user=user)
    with pytest.raises(CheckpointException, match="no facts"):
        dcp.async_save({"w": torch.ones(1000)}, checkpoint_id="1", storage_writer=writer).result()
    for step in (2, 3):
        dcp.save({"w": torch.full((1000,), float(step))}, checkpoint_id=str(step), storage_writer=writer)
    previous = store.snapshot(3).user["tc.times"]["previous"]
    assert previous["step"] == 2 and "stall_ms" not in previous

    staged = [writer.stage({"w": torch.ones(1000), "n": number}) for number in (1, 2)]
    for arena, seconds in zip(writer._arenas[-2:], (1.0, 2.0), strict=True):
        arena.stall_seconds = seconds
    assert [writer._stall_of([state["w"]]) for state in staged] in ([1.0, 2.0], [2.0, 1.0])
    assert writer._stall_of([torch.ones(1000)]) is None and writer._stall_of([]) is None


def test_overlapping_stages_do_not_share_memory(url):
    writer = tensorcask.Store(url).writer()
    first = writer.stage({"w": torch.ones(1000)})
    kept = first["w"][10:20]
    second = writer.stage({"w": torch.full((1000,), 2.0)})
    assert (first["w"] == 1).all() and (second["w"] == 2).all()
    del first
    third = writer.stage({"w": torch.full((1000,), 3.0)})
    assert (kept == 1).all() and (second["w"] == 2).all() and (third["w"] == 3).all()
    del kept, second, third
    writer.stage({"w": torch.zeros(10)})
    assert len(writer._arenas) <= 3


def test_failed_saves_in_the_background_are_told(url, caplog):
    store = tensorcask.Store(url)
    writer = store.writer(max_failed_saves=2)
    bad = {"w": torch.ones(2), "bad": {1}}
    with pytest.raises(BaseException, match="bad"):
        dcp.async_save(bad, checkpoint_id="1", storage_writer=writer).result()
    with pytest.raises(BaseException, match="bad"):
        dcp.async_save(bad, checkpoint_id="2", storage_writer=writer).result()
    assert "a save in the background has failed" in caplog.text
    with pytest.raises(RuntimeError, match="2 saves in a row have failed"):
        dcp.async_save(bad, checkpoint_id="3", storage_writer=writer)
    dcp.async_save({"w": torch.ones(2)}, checkpoint_id="4", storage_writer=writer).result()
    assert [info.step for info in store.snapshots()] == [4]


@pytest.mark.parametrize(("value", "says"), [(torch.empty(3, device="meta"), "meta tensor"), (torch.ones(3).to_sparse(), "layout torch.sparse_coo")])
def test_what_cannot_be_staged_is_named(url, value, says):
    with pytest.raises(TypeError, match=re.escape("state['outer'][1]['bad']") + f".*{says}"):
        dcp.async_save({"outer": [0, {"bad": value}]}, checkpoint_id="1", storage_writer=tensorcask.Store(url).writer())


def test_states_of_either_way_are_read_by_the_other(url):
    store = tensorcask.Store(url)
    state = {"model": {"w": torch.randn(5, 3), "tied": None}, "opt": {0: {"m": torch.ones(2)}}, "list": [torch.zeros(1), 3], "lr": 0.25, "pair": (1, torch.ones(1))}
    state["model"]["tied"] = state["model"]["w"]
    store.save(state, step=1)
    shared = torch.zeros(5, 3)
    out = {"model": {"w": shared, "tied": shared}, "opt": {0: {"m": torch.zeros(2)}}, "list": [torch.ones(1), 0], "lr": 0.0, "pair": None}
    dcp.load(out, storage_reader=store.reader(step=1))
    assert torch.equal(shared, state["model"]["w"]) and out["lr"] == 0.25 and out["list"] == [torch.zeros(1), 3]
    assert (out["opt"][0]["m"] == 1).all() and out["pair"][0] == 1 and (out["pair"][1] == 1).all()
    half = {"model": {"w": torch.zeros(5, 3, dtype=torch.float64)}}
    dcp.load(half, storage_reader=store.reader())
    assert torch.equal(half["model"]["w"], state["model"]["w"].double())
    with pytest.raises(BaseException, match="Size mismatch"):
        dcp.load({"model": {"w": torch.zeros(5, 4)}}, storage_reader=store.reader())
    with pytest.raises(BaseException, match="absent"):
        dcp.load({"absent": torch.zeros(1)}, storage_reader=store.reader())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.complex64, torch.bool, torch.uint16])
def test_dtypes_through_dcp(dtype, memory):
    size = torch.empty(6, 4, dtype=dtype)
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 2, 24 * size.element_size(), np.uint8))
    tensor = data.view(dtype).reshape(6, 4)
    store = tensorcask.Store(memory)
    dcp.save({"w": tensor}, checkpoint_id="1", storage_writer=store.writer())
    out = {"w": torch.zeros_like(data).view(dtype).reshape(6, 4)}
    dcp.load(out, checkpoint_id="1", storage_reader=store.reader())
    assert torch.equal(out["w"].reshape(-1).view(torch.uint8), data)


def test_no_pickle_reaches_the_store(url):
    class Trap:
        def __reduce__(self):
            return (print, ("pickled",))

    store = tensorcask.Store(url)
    with pytest.raises(BaseException, match="Trap"):
        dcp.save({"trap": Trap()}, checkpoint_id="1", storage_writer=store.writer())
    dcp.save({"value": {"text": [1, "x"]}}, checkpoint_id="1", storage_writer=store.writer())
    stored = b"".join(path.read_bytes() for path in Path(url).rglob("*") if path.is_file())
    assert b"\x80\x02" not in stored and b"PK\x03\x04" not in stored


def test_writers_survive_pickling(url):
    writer = tensorcask.Store(url).writer(policy="full", user={"a": 1}, on_unsupported="skip", overwrite=True)
    for value in (1.0, 2.0):
        again = pickle.loads(pickle.dumps(writer))
        dcp.save({"w": torch.full((1,), value), "bad": {1}}, checkpoint_id="1", storage_writer=again)
    store = tensorcask.Store(url)
    assert store.snapshots()[0].user["a"] == 1 and store.load() == {"w": torch.full((1,), 2.0)}


def trained():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_moments_with_text_keys_are_a_warning(url, caplog):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = trained()
    store = tensorcask.Store(url)
    numbered = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(numbered, checkpoint_id="1", storage_writer=store.writer())
    assert list(store.load(step=1)["optimizer"]["state"]) == ["0", "1"]
    assert "step 1: state['optimizer']['state'] has keys such as '0'" in caplog.text
    caplog.clear()
    named = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(named, checkpoint_id="2", storage_writer=store.writer())
    assert set(store.load(step=2)["optimizer"]["state"]) == {"weight", "bias"}
    store.save(numbered, step=3)
    assert set(store.load(step=3)["optimizer"]["state"]) == {0, 1}
    assert "moments" not in caplog.text


def test_moments_that_a_load_leaves_out_are_a_warning(url, caplog):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = trained()
    store = tensorcask.Store(url)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id="1", storage_writer=store.writer())
    other = torch.nn.Linear(3, 2)
    other_optimizer = torch.optim.AdamW(other.parameters())
    without = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    dcp.load(without, checkpoint_id="1", storage_reader=store.reader())
    assert "step 1 has moments (optimizer.state.*), but the state to load has none" in caplog.text
    caplog.clear()
    state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(state, checkpoint_id="1", storage_reader=store.reader())
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for key, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(values[name], other_optimizer.state_dict()["state"][key][name]) for name in values)
    assert "moments" not in caplog.text
