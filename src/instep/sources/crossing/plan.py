"""In which order the buckets of a backward are sent, and whether the backward waits for them."""

from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist

from instep.comm_hooks import mean_allreduce
from instep.sources.crossing.layout import Layout
from instep.sources.crossing.order import Timed, best_order, deepest_then_shallowest
from instep.sources.crossing.ordered_collectives import OrderedCollective
from instep.sources.crossing.times import Times
from instep.sources.crossing.trial import Trial

# Times are exchanged, and the order is made anew, at these repetitions of a layout, and every so many after them.
_FIRST_PLANS, _PLAN_EVERY = (1, 3, 7, 15, 31), 64


class SendingPlan:
    """All ranks must send in one order: it is decided by the mean of their times, which they exchange, and by the
    number of the backward.

    Attributes:
        order: numbers of buckets, in the order in which they are sent while the layout repeats.
        crosses: whether the running backward returns before its buckets have arrived.
        times: those of this rank.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.crosses = False
        self.times = Times()
        self._trial = Trial()
        self._began = 0.0  # the last backward, to send its buckets
        self._exchange: tuple[OrderedCollective, torch.Tensor] | None = None

    def begin(self, layout: Layout) -> None:
        """A backward is about to make its first bucket. ``layout`` is still that of the backward before."""
        self._adopt_exchanged(layout.repetitions)
        now = perf_counter()
        if layout.repeats:
            self._trial.took(layout.repetitions, self.crosses, now - self._began)
        self._began = now
        self.crosses = self._trial.first(layout.repetitions + 1)
        self.times.begin_buckets()

    def end(self, layout: Layout) -> None:
        """The running backward has made its last bucket."""
        self.times.end_buckets(repeats=layout.repeats)
        if not layout.repeats:
            # Until times are known: half of them while backward makes them, the rest as the next forward reads them.
            count = len(layout.last)
            self.order = deepest_then_shallowest(count, -(-count // 2))

    def exchange_times(
        self, repetitions: int, group: dist.ProcessGroup, device: torch.device
    ) -> OrderedCollective | None:
        """What exchanges times with the other ranks, to be sent as one more bucket; ``None``: not in this backward."""
        if not will_exchange(repetitions):
            return None
        mine = [self.times.for_a_byte, self.times.forward, *self._trial.times(), *self.times.take_ready()]
        exchanged = torch.tensor(mine, dtype=torch.float64, device=device)
        # Their mean: an all-reduce has the same result on all ranks, bit for bit.
        collective = OrderedCollective(partial(mean_allreduce, exchanged, group, group.size()), 0)
        self._exchange = collective, exchanged
        return collective

    def _adopt_exchanged(self, repetitions: int) -> None:
        """Plan from the times that were exchanged in the last backward, if they were."""
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
        timed = [Timed(at, for_a_byte * nbytes, read) for at, nbytes, read in zip(ready, sizes, reads, strict=True)]
        self.order = best_order(timed)


def will_exchange(repetitions: int) -> bool:
    """Whether times are exchanged in the backward that repeats a layout for the ``repetitions``-th time."""
    return repetitions in _FIRST_PLANS or (repetitions > 0 and repetitions % _PLAN_EVERY == 0)
