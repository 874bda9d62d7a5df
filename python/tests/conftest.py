import itertools

import pytest

_number = itertools.count()


@pytest.fixture
def url(tmp_path):
    """A store on local disk that is not there yet."""
    return str(tmp_path / "store")


@pytest.fixture
def memory():
    """A store in memory."""
    return f"memory://test-{next(_number)}"
