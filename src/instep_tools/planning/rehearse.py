"""A few steps of the user's loop without data, and the memory that they would have taken.

The loop, the model, the optimizer and ``attach`` are the real ones; ``LiveInside`` counts every tensor as it is made
and freed. Where the real ones need other ranks or threads, a ``DryRun`` does with the memory what they do: DDP's
buckets hold all gradients, and a step behind the next forward goes bucket by bucket.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from instep import Attachment, ClipNorm, attach
from instep_tools.harness import LiveBytes
from instep_tools.output import CannotRunError
from instep_tools.planning.model import MakeOptimizer, PlannedModel, said_of

Hold = Callable[[], AbstractContextManager[None]]
"""Makes the context of each micro-batch but the last, such as ``accumulate``."""
Buckets = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory of one step.

    Attributes:
        peak: the most bytes that were alive in the step.
        own: the bytes of parameters, buffers and state.
        state: the bytes of each parameter's state by dtype, by the parameter's name.
        activations: the bytes that the forward left for backward.
        buckets: the names of the parameters that instep stepped together, on one device.
    """

    peak: int
    own: int
    state: dict[str, Counter[str]]
    activations: int
    buckets: tuple[tuple[str, ...], ...] = ()


class DryRun:
    """Steps of one optimizer on one model, in one way to train after another. Each goes on where the last one stopped.

    Args:
        micro_batches: the number of forwards and backwards in a step.
    """

    def __init__(self, planned: PlannedModel, make: MakeOptimizer, micro_batches: int = 1) -> None:
        self._planned = planned
        self._micro_batches = micro_batches
        tensors = [*planned.model.parameters(), *planned.model.buffers()]
        self._there = sum(bytes_by_dtype(tensors).values())
        self._live = LiveInside(tensors)
        with planned.fakes(), self._live:
            self._optimizer = make(p for p in planned.model.parameters() if p.requires_grad)
        self._step(self._optimizer.step)  # a first step, which makes the optimizer's state

    def plain(self, permanent: Buckets = (), *, view: bool = False) -> Measured:
        """Measure the plain loop.

        Args:
            permanent: DDP's buckets, which are there for good.
            view: whether the gradients are views of these buckets.
        """
        with self._flat(permanent, view):
            return self._counted(self._optimizer.step)

    def attached(
        self, bucket_bytes: int | None, *, undo: bool = False, two_pass: bool = False, together: bool = False
    ) -> Measured:
        """Measure ``schedule="backward"`` on one device, with ``instep.attach`` itself.

        Args:
            two_pass: whether gradients are clipped by the norm of all, which a backward measures before the one that
                steps.
            together: whether ``micro_batches()`` runs the micro-batches; else all but the last are in ``accumulate()``.
        """
        model, optimizer = self._planned.model, self._optimizer
        clip = ClipNorm(1.0, mode="two_pass") if two_pass else None
        with self._planned.fakes():
            attached = attach(model, optimizer, schedule="backward", undo=undo, clip=clip, bucket_bytes=bucket_bytes)
        with attached as overlap:
            how = overlap if together else overlap.accumulate
            backward = overlap.backward if two_pass else torch.Tensor.backward
            # From the second step on buckets follow the order in which gradients arrived in the first. From the third
            # on there is one hook for each: the gradients of a bucket wait for its last one, and are then measured.
            for _ in range(2 if two_pass else 1):
                self._step(self._optimizer.step, how, backward)
            seen = self._counted(self._optimizer.step, how, backward)
            return replace(seen, buckets=tuple(tuple(p.name for p in one.parameters) for one in overlap.plan.buckets))

    def by_bucket(
        self, buckets: Buckets, permanent: Buckets = (), *, view: bool = False, undo: bool = False
    ) -> Measured:
        """Measure a step that goes bucket by bucket, with all gradients there before.

        Args:
            permanent: as for ``plain``.
            view: as for ``plain``.
            undo: whether parameters and state are copied, until all have been stepped.
        """
        with self._flat(permanent, view):
            return self._counted(partial(_step_by_bucket, self._optimizer, buckets, undo))

    @contextmanager
    def _flat(self, permanent: Buckets, view: bool) -> Iterator[None]:
        """Keep the memory of DDP's buckets for as long as the block runs. With ``view`` each gradient becomes a part of
        its bucket on arrival."""
        handles = []
        with self._planned.fakes(), self._live:
            kept = [bucket[0].new_empty(sum(p.numel() for p in bucket)) for bucket in permanent]
            for buffer, bucket in zip(kept, permanent, strict=True) if view else ():
                for p, part in zip(bucket, buffer.split([p.numel() for p in bucket]), strict=True):
                    handles.append(p.register_post_accumulate_grad_hook(partial(_become_view, part.view(p.shape))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _counted(self, *iteration: Any) -> Measured:
        """Run one iteration, given as for ``_step``, and return its memory."""
        self._live.reset()
        activations = self._step(*iteration)
        names = {id(p): name for name, p in self._planned.model.named_parameters()}
        state = {
            names[id(p)]: bytes_by_dtype(value for value in entry.values() if isinstance(value, torch.Tensor))
            for p, entry in self._optimizer.state.items()
            if isinstance(p, torch.Tensor)
        }
        own = self._there + sum(sum(one.values()) for one in state.values())
        return Measured(self._there + self._live.peak, own, state, activations)

    def _step(
        self,
        step: Callable[[], object],
        how: Attachment | Hold = nullcontext,
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    ) -> int:
        """Run one iteration, and return the bytes that its first forward left for backward.

        Args:
            how: the attachment that runs all micro-batches, or the context of each of them but the last.
            backward: of a loss.
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
                            backward(loss)
                        del loss  # else the graph would live into the next forward, as in no real loop
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


def _become_view(part: torch.Tensor, parameter: torch.Tensor) -> None:
    parameter.grad = part


def _step_by_bucket(optimizer: Optimizer, buckets: Buckets, undo: bool) -> None:
    """Step as instep does behind the next forward, or as a trial, on this thread."""
    # The order of what is allocated and freed is the same, whichever thread does it.
    left = [[(p, p.grad) for p in bucket if p.grad is not None] for bucket in reversed(buckets)]
    optimizer.zero_grad()
    kept: list[object] = []  # with undo: until all have been stepped
    while left:
        bucket = left.pop()
        if undo:
            kept += [bucket, [tensor.detach().clone() for p, _ in bucket for tensor in (p, *_state_of(optimizer, p))]]
        for parameter, gradient in bucket:
            parameter.grad = gradient
        del parameter, gradient
        optimizer.step()
        optimizer.zero_grad()
        bucket.clear() if not undo else None


def _state_of(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    return (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what a program without data cannot do into one line."""
    try:
        yield
    except CannotRunError:
        raise
    except Exception as error:
        raise CannotRunError(
            f"{what} cannot be rehearsed without data: {said_of(error)}. What depends on the values of tensors, or "
            "calls kernels that torch does not know, cannot be planned"
        ) from error


def order_of_gradients(planned: PlannedModel) -> list[str]:
    """Return the names of the parameters in the order in which backward makes their gradients."""
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


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""What attention is on a CPU, where the rehearsal is: torch's counter knows that of other devices alone."""


def _in_forward(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


def _in_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


_OF_A_CPU = {
    getattr(torch.ops.aten, name): operations
    for name, operations in ((_ATTENTION, _in_forward), (f"{_ATTENTION}_backward", _in_backward))
    if hasattr(torch.ops.aten, name)
}


def operations_of(planned: PlannedModel) -> tuple[int, int]:
    """Return the operations of one forward and of its backward, with what that computes again: matrix products,
    convolutions and attention, which torch's own counter counts."""
    with planned.fakes(), FlopCounterMode(display=False, custom_mapping=_OF_A_CPU) as counter:
        with _explained("forward"):
            loss = planned.loss()
        forward: int = counter.get_total_flops()
        with _explained("backward"):
            loss.backward()
        total: int = counter.get_total_flops()
    for parameter in planned.model.parameters():
        parameter.grad = None
    return forward, total - forward


def bytes_by_dtype(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    """Add up the bytes of tensors, by the name of their dtype."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return found


def gradients_by_dtype(parameters: Iterable[torch.Tensor]) -> Counter[str]:
    """The same of the gradients that ``parameters`` get, which an optimizer may have asked for in another dtype
    (``grad_dtype``, since torch 2.10)."""
    found: Counter[str] = Counter()
    for parameter in parameters:
        dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        found[str(dtype).removeprefix("torch.")] += parameter.numel() * dtype.itemsize
    return found


class LiveInside(LiveBytes):
    """A ``LiveBytes`` that counts what kernels take while they run, too: no tensor of the program shows these bytes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.now + inside(func, args, result))
        return result


# The kernels that are known to take memory inside.
_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def inside(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the most bytes that a kernel has beside its arguments and results.

    A convolution on a CPU (oneDNN's, of more than one element) copies what it reads into a layout of its own, and its
    result out of that layout, as torch's allocator shows. Other kernels are taken as if they needed nothing.
    """
    if func is _FORWARD and _copies(args[1]):
        return int(max(args[0].nbytes + args[1].nbytes, result.nbytes))
    if func is _BACKWARD and _copies(args[2]):
        return int(max(args[0].nbytes + args[1].nbytes, args[2].nbytes))
    return 0


def _copies(weight: torch.Tensor) -> bool:
    """Return whether a convolution with this weight copies."""
    return weight.device.type == "cpu" and any(size > 1 for size in weight.shape[2:])
