"""The engine on many hosts: each test host has an engine folder and an agent of its own."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from pathlib import Path

import pytest
import tensorcask
from tensorcask._hosts import find_hosts
from tensorcask._peers import expand_nodes, resolve
from tensorcask.engine import agent_status

torch = pytest.importorskip("torch")

import hosts_trainer  # noqa: E402
import ranks  # noqa: E402
from hosts_trainer import HOSTS, RANKS, WORLD  # noqa: E402

STEPS, STOP_AT = 12, 7


@pytest.fixture
def url(tmp_path):
    """A new store: on local disk, or on the server that `tests/servers/run` has started."""
    server = os.environ.get("TENSORCASK_TEST_STORE")
    return f"{server}/hosts-{uuid.uuid4().hex}" if server else str(tmp_path / "store")


@pytest.fixture
def folders(tmp_path):
    """Engine folders, one for each host that a test makes."""
    made = []

    def make():
        made.append(Path(f"/dev/shm/tensorcask-test-{uuid.uuid4().hex}"))
        return made[-1]

    yield make
    for folder in made:
        end_agent(folder)
        shutil.rmtree(folder, ignore_errors=True)


def agent_pid(folder):
    try:
        return agent_status(folder)["pid"]
    except tensorcask.Error:
        return None


def end_agent(folder):
    pid = agent_pid(folder)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def start(url, folders, scratch, number, stop_at=None, gates=None, peers=None):
    """Starts the job; returns the processes of its ranks."""
    context = multiprocessing.get_context("forkserver")
    jobs = []
    for rank in range(WORLD):
        job = (url, str(folders[rank // RANKS]), str(scratch), number, rank, STEPS, stop_at)
        arguments = (*job, gates, peers, os.environ.get("AWS_ENDPOINT"))
        jobs.append(context.Process(target=hosts_trainer.main, args=arguments))
        jobs[-1].start()
    return jobs


def wait_until(condition, jobs=()):
    for _ in range(3000):
        if condition():
            return
        assert not any(job.exitcode for job in jobs), [job.exitcode for job in jobs]
        time.sleep(0.1)
    raise AssertionError("the condition did not come true")


def join_all(jobs):
    for job in jobs:
        job.join(300)
    assert [job.exitcode for job in jobs] == [0] * len(jobs)


def losses(scratch, number):
    return json.loads((scratch / f"losses-{number}").read_text())


def test_a_job_whose_host_is_lost_goes_on_bit_for_bit(url, folders, tmp_path):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    join_all(start(f"{url}-calm", [folders(), folders()], calm, 0))
    expected = losses(calm, 0)
    assert list(expected) == [str(step) for step in range(1, STEPS + 1)]
    store = tensorcask.Store(f"{url}-calm")
    assert [info.step for info in store.snapshots()] == list(range(1, STEPS + 1))
    assert store.verify().is_clean
    # The step count of the optimizer is on all ranks, and stored once.
    whole = store.load(framework="numpy")
    counts = [name for name in store.snapshot().tensors() if name.endswith(".step")]
    assert counts and whole["step"] == STEPS

    hosts = [folders(), folders()]
    jobs = start(url, hosts, killed, 0, STOP_AT)
    wait_until(lambda: all((killed / f"stopped-{rank}").exists() for rank in range(WORLD)), jobs)
    # Host 1 is lost: its ranks, its agent and its memory.
    pid = agent_pid(hosts[1])
    for lost in (jobs[2].pid, jobs[3].pid, pid):
        os.kill(lost, signal.SIGKILL)
    shutil.rmtree(hosts[1])
    # The other ranks hang in a collective, until the launcher ends them.
    for job in jobs[:RANKS]:
        os.kill(job.pid, signal.SIGKILL)
    for job in jobs:
        job.join(60)
    before = losses(killed, 0)

    join_all(start(url, [hosts[0], folders()], killed, 1))
    resumed = {int((killed / f"resumed-1-{rank}").read_text()) for rank in range(WORLD)}
    assert len(resumed) == 1 and STOP_AT - 2 <= resumed.pop() <= STOP_AT
    after = losses(killed, 1)
    assert {**before, **after} == expected
    assert {step: before[step] for step in before} == {step: expected[step] for step in before}
    store = tensorcask.Store(url)
    assert [info.step for info in store.snapshots()] == list(range(1, STEPS + 1))
    assert store.verify().is_clean
    for step, loss in expected.items():
        assert store.snapshot(int(step)).user["loss"] == loss


class Relay:
    """A port in front of the S3 server, which can be closed."""

    def __init__(self, endpoint):
        host, port = endpoint.removeprefix("http://").split(":")
        self.target, self.listener, self.open_sockets = (host, int(port)), None, set()
        self.open(0)
        self.port = self.listener.getsockname()[1]

    def open(self, port):
        self.listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self.serve, args=(self.listener,), daemon=True).start()

    def serve(self, listener):
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            self.open_sockets |= {near, far}
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self.pump, args=(source, target), daemon=True).start()

    def pump(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        for side in (source, target):
            self.open_sockets.discard(side)
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for side in list(self.open_sockets):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(monkeypatch):
    """Closes the way to the S3 server. `tests/servers/run moto` starts the server, as `python/check` does."""
    if not os.environ.get("TENSORCASK_TEST_STORE", "").startswith("s3://"):
        pytest.skip("needs an S3 server: bash tests/servers/run moto -- pytest ...")
    relay = Relay(os.environ["AWS_ENDPOINT"])
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{relay.port}")
    yield relay
    relay.close()


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def test_a_job_that_loses_a_host_and_the_store_goes_on_bit_for_bit(url, relay, folders, tmp_path):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    join_all(start(f"{url}-calm", [folders(), folders()], calm, 0))
    expected = losses(calm, 0)

    def reached(name):
        return all((killed / f"{name}-{rank}").exists() for rank in range(WORLD))

    peers = [f"127.0.0.1:{port}" for port in free_ports(HOSTS)]
    hosts = [folders(), folders()]
    gates = {4: ("durable", "connected"), STOP_AT: ("replicated", "copied")}
    jobs = start(url, hosts, killed, 0, STOP_AT, gates, peers)
    wait_until(lambda: reached("connected"), jobs)
    relay.close()
    (killed / "connected-opened").touch()
    wait_until(lambda: reached("copied"), jobs)
    levels = [agent_status(folder)["runs"][0]["levels"] for folder in hosts]
    assert [(level["replicated"], level["durable"]) for level in levels] == [(STOP_AT, 4)] * HOSTS
    # Host 1 is lost with its memory, and the other ranks are ended.
    pid = agent_pid(hosts[1])
    for lost in (*(job.pid for job in jobs), pid):
        os.kill(lost, signal.SIGKILL)
    shutil.rmtree(hosts[1])
    for job in jobs:
        job.join(60)
    before = losses(killed, 0)

    hosts = [hosts[0], folders()]
    jobs = start(url, hosts, killed, 1, None, {STEPS - 1: ("replicated", "resumed")}, peers)
    wait_until(lambda: reached("resumed"), jobs)
    assert [(killed / f"{what}-1-{rank}").read_text() for rank in range(WORLD) for what in ("resumed", "source")] == [
        str(STOP_AT),
        "hosts",
    ] * WORLD
    runs = [agent_status(folder)["runs"][0] for folder in hosts]
    assert [(run["hosts"]["is_without_store"], run["levels"]["durable"]) for run in runs] == [(True, None)] * HOSTS
    relay.open(relay.port)
    (killed / "resumed-opened").touch()
    join_all(jobs)
    after = losses(killed, 1)
    assert {**before, **after} == expected
    assert {step: before[step] for step in before} == {step: expected[step] for step in before}
    store = tensorcask.Store(url)
    assert [info.step for info in store.snapshots()] == [*range(1, 5), *range(STOP_AT + 1, STEPS + 1)]
    assert store.verify().is_clean
    for info in store.snapshots():
        assert store.snapshot(info.step).user["loss"] == expected[str(info.step)]


def variables(monkeypatch, **values):
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_NODEID")
    names += ("SLURM_STEP_TASKS_PER_NODE", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")
    names += ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")
    for name in (*names, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_hosts_are_found_in_the_variables_of_the_launcher(monkeypatch):
    variables(monkeypatch)
    assert find_hosts(5, 8) is None
    torchrun = dict(TORCHELASTIC_RUN_ID="run", TORCHELASTIC_RESTART_COUNT=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    variables(monkeypatch, **torchrun)
    found = find_hosts(5, 8)
    assert found == tensorcask.Hosts("torchrun run 2", range(4, 8)) and len(found.round) == 32
    assert find_hosts(1, 4) is None, "all ranks on one host"
    assert find_hosts(0, 1) is None, "a save of one rank alone"
    variables(monkeypatch, SLURM_JOB_ID=7, SLURM_STEP_ID=0, SLURM_LOCALID=1, SLURM_STEP_TASKS_PER_NODE="2(x4)")
    assert find_hosts(3, 8) == tensorcask.Hosts("slurm 7 0 0", range(2, 4))
    uneven = dict(SLURM_JOB_ID=7, SLURM_STEP_ID=0, SLURM_STEP_TASKS_PER_NODE="1,3(x2)")
    variables(monkeypatch, **uneven, SLURM_NODEID=2, SLURM_LOCALID=1)
    found = find_hosts(5, 7)
    assert found == tensorcask.Hosts("slurm 7 0 0", range(4, 7), first_ranks=(0, 1, 4)) and (found.number, found.count(7)) == (2, 3)
    variables(monkeypatch, **uneven, SLURM_NODEID=1, SLURM_LOCALID=1)
    with pytest.raises(tensorcask.UnsupportedError, match="--distribution=block"):
        find_hosts(4, 7)
    with pytest.raises(ValueError, match="consecutive"):
        tensorcask.Hosts("job", range(0, 8, 2))


def test_hosts_are_found_although_a_task_starts_several_ranks(monkeypatch):
    """With mp.spawn, each rank of a node has the variables of the only task of the node."""
    spawned = dict(SLURM_JOB_ID=7, SLURM_STEP_ID=0, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE="1(x2)")
    for rank in range(8):
        variables(monkeypatch, **spawned, SLURM_NODEID=rank // 4)
        assert find_hosts(rank, 8) == tensorcask.Hosts("slurm 7 0 0", range(rank // 4 * 4, rank // 4 * 4 + 4))
    # Nothing tells how many ranks each node has.
    variables(monkeypatch, **spawned, SLURM_NODEID=1)
    with pytest.raises(tensorcask.UnsupportedError, match="cannot tell which ranks that node has.*initialise torch.distributed"):
        find_hosts(4, 7)
    with pytest.raises(tensorcask.UnsupportedError, match="cannot tell which ranks"):
        find_hosts(2, 8)
    variables(monkeypatch, **{**spawned, "SLURM_STEP_TASKS_PER_NODE": "1"}, SLURM_NODEID=0)
    assert find_hosts(3, 4) is None, "one node"


@pytest.mark.parametrize("launcher", hosts_trainer.LAUNCHERS)
def test_ranks_tell_each_other_their_nodes(launcher, tmp_path, monkeypatch):
    variables(monkeypatch)
    ranks.on_ranks(4, tmp_path, hosts_trainer.find_together, launcher)


def test_a_start_without_a_name_is_refused_with_a_way_out(monkeypatch):
    variables(monkeypatch, CROSS_RANK=0, CROSS_SIZE=2, LOCAL_SIZE=2, LOCAL_RANK=1)
    with pytest.raises(ValueError, match="has no name.*Initialise torch.distributed"):
        find_hosts(1, 4)


def test_peers_are_found(monkeypatch):
    variables(monkeypatch)
    hosts = tensorcask.Hosts("job", range(4, 8))
    own = [f"n{host}:7411" for host in range(3)]
    assert resolve(None, hosts, 5, 12) is None and resolve("auto", None, 0, 1) is None
    expected = ("127.0.0.1:7411", own, None, 1, 1, 2, None)
    assert resolve("n{host}:7411", hosts, 5, 12) == resolve(own, hosts, 5, 12) == resolve(",".join(own), hosts, 5, 12) == expected
    tls = ("/tls/ca.pem", "/tls/host-1.pem", "/tls/host-1-key.pem")
    options = dict(replicas=2, jump=2, keep=3, bandwidth=1 << 30)
    assert resolve(tensorcask.Peers(own, tls="/tls", **options), hosts, 5, 12) == ("0.0.0.0:7411", own, tls, 2, 2, 3, 1 << 30)
    assert resolve(tensorcask.Peers(own, listen="10.0.0.1:9", tls=tls), hosts, 5, 12)[:3] == ("10.0.0.1:9", own, tls)
    with pytest.raises(ValueError, match="2 addresses for 3 hosts"):
        resolve(own[:2], hosts, 5, 12)
    with pytest.raises(tensorcask.InvalidArgumentError, match="name:port"):
        resolve("a,b:1,c:1", hosts, 5, 12)
    with pytest.raises(ValueError, match="found no addresses"):
        resolve("auto", hosts, 5, 12)
    variables(monkeypatch, SLURM_STEP_NODELIST="gpu[08-09],big1")
    assert resolve(tensorcask.Peers(port=9), hosts, 5, 12)[:2] == ("127.0.0.1:9", ["gpu08:9", "gpu09:9", "big1:9"])
    assert expand_nodes("r[1-2]n[3,5]") == ["r1n3", "r1n5", "r2n3", "r2n5"]
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-1.train.default.svc")
    assert resolve("service:train", hosts, 5, 12)[1] == [f"worker-{host}.train:7411" for host in range(3)]
    with pytest.raises(ValueError, match="does not end in the number of this host, 2"):
        resolve("service:train", tensorcask.Hosts("job", range(8, 12)), 9, 12)


def test_wrong_peers_are_named(url, folders):
    def make(**options):
        engine_of(url, folders(), 0, peers=tensorcask.Peers(["127.0.0.1:1", "127.0.0.1:2"], **options))

    with pytest.raises(tensorcask.InvalidArgumentError, match="no certificates"):
        make(listen="0.0.0.0:7411")
    with pytest.raises(ValueError, match='listen="eth0"'):
        make(listen="eth0")
    with pytest.raises(tensorcask.InvalidArgumentError, match="`keep` and `jump`"):
        make(jump=0)
    engine = engine_of(url, folders(), 0)
    engine.save(part(0, 1), step=1)
    with pytest.raises(tensorcask.InvalidArgumentError, match="no save reaches the level `replicated`"):
        engine.wait("replicated", 1)
    # The other host never saves.
    with pytest.raises(tensorcask.StorageError, match="not in the store after 0.3 s, and memory is kept"):
        engine.finish(timeout=0.3)
    engine.close()


def test_ranks_tell_each_other_values_without_a_device(tmp_path):
    context = multiprocessing.get_context("forkserver")
    jobs = [context.Process(target=hosts_trainer.exchange, args=(rank, tmp_path)) for rank in range(2)]
    for job in jobs:
        job.start()
    join_all(jobs)
    assert all((tmp_path / f"told-{rank}").exists() for rank in range(2))


def test_a_text_does_not_name_hosts(url):
    with pytest.raises(TypeError, match="tensorcask.Hosts"):
        tensorcask.Engine(url, hosts="node-1,node-2")


def engine_of(url, folder, rank, session="job", **options):
    hosts = tensorcask.Hosts(session, range(rank, rank + 1), patience=0.3)
    return tensorcask.Engine(url, folder=folder, rank=rank, world=HOSTS, hosts=hosts, **options)


def part(rank, value):
    return {f"w-{rank}": torch.full((1000,), float(value)), "count": torch.tensor(value)}


def test_levels_status_and_a_session_that_is_used_twice(url, folders):
    hosts = [folders(), folders()]
    engines = [engine_of(url, folder, rank) for rank, folder in enumerate(hosts)]
    assert engines[0].hosts.session == "job"
    for step in (1, 2):
        for rank, engine in enumerate(engines):
            engine.save(part(rank, step), step=step)
    for engine in engines:
        assert engine.wait("copied", 0).reached
        assert engine.wait("durable", 60, step=1).reached
        assert engine.wait("durable", 60).reached
        with pytest.raises(tensorcask.NotFoundError, match="step 9"):
            engine.wait("durable", step=9)
        with pytest.raises(ValueError, match="copied"):
            engine.wait("safe")
    runs = [agent_status(folder)["runs"][0] for folder in hosts]
    # After another host has taken over, the former leader hears of it with a delay.
    while [run["hosts"]["leader"]["is_this_host"] for run in runs].count(True) != 1:
        runs = [agent_status(folder)["runs"][0] for folder in hosts]
    assert [run["levels"] for run in runs] == [{"copied": 2, "encoded": 2, "replicated": None, "durable": 2}] * 2
    leaders = [run["hosts"]["leader"] for run in runs]
    assert len({(leader["term"], leader["writer"]) for leader in leaders}) == 1
    # A new host with the name of a session that has begun.
    with pytest.raises(tensorcask.ConflictError, match="a session of its own"):
        engine_of(url, folders(), 1)
    for engine in engines:
        engine.finish()
    assert tensorcask.load(url, step=2)["count"] == 2


def test_a_last_step_that_other_ranks_lack_is_given_up(url, folders):
    hosts = [folders(), folders()]
    engines = [engine_of(url, folder, rank) for rank, folder in enumerate(hosts)]
    for rank, engine in enumerate(engines):
        engine.save(part(rank, 1), step=1)
    engines[1].save(part(1, 2), step=2)
    engines[0].finish()
    with pytest.raises(tensorcask.StorageError, match="step 2.*rank 0 did not save"):
        engines[1].finish()
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [1]


def test_different_values_of_one_tensor_are_an_error(url, folders):
    hosts = [folders(), folders()]
    engines = [engine_of(url, folder, rank) for rank, folder in enumerate(hosts)]
    for rank, engine in enumerate(engines):
        engine.save({"count": torch.tensor(7 + rank)}, step=1)
    waited = [engine.wait("durable", 60) for engine in engines]
    assert not any(found.reached for found in waited)
    messages = [found.failures[0][1] for found in waited]
    assert any("`count`" in text and "ranks 0 and 1" in text and "step 1" in text for text in messages), messages
    for rank, engine in enumerate(engines):
        engine.save(part(rank, 2), step=2)
    for engine in engines:
        assert engine.wait("durable", 60).reached
        engine.close()
    assert [info.step for info in tensorcask.Store(url).snapshots()] == [2]
