"""Optimizer objects whose ``step`` was replaced, with a method beside it that steps one parameter: plain, their own
``step`` runs; attached, the method."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import instep
from instep._step.judging import LEFT
from instep.errors import SpentGradientError, UnsupportedOptimizerError
from tests.cases import Blocks, batch
from tests.judged import own_steps_are_judged
from tests.parity.lockstep import in_every_way, lockstep, loss_of, ways
from tests.parity.patched import step, with_step_param, with_step_parameter

Patch = Callable[[nn.Module], Any]
patched = pytest.mark.parametrize("patch", [with_step_param, with_step_parameter], ids=["step_param", "step_parameter"])


def blocks(patch: Patch) -> tuple[nn.Module, Any]:
    model = Blocks(depth=2)
    return model, patch(model)


@patched
@in_every_way
def test_the_method_is_called_for_each_parameter(way: str, patch: Patch) -> None:
    lockstep(way, lambda: blocks(patch))


@patched
def test_gradients_are_freed_in_backward(patch: Patch) -> None:
    model = Blocks(depth=2)
    optimizer = patch(model)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=1):
        x, y = batch(0)
        for _ in range(LEFT):  # these are compared
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model(x), y).backward()
        gradient: Any = model.outer.weight.grad
        with pytest.raises(SpentGradientError):
            gradient.sum()
        optimizer.step()


def test_detach_puts_the_step_back() -> None:
    model, optimizer = blocks(with_step_param)
    before = vars(optimizer)["step"]
    instep.attach(model, optimizer, schedule="backward").detach()
    assert vars(optimizer)["step"] is before


def _normalized(self: Any, group: dict[str, Any], *lists: list[Any]) -> Any:
    """What torch's step() asks for the gradients of a group: divided by their common norm."""
    found = _TORCHS(self, group, *lists)
    norm = torch.stack([gradient.norm() for gradient in lists[1]]).norm() if lists[1] else 1.0
    lists[1][:] = [gradient / norm for gradient in lists[1]]
    return found


_TORCHS: Any = torch.optim.SGD._init_group


@pytest.mark.parametrize("of_class", [False, True], ids=["of the object", "of the class"])
@in_every_way
def test_what_torch_s_step_calls_is_replaced(way: str, of_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It couples parameters, and no kernel or shadow may step them as torch would."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(depth=2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if not of_class:
            optimizer._init_group = MethodType(_normalized, optimizer)
        return model, optimizer

    if of_class:
        monkeypatch.setattr(torch.optim.SGD, "_init_group", _normalized)
    with own_steps_are_judged():
        lockstep(way, build)


def _by_sign(self: Any, p: torch.Tensor, group: dict[str, Any]) -> None:
    if p.grad is not None:
        p.data.add_(p.grad.sign(), alpha=-group["lr"])


def with_a_loose_method(optimizer: Any) -> None:
    optimizer.step = MethodType(step, optimizer)
    optimizer.step_param = lambda p, group: None


def with_a_loose_step(optimizer: Any) -> None:
    optimizer.step = lambda closure=None: None
    optimizer.step_param = MethodType(_by_sign, optimizer)


def with_the_step_of_another(optimizer: Any) -> None:
    other: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.step = MethodType(step, optimizer)
    optimizer.step_param = MethodType(_by_sign, other)


def with_the_old_step_inside(optimizer: Any) -> None:
    old = optimizer.step

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        return old(closure)

    optimizer.step = MethodType(step, optimizer)
    optimizer.step_param = MethodType(_by_sign, optimizer)


def with_the_object_inside(optimizer: Any) -> None:
    def step_param(self: Any, p: torch.Tensor, group: dict[str, Any]) -> None:
        optimizer.state[p]["seen"] = True

    optimizer.step = MethodType(step, optimizer)
    optimizer.step_param = MethodType(step_param, optimizer)


@pytest.mark.parametrize(
    "replace",
    [
        with_a_loose_method,
        with_a_loose_step,
        with_the_step_of_another,
        with_the_old_step_inside,
        with_the_object_inside,
    ],
)
@ways("backward", "undo")
def test_what_no_copy_could_do_the_object_does_itself(way: str, replace: Callable[[Any], None]) -> None:
    def build() -> Any:
        model = Blocks(depth=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replace(optimizer)
        return model, optimizer

    lockstep(way, build)


def test_a_step_without_a_method_for_one_parameter_is_refused() -> None:
    model = Blocks()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = MethodType(step, optimizer)
    weights = [p.detach().clone() for p in model.parameters()]
    patch = vars(optimizer)["step"]
    with pytest.raises(UnsupportedOptimizerError) as refused:
        instep.attach(model, optimizer, schedule="backward")
    assert "no method step_param(p, group) or step_parameter(p, group, index)" in str(refused.value)
    assert "schedule='forward'" in str(refused.value)
    assert vars(optimizer)["step"] is patch
    assert all(map(torch.equal, weights, model.parameters()))


def _momentum_of_all(self: Any, p: torch.Tensor, group: dict[str, Any]) -> None:
    """Couples parameters."""
    if p.grad is not None:
        self.total = getattr(self, "total", 0.0) + p.grad.sum().item()
        p.data.add_(p.grad, alpha=-group["lr"] * self.total)


def test_a_method_that_couples_parameters_is_left_to_step() -> None:
    def build() -> Any:
        model = Blocks()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step_param = MethodType(_momentum_of_all, optimizer)
        optimizer.step = MethodType(step, optimizer)
        return model, optimizer

    lane = lockstep("backward", build)
    assert "left to optimizer.step(): SGD" in str(lane.overlap.plan.judged)


def test_a_scheduler_does_not_hide_a_replaced_step() -> None:
    """Torch calls no hook around it: backward would step, and ``step()`` once more."""
    model = Blocks()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = MethodType(step, optimizer)
    lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UnsupportedOptimizerError, match="was replaced"):
        instep.attach(model, optimizer, schedule="backward")


@in_every_way
def test_a_scheduler_alone_replaces_nothing(way: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = Blocks(depth=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lr_scheduler.StepLR(optimizer, 1)
        return model, optimizer

    lockstep(way, build)
