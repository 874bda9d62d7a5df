"""Hosts as Linux namespaces: each has a network, processes and shared memory of its own, and can be cut off or killed.

Runs inside `unshare -Urnm`, so that it needs no privileges and leaves nothing behind. Two switches join the hosts: one for
training and peers (10.77.0.0/24), one for the store (10.78.0.0/24).
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

SWITCHES = {"train": "10.77.0", "store": "10.78.0"}
SERVER = 100  # last number of the address of the store's server


def run(*command):
    subprocess.run([str(word) for word in command], check=True)


def make_switches():
    run("ip", "link", "set", "lo", "up")
    for name, network in SWITCHES.items():
        run("ip", "link", "add", name, "type", "bridge")
        run("ip", "address", "add", f"{network}.254/24", "dev", name)
        run("ip", "link", "set", name, "up")


def address(number, switch="train"):
    return f"{SWITCHES[switch]}.{number + 1}"


class Host:
    """One host: its first process, started by `command`, and everything that this starts. All of it dies with the first."""

    def __init__(self, number, command, log):
        self.number = number
        # The first process waits for a line, so that it finds its network.
        script = 'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && read -r go && exec "$@"'
        isolated = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script, "host"]
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                [*isolated, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.first = self._first_process()
        for switch in SWITCHES:
            self._plug_in(switch)
        self._tell("go")

    def _first_process(self):
        """Process id, seen from outside, of process 1 of the host."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (found := children.read_text().split()):
            if self.process.poll() is not None:
                raise RuntimeError(f"host {self.number} did not start; see its log")
        return int(found[0])

    def _plug_in(self, switch):
        outside = self._outside(switch)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", switch, "netns", self.first)
        run("ip", "link", "set", outside, "master", switch, "up")
        inside = ["nsenter", "--target", self.first, "--net", "ip"]
        # A replaced host is found at once: the others remember the hardware address of its predecessor for minutes.
        hardware = f"02:00:00:00:{list(SWITCHES).index(switch):02x}:{self.number:02x}"
        run(*inside, "link", "set", switch, "address", hardware)
        run(*inside, "address", "add", f"{address(self.number, switch)}/24", "dev", switch)
        run(*inside, "link", "set", switch, "up")

    def _outside(self, switch):
        return f"{switch}{self.number}"

    def _tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def cut(self, switch):
        """Pulls the cable: packets are lost, without an error on either side."""
        run("ip", "link", "set", self._outside(switch), "down")

    def join(self, switch):
        run("ip", "link", "set", self._outside(switch), "up")

    def enter(self, *command):
        """Runs a command in the host's namespaces; returns its output."""
        enter = ["nsenter", "--target", str(self.first), "--net", "--mount", "--pid"]
        return subprocess.run([*enter, *map(str, command)], check=True, capture_output=True, text=True).stdout

    def lose(self):
        """The host is gone at once: its network, all its processes and its memory."""
        for switch in SWITCHES:
            self.cut(switch)
        os.kill(self.first, signal.SIGKILL)
        self.process.wait()
        # The kernel removes the rest of a network later; the next host with this number needs the names now.
        for switch in SWITCHES:
            subprocess.run(["ip", "link", "delete", self._outside(switch)], stderr=subprocess.DEVNULL, check=False)
        self.process.stdin.close()
        self.process.stdout.close()


class Node(Host):
    """A host of a job: `node.py` is its first process, and starts and ends ranks."""

    def __init__(self, number, module, log):
        super().__init__(number, [sys.executable, Path(__file__).with_name("node.py"), module], log)
        self._changed = threading.Condition()
        self._exits = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            told = json.loads(line)
            with self._changed:
                self._exits[(told["job"], told["rank"])] = told["exit"]
                self._changed.notify_all()

    def start(self, job, ranks, options):
        self._tell(json.dumps({"start": job, "ranks": list(ranks), "options": options}))

    def kill_ranks(self, job):
        self._tell(json.dumps({"kill": job}))

    def exits(self, job):
        """Exit statuses of the ranks that have ended, by rank; negative: the signal."""
        with self._changed:
            return {rank: status for (of, rank), status in self._exits.items() if of == job}

    def wait_for_exits(self, job, ranks, seconds):
        with self._changed:
            done = self._changed.wait_for(lambda: all((job, rank) in self._exits for rank in ranks), seconds)
        if not done:
            raise AssertionError(f"host {self.number}: ranks of job {job} have not ended: {sorted(set(ranks) - set(self.exits(job)))}")
