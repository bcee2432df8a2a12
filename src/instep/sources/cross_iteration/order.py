"""In which order the buckets of a backward are sent, and whether the backward waits for them.

All ranks must send in one order. So ``SendingPlan`` decides by the number of the backward, and by times that the ranks
have exchanged. It asks whether the buckets are those of the backward before (``BucketHistory``), how long things take
(``IterationTimes``), whether it is faster not to wait (``CrossingTrial``), and which order makes the next forward wait
least (``best_order``): backward makes the deepest buckets first, and the next forward reads the shallowest first. Sent
as they come, the ones that are read first arrive last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from instep.comm_hooks import mean_allreduce
from instep.sources.cross_iteration.collectives import OrderedCollective


class BucketHistory:
    """Which parameters share a bucket of a DDP instance, in the running backward and in the one before it. An order of
    buckets is worth something only while backward after backward makes the same ones.

    Attributes:
        last: of each bucket of the last complete backward the parameters, by ``id``.
        repeats: whether the buckets of the running backward are, so far, those of the last one.
        repetitions: how many backwards in a row had the same buckets as the one before.
        is_complete: whether the running backward has made all of its buckets.
    """

    def __init__(self) -> None:
        self.last: list[list[int]] = []
        self.repeats = False
        self.repetitions = 0
        self.is_complete = False
        self._found: list[list[int]] = []

    def begin(self) -> None:
        """A backward is about to make its first bucket."""
        self.repeats = len(self.last) > 0
        self.is_complete = False
        self._found = []

    def differs(self, index: int, members: Sequence[torch.Tensor]) -> bool:
        """Note a bucket of the running backward. Whether it is the first one that is not as in the last backward."""
        found = [id(parameter) for parameter in members]
        self._found.append(found)
        differs = self.repeats and (index >= len(self.last) or self.last[index] != found)
        self.repeats = self.repeats and not differs
        return differs

    def end(self) -> None:
        """The running backward has made its last bucket."""
        self.is_complete = True
        self.repeats = self.repeats and len(self._found) == len(self.last)
        self.repetitions = self.repetitions + 1 if self.repeats else 0
        self.last = self._found


class SendingPlan:
    """In which order the buckets of a backward are sent, and whether they cross into the next iteration: decided by the
    mean of all ranks' times, which they exchange, and by the number of the backward.

    Attributes:
        order: numbers of buckets, in the order in which they are sent while the same buckets repeat.
        crosses: whether the running backward returns before its buckets have arrived.
        times: those of this rank.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.crosses = False
        self.times = IterationTimes()
        self._trial = CrossingTrial()
        self._began = 0.0  # the last backward, to send its buckets
        self._exchange: tuple[OrderedCollective, torch.Tensor] | None = None

    def begin(self, history: BucketHistory) -> None:
        """A backward is about to make its first bucket. ``history`` is still that of the backward before."""
        self._adopt_exchanged(history.repetitions)
        now = perf_counter()
        if history.repeats:
            self._trial.took(history.repetitions, self.crosses, now - self._began)
        self._began = now
        self.crosses = self._trial.first(history.repetitions + 1)
        self.times.begin_buckets()

    def end(self, history: BucketHistory) -> None:
        """The running backward has made its last bucket."""
        self.times.end_buckets(repeats=history.repeats)
        if not history.repeats:
            # Until times are known: half of them while backward makes them, the rest as the next forward reads them.
            count = len(history.last)
            self.order = deepest_then_shallowest(count, -(-count // 2))

    def exchange_times(
        self, repetitions: int, group: dist.ProcessGroup, device: torch.device
    ) -> OrderedCollective | None:
        """The collective that exchanges times with the other ranks, to be sent as one more bucket; ``None``: none is
        sent in this backward."""
        if not will_exchange(repetitions):
            return None
        mine = [self.times.for_a_byte, self.times.forward, *self._trial.times(), *self.times.take_ready()]
        exchanged = torch.tensor(mine, dtype=torch.float64, device=device)
        # Their mean: an all-reduce has the same result on all ranks, bit for bit.
        collective = OrderedCollective(partial(mean_allreduce, exchanged, group, group.size()), 0)
        self._exchange = collective, exchanged
        return collective

    def _adopt_exchanged(self, repetitions: int) -> None:
        """Plan from the times that were exchanged in the last backward, if any were."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        collective, exchanged = exchange
        collective.wait()
        for_a_byte, forward, crossing, waiting, *ready = exchanged.tolist()
        self._trial.keep(repetitions, crossing, waiting)
        backward = max(ready[-1], 1e-9)
        # The forward reads in the opposite order, at about the same pace.
        reads = [backward + (backward - at) * forward / backward for at in ready]
        sizes = self.times.nbytes
        timed = [
            TimedBucket(at, for_a_byte * nbytes, read) for at, nbytes, read in zip(ready, sizes, reads, strict=True)
        ]
        self.order = best_order(timed)


_FIRST_PLANS, _PLAN_EVERY = (1, 3, 7, 15, 31), 64
"""Times are exchanged, and the order is made anew, at these repetitions of the same buckets, and at every 64th."""


def will_exchange(repetitions: int) -> bool:
    """Whether times are exchanged in the backward that repeats the same buckets for the ``repetitions``-th time."""
    return repetitions in _FIRST_PLANS or (repetitions > 0 and repetitions % _PLAN_EVERY == 0)


class IterationTimes:
    """How long things take on this rank, in seconds: from this the order of buckets is made.

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


_CHOSEN_AFTER, _TRIED_EVERY, _TRIED_FOR = 65, 512, 8
"""In iterations: when a way is chosen (times are exchanged in the one before), how often the other one is tried again,
and for how long."""
_LEAST_GAIN = 0.03
"""How much shorter an iteration must be the other way, for a change: medians of so few differ by as much by chance."""


class CrossingTrial:
    """Which of two ways to run an iteration is faster, on this machine and this network: with buckets that cross into
    the next iteration, or waited for. Both are tried, in training.

    They take turns, eight iterations each, since a machine is slower at one time than at another. Then buckets are
    waited for, unless crossing was shorter by ``_LEAST_GAIN``. From then on the way that was not kept has eight
    iterations of every 512.

    All ranks count the same iterations, and give ``keep`` the same times: so all choose alike.
    """

    def __init__(self) -> None:
        self._first = False  # the way that is kept
        self._took: dict[bool, list[float]] = {True: [], False: []}

    def first(self, iteration: int) -> bool:
        """Whether this iteration goes the first way; the second one, else."""
        if iteration < _CHOSEN_AFTER:
            return iteration // _TRIED_FOR % 2 == 0
        return self._first if iteration % _TRIED_EVERY >= _TRIED_FOR else not self._first

    def took(self, iteration: int, first: bool, seconds: float) -> None:
        if iteration >= _TRIED_FOR:  # before that nobody is warm
            self._took[first].append(seconds)

    def times(self) -> tuple[float, float]:
        """What an iteration took either way since a way was last chosen; ``inf`` where none was seen."""
        first, second = (median(self._took[way] or [float("inf")]) for way in (True, False))
        return first, second

    def keep(self, iteration: int, first: float, second: float) -> None:
        """Choose by the mean of all ranks' times, which they have exchanged in ``iteration``. With one of them unknown
        everything stays as it is."""
        if iteration >= _CHOSEN_AFTER - 1 and max(first, second) < float("inf"):
            kept, other = (first, second) if self._first else (second, first)
            if other < (1 - _LEAST_GAIN) * kept:
                self._first = not self._first
            self._took = {True: [], False: []}


@dataclass(frozen=True, slots=True)
class TimedBucket:
    """One bucket with its times in seconds, in the order in which backward makes them.

    Attributes:
        ready: when its gradients are there, from the beginning of backward.
        send: how long it takes on the link, when it has it to itself.
        read: when the forward that follows would read it if nothing were waited for, from the beginning of backward.
    """

    ready: float
    send: float
    read: float


def best_order(buckets: Sequence[TimedBucket]) -> list[int]:
    """Of a few orders, the one in which the forward waits least; the plainest of those that are equal."""
    count = len(buckets)
    orders = [deepest_then_shallowest(count, first) for first in range(count, -1, -1)]
    return min([*orders, soonest_read(buckets)], key=lambda order: delay(buckets, order))


def deepest_then_shallowest(count: int, first: int) -> list[int]:
    """The first ``first`` buckets as backward makes them, while it still runs; then those that are read first."""
    return [*range(first), *reversed(range(first, count))]


def soonest_read(buckets: Sequence[TimedBucket]) -> list[int]:
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


def delay(buckets: Sequence[TimedBucket], order: Sequence[int]) -> float:
    """How long the forward waits if the buckets are sent in this order, one after the other."""
    arrival = [0.0] * len(buckets)
    free = 0.0
    for number in order:
        free = max(free, buckets[number].ready) + buckets[number].send
        arrival[number] = free
    late = 0.0
    for number in sorted(range(len(buckets)), key=lambda i: buckets[i].read):
        late = max(late, arrival[number] - buckets[number].read)
    return late
