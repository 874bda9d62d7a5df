"""Weights that a trainer publishes and inference engines follow."""

import importlib
import logging
import resource
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import tensorcask
import torch
from tensorcask.weights import Change, Publisher, Subscriber


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
    assert policy.update() is None and policy.version is None and policy.id is None
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
    assert policy.update(2) == 2 and same(policy, 2) and policy.id == tensorcask.Store(url).snapshot(2).id
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


def applied(policy, on_device, limit):
    """Applies what changed to another copy of the weights; returns the names of whole and of changed tensors."""
    whole, listed = [], []
    for name, change in policy.changes(limit=limit):
        if isinstance(change, Change):
            assert change.indices.dtype == torch.int64 and (change.indices.diff() > 0).all()
            flat = on_device[name].view(-1)
            if flat.element_size() == 1:
                flat.view(torch.uint8)[change.indices] = change.values.view(torch.uint8)
            else:
                flat[change.indices] = change.values
            listed.append(name)
        else:
            on_device[name].copy_(change)
            whole.append(name)
    return whole, listed


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_changes_alone_bring_another_copy_forward(url):
    generator = torch.Generator().manual_seed(5)
    tied = torch.randn(300, 70, generator=generator).bfloat16()
    weights = {
        "many": torch.randn(900, 400, generator=generator).bfloat16(),
        "few": torch.randn(50, 40, generator=generator),
        "fp8": torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn),
        "same": torch.ones(7),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(1.0),
        "embedding": tied,
        "head": tied,
    }
    publisher = Publisher(url)
    policy = Subscriber(url, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    device = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    assert policy.changes() == []
    publisher.publish(weights, 1)
    assert applied(policy, device, 0.25) == (list(weights), [])
    for version in range(2, 9):
        # A few places everywhere, and a new tensor now and then. Version 4 and 5 are passed over.
        places = torch.randint(0, 900 * 400, (version * 50,), generator=generator)
        weights["many"].view(-1)[places] *= 1.01
        weights["few"].view(-1)[version] = float("nan")
        weights["fp8"].view(-1).view(torch.uint8)[version * 7] ^= 3
        weights["scalar"] += 1
        tied[version, 3] -= 0.5
        if version == 6:
            weights["few"] = torch.zeros(50, 40)
        publisher.publish(weights, version)
        if version in (4, 5):
            continue
        whole, listed = applied(policy, device, 0.25)
        assert "many" in listed and "fp8" in listed and "embedding" in listed and "head" in listed
        assert ("few" in whole) == (version == 6) and "scalar" in whole and "same" not in whole + listed
        assert all(torch.equal(bits(device[name]), bits(weights[name])) for name in weights), version
    assert policy.changes() == [] and policy.version == 8
    # Back to an older version, and with no element listed.
    publisher.publish(weights | {"same": torch.zeros(7)}, 9)
    assert applied(policy, device, 0.0) == (["same"], [])


def test_after_a_failed_update_everything_is_given_whole(tmp_path):
    publisher = Publisher(str(tmp_path / "run"))
    policy = Subscriber(str(tmp_path / "run"), {"w": torch.zeros(400_000)})
    weights = {"w": torch.randn(400_000, generator=torch.Generator().manual_seed(1))}
    publisher.publish(weights, 1)
    assert [name for name, _ in policy.changes()] == ["w"]
    weights["w"][::10] += 1
    publisher.publish(weights, 2)
    cask = max((tmp_path / "run" / "casks").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    whole = cask.read_bytes()
    middle = len(whole) // 2
    cask.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(tensorcask.CorruptionError):
        policy.changes()
    assert policy.version is None
    cask.write_bytes(whole)
    [(name, tensor)] = policy.changes()
    assert name == "w" and torch.equal(tensor, weights["w"]) and policy.version == 2


def test_the_entry_point_for_vllm_does_nothing_without_vllm():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["tensorcask"].partition(":")
    getattr(importlib.import_module(module), function)()
