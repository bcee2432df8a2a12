"""Gradients that are final once FullyShardedDataParallel (FSDP1) has reduced and sharded them.

FSDP1 never calls hooks on the original parameters. It has one seam: it steps the optimizers that it finds in their
``_in_backward_optimizers``. (FSDP2, ``fully_shard``, calls the hooks of its parameters: ``LocalSource`` is its
source.)
"""

from collections.abc import Sequence
from typing import Any

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._torch.engine import Phase, current
from instep._torch.hooks import WeakHook
from instep.buckets import Bucket, fill_buckets
from instep.errors import AttachError
from instep.sources import Sink, Source


class FSDP1Source(Source):
    """The gradients of FullyShardedDataParallel's original parameters. Those of one instance are a bucket.

    FSDP1 goes through an instance's parameters one by one, but has reduced all of their gradients by then: at the first
    parameter all of them are stepped.
    """

    def __init__(self, sink: Sink, parameters: Sequence[AttachedParameter], wrappers: Sequence[Any]) -> None:
        self._sink = sink
        self._parameters = {attached.spec.index: attached for attached in parameters}
        self._reduced_now: set[int] = set()  # stepped with another one, and still to be gone through by FSDP1
        self._applied: dict[int, AttachedParameter] = {}
        if any(wrapper._is_root is not None for wrapper in wrappers):
            raise AttachError(
                "FullyShardedDataParallel decides at its first forward whether parameters are stepped in "
                "backward: attach (or register) before it, or use schedule='forward'"
            )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return fill_buckets("fsdp", (a.spec for a in reversed(self._parameters.values())), bucket_bytes=1)

    def connect(self) -> None:
        for attached in self._parameters.values():
            stand_in = _InPlaceOfOptimizer(
                WeakHook(self._reduced, attached.spec.index),
                WeakHook(self._done, attached.spec.index),
            )
            attached.get()._in_backward_optimizers = [stand_in]  # type: ignore[attr-defined]

    # In backward, for each parameter of an instance.

    def _reduced(self, index: int) -> None:
        """FSDP1 is about to step this parameter: the first one of an instance has all of them stepped."""
        if index in self._reduced_now:
            self._reduced_now.discard(index)
            return
        group = self._parameters[index].spec.group
        of_group = (a for a in self._parameters.values() if a.spec.group == group)
        members = AttachedParameters(a for a in of_group if a.get().grad is not None)
        self._reduced_now = {a.spec.index for a in members} - {index}
        if self._sink.arrive(members) and self._sink.apply(members):
            if not self._applied:
                # FSDP1's own end handles the parameters and their gradients once more.
                current().at(Phase.AFTER_DDP, self._retire, self._raised)
            self._applied.update((a.spec.index, a) for a in members)
        self._sink.raise_failure()

    def _done(self, index: int) -> None:
        """FSDP1 takes this parameter for stepped. It frees an instance's gradients once no parameter has its own."""
        if index in self._applied and self._sink.frees_gradients:
            self._applied[index].get().grad = None

    # Where backward ends, or raises.

    def _retire(self) -> None:
        applied = AttachedParameters(self._applied.values())
        self._applied.clear()
        self._sink.retire(applied)
        self._sink.count_freed(applied)
        self._sink.join()
        self._sink.raise_failure()

    def _raised(self) -> None:
        self._applied.clear()
        self._sink.backward_raised()

    def disconnect(self) -> None:
        for attached in self._parameters.values():
            parameter = attached.peek()
            if parameter is not None and hasattr(parameter, "_in_backward_optimizers"):
                del parameter._in_backward_optimizers


class _InPlaceOfOptimizer:
    """Stands in the place of an optimizer in ``_in_backward_optimizers``, with the methods that FSDP1 calls
    (``torch/distributed/fsdp/_runtime_utils.py``, ``_post_backward_use_sharded_grad_views``)."""

    def __init__(self, reduced: WeakHook, done: WeakHook) -> None:
        self._reduced = reduced
        self._done = done

    def step(self) -> None:
        self._reduced()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._done()
