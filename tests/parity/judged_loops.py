"""Small training loops of foreign optimizers, beside the plain loop after each step."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import instep
from tests.judged import own_steps_are_judged

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward", "bucket_bytes": 1},
    "undo": {"schedule": "backward", "undo": True},
    "default": {},
}
each_way = pytest.mark.parametrize("way", WAYS)


class Plain(torch.optim.Optimizer):
    """Gradient descent, which calls ``count`` in each ``step()``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.made()

    def made(self) -> None: ...

    def count(self) -> float:
        return 0.0

    def with_gradient(self) -> Iterator[Any]:
        return (p for group in self.param_groups for p in group["params"] if p.grad is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        counted = self.count()
        for p in self.with_gradient():
            p.sub_(p.grad, alpha=0.05 / (1 + counted))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    x = torch.full((3, 4), 0.1 * i + 0.1)
    found: torch.Tensor = model(x).square().mean()
    return found


def usual(model: nn.Module, optimizer: Any, i: int) -> None:
    loss_of(model, i).backward()
    optimizer.step()
    optimizer.zero_grad()


Look = Callable[[Any], Any]


def train(
    make: Callable[[nn.Module], Any], way: str | None, look: Look, learn: Callable[..., None] = usual, steps: int = 6
) -> tuple[list[Any], Any]:
    """What there is after each step; and the attachment's plan."""
    model = layers()
    optimizer = make(model)
    overlap = None
    if way is not None:
        with own_steps_are_judged():
            overlap = instep.attach(model, optimizer, **WAYS[way])
    found = []
    for i in range(steps):
        learn(model, optimizer, i)
        if overlap is not None:
            overlap.synchronize()
        found.append(([p.detach().tolist() for p in model.parameters()], copy.deepcopy(look(optimizer))))
    plan = None
    if overlap is not None:
        plan = overlap.plan
        overlap.detach()
    return found, plan


def require_same(make: Callable[[nn.Module], Any], way: str, look: Look = lambda o: None, **options: Any) -> Any:
    plain, _ = train(make, None, look, **options)
    found, plan = train(make, way, look, **options)
    assert found == plain
    return plan


def calls_while_judged(module: Any, name: str, model: nn.Module, optimizer: Any) -> int:
    """How often a function of a module of instep's is called in the first two updates."""
    function, calls = getattr(module, name), 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args)

    with (
        patch.object(module, name, counted),
        own_steps_are_judged(),
        instep.attach(model, optimizer, **WAYS["backward"]),
    ):
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return calls
