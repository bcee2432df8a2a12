"""``overlap.micro_batches``: one step's micro-batches, by one backward for all of them or by one for each.

With one for all (``Together``) the losses are kept until all forwards have run. Then ``Graphs`` has one backward walk
all graphs, part by part of the model (``Segments``), and add the gradients in the plain loop's order. Each parameter's
gradient is complete while backward still runs, so it can be stepped and freed there. What cannot be the plain loop's
that way is refused before backward; whether backward has drawn random numbers or written buffers shows only after it
(``BackwardSideEffects``).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch

from instep._micro_batches.graphs import Graphs
from instep._micro_batches.segments import Segments
from instep._optim.random_numbers import Generators
from instep._step.in_backward import BackwardSchedule
from instep._torch.engine import graph_task
from instep._torch.versions import version_of
from instep._wiring.build import Parts
from instep.errors import AccumulationError, InstepError, class_name
from instep.sources.ddp.instance import look_from
from instep.sources.fsdp.micro_batches import OneBackward
from instep.sources.fsdp.modules import DeferredAllReduce

Batch = TypeVar("Batch")


def micro_batches(
    parts: Parts,
    loss_of: Callable[[Batch], torch.Tensor] | None,
    batches: Iterable[Batch] | None,
    *,
    together: bool,
) -> list[torch.Tensor]:
    """Run forward and backward of every micro-batch. Returns the losses, detached.

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
    require_own_step(parts, "micro_batches()")
    if waiting := parts.accumulation.waiting():
        raise AccumulationError(
            f"micro_batches() runs all micro-batches of a step, and {waiting} wait for the last, by "
            "backward(more=True). Use the one or the other"
        )
    if parts.accumulation.is_in_hold:
        raise AccumulationError(
            "micro_batches() was called within overlap.accumulate() or no_sync(): it runs all micro-batches of a step, "
            "and holds back all but the last by itself. Call it outside"
        )
    marked = _with_is_last(batches, needs_last=bool(parts.refs.wrapped) or parts.sharding is not None)
    if together:
        refuse_wrappers(parts)
        return _together(parts, loss_of, marked)
    return _one_by_one(parts, loss_of, marked)


def require_own_step(parts: Parts, verb: str) -> None:
    """Raise unless the micro-batches can be all of a step."""
    if graph_task() is not None:
        raise InstepError(f"{verb} was called within a backward: call it where the loop would call backward()")
    if parts.accumulation.steps > 1:
        raise AccumulationError(
            f"{verb} says which micro-batches make a step, and attach(accumulation_steps="
            f"{parts.accumulation.steps}) counts backwards: leave out accumulation_steps"
        )


def refuse_wrappers(parts: Parts) -> None:
    """Raise for wrappers with which one backward of several forwards is not the sum of a backward for each."""
    if parts.sharding is not None and parts.sharding.in_fsdp1:
        raise AccumulationError(
            "micro_batches() with schedule='backward' does not run with FSDP1 (FullyShardedDataParallel), which frees "
            "a layer's weights after each micro-batch's backward: use fully_shard (FSDP2), overlap.accumulate(), or "
            "schedule='forward'"
        )
    for ddp in parts.refs.ddps():
        if ddp.static_graph:
            raise AccumulationError(
                "micro_batches() with schedule='backward' does not run with "
                "DistributedDataParallel(static_graph=True), which counts the forwards of a backward: leave out "
                "static_graph"
            )


def _with_is_last(batches: Iterable[Batch], *, needs_last: bool) -> Iterator[tuple[Batch, bool]]:
    """Each batch, with whether it is the last one. A batch is taken when the one before is done, as a loop takes it: to
    make a batch may draw random numbers.

    Args:
        needs_last: whether gradients are reduced over ranks, with the last micro-batch. If not, every one may pass for
            the last, and ``batches`` need not know how many they are.
    """
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


def _one_by_one(
    parts: Parts, loss_of: Callable[[Batch], torch.Tensor], batches: Iterable[tuple[Batch, bool]]
) -> list[torch.Tensor]:
    losses = []
    deferred = DeferredAllReduce(parts.refs.model())
    for number, (batch, is_last) in enumerate(batches):
        with ExitStack() as stack:
            stack.enter_context(_held_unless_last(parts, is_last, forward=True))
            loss = _require_loss(number, loss_of(batch))
            if is_last:
                stack.enter_context(deferred.ended())
            elif not deferred.is_set:
                stack.enter_context(_held_unless_last(parts, is_last))
            parts.backward(loss)
        losses.append(loss.detach())
    return losses


def _together(
    parts: Parts, loss_of: Callable[[Batch], torch.Tensor], batches: Iterable[tuple[Batch, bool]]
) -> list[torch.Tensor]:
    step = Together(parts)
    step.begin()
    for batch, is_last in batches:
        with _held_unless_last(parts, is_last, forward=True):
            loss = loss_of(batch)
        step.add(loss)
    return step.backward()


class Together:
    """The micro-batches of one step, from the first one's forward to one backward for all.

    Attributes:
        losses: of the forwards that have run.
    """

    def __init__(self, parts: Parts) -> None:
        self.losses: list[torch.Tensor] = []
        self._parts = parts
        self._fsdp2 = OneBackward(parts.refs.model())

    def begin(self) -> None:
        """The first forward is about to run."""
        self._fsdp2.begin()

    def add(self, loss: object) -> None:
        """The forward of the next micro-batch has made ``loss``."""
        self.losses.append(_require_loss(len(self.losses), loss))
        self._fsdp2.ran()
        # The copies of weights that an autocast block around several forwards has kept are a part of this graph.
        torch.clear_autocast_cache()

    def backward(self) -> list[torch.Tensor]:
        """Run one backward for all. Returns the losses, detached."""
        parts, losses = self._parts, self.losses
        if len(losses) < 2:  # one backward is the plain loop's own
            for loss in losses:
                parts.backward(loss)
        else:
            self._run_one(losses)
        return [loss.detach() for loss in losses]

    def _run_one(self, losses: Sequence[torch.Tensor]) -> None:
        parts, fsdp2 = self._parts, self._fsdp2
        # The forwards have run, and no gradient has changed yet: what is refused here leaves no step begun.
        graphs = Graphs(losses, partial(_name_of, parts))
        # Wrappers have seen several forwards, and are told that one backward follows.
        for ddp in parts.refs.ddps():
            look_from(ddp, losses)
        for leaf in graphs.contributions:
            if leaf.grad is not None and bool(leaf.grad.ne(0).any()):  # (a + b) + c is not a + (b + c)
                raise AccumulationError(
                    f"{_name_of(parts, leaf)} has a gradient from an earlier backward: micro_batches() runs all "
                    "micro-batches of a step. Call zero_grad() before it, or run the step with overlap.accumulate()"
                )
        fsdp2.join(len(losses), graphs.nodes(), graphs.edges())
        handles = graphs.add_in_order(fsdp2.wide)
        part_of = Segments(parts.schedule.parameters, parts.bucket_bytes, fsdp2)
        graphs.walk_in_segments(part_of, joins=parts.sharding is None)  # FSDP2's groups would all be gathered at once
        del graphs  # the nodes are freed as backward comes to them
        if parts.sharding is not None:
            parts.sharding.reduces_once()
        side_effects = BackwardSideEffects(parts)
        try:
            parts.backward(losses)
        except RuntimeError as error:
            if _HAS_HOOKS in str(error):
                raise AccumulationError(
                    "a torch.autograd.Function of this model asks for ctx.input_grad_buffers, which torch does not "
                    "give in micro_batches(): gradients of several micro-batches are added up in hooks. Have its "
                    "backward return the gradient, or run each micro-batch but the last in `with overlap.accumulate():`"
                ) from error
            raise
        finally:
            fsdp2.restore()  # an error may have come between two hooks of a node
            for handle in handles:
                handle.remove()
            side_effects.end()
        side_effects.require_none()


_HAS_HOOKS = "post-hooks on the producing autograd node"
"""In torch's message (2.15) where a function asks for ``ctx.input_grad_buffers`` and a node has a hook, as those have
here that give a parameter its gradient."""


def _held_unless_last(parts: Parts, is_last: bool, *, forward: bool = False) -> AbstractContextManager[None]:
    """Around a micro-batch, or its forward: hold back the reduction over the ranks, unless it is the last one."""
    return nullcontext() if is_last else parts.accumulation.hold(forward=forward)


def _require_loss(number: int, loss: object) -> torch.Tensor:
    """``loss``, if it is one that backward can begin from."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else class_name(loss, in_full=True)
        )
        raise InstepError(
            f"the loss of a micro-batch must be a tensor of one number: micro-batch {number + 1} gave {given}"
        )
    if loss.grad_fn is None:
        raise InstepError(
            f"the loss of micro-batch {number + 1} has no graph: it was computed within torch.no_grad(), or detached"
        )
    return loss


class BackwardSideEffects:
    """The random numbers that backward draws, and the buffers that it writes, as a checkpointed segment does that
    backward runs again. The plain loop does both after each micro-batch's forward, before the next one's. What has
    happened is known only afterwards: this notes the state before backward.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        devices = {a.spec.device for a in parts.schedule.parameters} - {torch.device("cpu")}
        # The engine's own thread draws on an accelerator. On the CPU another thread of the loop's may have drawn.
        self._on_devices = [(device, _state_of(device)) for device in devices]
        self._generators = Generators(())
        # Where gradients stay in .grad nobody else sees that a backward within the backward has added to one.
        schedule = cast(BackwardSchedule, parts.schedule)
        keeps = not schedule.frees_gradients or schedule.keeps_gradients
        self._arrived: Counter[str] = Counter()
        self._handles = [
            a.get().register_post_accumulate_grad_hook(partial(self._arrives, a.spec.name))
            for a in (parts.schedule.parameters if keeps else ())
            if a.get().requires_grad
        ]
        model = parts.refs.model()
        self._buffers = {} if model is None else {name: (b, version_of(b)) for name, b in model.named_buffers()}

    def _arrives(self, name: str, parameter: torch.Tensor) -> None:
        self._arrived[name] += 1

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def require_none(self) -> None:
        """Raise if there were any, and leave the step torn if backward has written weights."""
        model = self._parts.refs.model()
        now = {} if model is None else dict(model.named_buffers())
        written = [
            name
            for name, (before, version) in self._buffers.items()
            if now.get(name) is not before or version_of(before) != version
        ]
        drew = any(_state_of(device) != before for device, before in self._on_devices)
        if written:
            cause = f"backward has written the buffer {written[0]!r} (batch normalization in a checkpointed segment?)"
        elif drew or self._generators.drawn():
            cause = "backward has drawn random numbers"
        elif (twice := next((name for name, times in self._arrived.items() if times > 1), None)) is not None:
            cause = (
                f"the gradient of {twice!r} has arrived several times in one backward (a backward within the backward, "
                "as of reentrant checkpointing)"
            )
        else:
            return
        self._parts.schedule.stop(
            AccumulationError(
                f"{cause}: with one backward for all micro-batches it does so after all forwards, and the plain loop "
                "after each. This step is not the plain loop's. Use overlap.accumulate() in place of micro_batches()"
            )
        )


def _state_of(device: torch.device) -> list[int]:
    state: list[int] = torch.get_device_module(device).get_rng_state(device).tolist()
    return state


def _name_of(parts: Parts, leaf: torch.Tensor) -> str:
    model = parts.refs.model()
    name = None if model is None else next((name for name, p in model.named_parameters() if p is leaf), None)
    return f"a tensor of shape {tuple(leaf.shape)}" if name is None else repr(name)
