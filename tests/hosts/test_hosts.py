"""Four hosts with two ranks each, and an S3 server on a fifth. Hosts are killed, cables are cut."""

import shutil
import sys
from pathlib import Path

import pytest
from cluster import ROOT, SECONDS, Cluster

HOSTS, LOCAL, STEPS = 4, 2, 10


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Losses of a job that nothing disturbs."""
    cluster = Cluster(tmp_path_factory.mktemp("calm"), HOSTS, LOCAL)
    try:
        cluster.start(STEPS)
        cluster.join()
        losses = cluster.losses()
        check_store(cluster, losses)
        return losses
    finally:
        cluster.stop()


@pytest.fixture
def cluster(tmp_path, calm):
    """Made after the calm job has ended: both use the same addresses."""
    made = Cluster(tmp_path, HOSTS, LOCAL)
    yield made
    made.stop()


def check_store(cluster, losses):
    store = cluster.store()
    assert [info.step for info in store.snapshots()] == list(losses)
    assert store.verify().is_clean
    for info in store.snapshots():
        assert store.snapshot(info.step).user["loss"] == losses[info.step]


def test_a_calm_job(calm):
    assert list(calm) == list(range(1, STEPS + 1))


def test_hosts_that_are_cut_off_for_a_while_lose_nothing(cluster, calm):
    cluster.start(STEPS)
    cluster.wait_for_commit(1)
    # No uploads from hosts 1 and 2, while training goes on.
    cluster.nodes[1].cut("store")
    cluster.nodes[2].cut("store")
    step = max(cluster.losses())
    cluster.wait_for_step(step + 3)
    assert cluster.committed() <= step + 1
    # Training waits for host 3, and goes on.
    cluster.nodes[3].cut("train")
    cluster.nodes[1].join("store")
    cluster.nodes[3].join("train")
    cluster.nodes[2].join("store")
    cluster.join()
    assert cluster.losses() == calm
    check_store(cluster, calm)


def test_another_host_commits_the_step_of_a_leader_that_is_lost(cluster, calm):
    # The entry that opens the session, and two commits pass. All receipts of the next step are in the store then.
    proxy = cluster.hold_request_of(0, b"PUT /tensorcask-test/run/log/", passed=3)
    cluster.start(STEPS, pause={"step": 4, "level": "encoded"})
    assert proxy.held.wait(SECONDS)
    cluster.wait_for("paused", range(LOCAL, HOSTS * LOCAL))
    committed = cluster.committed()
    cluster.lose(0)
    cluster.end_job()
    cluster.wait_for_commit(committed + 1)
    cluster.replace(0)
    cluster.start(STEPS)
    cluster.join()
    assert all(found["step"] > committed for found in cluster.wait_for("resumed"))
    assert {**cluster.losses(0), **cluster.losses()} == calm
    check_store(cluster, calm)


def lose_server_and_host(cluster, tls):
    """A job saves step 6 in the memory of the hosts only, and ends with host 2."""
    cluster.start(STEPS, tls=tls, pause={"step": 6, "level": "replicated"})
    cluster.wait_for_commit(2)
    cluster.server.lose()
    cluster.wait_for("paused")
    cluster.lose(2)
    cluster.end_job()


def test_a_lost_host_is_replaced_and_resumes_from_its_peers_while_the_store_is_down(cluster, calm):
    tls = cluster.make_certificates()
    lose_server_and_host(cluster, tls)
    cluster.replace(2)
    cluster.start(STEPS, tls=tls)
    resumed = cluster.wait_for("resumed")
    assert all(found["step"] == 6 for found in resumed), resumed
    cluster.wait_for_step(8)
    cluster.server.start()
    cluster.join()
    assert {**cluster.losses(0), **cluster.losses()} == calm
    store = cluster.store()
    assert store.verify().is_clean
    assert [info.step for info in store.snapshots()][-4:] == [7, 8, 9, 10]
    assert all(store.snapshot(info.step).user["loss"] == calm[info.step] for info in store.snapshots())


def test_a_copy_with_wrong_bytes_is_never_loaded(cluster, calm):
    tls = cluster.make_certificates()
    lose_server_and_host(cluster, tls)
    # The only copy of host 2 is on host 3.
    assert cluster.nodes[3].enter(sys.executable, ROOT / "tests/hosts/flip.py", "/dev/shm/tensorcask-0/*/replica-2", "6").strip()
    cluster.replace(2)
    cluster.start(STEPS, tls=tls)
    # A rank that finds the damage ends. The next start takes another step.
    with pytest.raises(AssertionError, match="ranks have ended"):
        cluster.wait_for("resumed")
    cluster.end_job()
    cluster.start(STEPS, tls=tls)
    resumed = cluster.wait_for("resumed")
    assert len({found["step"] for found in resumed}) == 1 and resumed[0]["step"] < 6, resumed
    cluster.server.start()
    cluster.join()
    assert {**cluster.losses(0), **cluster.losses()} == calm
    assert cluster.store().verify().is_clean


def test_a_host_with_certificates_of_another_authority_copies_nothing_and_disturbs_nobody(cluster, calm):
    tls = Path(cluster.make_certificates())
    for number in range(HOSTS):
        shutil.copytree(tls, f"{tls}-{number}")
    shutil.rmtree(f"{tls}-1")
    cluster.make_certificates("tls-1")
    cluster.start(STEPS, tls=f"{tls}-{{host}}", pause={"step": STEPS, "level": "durable"})
    cluster.wait_for("paused")
    problems = {number: {copy["host"]: copy["problem"] for copy in cluster.status(number)["replicas"]} for number in range(HOSTS)}
    assert cluster.losses() == calm
    check_store(cluster, calm)
    # Host n is copied by host n + 1.
    assert problems[3][2] is None and problems[0][3] is None, problems
    for holder, host in [(2, 1), (1, 0)]:
        assert "certificate" in problems[holder][host], problems
