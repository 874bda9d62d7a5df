"""Parts of tensors in any layout, saved through the engine."""

import sys

import numpy as np
import pytest
import tensorcask
import torch
from tensorcask import Shard
from tensorcask._shard import Shards

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)


def test_ranks_save_parts_with_other_borders_than_they_restore(url, host_memory):
    engines = [tensorcask.Engine(url, rank=rank, world=2, hosts=None) for rank in range(2)]
    # Five rows and one row, and two columns of a tensor of torch.
    engines[0].save({"w": Shard(WHOLE[:5], (6, 4), (0, 0)), "t": Shard(torch.ones(2, 1), (2, 3), (0, 0))}, step=1)
    engines[1].save({"w": Shard(WHOLE[5:], (6, 4), (5, 0)), "t": Shard(torch.full((2, 2), 2.0), (2, 3), (0, 1))}, step=1)
    assert all(engine.wait(timeout=60).reached for engine in engines)
    found = tensorcask.load(url)
    assert np.array_equal(found["w"], WHOLE) and found["t"].tolist() == [[1, 2, 2], [1, 2, 2]]
    out = {"w": Shard(np.zeros((3, 2), np.float32), (6, 4), (3, 1)), "t": Shard(torch.zeros(2, 3), (2, 3), (0, 0))}
    restored = engines[1].restore(1, out=out)
    assert np.array_equal(out["w"].data, WHOLE[3:, 1:3]) and out["t"].data.tolist() == [[1, 2, 2], [1, 2, 2]]
    assert restored.state["w"] is out["w"]
    for engine in engines:
        engine.close()


def test_a_rank_saves_several_parts_of_one_tensor(url, host_memory):
    with tensorcask.Engine(url) as engine:
        parts = tuple(Shard(torch.full((1, 2), float(row)), (3, 2), (row, 0)) for row in (2, 0, 1))
        engine.save({"w": Shards(parts), "step": 1}, step=1)
        out = {"w": Shard(torch.zeros(1, 2), (3, 2), (2, 0))}
        assert engine.restore(out=out).source == "slot" and out["w"].data.tolist() == [[2, 2]]
        engine.finish()
    assert tensorcask.load(url)["w"].tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("place", ["memory", "store"])
def test_a_partial_restore_leaves_out_the_other_tensors(place, url, host_memory):
    state = {"a": torch.ones(3), "b": [torch.zeros(2), 7], "c": "text"}
    with tensorcask.Engine(url) as engine:
        engine.save(state, step=1)
        if place == "store":
            engine.finish()
    with tensorcask.Engine(url) as engine:
        out = {"a": torch.zeros(3)}
        with pytest.raises(ValueError, match="has a tensor `b.0`, and `out` has none"):
            engine.restore(out=out)
        found = engine.restore(out=out, partial=True)
        assert found.source == {"memory": "slot", "store": "tier"}[place]
        assert out["a"].tolist() == [1, 1, 1] and found.state == {"a": out["a"], "b": [None, 7], "c": "text"}
        assert engine.restore(out={}, partial=True).state == {"a": None, "b": [None, 7], "c": "text"}


def test_a_shard_is_checked(url):
    with pytest.raises(ValueError, match="a shard of 1 axes, with shape"):
        Shard(np.zeros(3), (3, 1), (0, 0))
    with pytest.raises(ValueError, match="is not inside of shape"):
        Shard(np.zeros(3), (4,), (2,))
    with pytest.raises(TypeError, match=r"state\['w'\]: a part of a tensor .a Shard, or a tensor with global_offsets. can only be saved by tensorcask.Engine"):
        tensorcask.save({"w": Shard(np.zeros(3), (4,), (1,))}, url, step=1)
