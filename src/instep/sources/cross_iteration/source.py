"""Gradients of DistributedDataParallel that are still on their way when ``backward()`` returns.

DDP is told that each bucket is reduced already, so that its backward ends. The buckets are reduced in its own buffers
meanwhile, in an order that suits the next forward, and are waited for where a gradient or a weight is used: a
``HeldGradient`` stands in ``.grad`` until then.
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

from instep._optim.parameters import AttachedParameter
from instep._ranks.process_groups import group_beside, require_another
from instep._step.state import StepTimes
from instep._torch.engine import Phase, current, graph_task
from instep._torch.hooks import BoundHook
from instep._torch.lifetime import WeakMethod, weakly
from instep._torch.placeholders import BeforeUse, HeldGradient
from instep.buckets import Bucket
from instep.comm_hooks import cast_mean_allreduce
from instep.errors import InstepError
from instep.sources import LaunchedBucket, WrappedParameters, as_bucket
from instep.sources.cross_iteration.collectives import OrderedCollective, OrderedCollectives, future_on
from instep.sources.cross_iteration.order import BucketHistory, SendingPlan, will_exchange
from instep.sources.ddp.buckets import GradBucketLike
from instep.sources.ddp.instance import managed_by
from instep.sources.ddp.reducer import before_backward, connect_listener, disconnect_listener


class CrossingSource:
    """The gradients of one DDP instance, which cross from one iteration into the next.

    Its buckets are sent over a process group of their own: what the loop sends must not come between them on one rank,
    and before or after them on another.

    Args:
        reduce_dtype: what the mean is computed and sent in; ``None``: as the gradients are.
    """

    def __init__(
        self,
        parameters: Sequence[AttachedParameter],
        ddp: DistributedDataParallel,
        reduce_dtype: torch.dtype | None,
        times: StepTimes,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._parameters = WrappedParameters(parameters)
        self._reduce_dtype = reduce_dtype
        self._times = times
        self._group: dist.ProcessGroup | None = None
        self._handle: RemovableHandle | None = None
        self._history = BucketHistory()
        self._plan = SendingPlan()
        self._collectives: OrderedCollectives | None = None  # those of the last backward
        # By DDP's number: of the running backward, until DDP's own end; and of the last one, as they are sent.
        self._made: dict[int, HeldBucket] = {}
        self._in_flight: dict[int, HeldBucket] = {}
        self._when_used = WeakMethod(self._used)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they are sent."""
        members = self._history.last
        if not members:
            return (as_bucket("ddp", self._parameters),)
        order = self._plan.order if len(self._plan.order) == len(members) else range(len(members))
        return tuple(as_bucket("ddp", self._parameters.with_ids(members[number])) for number in order)

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        connect_listener(ddp, self, None, self._reduce_dtype)
        try:
            require_another(ddp.process_group, next(ddp.module.parameters()).device)
        except BaseException:
            disconnect_listener(ddp, self)
            raise
        self._handle = ddp.module.register_forward_hook(BoundHook(weakly(self._after_forward)))

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        ddp = self._ddp()
        return self._parameters.adopt(parameters, set() if ddp is None else managed_by(ddp))

    # In the forward.

    def refresh(self) -> None:
        """A forward begins: gradients that no step has taken are the plain loop's."""
        self.wait_into_grad()
        self._plan.times.forward_begins()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """DDP's next backward writes its buckets, and may begin unseen. In most loops nothing is left to wait for: the
        optimizer's step was given what was sent, and this forward has read its weights."""
        if torch.is_grad_enabled() and graph_task() is None and not torch.compiler.is_compiling():
            self.wait_into_grad()
            self._drain()

    # In backward: DDP fills its buckets.

    def before_backward(self) -> None:
        """DDP is about to write its buckets again."""
        self.wait_into_grad()
        self._drain()
        self._in_flight = {}
        before_backward(self._ddp())
        self._plan.times.backward_begins()

    def communicate(
        self, bucket: GradBucketLike, group: dist.ProcessGroup, divisor: int
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
        if self._history.differs(index, members):
            self._collectives.keep_order(index)
        nbytes = 0 if buffer.is_sparse else buffer.numel() * buffer.element_size()
        self._plan.times.bucket_is_ready(nbytes)
        launch = partial(_start, buffer, self._group, divisor, self._reduce_dtype)
        collective = OrderedCollective(launch, nbytes)
        device = members[0].device
        if bucket.is_last():
            # Before it is decided whether this bucket crosses: with too few buckets the layout has not repeated.
            self._history.end()
            self._plan.end(self._history)
        self._collectives.add(index, collective)
        if bucket.is_last():
            exchange = self._plan.exchange_times(self._history.repetitions, self._group, device)
            if exchange is not None:
                self._collectives.add(index + 1, exchange)
        # A parameter without a gradient here may have been used on another rank: DDP's own end needs the mean then.
        crosses = self._history.repeats and self._plan.crosses
        if not crosses or buffer.is_sparse or any(p.grad is None for p in members):
            return collective.future(device)
        self._made[index] = HeldBucket(self._parameters.among(members), members, collective)
        # A future that is done: DDP's own end does not wait for the sum, and leaves views of a bucket that is still
        # written in .grad. ``take_off`` comes right after that end, before the loop can read them.
        done = future_on(device)
        done.set_result(buffer)
        return done

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
        self._plan.begin(self._history)
        self._history.begin()
        self._made = {}
        timed = self._times.recorder is not None or will_exchange(self._history.repetitions + 2)
        in_order = self._history.repeats and self._plan.crosses
        self._collectives = OrderedCollectives(self._plan.order if in_order else [], timed=timed)
        current().at(Phase.AFTER_DDP, self._after_ddp_ended, self._failed)

    def launched(self, bucket: GradBucketLike, future: torch.futures.Future[torch.Tensor]) -> None:
        """Nothing is waited for in backward."""

    def begin_step(self) -> None:
        """Nothing is counted from step to step."""

    # After DDP's own end: gradients are on their way.

    def _after_ddp_ended(self) -> None:
        for bucket in self._made.values():
            bucket.take_off(self._when_used)
        self._in_flight = {index: self._made[index] for index in self._plan.order if index in self._made}
        self._made = {}

    @property
    def waited(self) -> bool:
        """Whether the last backward has waited for all of its buckets, since that takes less time."""
        return self._history.repeats and not self._plan.crosses

    @property
    def flights(self) -> "list[HeldBucket]":
        """The buckets of the last backward, in the order in which they are sent."""
        return list(self._in_flight.values())

    def wait_into_grad(self) -> None:
        """Wait for the buckets that no step was given, and put their gradients where the plain loop has them."""
        for bucket in self.flights:
            bucket.wait_into_grad()

    def _used(self, operation: str, args: object) -> None:
        self.wait_into_grad()

    # Where backward raises.

    def _failed(self) -> None:
        for bucket in self._made.values():
            bucket.drop()
        self._made = {}
        if not self._history.is_complete and self._collectives is not None:
            self._collectives.abandon(InstepError("backward raised before all of its buckets were made"))

    # Before the next backward, and after detach.

    def _drain(self) -> None:
        """Return when nothing writes DDP's buffers any more."""
        if self._collectives is None or self._collectives.is_drained:
            return
        sent = self._collectives.drain()
        recorder = self._times.recorder
        if recorder is not None:
            for members, collective in zip(self._history.last, sent, strict=False):
                if collective.end:
                    names = [attached.spec.name for attached in self._parameters.with_ids(members)]
                    recorder("communication", names, collective.start, collective.end)

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
        disconnect_listener(self._ddp(), self)


def _start(
    buffer: torch.Tensor, group: dist.ProcessGroup, divisor: int, reduce_dtype: torch.dtype | None
) -> torch.futures.Future[Any]:
    if divisor != 1 or reduce_dtype is not None or buffer.is_sparse:
        return cast_mean_allreduce(buffer, group, divisor, reduce_dtype)
    # Its result lies in the buffer: nothing is left to do where it arrives, on a thread of the backend's.
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future


class HeldBucket(LaunchedBucket[OrderedCollective]):
    """A bucket of DDP's whose gradients may arrive after ``backward()`` has returned. From the end of backward on a
    ``HeldGradient`` stands in ``.grad`` of each member, until the bucket was waited for.

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
