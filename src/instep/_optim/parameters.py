"""The attached parameters, held weakly."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, is_, is_not

import torch
from torch import nn

from instep._autograd.placeholders import SpentGradient
from instep._optim.dtensor import is_sharded, may_be_gathered
from instep._optim.parts import LocalShard
from instep._optim.plan import ParameterSpec
from instep._optim.stepper import Stepper
from instep.errors import StaleAttachmentError


class Attribute:
    """One attribute of one module that holds a parameter. A tied parameter has several."""

    __slots__ = ("attribute", "module", "name")

    def __init__(self, module: nn.Module, attribute: str, name: str) -> None:
        self.module = weakref.ref(module)
        self.attribute = attribute
        self.name = name

    def found(self) -> torch.Tensor | None:
        """The parameter that is there now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.attribute)

    def holds(self, parameter: torch.Tensor) -> bool:
        module = self.module()
        # _parameters, not getattr: a parametrized attribute would be computed anew.
        held = None if module is None else module._parameters.get(self.attribute)
        # A plain tensor stands in for the parameter during torch.func.functional_call.
        return held is parameter or (held is not None and not isinstance(held, nn.Parameter))


class Homes:
    """The modules that hold parameters, to be asked all at once. Held weakly, and so are the parameters: a model is
    freed when the loop drops it."""

    def __init__(self, places: Iterable[Sequence[Attribute]]) -> None:
        # By the id of the reference, of which Python makes one for each module: a module need not have a hash.
        found: dict[int, tuple[weakref.ref[nn.Module], list[str], list[int]]] = {}
        for index, of_parameter in enumerate(places):
            for place in of_parameter:
                _, attributes, indices = found.setdefault(id(place.module), (place.module, [], []))
                attributes.append(place.attribute)
                indices.append(index)
        self._modules = list(found.values())

    def hold(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every module has these parameters in its attributes, in the order in which places were given."""
        for ref, attributes, indices in self._modules:
            module = ref()
            if module is None:
                return False
            held = map(module._parameters.get, attributes)
            if not all(map(is_, held, map(parameters.__getitem__, indices))):
                return False
        return True


class AttachedParameter:
    """One parameter, held weakly, with the stepper of the optimizer it belongs to.

    Attributes:
        shard: of one that is spread over ranks, and may be stepped by its shards.
        mesh: the ranks it is spread over; ``None`` for a plain tensor. torch's foreach kernels do not take parameters
            of several meshes, or plain ones beside them.
    """

    __slots__ = ("_ref", "mesh", "places", "shard", "spec", "spent", "stepper")

    def __init__(
        self,
        parameter: torch.Tensor,
        spec: ParameterSpec,
        places: tuple[Attribute, ...],
        stepper: Stepper,
        spent: SpentGradient | None,
        shard: LocalShard | None = None,
        mesh: Hashable = None,
    ) -> None:
        # torch does not convert a DTensor in place (model.to) that anybody refers to weakly.
        held = weakref.ref(parameter) if mesh is None else partial(_itself, parameter)
        self._ref: Callable[[], torch.Tensor | None] = held
        self.spec = spec
        self.places = places
        self.stepper = stepper
        self.spent = spent  # what is left in .grad after its update; None: nothing
        self.shard = shard
        self.mesh = mesh

    @property
    def is_divided(self) -> bool:
        """Whether each rank steps the part of which the rank has the state, and gets the others' from other ranks."""
        return self.shard is not None and self.shard.state_is_sharded

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
                f"parameter {self.spec.name!r} was replaced after attach and no longer exists{self.replaced('. ')}"
            )
        return parameter

    def replaced(self, without_new: str) -> str:
        """How a message goes on, and ends, that says that it was replaced.

        Args:
            without_new: what comes next where the optimizer has not got the new one.
        """
        found = [new for place in self.places if (new := place.found()) is not None]
        if any(map(self.stepper.has, found)):
            return ", and the optimizer holds the new one. detach(), and attach again, with the same optimizer"
        again = "detach(), build the optimizer anew on the model's parameters, and attach again"
        if may_be_gathered() or any(map(is_sharded, found)):
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
        """The parameters; ``StaleAttachmentError`` if one is gone."""
        found = [attached._ref() for attached in self]
        if all_there(found):
            return found  # type: ignore[return-value]  # none of them is None
        return [attached.get() for attached in self]

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The place of each in the plan."""
        return tuple(attached.spec.index for attached in self)

    @cached_property
    def names(self) -> list[str]:
        """Their names in the model."""
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
    def homes(self) -> Homes:
        return Homes([attached.places for attached in self])

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """That of each when it was attached."""
        return [attached.spec.dtype for attached in self]

    @cached_property
    def devices(self) -> list[torch.device]:
        return [attached.spec.device for attached in self]

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """That of each when it was attached."""
        return [attached.spec.shape for attached in self]

    @cached_property
    def in_modules(self) -> "AttachedParameters":
        """Those that modules hold all the time, and not only between the forwards of FSDP."""
        found = [attached for attached in self if attached.places]
        return self if len(found) == len(self) else AttachedParameters(found)

    @cached_property
    def leave_spent(self) -> tuple[bool, ...]:
        """For each whether a spent gradient is left."""
        return tuple(attached.spent is not None for attached in self)

    @cached_property
    def spent(self) -> tuple[SpentGradient | None, ...]:
        """For each that which is left in ``.grad`` after its update."""
        return tuple(attached.spent for attached in self)


GRADIENT: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


def all_there(values: Iterable[object]) -> bool:
    """Whether none of ``values`` is ``None``. A tensor must not be asked whether it equals another."""
    return all(map(is_not, values, repeat(None)))


def none_there(values: Iterable[object]) -> bool:
    """Whether all of ``values`` are ``None``."""
    return all(map(is_, values, repeat(None)))


def _nothing() -> None:
    return None


def _itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter
