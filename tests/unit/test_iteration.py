"""The model of an iteration, by hand, against closed forms, and by what must hold of every loop."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iteration_model import SCHEDULES, Host, Link, ScheduleName, Work, bound, exposed_seconds, iteration_seconds

ONE, TWO = Host(), Host(cores=2)
FREE = Link(1.0, 0.0, ranks=1)
SECOND_PER_BYTE = Link(1.0, 0.0, ranks=2)
STEPPING = [schedule for schedule in SCHEDULES if schedule != "no optimizer"]


def ones(count: int) -> Work:
    return Work([1.0] * count, [1.0] * count, [1.0] * count, [1.0] * count)


def test_ring() -> None:
    assert Link(100.0, 0.5, ranks=4, algorithm="ring").allreduce(200.0) == pytest.approx(2 * 3 / 4 * 2 + 2 * 3 * 0.5)
    assert Link(100.0, 0.5, ranks=2, algorithm="ring").allreduce(200.0) == pytest.approx(2 + 2 * 0.5)


@pytest.mark.parametrize(("ranks", "depth"), [(2, 1), (3, 2), (4, 2), (5, 3), (4096, 12)])
def test_tree(ranks: int, depth: int) -> None:
    assert Link(100.0, 0.5, ranks, "tree").allreduce(200.0) == pytest.approx(2 * 2 + 2 * depth * 0.5)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_rank_alone_sends_nothing(algorithm: str) -> None:
    assert Link(100.0, 0.5, 1, algorithm).allreduce(200.0) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", STEPPING)
def test_with_nothing_to_wait_for_one_core_does_the_same_work_in_any_order(schedule: ScheduleName) -> None:
    work = Work([1.0, 9.0, 4.0], [0.5, 0.25, 2.0], [1.0, 0.5, 3.0], [0.125, 1.0, 0.5], overhead=0.75)
    assert iteration_seconds(schedule, work, FREE, ONE) == pytest.approx(0.75 + 2.75 + 4.5 + 1.625)


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        # Backward ends at 2; the deep bucket arrives at 5, the shallow one at 9.
        pytest.param("no optimizer", 9 + 4, id="no optimizer"),
        pytest.param("plain", 9 + 2 + 4, id="plain"),
        pytest.param("backward", 9 + 1 + 4, id="backward: the deep bucket is stepped before 9"),
        pytest.param("forward", 9 + 2 + 4, id="forward: on one core that is serial"),
    ],
)
def test_two_buckets_by_hand(schedule: ScheduleName, seconds: float) -> None:
    work = Work(gradient_bytes=[4, 4], forward=[1, 3], backward=[1, 1], step=[1, 1])
    assert iteration_seconds(schedule, work, SECOND_PER_BYTE, ONE) == pytest.approx(seconds)
    assert exposed_seconds(schedule, work, SECOND_PER_BYTE, ONE) == pytest.approx(seconds - 13)


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        # From 1 to 3 the other half of backward and the first bucket's second of a core have half a core each. That
        # bucket arrives at 4, the other one at 7.
        pytest.param("plain", 7 + 2 + 2, id="plain"),
        # The first step, from 4 on, shares as well: both are done at 6.
        pytest.param("backward", 7 + 1 + 2, id="backward"),
        pytest.param("forward", 7 + 2 + 2, id="forward"),
    ],
)
def test_communication_that_takes_time_of_the_core(schedule: ScheduleName, seconds: float) -> None:
    work = replace(ones(2), gradient_bytes=[3, 3])
    host = Host(cores=1, communication_cpu=1 / 3)
    assert iteration_seconds(schedule, work, SECOND_PER_BYTE, host) == pytest.approx(seconds)


def test_all_that_share_a_core_get_no_more_than_one() -> None:
    # With a link that takes no time the core never waits: 3 s each of backward, communication, steps and forward.
    for schedule in STEPPING:
        assert iteration_seconds(schedule, ones(3), FREE, Host(communication_cpu=1.0)) == pytest.approx(12)


def test_forward_hides_the_step_where_the_worker_has_a_core() -> None:
    # The shallow bucket is stepped from 2 to 3; the other one, while its forward runs, to 5.
    work = Work([0, 0], forward=[1, 1], backward=[1, 1], step=[2, 1])
    assert iteration_seconds("forward", work, FREE, TWO) == pytest.approx(6)
    assert iteration_seconds("plain", work, FREE, TWO) == pytest.approx(7)


def test_with_a_core_of_its_own_communication_delays_nothing_else() -> None:
    work = ones(2)
    # Busy for 3 s for each bucket, from 1 to 4 and to 7.
    assert iteration_seconds("plain", work, SECOND_PER_BYTE, Host(2, communication_cpu=3.0)) == pytest.approx(7 + 4)
    # The same on one core: backward ends at 3 instead of 2, and the first bucket at 5.
    assert iteration_seconds("plain", work, SECOND_PER_BYTE, Host(1, communication_cpu=3.0)) == pytest.approx(8 + 4)


def test_what_a_slow_link_waits_for() -> None:
    # The backward of the bucket sent first, and the steps and the forward that come after the last one.
    slow = Link(1e-3, 0.0, ranks=2)
    extra = {name: iteration_seconds(name, ones(4), slow, ONE) - 4000 for name in STEPPING}
    assert extra["plain"] == pytest.approx(1 + 4 + 4)
    assert extra["backward"] == pytest.approx(1 + 1 + 4)
    assert bound(ones(4), slow, ONE) == pytest.approx(4000)


def test_bound() -> None:
    work = replace(ones(3), overhead=0.5)
    assert bound(work, FREE, ONE) == pytest.approx(9.5)
    assert bound(work, SECOND_PER_BYTE, Host(1, communication_cpu=0.25)) == pytest.approx(9.5 + 0.75)
    assert bound(work, SECOND_PER_BYTE, Host(2, communication_cpu=0.25)) == pytest.approx(6.5)
    assert bound(replace(work, step=[4, 4, 4]), SECOND_PER_BYTE, TWO) == pytest.approx(12)
    assert bound(work, Link(0.1, 0.0, ranks=2), ONE) == pytest.approx(30)
    assert bound(work, SECOND_PER_BYTE, Host(2, communication_cpu=10.0)) == pytest.approx(30)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Work([], [], [], []), id="no bucket"),
        pytest.param(lambda: Work([1, 1], [1], [1, 1], [1, 1]), id="not one value for each bucket"),
        pytest.param(lambda: Work([1], [1], [-1], [1]), id="negative"),
        pytest.param(lambda: Link(0.0, 0.0, 2), id="a link that carries nothing"),
        pytest.param(lambda: Link(1.0, 0.0, 0), id="no ranks"),
        pytest.param(lambda: Host(0), id="no core"),
        pytest.param(lambda: Host(1, -1.0), id="negative CPU time"),
    ],
)
def test_what_cannot_be(make: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        make()  # type: ignore[operator]


# Times in quarters of a second, from nothing to a lot: waits of all kinds, and ties.
quarters = st.integers(0, 16).map(lambda number: number / 4)
hosts = st.sampled_from([1, 2]).flatmap(
    lambda cores: st.builds(Host, st.just(cores), st.sampled_from([0.0, 0.25, 2.0]))
)
links = st.builds(
    Link, st.sampled_from([0.25, 1.0, 3.0, 1e9]), st.sampled_from([0.0, 0.125]), st.sampled_from([1, 2, 5])
)


@st.composite
def works(draw: st.DrawFn, most: int = 5) -> Work:
    count = draw(st.integers(1, most))
    sizes, *times = (draw(st.lists(quarters, min_size=count, max_size=count)) for _ in range(4))
    return Work(sizes, times[0], times[1], times[2], overhead=draw(quarters))


@settings(deadline=None)
@given(works(most=1), links, hosts)
def test_one_bucket_is_stepped_between_its_communication_and_its_forward(work: Work, link: Link, host: Host) -> None:
    size = work.gradient_bytes[0]
    communication = max(link.allreduce(size), host.communication_cpu * size)
    expected = work.backward[0] + communication + work.step[0] + work.overhead + work.forward[0]
    at_once: tuple[ScheduleName, ...] = ("plain", "backward")
    for schedule in at_once:
        assert iteration_seconds(schedule, work, link, host) == pytest.approx(expected)
    # The overhead may be spent while a worker steps.
    seconds = iteration_seconds("forward", work, link, host)
    assert expected - work.overhead - 1e-9 <= seconds <= expected + 1e-9


@settings(deadline=None)
@given(works(), links, hosts)
def test_no_schedule_is_below_its_bound(work: Work, link: Link, host: Host) -> None:
    limit = bound(work, link, host)
    for schedule in STEPPING:
        assert iteration_seconds(schedule, work, link, host) >= limit - 1e-9
    without = iteration_seconds("no optimizer", work, link, host)
    assert without >= bound(work.without_step(), link, host) - 1e-9
    assert iteration_seconds("plain", work, link, host) == pytest.approx(without + sum(work.step))
    assert exposed_seconds("plain", work, link, host) == pytest.approx(sum(work.step))
