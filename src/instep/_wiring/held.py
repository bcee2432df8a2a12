"""What an attachment refers to without keeping it alive, and what is to be taken off again."""

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from instep._optim.stepper import Stepper
from instep._step.schedule import Schedule
from instep.target import Target, Wrapped


class Handle(Protocol):
    """A hook, or something else that was put on the model or an optimizer."""

    def remove(self) -> None:
        """Take it off."""


Handles = list[Handle]
"""Of one attachment; empty once it is detached."""


class Held:
    """The model, its wrappers and the optimizers.

    Attributes:
        name: of the model's class.
        wrapped: the instances of ``DistributedDataParallel`` and ``Replicated``.
        steppers: one of each optimizer, in their order.
    """

    def __init__(self, target: Target) -> None:
        self.name = type(target.model).__name__
        self.model: weakref.ref[nn.Module] = weakref.ref(target.model)
        self.wrapped: list[weakref.ref[Wrapped]] = [weakref.ref(one) for one in target.wrapped]
        self.steppers = [Stepper(optimizer) for optimizer in target.optimizers]
        self._optimizers = [weakref.ref(optimizer) for optimizer in target.optimizers]

    def optimizers(self) -> list[Optimizer]:
        """Those that are still there."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def living_wrappers(self) -> list[Wrapped]:
        """Those that are still there."""
        return [one for ref in self.wrapped if (one := ref()) is not None]


def living_parameters(schedule: Schedule) -> Iterator[torch.Tensor]:
    """The attached parameters that are still there."""
    for attached in schedule.parameters:
        if (parameter := attached.peek()) is not None:
            yield parameter
