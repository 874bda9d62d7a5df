import os

import network
import pytest


@pytest.fixture(scope="session", autouse=True)
def switches():
    assert os.environ.get("TENSORCASK_NAMESPACE") == "1", "run these tests with `bash tests/hosts/run`"
    network.make_switches()
