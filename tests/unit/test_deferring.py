"""Whether steps are put off: the trial of ``defer="auto"``, with a clock of its own."""

import logging
from collections.abc import Callable, Iterator

import pytest

from instep._step.deferring import HEARINGS, PAIRS, WARM_UP, Always, Never, Trial

OF_ONE_RANK = WARM_UP + 2 * PAIRS + 2


def _free() -> None:
    """Nothing keeps the step from being put off."""


class Loop:
    """Iterations whose length depends on whether the step is put off.

    Args:
        seconds: of iteration ``i`` and of whether its step was put off.
    """

    def __init__(
        self,
        seconds: Callable[[int, bool], float],
        prevented: Callable[[], str | None] = _free,
        smallest: Callable[[int], int] | None = None,
    ) -> None:
        self.now = 0.0
        self.put_off: list[bool] = []
        self._seconds = seconds
        self.trial = Trial(prevented, smallest, lambda: self.now)

    def run(self, steps: int = OF_ONE_RANK) -> "Loop":
        for _ in range(steps):
            self.trial.backward_begins()
            self.trial.step_begins()
            self.put_off.append(self.trial.puts_off)
            self.now += self._seconds(len(self.put_off), self.trial.puts_off)
        return self


def faster_by(share: float) -> Callable[[int, bool], float]:
    return lambda i, put_off: 1.0 - share if put_off else 1.0


def test_the_trial_has_as_many_of_each_and_favours_none() -> None:
    found = Loop(faster_by(0.0)).run().put_off
    assert found[:WARM_UP] == [False] * WARM_UP
    assert found[WARM_UP : WARM_UP + 4] == [False, True, True, False]
    assert sum(found) == PAIRS
    assert not any(found[WARM_UP + 2 * PAIRS :])


@pytest.mark.parametrize(("share", "gains"), [(-0.5, False), (0.0, False), (0.04, False), (0.06, True), (0.5, True)])
def test_a_clear_gain_decides(share: float, gains: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "instep"):
        trial = Loop(faster_by(share)).run().trial
    assert trial.decided
    assert trial.puts_off is gains
    assert trial.never is not gains
    assert f"by {100 * share:.1f}% in the median" in trial.why
    (said,) = caplog.messages
    assert said.startswith("the step is put off" if gains else "the step is taken at once")


def test_pairs_that_disagree_decide_nothing() -> None:
    def seconds(i: int, put_off: bool) -> float:
        return 1.0 if not put_off else (0.5 if i % 8 < 4 else 1.2)

    trial = Loop(seconds).run().trial
    assert not trial.puts_off
    assert "8 of 16 pairs" in trial.why


def test_a_machine_that_slows_down_favours_none() -> None:
    trial = Loop(lambda i, put_off: 1.0 + i / 10).run().trial
    assert trial.decided
    assert not trial.puts_off


def test_a_few_long_iterations_are_no_reason() -> None:
    trial = Loop(lambda i, put_off: 100.0 if i in (20, 33) else 0.8 if put_off else 1.0).run().trial
    assert trial.puts_off


def test_what_prevents_a_gain_is_said_at_once() -> None:
    trial = Loop(faster_by(0.5), lambda: "there is one CPU core").run(1).trial
    assert trial.decided
    assert trial.never
    assert trial.why == "there is one CPU core"


def test_a_loop_that_cannot_be_followed_any_more() -> None:
    loop = Loop(faster_by(0.5)).run()
    assert loop.trial.puts_off
    loop.trial.cannot("a parameter was replaced")
    assert loop.trial.never
    assert loop.trial.why == "a parameter was replaced"
    loop.trial.cannot("and again")
    assert loop.trial.why == "a parameter was replaced"


class Ranks:
    """Several, of which each says the same in the same order."""

    def __init__(self, *others: Iterator[int]) -> None:
        self.others = others
        self.said: list[int] = []

    def __call__(self, mine: int) -> int:
        self.said.append(mine)
        return min(mine, *(next(other) for other in self.others))


@pytest.mark.parametrize(
    ("others", "gains"), [([1], True), ([0], False), ([-1, 1], True), ([-1, -1, -1, -1, -1], False)]
)
def test_all_ranks_decide_alike(others: list[int], gains: bool) -> None:
    ranks = Ranks(iter(others))
    loop = Loop(faster_by(0.5), smallest=ranks).run(HEARINGS[len(others) - 1] - 1)
    assert not loop.trial.decided
    loop.run(1)
    assert loop.trial.decided
    assert loop.trial.puts_off is gains
    assert ranks.said == [1] * len(others)
    loop.run(HEARINGS[-1])
    assert len(ranks.said) == len(others)


def test_a_rank_that_cannot_gain_says_so_when_all_are_asked() -> None:
    ranks = Ranks(iter([1]))
    loop = Loop(faster_by(0.5), lambda: "fused=False", ranks).run(HEARINGS[0] - 1)
    assert loop.trial.never
    assert not any(loop.put_off)
    assert not ranks.said
    loop.run(1)
    assert ranks.said == [0]
    assert loop.trial.why == "fused=False"


def test_a_rank_whose_others_gain_nothing_says_so() -> None:
    trial = Loop(faster_by(0.5), smallest=Ranks(iter([0]))).run(HEARINGS[0]).trial
    assert not trial.puts_off
    assert "on all ranks" in trial.why


def test_asked_for() -> None:
    for asked, puts_off in ((Always(), True), (Never(), False)):
        for _ in range(OF_ONE_RANK):
            asked.backward_begins()
            asked.step_begins()
            assert asked.puts_off is puts_off
        asked.cannot("follow")
        assert asked.puts_off is puts_off
        assert asked.never is not puts_off
        assert asked.why == f"defer={puts_off}"
