"""How a listener is told of the buckets of a DDP instance, in one of two ways.

DDP's own mean is left to the reducer: a process group in the reducer, ``ReducerGroup``, tells of each bucket that is
reduced in it. Any other reduction takes DDP's one communication hook, whose state is a ``_HookSlot``. A hook is told of
all buckets, too. But it costs a pass over all gradients: with a hook the reducer copies and leaves it to the hook to
divide, without one it divides as it copies. And a hook stays for good.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.distributed.distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from instep._torch.engine import untraced
from instep._torch.hooks import UntracedHook
from instep._torch.placeholders import Placeholder
from instep.comm_hooks import cast_mean_allreduce
from instep.errors import AttachError
from instep.sources.ddp.buckets import ReducerBucket, slices_of
from instep.sources.ddp.instance import Divisor, GradientsAside, buckets_of, refuse_manual_finalization

if TYPE_CHECKING:
    from instep.sources.ddp.source import DDPSource

CommHook = tuple[Any, Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]]
"""A DDP communication hook with its state, in the order in which ``register_comm_hook`` takes them."""


def connect_listener(
    ddp: DistributedDataParallel,
    source: "DDPSource",
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
    is_plain = comm_hook is None and reduce_dtype is None and not divides
    if ddp not in _slots and is_plain and ReducerGroup.fits(ddp):
        _slots[ddp] = ReducerGroup(ddp, source)
    else:
        slot = _slot_of(ddp, comm_hook, reduce_dtype)
        slot.source = source
        slot.comm_hook = comm_hook or slot.comm_hook
        slot.reduce_dtype = reduce_dtype
    _asides[ddp] = GradientsAside(ddp)


def _slot_of(ddp: DistributedDataParallel, comm_hook: CommHook | None, reduce_dtype: torch.dtype | None) -> "_HookSlot":
    """The slot in the one hook of ``ddp``, which is registered if it is not yet."""
    slot = _slots.get(ddp)
    if slot is None:
        lazy_views = getattr(ddp, "lazy_bucket_allocation", False) and ddp.gradient_as_bucket_view
        if lazy_views and comm_hook is None and not _has_hook(ddp):  # else that hook is the reason
            # DDP (since torch 2.15) multiplies some gradients by ``1 / divisor`` then, and divides others.
            raise AttachError(
                "DistributedDataParallel(lazy_bucket_allocation=True, gradient_as_bucket_view=True) computes the mean "
                "in a way that is not known here, and shard_state, mixed_precision and sparse gradients need to "
                "compute it. Build it without one of the two, or say how to reduce: attach(…, comm_hook=(state, hook))"
            )
        slot = _HookSlot(ddp)
        try:
            ddp.register_comm_hook(slot, _HookSlot.reduce)
        except RuntimeError as error:
            raise AttachError(
                "this DistributedDataParallel already has a communication hook, and DDP takes only one. Build it "
                "again without register_comm_hook, and give the hook to attach(…, comm_hook=(state, hook)), which "
                "runs it before the step. Where its class registers one, as torchft's does, use schedule='forward', "
                "without shard_state"
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
    return slot


def before_backward(ddp: DistributedDataParallel | None) -> None:
    """A backward of ``ddp`` begins: no gradient has changed yet."""
    slot = None if ddp is None else _slots.get(ddp)
    if ddp is not None and slot is not None:
        refuse_manual_finalization(ddp)  # an attribute, which the loop may have set since
        slot.before_backward()


def forget_comm_hook(ddp: DistributedDataParallel) -> None:
    """From now on the mean of ``ddp`` is plain, whatever was asked for."""
    slot = _slots.get(ddp)
    if isinstance(slot, _HookSlot):
        slot.comm_hook = None


def disconnect_listener(ddp: DistributedDataParallel | None, source: "DDPSource") -> None:
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


class ReducerGroup(dist.ProcessGroup):
    """Stands in the place of DDP's process group in its reducer, and hands on all that the reducer asks of it.

    Two private names of torch's are needed, which ``DistributedDataParallel`` itself has:
    ``Reducer._update_process_group`` to change the number of ranks, and ``Reducer._get_zeros_like_grad_buckets`` for
    ``join()``. ``tests/distributed/test_reducer_group.py`` fails clearly when torch changes them.

    Args:
        source: is told of each bucket. The reducer has divided it already.
    """

    def __init__(self, ddp: DistributedDataParallel, source: "DDPSource") -> None:
        _init: Any = super().__init__  # torch's annotation lacks this one
        _init(ddp.process_group.rank(), ddp.process_group.size())
        self.source = source
        self._group = ddp.process_group
        self._ddp = weakref.ref(ddp)
        self._look(ddp)
        ddp.reducer._update_process_group(self)
        self._handle = ddp.register_forward_hook(UntracedHook(self._after_forward))

    @staticmethod
    def fits(ddp: DistributedDataParallel) -> bool:
        """Whether the reducer of ``ddp`` divides by itself, and shows its buckets: not with sparse gradients."""
        if not hasattr(ddp, "reducer") or _has_hook(ddp):
            return False
        try:
            buckets_of(ddp)
        except RuntimeError:
            return False
        return True

    def disconnect(self) -> None:
        ddp = self._ddp()
        self._handle.remove()
        if ddp is not None:
            ddp.reducer._update_process_group(ddp.process_group)

    def before_backward(self) -> None:
        """A backward begins: look for the reducer's buckets again, if it has made new ones since the forward. Some
        libraries that wrap DDP have it do so (Lightning). In the middle of backward it does not show them."""
        ddp = self._ddp()
        if ddp is not None and any(known.storage.expired() for known in self._buckets.values()):
            self._look(ddp)

    # What the reducer calls: in a forward or backward of what was compiled, too, where torch.compile would trace it.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return self._group._get_backend_name()

    @untraced
    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]  # the one of its forms
        known = self._buckets.get((tensors[0].device, tensors[0].data_ptr()))
        if known is None or known.storage.expired():
            # Not a bucket that is known: one that was made since, perhaps where another one lay (optimizer.step() will
            # find its gradients); the counts of which parameters were used; the zeros of a rank that has joined.
            return self._group.allreduce(tensors, opts)
        work = self._reduce(tensors, opts)
        self.source.launched(replace(known, tensor=tensors[0]), work.get_future())
        return work

    def _reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        return self._group.allreduce(tensors, opts)

    @untraced
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]  # the one of its forms
        return self._group.broadcast(tensors, opts)

    def _after_forward(self, ddp: DistributedDataParallel, args: object, output: object) -> None:
        if ddp._comm_hooks:
            raise AttachError(
                "register_comm_hook was called on an attached DistributedDataParallel: give the hook to "
                "attach(…, comm_hook=(state, hook)), which runs it before the step"
            )
        if ddp._has_rebuilt_buckets != self._rebuilt:
            self._look(ddp)

    def _look(self, ddp: DistributedDataParallel) -> None:
        """Note where each of the reducer's buckets lies in memory. The buckets themselves must not be kept: DDP frees
        them as it makes new ones."""
        self._rebuilt = ddp._has_rebuilt_buckets
        self._buckets = {
            (bucket.buffer().device, bucket.buffer().data_ptr()): ReducerBucket(
                bucket.index(),
                bucket.parameters(),
                bucket.is_last(),
                StorageWeakRef(bucket.buffer().untyped_storage()),
            )
            for bucket in buckets_of(ddp)
        }


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
        self.source: DDPSource | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "_HookSlot":
        return _HookSlot()

    def __reduce__(self) -> tuple[type["_HookSlot"], tuple[()]]:
        return _HookSlot, ()

    @untraced  # a compiled function may call backward()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook. Start the communication of a bucket that DDP has filled, and tell the source."""
        ddp = None if self._ddp is None else self._ddp()
        assert ddp is not None, "the reducer that calls this belongs to the DDP instance"
        if self.comm_hook is None:
            buffer, divisor = bucket.buffer(), self._divisor(ddp, bucket)
            if self.reduce_dtype is None and self._divide(ddp, bucket, divisor):
                divisor = 1  # is left to do
            own = None if self.source is None else self.source.communicate(bucket, ddp.process_group, divisor)
            future = own or cast_mean_allreduce(buffer, ddp.process_group, divisor, self.reduce_dtype)
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
        # With an option of torch 2.13 the reducer fills a bucket first, and then divides all of it.
        if getattr(ddp, "batched_grad_copy", False) and not buffer.is_sparse:
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


def _has_hook(ddp: DistributedDataParallel) -> bool:
    """Whether the loop has registered a communication hook: one in Python, or one of torch's in C++."""
    return bool(ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))


_asides: "weakref.WeakKeyDictionary[DistributedDataParallel, GradientsAside]" = weakref.WeakKeyDictionary()


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _HookSlot | ReducerGroup]" = weakref.WeakKeyDictionary()
