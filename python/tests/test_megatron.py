"""Megatron Core's distributed checkpoints through a store: real ranks on gloo, the real library."""

import io
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed as dist
from conftest import end_agent
from megatron_on_cpu import own_format, without_cuda
from ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException

pytest.importorskip("megatron.core.dist_checkpointing")
from megatron.core import dist_checkpointing, package_info  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from tensorcask import megatron  # noqa: E402

ROWS, COLUMNS, LAYERS = 12, 6, 2
# Megatron Core 0.16 finds a strategy by the backend in metadata.json. Later versions must be given one.
FINDS_STRATEGIES = package_info.VERSION[:2] < (0, 17)
# Megatron Core 0.19 puts plain values among the objects, where earlier versions write common.pt.
COMMON_IS_A_FILE = package_info.VERSION[:2] < (0, 19)
# Keys other than text, and mappings that look like the stored forms of other values.
ODD = {0: "a", "e": {}, (torch.bfloat16, torch.float32): [1, (torch.int8,)], "#pairs": {"#dtype": "x"}, "list": [{}, {2: None}]}


def expected(key, step):
    values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + len(key)
    values[step % ROWS] += step
    return values


def random_states(rank):
    random.seed(rank)
    return {"python": random.getstate(), "numpy": np.random.RandomState(rank).get_state(), "torch": torch.arange(4, dtype=torch.uint8) + rank}


def state_of(step, *, fill, with_objects=True):
    """Tensors in shards of rows, of columns, in copies and by layers; objects of each rank; plain values."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def part(key, axis, dtype):
        whole = expected(key, step).to(dtype)
        data = whole.chunk(world, axis)[rank].clone() if fill else torch.full_like(whole.chunk(world, axis)[rank], -1)
        return ShardedTensor.from_rank_offsets(key, data, (axis, rank, world))

    layers = []
    for layer in range(LAYERS):
        data = (expected(f"layers.{layer}", step) if fill else torch.zeros(ROWS, COLUMNS)).chunk(world, 0)[rank].clone()
        # All layers are one tensor with one more axis.
        layers.append(ShardedTensor.from_rank_offsets("decoder.layers.w", data, (0, layer, LAYERS), (1, rank, world), prepend_axis_num=1))
    copied = expected("norm", step)[0].clone() if fill else torch.zeros(COLUMNS)
    state = {
        "model": {"rows": part("rows", 0, torch.bfloat16), "columns": part("columns", 1, torch.float32), "layers": layers},
        "norm": ShardedTensor.from_rank_offsets("norm", copied, replica_id=rank),
        "optimizer": {"exp_avg": {"rows": part("optimizer.state.exp_avg.rows", 0, torch.float32)}},
        "iteration": step,
        "args": {"lr": 0.1},
    }
    if with_objects:
        state["rng"] = ShardedObject("rng_state", random_states(rank) if fill else None, (world,), (rank,))
        state["extra"] = ShardedObject("extra", io.BytesIO(b"state of a module") if fill else None, (1,), (0,), replica_id=rank)
        state["plain"] = ShardedObject("plain", torch.arange(3, dtype=torch.uint8) if fill else None, (1,), (0,), replica_id=rank)
        state["odd"] = ShardedObject("odd", ODD if fill else None, (1,), (0,), replica_id=rank)
    return state


def check(loaded, step, with_objects=True):
    rank, world = dist.get_rank(), dist.get_world_size()
    assert torch.equal(loaded["model"]["rows"], expected("rows", step).bfloat16().chunk(world, 0)[rank])
    assert torch.equal(loaded["model"]["columns"], expected("columns", step).chunk(world, 1)[rank])
    for layer in range(LAYERS):
        assert torch.equal(loaded["model"]["layers"][layer], expected(f"layers.{layer}", step).chunk(world, 0)[rank])
    assert torch.equal(loaded["norm"], expected("norm", step)[0])
    assert torch.equal(loaded["optimizer"]["exp_avg"]["rows"], expected("optimizer.state.exp_avg.rows", step).chunk(world, 0)[rank])
    assert loaded["iteration"] == step and loaded["args"] == {"lr": 0.1}
    if with_objects:
        was = random_states(rank)
        assert loaded["rng"]["python"] == was["python"] and torch.equal(loaded["rng"]["torch"], was["torch"])
        assert all(np.array_equal(a, b) for a, b in zip(loaded["rng"]["numpy"], was["numpy"], strict=True))
        assert loaded["extra"].read() == b"state of a module"
        assert torch.equal(loaded["plain"], torch.arange(3, dtype=torch.uint8)) and loaded["odd"] == ODD


def saves(folder):
    os.environ["TENSORCASK_EVERY"] = "2"
    for step in (10, 20, 30):
        megatron.save(state_of(step, fill=True), f"{folder}/iter_{step:07}")
        assert megatron.latest(folder).name == f"iter_{step:07}"


def load_by_megatron(state, folder):
    return dist_checkpointing.load(state, folder, sharded_strategy=None if FINDS_STRATEGIES else megatron.LoadStrategy())


def loads(folder, with_objects):
    for step in (10, 30):
        for load in (megatron.load, load_by_megatron):
            state = state_of(step, fill=False, with_objects=with_objects == "True")
            check(load(state, f"{folder}/iter_{step:07}"), step, with_objects == "True")


def test_layouts_may_change(tmp_path):
    for saved, others in ((1, [2]), (2, [1, 2, 3])):
        on_ranks(saved, tmp_path, saves, tmp_path / f"of-{saved}")
        for loaded in others:
            on_ranks(loaded, tmp_path, loads, tmp_path / f"of-{saved}", saved == loaded)
    store = tensorcask.Store(tmp_path / "of-2" / "tensorcask")
    assert [info.kind for info in store.snapshots()] == ["base", "delta", "base"]
    assert store.verify().is_clean
    whole = store.load(step=20)
    assert np.array_equal(whole["decoder.layers.w"][1], expected("layers.1", 20))
    roles = {name: info.role for name, info in store.snapshot(20).tensors().items()}
    assert roles["rows"] == "model" and roles["optimizer.state.exp_avg.rows"] == "exp_avg"


def engine_of(folder, memory):
    return tensorcask.Engine(f"{folder}/tensorcask", rank=dist.get_rank(), world=dist.get_world_size(), folder=memory, policy="intermittent:2")


def saves_through_an_engine(folder, memory):
    without_cuda()
    with engine_of(folder, memory) as engine:
        with pytest.raises(tensorcask.NotFoundError, match="no iteration is saved"):
            megatron.latest(folder, engine=engine)
        calls = AsyncCallsQueue()
        for step in (10, 20):
            calls.schedule_async_request(megatron.save(state_of(step, fill=True), f"{folder}/iter_{step:07}", engine=engine))
            calls.maybe_finalize_async_calls(blocking=True)
            assert megatron.latest(folder).name == f"iter_{step:07}"
        # Megatron itself calls a strategy without its queue in the same way.
        dist_checkpointing.save(state_of(30, fill=True), made(f"{folder}/iter_0000030"), sharded_strategy=megatron.SaveStrategy(engine=engine))
        # The request of this one is never finalized.
        megatron.save(state_of(40, fill=True), f"{folder}/iter_0000040", engine=engine)
        assert megatron.latest(folder).name == "iter_0000020"
        with pytest.raises(TypeError, match="to tensorcask.Engine"):
            megatron.SaveStrategy(engine=engine, policy="full")
        assert engine.wait(timeout=60).reached
        dist.barrier()


def made(folder):
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    return folder


def loads_through_an_engine(folder, memory, step):
    with engine_of(folder, memory) as engine:
        found = megatron.latest(folder, engine=engine)
        assert found.name == f"iter_{int(step):07}"
        same = dist.get_world_size() == 2
        for at in (10, 30, int(step)):
            check(megatron.load(state_of(at, fill=False, with_objects=same), f"{folder}/iter_{at:07}", engine=engine), at, same)
        dist.barrier()


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_saves_through_an_engine(tmp_path, host_memory):
    run = tmp_path / "run"
    on_ranks(2, tmp_path, saves_through_an_engine, run, host_memory)
    on_ranks(2, tmp_path, loads_through_an_engine, run, host_memory, 40)
    # All is lost but the store.
    for folder in run.glob("iter_*"):
        shutil.rmtree(folder)
    for world in (2, 1, 3):
        end_agent(host_memory)
        on_ranks(world, tmp_path, loads_through_an_engine, run, f"{host_memory}/{world}", 40)
        end_agent(f"{host_memory}/{world}")
    on_ranks(2, tmp_path, loads, run, True)


def ends_before_its_calls(folder, memory):
    without_cuda()
    calls = AsyncCallsQueue()
    with engine_of(folder, memory) as engine:
        calls.schedule_async_request(megatron.save(state_of(10, fill=True), f"{folder}/iter_{10:07}", engine=engine))
        # Everything is in the store then.
        engine.finish()
    calls.maybe_finalize_async_calls(blocking=True)
    assert megatron.latest(folder).name == "iter_0000010"
    with engine_of(folder, memory) as engine:
        calls.schedule_async_request(megatron.save(state_of(20, fill=True), f"{folder}/iter_{20:07}", engine=engine))
        engine.close()
        # The agent may still bring the step there.
        try:
            calls.maybe_finalize_async_calls(blocking=True)
            assert megatron.latest(folder).name == "iter_0000020"
        except tensorcask.StorageError as error:
            assert "Finalize the calls before close()" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_calls_end_although_the_engine_is_closed(tmp_path, host_memory):
    on_ranks(1, tmp_path, ends_before_its_calls, tmp_path / "run", host_memory)


def calls_megatron_itself(folder, memory):
    without_cuda()
    save, load = FullyParallelSaveStrategyWrapper, FullyParallelLoadStrategyWrapper
    first, second, third = (made(f"{folder}/iter_{step:07}") for step in (10, 20, 30))
    strategy = megatron.SaveStrategy()
    dist_checkpointing.save(state_of(10, fill=True), first, strategy)
    dist_checkpointing.save(state_of(20, fill=True), second, save(strategy))
    assert (Path(first) / "tensorcask.json").exists() and (Path(second) / "tensorcask.json").exists()
    with engine_of(folder, memory) as engine:
        calls = AsyncCallsQueue()
        request = dist_checkpointing.save(state_of(30, fill=True), third, save(megatron.SaveStrategy(engine=engine)), async_sharded_save=True)
        calls.schedule_async_request(request)
        calls.maybe_finalize_async_calls(blocking=True)
        assert (Path(third) / "tensorcask.json").exists() and (Path(third) / "metadata.json").exists()
        check(dist_checkpointing.load(state_of(30, fill=False), third, megatron.LoadStrategy(engine=engine)), 30)
        check(dist_checkpointing.load(state_of(30, fill=False), third, load(megatron.LoadStrategy(engine=engine), exchange_algo="gather_object")), 30)
        dist.barrier()
    for step, at in ((10, first), (20, second), (30, third)):
        check(dist_checkpointing.load(state_of(step, fill=False), at, megatron.LoadStrategy()), step)
        check(dist_checkpointing.load(state_of(step, fill=False), at, load(megatron.LoadStrategy(), exchange_algo="gather_object")), step)
        check(megatron.load(state_of(step, fill=False), at, strategy=load(megatron.LoadStrategy(), exchange_algo="gather_object")), step)
    loaded, missing, unexpected = dist_checkpointing.load(state_of(10, fill=False), first, megatron.LoadStrategy(), strict="return_all")
    assert not missing and not unexpected
    check(loaded, 10)
    assert not list(Path(folder).rglob("*.distcp"))


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_megatron_itself_uses_the_strategies(tmp_path, host_memory):
    on_ranks(2, tmp_path, calls_megatron_itself, tmp_path / "run", host_memory)
    assert tensorcask.Store(tmp_path / "run" / "tensorcask").steps == [10, 20, 30]


@own_format()
def changes_the_format(folder):
    """One folder, saved by Megatron in its own format and by tensorcask in turns: the newest save is loaded."""
    without_cuda()
    at = made(f"{folder}/iter_0000010")
    for step in (11, 12):
        dist_checkpointing.save(state_of(step, fill=True), at)
        if (Path(at) / "common.pt").exists() and not COMMON_IS_A_FILE:
            # Megatron Core 0.19 leaves the file of another save there, and loads it.
            (Path(at) / "common.pt").unlink()
        check(megatron.load(state_of(step, fill=False), at), step)
        step += 2
        megatron.save(state_of(step, fill=True), at)
        check(megatron.load(state_of(step, fill=False), at), step)


def test_a_folder_may_change_its_format(tmp_path):
    on_ranks(1, tmp_path, changes_the_format, tmp_path / "run")


@own_format()
def is_ignored(folder):
    without_cuda()
    save, load = dist_checkpointing.save, dist_checkpointing.load
    dist_checkpointing.save = lambda *state, sharded_strategy, **options: save(*state, **options)
    with pytest.raises(tensorcask.UnsupportedError, match="iter_0000010: .* ignored the strategy of tensorcask and wrote its own files"):
        megatron.save(state_of(10, fill=True), f"{folder}/iter_0000010")
    assert list(Path(folder).rglob("*.distcp"))
    assert not (Path(folder) / megatron.TRACKER).exists() and not (Path(folder) / "iter_0000010" / "metadata.json").exists()
    dist_checkpointing.save = save
    save(state_of(20, fill=True), made(f"{folder}/iter_0000020"))
    dist_checkpointing.load = lambda *state, sharded_strategy, **options: load(*state, **options)
    with pytest.raises(tensorcask.UnsupportedError, match="iter_0000020: .* ignored the strategy of tensorcask and read its own files"):
        megatron.load(state_of(20, fill=False), f"{folder}/iter_0000020")
    for function, other in ((megatron.save, megatron.LoadStrategy), (megatron.load, megatron.SaveStrategy)):
        with pytest.raises(TypeError, match=f"strategy is a {other.__name__}: pass"):
            function({}, f"{folder}/iter_0000020", strategy=other())
        with pytest.raises(TypeError, match="a strategy or an engine"):
            function({}, f"{folder}/iter_0000020", strategy=other(), engine=object())


def test_an_ignored_strategy_is_an_error(tmp_path):
    on_ranks(1, tmp_path, is_ignored, tmp_path / "run")


def test_quantized_tensors_are_loaded_in_full_precision():
    """Without this, Megatron Core 0.19 hands quantized tensors to the strategy, which is to quantize what it reads."""
    assert megatron.LoadStrategy().stream_ckpt_dequant is False


def test_another_megatron_is_refused(monkeypatch):
    class OfTheFuture:
        pass

    def save(state, folder, sharded_strategy: OfTheFuture | None = None):
        pass

    monkeypatch.setattr(dist_checkpointing, "save", save)
    with pytest.raises(tensorcask.UnsupportedError, match="takes no strategy of tensorcask, but .*OfTheFuture"):
        megatron._check_megatron()


def loads_elsewhere(folder, url):
    megatron.load(state_of(20, fill=False), f"{folder}/iter_0000020", strategy=megatron.LoadStrategy(url))
    with pytest.raises(tensorcask.NotFoundError, match="step 25"):
        megatron.load(state_of(25, fill=False), f"{folder}/iter_0000025", strategy=megatron.LoadStrategy(url))
    # Megatron reads the rebuilt folder.
    check(load_by_megatron(state_of(20, fill=False), f"{folder}/iter_0000020"), 20)


def test_a_lost_folder_is_made_anew(tmp_path):
    on_ranks(2, tmp_path, saves, tmp_path / "run")
    store = shutil.move(tmp_path / "run" / "tensorcask", tmp_path / "kept")
    shutil.rmtree(tmp_path / "run")
    on_ranks(2, tmp_path, loads_elsewhere, tmp_path / "run", store)


def refusals(folder):
    state = {"rows": ShardedTensor.from_rank_offsets("rows", torch.ones(4, 2))}
    with pytest.raises(ValueError, match="names no training step"):
        megatron.save(dict(state), f"{folder}/final")
    with pytest.raises(CheckpointException, match="thing.*object cannot be stored"):
        megatron.save({"thing": ShardedObject("thing", object(), (1,), (0,)), **state}, f"{folder}/iter_1")
    assert not (Path(folder) / "iter_1" / "metadata.json").exists() and not (Path(folder) / megatron.TRACKER).exists()
    megatron.save(dict(state), f"{folder}/iter_1")
    with pytest.raises(Exception, match="missing|`other`"):
        megatron.load({"other": ShardedTensor.from_rank_offsets("other", torch.ones(4, 2))}, f"{folder}/iter_1")
    with pytest.raises(tensorcask.InvalidArgumentError, match=r"`rows` has shape \[4, 2\] in the store, but \[6, 2\] is requested"):
        megatron.load({"rows": ShardedTensor.from_rank_offsets("rows", torch.ones(6, 2))}, f"{folder}/iter_1")
    padded = ShardedTensor.from_rank_offsets("rows", torch.full((6, 2), 9.0), allow_shape_mismatch=True)
    loaded = megatron.load({"rows": padded}, f"{folder}/iter_1")["rows"]
    assert torch.equal(loaded, torch.cat([torch.ones(4, 2), torch.zeros(2, 2)]))
    described = megatron.LoadStrategy().load_tensors_metadata(f"{folder}/iter_1")
    assert torch.equal(load_by_megatron(described, f"{folder}/iter_1")["rows"], torch.ones(4, 2))
    if FINDS_STRATEGIES:
        assert torch.equal(dist_checkpointing.load_plain_tensors(f"{folder}/iter_1")["rows"], torch.ones(4, 2))
    else:
        with pytest.raises(CheckpointException, match=r"\.metadata"):
            dist_checkpointing.load(dict(state), f"{folder}/iter_1")
    # A failed save leaves no folder that looks whole, and keeps the old snapshot.
    with pytest.raises(CheckpointException):
        megatron.save({"thing": ShardedObject("thing", object(), (1,), (0,)), "iteration": 2, **state}, f"{folder}/iter_1")
    assert not (Path(folder) / "iter_1" / "metadata.json").exists()
    loaded = megatron.load(dict(state), f"{folder}/iter_1")
    assert torch.equal(loaded["rows"], torch.ones(4, 2)) and "iteration" not in loaded
    (Path(folder) / "iter_1" / "common.pt").write_bytes(b"of another save")
    with pytest.raises(Exception, match="common.pt|invalid|[Ll]oad"):
        megatron.load(dict(state), f"{folder}/iter_1")
    # After a second save of the step, the old marker names a replaced snapshot.
    marker = (Path(folder) / "iter_1" / "tensorcask.json").read_text()
    megatron.save(dict(state), f"{folder}/iter_1")
    (Path(folder) / "iter_1" / "tensorcask.json").write_text(marker)
    with pytest.raises(tensorcask.ConflictError, match="saved again since"):
        megatron.load(dict(state), f"{folder}/iter_1")
    (Path(folder) / "iter_1" / "tensorcask.json").write_text("{}")
    with pytest.raises(tensorcask.CorruptionError, match="not the marker"):
        megatron.load(dict(state), f"{folder}/iter_1")


def test_what_cannot_be_done_is_refused(tmp_path):
    on_ranks(1, tmp_path, refusals, tmp_path / "run")


def test_variables_are_checked(monkeypatch):
    monkeypatch.setenv("TENSORCASK_EVERY", "0")
    with pytest.raises(ValueError, match="use an integer of 1 or more"):
        megatron.SaveStrategy()
    monkeypatch.setenv("TENSORCASK_EVERY", "4")
    monkeypatch.setenv("TENSORCASK_POLICY", "full")
    with pytest.raises(ValueError, match="Set only one"):
        megatron.SaveStrategy()
