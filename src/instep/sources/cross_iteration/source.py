"""Gradients of DDP that are still on their way when ``backward()`` returns."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from instep._optim.parameters import AttachedParameter, Bucket
from instep._ranks.process_groups import group_beside, require_another
from instep._step.state import Recorder
from instep._torch.engine import Phase, current, graph_task
from instep._torch.hooks import BoundHook
from instep._torch.lifetime import WeakMethod, weakly
from instep._torch.placeholders import BeforeUse, HeldGradient
from instep.comm_hooks import cast_mean_allreduce, mean_allreduce
from instep.errors import InstepError
from instep.sources import InFlightBucket, WrappedParameters, as_bucket
from instep.sources.cross_iteration.collectives import OrderedCollective, OrderedCollectives, future_on
from instep.sources.cross_iteration.order import Timed, Times, Trial, best_order, deepest_then_shallowest
from instep.sources.ddp.buckets import SomeBucket
from instep.sources.ddp.reducer import before_backward, release, take
from instep.sources.ddp.source import managed_by

# Which parameters share a bucket of DDP's: in the running backward, and in the one before it.


class Layout:
    """An order of buckets is worth something only while backward after backward makes the same ones.

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


# A bucket of DDP's whose gradients may arrive after ``backward()`` has returned.


class HeldBucket(InFlightBucket[OrderedCollective]):
    """From the end of backward on a ``HeldGradient`` stands in ``.grad`` of each member, until the bucket was waited
    for.

    Attributes:
        parameters: the attached ones among its members.
    """

    __slots__ = ("_placeholders", "parameters")

    def __init__(
        self, parameters: Sequence[AttachedParameter], members: Sequence[torch.Tensor], communication: OrderedCollective
    ) -> None:
        super().__init__(members, communication)
        self.parameters = tuple(parameters)
        self._placeholders: tuple[HeldGradient, ...] = ()

    def take_off(self, used: Callable[[], BeforeUse | None]) -> None:
        """DDP has ended its backward, and set ``.grad``: ``used`` is called before anything else uses a gradient."""
        self._placeholders = tuple(HeldGradient(_grad(p), used) for p in self.members)
        for parameter, placeholder in zip(self.members, self._placeholders, strict=True):
            parameter.grad = placeholder

    def gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The tensor that ``.grad`` will be once it has arrived; ``None`` if the loop has put something else there."""
        found = attached.get().grad
        return found.held if isinstance(found, HeldGradient) and any(found is p for p in self._placeholders) else None

    def wait_into_grad(self) -> None:
        """Wait, and have ``.grad`` be what it is in the plain loop, where the loop has put nothing else there."""
        waiting = [
            (parameter, placeholder.held)
            for parameter, placeholder in zip(self.members, self._placeholders, strict=False)
            if parameter.grad is placeholder
        ]
        if not waiting:
            return
        try:
            self.wait()
        except BaseException:
            for parameter, _ in waiting:
                parameter.grad = None  # the loop must not find half of a sum
            raise
        for parameter, gradient in waiting:
            parameter.grad = gradient

    def drop(self) -> None:
        """Backward has raised, and maybe in the middle of a sum: no gradient is right."""
        for attached in self.parameters:
            attached.get().grad = None


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None, "DDP has set it: this rank used the parameter"
    return gradient


# In which order the buckets of a backward are sent, and whether the backward waits for them.


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


# Gradients of DistributedDataParallel that are still on their way when ``backward()`` returns.
#
# DDP is told that each bucket is reduced already, so that its backward ends; the buckets are reduced in its own buffers
# meanwhile, in an order that suits the next forward, and are waited for where a gradient or a weight is used.


class CrossingSource:
    """One communication hook on one DDP instance, whose buckets are sent over a process group of their own: what the
    loop sends must not come between them, and on another rank before or after them.

    Args:
        reduce_dtype: what the mean is computed and sent in; ``None``: as the gradients are.
    """

    def __init__(
        self,
        parameters: Sequence[AttachedParameter],
        ddp: DistributedDataParallel,
        reduce_dtype: torch.dtype | None,
        recorder: Callable[[], Recorder | None],
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._parameters = WrappedParameters(parameters)
        self._reduce_dtype = reduce_dtype
        self._recorder = recorder
        self._group: dist.ProcessGroup | None = None
        self._handle: RemovableHandle | None = None
        self._layout = Layout()
        self._plan = SendingPlan()
        self._collectives: OrderedCollectives | None = None  # those of the last backward
        # By DDP's number: of the running backward, until DDP's own end; and of the last one, as they are sent.
        self._made: dict[int, HeldBucket] = {}
        self._in_flight: dict[int, HeldBucket] = {}
        self._when_used = WeakMethod(self._used)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they are sent."""
        members = self._layout.last
        if not members:
            return (as_bucket("ddp", self._parameters),)
        order = self._plan.order if len(self._plan.order) == len(members) else range(len(members))
        return tuple(as_bucket("ddp", self._parameters.with_ids(members[number])) for number in order)

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        take(ddp, self, None, self._reduce_dtype)
        try:
            require_another(ddp.process_group, next(ddp.module.parameters()).device)
        except BaseException:
            release(ddp, self)
            raise
        self._handle = ddp.module.register_forward_hook(BoundHook(weakly(self._after_forward)))

    def disconnect(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._drain()
        lost = False
        for bucket in self.flights:
            try:
                if lost:
                    bucket.drop()
                else:
                    bucket.wait_into_grad()
            except Exception:
                lost = True
        self._in_flight.clear()
        release(self._ddp(), self)

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        ddp = self._ddp()
        return self._parameters.adopt(parameters, set() if ddp is None else managed_by(ddp))

    def refresh(self) -> None:
        """A forward begins: gradients that no step has taken are the plain loop's."""
        self.wait_into_grad()
        self._plan.times.forward_begins()

    def begin_step(self) -> None:
        """Nothing is counted from step to step."""

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """DDP's next backward writes its buckets, and may begin unseen. In most loops nothing is left to wait for: the
        optimizer's step was given what was sent, and this forward has read its weights."""
        if torch.is_grad_enabled() and graph_task() is None and not torch.compiler.is_compiling():
            self.wait_into_grad()
            self._drain()

    def before_backward(self) -> None:
        """DDP is about to write its buckets again."""
        self.wait_into_grad()
        self._drain()
        self._in_flight = {}
        before_backward(self._ddp())
        self._plan.times.backward_begins()

    @property
    def waited(self) -> bool:
        """Whether the last backward has waited for all of its buckets, since that takes less time."""
        return self._layout.repeats and not self._plan.crosses

    @property
    def flights(self) -> list[HeldBucket]:
        """The buckets of the last backward, in the order in which they are sent."""
        return list(self._in_flight.values())

    def wait_into_grad(self) -> None:
        """Wait for the buckets that no step was given, and put their gradients where the plain loop has them."""
        for bucket in self.flights:
            bucket.wait_into_grad()

    # What DDP calls.

    def communicate(
        self, bucket: SomeBucket, group: dist.ProcessGroup, divisor: int
    ) -> torch.futures.Future[torch.Tensor] | None:
        ddp = self._ddp()
        if ddp is None or ddp._join_config.enable:
            return None  # ranks that have joined help with DDP's own mean
        index, buffer, members = bucket.index(), bucket.buffer(), bucket.parameters()
        if index == 0:
            # Here, and not in attach(): ranks that train in different ways have found that out before.
            self._group = group_beside(group, members[0].device)
            self._begin()
        assert self._collectives is not None
        assert self._group is not None
        if self._layout.differs(index, members):
            self._collectives.keep_order(index)
        nbytes = 0 if buffer.is_sparse else buffer.numel() * buffer.element_size()
        self._plan.times.bucket_is_ready(nbytes)
        launch = partial(_start, buffer, self._group, divisor, self._reduce_dtype)
        collective = OrderedCollective(launch, nbytes)
        device = members[0].device
        if bucket.is_last():
            # Before it is decided whether this bucket crosses: with too few buckets the layout has not repeated.
            self._layout.end()
            self._plan.end(self._layout)
        self._collectives.add(index, collective)
        if bucket.is_last():
            exchange = self._plan.exchange_times(self._layout.repetitions, self._group, device)
            if exchange is not None:
                self._collectives.add(index + 1, exchange)
        # A parameter without a gradient here may have been used on another rank: DDP's own end needs the mean then.
        crosses = self._layout.repeats and self._plan.crosses
        if not crosses or buffer.is_sparse or any(p.grad is None for p in members):
            return collective.future(device)
        self._made[index] = HeldBucket(self._parameters.among(members), members, collective)
        # A future that is done: DDP's own end does not wait for the sum, and leaves views of a bucket that is still
        # written in .grad. ``take_off`` comes right after that end, before the loop can read them.
        done = future_on(device)
        done.set_result(buffer)
        return done

    def launched(self, bucket: SomeBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """Nothing is waited for in backward."""

    def _begin(self) -> None:
        last = self._collectives
        if last is not None and last.failure is not None:
            raise InstepError(
                "the buckets of an earlier backward were not all reduced (see the error it raised), and ranks may "
                "have sent different ones since. Build DistributedDataParallel anew on all ranks, and attach it, after "
                "loading a checkpoint"
            ) from last.failure
        if last is not None:
            self._plan.times.sent(*last.busy())
        self._plan.begin(self._layout)
        self._layout.begin()
        self._made = {}
        timed = self._recorder() is not None or will_exchange(self._layout.repetitions + 2)
        in_order = self._layout.repeats and self._plan.crosses
        self._collectives = OrderedCollectives(self._plan.order if in_order else [], timed=timed)
        current().at(Phase.AFTER_DDP, self._after_ddp_ended, self._failed)

    def _after_ddp_ended(self) -> None:
        for bucket in self._made.values():
            bucket.take_off(self._when_used)
        self._in_flight = {index: self._made[index] for index in self._plan.order if index in self._made}
        self._made = {}

    def _failed(self) -> None:
        for bucket in self._made.values():
            bucket.drop()
        self._made = {}
        if not self._layout.is_complete and self._collectives is not None:
            self._collectives.abandon(InstepError("backward raised before all of its buckets were made"))

    def _used(self, operation: str, args: object) -> None:
        self.wait_into_grad()

    def _drain(self) -> None:
        """Return when nothing writes DDP's buffers any more."""
        if self._collectives is None or self._collectives.is_drained:
            return
        sent = self._collectives.drain()
        recorder = self._recorder()
        if recorder is not None:
            for members, collective in zip(self._layout.last, sent, strict=False):
                if collective.end:
                    names = [attached.spec.name for attached in self._parameters.with_ids(members)]
                    recorder("communication", names, collective.start, collective.end)


def _start(
    buffer: torch.Tensor, group: dist.ProcessGroup, divisor: int, reduce_dtype: torch.dtype | None
) -> torch.futures.Future[Any]:
    if divisor != 1 or reduce_dtype is not None or buffer.is_sparse:
        return cast_mean_allreduce(buffer, group, divisor, reduce_dtype)
    # Its result lies in the buffer: nothing is left to do where it arrives, on a thread of the backend's.
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future
