"""Rows of several ranks: sharding, failures, processes, parallel models. See `dcp_rows`."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_rows import collect, error_of, kind_of_error, row
from dcp_rows_of_saves import FailingPlanner
from dcp_rows_of_values import nested, weights
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, _save_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TWO_D = [[Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(0)], [Shard(1), Shard(0)]]


def rank():
    return dist.get_rank()


def mesh(*shape, names=None):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def spread(whole, on, placements):
    return distribute_tensor(whole, on, placements, src_data_rank=None)


def values(rows=7, columns=6):
    return torch.arange(float(rows * columns)).reshape(rows, columns)


def reshard(side, step, saved, loaded, whole=None):
    """Saves with one mesh and placement, and loads with another."""
    whole = values() if whole is None else whole
    side.save({"w": spread(whole, *saved)}, step=step)
    state = side.load({"w": spread(torch.full_like(whole, -1), *loaded)}, step=step)
    return torch.equal(state["w"].full_tensor(), whole), collect(list(state["w"].to_local().shape))


@row("Shards", world=2)
def meta_template(side):
    """Tensors of a template on the meta device are made."""
    side.save(weights(2.0))
    loaded = side.load({"w": torch.empty(4, 3, device="meta"), "b": torch.empty(3, device="meta")})
    return [str(tensor.device) for tensor in loaded.values()], loaded


@row("Shards", world=2)
def uneven_shards(side):
    """7 rows on 2 ranks."""
    return reshard(side, 1, (mesh(), [Shard(0)]), (mesh(), [Shard(0)]))


@row("Shards", world=2)
def empty_shards(side):
    """1 row on 2 ranks: one shard is empty."""
    return reshard(side, 1, (mesh(), [Shard(0)]), (mesh(), [Shard(0)]), values(1))


@row("Shards", world=2)
def other_placements(side):
    """Rows, columns and copies, each loaded as each."""
    kinds = [[Shard(0)], [Shard(1)], [Replicate()]]
    return [reshard(side, 1 + 3 * a + b, (mesh(), kinds[a]), (mesh(), kinds[b])) for a in range(3) for b in range(3)]


@row("Shards", world=2)
def shards_to_plain(side):
    """Shards load into plain tensors, and a plain tensor into shards."""
    side.save({"s": spread(values(), mesh(), [Shard(0)]), "p": values()})
    return side.load({"s": torch.zeros(7, 6), "p": spread(torch.zeros(7, 6), mesh(), [Shard(1)])})


@row("Shards", world=2)
def replicated_values(side):
    """Of plain tensors and values that differ between ranks, one rank's is stored."""
    side.save({"w": torch.full((2,), 1.0), "n": 5})
    return side.load({"w": torch.zeros(2), "n": 0})


@row("Shards", world=2)
def lowest_rank(side):
    """`dedup_save_to_lowest_rank=True`: rank 0 stores what ranks share."""
    side.save({"w": torch.full((2,), float(rank())), "n": rank()}, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    return side.load({"w": torch.full((2,), -1.0), "n": -1})


@row("Shards", world=2)
def keys_of_each_rank(side):
    """Each rank has keys of its own, as with pipeline stages."""
    side.save({"stage": {f"layer{rank()}": {"w": torch.full((2,), float(rank())), "n": rank()}}})
    loaded = side.load({"stage": {f"layer{1 - rank()}": {"w": torch.full((2,), -1.0), "n": -1}}})
    return collect(str(loaded))


@row("Shards", world=2)
def keys_in_other_order(side):
    """Ranks with keys in another order, whose `load_state_dict` communicates."""

    class Summing:
        def __init__(self, factor):
            self.factor = factor

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            total = torch.tensor([float(self.factor * (rank() + 1))])
            dist.all_reduce(total)
            self.total = total.item()

    state = {"a": Summing(1), "b": Summing(10)}
    state = state if rank() == 0 else dict(reversed(state.items()))
    side.save(state)
    side.load(state)
    return state["a"].total, state["b"].total


@row("Shards", world=2)
def legacy_sharded_tensors(side):
    """`ShardedTensor` of four sharding specs, several shards on a rank, saved with and without staging, each loaded as each."""

    def spec(*shards):
        return EnumerableShardingSpec([ShardMetadata([at, 0], [rows, 6], f"rank:{owner}/cpu") for at, rows, owner in shards])

    specs = [ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"])]
    specs += [spec((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)), spec((0, 8, 1), (8, 2, 0))]

    def make(kind, value):
        made = sharded_tensor.zeros(kind, 10, 6)
        for shard in made.local_shards():
            at = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(values(10)[at : at + shard.tensor.shape[0]] if value else torch.full_like(shard.tensor, -1))
        return made

    good = []
    for a, saved in enumerate(specs):
        state = {"st": make(saved, True)}
        if a % 2:
            side.start(state, step=a).result()
        else:
            side.save(state, step=a)
        for wanted in specs:
            loaded = side.load({"st": make(wanted, False)}, step=a)["st"]
            out = torch.zeros(10, 6) if rank() == 0 else None
            loaded.gather(out=out)
            good.append(rank() != 0 or torch.equal(out, values(10)))
    return all(good), len(good)


@row("Shards", world=4)
def two_dimensions(side):
    """Five placements on a 2 x 2 mesh, each loaded as two others."""
    square, whole = mesh(2, 2), values()
    found = []
    for a, saved in enumerate(TWO_D):
        side.save({"w": spread(whole, square, saved)}, step=a)
        for b in (a + 1, a + 2):
            state = side.load({"w": spread(torch.full_like(whole, -1), square, TWO_D[b % 5])}, step=a)
            found.append((torch.equal(state["w"].full_tensor(), whole), collect(list(state["w"].to_local().shape))))
    return found


@row("Shards", world=4)
def one_dimension_to_two(side):
    """From a mesh of 4 to a mesh of 2 x 2, and back."""
    there = [reshard(side, at, (mesh(), [Shard(0)]), (mesh(2, 2), TWO_D[at])) for at in range(5)]
    return there + [reshard(side, 5 + at, (mesh(2, 2), TWO_D[at]), (mesh(), [Shard(0)])) for at in range(5)]


@row("Shards", world=4)
def part_of_the_mesh(side):
    """A tensor that lies on two of four ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    half = DeviceMesh("cpu", [1, 3])
    whole = values(4)

    def part(value):
        local = whole[:2] if rank() == 1 else whole[2:]
        local = local.clone() if value else torch.zeros(2, 6)
        return DTensor.from_local(local if rank() in (1, 3) else torch.empty(0), half, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    side.save({"part": part(True), "n": 1})
    loaded = side.load({"part": part(False), "n": 0})
    return collect(loaded["part"].to_local().tolist() if rank() in (1, 3) else None)


@row("Failures", world=2)
def one_rank_fails_to_plan(side):
    """A planner fails on rank 1 while it plans: every rank gets the error."""

    class Failing(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank() == 1:
                raise RuntimeError("no plan")
            return super().create_local_plan()

    return collect(error_of(lambda: side.save(weights(), planner=Failing()), full=True))


@row("Failures", world=2)
def coordinator_fails_to_plan(side):
    """The global plan fails on the coordinator."""

    class Failing(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            raise RuntimeError("no global plan")

    return collect(error_of(lambda: side.save(weights(), planner=Failing()), full=True))


@row("Failures", world=2)
def one_rank_fails_to_write(side):
    """Rank 1 fails while it writes: every rank gets the error, and nothing loads."""

    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank() == 1:
                raise RuntimeError("no data")
            return super().resolve_data(write_item)

    sharded = {"w": spread(values(), mesh(), [Shard(0)])}
    failed = error_of(lambda: side.save(sharded, planner=Failing()), full=True)
    return collect(failed), error_of(lambda: side.load({"w": spread(values(), mesh(), [Shard(0)])}))


@row("Failures", world=2)
def next_save_after_a_failure(side):
    """The save after a failed one succeeds, with the same step."""
    error_of(lambda: side.save(weights(), planner=FailingPlanner()))
    side.save(weights(2.0), overwrite=True)
    return side.load(weights(0.0))


@row("Failures", world=2)
def one_rank_fails_to_load(side):
    """Rank 1 fails while it loads: every rank gets the error."""
    side.save(weights(2.0))

    class Failing(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            if rank() == 1:
                raise RuntimeError("no place")
            return super().resolve_tensor(read_item)

    return collect(error_of(lambda: side.load(weights(0.0), planner=Failing()), full=True))


@row("Failures", world=2)
def missing_key_on_one_rank(side):
    """A key that only rank 1 wants, and the checkpoint does not have."""
    side.save(weights(2.0))
    return collect(error_of(lambda: side.load(weights(0.0) | ({"absent": torch.zeros(1)} if rank() else {})), full=True))


@row("Failures", world=2)
def existing_step_on_every_rank(side):
    """`overwrite=False` for a step that exists: an error on every rank."""
    side.save(weights(1.0))
    return ["CheckpointException" if "error of ranks" in found else found for found in collect(error_of(lambda: side.save(weights(2.0), overwrite=False)))]


@row("Failures", world=2)
def async_failure(side):
    """Rank 1 fails in an asynchronous save: `result()` raises on every rank."""

    class Failing(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank() == 1:
                raise RuntimeError("no plan")
            return super().create_local_plan()

    return collect(error_of(lambda: side.start(weights(), planner=Failing()).result(), full=True))


class FailsOnRankOne(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        if rank() == 1:
            raise RuntimeError("no plan")
        return super().create_local_plan()


@row("Failures", world=2)
def process_failure(side):
    """The same in a process of its own (`AsyncCheckpointerType.PROCESS`), and the next save succeeds."""
    kind = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    sharded = {"w": spread(values(), mesh(), [Shard(0)]), "n": 3}
    failed = collect(error_of(lambda: side.start(sharded, planner=FailsOnRankOne(), **kind).result()))
    side.start(sharded, step=2, **kind).result()
    return failed, side.load({"w": spread(torch.zeros(7, 6), mesh(), [Shard(1)]), "n": 0}, step=2)


@row("Failures", world=2)
def process_and_shared_memory(side):
    """`PROCESS` with `DefaultStager(use_shared_memory=True)`, two saves."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, True, False, False))
    for step in (1, 2):
        sharded = {"w": spread(values() * step, mesh(), [Shard(0)])}
        side.start(sharded, step=step, async_stager=stager, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    stager.close()
    return [side.load({"w": spread(torch.zeros(7, 6), mesh(), [Shard(0)])}, step=step) for step in (1, 2)]


@row("Groups", world=2)
def another_coordinator(side):
    """`coordinator_rank=1`."""
    _save_state_dict(weights(2.0), side_writer(side), coordinator_rank=1)
    loaded = weights(0.0)
    _load_state_dict(loaded, side_reader(side), coordinator_rank=1)
    return loaded


def side_writer(side, step=1):
    writer = side.writer(step)
    writer.reset(side.id(step))
    return writer


def side_reader(side, step=1):
    reader = side.reader(step)
    reader.reset(side.id(step))
    return reader


@row("Groups", world=4)
def part_of_the_ranks(side):
    """`process_group=` of ranks 0 and 1 of 4: these save and load, the others go on."""
    group = dist.new_group([0, 1])
    loaded = weights(0.0)
    if rank() in (0, 1):
        dcp.save(weights(2.0), checkpoint_id=side.id(1), storage_writer=side.writer(), process_group=group)
        dcp.load(loaded, checkpoint_id=side.id(1), storage_reader=side.reader(), process_group=group)
    return [found["w"][0, 0].item() for found in collect(loaded)]


@row("Groups", world=2)
def without_communication(side):
    """`no_dist=True`: rank 1 alone saves and loads."""
    found = None
    if rank() == 1:
        side.save(weights(2.0), no_dist=True)
        found = side.load(weights(0.0), no_dist=True)
    return collect(str(found))


@row("Groups", world=2, differs="One rank commits for all ranks; without collectives nobody knows when all have written. PyTorch calls this experimental.")
def no_collectives(side):
    """`use_collectives=False`: each rank writes metadata of its own."""

    def save():
        dcp.save({f"of{rank()}": torch.ones(2)}, checkpoint_id=side.id(1), storage_writer=side.writer(), use_collectives=False)
        return "saved"

    return kind_of_error(save)


@row("Groups", world=2)
def process_group_of_async(side):
    """`async_save` with a process group of its own, while the training communicates."""
    group = dist.new_group(backend="gloo")
    future = side.start({"w": spread(values(), mesh(), [Shard(0)])}, process_group=group)
    total = torch.ones(1)
    for _ in range(5):
        dist.all_reduce(total)
    future.result()
    return total.item(), side.load({"w": spread(torch.zeros(7, 6), mesh(), [Shard(0)])})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(self.down(torch.relu(self.up(inputs))))


def parallel(kind, seed):
    """A model and its optimizer, spread over all ranks in some way."""
    torch.manual_seed(seed)
    model = Net()
    world = dist.get_world_size()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "fsdp":
        fully_shard(model, mesh=mesh())
    elif kind == "hsdp":
        fully_shard(model, mesh=mesh(2, world // 2, names=("replicas", "shards")))
    elif kind == "tp":
        parallelize_module(model, mesh(), plan)
    elif kind == "fsdp x tp":
        both = mesh(2, world // 2, names=("shards", "tensors"))
        parallelize_module(model, both["tensors"], plan)
        # The head is sharded by FSDP alone, so its parameters lie on another mesh.
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=both["shards"])
    elif kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor) and not isinstance(model, torch.nn.parallel.DistributedDataParallel):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model, optimizer):
    found, moments = get_state_dict(model, optimizer)
    return {"model": found, "optimizer": moments}


def resume(side, kind):
    """Trains, saves, trains on; loads into a new model and trains the same: are the losses equal?"""
    model, optimizer = parallel(kind, 0)
    train(model, optimizer, 2)
    side.save(state_of(model, optimizer))
    losses = train(model, optimizer, 2)
    other, other_optimizer = parallel(kind, 7)
    loaded = side.load(state_of(other, other_optimizer))
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return train(other, other_optimizer, 2) == losses, losses


@row("Parallel models", world=2)
def fsdp2(side):
    """FSDP2 with AdamW: losses after a resume are equal bit for bit."""
    return resume(side, "fsdp")


@row("Parallel models", world=2)
def tensor_parallel(side):
    """Tensor parallel with AdamW."""
    return resume(side, "tp")


@row("Parallel models", world=2)
def ddp(side):
    """DDP with AdamW."""
    return resume(side, "ddp")


@row("Parallel models", world=4)
def hsdp(side):
    """HSDP on a 2 x 2 mesh with AdamW."""
    return resume(side, "hsdp")


@row("Parallel models", world=4)
def fsdp2_and_tensor_parallel(side):
    """FSDP2 x tensor parallel on a 2 x 2 mesh with AdamW (`_StridedShard`)."""
    return resume(side, "fsdp x tp")


@row("Parallel models", world=4)
def one_parallelism_to_another(side):
    """Saved by FSDP2 x tensor parallel, loaded by FSDP2, HSDP and tensor parallel."""
    model, optimizer = parallel("fsdp x tp", 0)
    train(model, optimizer, 2)
    side.save(state_of(model, optimizer))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    equal = []
    for kind in ("fsdp", "hsdp", "tp"):
        other, other_optimizer = parallel(kind, 7)
        loaded = side.load(state_of(other, other_optimizer))
        equal.append(all(torch.equal(whole[name], full(tensor)) for name, tensor in loaded["model"].items()))
    return equal


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@row("Parallel models", world=2)
def fsdp1(side):
    """FSDP1 with sharded state: model and moments."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    def make(seed):
        torch.manual_seed(seed)
        model = FSDP(Net(), device_mesh=mesh(), use_orig_params=True, device_id=torch.device("cpu"))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = make(0)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    side.save(state_of(model, optimizer))
    wanted = copy.deepcopy({name: full(tensor).tolist() for name, tensor in state_of(model, optimizer)["model"].items()})
    loaded = side.load(state_of(*make(7)))
    return {name: full(tensor).tolist() for name, tensor in loaded["model"].items()} == wanted


@row("Parallel models", world=2)
def full_state(side):
    """`full_state_dict=True, cpu_offload=True`: rank 0 alone has the state, saves it, and spreads it again."""
    model, optimizer = parallel("fsdp", 0)
    train(model, optimizer, 1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    side.save({"model": get_model_state_dict(model, options=options)})
    other, _ = parallel("fsdp", 7)
    loaded = side.load({"model": get_model_state_dict(other, options=options)})
    set_model_state_dict(other, loaded["model"], options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return all(torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class AppState:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return state_of(self.model, self.optimizer)

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@row("Parallel models", world=2)
def stateful_application(side):
    """A `Stateful` of model and optimizer, as in PyTorch's tutorial, saved asynchronously."""
    model, optimizer = parallel("fsdp", 0)
    train(model, optimizer, 1)
    side.start({"app": AppState(model, optimizer), "nested": nested(2.0)}).result()
    losses = train(model, optimizer, 1)
    other, other_optimizer = parallel("fsdp", 7)
    side.load({"app": AppState(other, other_optimizer), "nested": nested(0.0)})
    return train(other, other_optimizer, 1) == losses


@row("Parallel models", world=2)
def weights_alone(side):
    """Fine-tuning: weights are loaded, moments of the checkpoint are not wanted."""
    model, optimizer = parallel("fsdp", 0)
    train(model, optimizer, 1)
    side.save(state_of(model, optimizer))
    other, _ = parallel("fsdp", 7)
    loaded = side.load({"model": get_model_state_dict(other)})
    return all(torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), loaded["model"].values(), strict=True))
