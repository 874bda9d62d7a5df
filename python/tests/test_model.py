"""The model of lost stores, for some sequences: see ``python/tests/model``."""

import os

from model.sequences import run_all


def test_what_a_save_acknowledges_a_fresh_process_loads():
    url = os.environ.get("TENSORCASK_TEST_STORE")
    report = run_all(range(1, 41 if url else 201), f"{url}/model" if url else None)
    assert not report.violations, "\n".join(report.violations)
    saved = sum(count for outcome, count in report.outcomes.items() if outcome.endswith(": saved"))
    assert saved > 3 * report.sequences, report.outcomes
