"""Parameters that are added to an optimizer after ``attach``, or taken out of it."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from instep._autograd.pickles import PlainPickles
from instep._optim.parameters import AttachedParameter
from instep._step.schedule import Schedule
from instep._wiring.gathering import Gathering
from instep._wiring.held import Handles, Held
from instep.errors import StaleAttachmentError
from instep.sources import Source
from instep.sources.fsdp.wrappers import put_shards_in_place
from instep.target import Names, name_parameters

Owner = tuple[nn.Module, list[AttachedParameter]]


class Readers(Protocol):
    """What is done before a module reads its parameters: chosen with the schedule."""

    def watch(self, model: nn.Module, owners: Sequence[Owner], handles: Handles) -> None:
        """Hooks on the modules that hold attached parameters themselves."""

    def watch_fsdp1(self, wrapper: nn.Module, mine: Sequence[AttachedParameter], handles: Handles) -> None:
        """Hooks before a ``FullyShardedDataParallel`` gathers these parameters."""


class LateParameters:
    """
    Attributes:
        readers: what is done before a module reads its parameters.
    """

    def __init__(
        self,
        held: Held,
        schedule: Schedule,
        sources: Sequence[Source],
        gathering: Gathering,
        readers: Readers,
        handles: Handles,
    ) -> None:
        self._held = held
        self._schedule = schedule
        self._sources = sources
        self._gathering = gathering
        self.readers = readers
        self._handles = handles
        self._grouped = _parameters_in(held.optimizers())

    def watch(self, model: nn.Module, parameters: Sequence[AttachedParameter]) -> None:
        """Hooks on the modules that hold ``parameters`` themselves."""
        owners: dict[nn.Module, list[AttachedParameter]] = {}
        for attached in parameters:
            for place in attached.places:
                if (owner := place.module()) is not None:
                    owners.setdefault(owner, []).append(attached)
        self.readers.watch(model, list[Owner](owners.items()), self._handles)

    def adopt(self) -> None:
        """Between steps: take in the model's parameters that were added to an optimizer (``add_param_group``) since."""
        optimizers = self._held.optimizers()
        grouped = _parameters_in(optimizers)
        model = self._held.model()
        if grouped == self._grouped or model is None or len(optimizers) < len(self._held.steppers):
            return
        self._require_in_place(grouped)
        put_shards_in_place(model)
        names = name_parameters(model)
        _require_once(grouped, names)
        self._grouped = grouped
        known = {id(attached.peek()): attached for attached in self._schedule.parameters}
        others = {key: names[key] for key in names if key not in known}
        added: Sequence[AttachedParameter] = self._gathering.gather(optimizers, others, len(known))
        everything = {**known, **{id(attached.get()): attached for attached in added}}
        self._schedule.parameters = tuple(everything[key] for key in names if key in everything)
        for source in self._sources:
            added = source.adopt(added)
        self.watch(model, added)
        self._handles.append(PlainPickles(model.modules()))

    def _require_in_place(self, grouped: Sequence[Sequence[int]]) -> None:
        for stepper, found in zip(self._held.steppers, map(set, grouped), strict=True):
            for attached in self._schedule.parameters:
                if attached.stepper is stepper and id(attached.peek()) not in found:
                    raise StaleAttachmentError(
                        f"parameter {attached.spec.name!r} is no longer in {stepper.name}.param_groups. detach() "
                        "before taking parameters out of an optimizer, or now, and attach again after"
                    )


def _require_once(grouped: Sequence[Sequence[int]], names: Names) -> None:
    for key, count in Counter(chain.from_iterable(grouped)).items():
        if count > 1 and key in names:
            raise StaleAttachmentError(
                f"parameter {names[key][1][0].name!r} has come into param_groups a second time: it would be stepped "
                "twice. Take it out of the groups it has come into"
            )


def _parameters_in(optimizers: Sequence[Optimizer]) -> list[list[int]]:
    """By ``id``, of each optimizer."""
    return [
        list(map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups)))
        for optimizer in optimizers
    ]
