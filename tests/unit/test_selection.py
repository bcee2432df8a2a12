"""The lists that say which tests are run name tests that are there."""

from pathlib import Path

import pytest
import torch

from tests import selection

LISTS = selection.FULL, selection.ON_ACCELERATOR, selection.SLOW_ON_ACCELERATOR
ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci" / "run"
DEVELOPED_ON = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()


def test_what_is_listed_is_there(request: pytest.FixtureRequest) -> None:
    """Of the files that this session has collected. Functions are compared: cases depend on versions of packages."""
    if any("::" in arg for arg in request.config.args):
        pytest.skip("files were collected in part")
    named = selection.killing("cpu").union(selection.killing("accelerator"), *map(selection.listed, LISTS))
    listed = set(map(selection.function_of, named))
    every = request.config.stash[selection.COLLECTED]
    collected = set(map(selection.function_of, every))
    files = set(map(selection.file_of, collected))
    assert not {function for function in listed - collected if selection.file_of(function) in files}


@pytest.mark.skipif(f"torch=={torch.__version__.partition('+')[0]}" not in DEVELOPED_ON, reason="cases depend on it")
def test_what_kills_a_defect_is_run(request: pytest.FixtureRequest) -> None:
    """With its case, as it is named now: another name would be one that the selection does not know."""
    if any("::" in arg for arg in request.config.args):
        pytest.skip("files were collected in part")
    collected = request.config.stash[selection.COLLECTED]
    files = set(map(selection.file_of, collected))
    for defect, tests in selection.killers("cpu").items():
        here = {nodeid for nodeid in tests if selection.file_of(nodeid) in files}
        assert not here or here & collected, f"{defect}: python -m tests.mutation.matrix {defect!r}"


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
