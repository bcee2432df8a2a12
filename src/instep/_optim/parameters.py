"""The attached parameters: found again by weak reference, and checked for being still the same."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch
from torch import nn

from instep._autograd.placeholders import SpentGradient
from instep._optim.parts import LocalShard
from instep._optim.plan import ParameterSpec
from instep._optim.shadow import alias_of
from instep._optim.stepper import Stepper
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
    """One parameter, held weakly, with the stepper of the optimizer it belongs to.

    Attributes:
        part: of one that is spread over ranks, and may be stepped by its parts.
        mesh: the ranks it is spread over; ``None`` for a plain tensor. torch's foreach kernels do not take parameters
            of several meshes, or plain ones beside them.
    """

    __slots__ = ("_ref", "mesh", "part", "places", "spec", "spent", "stepper", "version")

    def __init__(
        self,
        parameter: torch.Tensor,
        spec: ParameterSpec,
        places: tuple[Place, ...],
        stepper: Stepper,
        spent: SpentGradient | None,
        part: LocalShard | None = None,
        mesh: Hashable = None,
    ) -> None:
        # torch does not convert a DTensor in place (model.to) that anybody refers to weakly.
        held = weakref.ref(parameter) if mesh is None else partial(_itself, parameter)
        self._ref: Callable[[], torch.Tensor | None] = held
        self.spec = spec
        self.places = places
        self.stepper = stepper
        self.spent = spent  # what is left in .grad after its update; None: nothing
        self.part = part
        self.mesh = mesh
        self.version = -1  # of the tensor, after this step's update

    def peek(self) -> torch.Tensor | None:
        """The parameter, ``None`` if it is gone."""
        return self._ref()

    def let_go(self) -> None:
        """Refer to it no more, not even weakly: ``torch.utils.swap_tensors`` takes no tensor that anybody refers to."""
        self._ref = _nothing

    def get(self) -> torch.Tensor:
        """The parameter; ``StaleAttachmentError`` if it is gone."""
        parameter = self._ref()
        if parameter is None:
            raise StaleAttachmentError(
                f"parameter {self.spec.name!r} was replaced after attach and no longer exists. "
                "Build the optimizer on the new parameters, and attach again; with fully_shard: shard first, then "
                "build the optimizer, then attach"
            )
        return parameter


def _nothing() -> None:
    return None


def _itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


class OptimizerCall:
    """Parameters that one call of their optimizer can step, in the form in which it is given them.

    Attributes:
        tensors: to be stepped, with their gradients: the parameters, or aliases of this rank's parts of them.
        parameters: the optimizer's own.
        parts: of those that are stepped by their part.
        elsewhere: the optimizer's parameters that another rank steps.
    """

    __slots__ = ("elsewhere", "parameters", "parts", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.parameters: list[torch.Tensor] = []
        self.parts: list[LocalShard | None] = []
        self.elsewhere: list[torch.Tensor] = []

    def step(self, stepper: Stepper) -> None:
        """Update them."""
        for parameter in self.elsewhere:
            stepper.optimizer().state.setdefault(parameter, {})  # all ranks have the same keys
            torch.autograd.graph.increment_version(parameter)
        if self.tensors:
            stepper.step(self.tensors, self.parameters, self.parts if any(self.parts) else None)


def part_of_gradient(attached: AttachedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of ``gradient``; ``None`` where the whole is stepped, for which ranks may have to communicate:
    the gradient or the state is spread in another way than the parameter."""
    part = attached.part
    if part is None or not part.fits(attached.stepper.optimizer().state.get(attached.get(), {})):
        return None
    return part.of(gradient)


def calls_of(bucket: Iterable[tuple[AttachedParameter, torch.Tensor]], *, alias: bool) -> list[OptimizerCall]:
    """Divide a bucket, of one optimizer, into what can be stepped in one call: all of it, where every parameter is a
    plain tensor or can be stepped by its part.

    Args:
        bucket: parameters, each with the gradient to apply: the one in its ``.grad``.
        alias: step aliases even of parameters that are stepped as they are, so that their ``.grad`` is left alone.
    """
    found: dict[Hashable, OptimizerCall] = {}
    bucket = list(bucket)
    if not alias and all(a.part is None and a.mesh is None for a, _ in bucket):
        call = OptimizerCall()
        call.tensors = call.parameters = [attached.get() for attached, _ in bucket]
        return [call] if bucket else []
    for attached, gradient in bucket:
        parameter, part = attached.get(), attached.part
        if part is None and attached.mesh is None:
            call = found.get(None) or found.setdefault(None, OptimizerCall())
            call.tensors.append(alias_of(parameter, gradient) if alias else parameter)
            call.parameters.append(parameter)
            call.parts.append(None)
            continue
        local = part_of_gradient(attached, gradient)
        if part is not None and not part.is_owner:
            found.setdefault(None, OptimizerCall()).elsewhere.append(parameter)
            continue
        if part is not None and local is not None:
            whole = part.of(parameter)
            assert whole is not None, "a part is made for its parameter's own layout"
            tensor, mesh = alias_of(whole, local), None
        else:
            tensor, mesh, part = alias_of(parameter, gradient) if alias else parameter, attached.mesh, None
        call = found.setdefault(mesh, OptimizerCall())
        call.tensors.append(tensor)
        call.parameters.append(parameter)
        call.parts.append(part)
    return list(found.values())


def _what_became_of(attached: AttachedParameter, place: Place) -> str:
    parameter, module = attached.get(), place.module()
    new = None if module is None else module._parameters.get(place.attribute)
    if module is not None and any(p is parameter for p in module.parameters()):
        return (
            f"parameter {place.name!r} has another name since attach (pruned, or parametrized). detach(), and attach "
            "again, with the same optimizer: it holds the parameter, and keeps its state"
        )
    if new is not None and any(p is new for g in attached.stepper.optimizer().param_groups for p in g["params"]):
        return (
            f"parameter {place.name!r} was replaced after attach, and the optimizer holds the new one. detach(), and "
            "attach again, with the same optimizer"
        )
    return (
        f"parameter {place.name!r} was replaced after attach: the optimizer still holds the old one, so the new one "
        "would silently not train. detach(), rebuild the optimizer, and attach again; with fully_shard: shard first, "
        "then build the optimizer, then attach"
    )


def require_unchanged(parameters: Iterable[AttachedParameter]) -> None:
    """Raise ``StaleAttachmentError`` for the first parameter that is not the one that was attached."""
    for attached in parameters:
        parameter, spec = attached.get(), attached.spec
        for place in attached.places:
            if not place.holds(parameter):
                raise StaleAttachmentError(_what_became_of(attached, place))
        if parameter.dtype != spec.dtype or parameter.device != spec.device:
            raise StaleAttachmentError(
                f"parameter {spec.name!r} was {spec.dtype} on {spec.device} when it was attached and is "
                f"{parameter.dtype} on {parameter.device} now. Move and convert the model first, then build the "
                "optimizer, then attach"
            )
