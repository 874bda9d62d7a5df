"""Tensors that are rounded on purpose: their errors, the reports of errors, and refused settings."""

import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed.checkpoint as dcp


def training_state(seed=0):
    """A bf16 model, f32 masters and Adam moments, as a trainer has them."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(300, 200, generator=generator) * 0.02
    first = torch.randn(300, 200, generator=generator) * 1e-4
    first[0, :5] = 0
    second = first.abs() ** 2 + 1e-12
    return {
        "model": {"w": master.bfloat16()},
        "master": {"w": master},
        "optimizer": {"w": {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(7.0)}},
    }


def flat(state):
    return {"model": state["model"]["w"], "master": state["master"]["w"], **state["optimizer"]["w"]}


def measured(before, after):
    """Elements with a relative error, the greatest and mean relative error, the mean squared error, sign flips; by numpy."""
    x, y = before.numpy().astype(np.float64), after.numpy().astype(np.float64)
    counts = x != 0
    relative = np.abs(y - x)[counts] / np.abs(x)[counts]
    return [int(counts.sum()), relative.max(), relative.mean(), ((y - x) ** 2).mean(), int((x * y < 0).sum())]


def told(errors):
    return [errors.elements, errors.max_relative, errors.mean_relative, errors.mean_squared, errors.sign_flips]


def test_near_comes_back_within_its_bounds(url):
    state = training_state()
    exact = tensorcask.save(state, url, step=1, policy="full")
    saved = tensorcask.save(state, url, step=2, policy="full", precision="near")
    assert exact.rounding is None and saved.stored_bytes < 0.8 * exact.stored_bytes
    before, after = flat(state), flat(tensorcask.load(url))
    assert after["model"].equal(before["model"]) and after["step"].equal(before["step"])
    for name, most in (("master", 3e-5), ("exp_avg", 0.022), ("exp_avg_sq", 0.022)):
        assert not after[name].equal(before[name])
        # The bound holds on average: masters next to a power of two lose more.
        assert measured(before[name], after[name])[2] <= most
    assert measured(before["exp_avg"], after["exp_avg"])[1] <= 0.022
    assert after["exp_avg"][0, :5].equal(torch.zeros(5))


def test_the_receipt_is_what_numpy_finds(url):
    state = training_state()
    saved = tensorcask.save(state, url, step=1, precision=["compact", "exp_avg=blockwise8"])
    errors = {errors.role: errors for errors in tensorcask.Store(url).snapshot().rounding()}
    before, after = flat(state), flat(tensorcask.load(url))
    assert {role: found.setting for role, found in errors.items()} == {
        "master": "remainder:4",
        "exp_avg": "blockwise8",
        "exp_avg_sq": "loguniform:8",
    }
    for role, found in errors.items():
        assert told(found) == pytest.approx(measured(before[role], after[role]), rel=1e-9)
    assert {role for role, found in errors.items() if found.update_error is not None} == {"exp_avg_sq"}
    updates = [
        (moments["exp_avg"].double() / (moments["exp_avg_sq"].double().sqrt() + 1e-8)).numpy() for moments in (before, after)
    ]
    update_error = np.sqrt(((updates[1] - updates[0]) ** 2).sum() / (updates[0] ** 2).sum())
    assert errors["exp_avg_sq"].update_error == pytest.approx(update_error, rel=1e-9)
    # Values for the whole save are sums of these.
    assert saved.rounding.elements == sum(found.elements for found in errors.values())
    assert saved.rounding.max_relative == max(found.max_relative for found in errors.values())


def test_errors_do_not_grow_along_a_chain(url):
    state = training_state()
    store = tensorcask.Store(url)
    for step in range(4):
        state["optimizer"]["w"]["exp_avg"] *= 0.9
        assert store.save(state, step=step, policy="consecutive", precision="near").kind == ("delta" if step else "base")
    before, after = flat(state), flat(store.load())
    found = {errors.role: errors for errors in store.snapshot().rounding()}
    assert told(found["exp_avg"]) == pytest.approx(measured(before["exp_avg"], after["exp_avg"]), rel=1e-9)
    assert found["exp_avg"].max_relative < 0.022


def test_a_bound_is_kept_and_a_later_rule_counts(url):
    state = training_state()
    rules = ["exp_avg=loguniform:1<=0.1", "*exp_avg_sq=lossless"]
    tensorcask.save(state, url, step=1, precision=rules)
    (errors,) = tensorcask.Store(url).snapshot().rounding()
    assert errors.role == "exp_avg" and errors.max_relative <= 0.1


def test_a_snapshot_beyond_max_error_is_refused(url):
    tensorcask.save(training_state(), url, step=1)
    assert tensorcask.Store(url).snapshot().rounding() == []
    tensorcask.load(url, max_error=0)
    tensorcask.save(training_state(), url, step=2, precision="exp_avg=loguniform:16")
    tensorcask.load(url, max_error=0.03)
    for how in ({}, {"step": 2}, {"strict": True}, {"tensors": "model.*"}):
        with pytest.raises(tensorcask.InvalidArgumentError, match="loguniform:16.*above the bound") as refused:
            tensorcask.load(url, max_error=0.01, **how)
        assert refused.value.tensor == "optimizer.w.exp_avg"
    tensorcask.load(url, 1, max_error=0.01)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="relative error"):
            tensorcask.load(url, max_error=wrong)


@pytest.mark.parametrize("wrong", ["nearly", "master", "master=remainder:17", "exp_avg=loguniform:3", "exp_avg=blockwise8<=x", "near compact", "[=near"])
def test_wrong_words_are_refused(memory, wrong):
    for words in (wrong, ["near", wrong]):
        with pytest.raises(tensorcask.InvalidArgumentError):
            tensorcask.save(training_state(), memory, step=1, precision=words)
    with pytest.raises(TypeError):
        tensorcask.save(training_state(), memory, step=1, precision=[16])
    with pytest.raises(tensorcask.NotFoundError):
        tensorcask.load(memory)


def walk(state, distance, seed):
    """Moves each weight by at most the distance."""
    generator = torch.Generator().manual_seed(seed)
    for masters in state["master"].values():
        masters += (torch.rand(masters.shape, generator=generator) * 2 - 1) * distance
    state["model"] = {name: masters.bfloat16() for name, masters in state["master"].items()}


STABLE = ["lossless", "lossless", "lossless", "near", "near", "near", "compact", "compact"]


def test_auto_follows_the_training_and_tells_why(url):
    state = training_state()
    saves = []
    for step in range(1, 10):
        walk(state, 1e-3 if step < 9 else 4e-3, seed=step)
        # Each save reads the decision of the save before from the store.
        saves.append(tensorcask.save(state, url, step=step, precision="auto"))
    assert [saved.precision for saved in saves] == [*STABLE, "near"]
    assert [saved.precision_reason for saved in saves] == ["first", *["waiting"] * 5, "stable", "stable", "rising"]
    told = tensorcask.Store(url).snapshot(8).user["tc.precision"]
    assert (told["profile"], told["reason"], told["measured"]["since_step"]) == ("compact", "stable", 7)
    assert told["measured"]["compact"]["weights"] < 0.125 and told["measured"]["compact"]["update"] < 0.05
    assert {errors.setting for errors in tensorcask.Store(url).snapshot(8).rounding()} == {"remainder:4", "loguniform:8"}
    # Before a release.
    release = tensorcask.save(state, url, step=10, precision="lossless")
    assert release.precision is None and release.precision_reason is None and release.rounding is None
    assert flat(tensorcask.load(url))["master"].equal(flat(state)["master"])


def test_auto_is_used_by_dcp_in_one_process(url):
    state = training_state()
    store = tensorcask.Store(url)
    writer = store.writer(precision="auto")
    chosen = []
    for step in range(1, 9):
        walk(state, 1e-3, seed=step)
        dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True).result()
        chosen.append(writer.saved.precision)
    assert chosen == STABLE
    with pytest.raises(tensorcask.UnsupportedError, match="use lossless, near or compact"):
        tensorcask.Engine(url, rank=0, world=2, precision="auto")


def test_dcp_saves_rounded(url):
    state = training_state()
    store = tensorcask.Store(url)
    writer = store.writer(precision=["near", "exp_avg_sq=loguniform:32"])
    dcp.save(state, checkpoint_id="step-3", storage_writer=writer, no_dist=True)
    assert {errors.setting for errors in store.snapshot(3).rounding()} == {"remainder:8", "loguniform:16", "loguniform:32"}
    loaded = training_state(seed=1)
    dcp.load(loaded, checkpoint_id="step-3", storage_reader=store.reader(), no_dist=True)
    before, after = flat(state), flat(loaded)
    for errors in store.snapshot(3).rounding():
        assert told(errors) == pytest.approx(measured(before[errors.role], after[errors.role]), rel=1e-9)
    assert after["model"].equal(before["model"])


def test_dcp_saves_rounded_in_the_background(url):
    state = training_state()
    store = tensorcask.Store(url)
    writer = store.writer(precision="compact")
    for step in (1, 2):
        dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True).result()
        assert {errors.role for errors in store.snapshot(step).rounding()} == {"master", "exp_avg", "exp_avg_sq"}


def test_search_finds_what_is_accepted():
    moments = flat(training_state())["exp_avg"]
    seen = []

    def accepts(setting, errors):
        seen.append((setting, errors.elements))
        return errors.max_relative <= 0.03

    found = tensorcask.search_precision(moments, evaluate=accepts)
    assert found.setting == seen[-1][0] and found.rounding.max_relative <= 0.03
    assert 0 < found.stored_bytes < 0.5 * moments.numel() * 4
    assert {elements for _, elements in seen} == {moments.count_nonzero().item()}
    # Used as a rule, the setting gives the result of the search.
    url = "memory://search"
    tensorcask.save({"exp_avg": {"w": moments}}, url, step=1, precision=f"exp_avg={found.setting}")
    (errors,) = tensorcask.Store(url).snapshot().rounding()
    assert errors.max_relative == found.rounding.max_relative
    assert tensorcask.search_precision(moments.numpy(), lambda *_: False).setting == "lossless"


def test_what_the_callback_raises_ends_the_search():
    calls = []

    def fails(setting, errors):
        calls.append(setting)
        raise ZeroDivisionError("of ours")

    with pytest.raises(ZeroDivisionError, match="of ours"):
        tensorcask.search_precision(torch.ones(10), fails)
    assert len(calls) == 1
    for tensor, evaluate in ((torch.ones(10), 3), (torch.ones(10).half(), fails)):
        with pytest.raises(ValueError):
            tensorcask.search_precision(tensor, evaluate)


def test_weights_choose_between_the_settings_of_a_rule(url):
    for step, (objective, setting) in enumerate((("1,0,0", "loguniform:8"), ("0,0,1", "cluster:16:sample:linear"))):
        tensorcask.save(training_state(), url, step=step, policy="full", objective=objective, precision="exp_avg_sq=loguniform:8|cluster")
        assert [errors.setting for errors in tensorcask.Store(url).snapshot(step).rounding()] == [setting]


def sensitive_state():
    """Weights of which those between 0 and 0.5 have large gradients, in no order."""
    weights = (torch.arange(20000) * 7919 % 20000 / 20000 - 0.5) * 2
    gradients = torch.where((weights >= 0) & (weights < 0.5), 1.0, 1e-3)
    return {"model": {"fc.weight": weights.reshape(100, 200)}}, gradients.reshape(100, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_place_levels(memory, dtype):
    state, gradients = sensitive_state()
    weights = state["model"]["fc.weight"]
    counts = gradients == 1.0

    def error(precision, given):
        store = tensorcask.Store(memory)
        store.save(state, step=1, policy="full", overwrite=True, precision=precision, gradients=given)
        loaded = store.load()
        assert loaded.keys() == {"model"}
        return (loaded["model"]["fc.weight"] - weights)[counts].square().mean().item()

    named = {"fc.weight": gradients.to(dtype), "frozen": None}
    sensitive = error("model=kmeans:16:protected=0:sensitive", named)
    assert sensitive < error("model=kmeans:16:protected=0:absolute", named) / 4
    assert sensitive == error("model=kmeans:16:protected=0:sensitive", {"model.fc.weight": gradients.to(dtype)})


def test_gradients_belong_to_the_state(memory):
    state, gradients = sensitive_state()
    store = tensorcask.Store(memory)
    for given, error, message in [
        ({"fc.bias": gradients}, tensorcask.NotFoundError, "fc.bias.*no tensor and no parameter"),
        ({"fc.weight": gradients.T}, tensorcask.InvalidArgumentError, "shape.*200, 100"),
        ({"fc.weight": gradients.double()}, tensorcask.InvalidArgumentError, "f64"),
        ([gradients], TypeError, "gradients: list; use a dict"),
        ({"fc.weight": 3}, tensorcask.UnstorableTypeError, "int is not a tensor"),
    ]:
        with pytest.raises(error, match=message):
            store.save(state, step=1, gradients=given)
    assert store.steps == []


def test_a_state_search_gives_rules_within_a_budget(memory):
    generator = torch.Generator().manual_seed(5)
    shapes = {"wte": (200, 64), "h.weight": (64, 256), "h.bias": (256,)}

    def tensors(scale):
        return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}

    moments = {"exp_avg": tensors(1e-3), "exp_avg_sq": {name: tensor.square() for name, tensor in tensors(1e-3).items()}}
    state = {"model": tensors(0.02), "optim": moments, "step": 7}
    gradients = tensors(1e-3)
    store = tensorcask.Store(memory)
    sizes = []
    for step, (update, weight) in enumerate([(0.01, 1e-4), (0.1, 0.01)]):
        found = tensorcask.search_state_precision(state, update_error=update, weight_error=weight, gradients=gradients)
        assert found.update_error <= update and 0 < found.weight_error <= weight
        assert found.tensor_bytes == 3 * 4 * (200 * 64 + 64 * 256 + 256) and len(found.settings) == 9
        saved = store.save(state, step=step, policy="full", precision=found.rules, gradients=gradients)
        assert saved.rounding.update_error <= update * 1.05
        assert {errors.name: errors.setting for errors in store.snapshot(step).rounding()}.items() <= found.settings.items()
        sizes.append(saved.stored_bytes)
    assert sizes[1] < sizes[0] < found.tensor_bytes
    with pytest.raises(tensorcask.InvalidArgumentError, match="budget -1"):
        tensorcask.search_state_precision(state, update_error=-1, weight_error=0.1)
