"""Weights that a trainer publishes and inference engines follow."""

import logging
import resource
import shutil
import sys
from pathlib import Path

import pytest
import tensorcask
import torch
from tensorcask.weights import Publisher, Subscriber


def weights_of(version):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(64, 32, generator=generator).bfloat16()
    w[version % 64] += version
    return {"model": {"w": w, "b": torch.full((8,), float(version))}}


def like():
    return {"model": {"w": torch.zeros(64, 32, dtype=torch.bfloat16), "b": torch.zeros(8)}}


def same(policy, version):
    wanted = weights_of(version)["model"]
    found = dict(policy.named_tensors())
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_subscriber_follows_and_reads_differences(url):
    policy = Subscriber(url, like(), prefix="model.")
    assert policy.update() is None and policy.version is None
    with pytest.raises(ValueError, match="no version is held"):
        next(policy.named_tensors())
    publisher = Publisher(url)
    for version in (1, 2, 3):
        publisher.publish(weights_of(version), version, step_of_trainer=10 * version)
    assert policy.update() == 3 and same(policy, 3) and policy.update() is None
    publisher.publish(weights_of(4), 4)
    assert list(policy.watch(timeout=0.0)) == []
    seen = []
    for version in policy.watch(timeout=0.2, interval=0.01):
        seen.append(version)
        assert same(policy, version)
        if version < 6:
            publisher.publish(weights_of(version + 1), version + 1)
    assert seen == [4, 5, 6]
    # An inference engine that is set back, and one that starts late.
    assert policy.update(2) == 2 and same(policy, 2)
    assert [info.kind for info in tensorcask.Store(url).snapshots()][1:] == ["delta"] * 5
    assert tensorcask.Store(url).snapshot(3).user["step_of_trainer"] == 30
    # The tensors are those of the caller.
    state = like()
    other = Subscriber(url, state)
    assert other.update() == 6 and torch.equal(state["model"]["w"], weights_of(6)["model"]["w"])


def test_a_version_that_was_replaced_or_forgotten_is_read_whole(url):
    Publisher(url, policy="full").publish(weights_of(1), 1)
    policy = Subscriber(url, like(), prefix="model.")
    assert policy.update() == 1
    Publisher(url, policy="full", overwrite=True).publish(weights_of(7), 1)
    assert policy.update() == 1 and same(policy, 7)
    Publisher(url, policy="full").publish(weights_of(2), 2)
    tensorcask.Store(url).forget([1])
    assert policy.update() == 2 and same(policy, 2)


def test_after_a_failed_update_no_version_is_held(url):
    Publisher(url).publish(weights_of(1), 1)
    policy = Subscriber(url, {"model": {"w": torch.zeros(3), "b": torch.zeros(8)}})
    with pytest.raises(ValueError, match="model.w"):
        policy.update()
    assert policy.version is None
    shutil.rmtree(url)
    with pytest.raises(tensorcask.NotFoundError):
        policy.update(1)


class Repair(logging.Handler):
    """Repairs the store once it is reported."""

    def __init__(self, repair):
        super().__init__(logging.WARNING)
        self.repair, self.told = repair, []

    def emit(self, record):
        self.told.append(record.getMessage())
        self.repair()


@pytest.fixture
def repaired():
    """Calls a function at the first warning."""
    handlers = []

    def begin(repair):
        handlers.append(Repair(repair))
        logging.getLogger("tensorcask").addHandler(handlers[-1])
        return handlers[-1].told

    yield begin
    for handler in handlers:
        logging.getLogger("tensorcask").removeHandler(handler)


def large(version):
    """Weights that are too large for a place in the manifest."""
    return {"w": torch.randn(100_000, generator=torch.Generator().manual_seed(version))}


def test_a_watch_goes_on_after_an_error_of_the_storage(url, repaired):
    publisher, policy_state = Publisher(url, policy="full"), large(0)
    policy = Subscriber(url, policy_state)
    publisher.publish(large(1), 1)
    versions = policy.watch(interval=0.01)
    assert next(versions) == 1
    publisher.publish(large(2), 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = repaired(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    try:
        # No file can be opened: the storage fails.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        assert next(versions) == 2 and torch.equal(policy_state["w"], large(2)["w"])
        assert len(told) == 1 and "looking again every 0.01 s" in told[0]
        # An error that stays is raised in the end.
        publisher.publish(large(3), 3)
        logging.getLogger("tensorcask").handlers[-1].repair = lambda: None
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(tensorcask.StorageError):
            list(policy.watch(timeout=0.05, interval=0.01))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_watch_passes_over_a_damaged_version(url, repaired):
    publisher, policy_state = Publisher(url, policy="full"), large(0)
    publisher.publish(large(1), 1)
    policy = Subscriber(url, policy_state)
    known = set(Path(url, "casks").iterdir())
    publisher.publish(large(2), 2)
    for cask in set(Path(url, "casks").iterdir()) - known:
        damaged = bytearray(cask.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        cask.chmod(0o600)
        cask.write_bytes(damaged)
    told = repaired(lambda: publisher.publish(large(3), 3))
    assert next(policy.watch(interval=0.01)) == 3 and torch.equal(policy_state["w"], large(3)["w"])
    assert len(told) == 1 and "version 2 of" in told[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")
def test_weights_go_through_an_engine(url, host_memory):
    with tensorcask.Engine(url, policy="consecutive") as engine:
        publisher = Publisher(engine)
        for version in (1, 2):
            publisher.publish(weights_of(version), version)
        with pytest.raises(TypeError, match="pass options of saves"):
            Publisher(engine, policy="full")
        engine.finish()
    policy = Subscriber(url, like(), prefix="model.")
    assert policy.update() == 2 and same(policy, 2)
