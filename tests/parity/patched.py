"""Optimizer objects as trainers patch them: ``step`` is replaced, and a method beside it steps one parameter."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from tests.cases import two_groups

SHARPNESS = 3.0


@torch.no_grad()
def step_param(self: Any, p: torch.Tensor, group: dict[str, Any]) -> None:
    """By the sign of a running mean, with a step size that depends on the whole parameter."""
    if p.grad is None:
        return
    state = self.state[p]
    if not state:
        state["step"], state["mean"] = 0, torch.zeros_like(p)
    state["step"] += 1
    state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
    size = p.norm().item() / (self.sharpness + state["step"])
    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(state["mean"].sign(), alpha=-group["lr"] * size)


@torch.no_grad()
def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in self.param_groups:
        for p in group["params"]:
            self.step_param(p, group)
    return loss


@torch.no_grad()
def step_parameter(self: Any, p: torch.Tensor, group: dict[str, Any], index: int) -> None:
    if p.grad is not None:
        p.add_(p.grad.sign(), alpha=-group["lr"] * (index + 1))


@torch.no_grad()
def _step_by_index(self: Any, closure: Callable[[], Any] | None = None) -> None:
    for group in self.param_groups:
        for index, p in enumerate(group["params"]):
            self.step_parameter(p, group, index)


def with_step_param(model: nn.Module) -> Any:
    optimizer: Any = torch.optim.AdamW(two_groups(model), lr=1e-2)
    optimizer.sharpness = SHARPNESS
    optimizer.step_param = MethodType(step_param, optimizer)
    optimizer.step = MethodType(step, optimizer)
    return optimizer


def with_step_parameter(model: nn.Module) -> Any:
    optimizer: Any = torch.optim.SGD(two_groups(model), lr=1e-2)
    optimizer.step_parameter = MethodType(step_parameter, optimizer)
    optimizer.step = MethodType(_step_by_index, optimizer)
    return optimizer
