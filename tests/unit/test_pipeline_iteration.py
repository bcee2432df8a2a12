"""The model of a pipeline's iteration, by hand, and by what must hold of every pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from pipeline_model import WAYS, Action, Kind, Pipeline, Stage, Steady, WayName, steady

ONE = Stage(1.0, 1.0, 1.0, 1.0)
KINDS: Mapping[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


def order(*ranks: str) -> dict[int, list[Action]]:
    """``"F0.1"``: the forward of stage 0 for micro-batch 1."""
    return {rank: [action(word) for word in words.split()] for rank, words in enumerate(ranks)}


def action(word: str) -> Action:
    stage, micro_batch = word[1:].split(".")
    return Action(int(stage), KINDS[word[0]], int(micro_batch))


def in_every_way(pipeline: Pipeline) -> dict[WayName, float]:
    return {way: steady(way, pipeline).seconds for way in WAYS}


TWO = Pipeline(order("F0.0 B0.0", "F1.0 B1.0"), [ONE, ONE], norm=0.5)
"""Forwards end at 1 and 2, backwards at 4 (the last stage's) and 6."""


def test_a_rank_alone_exposes_all_of_its_steps() -> None:
    alone = Pipeline(order("F0.0 F1.0 B1.0 B0.0"), [ONE, replace(ONE, step=2.0)])
    for way in WAYS[:-1]:
        assert steady(way, alone) == Steady(9.0, {0: 1.0, 1: 2.0})
    assert steady("no optimizer", alone) == Steady(6.0, {0: 0.0, 1: 0.0})


def test_the_last_stage_steps_in_its_bubble() -> None:
    # It ends at 4, and its next forward comes after the first stage's, which comes after that one's own step.
    assert steady("plain", TWO) == Steady(7.0, {0: 1.0, 1: 0.0})
    assert steady("backward", TWO) == steady("plain", TWO)


def test_clipping_waits_for_the_norm_of_all() -> None:
    # The norm is there at 6.5; both step until 7.5. On trial they have, at 5 and 7, and the norm is there at 7.5.
    assert steady("plain, clipped", TWO) == Steady(7.5, {0: 1.0, 1: 0.0})
    assert steady("undo, clipped", TWO) == Steady(7.5, {0: 1.0, 1: 0.0})


def test_a_long_step_on_trial_is_over_when_the_norm_is_there() -> None:
    long = replace(TWO, stages=[ONE, replace(ONE, step=3.0)])
    assert steady("plain", long) == Steady(7.0, {0: 1.0, 1: 0.0})
    # It goes from 6.5 to 9.5, and its next forward could begin at 8.5.
    assert steady("plain, clipped", long) == Steady(8.5, {0: 1.0, 1: 1.0})
    # It goes from 4 to 7.
    assert steady("undo, clipped", long) == Steady(7.5, {0: 1.0, 1: 0.0})


def test_the_norm_waits_for_steps_on_trial() -> None:
    # The norm of both is there at 1. The second rank steps until 2, while the first one's next forward goes on, and the
    # next norm is there at 2. On trial it steps first, and nothing goes on before the norm.
    stages = [Stage(1.0, 0.0, 0.0, 0.0), Stage(0.0, 0.0, 0.0, 1.0)]
    pipeline = replace(TWO, stages=stages, norm=0.0)
    assert steady("plain, clipped", pipeline) == Steady(1.0, {0: 0.0, 1: 0.0})
    assert steady("undo, clipped", pipeline) == Steady(2.0, {0: 0.0, 1: 0.0})


def test_a_stage_is_stepped_while_its_rank_waits() -> None:
    # Without an optimizer the second rank's backwards end at 6 and 10, the first one's at 8 and 12. Stage 3 is stepped
    # until 7, stage 2 until 9.
    looped = Pipeline(order("F0.0 F2.0 B2.0 B0.0", "F1.0 F3.0 B3.0 B1.0"), [ONE] * 4)
    assert steady("no optimizer", looped).seconds == 12
    assert steady("plain", looped) == Steady(14.0, {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0})
    assert steady("backward", looped) == Steady(13.0, {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0})


def test_a_stage_that_is_stepped_early_holds_up_others() -> None:
    # Stage 3 is stepped from 6 to 11, and only then is what stage 0 waits for.
    stages = [replace(ONE, step=0.0), ONE, replace(ONE, step=0.0), replace(ONE, step=5.0)]
    looped = Pipeline(order("F0.0 F2.0 B2.0 B0.0", "F1.0 F3.0 B3.0 B1.0"), stages)
    assert steady("no optimizer", looped).seconds == 12
    # After stage 1's backward, at 10, until 16: as late as the next forward of stage 1 can be, and 3 more.
    assert steady("plain", looped) == Steady(15.0, {0: 0.0, 1: 0.0, 2: 0.0, 3: 3.0})
    # Stage 1's backward could begin at 8, and ends at 13, the first rank's at 15.
    assert steady("backward", looped) == Steady(15.0, {0: 0.0, 1: 0.0, 2: 0.0, 3: 3.0})
    # With less to do, plain hides all of it, and the other way does not.
    looped = replace(looped, stages=[*stages[:2], stages[2], replace(ONE, step=2.5)])
    assert steady("plain", looped).seconds == pytest.approx(12.5)
    looped = replace(looped, stages=[stages[0], stages[0], stages[2], replace(ONE, step=2.5)])
    assert steady("plain", looped).seconds == pytest.approx(12)
    assert steady("backward", looped).seconds == pytest.approx(12.5)


def test_messages_take_time_between_ranks_alone() -> None:
    assert steady("no optimizer", replace(TWO, message=0.25)).seconds == 6.5
    vee = Pipeline(order("F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0"), [ONE] * 4, message=0.25)
    assert steady("no optimizer", vee).seconds == 12 + 4 * 0.25


def test_gradients_of_weights_need_no_other_rank() -> None:
    # Those of the second stage run beside the first one's backward, and their step after them.
    halved = Pipeline(order("F0.0 I0.0 W0.0", "F1.0 I1.0 W1.0"), [ONE, ONE])
    assert steady("no optimizer", halved).seconds == 5
    assert steady("backward", halved) == Steady(6.0, {0: 1.0, 1: 0.0})
    # A stage whose backward is whole goes with one whose backward is not.
    assert steady("no optimizer", replace(halved, order=order("F0.0 B0.0", "F1.0 I1.0 W1.0"))).seconds == 5
    assert steady("no optimizer", replace(halved, order=order("F0.0 I0.0 W0.0", "F1.0 B1.0"))).seconds == 6


def test_a_bubble_between_micro_batches() -> None:
    # 1F1B of two ranks and two micro-batches: the first rank waits from 2 to 4, and ends at 9.
    pipeline = Pipeline(order("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"), [ONE, ONE], norm=0.5)
    assert in_every_way(pipeline) == {
        "plain": 10.0,
        "plain, clipped": 10.5,
        "backward": 10.0,
        "undo, clipped": 10.5,
        "no optimizer": 9.0,
    }


@pytest.mark.parametrize(
    ("ranks", "stages", "options"),
    [
        pytest.param(["F0.0 F0.0 B0.0"], [ONE], {}, id="an action twice"),
        pytest.param(["F0.0 B0.0"], [ONE, ONE], {}, id="a stage that is nowhere"),
        pytest.param(["F0.0 B0.0", "F0.1 B0.1"], [ONE], {}, id="a stage on two ranks"),
        pytest.param(["F0.0 B0.0"], [ONE], {"norm": -1.0}, id="negative"),
        pytest.param(["B0.0 F0.0"], [ONE], {}, id="a backward before its forward"),
        pytest.param(["F0.0 W0.0 I0.0"], [ONE], {}, id="halves the wrong way round"),
        pytest.param(["F0.0 B0.0", "F1.0"], [ONE, ONE], {}, id="a backward that is missing"),
    ],
)
def test_what_cannot_be(ranks: Sequence[str], stages: Sequence[Stage], options: Mapping[str, float]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        steady("plain", Pipeline(order(*ranks), stages, **options))


def test_no_time_is_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        Stage(1.0, 1.0, 1.0, -1.0)
