"""Orbax's API v1 over a store: the real library."""

import sys

import numpy as np
import pytest
import tensorcask

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")
import jax.numpy as jnp  # noqa: E402
from tensorcask.orbax_v1 import State, tidy  # noqa: E402
from test_orbax import same, tree_of  # noqa: E402


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf, tree)


def test_a_checkpointer_saves_and_loads(tmp_path):
    keep = ocp.training.preservation_policies.LatestN(3)
    with ocp.training.Checkpointer(tmp_path / "run", preservation_policy=keep) as checkpointer:
        for step in range(5):
            state = State(tree_of(step), options={"policy": "intermittent:4"})
            assert checkpointer.save_checkpointables(step, {"state": state}, force=True)
        assert checkpointer.latest.step == 4
        loaded = checkpointer.load_checkpointables(3, {"state": State(tree_of(0))})
        assert same(loaded["state"].tree, 3)
        store = tensorcask.Store(tmp_path / "run" / "tensorcask")
        assert [info.kind for info in store.snapshots()] == ["base", "delta", "delta", "delta", "base"]
        assert tidy(checkpointer) == [0, 1] and tidy(checkpointer) == []
    # Another checkpointer loads into abstract arrays after the folder has moved.
    (tmp_path / "run").rename(tmp_path / "moved")
    with ocp.training.Checkpointer(tmp_path / "moved") as checkpointer:
        assert same(checkpointer.load_checkpointables(None, {"state": State(abstract(tree_of(0)))})["state"].tree, 4)
        plain = checkpointer.load_checkpointables(2, {"state": State()})["state"].tree
        assert np.array_equal(plain["moments"]["1"]["0"], tree_of(2)["moments"][1][0]) and plain["step"] == 2


def test_a_save_in_the_background_keeps_the_values_of_its_call(tmp_path):
    weights = np.arange(6.0)
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        response = checkpointer.save_checkpointables_async(1, {"state": State({"w": weights})})
        weights[:] = 0
        assert response.result()
        loaded = checkpointer.load_checkpointables(1, {"state": State()})
    assert np.array_equal(loaded["state"].tree["w"], np.arange(6.0))


def test_states_stand_beside_other_checkpointables(tmp_path):
    tree = {"w": jnp.arange(4.0)}
    folder = tmp_path / "run" / "step_7"
    ocp.save_checkpointables(folder, {"policy": State(tree), "critic": State({"w": jnp.ones(3)}), "orbax": tree, "config": {"lr": 0.5}})
    loaded = ocp.load_checkpointables(folder, {"policy": State(tree), "critic": State(), "orbax": tree, "config": None})
    assert np.array_equal(loaded["policy"].tree["w"], tree["w"]) and np.array_equal(loaded["orbax"]["w"], tree["w"])
    assert (loaded["critic"].tree["w"] == 1).all() and loaded["config"] == {"lr": 0.5}
    assert tensorcask.Store(tmp_path / "run" / "tensorcask-policy").snapshots()[-1].step == 7
    # A folder whose name is no step.
    ocp.save_checkpointables(tmp_path / "final", {"state": State(tree, store=str(tmp_path / "store"), step=9)})
    assert tensorcask.Store(tmp_path / "store").snapshots()[-1].step == 9
    with pytest.raises(ValueError, match="names no training step.*Pass step= to Save or State"):
        ocp.save_checkpointables(tmp_path / "last", {"state": State(tree)})


def test_errors_of_a_load_are_those_of_the_store(tmp_path):
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_checkpointables(2, {"state": State({"w": jnp.ones((2, 3))})})
        with pytest.raises(tensorcask.InvalidArgumentError, match=r"`w` has shape \[2, 3\] in the store, but \[3, 3\]"):
            checkpointer.load_checkpointables(2, {"state": State({"w": jnp.ones((3, 3))})})
        with pytest.raises(TypeError, match="rng/key: .*key_data"):
            checkpointer.save_checkpointables(3, {"state": State({"rng": {"key": jax.random.key(0)}})}, force=True)
        checkpointer.save(4, {"w": jnp.ones(2)}, force=True)
        with pytest.raises(tensorcask.NotFoundError, match="did not save it"):
            checkpointer.load_checkpointables(4, {"state": State()})


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_a_checkpointer_saves_through_an_engine(tmp_path, host_memory):
    url = str(tmp_path / "store")
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        with tensorcask.Engine(url, policy="intermittent:2") as engine:
            for step in range(3):
                assert checkpointer.save_checkpointables(step, {"state": State(tree_of(step), engine=engine)}, force=True)
            loaded = checkpointer.load_checkpointables(2, {"state": State(tree_of(0), engine=engine)})
            assert same(loaded["state"].tree, 2)
            with pytest.raises(ValueError, match="needs a tree"):
                checkpointer.load_checkpointables(2, {"state": State(engine=engine)})
            engine.finish()
        assert same(checkpointer.load_checkpointables(1, {"state": State(abstract(tree_of(0)))})["state"].tree, 1)
