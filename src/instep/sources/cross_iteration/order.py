"""In which order buckets are sent that the next forward reads: measured times, and the arithmetic on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from statistics import median
from time import perf_counter

# How long things take on this rank, in seconds: from this the order of buckets is made.


class Times:
    """
    Attributes:
        forward: what the fastest forward took; ``inf`` before the first one.
        nbytes: of each bucket of the running backward, in the order in which backward makes them.
        for_a_byte: what the link takes to send a byte.
    """

    def __init__(self) -> None:
        self.forward = float("inf")
        self.nbytes: list[int] = []
        self.for_a_byte = 0.0
        self._forward_began = self._backward_began = 0.0
        self._ready: list[float] = []
        # Backward makes its buckets beside communication, which takes a part of the core on CPU: one backward says
        # little. So these are sums over ``_backwards`` of them.
        self._ready_in_all: list[float] = []
        self._backwards = 0

    def forward_begins(self) -> None:
        self._forward_began = perf_counter()

    def backward_begins(self) -> None:
        self._backward_began = perf_counter()
        if self._forward_began:
            self.forward = min(self.forward, self._backward_began - self._forward_began)
            self._forward_began = 0.0

    def sent(self, nbytes: int, seconds: float) -> None:
        """The link was in use for so long, to send so much."""
        if nbytes:
            self.for_a_byte = seconds / nbytes

    def begin_buckets(self) -> None:
        """The running backward is about to make its first bucket."""
        self._ready, self.nbytes = [], []

    def bucket_is_ready(self, nbytes: int) -> None:
        self._ready.append(perf_counter() - self._backward_began)
        self.nbytes.append(nbytes)

    def end_buckets(self, *, repeats: bool) -> None:
        """The running backward has made its last bucket.

        Args:
            repeats: whether its buckets are those of the backward before; else earlier times say nothing of them.
        """
        if repeats:
            self._ready_in_all = list(map(add, self._ready_in_all, self._ready))
            self._backwards += 1
        else:
            self._ready_in_all, self._backwards = [0.0] * len(self._ready), 0

    def take_ready(self) -> list[float]:
        """When each bucket is ready, from the beginning of backward: the mean since this was last asked."""
        means = [total / self._backwards for total in self._ready_in_all]
        self._ready_in_all, self._backwards = [0.0] * len(means), 0
        return means


# In which order to send buckets that the next forward will read: arithmetic on times, in seconds.
#
# Backward makes the deepest buckets first, and the next forward reads the shallowest first. Sent as they come, the ones
# that are read first arrive last.


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


# Which of two ways to run an iteration is faster, on this machine and this network: both are tried, in training.


_PLAN, _PERIOD, _SOME = 32, 512, 8


class Trial:
    """One way is tried in iterations 8 to 15, the other in the rest of the first 32, and the one that took less time is
    kept. From then on the one that was not kept has eight iterations of every 512.

    All ranks count the same iterations, and give ``keep`` the same times: so all choose alike.
    """

    def __init__(self) -> None:
        self._first = True  # the way that is kept
        self._took: dict[bool, list[float]] = {True: [], False: []}

    def first(self, iteration: int) -> bool:
        """Whether this iteration goes the first way; the second one, else."""
        if iteration < _PLAN:
            return not _SOME <= iteration < 2 * _SOME
        return self._first if iteration % _PERIOD >= _SOME else not self._first

    def took(self, iteration: int, first: bool, seconds: float) -> None:
        if iteration >= _SOME:  # before that nobody is warm
            self._took[first].append(seconds)

    def times(self) -> tuple[float, float]:
        """What an iteration took either way since a way was last chosen; ``inf`` where none was seen."""
        first, second = (median(self._took[way] or [float("inf")]) for way in (True, False))
        return first, second

    def keep(self, iteration: int, first: float, second: float) -> None:
        """Choose by the mean of all ranks' times, which they have exchanged in ``iteration``. With one of them unknown
        everything stays as it is."""
        if iteration >= _PLAN - 1 and max(first, second) < float("inf"):
            self._first = first <= second
            self._took = {True: [], False: []}
