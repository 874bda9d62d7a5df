"""Kills random hosts of a job at random moments, one after the other, and checks each resume.

    bash tests/hosts/run campaign [--kills 20] [--light] [--seed 0] [--folder .cache/hosts-campaign]

Before some of the kills, the S3 server is killed too; it comes back once the job has resumed. A resume must not be older than the
newest durable step, nor than the newest step that all ranks saw `replicated` in this start. Before the first `replicated` step of
a start, a second loss may remove the only copy. No state may be mixed. Losses are compared with those of an undisturbed job.
``--light``: ranks without PyTorch, whose states follow from the step. An interrupted campaign goes on: kills that were survived are
in the folder.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

import network
from cluster import PORT, Cluster

HOSTS, LOCAL = 4, 2
STEPS = 240  # of the undisturbed job; a disturbed one starts anew before this step
MARGIN = 30  # more than a kill takes
ENDLESS = 1_000_000  # steps of a light job, which is always ended from outside


def promised(cluster):
    """The newest step that all ranks have seen replicated, in this job; 0 if there is none."""
    told = cluster.told("replicated")
    return min(told) if told else 0


def newest(cluster):
    """The newest step that all ranks have saved in this job."""
    told = cluster.told("saved")
    return min(told) if told else 0


def check_losses(cluster, calm):
    """Every step has the loss of the undisturbed job, bit for bit."""
    for step, loss in cluster.losses().items():
        assert calm[step] == loss, f"step {step}: loss {loss}, and {calm[step]} in an undisturbed job"


class Campaign:
    def __init__(self, arguments):
        self.kills, self.light, self.seed = arguments.kills, arguments.light, arguments.seed
        self.folder = arguments.folder
        self.last = ENDLESS if self.light else STEPS
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / f"{'light' if self.light else 'training'}-{self.seed}.jsonl"
        self.survived = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def run(self):
        calm = {} if self.light else self.undisturbed()
        while len(self.survived) < self.kills:
            scratch = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
            cluster = Cluster(scratch, HOSTS, LOCAL, "light" if self.light else "trainer")
            try:
                self.run_job(cluster, calm)
            finally:
                cluster.stop()
            shutil.rmtree(scratch)
        by_source = {}
        for kill in self.survived:
            by_source[kill["from"]] = by_source.get(kill["from"], 0) + 1
        print(
            f"{len(self.survived)} kills of hosts survived; resumed from: {by_source}; steps lost: {sorted(kill['lost'] for kill in self.survived)}"
        )

    def undisturbed(self):
        """Losses of a job that nothing disturbs; computed once."""
        known = self.folder / f"calm-{STEPS}.json"
        if not known.exists():
            scratch = Path(tempfile.mkdtemp(prefix="calm-", dir=self.folder))
            cluster = Cluster(scratch, HOSTS, LOCAL)
            try:
                cluster.start(STEPS)
                cluster.join()
                known.write_text(json.dumps(cluster.losses()))
            finally:
                cluster.stop()
            shutil.rmtree(scratch)
        return {int(step): loss for step, loss in json.loads(known.read_text()).items()}

    def run_job(self, cluster, calm):
        tls = cluster.make_certificates()
        addresses = [f"{network.address(host)}:{PORT}" for host in range(HOSTS)]
        (cluster.scratch / "addresses").write_text(json.dumps(addresses))
        cluster.start(self.last, tls=tls)
        cluster.wait_for("resumed")
        done = 0
        while len(self.survived) < self.kills and done < STEPS - MARGIN:
            kill = len(self.survived)
            choice = random.Random(f"{self.seed} {kill}")
            begun = time.monotonic()
            cluster.wait_for_saved(done + choice.randint(1, 6))
            server_is_down = choice.random() < 0.4
            durable = cluster.committed()
            if server_is_down:
                # A fresh host has read the log by then.
                cluster.wait_for_commit(done + 1)
                # Of later commits, only the server and the hosts that have read them know.
                durable = done + 1
                cluster.server.lose()
                cluster.wait_for_saved(newest(cluster) + choice.randint(0, 4))
            # Not at the moment of a save: anywhere in a step.
            time.sleep(choice.random() * 0.5)
            victim = choice.randrange(HOSTS)
            cluster.lose(victim)
            least = max(promised(cluster), durable)
            saved = newest(cluster)
            cluster.end_job()
            check_losses(cluster, calm)
            cluster.replace(victim)
            cluster.start(self.last, tls=tls)
            resumed = cluster.wait_for("resumed")
            steps = {found["step"] for found in resumed}
            assert len(steps) == 1, f"ranks resumed at different steps: {resumed}"
            done = steps.pop()
            assert done >= least, f"step {least} was promised, but the job resumed at {done}"
            if server_is_down:
                cluster.server.start()
            row = {
                "kill": kill, "host": victim, "server_down": server_is_down, "promised": least, "saved": saved, "resumed": done,
                "lost": max(0, saved - done), "from": "+".join(sorted({found["source"] or "-" for found in resumed})),
                "seconds": round(time.monotonic() - begun),
            }  # fmt: skip
            self.survived.append(row)
            with self.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
            print(row, flush=True)
        cluster.end_job()
        check_losses(cluster, calm)
        if cluster.store().snapshots():
            assert cluster.store().verify().is_clean


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".cache/hosts-campaign"))
    arguments = parser.parse_args()
    network.make_switches()
    Campaign(arguments).run()


if __name__ == "__main__":
    main()
