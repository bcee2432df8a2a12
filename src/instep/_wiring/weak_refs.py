"""What an attachment refers to without keeping it alive, and what is to be taken off again."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._optim.stepper import Stepper
from instep.target import Models, Target, Wrapped, called_in


class Handle(Protocol):
    """A hook, or something else that was put on the model or an optimizer."""

    def remove(self) -> None:
        """Take it off."""


Handles = list[Handle]
"""Of one attachment; empty once it is detached."""


class WeakRefs:
    """The model, its wrappers and the optimizers.

    Attributes:
        name: of the model's class, or the classes of several.
        model: the model, or several as one, as far as they are still there; ``None``: none is.
        wrapped: the instances of ``DistributedDataParallel`` and ``Replicated``.
        steppers: one of each optimizer, in their order.
    """

    def __init__(self, target: Target) -> None:
        names = [type(model).__name__ for model in target.called]
        self.name = names[0] if target.called == [target.model] else f"[{', '.join(names)}]"
        self.model: Callable[[], nn.Module | None] = weakref.ref(target.model)
        if isinstance(target.model, Models):
            self.model = partial(_living, [weakref.ref(model) for model in target.called])
        self.wrapped: list[weakref.ref[Wrapped]] = [weakref.ref(wrapper) for wrapper in target.wrapped]
        self.steppers = [Stepper(optimizer) for optimizer in target.optimizers]
        self._optimizers = [weakref.ref(optimizer) for optimizer in target.optimizers]

    def called(self) -> list[nn.Module]:
        """The modules that the loop calls, and that are still there."""
        model = self.model()
        return [] if model is None else called_in(model)

    def optimizers(self) -> list[Optimizer]:
        """Those that are still there."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def living_wrappers(self) -> list[Wrapped]:
        """Those that are still there."""
        return [wrapper for ref in self.wrapped if (wrapper := ref()) is not None]

    def ddps(self) -> list[DistributedDataParallel]:
        """Those of them that are DDP's own."""
        return [wrapper for wrapper in self.living_wrappers() if isinstance(wrapper, DistributedDataParallel)]


def _living(models: "Sequence[weakref.ref[nn.Module]]") -> Models | None:
    """Each under the name that it had among all of them."""
    living = {str(number): model for number, ref in enumerate(models) if (model := ref()) is not None}
    return Models(living) if living else None
