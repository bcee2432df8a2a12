"""``keep_gradients()``: some steps are left to ``optimizer.step()``, and the loop has their gradients."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

import instep
from instep import ClipNorm, ClipValue
from instep.attaching import attach_stepping_itself
from instep.errors import InstepError, NonFiniteGradientError
from tests.cases import Blocks, OptimizerCase, batch, optimizer_cases, two_groups
from tests.inside import source_of
from tests.parity.lockstep import SMALL, Contender, in_every_way, lockstep, loss_of

EVERY = 3
OPTIMIZERS = [case for case in optimizer_cases() if case[0].startswith(("SGD-2", "AdamW-0", "Adafactor-0", "NAdam-0"))]


def blocks() -> tuple[Blocks, torch.optim.Optimizer]:
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)


def two_optimizers() -> tuple[nn.Module, Any]:
    model = Blocks(depth=2)
    decayed, rest = (group["params"] for group in two_groups(model))
    return model, [torch.optim.AdamW(decayed, lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]


def kept(lane: Contender) -> AbstractContextManager[None]:
    return nullcontext() if lane.overlap is None else lane.overlap.keep_gradients()


def loss(lane: Contender, i: int) -> torch.Tensor:
    x, y = batch(i)
    return loss_of(lane.model(x), y)


def norms(lane: Contender) -> list[torch.Tensor]:
    """As a log has them. They are real tensors."""
    gradients = [p.grad for p in lane.model.parameters() if p.grad is not None]
    assert gradients
    assert all(type(g) is torch.Tensor for g in gradients)
    return [g.norm() for g in gradients]


def around_backward_alone(lane: Contender, i: int) -> Any:
    found = loss(lane, i)
    with kept(lane) if i % EVERY == 0 else nullcontext():
        lane.backward(found)
    read = norms(lane) if i % EVERY == 0 else []
    lane.step()
    lane.zero_grad()
    return read


def around_forward_and_backward(lane: Contender, i: int) -> Any:
    with kept(lane) if i % EVERY == 0 else nullcontext():
        lane.backward(loss(lane, i))
    read = norms(lane) if i % EVERY == 0 else []
    lane.step()
    lane.zero_grad()
    return read


def around_the_step_too(lane: Contender, i: int) -> Any:
    with kept(lane) if i % EVERY == 0 else nullcontext():
        lane.backward(loss(lane, i))
        read = norms(lane) if i % EVERY == 0 else []
        lane.step()
        lane.zero_grad()
    return read


def in_every_step(lane: Contender, i: int) -> Any:
    with kept(lane):
        lane.backward(loss(lane, i))
    read = norms(lane)
    lane.step()
    lane.zero_grad()
    return read


@pytest.mark.parametrize(
    "step", [around_backward_alone, around_forward_and_backward, around_the_step_too, in_every_step]
)
@in_every_way
def test_steps_with_and_without(way: str, step: Callable[[Contender, int], Any]) -> None:
    lane = lockstep(way, blocks, step, 2 * EVERY + 1)
    assert lane.overlap.step_count == 2 * EVERY + 1


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case[0])
def test_optimizers(case: OptimizerCase) -> None:
    _, cls, kwargs = case

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(depth=2)
        return model, cls(two_groups(model), **kwargs)

    lockstep("backward", build, around_forward_and_backward, EVERY + 2)


@in_every_way
def test_clip_by_hand(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        with kept(lane):
            lane.backward(loss(lane, i))
            norm = clip_grad_norm_(lane.model.parameters(), 0.1)
            lane.step()
        lane.zero_grad()
        return norm

    lockstep(way, blocks, step)


@pytest.mark.parametrize("build", [blocks, two_optimizers])
@pytest.mark.parametrize("clip", [ClipNorm(0.1), ClipNorm(0.1, mode="two_pass"), ClipValue(0.01)])
def test_clip_is_that_of_the_whole_step(clip: ClipNorm | ClipValue, build: Any) -> None:
    def step(lane: Contender, i: int) -> Any:
        with kept(lane):
            lane.backward(loss(lane, i))
        read = norms(lane)
        if lane.overlap is None:
            parameters = lane.model.parameters()
            if isinstance(clip, ClipNorm):
                clip_grad_norm_(parameters, clip.max_norm)
            else:
                nn.utils.clip_grad_value_(parameters, clip.clip_value)
        for optimizer in lane.optimizers:
            optimizer.step()
        lane.zero_grad()
        return read

    exact = isinstance(clip, ClipNorm) and clip.mode == "exact"
    lockstep("undo" if exact else "backward", build, step, clip=clip)


def test_backward_runs_once() -> None:
    """Also where the norm would be measured in a backward of its own."""
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward", clip=ClipNorm(0.1, mode="two_pass"))
    runs: list[torch.Tensor] = []
    out = model(batch(0)[0])
    out.register_hook(runs.append)
    with overlap.keep_gradients():
        overlap.backward(out.sum())
    optimizer.step()
    assert len(runs) == 1
    overlap.detach()


def test_a_norm_that_is_not_finite_is_taken_anew() -> None:
    """The loop mends the gradients, and calls ``step()`` again."""
    torch.manual_seed(0)
    model, optimizer = blocks()
    clip = ClipNorm(0.1, mode="two_pass", error_if_nonfinite=True)
    overlap = instep.attach(model, optimizer, schedule="backward", clip=clip)
    weights = [p.detach().clone() for p in model.parameters()]
    with overlap.keep_gradients():
        (model(batch(0)[0]).sum() * math.inf).backward()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        optimizer.step()
    assert all(map(torch.equal, weights, model.parameters()))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1.0)
    optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    assert overlap.grad_norm is not None
    assert overlap.grad_norm.item() == pytest.approx(math.sqrt(count))
    overlap.detach()


@in_every_way
def test_gradients_are_written(way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        with kept(lane):
            lane.backward(loss(lane, i))
        for number, parameter in enumerate(lane.model.parameters()):
            assert parameter.grad is not None
            if number % 2:
                parameter.grad.mul_(0.5)
            elif number % 4:
                parameter.grad = None
            else:
                parameter.grad = torch.ones_like(parameter)
        lane.step()
        lane.zero_grad()

    lockstep(way, blocks, step)


@pytest.mark.parametrize("build", [blocks, two_optimizers])
@in_every_way
def test_gradients_are_thrown_away(way: str, build: Any) -> None:
    """An iteration that is not taken: the next one is stepped in backward again."""

    def step(lane: Contender, i: int) -> None:
        if i % 2 == 0:
            with kept(lane):
                lane.backward(loss(lane, i))
            lane.zero_grad()
        lane.learn(loss(lane, 100 + i))

    lane = lockstep(way, build, step)
    assert lane.overlap.step_count == 5
    assert lane.overlap.redo_count == 0


@in_every_way
def test_step_is_left_out(way: str) -> None:
    """Gradients add up over two kept backwards, or over a kept one and one that steps."""

    def step(lane: Contender, i: int) -> None:
        with kept(lane):
            lane.backward(loss(lane, i))
            if i % 2:
                lane.backward(loss(lane, 50 + i))
        if i % 2 == 0:
            lane.backward(loss(lane, 100 + i))
        lane.step()
        lane.zero_grad()

    lockstep(way, blocks, step)


@pytest.mark.parametrize("counted", [True, False], ids=["accumulation_steps", "accumulate"])
@in_every_way
def test_with_micro_batches(way: str, counted: bool) -> None:
    def step(lane: Contender, i: int) -> Any:
        with kept(lane) if i % 2 == 0 else nullcontext():
            for micro in range(3):
                held = lane.overlap is not None and not counted and micro < 2
                with lane.overlap.accumulate() if held else nullcontext():
                    lane.backward(loss(lane, 3 * i + micro) / 3)
        read = norms(lane) if i % 2 == 0 else []
        lane.step()
        lane.zero_grad()
        return read

    options: dict[str, Any] = {"accumulation_steps": 3} if counted else {}
    lane = lockstep(way, blocks, step, **options)
    assert lane.overlap.step_count == 5


def test_accumulation_alone_is_clipped_once_for_all_optimizers() -> None:
    """A step after backwards in ``accumulate()`` only: the second optimizer is clipped by the norm that the first
    was."""

    def step(lane: Contender, i: int) -> None:
        with nullcontext() if lane.overlap is None else lane.overlap.accumulate():
            lane.backward(loss(lane, i))
        lane.step()
        lane.zero_grad()

    lane = lockstep("two_pass", two_optimizers, step)
    assert lane.overlap.step_count == 5


@in_every_way
def test_with_a_closure(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        def closure() -> torch.Tensor:
            lane.zero_grad()
            with kept(lane):
                found = loss(lane, i)
                lane.backward(found)
            lane.clip()
            return found

        found = lane.optimizer.step(closure)
        lane.zero_grad()
        return found.detach()

    lockstep(way, blocks, step)


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_with_a_scaler(way: str) -> None:
    """The loop may unscale, and clip, and leave the step to the scaler, which leaves it out."""

    def step(lane: Contender, i: int) -> Any:
        scaler = lane.extra = lane.extra or GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with kept(lane):
            lane.backward(scaler.scale(loss(lane, i) * (math.inf if i == 2 else 1.0)))
        scaler.unscale_(lane.optimizer)
        norm = clip_grad_norm_(lane.model.parameters(), 0.1)
        scaler.step(lane.optimizer)
        scaler.update()
        lane.zero_grad()
        return [norm.nan_to_num(), torch.tensor(scaler.get_scale())]

    lockstep(way, blocks, step)


@pytest.mark.parametrize("unscales", [True, False])
def test_with_a_scaler_that_undo_knows(unscales: bool) -> None:
    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        model, optimizer = blocks()
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        overlap = (
            instep.attach(model, optimizer, schedule="backward", undo=True, scaler=scaler, bucket_bytes=SMALL)
            if attach
            else None
        )
        for i in range(6):
            x, y = batch(i)
            with overlap.keep_gradients() if overlap is not None and i % 2 else nullcontext():
                scaler.scale(loss_of(model(x), y) * (math.inf if i in (2, 3) else 1.0)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if overlap is not None:
            overlap.detach()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def test_skip_leaves_a_kept_step_out() -> None:
    def step(lane: Contender, i: int) -> None:
        with kept(lane):
            lane.backward(loss(lane, i) * (math.nan if i == 1 else 1.0))
        if lane.overlap is not None or i != 1:
            lane.step()
        lane.zero_grad()

    lane = lockstep("undo", blocks, step, nonfinite="skip")
    assert lane.overlap.skip_count == 1
    assert lane.overlap.step_count == 4


@pytest.mark.parametrize("options", [{}, {"undo": True}])
def test_raise_writes_nothing_of_a_kept_step(options: dict[str, Any]) -> None:
    """No step is torn: the loop goes on."""
    torch.manual_seed(0)
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward", nonfinite="raise", **options)
    weights = [p.detach().clone() for p in model.parameters()]
    with overlap.keep_gradients():
        (model(batch(0)[0]).sum() * math.nan).backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert all(map(torch.equal, weights, model.parameters()))
    assert overlap.state == "idle"
    optimizer.zero_grad()
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    assert overlap.step_count == 1
    overlap.detach()


def test_nothing_is_written_before_step() -> None:
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL)
    weights = [p.detach().clone() for p in model.parameters()]
    with overlap.keep_gradients():
        model(batch(0)[0]).sum().backward()
    assert overlap.state == "idle"
    assert all(map(torch.equal, weights, model.parameters()))
    model(batch(0)[0])  # a forward, and state: of before the step
    assert not optimizer.state_dict()["state"]
    optimizer.step()
    assert overlap.step_count == 1
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    overlap.detach()


def test_a_first_step_with_gradients_of_zero_is_counted() -> None:
    """A tool that wants an optimizer's state steps with such gradients, and without a backward."""
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward")
    with overlap.keep_gradients():
        (model(batch(0)[0]).sum() * 0).backward()
    optimizer.step()
    assert overlap.step_count == 1
    overlap.detach()


def test_nested_blocks_and_errors_leave_nothing() -> None:
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL)

    def kept_now() -> bool:
        model(batch(0)[0]).sum().backward()
        found = all(type(p.grad) is torch.Tensor for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return found

    with overlap.keep_gradients():
        with overlap.keep_gradients():
            assert kept_now()
        assert kept_now()
    assert not kept_now()
    with pytest.raises(ValueError, match="in between"), overlap.keep_gradients():
        raise ValueError("in between")
    assert not kept_now()
    with overlap.keep_gradients():
        assert kept_now()
    assert not kept_now()
    overlap.detach()


def test_an_error_in_a_kept_backward_leaves_the_step_whole() -> None:
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL)
    weights = [p.detach().clone() for p in model.parameters()]
    out = model(batch(0)[0])
    out.register_hook(_fail)
    with pytest.raises(ValueError, match="in backward"), overlap.keep_gradients():
        out.sum().backward()
    assert overlap.state == "idle"
    assert all(map(torch.equal, weights, model.parameters()))
    optimizer.zero_grad()
    model(batch(0)[0]).sum().backward()
    assert overlap.state == "open"
    optimizer.step()
    assert overlap.step_count == 1
    overlap.detach()


def _fail(gradient: torch.Tensor) -> None:
    raise ValueError("in backward")


def test_one_hook_for_each_bucket_stays() -> None:
    """The short road is left for no kept step."""
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL)
    for i in range(8):
        with overlap.keep_gradients() if i in (0, 2, 5) else nullcontext():
            model(batch(0)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert source_of(overlap)._one_per_bucket
    overlap.detach()


def test_nobody_calls_step() -> None:
    model = nn.Linear(2, 2)
    overlap = attach_stepping_itself(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InstepError, match="schedule='backward'"):
        overlap.keep_gradients()
    overlap.detach()


@pytest.mark.parametrize("options", [{"schedule": "forward"}, {"schedule": "backward"}])
def test_it_does_nothing_elsewhere(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if options["schedule"] == "backward":
        monkeypatch.setenv("INSTEP_DISABLE", "1")
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, **options)
    for _ in range(2):
        with overlap.keep_gradients():
            model(batch(0)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    overlap.synchronize()
    assert overlap.step_count == 2
    overlap.detach()
