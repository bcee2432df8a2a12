"""Gradients of DistributedDataParallel that are still on their way when ``backward()`` returns.

DDP is told that each bucket is reduced already, so that its backward ends; the buckets are reduced in its own buffers
meanwhile, in an order that suits the next forward, and are waited for where a gradient or a weight is used.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from instep._autograd.backward import Phase, current
from instep._autograd.engine import graph_task
from instep._autograd.hooks import BoundHook
from instep._life.weak import WeakMethod, weakly
from instep._optim.parameters import AttachedParameter
from instep._optim.plan import Bucket
from instep._ranks.groups import group_beside, require_another
from instep._step.recorder import Recorder
from instep.comm_hooks import cast_mean_allreduce
from instep.errors import InstepError
from instep.sources.crossing.held_bucket import HeldBucket
from instep.sources.crossing.layout import Layout
from instep.sources.crossing.ordered_collectives import OrderedCollective, OrderedCollectives, future_on
from instep.sources.crossing.plan import SendingPlan, will_exchange
from instep.sources.ddp.hook_slot import before_backward, release, take
from instep.sources.ddp.reductions import SomeBucket
from instep.sources.ddp.source import managed_by
from instep.sources.wrapped import WrappedParameters, as_bucket


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
