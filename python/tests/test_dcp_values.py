"""torch.distributed.checkpoint through a store: planners, keys, and values that cannot be stored."""

import dataclasses
import io
import itertools
import re
import threading
import warnings

import pytest
import tensorcask
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from tensorcask.torch import Writer
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

EITHER = (True, False)


def save(state, store, *, step=1, flatten=(True, True), **options):
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten[0], flatten_sharded_tensors=flatten[1])
    dcp.save(state, storage_writer=store.writer(step=step, **options), planner=planner)


def load(state, store, *, step=1, flatten=(True, True), **options):
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=flatten[0], flatten_sharded_tensors=flatten[1])
    dcp.load(state, storage_reader=store.reader(step=step, **options), planner=planner)
    return state


def everything(store):
    """Returns the state as PyTorch rebuilds it without a template."""
    state = {}
    _load_state_dict(state, storage_reader=store.reader(), planner=_EmptyStateDictLoadPlanner(), no_dist=not dist.is_initialized())
    return state


def state_of(value):
    return {
        "model": {"w": torch.full((3, 2), value), "blocks": [torch.full((2,), value), {"b": torch.full((1,), value)}]},
        "list": [torch.full((1,), value), int(value)],
        "plain": {"a": {"lr": value}, "text": str(value)},
        "pair": (torch.full((1,), value), value),
        "w": torch.full((4,), value),
        "step": int(value),
        "file": io.BytesIO(str(value).encode()),
    }


def check(state, value):
    wanted = state_of(value)
    assert torch.equal(state["model"]["w"], wanted["model"]["w"]) and torch.equal(state["w"], wanted["w"])
    assert torch.equal(state["model"]["blocks"][0], wanted["model"]["blocks"][0])
    assert torch.equal(state["model"]["blocks"][1]["b"], wanted["model"]["blocks"][1]["b"])
    assert torch.equal(state["list"][0], wanted["list"][0]) and state["list"][1] == wanted["list"][1]
    assert state["plain"] == wanted["plain"] and state["step"] == wanted["step"]
    assert torch.equal(state["pair"][0], wanted["pair"][0]) and state["pair"][1] == value
    assert state["file"].getvalue() == wanted["file"].getvalue()


def through_every_planner(url):
    pairs = list(itertools.product(EITHER, EITHER))
    for step, saved in enumerate(pairs, 1):
        store = tensorcask.Store(url)
        save(state_of(float(step)), store, step=step, flatten=saved)
        for loaded in pairs:
            group = dist.group.WORLD if dist.is_initialized() and loaded[0] else None
            check(load(state_of(0.0), store, step=step, flatten=loaded, process_group=group), float(step))
        check(everything(store), float(step))
        check(store.load(step), float(step))


def test_what_any_planner_saved_any_planner_loads(tmp_path, url):
    through_every_planner(url)
    on_ranks(2, tmp_path, through_every_planner, tmp_path / "of-ranks")


def sharded_in_a_value(url):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"model": {"w": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)}, "own": torch.ones(2)}
    store = tensorcask.Store(url)
    for flatten, changed in (((False, False), state), ((False, True), state), ((True, True), {"pair": (1, state["model"]["w"])})):
        with pytest.raises(BaseException, match="a DTensor inside a value.*flatten_state_dict=True") as failed:
            save(changed, store, flatten=flatten)
        assert set(failed.value.failures) == set(range(dist.get_world_size()))
    dist.barrier()


def test_sharded_tensors_inside_values_are_refused_before_anything_is_uploaded(tmp_path, url):
    on_ranks(2, tmp_path, sharded_in_a_value, url)
    store = tensorcask.Store(url)
    assert store.snapshots() == []
    assert not list((tmp_path / "store" / "casks").glob("*"))


def test_sharded_tensors_are_not_replaced_by_plain_ones(tmp_path, url):
    tensorcask.save({"model": {"w": torch.ones(4, 2)}}, url, step=1)
    on_ranks(1, tmp_path, load_over_sharded, url)


def load_over_sharded(url):
    mesh = init_device_mesh("cpu", (1,))
    state = {"model": {"w": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)], src_data_rank=None)}}
    with pytest.raises(BaseException, match=re.escape("state['model']['w']: a DTensor inside a value")):
        load(state, tensorcask.Store(url), flatten=(False, False))
    load(state, tensorcask.Store(url))
    assert (state["model"]["w"].full_tensor() == 1).all()


def keyed(value):
    return {"opt": {7: torch.full((2,), value), 8: {9: value, 10: torch.full((1,), value)}, "11": value}, "steps": {1: value}}


@pytest.mark.parametrize("flatten", EITHER)
def test_integer_keys_come_back_as_they_are(memory, tmp_path, flatten):
    store = tensorcask.Store(memory)
    save(keyed(1.0), store, flatten=(flatten, flatten))
    loaded = load(keyed(0.0), store, flatten=(flatten, flatten))
    assert loaded.keys() == keyed(0.0).keys() and loaded["opt"].keys() == {7, 8, "11"}
    assert (loaded["opt"][7] == 1).all() and loaded["opt"][8][9] == 1.0 and loaded["opt"][8].keys() == {9, 10}
    assert (loaded["opt"][8][10] == 1).all() and loaded["opt"]["11"] == 1.0 and loaded["steps"] == {1: 1.0}
    # Without a template: the keys that PyTorch's own files give for the same save.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(keyed(1.0), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), planner=dcp.DefaultSavePlanner(flatten_state_dict=True), no_dist=True)
    theirs = {}
    _load_state_dict(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "theirs"), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    ours = everything(store)
    assert ours["opt"].keys() == theirs["opt"].keys() == {"7", "8", "11"} and ours["opt"]["8"].keys() == theirs["opt"]["8"].keys()
    assert ours["steps"] == theirs["steps"] == {"1": 1.0}


def test_integer_keys_at_the_top(memory):
    store = tensorcask.Store(memory)
    for step, flatten in enumerate(EITHER, 1):
        save({7: torch.ones(2), 8: {"x": 1}}, store, step=step, flatten=(flatten, flatten))
        loaded = load({7: torch.zeros(2), 8: {"x": 0}}, store, step=step, flatten=(flatten, flatten))
        assert loaded.keys() == {7, 8} and (loaded[7] == 1).all() and loaded[8] == {"x": 1}


def test_metadata_is_what_pytorch_sets(memory, tmp_path):
    store = tensorcask.Store(memory)
    dcp.save({"w": torch.ones(2)}, checkpoint_id="step-1", storage_writer=store.writer())
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    reader = store.reader()
    reader.reset("step-1")
    ours, theirs = reader.read_metadata(), dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert ours.version == theirs.version and ours.version is not None
    assert ours.storage_meta.checkpoint_id == "step-1"
    assert ours.planner_data == theirs.planner_data and ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()


def test_states_that_dcp_cannot_describe_are_refused(memory):
    store = tensorcask.Store(memory)
    store.save([torch.ones(1)], step=1)
    with pytest.raises(BaseException, match="step 1 is a list, and DCP loads mappings. Use tensorcask.load"):
        load({"w": torch.ones(1)}, store)
    store.save({"a": {7: 1, "7": 2}, "w": torch.ones(1)}, step=2)
    with pytest.raises(BaseException, match="step 2: DCP cannot tell two keys apart: .*a.7"):
        load({"w": torch.ones(1)}, store, step=2)


def shapes(depth):
    """Values of every form, nested so deep."""
    yield from (lambda: torch.arange(2.0), dict, list, tuple, lambda: 5, lambda: None)
    if depth:
        for inner in list(shapes(depth - 1)):
            yield from (lambda inner=inner: {"k": inner()}, lambda inner=inner: [inner()], lambda inner=inner: (inner(), 1))
            yield from (lambda inner=inner: [{}, inner()], lambda inner=inner: [inner(), {}], lambda inner=inner: {7: inner(), "e": {}})


def with_text_keys(value):
    """A state as DCP names its parts."""
    if isinstance(value, dict):
        return {str(key): with_text_keys(item) for key, item in value.items()}
    return [with_text_keys(item) for item in value] if isinstance(value, list) else value


def test_every_form_of_a_state_that_is_saved_can_be_loaded(memory):
    """PyTorch's planner leaves out empty mappings, so a list of them had gaps."""
    store = tensorcask.Store(memory)
    made = list(shapes(2))
    for step, make in enumerate(made):
        state = {"w": torch.ones(2), "x": make()}
        dcp.save(state, storage_writer=store.writer(step=step, policy="full"), no_dist=True)
        assert repr(store.load(step)) == repr(with_text_keys(state)), state
        weights = {"w": torch.zeros(2)}
        dcp.load(weights, storage_reader=store.reader(step=step), no_dist=True)
        assert torch.equal(weights["w"], state["w"])
    assert len(made) > 200


def test_an_element_that_a_planner_leaves_out_is_none(memory):
    class Without(dcp.DefaultSavePlanner):
        def __init__(self, *names):
            super().__init__()
            self.names = names

        def create_local_plan(self):
            plan = super().create_local_plan()
            return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn not in self.names])

    store = tensorcask.Store(memory)
    state = {"list": [torch.ones(1), torch.full((1,), 2.0)], "w": torch.ones(1)}
    dcp.save(state, storage_writer=store.writer(step=1), planner=Without("list.0"), no_dist=True)
    assert store.load(1) == {"list": [None, torch.full((1,), 2.0)], "w": torch.ones(1)}
    # An element that is a mapping, and a list of which nothing is saved.
    state = {"list": [{"deep": torch.ones(1)}, torch.ones(1)], "gone": [torch.ones(1), {"deep": 1}], "w": torch.ones(1)}
    dcp.save(state, storage_writer=store.writer(step=3), planner=Without("list.0.deep", "gone.0", "gone.1.deep"), no_dist=True)
    assert store.load(3) == {"list": [None, torch.ones(1)], "w": torch.ones(1)}
    # Nothing is committed that cannot be loaded.
    state = {"list": [torch.ones(1), torch.full((1,), 2.0)], "w": torch.ones(1)}
    with pytest.raises(BaseException, match=r"state\['list'\]: no rank has some elements of this list"):
        dcp.save(state, storage_writer=Forgetful(store, step=2), planner=Without("list.0"), no_dist=True)
    assert [info.step for info in store.snapshots()] == [1, 3]


class Forgetful(Writer):
    """Of a version of PyTorch whose calls look different."""

    def prepare_global_plan(self, plans):
        found = super().prepare_global_plan(plans)
        self._left_out = []
        return found


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


UNSTORABLE = {
    "fake": (fake, "a fake tensor has no data"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor cannot be stored"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a nested tensor cannot be stored"),
    "lazy": (torch.nn.UninitializedParameter, "a lazy parameter has no shape yet"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "a tensor inside a function transform"),
    "meta": (lambda: torch.empty(3, device="meta"), "a meta tensor has no data"),
    "sparse": (lambda: torch.ones(3).to_sparse(), "layout torch.sparse_coo"),
}
UNPLANNABLE = ("nested", "jagged", "lazy")


def cause(failed):
    """Returns the error of the first rank that failed."""
    return next(iter(getattr(failed.value, "failures", {0: (failed.value, None)}).values()))[0]


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_tensors_that_cannot_be_stored_are_named(kind, memory, url, tmp_path):
    make, says = UNSTORABLE[kind]
    for bad, path in ((make(), "['bad']"), ((1, make()), "['bad'][1]")):
        state = {"w": torch.ones(2), "outer": [0, {"bad": bad}]}
        for saving in (
            lambda state: dcp.save(state, checkpoint_id="1", storage_writer=tensorcask.Store(url).writer()),
            lambda state: save(state, tensorcask.Store(url), flatten=(False, False)),
            lambda state: dcp.async_save(state, checkpoint_id="1", storage_writer=tensorcask.Store(url).writer()).result(),
        ):
            with pytest.raises(BaseException, match=".") as failed:
                saving(state)
            error = cause(failed)
            assert isinstance(error, TypeError) and str(error).startswith(f"state['outer'][1]{path}: ") and says in str(error), error
    assert not list((tmp_path / "store").glob("casks/*"))


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_tensors_that_cannot_be_stored_are_left_out_or_replaced(kind, memory):
    store = tensorcask.Store(memory)
    make, says = UNSTORABLE[kind]
    state = {"w": torch.ones(2), "outer": {"bad": make(), "list": [make(), torch.ones(1)], "pair": (make(), 5)}}
    asked = []

    def instead(path, value):
        asked.append(path)
        return torch.full((2,), 4.0)

    for step, how in enumerate(("skip", instead), 1):
        if kind in UNPLANNABLE:
            with pytest.raises(BaseException, match=f"{says}.*dcp.async_save can"):
                dcp.save(state, checkpoint_id=str(step), storage_writer=store.writer(on_unsupported=how))
        else:
            dcp.save(state, checkpoint_id=str(step), storage_writer=store.writer(on_unsupported=how))
        dcp.async_save(state, checkpoint_id=str(step), storage_writer=store.writer(on_unsupported=how, overwrite=True)).result()
    skipped, replaced = store.load(1), store.load(2)
    assert skipped["outer"].keys() == {"list", "pair"} and skipped["outer"]["pair"] == (None, 5)
    assert skipped["outer"]["list"] == [None, torch.ones(1)] and (skipped["w"] == 1).all()
    assert (replaced["outer"]["bad"] == 4).all() and (replaced["outer"]["list"][0] == 4).all() and (replaced["outer"]["pair"][0] == 4).all()
    assert set(asked) == {"state['outer']['bad']", "state['outer']['list'][0]", "state['outer']['pair'][0]"}


def test_values_that_cannot_be_stored_are_left_out_or_replaced(memory):
    store = tensorcask.Store(memory)
    state = {"w": torch.ones(2), "bad": {1, 2}, "lock": threading.Lock(), "list": [{3}, torch.ones(1)]}
    for step, saving in enumerate((dcp.save, lambda *args, **options: dcp.async_save(*args, **options).result()), 1):
        with pytest.raises(BaseException, match=r"state\['(bad|lock)'\]: .*(set|lock) cannot be"):
            saving(state, storage_writer=store.writer(step=step))
        saving(state, storage_writer=store.writer(step=step, on_unsupported="skip"))
        loaded = store.load(step)
        assert loaded.keys() == {"w", "list"} and loaded["list"] == [None, torch.ones(1)]
        saving(state, storage_writer=store.writer(step=step + 10, on_unsupported=lambda path, value: path))
        assert store.load(step + 10)["bad"] == "state['bad']" and store.load(step + 10)["list"][0] == "state['list'][0]"
    with pytest.raises(BaseException, match="on_unsupported returned"):
        dcp.save(state, storage_writer=store.writer(step=5, on_unsupported=lambda path, value: {1}))
    with pytest.raises(ValueError, match="on_unsupported='ignore'"):
        store.writer(on_unsupported="ignore")


def skipped_on_ranks(url):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)], src_data_rank=None)
    state = {"w": whole, "bad": {1}, "sparse": torch.ones(3).to_sparse(), f"of-{dist.get_rank()}": {2}}
    store = tensorcask.Store(url)
    dcp.save(state, checkpoint_id="1", storage_writer=store.writer(on_unsupported="skip"))
    group = dist.new_group(backend="gloo")
    dcp.async_save(state, checkpoint_id="2", storage_writer=store.writer(on_unsupported="skip"), process_group=group).result()


def test_values_are_left_out_on_every_rank(tmp_path, url):
    on_ranks(2, tmp_path, skipped_on_ranks, url)
    for step in (1, 2):
        loaded = tensorcask.load(url, step)
        assert loaded.keys() == {"w"} and torch.equal(loaded["w"], torch.arange(8.0).reshape(4, 2))


def replaced_on_ranks(url):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(value):
        return {"w": distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)], src_data_rank=None), "step": value}

    store = tensorcask.Store(url)
    group = dist.new_group(backend="gloo")

    def in_the_background(*args, **options):
        dcp.async_save(*args, **options, process_group=group).result()

    for step, saving in ((1, dcp.save), (2, in_the_background)):
        saving(state(1.0), storage_writer=store.writer(step=step))
        before = store.snapshot(step).id
        with pytest.raises(BaseException, match=f"step {step} is saved already.*overwrite=True") as failed:
            saving(state(2.0), storage_writer=store.writer(step=step))
        assert isinstance(cause(failed), tensorcask.ConflictError)
        assert store.snapshot(step).id == before
        dist.barrier()
        saving(state(3.0), storage_writer=store.writer(step=step, overwrite=True))
        out = load(state(0.0), store, step=step)
        assert (out["w"].full_tensor() == 3).all() and out["step"] == 3


def test_a_step_is_replaced_only_when_asked_on_every_rank(tmp_path, url):
    for world in (1, 2):
        on_ranks(world, tmp_path, replaced_on_ranks, f"{url}-{world}")
        assert [info.step for info in tensorcask.Store(f"{url}-{world}").snapshots()] == [1, 2]
        assert tensorcask.Store(f"{url}-{world}").verify().is_clean


def test_a_cached_plan_makes_a_base(memory):
    """The plan of an unchanged state comes from PyTorch's cache, with the parent of an earlier save."""

    class CachedPlanner(dcp.DefaultSavePlanner):
        pass

    store = tensorcask.Store(memory)
    for step in range(1, 5):
        planner = CachedPlanner(enable_plan_caching=True)
        dcp.save({"w": torch.full((50_000,), float(step))}, checkpoint_id=str(step), storage_writer=store.writer(policy="consecutive"), planner=planner)
    assert [info.kind for info in store.snapshots()] == ["base"] * 4
    assert all((store.load(step)["w"] == step).all() for step in range(1, 5)) and store.verify().is_clean
