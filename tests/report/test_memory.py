"""The curve of memory, against counting."""

from hypothesis import given
from hypothesis import strategies as st
from instep_tools.report.memory import POINTS, Allocation, curve, pair

_EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=30)


@given(_EVENTS, st.integers(0, 5))
def test_every_point_is_what_was_alive(drawn: list[tuple[int, int, bool]], base: int) -> None:
    """What is freed twice, or was there before, changes nothing; an address that is given out again was freed."""
    alive: dict[int, int] = {}
    events, expected = [], [base]
    for time, (address, nbytes, allocates) in enumerate(drawn, start=1):
        events.append((float(time), address, nbytes if allocates else -alive.get(address, nbytes), f"made {time % 3}"))
        alive.pop(address, None)
        if allocates:
            alive[address] = nbytes
        expected.append(base + sum(alive.values()))
    found = curve(pair(events), {"there": base}, 0.0, len(drawn) + 1.0)
    at = dict(zip(found.times, found.nbytes, strict=True))
    now = base
    for time, value in enumerate(expected):
        now = at.get(float(time), now)
        assert now == value
    assert found.peak == max(expected)
    assert found.peak_at == expected.index(max(expected))
    assert sum(found.alive.values()) == found.peak
    assert 0 not in found.alive.values()


def test_the_peak_is_told_by_category() -> None:
    allocations = [
        Allocation(1, 10, 1.0, 3.0, "gradients"),
        Allocation(2, 20, 2.0, 4.0, "activations"),
        Allocation(3, 5, 3.0, None, "gradients"),  # where the first is freed: they were never there together
    ]
    found = curve(allocations, {"parameters": 7, "buffers": 0}, 0.0, 5.0)
    assert (found.peak, found.peak_at) == (37, 2.0)
    assert found.alive == {"parameters": 7, "gradients": 10, "activations": 20}
    assert found.nbytes[-1] == 12


def test_many_points_are_thinned_and_keep_the_peak() -> None:
    events = [(float(i), i, 1000 if i == 12_345 else 1, "x") for i in range(20_000)]
    events = [event for i, e in enumerate(events) for event in (e, (i + 0.5, i, -e[2], "x"))]
    found = curve(pair(events), {}, 0.0, 20_000.0)
    assert len(found.times) <= POINTS + 2
    assert max(found.nbytes) == found.peak == 1000
    assert list(found.times) == sorted(found.times)
