"""How a source is told of the buckets of a DDP instance: by a process group in the reducer, or by the instance's one
communication hook."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from instep._autograd.placeholders import Placeholder
from instep._autograd.tracing import untraced
from instep.comm_hooks import cast_mean_allreduce
from instep.errors import AttachError
from instep.sources.ddp.rebuilding import GradientsAside
from instep.sources.ddp.reducer_group import ReducerGroup
from instep.sources.ddp.reductions import BucketListener, Divisor, refuse_manual_finalization, slices_of, value_of

CommHook = tuple[Any, Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]]
"""A DDP communication hook with its state, in the order in which ``register_comm_hook`` takes them."""


class _HookSlot:
    """The state of DDP's one communication hook. DDP has no way to take a hook off: the slot stays, and sources come to
    it and leave it.

    Without a source the hook is the user's own, or the plain mean that DDP computes without one. A copy of a slot is
    empty: a copy of a DDP instance carries its hooks, and does not register them.

    Attributes:
        comm_hook: the user's; ``None``: the plain mean.
        reduce_dtype: what the plain mean is computed and sent in; ``None``: as the gradients are.
        source: is told of each bucket; ``None``: detached.
    """

    __slots__ = ("__weakref__", "_ddp", "_divisor", "_views", "comm_hook", "reduce_dtype", "source")

    def __init__(self, ddp: DistributedDataParallel | None = None) -> None:
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._divisor = Divisor()
        self._views: dict[int, int] = {}
        self.comm_hook: CommHook | None = None
        self.reduce_dtype: torch.dtype | None = None
        self.source: BucketListener | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "_HookSlot":
        return _HookSlot()

    def __reduce__(self) -> tuple[type["_HookSlot"], tuple[()]]:
        return _HookSlot, ()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the communication of a bucket that DDP has filled, and tell the source."""
        ddp = None if self._ddp is None else self._ddp()
        assert ddp is not None, "the reducer that calls this belongs to the DDP instance"
        if self.comm_hook is None:
            buffer, divisor = bucket.buffer(), self._divisor(ddp, bucket)
            if self.reduce_dtype is None and self._divide(ddp, bucket, divisor):
                divisor = 1  # is left to do
            own = None if self.source is None else self.source.communicate(bucket, ddp.process_group, divisor)
            if own is None:
                future = cast_mean_allreduce(buffer, ddp.process_group, divisor, self.reduce_dtype)
            else:
                # DDP takes the future of a hook only if it holds an object of Python's, and a backend's does not.
                future = own.then(value_of)
        else:
            state, hook = self.comm_hook
            future = hook(state, bucket)
        if self.source is not None:
            self.source.launched(bucket, future)
        return future

    def before_backward(self) -> None:
        """A backward begins: note which gradients were kept from the last one, and lie in a bucket. The reducer divides
        such a gradient in place once more was added, and multiplies the others by ``1 / divisor``
        (``mark_variable_ready_dense``): the last bit differs."""
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

    def _divide(self, ddp: DistributedDataParallel, bucket: GradBucket, divisor: int) -> bool:
        """Divide the bucket as the reducer does without a hook. ``False``: nothing was done, since the reducer
        multiplies all of this bucket by ``1 / divisor``, as the mean does that follows."""
        buffer = bucket.buffer()
        if _divides_at_once(ddp) and not buffer.is_sparse:
            buffer.div_(divisor)
            return True
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


def _divides_at_once(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer fills a bucket first, and then divides all of it: with an option of torch 2.13."""
    return bool(getattr(ddp, "batched_grad_copy", False))


def _refuse_lazy_views(ddp: DistributedDataParallel) -> None:
    """With both options DDP (since torch 2.15) multiplies some gradients by ``1 / divisor`` and divides others."""
    if getattr(ddp, "lazy_bucket_allocation", False) and ddp.gradient_as_bucket_view:
        raise AttachError(
            "DistributedDataParallel(lazy_bucket_allocation=True, gradient_as_bucket_view=True) computes the mean in a "
            "way that is not known here, and shard_state, mixed_precision and sparse gradients need to compute it. "
            "Build it without one of the two"
        )


_asides: "weakref.WeakKeyDictionary[DistributedDataParallel, GradientsAside]" = weakref.WeakKeyDictionary()
_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _HookSlot | ReducerGroup]" = weakref.WeakKeyDictionary()


@untraced  # a compiled function may call backward()
def _communicate(slot: _HookSlot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return slot.reduce(bucket)


def take(
    ddp: DistributedDataParallel,
    source: BucketListener,
    comm_hook: CommHook | None,
    reduce_dtype: torch.dtype | None,
    *,
    divides: bool = False,
) -> None:
    """Have ``source`` told of the buckets of ``ddp``.

    DDP's own mean is left to the reducer. Anything else takes DDP's communication hook, which is registered once.

    Args:
        divides: whether the source itself reduces, and divides.
    """
    refuse_manual_finalization(ddp)
    _take(ddp, source, comm_hook, reduce_dtype, divides)
    _asides[ddp] = GradientsAside(ddp)


def _take(
    ddp: DistributedDataParallel,
    source: BucketListener,
    comm_hook: CommHook | None,
    reduce_dtype: torch.dtype | None,
    divides: bool,
) -> None:
    slot = _slots.get(ddp)
    if slot is None:
        if comm_hook is None and reduce_dtype is None and not divides and ReducerGroup.fits(ddp):
            group = ReducerGroup(ddp, source)
            group.connect()
            _slots[ddp] = group
            return
        if comm_hook is None:
            _refuse_lazy_views(ddp)
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
    assert isinstance(slot, _HookSlot), "a ReducerGroup is dropped together with its source"
    if slot.comm_hook is not None and comm_hook is None and reduce_dtype is not None:
        raise AttachError(
            "this DistributedDataParallel keeps the comm_hook of an earlier attach, which decides how gradients "
            "are sent, so mixed_precision cannot: give comm_hook=(state, hook) again, or build the instance anew"
        )
    slot.source = source
    slot.comm_hook = comm_hook or slot.comm_hook
    slot.reduce_dtype = reduce_dtype


def release(ddp: DistributedDataParallel | None, source: BucketListener) -> None:
    """Tell ``source`` nothing more. A hook stays, and reduces as before."""
    slot = None if ddp is None else _slots.get(ddp)
    if ddp is None or slot is None or slot.source is not source:
        return
    _asides.pop(ddp).stop()
    if isinstance(slot, _HookSlot):
        slot.source = slot.reduce_dtype = None
    else:
        del _slots[ddp]
        slot.disconnect()


def forget_comm_hook(ddp: DistributedDataParallel) -> None:
    """From now on the mean of ``ddp`` is plain, whatever was asked for."""
    slot = _slots.get(ddp)
    if isinstance(slot, _HookSlot):
        slot.comm_hook = None


def before_backward(ddp: DistributedDataParallel | None) -> None:
    """A backward of ``ddp`` begins: no gradient has changed yet."""
    slot = None if ddp is None else _slots.get(ddp)
    if ddp is not None and slot is not None:
        refuse_manual_finalization(ddp)  # an attribute, which the loop may have set since
        slot.before_backward()


def comm_hook_of(ddp: DistributedDataParallel) -> CommHook | None:
    """The user's communication hook, which was given to this attachment or an earlier one."""
    slot = _slots.get(ddp)
    return None if slot is None else slot.comm_hook
