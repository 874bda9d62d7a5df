"""Behaviours of DCP: each row of `dcp_rows` runs with PyTorch's own storage and with a store, on as many ranks as it says."""

import re

import dcp_parity
import pytest
from dcp_rows import ROWS, SIDES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return dcp_parity.all_outcomes(tmp_path_factory.mktemp("dcp"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_outcome_is_the_same_or_explained(row, outcomes):
    found = outcomes[row.name]
    assert not dcp_parity.is_wrong(row, found), "\n".join(f"{side.name}: {found[side.name]}" for side in SIDES)


def test_the_page_of_the_book_has_these_outcomes(outcomes):
    """If this fails: python python/tests/dcp_parity.py --write"""

    def without_version(text):
        return re.sub(r"Run with torch [0-9.]+\.", "", text)

    assert len(ROWS) >= 60 and len({row.name for row in ROWS}) == len(ROWS)
    page = dcp_parity.PAGE.read_text()
    assert without_version(page) == without_version(dcp_parity.page_with(dcp_parity.table(outcomes)))
