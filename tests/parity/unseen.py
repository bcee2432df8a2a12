"""Models that return nothing in which a tensor is found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.cases import Blocks
from tests.parity.lockstep import loss_of


@dataclass(slots=True)
class SlottedLoss:
    loss: torch.Tensor


class Slotted:
    __slots__ = ("__inside", "never_set")

    def __init__(self, inside: object) -> None:
        self.__inside = inside


class Named(NamedTuple):
    logits: torch.Tensor
    nothing: None = None


class Opaque:
    """Nobody can know what is in it."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.give = lambda: loss


OUTPUTS: dict[str, Callable[[torch.Tensor], object]] = {
    "none": lambda loss: None,
    "detached": lambda loss: loss.detach(),
    "slotted dataclass": SlottedLoss,
    "slotted": lambda loss: Slotted([loss]),
    "slotted in slotted": lambda loss: Slotted(SlottedLoss(loss)),
    "named tuple": Named,
    "set": lambda loss: {loss},
    "opaque": Opaque,
}


class Keeps(nn.Module):
    """Keeps its loss, and returns something else."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.inside = Blocks()
        self.output = OUTPUTS[output]
        self.loss: Any = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> object:
        self.loss = loss_of(self.inside(x), y)
        return self.output(self.loss)
