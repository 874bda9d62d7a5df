"""A job on several hosts, with an S3 server on one more, for tests that kill hosts and cut cables."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import network
import tensorcask
from holding_proxy import HoldingProxy
from network import Host, Node, address

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/servers"))

import servers  # noqa: E402

PORT = 7411  # of the peers
SECONDS = 240  # longest wait for anything, on a busy machine


def wait_until(condition, what, still=lambda: None):
    """Waits for a condition; ``still`` raises if it can no longer come true."""
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        still()
        if time.monotonic() > end:
            raise AssertionError(f"waited {SECONDS} s for this: {what}")
        time.sleep(0.05)
    return found


class Server:
    """SeaweedFS on a host of its own; what it stores survives a kill."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir()
        self.address = f"{network.SWITCHES['store']}.{network.SERVER + 1}"
        self.command, self.variables, self.make_bucket = servers.seaweedfs(folder, self.address)
        self.host = None
        self.start()

    def start(self):
        self.host = Host(network.SERVER, self.command, self.folder / "log")
        wait_until(self._answers, "the S3 server answers", self._check)

    def _check(self):
        if self.host.process.poll() is not None:
            raise AssertionError(f"the S3 server has ended; see {self.folder}/log")

    def _answers(self):
        with contextlib.suppress(Exception):
            self.make_bucket()
            return True

    def lose(self):
        self.host.lose()


class Cluster:
    """Hosts with ranks, and a server. ``scratch``: folder for logs and for the messages of ranks. ``module``: the `main` of the ranks."""

    def __init__(self, scratch, hosts, local, module="trainer"):
        self.scratch, self.local, self.module = scratch, local, module
        self.server = Server(scratch / "server")
        self.url = f"{self.server.variables.pop('TENSORCASK_TEST_STORE')}/run"
        os.environ.update(self.server.variables)
        self.proxies = {}
        self.nodes = [self._node(number) for number in range(hosts)]
        self.job = -1

    @property
    def world(self):
        return len(self.nodes) * self.local

    def _node(self, number):
        return Node(number, self.module, self._log(number))

    def _log(self, number):
        """What the ranks of a host have said."""
        return self.scratch / f"host-{number}.log"

    def replace(self, number):
        """A fresh host in place of one that was lost."""
        self.nodes[number] = self._node(number)

    def ranks(self, number):
        return range(number * self.local, (number + 1) * self.local)

    def start(self, steps, **options):
        """Starts the job on all hosts; ``options`` of `trainer.main`."""
        self.job += 1
        options = {
            "url": self.url, "scratch": str(self.scratch), "job": self.job, "world": self.world, "local": self.local, "steps": steps,
            "master": f"{address(0)}:{29500 + self.job}", **options,
        }  # fmt: skip
        for number, node in enumerate(self.nodes):
            node.start(self.job, self.ranks(number), {**options, "variables": self._variables(number)})

    def make_certificates(self, folder="tls"):
        """Certificates for all hosts; returns their folder."""
        tool, hosts = Path(sys.executable).with_name("tensorcask"), len(self.nodes)
        network.run(tool, "agent", "init-tls", self.scratch / folder, "--run", self.url, "--hosts", hosts)
        return str(self.scratch / folder)

    def _variables(self, number):
        if number not in self.proxies:
            return self.server.variables
        port = self.proxies[number].port
        return {**self.server.variables, "AWS_ENDPOINT": f"http://{network.SWITCHES['store']}.254:{port}"}

    def hold_request_of(self, number, beginning, passed):
        """A proxy between a host and the server, for the jobs that start later: see `HoldingProxy`."""
        host, port = self.server.variables["AWS_ENDPOINT"].removeprefix("http://").split(":")
        self.proxies[number] = HoldingProxy((host, int(port)), f"{network.SWITCHES['store']}.254", beginning, passed)
        return self.proxies[number]

    def store(self):
        return tensorcask.Store(self.url)

    def committed(self):
        """The newest committed step, or 0."""
        with contextlib.suppress(tensorcask.NotFoundError):
            return max((info.step for info in self.store().snapshots()), default=0)
        return 0

    def wait_for_commit(self, step):
        wait_until(lambda: self.committed() >= step, f"step {step} is committed")

    def status(self, number):
        """Status of the run, as the agent of a host reports it."""
        told = self.nodes[number].enter(Path(sys.executable).with_name("tensorcask"), "agent", "status", "--json")
        return json.loads(told)["runs"][0]

    def told(self, name, ranks=None):
        """Messages of this name that ranks have written in this job, by rank; None until all have."""
        ranks = range(self.world) if ranks is None else ranks
        paths = [self.scratch / f"{name}-{self.job}-{rank}" for rank in ranks]
        return [json.loads(path.read_text()) for path in paths] if all(path.exists() for path in paths) else None

    def wait_for(self, name, ranks=None):
        return wait_until(lambda: self.told(name, ranks), f"ranks tell `{name}`", self.check)

    def losses(self, job=None):
        path = self.scratch / f"losses-{self.job if job is None else job}"
        return {int(step): loss for step, loss in json.loads(path.read_text()).items()} if path.exists() else {}

    def wait_for_step(self, step):
        wait_until(lambda: step in self.losses(), f"step {step} is saved", self.check)

    def wait_for_saved(self, step):
        """Waits until all ranks have saved a step in this job."""
        wait_until(lambda: min(self.told("saved") or [0]) >= step, f"all ranks save step {step}", self.check)

    def check(self):
        """Raises if a rank has failed, with the end of the log of its host."""
        for node in self.nodes:
            failed = {rank: status for rank, status in node.exits(self.job).items() if status != 0}
            if failed:
                log = self._log(node.number)
                end = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
                raise AssertionError(f"host {node.number}: ranks have ended: {failed}; the end of {log}:\n{end}")

    def lose(self, number):
        self.nodes[number].lose()

    def end_job(self):
        """Ends all ranks at once, as a launcher does when one is gone. Agents live on."""
        for number, node in enumerate(self.nodes):
            if node.process.poll() is None:
                node.kill_ranks(self.job)
                node.wait_for_exits(self.job, self.ranks(number), SECONDS)

    def join(self):
        """Waits until all ranks have ended without an error."""

        def ended():
            return all(len(node.exits(self.job)) == self.local for node in self.nodes)

        wait_until(ended, "the job ends", self.check)
        self.check()

    def _keep_logs(self, node):
        """Keeps what the agent of a host says, beside the log of its ranks."""
        with contextlib.suppress(subprocess.CalledProcessError):
            told = node.enter("sh", "-c", "cat /dev/shm/tensorcask-*/agent.log && find /dev/shm -type f -printf '%s %P\n'")
            (self.scratch / f"agent-{node.number}.log").write_text(told)

    def stop(self):
        for proxy in self.proxies.values():
            proxy.shutdown()
            proxy.socket.close()
        for node in self.nodes:
            if node.process.poll() is None:
                self._keep_logs(node)
                node.lose()
        if self.server.host.process.poll() is None:
            self.server.lose()
