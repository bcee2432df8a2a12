"""A model that a loop may call in parts, and an error in its backward."""

from typing import Any

import torch
from torch import nn


class Parts(nn.Module):
    """A trunk and two heads, which a loop may call by themselves: nobody sees a backward begin at these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(self.trunk(x))
        return found


class Raises(torch.autograd.Function):
    error: type[BaseException]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Raises.error("the loop's own")


def raising(x: torch.Tensor, error: type[BaseException]) -> torch.Tensor:
    Raises.error = error
    found: torch.Tensor = Raises.apply(x)
    return found


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
