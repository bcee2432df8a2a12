"""Drawn programs over pipelines: equal to the plain schedule after every step."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from instep import ClipNorm
from tests.distributed.pipelines import (
    MULTI,
    SINGLE,
    V_SHAPED,
    WAYS,
    Kind,
    Loop,
    both,
    by_momentum,
    clip_over_stages,
    mean_loss,
    needs_schedules,
    one_of_each,
    one_optimizer,
    poison,
    summed_loss,
)
from tests.distributed.pool import RankPool

pytestmark = needs_schedules

# Ranks that disagree after a failure have to be started again, which makes shrinking take an hour.
EVERYTHING = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
STEPS = 4


@st.composite
def kinds(draw: Any, ranks: int) -> Kind:
    name = draw(st.sampled_from([*SINGLE, *MULTI]))
    per_rank = 1 if name in SINGLE else 2 if name in V_SHAPED else draw(st.integers(2, 3))
    tied = per_rank > 1 and draw(st.booleans())
    scales_loss = draw(st.booleans())
    # A weight has one optimizer; and torch's fused kernels do not take what the sharded scaler gives them on a CPU.
    optimizers = [one_optimizer, by_momentum, *([] if tied or scales_loss else [one_of_each])]
    return Kind(
        name,
        ranks,
        per_rank,
        # Schedules of several stages take a multiple of the ranks, DualPipeV two or more of each stage.
        ranks * draw(st.integers(2, 3)) if name in MULTI else draw(st.integers(ranks, 6)),
        scale=draw(st.booleans()),
        tied=tied,
        scales_loss=scales_loss,
        optimizers=draw(st.sampled_from(optimizers)),
        loss=draw(st.sampled_from([mean_loss, summed_loss])),
    )


@st.composite
def programs(draw: Any, ranks: int) -> dict[str, Any]:
    """The arguments of ``train``. With ``schedule="backward"`` alone weights are written before all is known."""
    kind = draw(kinds(ranks))
    way = draw(st.sampled_from([way for way in WAYS if not (kind.scales_loss and way == "backward")]))
    waits = way != "backward"
    return {
        "kind": kind,
        "way": way,
        "max_norm": draw(st.sampled_from([None, 0.05, 1.0, 1e6])) if waits else None,
        "runs": draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=STEPS, max_size=STEPS)),
        "poisoned": draw(st.sampled_from([None, *range(ranks)])) if waits else None,
        "thrown_away": draw(st.sampled_from([None, *range(STEPS)])) if waits else None,
    }


def train(
    kind: Kind, way: str, max_norm: float | None, runs: list[int], poisoned: int | None, thrown_away: int | None
) -> None:
    """
    Args:
        max_norm: of the gradients of all stages; ``None``: they are not clipped.
        runs: of the pipeline in each step.
        poisoned: the rank that has a gradient which is not finite in the second step; ``None``: none has.
        thrown_away: the step whose gradients the loop clears in place of stepping; ``None``: none.
    """
    clip = {} if max_norm is None else {"clip": ClipNorm(max_norm)}
    skip = {} if poisoned is None or kind.scales_loss else {"nonfinite": "skip"}
    iteration = partial(_step, max_norm, runs, poisoned, thrown_away)
    both(kind, way, iteration, steps=len(runs), **clip, **skip)


def _step(
    max_norm: float | None, runs: list[int], poisoned: int | None, thrown_away: int | None, loop: Loop, i: int
) -> Any:
    if poisoned is not None:
        poison(loop, poisoned, i == 1)
    losses = []
    for number in range(runs[i]):
        is_last = number == runs[i] - 1
        with nullcontext() if is_last or loop.overlap is None else loop.overlap.accumulate():
            losses.append(loop.run(10 * i + number))
    is_plain_skip = loop.overlap is None and loop.scaler is None and poisoned is not None and i == 1
    if i == thrown_away or is_plain_skip:
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
    elif loop.scaler is None:
        if loop.overlap is None and max_norm is not None:
            clip_over_stages(loop, max_norm)
        loop.step()
    else:
        for optimizer in loop.optimizers:
            loop.scaler.unscale_(optimizer)
        if loop.overlap is None and max_norm is not None:
            clip_over_stages(loop, max_norm)
        for optimizer in loop.optimizers:
            loop.scaler.step(optimizer)
            optimizer.zero_grad()
        loop.scaler.update()
    return losses


@given(program=programs(2))
@settings(EVERYTHING, max_examples=12, derandomize=True)
def test_programs_on_two_ranks(two_ranks: RankPool, program: dict[str, Any]) -> None:
    two_ranks.run(train, **program)


@given(program=programs(3))
@settings(EVERYTHING, max_examples=4, derandomize=True)
def test_programs_on_three_ranks(three_ranks: RankPool, program: dict[str, Any]) -> None:
    three_ranks.run(train, **program)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))  # a failure ends its part alone
@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks", "four_ranks"])
@given(data=st.data())
@settings(EVERYTHING, max_examples=34)
def test_many_programs(request: pytest.FixtureRequest, ranks: str, part: int, data: st.DataObject) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    pool.run(train, **data.draw(programs(pool.world_size)))
