"""BitSnap, 3.1 and 3.2: what a save by several processes costs if it compresses before it goes into shared memory, and if it is copied raw."""

import json
import os
import time
from pathlib import Path

from layouts import CLUSTERS, in_processes, join
from tables import spread, table

# Processes that share each tensor by rows, and stages that share the layers.
LAYOUTS = ((1, 1), (4, 1), (4, 2))
ROUNDS = 5
# Without loss; and as BitSnap stores masters and moments.
METHODS = {"copied raw, by the engine": None, "compressed first": "lossless", "compressed first, clusters": CLUSTERS}


def bytes_below(folder):
    """Bytes of memory that files in shared memory take."""
    return sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())


def worker(rank, layout, paths, folder):
    """One process: saves two steps in turn with each method. Rank 0 writes the times of all."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from tensorcask import Engine, Store

    both, world = join(rank, layout, paths, folder), layout[0] * layout[1]
    found = {}
    for number, (method, precision) in enumerate(METHODS.items()):
        memory = f"{folder}/memory-{number}"
        # A base, then a delta: both are needed for one snapshot.
        if precision is None:
            # The store of the uploads is no memory of a save.
            engine = Engine(f"{folder}/store", rank=rank, world=world, hosts=None, folder=memory, policy="intermittent:2", keep=1)
        else:
            writer = Store(memory).writer(policy="intermittent:2", precision=precision)
        stored = []
        for save in range(2 * ROUNDS + 1):
            state = both[save % 2]
            dist.barrier()
            cpu, begun = sum(os.times()[:2]), time.perf_counter()
            if precision is None:
                engine.save(state, step=save + 1)
            else:
                dcp.save(state, checkpoint_id=f"step-{save + 1}", storage_writer=writer)
            cpu, stall = sum(os.times()[:2]) - cpu, time.perf_counter() - begun
            if precision is None:
                engine.wait("durable")
            everyone = [None] * world
            dist.all_gather_object(everyone, (stall, cpu, None if precision is None or writer.saved is None else writer.saved.stored_bytes))
            stored.append(next((one for _, _, one in everyone if one is not None), 0))
            # The first save makes the memory.
            if rank == 0 and save > 0:
                kind = "" if precision is None else ", delta" if save % 2 else ", base"
                taken = bytes_below(memory) if precision is None else sum(stored[-2:])
                one = {"stall": max(stall for stall, _, _ in everyone), "cpu": sum(cpu for _, cpu, _ in everyone), "memory": taken}
                found.setdefault(method + kind, []).append(one)
            dist.barrier()
        if precision is None:
            engine.close()
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_memory(run):
    run.need(1000, 1001)
    rows = []
    for layout in LAYOUTS:
        size, found = in_processes(run, layout, worker)
        rows.append({"layout": layout, "methods": found})
    return {"data": run.describe(), "bytes": size, "rows": rows}


def memory_tables(found):
    rows = []
    for row in found["rows"]:
        tensor_ranks, stages = row["layout"]
        for method, rounds in row["methods"].items():
            stall, cpu = (spread([one[key] for one in rounds], 3) for key in ("stall", "cpu"))
            memory = spread([one["memory"] / found["bytes"] for one in rounds])
            rows.append([f"{tensor_ranks} / {stages}", method, stall, cpu, memory])
    heads = ["tensor / pipeline", "save", "stall, s", "CPU s of all trainers", "shared memory / state"]
    return {"memory": table(heads, rows)}
