"""Optimizers that write, replace or clear ``p.grad`` in ``step()``: coupled decay, centralized gradients, and the like.
Before the step the loop has its own gradients, after it those that the plain step leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from instep import ClipNorm
from instep.errors import SpentGradientError
from tests.cases import Blocks, batch, optimizer_cases, two_groups
from tests.parity.changes import Decays, Replaces, Writes
from tests.parity.lockstep import UNDO, Contender, Refused, Step, lockstep, loss_of

WAYS: dict[str, dict[str, Any]] = {"forward": {}, "late": {}, **UNDO}
in_exact_ways = pytest.mark.parametrize("way", WAYS)
CLIP = 0.1


class DecaysData(Writes):
    """As old optimizers do: no version tells."""

    def write(self, p: Any) -> torch.Tensor:
        gradient = p.grad.data
        gradient.add_(p.data, alpha=0.3)
        return gradient


class Centralizes(Writes):
    def write(self, p: Any) -> torch.Tensor:
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        return p.grad


class WritesAndReplaces(Writes):
    def write(self, p: Any) -> torch.Tensor:
        p.grad.mul_(0.5)
        p.grad = p.grad + 0.3 * p
        return p.grad


class Clears(Writes):
    def write(self, p: Any) -> torch.Tensor:
        gradient, p.grad = p.grad, None
        return gradient


class WritesLater(Writes):
    """Not in the steps in which it is tried out."""

    def write(self, p: Any) -> torch.Tensor:
        count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return p.grad.add_(p, alpha=0.3) if count > 3 else p.grad


WRITERS = [Decays, DecaysData, Centralizes, Replaces, WritesAndReplaces, Clears, WritesLater]
each_writer = pytest.mark.parametrize("kind", WRITERS)


def building(kind: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = Blocks(depth=2)
        return model, kind(two_groups(model))

    return build


def compare(way: str, kind: Any, step: Step, **options: Any) -> Contender:
    return lockstep("undo" if way in UNDO else way, building(kind), step, 6, **{**WAYS[way], **options})


def gradients(lane: Contender) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in lane.model.parameters()]


def iteration(between: Callable[[Contender], Any] = lambda lane: None, clear: bool = True, micro: int = 1) -> Step:
    """Returns what is found before the step, and in ``.grad`` after it."""

    def step(lane: Contender, i: int) -> Any:
        for n in range(micro):
            x, y = batch(micro * i + n)
            loss_of(lane.model(x), y).backward()
        # A view of the gradients' memory, as DDP's buckets are.
        found = between(lane) if i % 2 else None
        lane.step()
        after = gradients(lane)
        if clear:
            lane.zero_grad()
        return [found, *after]

    return step


def clip(lane: Contender) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(lane.model.parameters(), CLIP)


def norm(lane: Contender) -> torch.Tensor:
    return nn.utils.get_total_norm([p.grad for p in lane.model.parameters() if p.grad is not None])


BETWEEN = {"nothing": lambda lane: None, "its own clip": clip, "a logged norm": norm}


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("between", list(BETWEEN))
@each_writer
@in_exact_ways
def test_gradients_before_and_after_the_step(way: str, kind: Any, between: str, clear: bool) -> None:
    compare(way, kind, iteration(BETWEEN[between], clear))


@pytest.mark.parametrize("limit", [CLIP, 1e6])
@each_writer
@in_exact_ways
def test_clipped_by_norm(way: str, kind: Any, limit: float) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss_of(lane.model(batch(i)[0]), batch(i)[1]).backward()
        if lane.overlap is None:
            nn.utils.clip_grad_norm_(lane.model.parameters(), limit)
        for optimizer in lane.optimizers:
            optimizer.step()
        after = gradients(lane)
        lane.zero_grad()
        return after

    compare(way, kind, step, clip=ClipNorm(limit))


@each_writer
@in_exact_ways
def test_micro_batches(way: str, kind: Any) -> None:
    compare(way, kind, iteration(micro=2))


@each_writer
def test_gradients_after_the_step_are_spent_by_default(kind: Any) -> None:
    spent = {"backward": Refused(SpentGradientError, "idle")}
    lockstep("backward", building(kind), iteration(), refused=spent)


@each_writer
def test_weights_are_the_plain_ones_by_default(kind: Any) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss_of(lane.model(batch(i)[0]), batch(i)[1]).backward()
        lane.step()
        lane.zero_grad()

    lockstep("backward", building(kind), step)


@pytest.mark.parametrize(("name", "cls", "kwargs"), list(optimizer_cases()), ids=lambda value: str(value)[:30])
def test_torchs_own_write_no_gradient(name: str, cls: Any, kwargs: dict[str, Any]) -> None:
    """They are lent none. A fused kernel that is given a loss scale writes the unscaled gradient: see the next test."""
    model = Blocks(depth=1)
    optimizer = cls(two_groups(model), **kwargs)
    for i in range(6):
        loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        found = [p.grad for p in model.parameters()]
        before = gradients(Contender(model, optimizer, {}))
        optimizer.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), found, strict=True))
        assert all(map(torch.equal, before, found))  # type: ignore[arg-type]
        optimizer.zero_grad()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
@in_exact_ways
def test_a_fused_step_that_takes_off_the_loss_scale(way: str, name: str, given: bool) -> None:
    scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]

    def build() -> Any:
        model = Blocks(depth=2)
        return model, getattr(torch.optim, name)(two_groups(model), lr=1e-2, fused=True)

    def step(lane: Contender, i: int) -> Any:
        scaler = scalers[lane.overlap is not None]
        scaler.scale(loss_of(lane.model(batch(i)[0]), batch(i)[1])).backward()
        scaler.step(lane.optimizer)
        scaler.update()
        after = gradients(lane)
        lane.zero_grad()
        return after

    options = {"scaler": scalers[1]} if given and way in UNDO else {}
    lockstep("undo" if way in UNDO else way, build, step, 6, **{**WAYS[way], **options})


class ReplacesLater(Writes):
    def write(self, p: Any) -> torch.Tensor:
        count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
        if count > 14:
            p.grad = p.grad + 0.3 * p
        return p.grad


@pytest.mark.parametrize("way", ["forward", "late"])
def test_a_gradient_replaced_for_the_first_time_after_many_steps(way: str) -> None:
    lockstep(way, building(ReplacesLater), iteration(), 17)
