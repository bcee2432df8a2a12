"""A few steps of the training loop without data, and what they would have taken.

The loop, the model, the optimizer and ``attach`` are the real ones; every tensor is counted as it is made and freed.
Where the real ones need other ranks or threads, this does with the memory what they do: DDP's buckets hold all
gradients, and a step behind the next forward goes bucket by bucket.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from instep._core.stepper import Stepper
from instep._core.undo import Undo
from instep.attachment import attach
from instep.planning.errors import PlanError
from instep.planning.live_bytes import LiveBytes
from instep.planning.scene import Scene

MakeOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]
Buckets = Sequence[Sequence[torch.Tensor]]
STEPS_BEFORE = 2
"""The first makes the optimizer's state; after it, buckets follow the order in which gradients arrive."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
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


def order_of_gradients(scene: Scene) -> list[str]:
    """Names of the parameters, as their gradients arrive in backward."""
    order: list[str] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[misc]
        for name, p in scene.model.named_parameters()
        if p.requires_grad
    ]
    with scene.stage(), _explained("backward"):
        scene.loss().backward()
    for handle in handles:
        handle.remove()
    for parameter in scene.model.parameters():
        parameter.grad = None
    return order


def forward_flops(scene: Scene) -> int:
    """Operations of matrix products, convolutions and attention: what torch's own counter counts."""
    with scene.stage(), _explained("forward"), FlopCounterMode(display=False) as counter:
        scene.loss()
    return counter.get_total_flops()


def rehearse(
    scene: Scene,
    make: MakeOptimizer,
    *,
    undo: bool = False,
    attached: bool = False,
    bucket_bytes: int | None = None,
) -> Rehearsed:
    """One device: the plain loop, or with ``instep.attach`` in ``schedule="backward"``."""
    with _counted(scene, make) as (live, optimizer):
        overlap = attach(scene.model, optimizer, undo=undo, bucket_bytes=bucket_bytes) if attached else None
        try:
            found = _train(scene, live, optimizer, optimizer.step)
            buckets = () if overlap is None else tuple(
                tuple(p.name for p in bucket.parameters) for bucket in overlap.plan.buckets
            )
        finally:
            if overlap is not None:
                overlap.detach()
    return Rehearsed(found.peak, found.own, found.state, found.activations, buckets)


def rehearse_by_bucket(
    scene: Scene,
    make: MakeOptimizer,
    buckets: Buckets,
    permanent: Buckets = (),
    *,
    view: bool = False,
    by_bucket: bool = True,
    undo: bool = False,
) -> Rehearsed:
    """All gradients are there before the step, which then goes through ``buckets``.

    Args:
        permanent: DDP's own buckets, which are there for good;
        view: and of which the gradients are views.
        by_bucket: the step goes bucket by bucket, as instep's does; else it is one call of the optimizer's own.
        undo: with copies of parameters and state until all have been stepped.
    """
    with _counted(scene, make) as (live, optimizer):
        step = optimizer.step if not by_bucket else partial(_step_by_bucket, optimizer, buckets, undo)
        with scene.stage(), live:
            flat = [_Flat(bucket, view) for bucket in permanent]
        try:
            return _train(scene, live, optimizer, step)
        finally:
            for one in flat:
                one.remove()


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
def _counted(scene: Scene, make: MakeOptimizer) -> Iterator[tuple[LiveBytes, Optimizer]]:
    live = LiveBytes([*scene.model.parameters(), *scene.model.buffers()])
    with scene.stage(), live:
        optimizer = make(p for p in scene.model.parameters() if p.requires_grad)
    try:
        yield live, optimizer
    finally:
        for parameter in scene.model.parameters():
            parameter.grad = None


def _train(scene: Scene, live: LiveBytes, optimizer: Optimizer, step: Callable[[], object]) -> Rehearsed:
    """Steps until they repeat themselves, and one that counts."""
    there = sum(bytes_by_dtype(chain(scene.model.parameters(), scene.model.buffers())).values())
    activations = 0
    with scene.stage(), live:
        for number in range(STEPS_BEFORE + 1):
            if number == STEPS_BEFORE:
                live.reset()
            before = live.now
            with _explained("forward"):
                loss = scene.loss()
            activations = live.now - before
            with _explained("backward"):
                loss.backward()
            del loss
            with _explained(f"{type(optimizer).__name__}.step()"):
                step()
            optimizer.zero_grad()
    places = {id(p): number for number, p in enumerate(scene.model.parameters())}
    state = {
        places[id(p)]: bytes_by_dtype(value for value in entry.values() if isinstance(value, torch.Tensor))
        for p, entry in optimizer.state.items()
        if isinstance(p, torch.Tensor)
    }
    own = there + sum(sum(one.values()) for one in state.values())
    return Rehearsed(there + live.peak, own, state, activations)


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
