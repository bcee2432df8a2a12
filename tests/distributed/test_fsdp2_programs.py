"""Drawn programs over FSDP2, on two ranks."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.distributed.pool import RankPool
from tests.parity import wild
from tests.parity.oracle import run_or_refuse_on_this_rank_of_fsdp2
from tests.parity.programs import Program

# Ranks that disagree after a failure have to be started again, which makes shrinking take an hour.
EVERYTHING = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


@given(wild.on_shards(), st.booleans())
@settings(EVERYTHING, max_examples=10, derandomize=True)
def test_wild_programs_over_fsdp2(two_ranks: RankPool, program: Program, nested: bool) -> None:
    assert len(set(two_ranks.run(run_or_refuse_on_this_rank_of_fsdp2, program, nested))) == 1


@given(wild.summed_on_shards(), st.booleans())
@settings(EVERYTHING, max_examples=10, derandomize=True)
def test_steps_by_micro_batches_over_fsdp2(two_ranks: RankPool, program: Program, nested: bool) -> None:
    assert len(set(two_ranks.run(run_or_refuse_on_this_rank_of_fsdp2, program, nested))) == 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))  # a failure ends its part alone
@given(program=wild.on_shards(), nested=st.booleans())
@settings(EVERYTHING, max_examples=100)
def test_many_wild_programs_over_fsdp2(two_ranks: RankPool, program: Program, nested: bool, part: int) -> None:
    assert len(set(two_ranks.run(run_or_refuse_on_this_rank_of_fsdp2, program, nested))) == 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(5))
@given(program=wild.summed_on_shards(), nested=st.booleans())
@settings(EVERYTHING, max_examples=100)
def test_many_steps_by_micro_batches_over_fsdp2(two_ranks: RankPool, program: Program, nested: bool, part: int) -> None:
    assert len(set(two_ranks.run(run_or_refuse_on_this_rank_of_fsdp2, program, nested))) == 1
