"""Gradients that are final once DistributedDataParallel has reduced them.

Buckets are DDP's own. They are stepped where backward ends, in the order in which they were sent, each as soon as it
has arrived: while one is stepped the later ones are still in flight. No weight changes while backward still runs.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._ranks.process_groups import communicating
from instep.buckets import Bucket
from instep.sources import Sink, Source, WrappedParameters, as_bucket, deliver, record_arrival, step_all
from instep.sources.ddp.buckets import AnyBucket, Reduction, Reductions, as_they_arrive, grad_as_left
from instep.sources.ddp.instance import managed_by
from instep.sources.ddp.reducer import CommHook, before_backward, connect_listener, disconnect_listener


class DDPSource(Source):
    """The gradients of one DDP instance, stepped bucket after bucket where its backward ends.

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
        self._has_reduced = False
        # Whether the norm of a bucket's slice is that of .grad in every bit. An accelerator may compute another one of
        # the same values in a copy with other strides.
        self._final = ddp.gradient_as_bucket_view or ddp.device_type == "cpu"
        self._parameters = WrappedParameters(parameters)
        # By DDP's number, the buckets that it has shown in its last backward, for a plan. Before the first one: a
        # single bucket that holds everything, as DDP's own in its first backward.
        self._shown: dict[int, Bucket] = {}
        self._reductions = Reductions(self._step, self._settle, self._raised)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        shown = self._shown or {0: as_bucket("ddp", self._parameters)}
        return tuple(bucket for _, bucket in sorted(shown.items()))

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        connect_listener(ddp, self, self._comm_hook, self._reduce_dtype)

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        ddp = self._ddp()
        return self._parameters.adopt(parameters, set() if ddp is None else managed_by(ddp))

    def before_backward(self) -> None:
        """A backward begins: no gradient has changed yet."""
        before_backward(self._ddp())

    # In backward: DDP has filled a bucket.

    def communicate(
        self, bucket: AnyBucket, group: dist.ProcessGroup, divisor: int
    ) -> torch.futures.Future[torch.Tensor] | None:
        """Reduce ``bucket``, which is still to be divided by ``divisor``, in place of the plain mean. ``None``: take
        the plain mean."""
        return None

    def launched(self, bucket: AnyBucket, future: torch.futures.Future[Any]) -> None:
        """The communication of ``bucket`` was started, and ``future`` is its result."""
        reduction = Reduction(bucket, future)
        if not self._reductions.launched(bucket, reduction):
            return
        self._has_reduced = True
        self._show(reduction)
        record_arrival(self._sink, self._parameters.among(reduction.members), future)

    def _show(self, reduction: Reduction) -> None:
        if reduction.index == 0:
            self._shown = {}
        self._shown[reduction.index] = as_bucket("ddp", self._parameters.among(reduction.members))

    def reduced(self) -> bool:
        """Whether DDP has reduced buckets since this was last asked."""
        has_reduced, self._has_reduced = self._has_reduced, False
        return has_reduced

    # Where backward ends, before DDP's own end.

    def _step(self, reductions: Sequence[Reduction]) -> None:
        if self._sink.waits_for_all:
            return
        deliver(self._sink, self._mine(reductions), partial(self._step_each, reductions))
        # DDP's own end of backward is next. It may copy from the buckets on the loop's stream, and the side stream has
        # clipped gradients there.
        self._sink.join()

    def _step_each(self, reductions: Sequence[Reduction]) -> bool:
        for arrived in as_they_arrive(reductions):
            members = self._mine(arrived)
            if members:
                with grad_as_left([attached.get() for attached in members]):
                    done = self._sink.apply(members, partial(self._fetch, arrived), final=self._final)
                if not done:
                    return False
        return True

    def _mine(self, reductions: Sequence[Reduction]) -> AttachedParameters:
        return self._parameters.among(p for reduction in reductions for p in reduction.parameters)

    def _fetch(self, reductions: Sequence[Reduction]) -> None:
        # All are waited for before any is used: a communication that failed must not leave some of these stepped.
        ddp = self._ddp()
        with nullcontext() if ddp is None else communicating(ddp.process_group):
            gradients = [reduction.gradients() for reduction in reductions]
        for reduction, reduced in zip(reductions, gradients, strict=True):
            for parameter, gradient in zip(reduction.parameters, reduced, strict=True):
                if parameter in self._parameters:
                    parameter.grad = gradient

    # After DDP's own end.

    def _settle(self, reductions: Sequence[Reduction]) -> None:
        """DDP's own end has been: free the gradients that were applied, and raise what went wrong."""
        members = self._mine(reductions)
        if self._sink.waits_for_all:
            deliver(self._sink, members, partial(step_all, self._sink, members))
        else:
            self._sink.retire(members)
        self._sink.join()
        self._sink.raise_failure()

    # Where backward raises.

    def _raised(self, reductions: Sequence[Reduction]) -> None:
        self._sink.backward_raised()

    # After detach.

    def disconnect(self) -> None:
        disconnect_listener(self._ddp(), self)
