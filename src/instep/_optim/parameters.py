"""The attached parameters, and what one call of an optimizer can step of a bucket."""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, methodcaller
from typing import Any

import torch
from torch import nn

from instep._optim.dtensor import is_sharded, may_be_gathered
from instep._optim.kernels import Placing
from instep._optim.local_shard import LocalShard
from instep._optim.shadow import alias_of
from instep._optim.stages import Begins
from instep._optim.stepper import Stepper
from instep._torch.placeholders import SpentGradient
from instep.buckets import ParameterSpec
from instep.errors import StaleAttachmentError


@dataclass(slots=True, eq=False)
class Attribute:
    """One attribute of one module that holds a parameter. A tied parameter has several."""

    module: weakref.ref[nn.Module]
    attribute: str
    name: str

    def found(self) -> torch.Tensor | None:
        """The parameter that is there now."""
        module = self.module()
        # _parameters, not getattr: a parametrized attribute would be computed anew.
        return None if module is None else module._parameters.get(self.attribute)

    def holds(self, parameter: torch.Tensor) -> bool:
        held = self.found()
        # A plain tensor stands in for the parameter during torch.func.functional_call.
        return held is parameter or (held is not None and not isinstance(held, nn.Parameter))


class Homes:
    """The modules that hold parameters, to be asked all at once. Held weakly: a model goes when the loop drops it."""

    def __init__(self, places: Sequence[Sequence[Attribute]]) -> None:
        self._places = places
        # By the id of the reference, of which Python makes one for each module: a module need not have a hash.
        self._refs = list({id(place.module): place.module for place in chain.from_iterable(places)}.values())
        # All that these modules held when each attached one was last found there: names, and parameters by ``id``.
        self._held: tuple[list[str], list[int]] = [], []

    def hold(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether each of these parameters is in its places, in the order in which these were given."""
        modules = [ref() for ref in self._refs]
        if not all(map(is_not, modules, repeat(None))):
            return False
        held = list(map(_PARAMETERS, modules))
        names, ids = list(chain.from_iterable(held)), list(map(id, chain.from_iterable(map(_VALUES, held))))
        if (names, ids) == self._held:  # two passes, in C; an attached one lives, and nobody else has its ``id``
            return True
        pairs = zip(self._places, parameters, strict=True)
        if not all(place.found() is parameter for places, parameter in pairs for place in places):
            return False
        self._held = names, ids
        return True


_PARAMETERS: Callable[[Any], dict[str, torch.Tensor | None]] = attrgetter("_parameters")
_VALUES: Callable[[Any], Iterable[object]] = methodcaller("values")


@dataclass(slots=True, eq=False)
class AttachedParameter:
    """One parameter, with the stepper of the optimizer it belongs to.

    Not held weakly: ``torch.utils.swap_tensors``, by which torch converts a DTensor, another subclass of tensors, or
    any parameter (``torch.__future__.set_swap_module_params_on_conversion``), takes no tensor that anybody refers to
    weakly. So whoever has this lets go of it once model and optimizers, which hold the parameter, are gone.

    Attributes:
        spent: what is left in ``.grad`` after its update; ``None``: nothing.
        shard: of one that is spread over ranks, and may be stepped by its shards.
        mesh: the ranks it is spread over; ``None`` for a plain tensor. torch's foreach kernels do not take parameters
            of several meshes, or plain ones beside them.
    """

    _parameter: torch.Tensor | None
    spec: ParameterSpec
    places: tuple[Attribute, ...]
    stepper: Stepper
    spent: SpentGradient | None
    shard: LocalShard | None = None
    mesh: Hashable = None

    @property
    def is_divided(self) -> bool:
        """Whether each rank steps the part of which the rank has the state, and gets the others' from other ranks."""
        return self.shard is not None and self.shard.state_is_sharded

    def peek(self) -> torch.Tensor | None:
        """The parameter, ``None`` once this has let go of it."""
        return self._parameter

    def let_go(self) -> None:
        """Hold it no more: the model was detached, or is gone with its optimizers."""
        self._parameter = None

    def get(self) -> torch.Tensor:
        """The parameter; ``StaleAttachmentError`` once this has let go of it."""
        parameter = self._parameter
        if parameter is None:
            raise StaleAttachmentError(
                f"parameter {self.spec.name!r} is not attached any more: its model was detached, or is gone"
            )
        return parameter

    def replaced(self, without_new: str) -> str:
        """How a message goes on, and ends, that says that it was replaced.

        Args:
            without_new: what comes next where the optimizer has not got the new one.
        """
        placed = [new for place in self.places if (new := place.found()) is not None]
        held = {id(parameter) for group in self.stepper.groups for parameter in group["params"]}
        if any(id(new) in held for new in placed):
            return ", and the optimizer holds the new one. detach(), and attach again, with the same optimizer"
        again = "detach(), build the optimizer anew on the model's parameters, and attach again"
        if may_be_gathered() or any(map(is_sharded, placed)):
            again += "; with fully_shard: shard first, then build the optimizer, then attach"
        return f"{without_new}{again}"


class AttachedParameters(tuple[AttachedParameter, ...]):
    """A choice of attached parameters that stays, such as a bucket, with that which is asked of all of them.

    A model may have thousands of small parameters: a question to all of them is one pass, in C where that is possible.
    """

    @classmethod
    def of(cls, parameters: Iterable[AttachedParameter]) -> "AttachedParameters":
        return parameters if isinstance(parameters, cls) else cls(parameters)

    def tensors(self) -> list[torch.Tensor]:
        """The parameters; ``StaleAttachmentError`` once they were let go of."""
        tensors = list(map(_PARAMETER, self))
        if all(map(is_not, tensors, repeat(None))):  # a tensor must not be asked whether it equals another
            return tensors
        return [attached.get() for attached in self]

    @cached_property
    def indices(self) -> tuple[int, ...]:
        return tuple(attached.spec.index for attached in self)

    @cached_property
    def names(self) -> list[str]:
        return [attached.spec.name for attached in self]

    @cached_property
    def nbytes(self) -> int:
        """Of all their gradients."""
        return sum(attached.spec.nbytes for attached in self)

    @cached_property
    def steppers(self) -> tuple[Stepper, ...]:
        """One for each optimizer that one of them belongs to."""
        return tuple(dict.fromkeys(attached.stepper for attached in self))

    @cached_property
    def are_plain(self) -> bool:
        """Whether all are plain tensors, that this rank steps whole."""
        return all(attached.shard is None and attached.mesh is None for attached in self)

    @cached_property
    def placing(self) -> Placing:
        """Of a bucket of one optimizer: where its parameters stand, as an earlier step has found out."""
        return Placing()

    @cached_property
    def parts(self) -> "list[tuple[AttachedParameters, list[bool]]]":
        """By optimizer: those of it, and for each of all of them whether it is one."""
        where = [[attached.stepper is stepper for attached in self] for stepper in self.steppers]
        return [(AttachedParameters(compress(self, mine)), mine) for mine in where]

    @cached_property
    def homes(self) -> Homes:
        return Homes([attached.places for attached in self])

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        return [attached.spec.dtype for attached in self]

    @cached_property
    def devices(self) -> list[torch.device]:
        return [attached.spec.device for attached in self]

    @cached_property
    def shapes(self) -> list[torch.Size]:
        return [attached.spec.shape for attached in self]

    @cached_property
    def some_in_modules(self) -> "AttachedParameters | None":
        """Those that modules hold all the time, and not only between the forwards of FSDP; ``None``: all of them. Not
        this itself, which would refer to itself then, and keep the parameters."""
        in_modules = [attached for attached in self if attached.places]
        return None if len(in_modules) == len(self) else AttachedParameters(in_modules)

    @cached_property
    def leave_spent(self) -> tuple[bool, ...]:
        """For each whether a spent gradient is left."""
        return tuple(attached.spent is not None for attached in self)

    @cached_property
    def spent(self) -> tuple[SpentGradient | None, ...]:
        """For each that which is left in ``.grad`` after its update."""
        return tuple(attached.spent for attached in self)


NONE = AttachedParameters()
_PARAMETER: Callable[[AttachedParameter], Any] = attrgetter("_parameter")


def all_there(values: Iterable[object]) -> bool:
    """Whether none of ``values`` is ``None``. A tensor must not be asked whether it equals another."""
    return all(map(is_not, values, repeat(None)))


def none_there(values: Iterable[object]) -> bool:
    return all(map(is_, values, repeat(None)))


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
    if "tensordict" in sys.modules and place.found() is not None:
        silent += (
            "Where others stand in the model for a moment only (to_module()), run that forward under torch.no_grad(), "
            "or attach the module whose forward does it. Else "
        )
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
    some = parameters.some_in_modules
    with torch._C.DisableTorchFunctionSubclass():  # instep's own question, about parameters that may be watched
        if (
            parameters.homes.hold(tensors)
            and list(map(_DTYPE, tensors)) == parameters.dtypes
            and list(map(_DEVICE, tensors)) == parameters.devices
            and list(map(_SHAPE, tensors if some is None else some.tensors()))
            == (parameters if some is None else some).shapes
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


@dataclass(slots=True, eq=False)
class OptimizerCall:
    """Parameters that one call of their optimizer can step, in the form in which it is given them.

    Attributes:
        tensors: to be stepped, with their gradients: the parameters, or aliases of this rank's shards of them.
        parameters: the optimizer's own.
        shards: of those that are stepped by their shard.
        elsewhere: the optimizer's parameters that another rank steps.
        placing: of a bucket that comes in each step.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    shards: list[LocalShard | None] = field(default_factory=list)
    elsewhere: list[torch.Tensor] = field(default_factory=list)
    placing: Placing | None = None

    def step(self, stepper: Stepper, begins: Begins | None = None) -> None:
        """Update them. ``begins``: see ``Stepper.step``."""
        for parameter in self.elsewhere:
            stepper.optimizer().state.setdefault(parameter, {})  # all ranks have the same keys
            torch.autograd.graph.increment_version(parameter)
        if self.tensors:
            shards = self.shards if any(self.shards) else None
            stepper.step(self.tensors, self.parameters, shards, begins, self.placing)


def shard_of_gradient(attached: AttachedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
    """This rank's shard of ``gradient``; ``None`` where the whole is stepped, for which ranks may have to communicate:
    the gradient or the state is spread in another way than the parameter."""
    shard = attached.shard
    if shard is None or not shard.fits(attached.stepper.optimizer().state.get(attached.get(), {})):
        return None
    return shard.of(gradient)


def calls_of(
    bucket: Sequence[AttachedParameter], gradients: Sequence[torch.Tensor], *, alias: bool
) -> list[OptimizerCall]:
    """Divide a bucket, of one optimizer, into what can be stepped in one call: all of it, where every parameter is a
    plain tensor or can be stepped by its shard.

    Args:
        gradients: the one to apply of each: that which is in its ``.grad``.
        alias: step aliases even of parameters that are stepped as they are, so that their ``.grad`` is left alone.
    """
    bucket = AttachedParameters.of(bucket)
    if bucket.are_plain:
        parameters = bucket.tensors()
        tensors = list(map(alias_of, parameters, gradients)) if alias else parameters
        return [OptimizerCall(tensors, parameters, placing=bucket.placing)] if bucket else []
    calls: dict[Hashable, OptimizerCall] = {}
    for attached, gradient in zip(bucket, gradients, strict=True):
        parameter, shard = attached.get(), attached.shard
        local = shard_of_gradient(attached, gradient)
        if shard is not None and not shard.is_owner:
            calls.setdefault(None, OptimizerCall()).elsewhere.append(parameter)
            continue
        if shard is not None and local is not None:
            whole = shard.of(parameter)
            assert whole is not None, "a shard is made for its parameter's own layout"
            tensor, mesh = alias_of(whole, local), None
        else:
            tensor, mesh, shard = alias_of(parameter, gradient) if alias else parameter, attached.mesh, None
        call = calls.setdefault(mesh, OptimizerCall())
        call.tensors.append(tensor)
        call.parameters.append(parameter)
        call.shards.append(shard)
    return list(calls.values())
