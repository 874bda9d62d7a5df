"""The check for finite values, retention that keeps the last finite step, and the warning of stale weights."""

import logging
import math

import numpy as np
import pytest
import tensorcask


def state(number, moment=0.5):
    return {
        "model": {"w": np.full(1000, number, np.float32), "causal_mask": np.array([0, -math.inf], np.float32)},
        "exp_avg": {"w": np.full(1000, moment, np.float32)},
    }


def test_a_state_that_is_not_finite_is_refused():
    store = tensorcask.Store("memory://check-finite")
    assert store.save(state(1), step=1, check="finite").finite is True
    for broken, tensor, says in [
        (state(math.nan), "model.w", "1000 NaN among 1000 elements"),
        (state(2, moment=math.inf), "exp_avg.w", "1000 infinities among 1000 elements"),
    ]:
        with pytest.raises(tensorcask.InvalidArgumentError, match=says) as caught:
            store.save(broken, step=2, check="finite")
        assert (caught.value.tensor, caught.value.chunk) == (tensor, 0)
    assert store.save(state(3), step=3, check="finite").kind == "delta"
    assert store.steps == [1, 3]


def test_marks_tell_retention_which_steps_are_finite(caplog):
    store = tensorcask.Store("memory://check-tag")
    for step in range(1, 4):
        store.save(state(step), step=step, statistics=True, keep_last=2)
    assert (store.steps, store.snapshot().user["tc.finite"]) == ([2, 3], True)
    with caplog.at_level(logging.WARNING, "tensorcask"):
        for step in range(4, 7):
            saved = store.save(state(math.nan), step=step, check="tag", keep_last=2)
    assert (saved.finite, store.steps) == (False, [3, 5, 6])
    assert any("newest finite step before them stays" in record.getMessage() for record in caplog.records)
    assert store.save(state(7), step=7, policy="full").finite is None


def test_weights_of_old_steps_are_kept():
    store = tensorcask.Store("memory://keep-weights")
    for step in range(1, 8):
        store.save(state(step), step=step, policy="full", keep_last=1, keep_every=5, keep_weights_every=2)
    assert store.steps == [2, 4, 5, 6, 7]
    assert [sorted({tensor.role for tensor in store.snapshot(step).tensors().values()}) for step in (4, 5)] == [
        ["model"],
        ["exp_avg", "model"],
    ]


def test_a_failed_retention_does_not_close_the_writer(monkeypatch, caplog):
    class Failing:
        error = tensorcask.OutcomeUnknownError("no answer")

        def __init__(self, store):
            pass

        def begin(self):
            pass

        def apply(self, retention):
            raise self.error

    store = tensorcask.Store("memory://failed-retention")
    store.save(state(1), step=1)
    writer = store._writer
    with monkeypatch.context() as patch:
        patch.setattr(tensorcask._native, "Retainer", Failing)
        store.save(state(2), step=2, keep_last=1)
        assert "could not be forgotten" in caplog.text
        patch.setattr(Failing, "error", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            store.save(state(3), step=3, keep_last=1)
    assert store._writer is writer and store.steps == [1, 2, 3]
    store._retainer = None
    store.save(state(4), step=4, keep_last=2)
    assert store._writer is writer and store.steps == [3, 4]


def test_stale_weights_are_named_once_in_the_log(caplog):
    store = tensorcask.Store("memory://stale")
    with caplog.at_level(logging.WARNING, "tensorcask"):
        found = [store.save(state(1, moment=step), step=step).unchanged for step in range(1, 6)]
    assert found == [[], [], [("model.w", 1)], [("model.w", 1)], [("model.w", 1)]]
    assert sum("has not changed since step 1" in record.getMessage() for record in caplog.records) == 1
    quiet = tensorcask.Store("memory://stale-frozen")
    assert [quiet.save(state(1), step=step, frozen="model.*").unchanged for step in range(1, 5)] == [[]] * 4
