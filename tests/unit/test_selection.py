"""The lists that say which tests are run name tests that are there."""

from pathlib import Path

import pytest

from tests import selection

LISTS = selection.FULL, selection.ON_ACCELERATOR, selection.SLOW_ON_ACCELERATOR
CI = Path(__file__).parents[2] / ".ci" / "run"


def test_what_is_listed_is_there(request: pytest.FixtureRequest) -> None:
    """Of the files that this session has collected. Functions are compared: cases depend on versions of packages."""
    if any("::" in arg for arg in request.config.args):
        pytest.skip("files were collected in part")
    named = selection.killing("cpu").union(selection.killing("accelerator"), *map(selection.listed, LISTS))
    listed = set(map(selection.function_of, named))
    collected = request.config.stash[selection.COLLECTED]
    files = set(map(selection.file_of, collected))
    assert not {function for function in listed - collected if selection.file_of(function) in files}


def test_the_lists_are_sorted_and_leave_out_no_test_that_kills_a_defect() -> None:
    for file in LISTS:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert lines == sorted(set(lines)), file
    assert not selection.listed(selection.FULL) & selection.killing("cpu")


def test_on_the_accelerator_a_function_keeps_what_kills_and_one_case_at_least_if_it_is_not_slow() -> None:
    (first, second) = sorted(selection.killing("accelerator"))[:2]
    others = [
        f"{selection.function_of(first)}[another]",
        "tests/test_new.py::test_new[a]",
        "tests/test_new.py::test_new[b]",
        f"{min(selection.listed(selection.SLOW_ON_ACCELERATOR))}[any]",
    ]
    found = selection.chosen_on_accelerator([*others, first, second])
    assert {first, second} <= found
    assert others[0] not in found
    assert len(found) == 3
    assert found == selection.chosen_on_accelerator([second, first, *reversed(others)])


def test_ci_runs_what_is_chosen() -> None:
    """``tests/accelerator/test_selection.py`` looks what that selects."""
    lines = CI.read_text(encoding="utf-8").splitlines()
    assert any(line.endswith("pytest -m 'accelerator and not nightly'") for line in lines)
    assert any(line.endswith(" pytest") for line in lines)
