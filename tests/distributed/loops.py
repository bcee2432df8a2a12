"""The simplest loop under DDP, and a model and an optimizer for it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d

from tests.cases import batch


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(100 * dist.get_rank() + seed)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()


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
