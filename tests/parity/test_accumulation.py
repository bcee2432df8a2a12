"""Micro-batches on one device: ``accumulate()``, ``accumulation_steps``, and loops that say nothing of them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from instep import ClipNorm, ClipValue
from instep.errors import AccumulationError
from tests.cases import Blocks, batch, two_groups
from tests.parity.lockstep import CLIP, SMALL, WAYS, Contender, Step, in_every_way, in_exact_ways, lockstep, loss_of

COUNT = 3


def blocks() -> tuple[Blocks, torch.optim.Optimizer]:
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)


def sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks(depth=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def loss(lane: Contender, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return loss_of(lane.model(x), y) / COUNT


def held(lane: Contender, i: int) -> None:
    """``accumulate()`` around all micro-batches but the last."""
    for micro in range(COUNT):
        if lane.overlap is not None and micro < COUNT - 1:
            with lane.overlap.accumulate():
                lane.backward(loss(lane, COUNT * i + micro))
        else:
            lane.backward(loss(lane, COUNT * i + micro))
    finish(lane)


def counted(lane: Contender, i: int) -> None:
    """A loop that knows nothing of accumulation but its own count."""
    for micro in range(COUNT):
        lane.backward(loss(lane, COUNT * i + micro))
    finish(lane)


def finish(lane: Contender) -> None:
    lane.step()
    lane.zero_grad()


@pytest.mark.parametrize("build", [blocks, sgd])
@in_every_way
def test_accumulate(way: str, build: Any) -> None:
    lane = lockstep(way, build, held)
    assert lane.overlap.step_count == 5


@pytest.mark.parametrize("build", [blocks, sgd])
@in_every_way
def test_accumulation_steps(way: str, build: Any) -> None:
    lane = lockstep(way, build, counted, accumulation_steps=COUNT)
    assert lane.overlap.step_count == 5


@pytest.mark.parametrize("build", [blocks, sgd])
@in_exact_ways
def test_an_unmodified_accumulation_loop(way: str, build: Any) -> None:
    lane = lockstep(way, build, counted)
    assert lane.overlap.step_count == 5


@pytest.mark.parametrize("options", [{"accumulation_steps": COUNT}, {}], ids=["accumulation_steps", "accumulate"])
@pytest.mark.parametrize("way", ["undo"])
def test_undo_does_no_accumulated_step_again(way: str, options: dict[str, Any]) -> None:
    lane = lockstep(way, blocks, counted if options else held, **options)
    assert lane.overlap.redo_count == 0


def test_undo_does_again_the_steps_of_a_loop_that_says_nothing() -> None:
    lane = lockstep("undo", blocks, counted)
    assert lane.overlap.redo_count == 5


@in_every_way
def test_nothing_is_written_before_the_last_micro_batch(way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        before = [p.detach().clone() for p in lane.model.parameters()]
        for micro in range(COUNT - 1):
            lane.backward(loss(lane, COUNT * i + micro))
            assert all(map(torch.equal, before, lane.model.parameters()))
            assert all(type(p.grad) is torch.Tensor for p in lane.model.parameters())
        lane.backward(loss(lane, COUNT * i + COUNT - 1))
        finish(lane)

    lockstep(way, blocks, step, 3, accumulation_steps=COUNT)


@in_every_way
def test_gradients_scaled_by_hand_between_micro_batches(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        for micro in range(COUNT):
            lane.backward(loss(lane, COUNT * i + micro))
            if micro == 1:
                for parameter in lane.model.parameters():
                    parameter.grad.mul_(0.5)
        finish(lane)

    lockstep(way, blocks, step, 3, accumulation_steps=COUNT)


# The end of an epoch.


def epochs(batches: int, *, hold: bool) -> Step:
    """Epochs of so many batches: the last step of each is not complete. Each iteration is one epoch."""

    def step(lane: Contender, epoch: int) -> None:
        for number in range(batches):
            last = number % COUNT == COUNT - 1 or number == batches - 1
            if hold and lane.overlap is not None and not last:
                with lane.overlap.accumulate():
                    lane.backward(loss(lane, batches * epoch + number))
            else:
                lane.backward(loss(lane, batches * epoch + number))
            if last:
                finish(lane)

    return step


@pytest.mark.parametrize("batches", [4, 5, 6])
@in_every_way
def test_an_epoch_that_ends_within_a_step_with_accumulate(way: str, batches: int) -> None:
    lane = lockstep(way, blocks, epochs(batches, hold=True), 3)
    assert lane.overlap.step_count == 6


@pytest.mark.parametrize("batches", [4, 5, 6])
@in_every_way
def test_an_epoch_that_ends_within_a_step_with_accumulation_steps(way: str, batches: int) -> None:
    """``step()`` steps what has been added up, and the next backward is the first of its step."""
    lockstep(way, blocks, epochs(batches, hold=False), 3, accumulation_steps=COUNT)


@in_every_way
def test_gradients_thrown_away_between_micro_batches(way: str) -> None:
    """A loop that starts its step anew, within ``accumulate()``."""

    def step(lane: Contender, i: int) -> None:
        if lane.overlap is None:
            lane.backward(loss(lane, i + 50))
        else:
            with lane.overlap.accumulate():
                lane.backward(loss(lane, i + 50))
        lane.zero_grad()
        held(lane, i)

    lockstep(way, blocks, step)


# What micro-batches may look like.


NESTED = pytest.mark.xfail(strict=True, reason="nested backwards count where no output of the model itself is met")


@pytest.mark.parametrize(
    ("way", "reentrant"),
    [
        *((way, False) for way in WAYS),
        *((way, True) for way in ("forward", "late", "undo")),  # in two passes: takes no inputs=
        pytest.param("backward", True, marks=NESTED),
    ],
)
def test_checkpointed_micro_batches_are_counted_once(way: str, reentrant: bool) -> None:
    """Segments that the loop itself checkpoints."""

    def step(lane: Contender, i: int) -> None:
        for micro in range(COUNT):
            x, y = batch(COUNT * i + micro)
            x = lane.model.inner(x)
            for block in lane.model.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            lane.backward(loss_of(lane.model.outer(x), y))
        finish(lane)

    lockstep(way, blocks, step, accumulation_steps=COUNT)


@in_every_way
def test_a_forward_for_evaluation_between_micro_batches_is_not_counted(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        seen = []
        for micro in range(COUNT):
            with torch.no_grad():
                seen.append(lane.model(batch(99)[0]))
            lane.model(batch(98)[0])  # a graph that is thrown away
            lane.backward(loss(lane, COUNT * i + micro))
        finish(lane)
        return seen

    lockstep(way, blocks, step, accumulation_steps=COUNT)


@in_exact_ways
def test_two_backwards_of_one_forward_are_counted_twice(way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        for micro in range(2):
            x, y = batch(2 * i + micro)
            out = lane.model(x)
            lane.backward(loss_of(out, y), retain_graph=True)
            lane.backward(out.square().mean())
        finish(lane)

    lockstep(way, blocks, step, accumulation_steps=4)


CLIPS = [ClipNorm(0.1), ClipNorm(1e6), ClipValue(0.01)]


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("how", [held, counted])
@in_exact_ways
def test_what_has_been_added_up_is_clipped_once(way: str, how: Step, clip: Any) -> None:
    def step(lane: Contender, i: int) -> None:
        if lane.overlap is not None:
            return how(lane, i)
        for micro in range(COUNT):
            lane.backward(loss(lane, COUNT * i + micro))
        if isinstance(clip, ClipValue):
            nn.utils.clip_grad_value_(lane.model.parameters(), clip.clip_value)
        else:
            nn.utils.clip_grad_norm_(lane.model.parameters(), clip.max_norm)
        lane.optimizer.step()
        lane.zero_grad()
        return None

    options: dict[str, Any] = {} if how is held else {"accumulation_steps": COUNT}
    lockstep(way, blocks, step, clip=clip, **options)


def test_two_pass_measures_once_per_step() -> None:
    """The micro-batches that only add are run once."""
    model, optimizer = blocks()
    passes: list[int] = []
    model.inner.weight.register_hook(lambda g: passes.append(1))
    clip = ClipNorm(CLIP, mode="two_pass")
    with instep.attach(
        model, optimizer, bucket_bytes=SMALL, clip=clip, accumulation_steps=COUNT, schedule="backward"
    ) as overlap:
        for micro in range(COUNT):
            x, y = batch(micro)
            overlap.backward(loss_of(model(x), y))
        optimizer.step()
    assert len(passes) == COUNT + 1


@in_every_way
def test_an_error_in_a_micro_batch_after_which_the_step_is_begun_anew(way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        if i == 1:
            with nullcontext() if lane.overlap is None else lane.overlap.accumulate():
                lane.backward(loss(lane, 0))
                hook = lane.model.blocks[0][1].weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    lane.backward(loss(lane, 1))
                hook.remove()
            lane.zero_grad()
        held(lane, i)

    lockstep(way, blocks, step, 3)


@in_every_way
def test_an_error_in_a_micro_batch_that_is_left_out(way: str) -> None:
    """What it had added by then stays, as in the plain loop."""

    def step(lane: Contender, i: int) -> None:
        with nullcontext() if lane.overlap is None else lane.overlap.accumulate():
            lane.backward(loss(lane, 2 * i))
            hook = lane.model.blocks[0][1].weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                lane.backward(loss(lane, 100 + i))
            hook.remove()
        lane.backward(loss(lane, 2 * i + 1))
        finish(lane)

    lockstep(way, blocks, step, 3)


def fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


# Under ``schedule="backward"`` a loop has to say that it accumulates.


def written(build: Callable[[], Any]) -> tuple[Any, Any, Any, list[torch.Tensor]]:
    """After one backward that has written: the model, optimizer, attachment, and weights by then."""
    torch.manual_seed(0)
    model, optimizer = build()
    overlap = instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward")
    x, y = batch(0)
    loss_of(model(x), y).backward()
    return model, optimizer, overlap, memory(model)


def memory(model: nn.Module) -> list[torch.Tensor]:
    """The weights as they lie there, whoever watches them."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach().clone() for p in model.parameters()]


def test_a_second_backward_without_accumulate_raises_and_writes_nothing_further() -> None:
    torch.manual_seed(0)
    model, optimizer = blocks()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"):
        first, second = (loss_of(model(batch(i)[0]), batch(i)[1]) for i in range(2))
        first.backward()
        after = memory(model)
        with pytest.raises(AccumulationError, match=r"overlap\.accumulate\(\)"):
            second.backward()
        assert all(map(torch.equal, after, memory(model)))


def test_accumulation_steps_that_are_more_than_the_loops_step_the_plain_way() -> None:
    """The loop steps each time: backward only adds, and ``optimizer.step()`` does all."""

    def step(lane: Contender, i: int) -> None:
        lane.backward(loss(lane, i))
        finish(lane)

    lockstep("backward", blocks, step, accumulation_steps=4)


def test_accumulation_steps_that_are_fewer_than_the_loops_raise() -> None:
    torch.manual_seed(0)
    model, optimizer = blocks()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, accumulation_steps=2, schedule="backward"):
        for i in range(2):
            loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        after = memory(model)
        with pytest.raises(AccumulationError):
            loss_of(model(batch(2)[0]), batch(2)[1]).backward()
        assert all(map(torch.equal, after, memory(model)))
