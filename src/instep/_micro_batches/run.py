"""``overlap.micro_batches``: one step's micro-batches, by one backward for all of them or by one for each."""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from instep._autograd.engine import graph_task
from instep._micro_batches.forwards import run_forward
from instep._micro_batches.graphs import Graphs
from instep._micro_batches.thread_state import ThreadState
from instep._micro_batches.unlike import BackwardDoes
from instep._wiring.build import Parts
from instep._wiring.threads import this_thread
from instep.errors import AccumulationError, InstepError
from instep.sources.ddp.unused import look_from
from instep.sources.fsdp.one_backward import OneBackward

Batch = TypeVar("Batch")


def micro_batches(
    parts: Parts,
    loss_of: Callable[[Batch], torch.Tensor] | None,
    batches: Iterable[Batch] | None,
    *,
    together: bool,
) -> list[torch.Tensor]:
    """The losses, detached.

    Args:
        loss_of, batches: ``None``: the caller has forgotten it.
        together: one backward for all; else one for each.
    """
    if loss_of is None or batches is None:
        missing = "loss_of" if loss_of is None else "batches"
        raise InstepError(
            f"micro_batches() was given no {missing}: it runs forward and backward of a step itself, and is no context "
            "manager. Call losses = overlap.micro_batches(lambda batch: loss_of(batch) / n, batches), and behind it "
            "optimizer.step(). For the micro-batches of a loop of your own: `with overlap.accumulate():`"
        )
    _require_own_step(parts)
    marked = _marked(batches, needs_last=bool(parts.held.wrapped) or parts.sharding is not None)
    if together:
        _require_whole(parts)
        return _together(parts, loss_of, marked)
    return _one_by_one(parts, loss_of, marked)


def _one_by_one(
    parts: Parts, loss_of: Callable[[Batch], torch.Tensor], batches: Iterable[tuple[Batch, bool]]
) -> list[torch.Tensor]:
    losses = []
    for number, (batch, is_last) in enumerate(batches):
        with _added(parts, is_last):
            loss = _checked(number, loss_of(batch))
            parts.schedule.backward(loss, None, parts.late.adopt)
        losses.append(loss.detach())
    return losses


def _together(
    parts: Parts, loss_of: Callable[[Batch], torch.Tensor], batches: Iterable[tuple[Batch, bool]]
) -> list[torch.Tensor]:
    state, thread = ThreadState(parts.schedule.parameters[0].spec.device), this_thread()
    fsdp2 = OneBackward(parts.held.model())
    losses: list[torch.Tensor] = []
    firsts: list[int] = []
    for number, (batch, is_last) in enumerate(batches):
        with _added(parts, is_last), fsdp2.forward():
            forward = run_forward(number, partial(loss_of, batch), state, thread)
        losses.append(_checked(number, forward.loss))
        firsts.append(forward.first)
    if len(losses) < 2:
        for loss in losses:
            parts.schedule.backward(loss, None, parts.late.adopt)
        return [loss.detach() for loss in losses]
    graphs = Graphs(losses, firsts, partial(_name_of, parts))
    for ddp in _ddps(parts):
        look_from(ddp, losses)
    fsdp2.join(len(losses), graphs.nodes(), graphs.edges())
    graphs.add_in_order(fsdp2.wide)
    _require_no_gradients(parts, graphs)
    del graphs  # the nodes are freed as backward comes to them
    if parts.sharding is not None:
        parts.sharding.reduces_once()
    unlike = BackwardDoes(parts)
    try:
        parts.schedule.backward(losses, None, parts.late.adopt)
    finally:
        fsdp2.restore()
    unlike.require_nothing()
    return [loss.detach() for loss in losses]


def _added(parts: Parts, is_last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch whose gradients are not reduced over the ranks."""
    return nullcontext() if is_last else parts.accumulation.hold()


def _marked(batches: Iterable[Batch], *, needs_last: bool) -> Iterator[tuple[Batch, bool]]:
    """Each with whether it is the last. It is taken when the one before is done, as a loop takes it: to make a batch
    may draw random numbers."""
    if not needs_last:
        yield from ((batch, True) for batch in batches)
        return
    if not isinstance(batches, Sized):
        raise InstepError(
            f"micro_batches() of a model on several ranks must know which micro-batch is the last: give a list, not "
            f"{type(batches).__name__}"
        )
    count, came = len(batches), 0
    for batch in batches:
        came += 1
        yield batch, came >= count
    if came < count:
        raise InstepError(
            f"micro_batches() was given {count} batches by len(), and {came} came: no micro-batch was the last, whose "
            "gradients are reduced over the ranks. Give a list"
        )


def _checked(number: int, loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InstepError(
            f"loss_of(batch) must return one loss, a tensor of one number: micro-batch {number + 1} gave {found}"
        )
    if loss.grad_fn is None:
        raise InstepError(
            f"the loss of micro-batch {number + 1} has no graph: micro_batches() is called within torch.no_grad(), or "
            "loss_of(batch) detaches the loss"
        )
    return loss


def _require_own_step(parts: Parts) -> None:
    """Raise unless a step of its own can begin and end here."""
    if graph_task() is not None:
        raise InstepError("micro_batches() was called within a backward: call it where the loop would call backward()")
    if parts.accumulation.steps > 1:
        raise AccumulationError(
            f"micro_batches() runs all micro-batches of a step, and attach(accumulation_steps="
            f"{parts.accumulation.steps}) counts backwards: leave out accumulation_steps"
        )
    if parts.accumulation.is_held:
        raise AccumulationError(
            "micro_batches() was called within overlap.accumulate() or no_sync(): it runs all micro-batches of a step, "
            "and holds back all but the last by itself. Call it outside"
        )


def _require_whole(parts: Parts) -> None:
    """Raise where one backward of several forwards is not a sum of backwards."""
    if parts.sharding is not None and parts.sharding.in_fsdp1:
        raise AccumulationError(
            "micro_batches() with schedule='backward' does not run with FSDP1 (FullyShardedDataParallel), which frees "
            "a layer's weights after each micro-batch's backward: use fully_shard (FSDP2), overlap.accumulate(), or "
            "schedule='forward'"
        )
    for ddp in _ddps(parts):
        if ddp.static_graph:
            raise AccumulationError(
                "micro_batches() with schedule='backward' does not run with "
                "DistributedDataParallel(static_graph=True), which counts the forwards of a backward: leave out "
                "static_graph"
            )


def _require_no_gradients(parts: Parts, graphs: Graphs) -> None:
    """Raise if the plain loop would add to gradients from before: (a + b) + c is not a + (b + c)."""
    for leaf in graphs.contributions:
        if leaf.grad is not None and bool(leaf.grad.ne(0).any()):
            raise AccumulationError(
                f"{_name_of(parts, leaf)} has a gradient from an earlier backward: micro_batches() runs all "
                "micro-batches of a step. Call zero_grad() before it, or run the step with overlap.accumulate()"
            )


def _ddps(parts: Parts) -> list[DistributedDataParallel]:
    return [one for one in parts.held.living_wrappers() if isinstance(one, DistributedDataParallel)]


def _name_of(parts: Parts, leaf: torch.Tensor) -> str:
    model = parts.held.model()
    name = None if model is None else next((name for name, p in model.named_parameters() if p is leaf), None)
    return f"a tensor of shape {tuple(leaf.shape)}" if name is None else repr(name)
