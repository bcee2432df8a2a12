"""Mixed precision under DistributedDataParallel: gradients are reduced in low precision, and stepped in full.

A plain DDP instance is the simple case: its parameters are cast within the graph (``LowPrecision``), so gradients reach
the hook in full precision, and are stepped as by the other communication hooks.

With ``DistributedDataParallel(mixed_precision=...)`` a parameter is a low-precision copy of itself from the forward to
the end of backward, and DDP leaves it to the hook to put parameters and gradients back to full precision. So the hook
takes the gradients off as buckets come (``_UpcastBucket``), and all the rest waits for DDP's own end of backward
(``AllreduceUpcastHookState._after_ddp_ended``).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from instep._step.streams import StepStreams
from instep._torch.engine import graph_task
from instep._torch.mixed_precision import LowPrecision
from instep.comm_hooks import cast_mean_allreduce, mean_allreduce
from instep.errors import AttachError
from instep.functional.comm_hooks import (
    NotCopied,
    StepAfterReduction,
    has_in_backward_optimizers,
    step_in_backward,
    step_with,
    stepping_hooks,
)
from instep.sources import LaunchedBucket, drain
from instep.sources.ddp.buckets import Reductions, slices_of
from instep.sources.ddp.instance import Divisor

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass
class AllreduceUpcastHookState(NotCopied):
    """The state that ``reducer_allreduce_and_upcast_hook`` is registered with.

    It is for either of two kinds of DDP instance. A plain one, with ``mixed_precision`` given here: instep then casts
    its parameters in each forward. This kind is the one to choose: it runs on CPU too, and takes tied, unused and
    checkpointed parameters. The other kind was built with DDP's own ``mixed_precision``: its constructor registers the
    hook of this name in ``torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks``. Making a state adds
    forward hooks to the DDP instance.

    Attributes:
        ddp_weakref: ``weakref.ref`` to the DDP instance.
        upcast_stream: where gradients are cast and parameters stepped. Unused on CPU, where it may be ``None``.
        wait_for_stream_enqueued: whether a backward has begun to reduce and has not ended.
        mixed_precision: what a plain DDP instance computes and reduces in; ``None``: it has a policy of its own.

    Raises:
        AttachError: the module has complex parameters, of which DDP's low-precision copies drop the imaginary part; or
            there is no policy, or there are two.

    Since 0.1.0.

    Example:
        ```python
        import weakref
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        stream = torch.Stream() if torch.accelerator.is_available() else None
        state = instep.AllreduceUpcastHookState(weakref.ref(ddp), stream, mixed_precision=policy)
        ddp.register_comm_hook(state, instep.reducer_allreduce_and_upcast_hook)
        ddp(batch).backward()  # computes and reduces in bfloat16; .grad is float32
        ```
    """

    ddp_weakref: Any
    upcast_stream: torch.Stream | None
    wait_for_stream_enqueued: bool = False
    mixed_precision: "MixedPrecisionPolicy | None" = None

    def __post_init__(self) -> None:
        ddp = self.ddp_weakref() if isinstance(self.ddp_weakref, weakref.ref) else None
        if not isinstance(ddp, DistributedDataParallel):
            raise AttachError(
                f"ddp_weakref must be weakref.ref(ddp) of a DistributedDataParallel: {self.ddp_weakref!r}"
            )
        if (ddp.mixed_precision is None) == (self.mixed_precision is None):
            which = "neither has" if self.mixed_precision is None else "both have"
            raise AttachError(
                "mixed_precision must be given to AllreduceUpcastHookState or to DistributedDataParallel, and "
                f"{which} one: AllreduceUpcastHookState(weakref.ref(ddp), None, "
                "mixed_precision=MixedPrecisionPolicy(…)) for a DDP without; on an accelerator with torch.Stream() in "
                "place of None"
            )
        self._divisor = Divisor()
        self._streams = StepStreams(self.upcast_stream)
        # Of a DDP instance without a policy of its own.
        self._after = StepAfterReduction(
            "upcast", _reduce, has_in_backward_optimizers, step_with, self._streams, self._settled
        )
        # Of one with: nothing is stepped before DDP's own end, since which parameters other ranks have used is known
        # once that has been.
        self._buckets: Reductions[_UpcastBucket] = Reductions(None, self._after_ddp_ended, self._raised)
        if self.mixed_precision is not None:
            cast = LowPrecision(ddp, self.mixed_precision)
            weakref.finalize(self, cast.remove)  # of a state that was made and never registered
            return
        for name, parameter in ddp.module.named_parameters():
            if parameter.is_complex() and _has_low_precision(parameter):
                raise AttachError(
                    f"{name} is complex, and DistributedDataParallel(mixed_precision=…) computes with real copies of "
                    "all parameters. Leave mixed_precision out, or let DDP ignore this parameter"
                )
        ddp.register_forward_pre_hook(_before_forward)

    def _ddp(self) -> DistributedDataParallel:
        ddp = self.ddp_weakref()
        assert isinstance(ddp, DistributedDataParallel), "the reducer that calls this belongs to the DDP instance"
        return ddp

    def _settled(self) -> None:
        self.wait_for_stream_enqueued = False

    def _reduce_low(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket of a DDP instance with its own ``mixed_precision``, whose parameters are low-precision copies
        of themselves."""
        ddp = self._ddp()
        precision = ddp.mixed_precision
        assert precision is not None, "only DDP instances with mixed_precision register this hook"
        dtype = precision.reduce_dtype or precision.param_dtype or bucket.buffer().dtype
        reduce = partial(mean_allreduce, group=ddp.process_group, divisor=self._divisor(ddp, bucket))
        if graph_task() is None:
            # This rank has joined: it adds nothing, and must not send the gradients of its last step.
            return reduce(torch.zeros_like(bucket.buffer(), dtype=dtype))
        if bucket.index() == 0:
            self.wait_for_stream_enqueued = True
            # From here on gradients are taken away: whatever raises must not leave a mixture.
            self._buckets.begin()
        in_flight = _UpcastBucket(bucket, dtype, reduce, keep=ddp.static_graph)
        self._buckets.launched(bucket, in_flight)
        future: torch.futures.Future[torch.Tensor] = in_flight.communication
        return future

    def _after_ddp_ended(self, buckets: "Sequence[_UpcastBucket]") -> None:
        try:
            self.wait_for_stream_enqueued = False
            # On the loop's stream, as DDP's own end has. All are waited for before any parameter is stepped: after a
            # communication that failed nothing may be.
            for bucket in buckets:
                bucket.wait()
            _to_full_precision(self._ddp())
            # The side stream begins after all that the loop's stream holds now: the sums are there.
            with self._streams.on(buckets[0].members[0].device):
                for bucket in buckets:
                    bucket.step()
        except BaseException:
            self._raised(buckets)
            raise
        finally:
            self._streams.join()

    def _raised(self, buckets: "Sequence[_UpcastBucket]") -> None:
        """Backward has raised, and has taken off some gradients: leave none, and full precision everywhere."""
        drain(buckets)
        self.wait_for_stream_enqueued = False
        ddp = self.ddp_weakref()
        if ddp is not None:
            _to_full_precision(ddp)
            # Some are reduced, some are this rank's own, some are DDP's memory, and none shows which.
            for parameter in filter(_has_low_precision, ddp.module.parameters()):
                parameter.grad = None
        self._streams.finish()


def reducer_allreduce_and_upcast_hook(
    hook_state: AllreduceUpcastHookState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for a DDP instance in mixed precision: reduce low, step in full precision.

    The local gradients are cast to ``reduce_dtype``, multiplied there by one over the number of ranks, and summed over
    the instance's process group. Scaling comes first, as in DDP without a hook, so that fp16 does not overflow in the
    sum. When backward ends, every parameter is its full-precision self again, with the reduced gradient in the same
    precision; the storage of the low-precision copies is freed, and DDP's hooks for this backward are gone. Parameters
    that DDP ignores are left alone. One that no rank used keeps the gradient it had.

    Parameters with ``_in_backward_optimizers`` are then stepped with each of these in turn, and their ``.grad`` is
    ``None``: of a plain DDP instance bucket by bucket as they arrive, as in ``apply_optim_in_backward_hook``.

    Of one with DDP's own ``mixed_precision``, once all buckets have arrived: a communication that fails raises from
    ``backward()``, and nothing is stepped. After any failure parameters are back in full precision, and their
    gradients are dropped. ``no_sync`` and ``join`` work; unused parameters need ``static_graph``. What DDP itself fails
    at under ``mixed_precision`` still fails, loudly: a parameter shared by two modules, and a forward in ``no_grad``.
    The future holds the bucket's mean in ``reduce_dtype``, as a flat tensor. DDP keeps it until the next backward.

    Counterpart of ``_reducer_allreduce_and_upcast_hook``
    (``torch/distributed/algorithms/ddp_comm_hooks/mixed_precision_hooks.py``).

    Since 0.1.0.

    Example:
        ```python
        import weakref

        instep.apply_optimizer_in_backward(torch.optim.AdamW, ddp.parameters(), {"lr": 1e-3})
        state = instep.AllreduceUpcastHookState(weakref.ref(ddp), None, mixed_precision=policy)
        ddp.register_comm_hook(state, instep.reducer_allreduce_and_upcast_hook)
        ddp(batch).backward()  # reduces in the policy's dtype, and steps in float32
        ```
    """
    if hook_state.mixed_precision is None:
        return hook_state._reduce_low(bucket)
    return hook_state._after(hook_state, bucket)


stepping_hooks.add(reducer_allreduce_and_upcast_hook)


def _reduce(hook_state: AllreduceUpcastHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket whose gradients have come through the casts: they are in full precision already."""
    ddp, policy = hook_state._ddp(), hook_state.mixed_precision
    assert policy is not None
    hook_state.wait_for_stream_enqueued = graph_task() is not None
    dtype = policy.reduce_dtype or policy.param_dtype
    return cast_mean_allreduce(bucket.buffer(), ddp.process_group, hook_state._divisor(ddp, bucket), dtype)


class _UpcastBucket(LaunchedBucket):
    """A bucket of a DDP instance with its own ``mixed_precision``: the local gradients, flat, in ``dtype``. Parameters
    without a gradient on this rank have zeros.

    Gradients are read from the parameters, never from the bucket. Until DDP rebuilds its buckets, and for good where it
    does not, it copies gradients to memory that is not ``bucket.buffer()``
    (``torch/csrc/distributed/c10d/reducer.cpp``, ``set_mixed_precision_param_dtype``). The buffer is only written,
    where its dtype is the right one.

    Args:
        reduce: starts the bucket's communication.
        keep: whether a parameter that no rank uses in this backward keeps the gradient that it had.
    """

    __slots__ = ("_before", "_parts")

    def __init__(
        self,
        bucket: GradBucket,
        dtype: torch.dtype,
        reduce: Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]],
        *,
        keep: bool,
    ) -> None:
        buffer, members = bucket.buffer(), bucket.parameters()
        flat = buffer if buffer.dtype == dtype else torch.empty_like(buffer, dtype=dtype)
        # Views taken once: a parameter with gaps has other strides when it is in full precision again.
        self._parts = slices_of(flat, members)
        self._before: list[torch.Tensor | None] = []
        for parameter, part in zip(members, self._parts, strict=True):
            _put(parameter.grad, part)
            self._before.append(parameter.grad if keep else None)
            # The low-precision gradient is freed. DDP's own end of backward sets another one where any rank has used
            # the parameter, and none where no rank has: so ``upcast`` knows which parameters were used.
            parameter.grad = None
        super().__init__(members, reduce(flat))

    def step(self) -> None:
        """DDP's own end has been: give each parameter that any rank used its gradient, in the parameter's own
        precision. Step those that have in-backward optimizers, and free their gradients."""
        for parameter, part, before in zip(self.members, self._parts, self._before, strict=True):
            # Never the tensor that DDP set: with gradient_as_bucket_view it is DDP's own view of the bucket, and DDP's
            # next forward would point that at other memory.
            if parameter.grad is not None:
                parameter.grad = part.to(parameter.dtype)
            elif before is not None:
                parameter.grad = before.to(parameter.dtype, copy=True)
            if has_in_backward_optimizers(parameter) and parameter.grad is not None:
                step_in_backward(parameter)
                parameter.grad = None


def _put(gradient: torch.Tensor | None, part: torch.Tensor) -> None:
    """Write ``gradient`` into its ``part`` of a bucket, which may be the same memory."""
    if gradient is None:
        part.zero_()
    elif gradient.data_ptr() != part.data_ptr():
        part.copy_(gradient.detach())
    elif gradient.stride() != part.stride():
        part.copy_(gradient.detach().clone())  # the same memory in another order


# The rest knows the attributes in which DDP keeps its mixed precision (torch/nn/parallel/distributed.py,
# _setup_mixed_precision_params, _root_copy_hook and _module_wait_for_copy_hook), and nothing above does.


def _has_low_precision(parameter: nn.Parameter) -> bool:
    """Whether DDP makes a low-precision copy of ``parameter``: of all that it does not ignore."""
    return not getattr(parameter, "_ddp_ignored", False)


def _to_full_precision(ddp: DistributedDataParallel) -> None:
    """Make every parameter its full-precision self, and free the memory of its low-precision copy."""
    for parameter in filter(_has_low_precision, ddp.module.parameters()):
        _remove_reducer_hook(parameter)
        parameter.data = parameter._fp_param
        if parameter.requires_grad:
            parameter._mp_param.untyped_storage().resize_(0)


def _remove_reducer_hook(parameter: nn.Parameter) -> None:
    """Take the hook off that DDP puts on a parameter in each forward, to count its gradient."""
    state = parameter.__dict__.pop("_ddp_mp_hook_state", None)
    if state is not None:
        state[1].remove()


def _before_forward(ddp: nn.Module, args: object) -> None:
    """Refuse what DDP cannot do, and prepare what it leaves to chance, before it makes its low-precision copies."""
    assert isinstance(ddp, DistributedDataParallel)
    if ddp.find_unused_parameters and not ddp.static_graph:
        raise AttachError(
            "find_unused_parameters=True does not work with DistributedDataParallel(mixed_precision=…): DDP looks for "
            "its full-precision parameters in the graph of their low-precision copies, and takes all of them for "
            "unused. Use static_graph=True if the same parameters are unused in every step"
        )
    for parameter in filter(_has_low_precision, ddp.module.parameters()):
        # Left by a forward whose backward did not reduce (no_sync). With two of them DDP would count a gradient twice.
        _remove_reducer_hook(parameter)
    device = next(ddp.module.parameters()).device
    if device.type != "cpu":
        # DDP copies on this stream, ordered after nothing: neither the step that changed the parameters nor the
        # backward that still read the copies' memory.
        ddp._mp_stream.wait_stream(torch.accelerator.current_stream(device))
