"""With ``undo``: the gradients of parameters that a trial has written. The plain loop still has them until
``optimizer.step()``, and they are what the step is done again with."""

from collections.abc import Iterable, Sequence

import torch

from instep._autograd.placeholders import HeldGradient
from instep._optim.lending import Outcome
from instep._optim.parameters import AttachedParameter
from instep._optim.parts import version_of


class KeptGradients:
    """By parameter: the gradient, with its version when it was kept."""

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}
        self._outcomes: dict[int, Outcome] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients)

    def keep(self, attached: AttachedParameter, gradient: torch.Tensor) -> None:
        self._gradients[attached.spec.index] = gradient, version_of(gradient)

    def of(self, attached: AttachedParameter) -> torch.Tensor | None:
        kept = self._gradients.get(attached.spec.index)
        return None if kept is None else kept[0]

    def pairs(self, applied: Iterable[AttachedParameter]) -> list[tuple[AttachedParameter, torch.Tensor]]:
        return [(attached, self._gradients[attached.spec.index][0]) for attached in applied]

    def are_as_left(self, applied: Sequence[AttachedParameter], *, unscaled: bool) -> bool:
        """Whether nobody has changed one of them through another reference to it.

        Args:
            unscaled: whether the loss scale was taken off, through the gradients that stand in their places, which
                autograd does not count.
        """
        return all(
            version_of(gradient) in (version, version + unscaled)
            for gradient, version in (self._gradients[attached.spec.index] for attached in applied)
        )

    def written(self, attached: AttachedParameter, outcome: Outcome) -> None:
        """The update has written the gradient that it was lent."""
        self._outcomes[attached.spec.index] = outcome

    def after_step(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The gradient as the plain loop's ``step()`` leaves it."""
        gradient, outcome = self._gradients[attached.spec.index][0], self._outcomes.get(attached.spec.index)
        return gradient if outcome is None else outcome.of(gradient)

    def forget(self, attached: AttachedParameter) -> None:
        self._gradients.pop(attached.spec.index)
        self._outcomes.pop(attached.spec.index, None)

    def release(self, members: Iterable[AttachedParameter]) -> None:
        """Put the gradients in the places of those that stand in for them, and forget them."""
        for attached in members:
            parameter = attached.peek()
            kept = self._gradients.get(attached.spec.index)
            if parameter is not None and kept is not None and isinstance(parameter.grad, HeldGradient):
                parameter.grad = kept[0]
        self._gradients.clear()

    def forget_outcomes(self) -> None:
        self._outcomes.clear()

    def forget_all(self) -> None:
        self._gradients.clear()
        self._outcomes.clear()
