"""Resharding: a model saved with each layout is loaded with each other layout.

A layout is a product of FSDP2, HSDP and tensor parallelism: "fsdp4", "hsdp2x2", "tp2", "fsdp2,tp2", "hsdp2x2,tp2".

    python reshard.py 1 2 3 4 8      # all layouts of 1, 2, 3, 4 and 8 ranks, each with each; .ci/thorough runs this
"""

import re
import sys
import tempfile
from pathlib import Path

import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUTS = {
    1: ["fsdp1"],
    2: ["fsdp2", "hsdp2x1", "tp2"],
    3: ["fsdp3", "tp3"],
    4: ["fsdp4", "hsdp2x2", "tp4", "fsdp2,tp2"],
    8: ["fsdp8", "hsdp2x4", "hsdp4x2", "tp8", "fsdp4,tp2", "fsdp2,tp4", "hsdp2x2,tp2"],
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.up, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)
        self.norm, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 5)


def build(layout, seed):
    """Model and optimizer of a layout, after one step whose gradients are the weights: moments are functions of these."""
    torch.manual_seed(seed)
    model = Net()
    parts = dict(re.fullmatch(r"(fsdp|hsdp|tp)([0-9x]+)", part).groups() for part in layout.split(",")) if layout else {}
    names = {"fsdp": ("shards",), "hsdp": ("replicas", "shards"), "tp": ("tensors",)}
    shape = [int(number) for sizes in parts.values() for number in sizes.split("x")]
    if parts:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(name for part in parts for name in names[part]))
        if "tp" in parts:
            parallelize_module(model, mesh["tensors"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = next((part for part in parts if part != "tp"), None)
        if data is not None:
            for layer in (model.embedding, model.up, model.down, model.norm, model.head):
                fully_shard(layer, mesh=mesh[names[data]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def state_of(layout, seed):
    weights, moments = get_state_dict(*build(layout, seed))
    return {"model": weights, "optimizer": moments}


def whole(value):
    """The values of a state, by path, with whole tensors."""
    if isinstance(value, dict):
        return {f"{key}.{path}".rstrip("."): item for key, inner in value.items() for path, item in whole(inner).items()}
    if isinstance(value, torch.Tensor):
        return {"": value.full_tensor() if isinstance(value, DTensor) else value}
    return {"": value}


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def name_of(layout):
    return layout.replace(",", "-")


def save_layouts(folder, world):
    for layout in LAYOUTS[int(world)]:
        dcp.save(state_of(layout, 0), checkpoint_id="1", storage_writer=tensorcask.Store(Path(folder, name_of(layout))).writer())


def load_layouts(folder, world, worlds):
    reference = whole(state_of("", 0))
    for layout in LAYOUTS[int(world)]:
        template = state_of(layout, 7)
        for saved_world in worlds.split():
            for saved in LAYOUTS[int(saved_world)]:
                for tensor in whole_tensors(template):
                    tensor.zero_()
                dcp.load(template, checkpoint_id="1", storage_reader=tensorcask.Store(Path(folder, name_of(saved))).reader())
                found = whole(template)
                wrong = [path for path in reference if not same(found[path], reference[path])]
                assert found.keys() == reference.keys() and not wrong, f"{saved} loaded as {layout}: {wrong}"
                if dist.get_rank() == 0:
                    with Path(folder, "pairs").open("a") as pairs:
                        pairs.write(f"{saved} {layout}\n")


def whole_tensors(value):
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in whole_tensors(inner)]
    return [value.detach()] if isinstance(value, torch.Tensor) else []


def run(folder, worlds):
    """Saves and loads all layouts of these numbers of ranks. Returns the pairs that were compared."""
    for world in worlds:
        on_ranks(world, folder, save_layouts, folder, world)
    for world in worlds:
        on_ranks(world, folder, load_layouts, folder, world, " ".join(map(str, worlds)))
    # Each store holds one copy of each tensor, whatever the layout.
    for world in worlds:
        for layout in LAYOUTS[world]:
            store = tensorcask.Store(folder / name_of(layout))
            reference = whole(get_state(build("", 0)))
            found = {name: tensor for name, tensor in store.load(tensors="*").items()}
            assert found.keys() == {name for name, value in reference.items() if isinstance(value, torch.Tensor)}
            assert all(torch.equal(found[name], reference[name]) for name in found)
    return (folder / "pairs").read_text().splitlines()


def get_state(built):
    weights, moments = get_state_dict(*built)
    return {"model": weights, "optimizer": moments}


def main():
    worlds = [int(word) for word in sys.argv[1:]] or list(LAYOUTS)
    with tempfile.TemporaryDirectory() as folder:
        pairs = run(Path(folder), worlds)
    print(f"{len(pairs)} pairs of layouts, all tensors equal bit for bit")


if __name__ == "__main__":
    main()
