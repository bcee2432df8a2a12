"""The attached parameters, and how far the running step has come with each of them."""

from collections.abc import Callable, Iterable, Sequence

import torch

from instep._autograd.placeholders import HeldGradient, Placeholder
from instep._optim.parameters import AttachedParameter
from instep._optim.parts import version_of
from instep._optim.stepper import Stepper


class StepMembers:
    """
    Attributes:
        all: the attached parameters, in the model's order.
        steppers: one of each optimizer.
        offered: the indices of those whose final gradient a source has offered in this step.
        applied: the indices of those that backward has updated in this step.
    """

    def __init__(self, steppers: Sequence[Stepper]) -> None:
        self.all: tuple[AttachedParameter, ...] = ()
        self.steppers = tuple(steppers)
        self.offered: set[int] = set()
        self.applied: set[int] = set()

    def of(self, stepper: Stepper) -> list[AttachedParameter]:
        """Those of one optimizer."""
        return [a for a in self.all if a.stepper is stepper]

    def applied_by(self, stepper: Stepper) -> list[AttachedParameter]:
        """Those of one optimizer that backward has updated."""
        applied = self.applied
        return [a for a in self.all if a.stepper is stepper and a.spec.index in applied] if applied else []

    def left_by(self, stepper: Stepper) -> list[AttachedParameter]:
        """Those of one optimizer that backward has not updated."""
        applied = self.applied
        return [a for a in self.all if a.stepper is stepper and a.spec.index not in applied]

    def is_applied(self, attached: AttachedParameter) -> bool:
        return attached.spec.index in self.applied

    def not_applied(self) -> dict[int, torch.Tensor]:
        """By index: the gradients that backward has left to ``optimizer.step()``."""
        rest = (a for a in self.all if a.spec.index not in self.applied)
        return {a.spec.index: gradient for a in rest if (gradient := gradient_of(a)) is not None}

    def with_gradient(self) -> list[AttachedParameter]:
        return [a for a in self.all if gradient_of(a) is not None]

    def living(self) -> list[torch.Tensor]:
        """The parameters that are still there."""
        return [parameter for attached in self.all if (parameter := attached.peek()) is not None]

    def name_of(self, parameter: torch.Tensor) -> str:
        return next(attached.spec.name for attached in self.all if attached.peek() is parameter)

    def forget(self) -> None:
        """The step is over."""
        self.offered.clear()
        self.applied.clear()


GradientOf = Callable[[AttachedParameter], torch.Tensor | None]


def gradient_of(attached: AttachedParameter) -> torch.Tensor | None:
    """The gradient in ``.grad``; ``None`` also for a placeholder of one that is gone."""
    parameter = attached.get()
    with torch._C.DisableTorchFunctionSubclass():  # instep's own question: nobody who watches need be told
        gradient = parameter.grad
    if isinstance(gradient, HeldGradient):
        parameter.grad = gradient = gradient.use()
    return None if isinstance(gradient, Placeholder) else gradient


def versions_of(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Of parameters that may be watched: nobody is told."""
    with torch._C.DisableTorchFunctionSubclass():
        return [version_of(parameter) for parameter in parameters]


def first_written(members: Sequence[AttachedParameter], versions: Sequence[int]) -> AttachedParameter | None:
    """The first of ``members`` with another version than it had then."""
    found = versions_of([attached.get() for attached in members])
    if found == list(versions):
        return None
    return next(a for a, now, then in zip(members, found, versions, strict=True) if now != then)
