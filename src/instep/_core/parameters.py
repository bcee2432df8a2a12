"""The attached parameters: found again by weak reference, and checked for being still the same."""

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from instep._core.placeholders import SpentGradient
from instep._core.plan import ParameterSpec
from instep._core.stepper import Stepper
from instep.errors import StaleAttachmentError


class Place:
    """One attribute of one module that holds a parameter. A tied parameter has several."""

    __slots__ = ("attribute", "module", "name")

    def __init__(self, module: nn.Module, attribute: str, name: str) -> None:
        self.module = weakref.ref(module)
        self.attribute = attribute
        self.name = name

    def holds(self, parameter: torch.Tensor) -> bool:
        module = self.module()
        # _parameters, not getattr: a parametrized attribute would be computed anew.
        held = None if module is None else module._parameters.get(self.attribute)
        # A plain tensor stands in for the parameter during torch.func.functional_call.
        return held is parameter or (held is not None and not isinstance(held, nn.Parameter))


class AttachedParameter:
    """One parameter, held weakly, with the stepper of the optimizer it belongs to."""

    __slots__ = ("_ref", "places", "spec", "spent", "stepper", "version")

    def __init__(
        self,
        parameter: torch.Tensor,
        spec: ParameterSpec,
        places: tuple[Place, ...],
        stepper: Stepper,
        spent: SpentGradient | None,
    ) -> None:
        self._ref = weakref.ref(parameter)
        self.spec = spec
        self.places = places
        self.stepper = stepper
        self.spent = spent  # what is left in .grad after its update; None: nothing
        self.version = -1  # of the tensor, after this step's update

    def peek(self) -> torch.Tensor | None:
        """The parameter, ``None`` if it is gone."""
        return self._ref()

    def get(self) -> torch.Tensor:
        """The parameter; ``StaleAttachmentError`` if it is gone."""
        parameter = self._ref()
        if parameter is None:
            raise StaleAttachmentError(
                f"parameter {self.spec.name!r} was replaced after attach and no longer exists. "
                "Build the optimizer on the new parameters, and attach again"
            )
        return parameter


def require_unchanged(parameters: Iterable[AttachedParameter]) -> None:
    """Raise ``StaleAttachmentError`` for the first parameter that is not the one that was attached."""
    for attached in parameters:
        parameter, spec = attached.get(), attached.spec
        for place in attached.places:
            if not place.holds(parameter):
                raise StaleAttachmentError(
                    f"parameter {place.name!r} was replaced after attach: the optimizer still holds the old one, so "
                    "the new one would silently not train. detach(), rebuild the optimizer, and attach again"
                )
        if parameter.dtype != spec.dtype or parameter.device != spec.device:
            raise StaleAttachmentError(
                f"parameter {spec.name!r} was {spec.dtype} on {spec.device} when it was attached and is "
                f"{parameter.dtype} on {parameter.device} now. Move and convert the model first, then build the "
                "optimizer, then attach"
            )
