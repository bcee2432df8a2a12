"""Backwards that nobody sees begin: the forward returned nothing in which a tensor is found, or was never called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._torch.hooks import nodes_of
from instep.errors import SpentGradientError
from tests.cases import batch
from tests.parity.lockstep import Contender, in_every_way, in_exact_ways, lockstep, loss_of
from tests.parity.unseen import OUTPUTS, Keeps

FOUND = ("slotted dataclass", "slotted", "slotted in slotted", "named tuple", "set")


def by_call(model: Keeps, i: int) -> torch.Tensor:
    model(*batch(i))
    return model.loss


def by_forward(model: Keeps, i: int) -> torch.Tensor:
    model.forward(*batch(i))
    return model.loss


def by_hand(model: Keeps, i: int) -> torch.Tensor:
    """No module is called."""
    x, y = batch(i)
    inside = model.inside
    x = nn.functional.linear(x, inside.inner.weight, inside.inner.bias)
    return loss_of(nn.functional.linear(x, inside.outer.weight, inside.outer.bias), y)


CALLS: dict[str, Callable[[Any, int], torch.Tensor]] = {"call": by_call, "forward": by_forward, "by hand": by_hand}
in_every_call = pytest.mark.parametrize("call", list(CALLS))


def built(output: str) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        model = Keeps(output)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return build


@in_every_way
@in_every_call
@pytest.mark.parametrize("output", list(OUTPUTS))
def test_a_usual_loop(output: str, call: str, way: str) -> None:
    def step(lane: Contender, i: int) -> torch.Tensor:
        return lane.learn(CALLS[call](lane.model, i))

    lane = lockstep(way, built(output), step)
    assert lane.overlap.step_count == 5


@in_exact_ways
@in_every_call
@pytest.mark.parametrize("output", list(OUTPUTS))
def test_a_step_is_left_out_and_micro_batches_add_up(output: str, call: str, way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        CALLS[call](lane.model, i).backward()
        if i % 3 == 1:
            CALLS[call](lane.model, i + 100).backward()
        if i % 3 != 2:
            lane.step()
        lane.zero_grad()

    lockstep(way, built(output), step, steps=7)


@in_exact_ways
@in_every_call
def test_two_forwards_before_two_backwards(call: str, way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        losses = [CALLS[call](lane.model, i), CALLS[call](lane.model, i + 100)]
        for loss in losses:
            loss.backward()
        lane.step()
        lane.zero_grad()

    lockstep(way, built("none"), step)


class Pipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24)), nn.Sequential(nn.Linear(24, 10))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def piped() -> tuple[Any, Any]:
    model = Pipe()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def through_stages(model: Any, i: int) -> torch.Tensor:
    x, y = batch(i)
    for stage in model.stages:
        x = stage(x)
    return loss_of(x, y)


@in_exact_ways
@pytest.mark.parametrize("own", [None, "first", "last"])
def test_stages_of_a_pipeline(own: str | None, way: str) -> None:
    """All forwards of the micro-batches, stage by stage, and then all backwards; the model's own forward among them."""

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        forwards = [through_stages, through_stages]
        if own is not None:
            forwards.insert(0 if own == "first" else 2, lambda model, i: loss_of(model(batch(i)[0]), batch(i)[1]))
        losses = [forward(lane.model, 10 * i + n) for n, forward in enumerate(forwards)]
        for loss in losses[i % 2 :] + losses[: i % 2]:
            loss.backward()
        if i % 4 != 3:
            lane.step()
        lane.zero_grad()
        return [loss.detach() for loss in losses]

    lockstep(way, piped, step, steps=9)


def test_what_is_stepped_on_trial() -> None:
    """What was seen to begin, at an output of the model or of one of its modules."""
    on_trial = []

    def step(lane: Contender, i: int) -> None:
        x, y = batch(i)
        hidden = [loss_of(lane.model(x), y), through_stages(lane.model, i), loss_of(x @ lane.model.only, y)]
        lane.backward(hidden[i % 3])
        if lane.overlap is not None:
            # A parameter that was stepped on trial is watched: its class says so.
            on_trial.append(any(type(p) is not nn.Parameter for p in lane.model.parameters()))
        lane.step()
        lane.zero_grad()

    def build() -> tuple[nn.Module, Any]:
        model, _ = piped()
        model.only = nn.Parameter(torch.randn(16, 10))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    assert lockstep("undo", build, step, steps=6, bucket_bytes=1).overlap.redo_count == 0
    assert on_trial == [True, True, False] * 2


@in_exact_ways
@in_every_call
def test_clipping(call: str, way: str) -> None:
    """Norms that were measured in one backward do not stand for the gradients of the next."""
    norms: dict[int, list[torch.Tensor]] = {}

    def step(lane: Contender, i: int) -> None:
        CALLS[call](lane.model, i).backward()
        if i == 2:
            lane.zero_grad()
            CALLS["by hand"](lane.model, i).backward()  # of other parameters
        lane.step()
        lane.zero_grad()
        if lane.overlap is not None:
            norms.setdefault(id(lane), []).append(lane.overlap.grad_norm)

    lockstep(way, built("none"), step, clip=instep.ClipNorm(0.3))
    (found,) = norms.values()
    assert len({float(norm) for norm in found}) == 5


@pytest.mark.parametrize("output", FOUND)
def test_nodes_are_found(output: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum()
    assert list(nodes_of(OUTPUTS[output](loss))) == [loss.grad_fn]


def test_nodes_of_an_object_that_refers_to_itself() -> None:
    loss = torch.ones(3, requires_grad=True).sum()
    ring: list[object] = [loss, {"a": loss.detach()}]
    ring.append(ring)
    assert list(nodes_of(ring)) == [loss.grad_fn]


def test_a_hook_that_reads_another_gradient_is_told_so_and_may_go_on() -> None:
    """It sees gradients that are still there, and is told of those that are not; nothing is torn by it."""
    model, optimizer = piped()
    first, last = model.stages[0][0].weight, model.stages[1][0].weight
    told: list[str] = []

    def look(_: torch.Tensor) -> None:
        try:
            last.grad.norm()
        except SpentGradientError as error:
            told.append(str(error))

    with instep.attach(model, optimizer, bucket_bytes=1, schedule="backward") as overlap:
        first.register_post_accumulate_grad_hook(look)
        for i in range(3):
            x, y = batch(i)
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert overlap.step_count == 3
    assert len(told) == 3
    assert all("stages.1.0.weight" in text and "hook" in text for text in told)
