"""Trains with a real trainer, kills it twice, resumes it, and compares every loss and every tensor with an undisturbed run.

    python killed.py transformers [--ranks 2]

The training runs as `with_NAME.py`, one process for each rank, on the CPU with gloo. `NAME-VARIANT` runs `with_NAME.py` with
$VARIANT. Its first rank kills itself by SIGKILL at a step that is not saved. The first resume is from the memory of the host. Then
it is killed again, its memory is removed, as with a lost host, and the second resume is from the store. At last, other numbers of
ranks load the newest step. Prints one line, and writes it to a file for the table.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tensorcask
from common import EVERY, STEPS
from tensorcask.engine import agent_status, stop_agent

HERE = Path(__file__).resolve().parent
PATIENCE = 240


def start(name, ranks, root, label, store, kill_at=None, only_load=False, replace=False):
    """Runs one start of the training to its end or its kill. Returns the lines of each rank. ``replace``: starts a killed rank again,
    while the others go on."""
    out = root / f"out-{label}"
    out.mkdir()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    program, _, variant = name.partition("-")
    command = [sys.executable, "-W", "ignore", str(HERE / f"with_{program}.py"), "--store", str(root / store), "--work", str(root / f"work-{store}")]
    command += ["--out", str(out), *(["--only-load"] if only_load else [])]
    kill = [] if kill_at is None else ["--kill-at", str(kill_at)]

    def begin(rank, options):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        told = {**os.environ, "TENSORCASK_ENGINE_DIR": memory_of(root, store), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "VARIANT": variant}
        # Some trainers compile code when they start.
        told |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "extensions")}
        told |= {key: str(value) for key, value in place.items()}
        with open(out / f"log{rank}.txt", "ab") as log:
            return subprocess.Popen([*command, *options], env=told, stdout=log, stderr=subprocess.STDOUT)

    processes = [begin(rank, kill) for rank in range(ranks)]
    deadline = time.monotonic() + PATIENCE
    try:
        while any(process.poll() is None for process in processes):
            dead = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if replace and dead == [0] and processes[0].returncode == -9:
                replace, kill_at = False, None
                processes[0] = begin(0, [])
                continue
            if dead or time.monotonic() > deadline:
                break
            try:
                next(process for process in processes if process.poll() is None).wait(0.1)
            except subprocess.TimeoutExpired:
                pass
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    status = processes[0].returncode
    if status != (0 if kill_at is None else -9) or kill_at is None and any(process.returncode for process in processes):
        logs = "\n".join(f"-- rank {rank}\n{(out / f'log{rank}.txt').read_text()[-4000:]}" for rank in range(ranks))
        raise SystemExit(f"{name}, {label}: exit statuses {[process.returncode for process in processes]}\n{logs}")
    return [[json.loads(line) for line in (out / f"rank{rank}.jsonl").read_text().splitlines()] for rank in range(ranks)]


def memory_of(root, store):
    return f"/dev/shm/{root.name}-{store}"


def losses_of(lines):
    return {line["step"]: line["loss"] for line in lines if "step" in line}


def tensors_of(lines):
    return {line["tensor"]: line["sha256"] for line in lines if "tensor" in line}


def wait_for(store, step):
    """Waits until the agent has committed a step."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if tensorcask.Store(store).snapshot(step).step == step:
                return
        except tensorcask.NotFoundError:
            time.sleep(0.1)
    raise SystemExit(f"step {step} did not get into the store")


def remove_memory(folder):
    """Ends the agent, and removes the shared memory of a run."""
    lock = Path(folder) / "agent.lock"
    if lock.exists():
        stop_agent(folder)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and is_alive(folder):
            time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def is_alive(folder):
    try:
        agent_status(folder)
    except tensorcask.Error:
        return False
    return True


def compare(name, whole, parts):
    """Compares the losses and the tensors of the parts of a killed run with those of the whole run, by rank."""
    compared = 0
    for rank, lines in enumerate(whole):
        expected = losses_of(lines)
        if sorted(expected) != list(range(1, STEPS + 1)):
            raise SystemExit(f"{name}: the whole run has losses of steps {sorted(expected)}")
        for part in parts:
            for step, loss in losses_of(part[rank]).items():
                if expected[step] != loss:
                    raise SystemExit(f"{name}, rank {rank}, step {step}: loss {float.fromhex(loss)}, expected {float.fromhex(expected[step])}")
                compared += 1
        wanted, found = tensors_of(lines), tensors_of(parts[-1][rank])
        different = [tensor for tensor in {**wanted, **found} if wanted.get(tensor) != found.get(tensor)]
        if different or not wanted:
            raise SystemExit(f"{name}, rank {rank}: tensors differ after the resume: {different[:5]} ({len(different)} of {len(wanted)})")
    return compared, sum(len(tensors_of(lines)) for lines in whole)


def killed_and_resumed(name, ranks, others, root):
    """Kills all ranks, twice. Returns words about the resumes and about what was compared."""
    whole = start(name, ranks, root, "whole", "whole")
    first, second = EVERY + 2, 2 * EVERY + 2
    killed = start(name, ranks, root, "killed", "run", kill_at=first)
    again = start(name, ranks, root, "again", "run", kill_at=second)
    wait_for(root / "run", second // EVERY * EVERY)
    remove_memory(memory_of(root, "run"))
    shutil.rmtree(root / "work-run")
    (root / "work-run").mkdir()
    last = start(name, ranks, root, "last", "run")
    resumes = [next(line for line in part[0] if "resumed" in line) for part in (again, last)]
    places = [(line["resumed"], line["source"]) for line in resumes]
    # Without an engine, both resumes are from the store.
    of_store = name.endswith("-store")
    are_right = [place for _, place in places] == ["store", "store"] if of_store else places[0][1] != "tier" and places[1][1] == "tier"
    if [step for step, _ in places] != [first // EVERY * EVERY, second // EVERY * EVERY] or not are_right:
        raise SystemExit(f"{name}: resumed from {places}")
    if "resumed" in whole[0][0]:
        raise SystemExit(f"{name}: the whole run has resumed")
    losses, tensors = compare(name, whole, [killed, again, last])
    loaded = [start(name, world, root, f"of-{world}", "run", only_load=True) for world in ([ranks, *others] if others else [])]
    digests = [tensors_of(lines) for of_ranks in loaded for lines in of_ranks]
    if any(digest != digests[0] or not digest for digest in digests):
        raise SystemExit(f"{name}: other numbers of ranks have loaded other tensors")
    if not tensorcask.Store(root / "run").verify().is_clean:
        raise SystemExit(f"{name}: the store is damaged")
    (step, place), (other, _) = places
    compared = f"{losses} losses, {tensors} tensors equal"
    return f"step {step} from {'the store' if of_store else place}, step {other} from the store", compared + (
        f"; the same tensors on {' and '.join(map(str, others))} ranks" if others else ""
    )


def killed_and_recovered(name, ranks, root):
    """Kills one replica, which recovers from another one. Returns words as above."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=ranks, join_timeout_ms=100, heartbeat_timeout_ms=2000)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    whole = start(name, ranks, root, "whole", "whole")
    killed = start(name, ranks, root, "killed", "run", kill_at=EVERY + 2, replace=True)
    resumes = [line["resumed"] for line in killed[0] if "resumed" in line]
    if resumes != [EVERY + 2] or any("resumed" in line for line in [*whole[0], *whole[1], *killed[1]]):
        raise SystemExit(f"{name}: recovered from {resumes}")
    losses, tensors = compare(name, whole, [killed])
    return f"step {resumes[0]} from a peer", f"{losses} losses, {tensors} tensors equal"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--others", default="", help="other numbers of ranks that load the end, separated by commas")
    parser.add_argument("--packages", default="", help="names of packages, separated by commas")
    parser.add_argument("--what", default="", help="words for the table")
    parser.add_argument("--line", help="file for the result")
    arguments = parser.parse_args()
    name, ranks = arguments.name, arguments.ranks
    # So that an end from outside ends the ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{name}: ended from outside"))
    root = Path(tempfile.mkdtemp(prefix=f"trainer-{name}-"))
    try:
        for store in ("whole", "run"):
            (root / f"work-{store}").mkdir()
        others = [int(other) for other in arguments.others.split(",") if other]
        recover = name.startswith("torchft")
        resumed, compared = killed_and_recovered(name, ranks, root) if recover else killed_and_resumed(name, ranks, others, root)
    finally:
        for store in ("whole", "run"):
            remove_memory(memory_of(root, store))
        shutil.rmtree(root, ignore_errors=True)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in arguments.packages.split(",") if package)
    line = f"{versions} | {arguments.what} | {resumed} | {compared}"
    print(f"{name} | {line}")
    if arguments.line:
        Path(arguments.line).write_text(line + "\n")


if __name__ == "__main__":
    main()
