"""The simplest loop under DDP, and a model and an optimizer for it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d

import instep
from instep.errors import AttachError
from tests.cases import batch


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(100 * dist.get_rank() + seed)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()


def require_two_optimizers_at_once(model: nn.Module) -> None:
    """An attachment takes both; a second one beside that of the first is refused."""
    parts = list(model.parameters())
    first, second = (torch.optim.SGD(part, lr=0.1) for part in (parts[:4], parts[4:]))
    with (
        instep.attach(model, first, schedule="backward"),
        pytest.raises(AttachError, match=r"attach\(model, \[first, second\]\)"),
    ):
        instep.attach(model, second, schedule="backward")
    with instep.attach(model, [first, second], schedule="backward") as overlap:
        for i in range(2):
            loss_of(model, i).backward()
            first.step()
            second.step()
            model.zero_grad()
        assert overlap.step_count == 2


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


work_of: Any = _distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
"""A ``Work`` of a future. The reducer is not Python: of torch 2.6 it knows no ``Work`` that is."""


class Fails(torch.optim.SGD):
    failing = True

    def step(self, closure: Any = None) -> Any:
        if Fails.failing and any(p.shape == (24, 16) for g in self.param_groups for p in g["params"]):
            raise ZeroDivisionError("the update")
        return super().step(closure)


class WithOwn(nn.Module):
    """A module that holds a DDP instance beside parameters of its own."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x) * self.scale
