"""The first step whose statistics satisfy a condition."""

import numpy as np
import pytest
import tensorcask


def test_a_nan_in_one_element_is_found(tmp_path):
    store = tensorcask.Store(tmp_path / "run")
    weights = {f"layers.{layer}.w": np.full(300_000, 0.5, np.float32) for layer in range(3)}
    for step in range(10):
        weights["layers.0.w"][0] = step
        if step == 6:
            weights["layers.2.w"][299_999] = np.nan
        store.save(weights, step=step, statistics=True)
    found = store.bisect("nan > 0")
    assert (found.step, found.last_good, found.examined, found.is_certain) == (6, 5, 7, True)
    assert found.tensors == [tensorcask.MatchedTensor("layers.2.w", ([0], [300_000], 1))]
    found = store.bisect("nan > 0", tensor="layers.0.*")
    assert (found.step, found.tensors, found.last_good) == (None, [], 9)
    with pytest.raises(tensorcask.NotFoundError):
        store.bisect("nan > 0", tensor="decoder.*")
    with pytest.raises(tensorcask.InvalidArgumentError, match="not a column"):
        store.bisect("loss > 3")


def test_steps_without_statistics_are_reported():
    store = tensorcask.Store("memory://bisect-without")
    for step in range(3):
        store.save({"w": np.full(10, np.nan, np.float32)}, step=step, statistics=step != 1)
    found = store.bisect("nan > 10")
    assert (found.step, found.without_statistics, found.is_certain) == (None, [1], False)
