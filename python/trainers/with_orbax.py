"""Orbax with JAX: a model whose weights are divided among the processes of a mesh. $VARIANT: "v1" for Orbax's API v1, else API v0."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import tensorcask
import tensorcask.orbax
from common import EVERY, STEPS, Run
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensorcask.orbax_v1 import State

run = Run()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
jax.distributed.initialize(address, num_processes=run.world, process_id=run.rank)
mesh = Mesh(np.array(jax.devices()), ("x",))
rows, copies = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())


def placed(values, sharding):
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


source = np.random.default_rng(1)
weights = {"in": source.normal(size=(24, 12)), "out": source.normal(size=(6, 24))}
tree = {
    "weights": {name: placed(values.astype(np.float32), rows) for name, values in weights.items()},
    "momentum": {name: placed(np.zeros(values.shape, np.float32), rows) for name, values in weights.items()},
    "scale": placed(np.ones(6, np.float32), copies), "key": placed(np.asarray(jax.random.key_data(jax.random.key(3))), copies), "step": 0,
}  # fmt: skip


@jax.jit
def update(weights, momentum, scale, key, batch):
    key, noise = jax.random.split(jax.random.wrap_key_data(key))

    def loss_of(weights, scale):
        hidden = jax.nn.gelu(batch @ weights["in"].T) * jax.random.bernoulli(noise, 0.9, (4, 24))
        return jnp.mean((hidden @ weights["out"].T * scale) ** 2)

    loss, (gradients, of_scale) = jax.value_and_grad(loss_of, argnums=(0, 1))(weights, scale)
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, momentum, gradients)
    weights = jax.tree.map(lambda old, change: old - 0.01 * change, weights, momentum)
    return loss, weights, momentum, scale - 0.01 * of_scale, jax.random.key_data(key)


def train(tree, step):
    batch = placed(np.random.default_rng(100 + step).normal(size=(4, 12)).astype(np.float32), copies)
    loss, weights, momentum, scale, key = update(tree["weights"], tree["momentum"], tree["scale"], tree["key"], batch)
    return loss, {"weights": weights, "momentum": momentum, "scale": scale, "key": key, "step": step}


# The folders of steps are on shared storage, and are not lost with a host.
folder = os.path.abspath(f"{run.store}-steps")


class ManagerOfV1:
    """The calls below, in API v1."""

    def __init__(self, folder):
        self.checkpointer = v1.training.Checkpointer(folder)
        self.wait_until_finished = self.checkpointer.wait

    def latest_step(self):
        return None if self.checkpointer.latest is None else self.checkpointer.latest.step

    def save(self, step, args):
        self.checkpointer.save_checkpointables_async(step, {"state": State(args.item, engine=args.engine)}, force=True)

    def restore(self, step, args):
        return self.checkpointer.load_checkpointables(step, {"state": State(args.item, engine=args.engine)})["state"].tree


manager = ManagerOfV1(folder) if os.environ["VARIANT"] == "v1" else ocp.CheckpointManager(folder)

# ANCHOR: lines
engine = tensorcask.Engine(run.store, rank=jax.process_index(), world=jax.process_count())
done = manager.latest_step()
if done is not None:
    tree = manager.restore(done, args=tensorcask.orbax.Restore(tree, engine=engine))
for step in range(tree["step"] + 1, STEPS + 1):
    loss, tree = train(tree, step)
    if step % EVERY == 0:
        manager.save(step, args=tensorcask.orbax.Save(tree, engine=engine))
    # ANCHOR_END: lines
    if step % EVERY == 1:
        # The manager names a step only when it is in the store.
        manager.wait_until_finished()
    run.loss(step, jax.device_get(loss.addressable_shards[0].data))
manager.wait_until_finished()
engine.finish()
arrays = {name: leaf for name, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if isinstance(leaf, jax.Array)}
run.end_arrays({str(name): np.asarray(leaf.addressable_shards[0].data) for name, leaf in arrays.items()})
