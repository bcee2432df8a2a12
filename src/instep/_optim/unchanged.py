"""Whether the attached parameters are still the model's, and as they were."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from instep._optim.parameters import AttachedParameter, AttachedParameters, Attribute
from instep.errors import StaleAttachmentError

_DTYPE = attrgetter("dtype")
_DEVICE = attrgetter("device")
_SHAPE = attrgetter("shape")


def _what_became_of(attached: AttachedParameter, place: Attribute) -> str:
    parameter, module = attached.get(), place.module()
    if module is not None and any(p is parameter for p in module.parameters()):
        return (
            f"parameter {place.name!r} has another name since attach (pruned, or parametrized). detach(), and attach "
            "again, with the same optimizer: it holds the parameter, and keeps its state"
        )
    silent = " or taken out: the optimizer still holds the old one, and would not train one in its place. "
    return f"parameter {place.name!r} was replaced after attach{attached.replaced(silent)}"


def require_in_place(parameters: AttachedParameters, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ``StaleAttachmentError`` if one of ``parameters``, which are these ``tensors``, has left its device: blocks
    that are swapped are elsewhere during backward."""
    if list(map(_DEVICE, tensors)) == parameters.devices:
        return
    attached, tensor = next((a, t) for a, t in zip(parameters, tensors, strict=True) if t.device != a.spec.device)
    raise StaleAttachmentError(
        f"parameter {attached.spec.name!r} is on {tensor.device} in backward, and was on {attached.spec.device} when "
        "it was attached: it is moved while the model runs (block swap, offloading). schedule='backward' does not step "
        "such parameters. Keep them on one device, or step them in the hooks of the trainer that moves them, without "
        "instep"
    )


def require_unchanged(attached_parameters: Iterable[AttachedParameter]) -> None:
    """Raise ``StaleAttachmentError`` for the first parameter that is not the one that was attached."""
    parameters = AttachedParameters.of(attached_parameters)
    tensors = parameters.tensors()
    held = parameters.in_modules
    with torch._C.DisableTorchFunctionSubclass():  # instep's own question, about parameters that may be watched
        if (
            parameters.homes.hold(tensors)
            and list(map(_DTYPE, tensors)) == parameters.dtypes
            and list(map(_DEVICE, tensors)) == parameters.devices
            and list(map(_SHAPE, tensors if held is parameters else held.tensors())) == held.shapes
        ):
            return
    for attached in parameters:
        parameter, spec = attached.get(), attached.spec
        for place in attached.places:
            if not place.holds(parameter):
                raise StaleAttachmentError(_what_became_of(attached, place))
        if parameter.dtype != spec.dtype or parameter.device != spec.device:
            raise StaleAttachmentError(
                f"parameter {spec.name!r} was {spec.dtype} on {spec.device} when it was attached and is "
                f"{parameter.dtype} on {parameter.device} now. detach(), build the optimizer anew, and attach again: "
                "move and convert a model before its optimizer is built"
            )
        if attached.places and parameter.shape != spec.shape:
            raise StaleAttachmentError(
                f"parameter {spec.name!r} had the shape {tuple(spec.shape)} when it was attached and has "
                f"{tuple(parameter.shape)} now (resized in place: p.data = …). detach(), give the optimizer state of "
                "that shape, and attach again"
            )
