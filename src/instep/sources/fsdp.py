"""Gradients that are final once FullyShardedDataParallel (FSDP1) has reduced and sharded them.

It never calls hooks on the original parameters. It has one seam: it steps what it finds in their
``_in_backward_optimizers``. (FSDP2, ``fully_shard``, calls the hooks of its parameters: the local source does for it.)
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from instep._core.hooks import BoundHook
from instep._core.parameters import AttachedParameter
from instep._core.plan import Bucket, fill_buckets
from instep.errors import AttachError
from instep.sources import Sink


class _InPlaceOfOptimizer:
    """What FSDP1 asks of an entry of ``_in_backward_optimizers``
    (``torch/distributed/fsdp/_runtime_utils.py``, ``_post_backward_use_sharded_grad_views``)."""

    def __init__(self, reduced: BoundHook, attached: AttachedParameter | None) -> None:
        self._reduced = reduced
        self._attached = attached

    def step(self) -> None:
        self._reduced()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._attached is not None:
            self._attached.get().grad = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _InPlaceOfOptimizer, (BoundHook(None), None)


class FSDP1Source:
    """The original parameters of FullyShardedDataParallel, one bucket each: FSDP1 shows no other."""

    def __init__(self, sink: Sink, parameters: Sequence[AttachedParameter], wrappers: Sequence[Any]) -> None:
        self._sink = sink
        self._parameters = tuple(parameters)
        self._refuse(wrappers)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return fill_buckets("fsdp", (a.spec for a in reversed(self._parameters)), bucket_bytes=1)

    def connect(self) -> None:
        for attached in self._parameters:
            stand_in = _InPlaceOfOptimizer(BoundHook(partial(self._reduced, attached)), attached)
            attached.get()._in_backward_optimizers = [stand_in]  # type: ignore[attr-defined]

    def disconnect(self) -> None:
        for attached in self._parameters:
            parameter = attached.peek()
            if parameter is not None and hasattr(parameter, "_in_backward_optimizers"):
                del parameter._in_backward_optimizers

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        return parameters  # FSDP1 asked at its first forward

    def refresh(self) -> None:
        """FSDP1 asks for ``requires_grad`` itself."""

    def begin_step(self) -> None:
        """Nothing is counted from step to step."""

    def _reduced(self, attached: AttachedParameter) -> None:
        if self._sink.arrive((attached,)):
            self._sink.apply((attached,))
            self._sink.raise_failure()

    def _refuse(self, wrappers: Sequence[Any]) -> None:
        for wrapper in wrappers:
            if not wrapper._use_orig_params:
                raise AttachError(
                    "FullyShardedDataParallel(use_orig_params=True) is needed: without, its parameters "
                    "are flat ones that no optimizer of the model's own parameters can step"
                )
            if wrapper._is_root is not None:
                raise AttachError(
                    "FullyShardedDataParallel decides at its first forward whether parameters are "
                    "stepped in backward: register before it"
                )
