"""Shows the loss of a host while the store is away: run it with `bash examples/hosts_demo`."""

import tempfile
import time
from pathlib import Path

import network
from cluster import Cluster

HOSTS, LOCAL, STEPS = 3, 2, 12


def say(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def main():
    network.make_switches()
    with tempfile.TemporaryDirectory(prefix="hosts-demo-") as scratch:
        say(f"{HOSTS} hosts with {LOCAL} ranks each, and an S3 server; each host is a set of Linux namespaces")
        cluster = Cluster(Path(scratch), HOSTS, LOCAL)
        try:
            show(cluster)
        finally:
            cluster.stop()


def show(cluster):
    tls = cluster.make_certificates()
    cluster.start(STEPS, tls=tls, pause={"step": 6, "level": "replicated"})
    cluster.wait_for_commit(2)
    say(f"training with FSDP2; a save after each step; step {cluster.committed()} is in the store")
    cluster.server.lose()
    say("the S3 server is killed; training goes on")
    cluster.wait_for("paused")
    say("step 6 is saved, and copied by peers")
    cluster.lose(1)
    cluster.end_job()
    say("host 1 is lost: its ranks, its agent and its memory. The launcher ends the job")
    begun = time.monotonic()
    cluster.replace(1)
    cluster.start(STEPS, tls=tls)
    resumed = cluster.wait_for("resumed")
    seconds = time.monotonic() - begun
    sources = sorted({found["source"] for found in resumed})
    say(f"a fresh host takes its place; all ranks resume from step {resumed[0]['step']} out of {sources}, after {seconds:.0f} s")
    assert {found["step"] for found in resumed} == {6} and sources == ["hosts"]
    cluster.wait_for_step(9)
    cluster.server.start()
    say("the S3 server is back")
    cluster.join()
    store = cluster.store()
    assert store.verify().is_clean
    say(f"the job has ended; the store has steps {[info.step for info in store.snapshots()]}, and is clean")


if __name__ == "__main__":
    main()
