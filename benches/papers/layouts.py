"""BitSnap, figures 10 and 11: saves of one state by several processes, which share it by tensors and pipeline stages."""

import json
import os
import re
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import states
from tables import spread, table

LAYERS = 6
# Processes that share each tensor by rows, and stages that share the layers.
LAYOUTS = ((1, 1), (4, 1), (2, 2), (8, 1), (4, 2))
ROUNDS = 5
CLUSTERS = ["master=cluster", "exp_avg=cluster", "exp_avg_sq=cluster"]
KINDS = {"base": ("lossless", 0), "delta": ("lossless", 1), "base, clusters": (CLUSTERS, 0), "delta, clusters": (CLUSTERS, 1)}


def to_torch(dtype, words):
    import torch

    integers, kind = {"bf16": ("i2", torch.bfloat16), "f32": ("i4", torch.float32)}[dtype]
    return torch.from_numpy(words.view(integers).copy()).view(kind)


def write_state(run, step, path):
    """Writes a whole state. Slices hold one layer: then all layers are copies of it, with rows and columns in another order."""
    from safetensors.torch import save_file

    tensors = {}
    for (role, param), (dtype, words) in states.load(run.paths[step], matrices_only=False).items():
        copies = LAYERS if not run.whole and param.startswith("h.") else 1
        tiled = states.tile(words, param, copies) if words.ndim == 2 else np.concatenate([words] * copies)
        for at, part in enumerate(np.split(tiled, copies)):
            name = re.sub(r"^h\.\d+", f"h.{at}", param) if copies > 1 else param
            full = f"model.{name}" if role == "model" else f"optimizer.{role}.{name}"
            tensors[full] = to_torch(dtype, part)
    save_file(tensors, path)
    return sum(tensor.nbytes for tensor in tensors.values())


def stage_of(param, layers, stages):
    """Pipeline stage of a parameter: layers in equal runs, embeddings first, the last norm last."""
    match = re.match(r"h\.(\d+)\.", param)
    if match:
        return layers.index(int(match[1])) * stages // len(layers)
    return stages - 1 if param.startswith("ln_f") else 0


def sharded(path, mesh, own, stage, stages):
    """This rank's part of a state: matrices of its stage by rows, vectors whole."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    found = states.load(path, matrices_only=False)
    layers = sorted({int(match[1]) for _, param in found if (match := re.match(r"h\.(\d+)\.", param))})
    state = {"model": {}, "optimizer": {}}
    for (role, param), (dtype, words) in found.items():
        if stage_of(param, layers, stages) != stage:
            continue
        whole = to_torch(dtype, words)
        place = Shard(0) if whole.dim() > 1 else Replicate()
        part = whole.chunk(mesh.size())[own].contiguous() if whole.dim() > 1 else whole
        tensor = DTensor.from_local(part, mesh, [place], run_check=False, shape=whole.shape, stride=whole.stride())
        of = state["model"] if role == "model" else state["optimizer"].setdefault(role, {})
        of[param] = tensor
    return state


def check(store, step, state):
    """Every rank reads its part back and compares it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.utils._pytree import tree_leaves, tree_map

    loaded = tree_map(torch.zeros_like, state)
    dcp.load(loaded, checkpoint_id=f"step-{step}", storage_reader=store.reader())
    for found, saved in zip(tree_leaves(loaded), tree_leaves(state), strict=True):
        if not torch.equal(found.to_local(), saved.to_local()):
            raise AssertionError(f"step {step}: restored bytes differ")


def join(rank, layout, paths, folder):
    """Joins the processes of a layout; returns this one's part of each state."""
    import torch
    import torch.distributed as dist

    tensor_ranks, stages = layout
    world = tensor_ranks * stages
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(minutes=10))
    mesh = dist.init_device_mesh("cpu", (stages, tensor_ranks), mesh_dim_names=("stage", "tensor"))
    stage, own = divmod(rank, tensor_ranks)
    return [sharded(path, mesh["tensor"], own, stage, stages) for path in paths]


def in_processes(run, layout, worker):
    """Starts a worker for each process of a layout, with steps 1000 and 1001; returns the bytes of a state, and what rank 0 wrote."""
    from torch.multiprocessing import spawn

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        paths = [Path(folder, f"step-{step}.safetensors") for step in (1000, 1001)]
        size = [write_state(run, step, path) for step, path in zip((1000, 1001), paths, strict=True)][1]
        spawn(worker, (layout, paths, folder), nprocs=layout[0] * layout[1])
        return size, json.loads(Path(folder, "times.json").read_text())


def worker(rank, layout, paths, folder):
    """One process: saves base and delta again and again, and tells rank 0 how long."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from tensorcask import Store

    both, world = join(rank, layout, paths, folder), layout[0] * layout[1]
    times = {kind: [] for kind in KINDS}
    for number in range(ROUNDS):
        for kind, (precision, which) in KINDS.items():
            if which == 0:
                store = Store(f"{folder}/store-{number}-{kind}")
                writer = store.writer(policy="consecutive", precision=precision)
            dist.barrier()
            cpu, begun = sum(os.times()[:2]), time.perf_counter()
            dcp.save(both[which], checkpoint_id=f"step-{which + 1}", storage_writer=writer)
            cpu = sum(os.times()[:2]) - cpu
            dist.barrier()
            seconds = time.perf_counter() - begun
            everyone = [None] * world
            dist.all_gather_object(everyone, (cpu, None if writer.saved is None else writer.saved.stored_bytes))
            stored = next(one for _, one in everyone if one is not None)
            if number == 0 and precision == "lossless":
                check(store, which + 1, both[which])
            times[kind].append({"seconds": seconds, "cpu": [one for one, _ in everyone], "stored": stored})
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def measure_layouts(run):
    run.need(1000, 1001)
    rows = []
    for layout in LAYOUTS:
        size, times = in_processes(run, layout, worker)
        rows.append({"layout": layout, "kinds": times})
    data = run.describe() + ("" if run.whole else f", its layer {LAYERS} times")
    return {"data": data, "bytes": size, "rows": rows}


def layouts_tables(found):
    rows = []
    for row in found["rows"]:
        tensor_ranks, stages = row["layout"]
        for kind, rounds in row["kinds"].items():
            wall = spread([one["seconds"] for one in rounds])
            every, busiest = (spread([of(one["cpu"]) for one in rounds]) for of in (sum, max))
            rows.append([f"{tensor_ranks} / {stages}", kind, f"{rounds[0]['stored'] / found['bytes']:.3f}", wall, every, busiest])
    heads = ["tensor / pipeline", "save", "stored / original", "s", "CPU s, all processes", "CPU s, busiest process"]
    return {"layouts": table(heads, rows)}
