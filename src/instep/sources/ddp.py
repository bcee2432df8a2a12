"""Gradients that are final once DistributedDataParallel has reduced them.

Buckets are DDP's own. They are stepped where backward ends, in the order in which they were sent, as soon as they have
arrived: while some are stepped the later ones are still on their way. No weight changes while backward still runs.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported if available
from torch.nn.parallel import DistributedDataParallel

from instep._core.parameters import AttachedParameter
from instep._core.placeholders import Placeholder
from instep._core.plan import Bucket
from instep._core.transaction import Recorder
from instep.comm_hooks import cast_mean_allreduce
from instep.errors import AttachError
from instep.sources import Sink
from instep.sources.reductions import Divisor, Reduction, Reductions, as_they_arrive, slices_of

CommHook = tuple[Any, Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]]
"""A DDP communication hook with its state, in the order in which ``register_comm_hook`` takes them."""


class _HookSlot:
    """What DDP's one communication hook is registered with: DDP gives the hook no way back, so it stays.

    With no source it is the user's own hook, or the plain mean that DDP computes without one. A copy of it is empty.
    """

    __slots__ = ("__weakref__", "_ddp", "_divisor", "_views", "comm_hook", "reduce_dtype", "source")

    def __init__(self, ddp: DistributedDataParallel | None = None) -> None:
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._divisor = Divisor()
        self._views: dict[int, int] = {}
        self.comm_hook: CommHook | None = None
        self.reduce_dtype: torch.dtype | None = None
        self.source: DDPSource | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "_HookSlot":
        return _HookSlot()

    def __reduce__(self) -> tuple[type["_HookSlot"], tuple[()]]:
        return _HookSlot, ()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = None if self._ddp is None else self._ddp()
        assert ddp is not None, "the reducer that calls this belongs to the DDP instance"
        if self.comm_hook is None:
            buffer, divisor = bucket.buffer(), self._divisor(ddp, bucket)
            if self.reduce_dtype is None and self._divide_views(bucket, divisor):
                divisor = 1
            future = cast_mean_allreduce(buffer, ddp.process_group, divisor, self.reduce_dtype)
        else:
            state, hook = self.comm_hook
            future = hook(state, bucket)
        if self.source is not None:
            self.source.launched(bucket, future)
        return future

    def before_backward(self) -> None:
        """Note which gradients were kept from the last backward and lie in a bucket: what is added to them there the
        reducer divides in place, where it multiplies others by ``1 / divisor`` (``mark_variable_ready_dense``)."""
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and ddp.gradient_as_bucket_view:
            with torch._C.DisableTorchFunctionSubclass():
                self._views = {
                    id(p): gradient.untyped_storage().data_ptr()
                    for p in ddp._module_parameters
                    if (gradient := p.grad) is not None
                    and not isinstance(gradient, Placeholder)
                    and not gradient.is_sparse
                }

    def _divide_views(self, bucket: GradBucket, divisor: int) -> bool:
        """Divide the bucket as the reducer does, if any of it was kept."""
        buffer = bucket.buffer()
        if not self._views or buffer.is_sparse:
            return False
        parameters, storage = bucket.parameters(), buffer.untyped_storage().data_ptr()
        kept = [self._views.get(id(p)) == storage for p in parameters]
        if not any(kept):
            return False
        for gradient, was_kept in zip(slices_of(buffer, parameters), kept, strict=True):
            if was_kept:
                gradient.div_(divisor)
            else:
                gradient.mul_(1.0 / divisor)
        return True


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _HookSlot]" = weakref.WeakKeyDictionary()


def _communicate(slot: _HookSlot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return slot.reduce(bucket)


class DDPSource:
    """One communication hook on one DDP instance.

    Args:
        comm_hook: reduces the buckets in place of DDP's own mean. It stays with the DDP instance.
        reduce_dtype: what the mean is computed and sent in; ``None``: as the gradients are.
    """

    def __init__(
        self,
        sink: Sink,
        parameters: Sequence[AttachedParameter],
        ddp: DistributedDataParallel,
        comm_hook: CommHook | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._sink = sink
        self._ddp = weakref.ref(ddp)
        self._comm_hook = comm_hook
        self._reduce_dtype = reduce_dtype
        self._sent = False
        # What is in a bucket's slices has the layout of .grad itself there.
        self._final = ddp.gradient_as_bucket_view or ddp.device_type == "cpu"
        self._by_id = {id(attached.get()): attached for attached in parameters}
        self._reductions = Reductions(self._step, self._settle, lambda _: sink.backward_raised())
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
                    "again without register_comm_hook, and give the hook to attach(…, comm_hook=(state, hook)), which "
                    "runs it before the step"
                ) from error
            _slots[ddp] = slot
        elif slot.source is not None:
            raise AttachError(
                "this DistributedDataParallel is already attached. Give all its optimizers to one call: "
                "attach(model, [first, second])"
            )
        if slot.comm_hook is not None and self._comm_hook is None and self._reduce_dtype is not None:
            raise AttachError(
                "this DistributedDataParallel keeps the comm_hook of an earlier attach, which decides how gradients "
                "are sent, so mixed_precision cannot: give comm_hook=(state, hook) again, or build the instance anew"
            )
        slot.source = self
        slot.comm_hook = self._comm_hook or slot.comm_hook
        slot.reduce_dtype = self._reduce_dtype

    def disconnect(self) -> None:
        ddp = self._ddp()
        slot = None if ddp is None else _slots.get(ddp)
        if slot is not None and slot.source is self:
            slot.source = slot.reduce_dtype = None

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        ddp = self._ddp()
        reduced = set() if ddp is None else managed_by(ddp)
        self._by_id.update((id(a.get()), a) for a in parameters if id(a.get()) in reduced)
        return [a for a in parameters if id(a.get()) not in reduced]

    def refresh(self) -> None:
        """DDP fixes its parameters when it is constructed."""

    def begin_step(self) -> None:
        """Nothing is counted from step to step."""

    def before_backward(self) -> None:
        """A backward begins: no gradient has changed yet."""
        ddp = self._ddp()
        slot = None if ddp is None else _slots.get(ddp)
        if slot is not None:
            slot.before_backward()

    def reduced(self) -> bool:
        """Whether buckets were sent since this was last asked."""
        sent, self._sent = self._sent, False
        return sent

    def launched(self, bucket: GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """A bucket's communication is under way."""
        reduction = self._reductions.launched(bucket, future)
        if reduction is None:
            return
        self._sent = True
        if reduction.index == 0:
            self._buckets = {}
        known = (self._by_id.get(id(parameter)) for parameter in bucket.parameters())
        self._buckets[reduction.index] = Bucket("ddp", tuple(a.spec for a in known if a is not None))
        if self._sink.recorder is not None:
            _record(self._sink.recorder, f"bucket {reduction.index}", future)

    def _step(self, reductions: Sequence[Reduction]) -> None:
        if self._sink.waits_for_all:
            return
        try:
            if self._sink.arrive(self._mine(reductions)):
                together = [[one] for one in reductions] if self._sink.by_bucket else as_they_arrive(reductions)
                for arrived in together:
                    mine = self._mine(arrived)
                    as_left = [attached.get().grad for attached in mine]
                    done = not mine or self._sink.apply(mine, partial(self._fetch, arrived), final=self._final)
                    for attached, gradient in zip(mine, as_left, strict=True):
                        attached.get().grad = gradient
                    if not done:
                        break
        except BaseException as error:
            self._sink.fail(error)

    def _step_all(self, reductions: Sequence[Reduction]) -> None:
        mine = self._mine(reductions)
        try:
            if self._sink.arrive(mine):
                self._sink.know_total()
                self._sink.apply(mine)
        except BaseException as error:
            self._sink.fail(error)

    def _mine(self, reductions: Sequence[Reduction]) -> list[AttachedParameter]:
        return [self._by_id[id(p)] for reduction in reductions for p in reduction.parameters if id(p) in self._by_id]

    def _fetch(self, reductions: Sequence[Reduction]) -> None:
        # All of them before any is used: a communication that failed must not leave some of these stepped.
        gradients = [reduction.gradients() for reduction in reductions]
        for reduction, reduced in zip(reductions, gradients, strict=True):
            for parameter, gradient in zip(reduction.parameters, reduced, strict=True):
                if id(parameter) in self._by_id:
                    parameter.grad = gradient

    def _settle(self, reductions: Sequence[Reduction]) -> None:
        """Spend the applied gradients, and raise what went wrong."""
        if self._sink.waits_for_all:
            self._step_all(reductions)
        self._sink.spend(a for a in self._mine(reductions) if self._sink.is_applied(a))
        self._sink.streams.join()
        self._sink.raise_failure()


def managed_by(ddp: DistributedDataParallel) -> set[int]:
    """The parameters that ``ddp`` may reduce. Those that were frozen when it was built never come in a bucket, and are
    left to ``optimizer.step()``."""
    return {id(p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}


def _record(recorder: Recorder, name: str, future: torch.futures.Future[torch.Tensor]) -> None:
    started = perf_counter()
    future.add_done_callback(lambda _: recorder("communication", name, started, perf_counter()))
