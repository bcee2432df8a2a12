"""The lists that say what a plain ``pytest`` runs name tests that are there."""

import pytest

from tests import selection


def test_what_is_listed_is_there(request: pytest.FixtureRequest) -> None:
    """Of the files that this session has collected. Functions are compared: cases depend on versions of packages."""
    if any("::" in arg for arg in request.config.args):
        pytest.skip("files were collected in part")
    killers = {nodeid for tests in selection.killers().values() for nodeid in tests}
    listed = {selection.function_of(nodeid) for nodeid in selection.listed() | killers}
    collected = request.config.stash[selection.COLLECTED]
    files = set(map(selection.file_of, collected))
    assert not {function for function in listed - collected if selection.file_of(function) in files}


def test_the_list_is_sorted_and_leaves_out_no_test_that_kills_a_defect() -> None:
    lines = selection.FULL.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    assert not set(lines) & {nodeid for tests in selection.killers().values() for nodeid in tests}
