"""Gradients that are final once DistributedDataParallel has reduced them.

Buckets are DDP's own. They are stepped where backward ends, in the order in which they were sent, as soon as they have
arrived: while some are stepped the later ones are still on their way. No weight changes while backward still runs.
"""

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported if available
from torch.nn.parallel import DistributedDataParallel

from instep._core.engine import at_end_of_backward, graph_task
from instep._core.parameters import AttachedParameter
from instep._core.plan import Bucket
from instep._core.transaction import Recorder, Transaction
from instep.comm_hooks import mean_allreduce
from instep.errors import AttachError


class _HookSlot:
    """What DDP's one communication hook is registered with: DDP gives the hook no way back, so it stays.

    With no source it is the plain mean that DDP computes without a hook. A copy of it is empty.
    """

    __slots__ = ("__weakref__", "_active", "_ddp", "source")

    def __init__(self, ddp: DistributedDataParallel | None = None) -> None:
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._active = 0
        self.source: DDPSource | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "_HookSlot":
        return _HookSlot()

    def __reduce__(self) -> tuple[type["_HookSlot"], tuple[()]]:
        return _HookSlot, ()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = None if self._ddp is None else self._ddp()
        assert ddp is not None, "the reducer that calls this belongs to the DDP instance"
        future = mean_allreduce(bucket.buffer(), ddp.process_group, self._divisor(ddp, bucket))
        if self.source is not None:
            self.source.launched(bucket, future)
        return future

    def _divisor(self, ddp: DistributedDataParallel, bucket: GradBucket) -> int:
        """The world size, or in ``join(divide_by_initial_world_size=False)`` the number of ranks still active."""
        if not ddp._join_config.enable or ddp._divide_by_initial_world_size:
            return dist.get_world_size(ddp.process_group)
        if bucket.index() == 0:
            # A rank that has joined calls the hook outside of any backward, to match the others' collectives.
            active = torch.tensor([0 if graph_task() is None else 1], device=bucket.buffer().device)
            dist.all_reduce(active, group=ddp.process_group)
            self._active = int(active.item())
        return self._active


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _HookSlot]" = weakref.WeakKeyDictionary()


def _communicate(slot: _HookSlot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return slot.reduce(bucket)


class _InFlight(NamedTuple):
    future: torch.futures.Future[torch.Tensor]
    parameters: tuple[AttachedParameter, ...]
    gradients: tuple[torch.Tensor, ...]


def _as_they_arrive(in_flight: Sequence[_InFlight]) -> Iterator[list[_InFlight]]:
    """In the order of sending: the next one, with those behind it that have arrived already.

    One call of the optimizer for all of these costs less than one each. Not on accelerators, where a future is done
    as soon as its work is queued.
    """
    start = 0
    while start < len(in_flight):
        end = start + 1
        on_cpu = in_flight[start].gradients[0].device.type == "cpu"
        while on_cpu and end < len(in_flight) and in_flight[end].future.done():
            end += 1
        yield list(in_flight[start:end])
        start = end


def _fetch(flights: Sequence[_InFlight]) -> None:
    """Wait for the buckets, and hand their slices to the parameters. Raises if a communication failed."""
    for flight in flights:
        flight.future.wait()
    for flight in flights:
        for attached, gradient in zip(flight.parameters, flight.gradients, strict=True):
            attached.get().grad = gradient


class DDPSource:
    """One communication hook on one DDP instance."""

    def __init__(
        self, transaction: Transaction, parameters: Sequence[AttachedParameter], ddp: DistributedDataParallel
    ) -> None:
        self._transaction = transaction
        self._ddp = weakref.ref(ddp)
        self._by_id = {id(attached.get()): attached for attached in parameters}
        self._in_flight: list[_InFlight] = []
        # Until DDP has shown its buckets: the one that holds everything, as in its first backward.
        self._buckets = {0: Bucket("ddp", tuple(attached.spec for attached in parameters))}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for _, bucket in sorted(self._buckets.items()))

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        slot = _slots.get(ddp)
        if slot is None:
            slot = _HookSlot(ddp)
            try:
                ddp.register_comm_hook(slot, _communicate)
            except RuntimeError as error:
                raise AttachError(
                    "this DistributedDataParallel already has a communication hook, and DDP takes only one. Build it "
                    "again without register_comm_hook, and attach before any other hook is registered"
                ) from error
            _slots[ddp] = slot
        elif slot.source is not None:
            raise AttachError(
                "this DistributedDataParallel is already attached. Give all its optimizers to one call: "
                "attach(model, [first, second])"
            )
        slot.source = self

    def disconnect(self) -> None:
        ddp = self._ddp()
        slot = None if ddp is None else _slots.get(ddp)
        if slot is not None and slot.source is self:
            slot.source = None

    def refresh(self) -> None:
        """DDP fixes its parameters when it is constructed."""

    def begin_step(self) -> None:
        """Nothing is counted from step to step."""

    def launched(self, bucket: GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """A bucket's all-reduce is under way."""
        if graph_task() is None:
            return  # a joined rank only helps the others; join() copies their weights to it at the end
        if bucket.index() == 0:
            self._in_flight.clear()  # of a backward that raised before it came to an end
            self._buckets = {}
        parameters = bucket.parameters()
        known = [self._by_id.get(id(parameter)) for parameter in parameters]
        self._buckets[bucket.index()] = Bucket("ddp", tuple(a.spec for a in known if a is not None))
        used = [
            (attached, gradient)
            for attached, parameter, gradient in zip(known, parameters, _slices(bucket), strict=True)
            # No .grad here: unused on this rank. Only DDP's own end of backward knows whether another rank used
            # it, and sets .grad if so: optimizer.step() then steps it.
            if attached is not None and parameter.grad is not None
        ]
        if self._transaction.recorder is not None:
            _record(self._transaction.recorder, f"bucket {bucket.index()}", future)
        if used:
            self._in_flight.append(_InFlight(future, *map(tuple, zip(*used, strict=True))))
        if bucket.is_last():
            at_end_of_backward(self._drain, self._raised)

    def _drain(self) -> None:
        """Step the buckets as they arrive.

        DDP's own end of backward comes after this and needs ``.grad`` as it is, so nothing is raised here and
        no gradient is spent: either would leave DDP unusable.
        """
        try:
            if self._transaction.arrive([a for flight in self._in_flight for a in flight.parameters]):
                for flights in _as_they_arrive(self._in_flight):
                    parameters = [a for flight in flights for a in flight.parameters]
                    if not self._transaction.apply(parameters, partial(_fetch, flights)):
                        break
        except BaseException as error:
            self._transaction.fail(error)
        at_end_of_backward(self._settle, self._raised)

    def _settle(self) -> None:
        """DDP is done with this backward: spend the applied gradients, and raise what went wrong."""
        for flight in self._in_flight:
            self._transaction.spend(a for a in flight.parameters if self._transaction.is_applied(a))
        self._in_flight.clear()
        self._transaction.streams.join()
        self._transaction.raise_failure()

    def _raised(self) -> None:
        self._in_flight.clear()
        self._transaction.backward_raised()


def _record(recorder: Recorder, name: str, future: torch.futures.Future[torch.Tensor]) -> None:
    started = perf_counter()
    future.add_done_callback(lambda _: recorder("communication", name, started, perf_counter()))


def _slices(bucket: GradBucket) -> list[torch.Tensor]:
    """The bucket's gradients, one for each of its parameters, as views of its buffer."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.is_sparse:
        return [buffer]
    if all(parameter.is_contiguous() and not parameter.is_complex() for parameter in parameters):
        return bucket.gradients()
    # gradients() knows contiguous reals only. The reducer keeps a dense parameter's own strides (channels_last), and
    # complex ones as pairs of reals (torch/csrc/distributed/c10d/reducer.cpp, initialize_bucket_views).
    slices, offset = [], 0
    for parameter in parameters:
        layout = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
        if torch.empty_like(layout, device="meta").stride() == layout.stride():
            view = buffer.as_strided(layout.shape, layout.stride(), buffer.storage_offset() + offset)
        else:
            view = buffer.narrow(0, offset, layout.numel()).view(layout.shape)
        slices.append(torch.view_as_complex(view) if parameter.is_complex() else view)
        offset += layout.numel()
    return slices
