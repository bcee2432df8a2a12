"""The attached parameters, and how far the running step has come with each of them."""

from collections.abc import Callable, Iterable, Sequence

import torch

from instep._autograd.placeholders import HeldGradient, Placeholder
from instep._optim import parts
from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.stepper import Stepper


class StepMembers:
    """
    Attributes:
        steppers: one of each optimizer.
        offered: the indices of those whose final gradient a source has offered in this step.
        applied: the indices of those that backward has updated in this step.
        received: the indices of those of which the parts that other ranks have updated were written here.
    """

    def __init__(self, steppers: Sequence[Stepper]) -> None:
        self.steppers = tuple(steppers)
        self.offered: set[int] = set()
        self.applied: set[int] = set()
        self.received: set[int] = set()
        self._versions: dict[int, int] = {}  # by index, of parameters that were applied: as their update left them
        self.all = ()

    @property
    def all(self) -> AttachedParameters:
        """The attached parameters, in the model's order."""
        return self._all

    @all.setter
    def all(self, parameters: Iterable[AttachedParameter]) -> None:
        self._all = AttachedParameters(parameters)
        self._at = {attached.spec.index: attached for attached in self._all}
        self._of = {
            stepper: AttachedParameters(a for a in self._all if a.stepper is stepper) for stepper in self.steppers
        }

    def at(self, index: int) -> AttachedParameter:
        """The one with this place in the plan."""
        return self._at[index]

    def of(self, stepper: Stepper) -> AttachedParameters:
        """Those of one optimizer."""
        return self._of[stepper]

    def apply(self, bucket: AttachedParameters, parameters: Sequence[torch.Tensor]) -> None:
        """Backward has just updated ``bucket``, which are these ``parameters``."""
        # Versions first: Ctrl-C may come between the two, and each one that was applied is asked for its version.
        self._versions.update(zip(bucket.indices, versions_of(parameters), strict=True))
        self.applied.update(bucket.indices)

    def versions_as_applied(self, applied: AttachedParameters) -> list[int]:
        """The versions of parameters, as their update in backward left them."""
        return list(map(self._versions.__getitem__, applied.indices))

    def applied_by(self, stepper: Stepper) -> AttachedParameters:
        """Those of one optimizer that backward has updated."""
        applied, mine = self.applied, self._of[stepper]
        if not applied:
            return _NONE
        return mine if applied.issuperset(mine.indices) else AttachedParameters(filter(self.is_applied, mine))

    def left_by(self, stepper: Stepper) -> AttachedParameters:
        """Those of one optimizer that backward has not updated."""
        applied, mine = self.applied, self._of[stepper]
        if not applied:
            return mine
        if applied.issuperset(mine.indices):
            return _NONE
        return AttachedParameters(a for a in mine if a.spec.index not in applied)

    def is_applied(self, attached: AttachedParameter) -> bool:
        return attached.spec.index in self.applied

    def is_whole(self, attached: AttachedParameter) -> bool:
        """Whether all of it was updated, also the parts that other ranks update."""
        return self.is_applied(attached) and not self._lacks_parts(attached)

    def is_mixed(self, attached: AttachedParameter) -> bool:
        """Whether this rank's part of it was updated, and other ranks' parts were not."""
        has_part = attached.shard is not None and not attached.shard.is_empty
        return has_part and self.is_applied(attached) and self._lacks_parts(attached)

    def _lacks_parts(self, attached: AttachedParameter) -> bool:
        shard = attached.shard
        return shard is not None and shard.is_shared and attached.spec.index not in self.received

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
        self.received.clear()
        self._versions.clear()


_NONE = AttachedParameters()
GradientOf = Callable[[AttachedParameter], torch.Tensor | None]


def gradient_of(attached: AttachedParameter) -> torch.Tensor | None:
    """The gradient in ``.grad``; ``None`` also for a placeholder of one that is gone."""
    parameter = attached.get()
    with torch._C.DisableTorchFunctionSubclass():  # instep's own question: nobody who watches need be told
        gradient = parameter.grad
    if isinstance(gradient, HeldGradient):
        parameter.grad = gradient = gradient.use()
    return None if isinstance(gradient, Placeholder) else gradient


def versions_of(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Of parameters that may be watched: nobody is told."""
    with torch._C.DisableTorchFunctionSubclass():
        return parts.versions_of(parameters)


def first_written(members: AttachedParameters, versions: Sequence[int]) -> AttachedParameter | None:
    """The first of ``members`` with another version than it had then."""
    found = versions_of(members.tensors())
    if found == versions:
        return None
    return next(a for a, now, then in zip(members, found, versions, strict=True) if now != then)
