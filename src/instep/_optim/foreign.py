"""Optimizers that are not torch's own: what an update reads, writes and draws beside its parameters and their state.

What torch's own optimizers read and write is known. Of any other, each update is looked at: bucket by bucket, what it
wrote beside its parameters would be written once for each bucket, and what it drew would go to other parameters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.guards import SettingsGuard, UsedSettings
from instep._optim.kinds import STEPPED_WHOLE, beside_parameters, read_by_update
from instep._optim.overrides import MANAGER, moved, places_in_bucket
from instep._optim.random_numbers import Generators
from instep._optim.shadow import GroupLayout
from instep._optim.stages import Stage, Update
from instep._optim.values import alike, fingerprint, held_in, is_immutable, private, reachable_values
from instep._torch.versions import memory_of, version_of
from instep.errors import UnsupportedOptimizerError


class ForeignGuard(Stage):
    """Looks at each update, and at ``optimizer.step()`` for attributes and shared state that were changed since.

    Args:
        name: of the optimizer.
        settings: of the same optimizer: they keep what updates write beside parameters.

    Attributes:
        is_keyed: whether torch's default generators are seeded for each update, and put back before anybody looks.
    """

    def __init__(self, name: str, settings: SettingsGuard) -> None:
        self._name = name
        self._settings = settings
        self._attributes = UsedSettings(name, "attribute ")
        self._shared = UsedSettings(name, "state")
        self.is_keyed = False
        self._shared_state: Mapping[Any, Any] = {}
        self._containers: list[str] = []
        self._reached: list[torch.Tensor] = []
        self._in_modules: list[torch.Tensor] = []
        # By the address of each tensor in the parameters' state: the parameter that first had the tensor, and the
        # version as the last update has left it. The step holds all of these tensors.
        self._seen: dict[int, tuple[int, int]] = {}

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        read = read_by_update(optimizer)
        self._shared_state = shared = beside_parameters(optimizer.state)
        self._attributes.begin(read)
        self._shared.begin(shared)
        self.gave_back = False
        self._seen = {}
        self._containers = [name for name, value in read.items() if name != "defaults" and not is_immutable(value)]
        found = list(reachable_values([read, shared, *({**group, "params": None} for group in optimizer.param_groups)]))
        self._reached = [value for value in found if layout.holds(value)]
        held = (tensor for value in found if isinstance(value, torch.nn.Module) for tensor in _tensors_of(value))
        self._in_modules = [tensor for tensor in held if not layout.holds(tensor)]

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        optimizer, device = update.optimizer, update.tensors[0].device
        update.shared = private(self._shared_state)
        _give_overrides(update)
        attributes = {name: (value := vars(optimizer)[name], fingerprint(value)) for name in self._containers}
        # Of a CPU nobody reads later what was given back.
        places = None if device.type == "cpu" else StorageAddresses(update.tensors, _entries_of(update))
        owners = [read_by_update(optimizer), beside_parameters(optimizer.state), *optimizer.param_groups]
        generators = Generators({device}, owners)
        entries = {id(t): version_of(t) for _, t in _state_tensors(update.owned, list(_entries_of(update)))}
        others = [(p, version_of(p)) for p in self._reached if not any(p is own for own in update.owned)]
        in_modules = [(tensor, version_of(tensor)) for tensor in self._in_modules]
        try:
            yield
        except BaseException as error:
            if generators.drawn() == "yes":
                generators.restore()  # to be drawn again, if the update runs again
            if isinstance(error, Exception) and update.shadow is not None:
                in_place = _any_written(in_modules) or any(True for _ in _changed_in_place(update.shadow, attributes))
                self.wrote_in_place |= in_place or self._wrote_shared_state(update)
            raise
        finally:
            if places is not None:
                self.gave_back |= places.were_left(_entries_of(update))
        self._require_contained(update, entries, others, in_modules, generators)
        assert update.shadow is not None
        for name in _changed_in_place(update.shadow, attributes):
            raise self._settings.writes.refuse_in_place(f"its attribute {name!r}")
        self._settings.writes.in_state(self._changed_state(update), self._shared_state)

    def _require_contained(
        self,
        update: Update,
        entries: Mapping[int, int],
        others: Sequence[tuple[torch.Tensor, int]],
        in_modules: Sequence[tuple[torch.Tensor, int]],
        generators: Generators,
    ) -> None:
        """Raise ``UnsupportedOptimizerError`` if the update wrote or drew something that depends on the buckets."""
        if _any_written(others):
            raise UnsupportedOptimizerError(
                f"{self._name} writes parameters that it was not given, to which its attributes refer: bucket by "
                f"bucket that would happen once per bucket. {STEPPED_WHOLE}"
            )
        if _any_written(in_modules):
            self.wrote_in_place = True
            raise UnsupportedOptimizerError(
                f"{self._name} writes tensors of a module to which its attributes refer (an average of the weights?): "
                "bucket by bucket that would happen once per bucket. Update that module in the loop, after "
                f"optimizer.step(). {STEPPED_WHOLE}"
            )
        self._require_state_of_one(update, entries)
        if generators.drawn() == "yes":
            generators.restore()
            raise draws_what_has_no_key(self._name) if self.is_keyed else draws_in_step(self._name)

    def _require_state_of_one(self, update: Update, versions: Mapping[int, int]) -> None:
        """Raise ``UnsupportedOptimizerError`` if state that several parameters share was written.

        Args:
            versions: of the tensors in the parameters' state before the update.
        """
        for own, tensor in _state_tensors(update.owned, update.entries):
            # One that is empty, or of a wrapper class, has no memory to tell it by.
            place, now = memory_of(tensor).data_ptr() or id(tensor), version_of(tensor)
            first, left = self._seen.get(place, (id(own), now))
            self._seen[place] = first, now
            # A table that all look up was made by one update, and comes to the state of other parameters unwritten.
            if first != id(own) and versions.get(id(tensor), left) != now:
                raise UnsupportedOptimizerError(
                    f"{self._name} writes a state tensor that several parameters share, in an order that bucket by "
                    f"bucket is not that of the plain loop. {STEPPED_WHOLE}"
                )

    def _changed_state(self, update: Update) -> dict[Any, Any]:
        assert update.shadow is not None
        return self._shared.changes(beside_parameters(update.shadow.state))

    def _wrote_shared_state(self, update: Update) -> bool:
        """Whether an update that raised has changed an object in ``state`` that the optimizer's own holds, too."""
        return any(value is self._shared_state.get(key) for key, value in self._changed_state(update).items())

    def forget(self) -> None:
        # Attributes may refer to the model, which this guard must not keep.
        self._attributes.forget()
        self._shared.forget()
        self._shared_state, self._containers, self._reached, self._in_modules, self._seen = {}, [], [], [], {}

    def require_unchanged(self, optimizer: Optimizer) -> None:
        self._attributes.require_same(read_by_update(optimizer))
        self._shared.require_same(beside_parameters(optimizer.state))


def parameters_reached_by(optimizer: Optimizer, layout: GroupLayout) -> list[torch.Tensor]:
    """The optimizer's parameters to which its attributes, groups or shared state refer too: nobody knows what an update
    does with them."""
    groups = ({**group, "params": None} for group in optimizer.param_groups)
    owners = [read_by_update(optimizer), beside_parameters(optimizer.state), *groups]
    return [value for value in reachable_values(owners) if layout.holds(value)]


def draws_in_step(optimizer: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer} draws random numbers in step(): bucket by bucket they would go to other parameters than in the "
        f"plain loop. random='keyed' with a seed gives each parameter draws of its own, which are not the plain "
        f"loop's. {STEPPED_WHOLE}"
    )


def draws_out_of_sight(optimizer: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer} draws random numbers in step(), from a generator that instep does not find: the same step comes "
        "out otherwise when it is taken again. Bucket by bucket the numbers would go to other parameters than in the "
        f"plain loop. {STEPPED_WHOLE}"
    )


def draws_what_has_no_key(optimizer: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer} draws random numbers in step() from Python's random, NumPy's generators or one of its own. "
        f"random='keyed' seeds torch's default generators alone: draw from these. {STEPPED_WHOLE}"
    )


def _changed_in_place(shadow: Optimizer, attributes: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Attributes that are the objects they were, and do not hold what they held."""
    for name, (value, content) in attributes.items():
        if vars(shadow).get(name) is value and not alike(fingerprint(value), content):
            yield name


def _any_written(versions: Sequence[tuple[torch.Tensor, int]]) -> bool:
    return any(version_of(tensor) != version for tensor, version in versions)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of whose writes torch keeps count."""
    return (tensor for tensor in chain(module.parameters(), module.buffers()) if not tensor.is_inference())


def _give_overrides(update: Update) -> None:
    """bitsandbytes: the shadow finds the settings of single parameters where these stand in it."""
    ids = ((id(own), id(p)) for own, p in zip(update.owned, update.tensors, strict=True))
    places = places_in_bucket([members.in_group for members in update.members])
    if (overrides := moved(update.optimizer, places, ids)) is not None:
        update.attributes[MANAGER] = overrides


def _entries_of(update: Update) -> Iterator[Any]:
    return map(update.optimizer.state.get, update.owned)


def _state_tensors(
    owned: Sequence[torch.Tensor], entries: Sequence[Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of the parameters' state, each with its parameter."""
    for own, entry in zip(owned, entries, strict=True):
        for value in (entry or {}).values():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and memory_of(value).numel():
                yield own, value


_Entries = Iterable[Mapping[str, Any] | None]


class StorageAddresses:
    """Where some parameters lie, their gradients, and all tensors in their entries of the optimizer's state. They tell
    whether an update has given memory of an accelerator back: it is the next tensor's at once, and the side stream may
    still be reading it."""

    def __init__(self, parameters: Sequence[torch.Tensor], entries: _Entries) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._in_state = _tensors_in(entries)
        self._all = [(tensor, _place(tensor)) for tensor in (*parameters, *gradients, *self._in_state)]

    def were_left(self, entries: _Entries) -> bool:
        """Whether one of them lies elsewhere by now, or is in the entries no more."""
        now = set(map(id, _tensors_in(entries)))
        return any(_place(t) != place for t, place in self._all) or any(id(t) not in now for t in self._in_state)


def _tensors_in(entries: _Entries) -> list[torch.Tensor]:
    return [memory_of(t) for entry in entries if entry for t in held_in(dict(entry), (torch.Tensor,))]


def _place(tensor: torch.Tensor) -> int:
    memory = memory_of(tensor)
    is_plain = type(memory) in (torch.Tensor, torch.nn.Parameter) and memory.layout is torch.strided
    return memory.data_ptr() if is_plain else 0
