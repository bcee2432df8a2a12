"""Faults at named points, as in ``tests/faults``, on the device: afterwards nothing is left to chance either."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests import net
from tests.faults import sweep
from tests.faults.cases import ALL, LOSES_A_RANK, Case
from tests.faults.harness import NOT_REACHED, OK, Verdict, run_cases

pytestmark = pytest.mark.accelerator


def _can_be_tried(case: Case) -> bool:
    """A rank that is lost, or goes on alone, is found out by the backend: NCCL's manners in that are not emulated."""
    alone = case.world > 1 and case.rank != ALL and case.then == "again"
    return case.kind not in LOSES_A_RANK and not alone


ON_DEVICE = [replace(case, device="emu") for case in sweep.everything() if _can_be_tried(case)]
SHORT = sweep.spread(ON_DEVICE, 40)


@pytest.fixture(scope="module")
def verdicts() -> Mapping[Case, Verdict]:
    return {verdict.case: verdict for verdict in run_cases(SHORT, jobs=4)}


@pytest.mark.timeout(4 * net.SECONDS)  # the first of them runs all
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_a_fault(verdicts: Mapping[Case, Verdict], case: Case) -> None:
    assert verdicts[case].outcome in (OK, NOT_REACHED), str(verdicts[case])


def test_most_are_reached(verdicts: Mapping[Case, Verdict]) -> None:
    assert sum(verdict.outcome == OK for verdict in verdicts.values()) > 0.8 * len(SHORT)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_every_fault() -> None:
    broken = [verdict for verdict in run_cases(ON_DEVICE, jobs=4) if verdict.found]
    assert not broken, "\n".join(map(str, broken))
