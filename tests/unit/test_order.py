"""The order in which buckets are sent, and that nothing but the order decides what is sent when."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.sources.cross_iteration.collectives import OrderedCollective, OrderedCollectives
from instep.sources.cross_iteration.order import TimedBucket, best_order, deepest_then_shallowest, delay

seconds = st.integers(0, 20).map(float)


def in_layers(forward: float, backward: float, send: Sequence[float]) -> list[TimedBucket]:
    """Layers of one size: backward makes them one by one, and the forward reads them in the opposite order."""
    count = len(send)
    end = count * backward
    return [TimedBucket((i + 1) * backward, s, end + (count - 1 - i) * forward) for i, s in enumerate(send)]


class Waited(OrderedCollective):
    """Counts who is waited for."""

    def wait(self) -> None:
        waited.append(self)
        super().wait()


waited: list[OrderedCollective] = []


def test_none_is_waited_for_after_one_that_has_failed() -> None:
    futures: list[torch.futures.Future[Any]] = [torch.futures.Future() for _ in range(3)]
    collectives = OrderedCollectives(range(3), timed=False)
    sent = [Waited(itertools.repeat(future).__next__, 0) for future in futures]
    for number, one in enumerate(sent):
        collectives.add(number, one)
    futures[0].set_result(torch.zeros(1))
    futures[1].set_exception(RuntimeError("gone"))
    futures[2].set_result(torch.zeros(1))
    waited.clear()
    collectives.drain()
    assert waited == sent[:2]
    assert str(collectives.failure) == "gone"


def test_by_hand() -> None:
    # Ready at 1 and 2, read at 3 and 2, each takes 2: sent as they come, they arrive at 3 and 5.
    buckets = in_layers(1.0, 1.0, [2.0, 2.0])
    assert delay(buckets, [0, 1]) == 3.0
    assert delay(buckets, [1, 0]) == 3.0
    # With a third one the shallowest should not be the last.
    buckets = in_layers(1.0, 1.0, [2.0, 2.0, 2.0])
    assert delay(buckets, [0, 1, 2]) == 4.0
    assert delay(buckets, [0, 2, 1]) == 3.0
    assert best_order(buckets) == [0, 2, 1]


def test_orders() -> None:
    assert deepest_then_shallowest(5, 2) == [0, 1, 4, 3, 2]
    assert deepest_then_shallowest(3, 3) == [0, 1, 2]
    assert best_order([]) == []


def test_a_link_that_is_fast_enough_changes_nothing() -> None:
    assert best_order(in_layers(1.0, 2.0, [0.5] * 6)) == list(range(6))


def least_delay(buckets: Sequence[TimedBucket]) -> float:
    """Of all orders that there are."""
    return min(delay(buckets, one) for one in itertools.permutations(range(len(buckets))))


@given(st.lists(st.builds(TimedBucket, seconds, seconds, seconds), max_size=6))
def test_every_bucket_is_sent_once(buckets: list[TimedBucket]) -> None:
    assert sorted(best_order(buckets)) == list(range(len(buckets)))


@given(st.lists(st.builds(TimedBucket, st.just(3.0), seconds, seconds), max_size=6))
def test_where_all_gradients_come_at_once_it_is_the_best_of_all(buckets: list[TimedBucket]) -> None:
    """What is read first is then sent first, and no order is better (Jackson)."""
    assert delay(buckets, best_order(buckets)) == least_delay(buckets)


@given(st.lists(st.builds(TimedBucket, seconds, seconds, st.just(30.0)), max_size=6))
def test_where_all_are_read_at_once_it_is_the_best_of_all(buckets: list[TimedBucket]) -> None:
    """The link must then not rest while a bucket is there, and no more is asked of the order."""
    assert delay(buckets, best_order(buckets)) == least_delay(buckets)


@given(st.lists(st.builds(TimedBucket, seconds, st.just(1.0), seconds), max_size=6))
def test_where_all_take_the_same_it_is_the_best_of_all(buckets: list[TimedBucket]) -> None:
    """Times are whole multiples of what a bucket takes: no bucket is in the way of a more urgent one."""
    assert delay(buckets, best_order(buckets)) == least_delay(buckets)


def is_near_the_best(buckets: Sequence[TimedBucket], order: Sequence[int]) -> bool:
    """Sending what is there by the time it is read (Schrage) is never worse than the best order by as much as the
    longest bucket takes: one bucket may just have been begun when a more urgent one is ready."""
    best = least_delay(buckets)
    found = delay(buckets, order)
    return found == best or found < best + max(bucket.send for bucket in buckets)


@given(st.lists(st.builds(TimedBucket, seconds, seconds, seconds), min_size=1, max_size=6))
def test_it_is_near_the_best_of_all(buckets: list[TimedBucket]) -> None:
    assert is_near_the_best(buckets, best_order(buckets))


def test_the_best_order_is_none_of_those_that_backward_suggests() -> None:
    """What is read first is in the middle, and takes little: sent after either of the others, it is late."""
    buckets = [TimedBucket(0.0, 10.0, 20.0), TimedBucket(0.0, 1.0, 1.0), TimedBucket(0.0, 10.0, 30.0)]
    assert best_order(buckets) == [1, 0, 2]


def test_an_order_that_is_not_near_the_best_is_found() -> None:
    buckets = [TimedBucket(0.0, 1.0, 3.0), TimedBucket(0.0, 1.0, 2.0), TimedBucket(0.0, 1.0, 1.0)]
    assert best_order(buckets) == [2, 1, 0]
    assert not is_near_the_best(buckets, [0, 1, 2])


@given(st.lists(seconds, min_size=1, max_size=6), seconds, seconds)
def test_in_layers_it_is_near_the_best_of_all(send: list[float], forward: float, backward: float) -> None:
    buckets = in_layers(forward, backward, send)
    assert is_near_the_best(buckets, best_order(buckets))


# The collectives of one backward.


class Link:
    """Collectives that complete when they are told to."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.futures: dict[int, torch.futures.Future[torch.Tensor]] = {}

    def sent(self, number: int) -> OrderedCollective:
        def launch() -> torch.futures.Future[torch.Tensor]:
            self.launched.append(number)
            self.futures[number] = torch.futures.Future()
            return self.futures[number]

        return OrderedCollective(launch, 8)

    def complete(self, number: int) -> None:
        self.futures[number].set_result(torch.tensor(number))


CPU = torch.device("cpu")


@given(st.permutations(range(5)), st.permutations(range(5)), st.data())
def test_buckets_are_sent_in_their_order_whatever_comes_first(
    order: list[int], ready: list[int], data: st.DataObject
) -> None:
    link, collectives = Link(), OrderedCollectives(order, timed=True)
    sent = {number: link.sent(number) for number in range(5)}
    for number in ready:
        if data.draw(st.booleans()):
            sent[number].future(CPU)
        collectives.add(number, sent[number])
        assert link.launched == order[: len(link.launched)]
        for early in link.launched:
            if not link.futures[early].done() and data.draw(st.booleans()):
                link.complete(early)
    assert link.launched == order
    for number in order:
        if not link.futures[number].done():
            link.complete(number)
    for number, one in sent.items():
        one.wait()
        assert int(one.future(CPU).wait()) == number
    assert collectives.busy()[0] == 40
    assert sorted(map(id, collectives.drain())) == sorted(map(id, sent.values()))


@given(st.permutations(range(6)), st.integers(0, 5), st.data())
def test_another_layout_is_sent_in_one_order_on_all_ranks(order: list[int], changed: int, data: st.DataObject) -> None:
    """Ranks have sent more or less by the time they see that the buckets are others."""
    launched = []
    count = data.draw(st.integers(changed + 1, 8))
    for _ in range(2):
        link, collectives = Link(), OrderedCollectives(order, timed=False)
        for number in range(count):
            if number == changed:
                collectives.keep_order(number)
            collectives.add(number, link.sent(number))
            while data.draw(st.booleans()) and any(not f.done() for f in link.futures.values()):
                link.complete(next(n for n, f in link.futures.items() if not f.done()))
        while any(not f.done() for f in link.futures.values()):
            link.complete(next(n for n, f in link.futures.items() if not f.done()))
        launched.append(link.launched)
    assert launched[0] == launched[1]
    assert sorted(launched[0]) == list(range(count))


def test_a_collective_that_fails() -> None:
    link, collectives = Link(), OrderedCollectives(range(3), timed=False)
    sent = [link.sent(number) for number in range(3)]
    promises = [one.future(CPU) for one in sent]
    for number in range(3):
        collectives.add(number, sent[number])
    link.futures[1].set_exception(RuntimeError("the link is down"))  # type: ignore[arg-type]
    link.complete(0)
    link.complete(2)
    assert collectives.failure is None
    collectives.drain()
    assert "the link is down" in str(collectives.failure)
    for wait in (sent[1].wait, promises[1].wait):
        with pytest.raises(RuntimeError, match="the link is down"):
            wait()
    for number in (0, 2):
        sent[number].wait()
        assert int(promises[number].wait()) == number


def test_a_collective_that_cannot_be_started() -> None:
    def launch() -> torch.futures.Future[torch.Tensor]:
        raise ValueError("no such group")

    link, collectives = Link(), OrderedCollectives([0, 1, 2], timed=False)
    sent = [OrderedCollective(launch, 8), link.sent(1), link.sent(2)]
    promises = [sent[0].future(CPU), sent[1].future(CPU)]
    collectives.add(1, sent[1])
    collectives.add(0, sent[0])
    collectives.add(2, sent[2])
    assert link.launched == []
    assert isinstance(collectives.failure, ValueError)
    assert collectives.drain() == sent[:1]
    for wait in (*(one.wait for one in sent), *(one.wait for one in promises), sent[2].future(CPU).wait):
        with pytest.raises((ValueError, RuntimeError), match="no such group"):
            wait()


def test_what_will_never_be_ready_is_given_up() -> None:
    link, collectives = Link(), OrderedCollectives([1, 0], timed=False)
    first = link.sent(0)
    collectives.add(0, first)
    collectives.abandon(ZeroDivisionError("backward"))
    with pytest.raises(ZeroDivisionError, match="backward"):
        first.wait()
    assert link.launched == []
