"""Drawn programs under DistributedDataParallel, two ranks and three."""

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.distributed.pool import RankPool
from tests.parity import wild
from tests.parity.oracle import run_or_refuse_on_this_rank
from tests.parity.programs import Program, Step, programs, run_on_this_rank

# Ranks that disagree after a failure have to be started again, which makes shrinking take an hour.
EVERYTHING = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


@given(programs(), st.booleans())
@settings(EVERYTHING, max_examples=40, derandomize=True)
def test_drawn_programs_on_two_ranks(two_ranks: RankPool, program: Program, view: bool) -> None:
    two_ranks.run(run_on_this_rank, program, view)


# Gradients that "undo" keeps, scaled, for the next micro-batch, while DDP lays out its buckets anew. With two ranks all
# divisions are exact, and no bit would differ.
KEPT_WHILE_BUCKETS_ARE_MADE = Program(
    optimizer="SGD-1-foreach",
    width=7,
    depth=1,
    steps=(Step(((True,), (True,))),) * 2,
    way="undo",
    accumulate="plain",
    scaler="unscale",
)


def test_gradients_kept_while_buckets_are_made(three_ranks: RankPool) -> None:
    three_ranks.run(run_on_this_rank, KEPT_WHILE_BUCKETS_ARE_MADE, True)


@given(programs(), st.booleans())
@settings(EVERYTHING, max_examples=20, derandomize=True)
def test_drawn_programs_on_three_ranks(three_ranks: RankPool, program: Program, view: bool) -> None:
    three_ranks.run(run_on_this_rank, program, view)


# A write of a DTensor that its local tensor does not count.
STATE_IS_WRITTEN = Program(
    optimizer="SGD-1-for-loop",
    width=4,
    depth=2,
    steps=(Step(((True, True),), edits=(("backward", "write state"),)), Step(((True, True),))),
    way="shard_state",
)


@given(wild.on_ranks(), st.booleans())
@example(STATE_IS_WRITTEN, True)
@settings(EVERYTHING, max_examples=30, derandomize=True)
def test_wild_programs_on_two_ranks(two_ranks: RankPool, program: Program, view: bool) -> None:
    assert len(set(two_ranks.run(run_or_refuse_on_this_rank, program, view))) == 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))  # a failure ends its part alone
@given(program=wild.on_ranks(), view=st.booleans())
@settings(EVERYTHING, max_examples=100)
def test_many_wild_programs_on_two_ranks(two_ranks: RankPool, program: Program, view: bool, part: int) -> None:
    assert len(set(two_ranks.run(run_or_refuse_on_this_rank, program, view))) == 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
@given(program=programs(), view=st.booleans())
@settings(EVERYTHING, max_examples=100)
def test_many_drawn_programs_on_two_ranks(two_ranks: RankPool, program: Program, view: bool, part: int) -> None:
    two_ranks.run(run_on_this_rank, program, view)
