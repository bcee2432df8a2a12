"""``overlap.advice``: whether steps are put off, and what the loop could gain."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._step import observed
from tests.cases import Blocks, batch

STEPS = observed.LAST + 2


class Loop:
    def __init__(self, **options: Any) -> None:
        self.model = Blocks()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.overlap = instep.attach(self.model, self.optimizer, **options)

    def train(self, between: Callable[[nn.Module], Any], steps: int = STEPS) -> str:
        """What is advised in the end, after the sentence on what is put off."""
        for i in range(steps):
            self.model(batch(i)[0]).sum().backward()
            between(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        said = self.overlap.advice.splitlines()
        assert said[0].startswith("Steps are ")
        return "".join(said[1:])


def nothing(model: nn.Module) -> None: ...


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a log": lambda model: [float(p.grad.norm()) for p in model.parameters() if p.grad is not None],
    "another gradient": replace,
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models that are small, most can be freed."""
    monkeypatch.setattr("instep._wiring.advice.DEFAULT_BUCKET_BYTES", 100)


@pytest.mark.parametrize("defer", ["auto", True, False])
def test_a_loop_that_leaves_gradients_alone(defer: Any) -> None:
    said = Loop(defer=defer).train(nothing)
    assert "leaves gradients alone" in said
    assert "schedule='backward' would free 0.0 of their 0.0 MiB" in said
    assert "ms of an iteration" in said


@pytest.mark.parametrize("defer", ["auto", True])
@pytest.mark.parametrize("use", USES)
def test_a_loop_that_uses_gradients(use: str, defer: Any) -> None:
    assert Loop(defer=defer).train(USES[use]) == ""


def test_a_loop_that_logs_now_and_then_within_the_steps_that_are_looked_at() -> None:
    seen = iter(range(STEPS))

    def sometimes(model: nn.Module) -> None:
        if next(seen) == observed.LAST:
            USES["a log"](model)

    assert Loop().train(sometimes) == ""


def test_nothing_is_said_before_it_is_known() -> None:
    assert Loop().train(nothing, steps=observed.LAST) == ""


def test_nothing_can_be_freed_of_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep._wiring.advice.DEFAULT_BUCKET_BYTES", 2**30)
    assert Loop().train(nothing) == ""


def test_parameters_are_of_their_own_class_whenever_the_loop_looks_at_weights() -> None:
    loop = Loop()
    for i in range(STEPS):
        loss = loop.model(batch(i)[0]).sum()
        assert all(type(p) is nn.Parameter for p in loop.model.parameters())
        loss.backward()
        loop.optimizer.step()
        assert all(type(p) is nn.Parameter for p in loop.model.parameters())
        loop.optimizer.zero_grad()


def test_a_model_that_is_dropped_while_it_is_looked_at_is_freed() -> None:
    def life() -> "weakref.ref[nn.Module]":
        loop = Loop()
        for i in range(observed.FIRST + 1):
            loop.model(batch(i)[0]).sum().backward()
            if i < observed.FIRST:
                loop.optimizer.step()
        return weakref.ref(loop.model)

    gc.collect()
    gc.disable()
    try:
        assert life()() is None
    finally:
        gc.enable()


def test_weights_are_those_of_the_step_where_a_closure_runs_backward() -> None:
    """The end of its backward lies in ``step()``: whoever reads weights after it waits for them all the same."""
    loops = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        loops.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
        if attach:
            instep.attach(*loops[-1], defer=True, bucket_bytes=2_000)
    for i in range(STEPS):
        for model, optimizer in loops:

            def closure(model: nn.Module = model, optimizer: Any = optimizer, i: int = i) -> Any:
                optimizer.zero_grad()
                loss = model(batch(i)[0]).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        plain, found = ([p.detach().clone() for p in model.parameters()] for model, _ in loops)
        assert all(map(torch.equal, plain, found)), i


def test_the_schedule_that_was_asked_for_is_not_the_question() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        assert overlap.advice == ""
