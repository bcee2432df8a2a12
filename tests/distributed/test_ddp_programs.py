"""Drawn programs under DistributedDataParallel, two ranks and three."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.distributed.pool import RankPool
from tests.parity.programs import Program, programs, run_on_this_rank

# Ranks that disagree after a failure have to be started again, which makes shrinking take an hour.
EVERYTHING = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


@given(programs(), st.booleans())
@settings(EVERYTHING, max_examples=40, derandomize=True)
def test_drawn_programs_on_two_ranks(two_ranks: RankPool, program: Program, view: bool) -> None:
    two_ranks.run(run_on_this_rank, program, view)


@given(programs(), st.booleans())
@settings(EVERYTHING, max_examples=20, derandomize=True)
def test_drawn_programs_on_three_ranks(three_ranks: RankPool, program: Program, view: bool) -> None:
    three_ranks.run(run_on_this_rank, program, view)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(programs(), st.booleans())
@settings(EVERYTHING, max_examples=1_000)
def test_many_drawn_programs_on_two_ranks(two_ranks: RankPool, program: Program, view: bool) -> None:
    two_ranks.run(run_on_this_rank, program, view)
