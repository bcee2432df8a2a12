"""Gradients of DistributedDataParallel that are still on their way when ``backward()`` returns.

DDP is told that each bucket is reduced already, so that its backward ends; the buckets are reduced in its own buffers
meanwhile, in an order that suits the next forward, and are waited for where somebody needs them.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import add
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from instep._autograd.backward import Phase, current
from instep._autograd.engine import graph_task
from instep._autograd.hooks import BoundHook
from instep._autograd.placeholders import BeforeUse, HeldGradient
from instep._life.weak import WeakMethod, weakly
from instep._optim.parameters import AttachedParameter
from instep._optim.plan import Bucket
from instep._ranks.groups import group_beside
from instep._step.recorder import Recorder
from instep.comm_hooks import cast_mean_allreduce, mean_allreduce
from instep.errors import InstepError
from instep.sources.crossing.order import Timed, best_order, deepest_then_shallowest
from instep.sources.crossing.ordered_collectives import OrderedCollectives, Sent, future_on
from instep.sources.crossing.trial import Trial
from instep.sources.ddp.hook_slot import before_backward, release, take
from instep.sources.ddp.reductions import SomeBucket

# Times are exchanged, and the order is made anew, at these backwards, and every so many after them.
_FIRST_PLANS, _PLAN_EVERY = (1, 3, 7, 15, 31), 64


class InFlightBucket:
    """One bucket whose gradients may still be on their way.

    Attributes:
        parameters: the attached ones among its parameters.
    """

    __slots__ = ("_members", "_placeholders", "_sent", "parameters")

    def __init__(self, parameters: Sequence[AttachedParameter], members: Sequence[torch.Tensor], sent: Sent) -> None:
        self.parameters = tuple(parameters)
        self._members = tuple(members)
        self._placeholders: tuple[HeldGradient, ...] = ()
        self._sent = sent

    def take_off(self, used: Callable[[], BeforeUse | None]) -> None:
        """DDP has ended its backward, and set ``.grad``: who uses one before it has arrived is to be heard of."""
        self._placeholders = tuple(HeldGradient(_grad(p), used) for p in self._members)
        for parameter, placeholder in zip(self._members, self._placeholders, strict=True):
            parameter.grad = placeholder

    def gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """What ``.grad`` will be, when it has arrived; ``None`` if the loop has put something else there."""
        found = attached.get().grad
        return found.held if isinstance(found, HeldGradient) and any(found is p for p in self._placeholders) else None

    def wait(self) -> None:
        """Return when it has arrived. Raises what the communication raised."""
        self._sent.wait()

    def land(self) -> None:
        """Have ``.grad`` be what it is in the plain loop, where nobody has put something else there."""
        waiting = [
            (parameter, placeholder.held)
            for parameter, placeholder in zip(self._members, self._placeholders, strict=False)
            if parameter.grad is placeholder
        ]
        if not waiting:
            return
        try:
            self.wait()
        except BaseException:
            for parameter, _ in waiting:
                parameter.grad = None  # nobody must find half of it
            raise
        for parameter, gradient in waiting:
            parameter.grad = gradient


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
        self._by_id = {id(attached.get()): attached for attached in parameters}
        self._reduce_dtype = reduce_dtype
        self._recorder = recorder
        self._group: dist.ProcessGroup | None = None
        self._lane: OrderedCollectives | None = None
        self._drained = True
        self._handle: RemovableHandle | None = None
        self._flights: dict[int, InFlightBucket] = {}
        self._new: dict[int, InFlightBucket] = {}
        self._order: list[int] = []
        self._trial = Trial()
        self._crosses = False  # this backward returns before its buckets have arrived
        self._began = 0.0  # to send them
        # The buckets of the last backward, and those of the running one so far.
        self._layout: list[list[int]] = []
        self._found: list[list[int]] = []
        self._same = self._complete = False
        self._crossed = 0  # backwards with the same buckets as the one before
        # When things happened: for the order.
        self._forward_began = self._backward_began = 0.0
        self._forward_took = float("inf")
        self._ready: list[float] = []
        self._ready_in_all: list[float] = []  # the sums since the last plan, over so many backwards:
        self._measured = 0
        self._each = 0.0  # seconds for a byte
        self._send: list[float] = []
        self._agreed: tuple[Sent, torch.Tensor] | None = None
        self._when_used = WeakMethod(self._used)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they are sent."""
        if not self._layout:
            return (Bucket("ddp", tuple(attached.spec for attached in self._by_id.values())),)
        order = self._order if len(self._order) == len(self._layout) else range(len(self._layout))
        known = [[self._by_id[key].spec for key in self._layout[i] if key in self._by_id] for i in order]
        return tuple(Bucket("ddp", tuple(specs)) for specs in known)

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        take(ddp, self, None, self._reduce_dtype)
        try:
            self._group = group_beside(ddp.process_group, next(ddp.module.parameters()).device)
        except BaseException:
            release(ddp, self)
            raise
        self._handle = ddp.module.register_forward_hook(BoundHook(weakly(self._after_forward)))

    def disconnect(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._drain()
        for flight in self._flights.values():
            with suppress(Exception):
                flight.land()
        self._flights.clear()
        release(self._ddp(), self)

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        ddp = self._ddp()
        reduced = set() if ddp is None else {id(p) for p in ddp.module.parameters()}
        self._by_id.update((id(a.get()), a) for a in parameters if id(a.get()) in reduced)
        return [a for a in parameters if id(a.get()) not in reduced]

    def refresh(self) -> None:
        """A forward begins: gradients that nobody has stepped are the plain loop's."""
        self.land()
        self._forward_began = perf_counter()

    def begin_step(self) -> None:
        """Nothing is counted from step to step."""

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """DDP's next backward writes its buckets, and may begin where nobody sees it. In most loops nothing is left to
        wait for: the optimizer's step has been handed what was sent, and this forward has read its weights."""
        if torch.is_grad_enabled() and graph_task() is None and not torch.compiler.is_compiling():
            self.land()
            self._drain()

    def before_backward(self) -> None:
        """DDP is about to write its buckets again."""
        self.land()
        self._drain()
        self._flights = {}
        before_backward(self._ddp())
        self._backward_began = perf_counter()
        if self._forward_began:
            self._forward_took = min(self._forward_took, self._backward_began - self._forward_began)
            self._forward_began = 0.0

    @property
    def waited(self) -> bool:
        """Whether the last backward has waited for all of its buckets, since that takes less time."""
        return self._same and not self._crosses

    @property
    def flights(self) -> list[InFlightBucket]:
        """Those of the last backward, in the order in which they are sent."""
        return list(self._flights.values())

    def land(self) -> None:
        """Wait for what was not handed over, and put it where the plain loop has it."""
        for flight in self.flights:
            flight.land()

    # What DDP calls.

    def communicate(
        self, bucket: SomeBucket, group: dist.ProcessGroup, divisor: int
    ) -> torch.futures.Future[torch.Tensor] | None:
        ddp = self._ddp()
        if ddp is None or ddp._join_config.enable:
            return None  # ranks that have joined help with DDP's own mean
        index, buffer, members = bucket.index(), bucket.buffer(), bucket.parameters()
        if index == 0:
            self._begin()
        assert self._lane is not None
        assert self._group is not None
        found = [id(p) for p in members]
        if self._same and (index >= len(self._layout) or self._layout[index] != found):
            self._same = False
            self._lane.keep_order(index)
        self._found.append(found)
        self._ready.append(perf_counter() - self._backward_began)
        self._send.append(float(buffer.numel() * buffer.element_size()) if not buffer.is_sparse else 0.0)
        sent = Sent(partial(_start, buffer, self._group, divisor, self._reduce_dtype), int(self._send[-1]))
        if bucket.is_last():
            self._end()
        self._lane.add(index, sent)
        if bucket.is_last():
            self._agree(members[0].device)
        # DDP ends its backward with what only other ranks used: it needs the mean then.
        if not (self._same and self._crosses) or buffer.is_sparse or any(p.grad is None for p in members):
            return sent.future(members[0].device)
        mine = [self._by_id[key] for key in found if key in self._by_id]
        self._new[index] = InFlightBucket(mine, members, sent)
        done = future_on(members[0].device)
        done.set_result(buffer)
        return done

    def launched(self, bucket: SomeBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """Nothing is waited for in backward."""

    def _begin(self) -> None:
        if self._lane is not None and self._lane.failure is not None:
            raise InstepError(
                "the buckets of an earlier backward were not all reduced (see the error it raised), and ranks may "
                "have sent different ones since. Build DistributedDataParallel anew on all ranks, and attach it, after "
                "loading a checkpoint"
            ) from self._lane.failure
        if self._lane is not None:
            nbytes, seconds = self._lane.busy()
            self._each = seconds / nbytes if nbytes else self._each
        self._adopt_plan()
        now = perf_counter()
        if self._same:
            self._trial.took(self._crossed, self._crosses, now - self._began)
        self._began = now
        self._crosses = self._trial.first(self._crossed + 1)
        self._same = len(self._layout) > 0
        self._found, self._new, self._complete = [], {}, False
        self._ready, self._send = [], []
        timed = self._recorder() is not None or _planned(self._crossed + 2)
        self._lane = OrderedCollectives(self._order if self._same and self._crosses else [], timed=timed)
        self._drained = False
        current().at(Phase.AFTER_DDP, self._after_ddp_ended, self._failed)

    def _end(self) -> None:
        self._complete = True
        self._same = self._same and len(self._found) == len(self._layout)
        self._crossed = self._crossed + 1 if self._same else 0
        if self._same:
            self._ready_in_all = list(map(add, self._ready_in_all, self._ready))
            self._measured += 1
        else:
            self._ready_in_all, self._measured = [0.0] * len(self._found), 0
            # Until times are known: half of them while backward makes them, the rest as the next forward reads them.
            self._order = deepest_then_shallowest(len(self._found), -(-len(self._found) // 2))
        self._layout = self._found

    def _after_ddp_ended(self) -> None:
        for flight in self._new.values():
            flight.take_off(self._when_used)
        self._flights = {index: self._new[index] for index in self._order if index in self._new}
        self._new = {}

    def _failed(self) -> None:
        for flight in self._new.values():
            for attached in flight.parameters:
                attached.get().grad = None  # nobody can say what it is
        self._new = {}
        if not self._complete and self._lane is not None:
            self._lane.abandon(InstepError("backward raised before all of its buckets were made"))

    def _used(self, operation: str, args: object) -> None:
        self.land()

    def _drain(self) -> None:
        """Return when nothing writes DDP's buffers any more."""
        if self._lane is None or self._drained:
            return
        arrived, self._drained = self._lane.drain(), True
        recorder = self._recorder()
        if recorder is not None:
            for members, sent in zip(self._layout, arrived, strict=False):
                if sent.end:
                    names = [self._by_id[key].spec.name for key in members if key in self._by_id]
                    recorder("communication", names, sent.start, sent.end)

    # The order.

    def _agree(self, device: torch.device) -> None:
        """Exchange times now and then, as one more bucket: the order must be the same on all ranks."""
        if not _planned(self._crossed):
            return
        assert self._lane is not None
        assert self._group is not None
        # As backward makes them beside communication, which takes a part of the core on CPU: over several backwards.
        ready = [total / self._measured for total in self._ready_in_all]
        self._ready_in_all, self._measured = [0.0] * len(ready), 0
        times = [self._each, self._forward_took, *self._trial.times(), *ready]
        exchanged = torch.tensor(times, dtype=torch.float64, device=device)

        # Their mean: an all-reduce has the same result on all ranks, bit for bit.
        sent = Sent(partial(mean_allreduce, exchanged, self._group, self._group.size()), 0)
        self._agreed = sent, exchanged
        self._lane.add(len(self._found), sent)

    def _adopt_plan(self) -> None:
        agreed, self._agreed = self._agreed, None
        if agreed is None:
            return
        sent, exchanged = agreed
        sent.wait()
        each, forward, crossing, waiting, *ready = exchanged.tolist()
        self._trial.keep(self._crossed, crossing, waiting)
        backward = max(ready[-1], 1e-9)
        # The forward reads in the opposite order, at about the same pace.
        reads = [backward + (backward - at) * forward / backward for at in ready]
        timed = [Timed(at, each * nbytes, read) for at, nbytes, read in zip(ready, self._send, reads, strict=True)]
        self._order = best_order(timed)


def _planned(crossed: int) -> bool:
    """Whether times are exchanged in this one of the backwards with the same buckets as the one before."""
    return crossed in _FIRST_PLANS or (crossed > 0 and crossed % _PLAN_EVERY == 0)


def _start(
    buffer: torch.Tensor, group: dist.ProcessGroup, divisor: int, reduce_dtype: torch.dtype | None
) -> torch.futures.Future[Any]:
    if divisor != 1 or reduce_dtype is not None or buffer.is_sparse:
        return cast_mean_allreduce(buffer, group, divisor, reduce_dtype)
    # Its result lies in the buffer: nothing is left to do where it arrives, on a thread of the backend's.
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None, "DDP has set it: this rank used the parameter"
    return gradient
