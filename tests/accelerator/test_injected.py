"""Faults at named points, as in ``tests/faults``, on the device: afterwards nothing is left to chance either."""

from collections.abc import Mapping

import pytest

from tests import net
from tests.faults import sweep
from tests.faults.cases import Case
from tests.faults.harness import NOT_REACHED, OK, Verdict, run_cases

pytestmark = pytest.mark.accelerator


SHORT = sweep.spread(sweep.on_accelerator(), 40)


@pytest.fixture(scope="module")
def verdicts() -> Mapping[Case, Verdict]:
    return {verdict.case: verdict for verdict in run_cases(SHORT, jobs=4)}


@pytest.mark.timeout(4 * net.SECONDS)  # the first of them runs all
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_a_fault(verdicts: Mapping[Case, Verdict], case: Case) -> None:
    assert verdicts[case].outcome in (OK, NOT_REACHED), str(verdicts[case])


def test_most_are_reached(verdicts: Mapping[Case, Verdict]) -> None:
    assert sum(verdict.outcome == OK for verdict in verdicts.values()) > 0.8 * len(SHORT)
