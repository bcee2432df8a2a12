"""In which order to send buckets that the next forward will read: arithmetic on times, in seconds.

Backward makes the deepest buckets first, and the next forward reads the shallowest first. Sent as they come, the ones
that are read first arrive last.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """One bucket, in the order in which backward makes them.

    Attributes:
        ready: when its gradients are there, from the beginning of backward.
        send: how long it takes on the link, when it has it to itself.
        read: when the forward that follows would read it if nothing were waited for, from the beginning of backward.
    """

    ready: float
    send: float
    read: float


def delay(buckets: Sequence[Timed], order: Sequence[int]) -> float:
    """For how long the forward waits if the buckets are sent in this order, one after the other."""
    arrival = [0.0] * len(buckets)
    free = 0.0
    for number in order:
        free = max(free, buckets[number].ready) + buckets[number].send
        arrival[number] = free
    late = 0.0
    for number in sorted(range(len(buckets)), key=lambda i: buckets[i].read):
        late = max(late, arrival[number] - buckets[number].read)
    return late


def deepest_then_shallowest(count: int, first: int) -> list[int]:
    """The first ``first`` buckets as backward makes them, while it still runs; then those that are read first."""
    return [*range(first), *reversed(range(first, count))]


def soonest_read(buckets: Sequence[Timed]) -> list[int]:
    """Whenever the link is free: of the buckets that are there, the one that is read first."""
    order: list[int] = []
    left = set(range(len(buckets)))
    free = 0.0
    while left:
        free = max(free, min(buckets[i].ready for i in left))
        number = min((i for i in left if buckets[i].ready <= free), key=lambda i: buckets[i].read)
        left.discard(number)
        order.append(number)
        free += buckets[number].send
    return order


def best_order(buckets: Sequence[Timed]) -> list[int]:
    """Of a few orders, the one in which the forward waits least; the plainest of those that are equal."""
    count = len(buckets)
    orders = [deepest_then_shallowest(count, first) for first in range(count, -1, -1)]
    return min([*orders, soonest_read(buckets)], key=lambda order: delay(buckets, order))
