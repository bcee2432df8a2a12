"""A bucket of DDP's whose gradients may arrive after ``backward()`` has returned."""

from collections.abc import Callable, Sequence

import torch

from instep._autograd.placeholders import BeforeUse, HeldGradient
from instep._optim.parameters import AttachedParameter
from instep.sources.crossing.ordered_collectives import OrderedCollective
from instep.sources.in_flight import InFlightBucket


class HeldBucket(InFlightBucket[OrderedCollective]):
    """From the end of backward on a ``HeldGradient`` stands in ``.grad`` of each member, until the bucket was waited
    for.

    Attributes:
        parameters: the attached ones among its members.
    """

    __slots__ = ("_placeholders", "parameters")

    def __init__(
        self, parameters: Sequence[AttachedParameter], members: Sequence[torch.Tensor], communication: OrderedCollective
    ) -> None:
        super().__init__(members, communication)
        self.parameters = tuple(parameters)
        self._placeholders: tuple[HeldGradient, ...] = ()

    def take_off(self, used: Callable[[], BeforeUse | None]) -> None:
        """DDP has ended its backward, and set ``.grad``: ``used`` is called before anything else uses a gradient."""
        self._placeholders = tuple(HeldGradient(_grad(p), used) for p in self.members)
        for parameter, placeholder in zip(self.members, self._placeholders, strict=True):
            parameter.grad = placeholder

    def gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The tensor that ``.grad`` will be once it has arrived; ``None`` if the loop has put something else there."""
        found = attached.get().grad
        return found.held if isinstance(found, HeldGradient) and any(found is p for p in self._placeholders) else None

    def wait_into_grad(self) -> None:
        """Wait, and have ``.grad`` be what it is in the plain loop, where the loop has put nothing else there."""
        waiting = [
            (parameter, placeholder.held)
            for parameter, placeholder in zip(self.members, self._placeholders, strict=False)
            if parameter.grad is placeholder
        ]
        if not waiting:
            return
        try:
            self.wait()
        except BaseException:
            for parameter, _ in waiting:
                parameter.grad = None  # the loop must not find half of a sum
            raise
        for parameter, gradient in waiting:
            parameter.grad = gradient

    def drop(self) -> None:
        """Backward has raised, and maybe in the middle of a sum: no gradient is right."""
        for attached in self.parameters:
            attached.get().grad = None


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None, "DDP has set it: this rank used the parameter"
    return gradient
