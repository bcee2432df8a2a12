"""The faster one of two ways is kept, and the other one is tried again now and then."""

from hypothesis import given
from hypothesis import strategies as st

from instep.sources.cross_iteration.order import CrossingTrial

EXCHANGES = {1, 3, 7, 15, 31}


def run(iterations: int, first: float, second: float, later: tuple[float, float] | None = None) -> list[bool]:
    """The ways that were gone, where one takes ``first`` seconds and the other ``second``; from the 600th on others."""
    trial, ways = CrossingTrial(), []
    for i in range(1, iterations + 1):
        way = trial.first(i)
        ways.append(way)
        now = (first, second) if later is None or i < 600 else later
        times = trial.times()
        trial.took(i, way, now[0] if way else now[1])
        if i in EXCHANGES or i % 64 == 0:
            trial.keep(i, *times)
    return ways


def test_both_are_tried_and_the_faster_one_is_kept() -> None:
    for first, second in ((1.0, 2.0), (2.0, 1.0)):
        ways = run(511, first, second)
        assert ways[:64] == [True] * 7 + ([False] * 8 + [True] * 8) * 3 + [False] * 8 + [True]
        assert set(ways[64:]) == {first < second}


def test_a_gain_that_may_be_chance_changes_nothing() -> None:
    assert set(run(511, 0.98, 1.0)[64:]) == {False}
    ways = run(1024, 0.9, 1.0, later=(1.02, 1.0))
    assert set(ways[64:511]) == {True}
    assert set(ways[519:1023]) == {True}


def test_the_other_one_is_tried_again() -> None:
    ways = run(2048, 1.0, 2.0, later=(3.0, 2.0))
    assert ways[511:519] == [False] * 8
    assert set(ways[519:575]) == {True}
    assert set(ways[1023 + 8 + 64 : 1535]) == {False}, "it has become the slower one"
    assert ways[1535:1543] == [True] * 8


@given(st.lists(st.floats(0.1, 10), min_size=80, max_size=80), st.integers(0, 79))
def test_ranks_that_are_given_the_same_times_go_the_same_way(times: list[float], other: int) -> None:
    one, two = CrossingTrial(), CrossingTrial()
    for i, seconds in enumerate(times, start=1):
        assert one.first(i) == two.first(i)
        one.took(i, one.first(i), seconds)
        two.took(i, two.first(i), seconds * (2 if i == other else 1))
        if i in EXCHANGES or i == 64:
            mean = [(a + b) / 2 for a, b in zip(one.times(), two.times(), strict=True)]
            one.keep(i, *mean)
            two.keep(i, *mean)
