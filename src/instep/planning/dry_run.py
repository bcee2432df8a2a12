"""A few steps of the training loop without data, and what they would have taken.

The loop, the model, the optimizer and ``attach`` are the real ones; every tensor is counted as it is made and freed.
Where the real ones need other ranks or threads, this does with the memory what they do: DDP's buckets hold all
gradients, and a step behind the next forward goes bucket by bucket.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from instep._optim.stepper import Stepper
from instep._optim.undo import Undo
from instep.attaching import attach
from instep.attachment import Attachment
from instep.planning.errors import PlanError
from instep.planning.kernels import LiveInside
from instep.planning.planned_model import PlannedModel

MakeOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]
Hold = Callable[[], AbstractContextManager[None]]
Buckets = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen.

    Attributes:
        peak: the most bytes in a step, of everything.
        own: parameters, buffers and state.
        state: of each parameter, bytes by dtype, by its position in the model.
        activations: bytes that the forward left for backward.
        buckets: names of the parameters that instep stepped together, on one device.
    """

    peak: int
    own: int
    state: dict[int, Counter[str]]
    activations: int
    buckets: tuple[tuple[str, ...], ...] = ()


def bytes_by_dtype(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    return found


def order_of_gradients(planned: PlannedModel) -> list[str]:
    """Names of the parameters, as their gradients arrive in backward."""
    order: list[str] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, p in planned.model.named_parameters()
        if p.requires_grad
    ]
    with planned.fakes(), _explained("backward"):
        planned.loss().backward()
    for handle in handles:
        handle.remove()
    for parameter in planned.model.parameters():
        parameter.grad = None
    return order


def forward_flops(planned: PlannedModel) -> int:
    """Operations of matrix products, convolutions and attention: what torch's own counter counts."""
    with planned.fakes(), _explained("forward"), FlopCounterMode(display=False) as counter:
        planned.loss()
    flops: int = counter.get_total_flops()
    return flops


class DryRun:
    """One optimizer on one model. Each way to train goes on where the one before has stopped.

    Args:
        micro_batches: how many there are in a step.
    """

    def __init__(self, planned: PlannedModel, make: MakeOptimizer, micro_batches: int = 1) -> None:
        self._planned = planned
        self._micro_batches = micro_batches
        tensors = [*planned.model.parameters(), *planned.model.buffers()]
        self._there = sum(bytes_by_dtype(tensors).values())
        self._live = LiveInside(tensors)
        with planned.fakes(), self._live:
            self._optimizer = make(p for p in planned.model.parameters() if p.requires_grad)
        self._step(self._optimizer.step)  # makes the optimizer's state

    def plain(self, permanent: Buckets = (), *, view: bool = False) -> Measured:
        """The plain loop.

        Args:
            permanent: DDP's buckets, which are there for good;
            view: and of which the gradients are views.
        """
        with self._flat(permanent, view):
            return self._counted(self._optimizer.step)

    def attached(self, bucket_bytes: int | None, *, undo: bool = False, together: bool = False) -> Measured:
        """With ``instep.attach``, in ``schedule="backward"``, on one device.

        Args:
            together: whether ``micro_batches()`` runs them; else all but the last are in ``accumulate()``.
        """
        with self._planned.fakes.copying():  # it tries optimizers out, on copies of what they have
            attached = attach(
                self._planned.model, self._optimizer, schedule="backward", undo=undo, bucket_bytes=bucket_bytes
            )
        with attached as overlap:
            how = overlap if together else overlap.accumulate
            self._step(self._optimizer.step, how)  # after which buckets follow the order in which gradients arrived
            seen = self._counted(self._optimizer.step, how)
            return replace(seen, buckets=tuple(tuple(p.name for p in one.parameters) for one in overlap.plan.buckets))

    def by_bucket(
        self, buckets: Buckets, permanent: Buckets = (), *, view: bool = False, undo: bool = False
    ) -> Measured:
        """All gradients are there before the step, which goes bucket by bucket.

        Args:
            permanent: as for ``plain``, and
            view: too.
            undo: whether parameters and state are copied, until all have been stepped.
        """
        with self._flat(permanent, view):
            return self._counted(partial(_step_by_bucket, self._optimizer, buckets, undo))

    @contextmanager
    def _flat(self, permanent: Buckets, view: bool) -> Iterator[None]:
        with self._planned.fakes(), self._live:
            flat = [_Flat(bucket, view) for bucket in permanent]
        try:
            yield
        finally:
            for one in flat:
                one.remove()

    def _counted(self, step: Callable[[], object], how: Attachment | Hold = nullcontext) -> Measured:
        self._live.reset()
        activations = self._step(step, how)
        places = {id(p): number for number, p in enumerate(self._planned.model.parameters())}
        state = {
            places[id(p)]: bytes_by_dtype(value for value in entry.values() if isinstance(value, torch.Tensor))
            for p, entry in self._optimizer.state.items()
            if isinstance(p, torch.Tensor)
        }
        own = self._there + sum(sum(one.values()) for one in state.values())
        return Measured(self._there + self._live.peak, own, state, activations)

    def _step(self, step: Callable[[], object], how: Attachment | Hold = nullcontext) -> int:
        """One iteration; the bytes that its first forward left for backward.

        Args:
            how: what runs all micro-batches, or is around all of them but the last.
        """
        activations: list[int] = []
        with self._planned.fakes(), self._live:
            if isinstance(how, Attachment):
                with _explained("backward"):
                    how.micro_batches(lambda _: self._forward(activations), range(self._micro_batches))
            else:
                for number in range(self._micro_batches):
                    with nullcontext() if number + 1 == self._micro_batches else how():
                        loss = self._forward(activations)
                        with _explained("backward"):
                            loss.backward()
                        del loss
            with _explained(f"{type(self._optimizer).__name__}.step()"):
                step()
            self._optimizer.zero_grad()
        return activations[0]

    def _forward(self, activations: list[int]) -> torch.Tensor:
        before = self._live.now
        with _explained("forward"):
            loss = self._planned.loss()
        activations.append(self._live.now - before)
        return loss


class _Flat:
    """One of DDP's buckets: gradients are copied into it as they arrive, and with ``view`` are then a part of it."""

    def __init__(self, parameters: Sequence[torch.Tensor], view: bool) -> None:
        self._buffer = parameters[0].new_empty(sum(p.numel() for p in parameters))
        self._handles = []
        for parameter, part in zip(parameters, self._buffer.split([p.numel() for p in parameters]), strict=True):
            if view:
                hook = partial(_become_view, part.view(parameter.shape))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _become_view(part: torch.Tensor, parameter: torch.Tensor) -> None:
    parameter.grad = part


def _step_by_bucket(optimizer: Optimizer, buckets: Buckets, undo: bool) -> None:
    stepper, copies = Stepper(optimizer), Undo(host=False)
    for bucket in buckets:
        mine = [p for p in bucket if p.grad is not None]
        if not mine:
            continue
        if undo:
            copies.save(mine, optimizer)
        stepper.step(mine)
        if not undo:
            for parameter in mine:
                parameter.grad = None
    stepper.commit()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """What a program without data cannot do becomes one line."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise PlanError(
            f"{what} cannot be rehearsed without data: {type(error).__name__}: {lines[0]}. What depends on the values "
            "of tensors, or calls kernels that torch does not know, cannot be planned"
        ) from error
