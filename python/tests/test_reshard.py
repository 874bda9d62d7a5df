"""Resharding among layouts of 1, 2 and 3 ranks. .ci/thorough also takes 4 and 8."""

import reshard


def test_every_layout_loads_every_other(tmp_path):
    pairs = reshard.run(tmp_path, [1, 2, 3])
    assert len(set(pairs)) == len(pairs) == 6 * 6
