#!/usr/bin/env python3
"""The Python package beside torch.save, safetensors and torch.distributed.checkpoint: whole states, saved, staged and loaded.

    OMP_NUM_THREADS=1 python benches/python/compare.py [--gigabytes 1] [--folder DIR] [--repeat 3]

The state is that of a real run (bf16 model, f32 master weights and Adam moments; `tests/data`), tiled to size. Each row runs in a
process of its own and is the median of `--repeat` processes. Every save ends with an fsync of all that it wrote. Prints a Markdown table.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
DATA = Path(__file__).parents[2] / "tests" / "data"
ROWS = [
    ("memcpy of the state", "memcpy"),
    ("save, fsync: torch.save", "save-torch"),
    ("save, fsync: safetensors", "save-safetensors"),
    ("save, fsync: DCP", "save-dcp"),
    ("save, fsync: **tensorcask**, `full`", "save-tensorcask"),
    ("save one step later: torch.save", "delta-torch"),
    ("save one step later: **tensorcask**, delta, base in memory", "delta-tensorcask"),
    ("stall of the second `async_save`: DCP", "stall-dcp"),
    ("stall of the second `async_save`: **tensorcask**", "stall-tensorcask"),
    ("stall of the second save: **tensorcask.Engine**", "engine-second"),
    ("stall of a save while the agent encodes the one before: **tensorcask.Engine**", "engine-busy"),
    ("after a kill, into the caller's tensors: **tensorcask.Engine**, raw slot", "engine-slot"),
    ("after a kill, into the caller's tensors: **tensorcask.Engine**, encoded memory, a delta", "engine-memory"),
    ("load into the caller's tensors, warm: torch.load", "load-torch"),
    ("load into the caller's tensors, warm: safetensors", "load-safetensors"),
    ("load into the caller's tensors, warm: DCP", "load-dcp"),
    ("load into the caller's tensors, warm: **tensorcask**", "load-tensorcask"),
    ("load into the caller's tensors, warm: **tensorcask**, a delta", "load-tensorcask-delta"),
]


def make_state(gigabytes, step):
    from safetensors.torch import load_file

    tensors = load_file(DATA / f"step-{step}.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    copies = 16
    times = max(1, round(gigabytes * 1e9 / total / copies))

    def tiled(name, tensor, copy):
        # Each copy begins elsewhere, so that no two tensors are the same.
        return tensor.roll(copy, 0).repeat(times, *[1] * (tensor.dim() - 1)) if tensor.dim() else tensor.clone()

    return {f"{name}.{copy}": tiled(name, tensor, copy) for name, tensor in tensors.items() for copy in range(copies)}


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def sync(folder):
    for path in [*Path(folder).rglob("*"), Path(folder)]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(mode, gigabytes, folder, repeat_of=None):
    import torch
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    what, _, by = mode.partition("-")
    later = by.endswith("-delta") or what in ("delta",)
    state = make_state(gigabytes, 1000)
    size = sum(tensor.nbytes for tensor in state.values())
    path = Path(folder) / "x"
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)

    def save(tensors, step):
        if by.startswith("tensorcask"):
            import tensorcask

            tensorcask.save(tensors, path, step=step, policy="consecutive" if later else "full")
        elif by == "torch":
            torch.save(tensors, path)
            sync(folder)
        elif by == "safetensors":
            from safetensors.torch import save_file

            save_file(tensors, path)
            sync(folder)
        elif by == "dcp":
            dcp.save(tensors, checkpoint_id=path / str(step), no_dist=True)
            sync(folder)

    def load(out):
        if by.startswith("tensorcask"):
            import tensorcask

            tensorcask.load(path, out=out)
        elif by == "torch":
            for name, tensor in torch.load(path, weights_only=True).items():
                out[name].copy_(tensor)
        elif by == "safetensors":
            from safetensors.torch import load_file

            for name, tensor in load_file(path).items():
                out[name].copy_(tensor)
        elif by == "dcp":
            dcp.load(out, checkpoint_id=path / "1000", no_dist=True)

    if what == "memcpy":
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

        def work():
            for name, tensor in state.items():
                target[name].copy_(tensor)

    elif what == "save":

        def work():
            save(state, 1000)

    elif what == "delta":
        save(state, 1000)
        next_state = make_state(gigabytes, 1001)

        def work():
            save(next_state, 1001)

    elif what == "load":
        save(state, 1000)
        if later:
            state = make_state(gigabytes, 1001)
            save(state, 1001)
        out = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        # Once to warm the file cache, as a resume on the same machine finds it.
        load(out)
        for tensor in out.values():
            tensor.zero_()

        def work():
            load(out)

    elif what == "stall":
        import tensorcask

        writer = tensorcask.Store(path).writer() if by == "tensorcask" else None
        stager = None
        if writer is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            stager = DefaultStager(StagingOptions(False, False, False, False))
        futures = []

        def start(step):
            storage = writer or dcp.FileSystemWriter(path / str(step))
            futures.append(dcp.async_save(state, checkpoint_id=None if writer is None else str(step), storage_writer=storage, async_stager=stager, no_dist=True))

        start(1000)
        futures[0].result()
        time.sleep(0.1)

        def work():
            start(1001)

    elif what == "engine":
        import tensorcask

        shared = tempfile.mkdtemp(dir="/dev/shm")
        engine = tensorcask.Engine(path, folder=shared, policy="consecutive")
        agent = int(Path(shared, "agent.lock").read_text())
        engine.save(state, step=1000)
        # The base comes first, and the agent is idle again.
        assert engine.wait().reached
        next_state = make_state(gigabytes, 1001)
        if by == "busy":
            engine.save(next_state, step=1001)
        elif by in ("slot", "memory"):
            engine.save(next_state, step=1001)
            assert engine.wait().reached
            state, out = next_state, {name: torch.zeros_like(tensor) for name, tensor in next_state.items()}
            if by == "memory":
                # As when `/dev/shm` keeps the encoded snapshots alone.
                engine.close()
                next(Path(shared).glob("*/rank-0/arena")).unlink()
                engine = tensorcask.Engine(path, folder=shared, policy="consecutive")

        def work():
            if by in ("second", "busy"):
                engine.save(state if by == "busy" else next_state, step=1002)
            else:
                found = engine.restore(out=out)
                assert found.source == by, found.source

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    extra = status("VmHWM") - before
    if what == "load" or by in ("slot", "memory"):
        assert all(torch.equal(out[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)) for name, tensor in state.items())
    if what == "stall":
        [future.result() for future in futures]
    if what == "engine":
        engine.wait()
        engine.finish()
        tensorcask.engine.stop_agent(shared)
        while Path(f"/proc/{agent}").exists() and os.waitpid(agent, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        shutil.rmtree(shared)
    stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    if what == "delta" and by == "tensorcask":
        import tensorcask

        stored = tensorcask.Store(path).snapshots()[-1].stored_bytes
    return {"seconds": seconds, "extra": extra, "size": size, "stored": stored}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", default=".cache/bench-python")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose mode contains this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.gigabytes, arguments.folder)))
        return
    memcpy = None
    for title, mode in ROWS:
        if mode != "memcpy" and arguments.only not in mode:
            continue
        results = []
        for _ in range(arguments.repeat):
            command = [sys.executable, "-W", "ignore", __file__, "--measure", mode, "--gigabytes", str(arguments.gigabytes), "--folder", arguments.folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{mode}: {done.stderr}")
            results.append(json.loads(done.stdout.splitlines()[-1]))
        shutil.rmtree(arguments.folder, ignore_errors=True)
        seconds = statistics.median(result["seconds"] for result in results)
        extra = statistics.median(result["extra"] for result in results)
        size = results[0]["size"]
        if memcpy is None:
            memcpy = seconds
            print(f"State of {size / 1e9:.2f} GB, median of {arguments.repeat} processes, {os.cpu_count()} cores.\n")
            print("| | s | x memcpy | extra memory / state | stored / state |\n|---|---:|---:|---:|---:|")
        stored = f"{results[-1]['stored'] / size:.3f}" if mode.startswith(("save", "delta-tensorcask")) else ""
        print(f"| {title} | {seconds:.2f} | {seconds / memcpy:.1f} | {extra / size:.2f} | {stored} |", flush=True)


if __name__ == "__main__":
    main()
