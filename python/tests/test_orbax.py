"""Orbax's CheckpointManager over a store: the real library."""

import sys

import numpy as np
import pytest
import tensorcask

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402
from tensorcask.orbax import Restore, Save, tidy  # noqa: E402


def tree_of(step):
    weights = jnp.arange(24, dtype=jnp.float32).reshape(4, 6).at[0, 0].set(step)
    return {"params": {"w": weights, "b": weights[0].astype(jnp.bfloat16)}, "moments": [weights * 2, (weights * 3,)], "count": jnp.int32(step), "step": step, "lr": 0.5}


def same(tree, step):
    wanted = tree_of(step)
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b) and getattr(a, "dtype", 0) == getattr(b, "dtype", 0), tree, wanted)))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_manager_saves_and_restores(tmp_path, asynchronous):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous, max_to_keep=3)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in range(5):
            assert manager.save(step, args=Save(tree_of(step), options={"policy": "intermittent:4"}))
        manager.wait_until_finished()
        assert manager.latest_step() == 4
        assert same(manager.restore(3, args=Restore(tree_of(0))), 3)
        store = tensorcask.Store(tmp_path / "run" / "tensorcask")
        assert [info.kind for info in store.snapshots()] == ["base", "delta", "delta", "delta", "base"]
        assert tidy(manager) == [0, 1] and tidy(manager) == []
        # The manager did not save this snapshot.
        store.save({"w": np.ones(2)}, step=1)
        assert tidy(manager) == []
        assert [info.step for info in store.snapshots()] == [2, 3, 4, 1]
    # Another manager restores to abstract arrays after the folder has moved.
    (tmp_path / "run").rename(tmp_path / "moved")
    with ocp.CheckpointManager(tmp_path / "moved") as manager:
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf, tree_of(0))
        assert same(manager.restore(manager.latest_step(), args=Restore(abstract)), 4)
        plain = manager.restore(2, args=Restore())
        assert np.array_equal(plain["moments"]["1"]["0"], tree_of(2)["moments"][1][0]) and plain["step"] == 2


def test_arrays_come_back_in_the_sharding_that_is_asked_for(tmp_path, monkeypatch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"w": jnp.arange(32.0).reshape(8, 4)}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=Save(tree, store=str(tmp_path / "elsewhere")))
        manager.wait_until_finished()
        loaded = manager.restore(7, args=Restore({"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}))
    assert loaded["w"].sharding == sharding and np.array_equal(loaded["w"], tree["w"])
    assert (tmp_path / "elsewhere" / "store.json").exists() and not (tmp_path / "run" / "tensorcask").exists()


def test_items_have_stores_of_their_own(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run", item_names=("params", "net2")) as manager:
        for step in (5, 6):
            items = {"params": Save({"w": jnp.full(3, step)}), "net2": Save({"w": jnp.full(3, -step)})}
            manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
        for step in (5, 6):
            found = manager.restore(step, args=ocp.args.Composite(params=Restore(), net2=Restore()))
            assert (found["params"]["w"] == step).all() and (found["net2"]["w"] == -step).all()
        assert [info.step for info in tensorcask.Store(tmp_path / "run" / "tensorcask-net2").snapshots()] == [5, 6]
        same = {name: Save({"w": jnp.zeros(3)}, store=str(tmp_path / "one")) for name in ("params", "net2")}
        with pytest.raises(Exception, match="Pass another store for"):
            manager.save(7, args=ocp.args.Composite(**same))
            manager.wait_until_finished()


def test_what_cannot_be_done_is_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run", options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)) as manager:
        with pytest.raises(TypeError, match="rng/key: .*key_data"):
            manager.save(1, args=Save({"rng": {"key": jax.random.key(0)}}))
        manager.save(2, args=Save({"w": jnp.ones((2, 3))}))
        with pytest.raises(tensorcask.InvalidArgumentError, match=r"`w` has shape \[2, 3\] in the store, but \[3, 3\]"):
            manager.restore(2, args=Restore({"w": jnp.ones((3, 3))}))
        with pytest.raises(tensorcask.TemplateError, match="step 2 has no `other`"):
            manager.restore(2, args=Restore({"other": jnp.ones((3, 3))}))
        manager.save(3, args=Save({"deep": {"w": jnp.ones(2)}, "n": 1}))
        for wrong in ({"deep": jnp.ones(2), "n": 1}, {"deep": {"w": jnp.ones(2)}, "n": jnp.ones(2)}):
            with pytest.raises(tensorcask.InvalidArgumentError, match="is requested"):
                manager.restore(3, args=Restore(wrong))


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_a_manager_saves_through_an_engine(tmp_path, host_memory):
    url = str(tmp_path / "store")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        with tensorcask.Engine(url, policy="intermittent:2") as engine:
            for step in range(3):
                assert manager.save(step, args=Save(tree_of(step), engine=engine, options={"user": {"run": "a"}}))
            manager.wait_until_finished()
            assert same(manager.restore(2, args=Restore(tree_of(0), engine=engine)), 2)
            assert engine.loadable()[0].source == "slot"
            with pytest.raises(Exception, match="to tensorcask.Engine"):
                manager.save(3, args=Save(tree_of(3), engine=engine, options={"policy": "full"}))
                manager.wait_until_finished()
            with pytest.raises(ValueError, match="needs a tree"):
                manager.restore(2, args=Restore(engine=engine))
            engine.finish()
        # From the store, through an engine and without one; abstract arrays are enough.
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf, tree_of(0))
        with tensorcask.Engine(url) as engine:
            assert same(manager.restore(1, args=Restore(abstract, engine=engine)), 1)
        assert same(manager.restore(2, args=Restore(abstract)), 2)
        assert tensorcask.Store(url).snapshot(1).user["run"] == "a"
