"""Steps a few parameters with the user's own optimizer, from the first bucket of a step to its last."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.guards import SharedWrites, UsedSettings, WrittenOnDevice
from instep._optim.kinds import (
    STEPPED_WHOLE,
    attributes_of,
    held_by_classes,
    is_torchs_own,
    read_by_update,
    shared_by_updates,
)
from instep._optim.local_shard import LocalShard
from instep._optim.memory import Entries
from instep._optim.offload import StateHome
from instep._optim.random_numbers import KeyedDraws
from instep._optim.shadow import GroupLayout, Members
from instep._optim.update import Update, watched
from instep._optim.values import PER_PARAMETER, Elsewhere, Snapshot, changes, private
from instep._torch.hooks import is_in_step
from instep.errors import HyperparameterChangedError, StaleAttachmentError, UnsupportedOptimizerError

# One step of an optimizer, from its first bucket to ``optimizer.step()``.


_Given = dict[int, Snapshot]
"""The settings that an update was given, of each group with members."""


class OptimizerStep:
    """Steps the buckets of one step, and knows what they were stepped with and what they left.

    Args:
        name: of the optimizer.
        layout: of its groups as they are now.
        home: where the state lives, if that is not on the parameters' device.
        looks_back: whether anybody asks, after an update, if the state was written since.
        keyed: whether updates may draw from torch's default generators, which are seeded for each.

    Attributes:
        writes: what the updates wrote beside parameters and their own state.
        updates: the updates so far, looked at as far as the optimizer needs it.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        layout: GroupLayout,
        home: StateHome | None,
        *,
        looks_back: bool,
        keyed: bool,
    ) -> None:
        self._name = name
        self._home = home
        self._looks_back = looks_back
        self._layout = layout
        self._state = optimizer.state
        self._state_size = len(optimizer.state)
        self._shared_state = shared_by_updates(optimizer)
        read = read_by_update(optimizer)
        self._settings = UsedSettings(name, read, self._shared_state)
        self._left = Entries()  # the state of the parameters, as the updates have left it
        self.writes = SharedWrites(name)
        self.updates = watched(name, optimizer, layout, read, self._shared_state, self.writes, keyed=keyed)

    def step(
        self,
        optimizer: Optimizer,
        tensors: Sequence[torch.Tensor],
        owned: Sequence[torch.Tensor],
        shards: Sequence[LocalShard | None] | None,
        *,
        drawing: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Step one bucket. See ``Update`` for the arguments.

        Args:
            drawing: around the update.
        """
        members_of = self._layout.members_of(owned)
        groups, given = self._groups_of(optimizer, tensors, members_of)
        shared = private(self._shared_state)
        update = Update(optimizer, groups, shared, tensors, owned, shards, self._home, counts_writes=self._looks_back)
        in_group = [members.in_group for members in members_of]
        update.give_overrides(in_group)
        watch = self.updates.begin(update)
        before = attributes_of(update.shadow)
        try:
            with drawing or nullcontext():
                update.run(in_group)
        except BaseException as error:
            watch.take_back_draws()
            if isinstance(error, Exception):
                self.writes.in_place |= watch.wrote_in_place() or self._wrote_shared(update, given)
            raise
        finally:
            update.keep_state()
            watch.end()
        if self._looks_back:
            self._left.add(owned, optimizer.state)
        watch.require_contained()
        for index, settings in given.items():
            changed = settings.changes(update.shadow.param_groups[index])
            self.writes.in_group(index, changed, optimizer.param_groups[index])
        watch.require_attributes_kept()
        self.writes.in_state(self._changed_state(update), self._shared_state)
        self.writes.in_attributes(changes(attributes_of(update.shadow), before))

    def take_in(self, optimizer: Optimizer) -> GroupLayout:
        """Parameters were added to the groups since the step began, and ``step()`` has found gradients of them."""
        if not self._layout.were_moved(optimizer.param_groups):
            self._layout = GroupLayout(self._name, optimizer.param_groups)
        return self._layout

    def require_unchanged(self, optimizer: Optimizer, on_device: WrittenOnDevice) -> None:
        """Raise ``HyperparameterChangedError`` if groups or state are not those the buckets were stepped with."""
        if self._layout.were_moved(optimizer.param_groups):
            raise HyperparameterChangedError(
                f"parameters of {self._name} were moved within its param_groups after backward had already stepped "
                "parameters with the groups as they were. Move them after optimizer.step() or before backward()"
            )
        self._settings.require_same_switches()
        looks = self._settings.looks_at(optimizer)
        self._settings.require_same(looks)
        on_device.require_none(looks)
        if not self._left.are_as_left(optimizer.state):
            raise HyperparameterChangedError(
                f"the state of {self._name} was written between backward() and optimizer.step(), but backward had "
                "already updated it: the plain loop would have written the old one. Write it after optimizer.step() "
                "or before backward()"
            )

    def is_in(self, state: Mapping[Any, Any]) -> bool:
        """Whether ``state`` is the mapping with which the step began."""
        return state is self._state

    def state_was_written(self, optimizer: Optimizer) -> bool:
        """Whether a parameter's state was written since its update, or replaced by one that holds something."""
        return self._left.written or self._left.are_replaced_in(optimizer.state)

    def commit(self, optimizer: Optimizer) -> None:
        """Write into ``optimizer`` what the updates wrote outside of the parameters' own state, and order the entries
        that they added as a plain ``step()`` would have: by group, not by bucket."""
        self.writes.put_into(optimizer)
        for key in self._layout.added_to(optimizer.state, self._state_size):
            optimizer.state[key] = optimizer.state.pop(key)

    def _groups_of(
        self, optimizer: Optimizer, tensors: Sequence[torch.Tensor], members_of: Sequence[Members]
    ) -> tuple[list[dict[str, Any]], _Given]:
        """All groups, empty ones too, in the optimizer's order, and the bucket's parameters in theirs: some updates
        count them."""
        groups: list[dict[str, Any]] = []
        given: _Given = {}
        for index, live in enumerate(optimizer.param_groups):
            # A group that was added since the step began holds none of them.
            members, places = members_of[index] if index < len(members_of) else ([], [])
            used = self._settings.use(index, live, for_members=bool(members))
            group = (used or Snapshot(live)).copy_of(live)
            group["params"] = [tensors[i] for i in members]
            if "param_names" in live:
                group["param_names"] = [live["param_names"][place] for place in places]
            if members and used is not None:
                given[index] = used.of_copy(group)
            groups.append(group)
        return groups, given

    def _changed_state(self, update: Update) -> dict[Any, Any]:
        return self._settings.shared.changes(shared_by_updates(update.shadow))

    def _wrote_shared(self, update: Update, given: _Given) -> bool:
        """Whether an update that raised has changed an object that groups or state of the optimizer hold, too."""
        groups, live = update.shadow.param_groups, update.optimizer.param_groups
        looks: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = [
            *((live[index], settings.changes(groups[index])) for index, settings in given.items()),
            (self._shared_state, self._changed_state(update)),
        ]
        return any(value is before.get(key) for before, changed in looks for key, value in changed.items())


# Steps a few parameters with the user's own optimizer, which stays as it is.
#
# A bucket is stepped by a *shadow* of the optimizer: an object of the same class with the same attributes and the same
# per-parameter state, whose ``param_groups`` hold the bucket's parameters alone. It lives for one call. What the update
# writes outside the parameters' own state (values in a group, keys of ``state`` that are no parameter, attributes) is
# taken from the shadows, must be the same for all of them, and is written into the user's object when the step is
# committed.


class Stepper:
    """Steps the parameters of one optimizer, which it holds weakly.

    Args:
        looks_back: whether anybody asks, after an update, if the state was written since.
        home: where the state lives, if that is not on the parameters' device.

    Attributes:
        home: as above.
        draws: with ``random="keyed"``: what each parameter's update draws from.
        wrote_in_place: whether an update has changed an object beside parameters and their state: nobody can put that
            back.
    """

    def __init__(self, optimizer: Optimizer, *, looks_back: bool = True, home: StateHome | None = None) -> None:
        self.home = home
        self._optimizer = weakref.ref(optimizer)
        self._looks_back = looks_back
        self.name = type(optimizer).__name__
        self.draws: KeyedDraws | None = None
        self.wrote_in_place = False
        self._call_is_seen = False
        self._kept_in: str | None = None  # where the optimizer keeps values of single parameters, its state aside
        self._layout = GroupLayout(self.name, ())
        self._on_device = WrittenOnDevice(self.name)
        self._running: OptimizerStep | None = None

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is in a group of the optimizer, if that is still there."""
        optimizer = self._optimizer()
        return optimizer is not None and any(p is parameter for g in optimizer.param_groups for p in g["params"])

    def called(self) -> None:
        """``step()`` of the optimizer begins. For its pre-hook."""
        self._call_is_seen = is_in_step(self.optimizer())

    @property
    def was_stopped(self) -> bool:
        """Whether the ``step()`` that was begun last, and has not been committed, does not run any more: an error or
        Ctrl-C has ended it. ``False`` also where torch.compile hides it."""
        optimizer = self._optimizer()
        return self._call_is_seen and not (optimizer is not None and is_in_step(optimizer))

    @property
    def runs(self) -> bool:
        """Whether the ``step()`` that was begun last is running: what is asked this has been called by its closure."""
        optimizer = self._optimizer()
        return self._call_is_seen and optimizer is not None and is_in_step(optimizer)

    def step(
        self,
        parameters: Sequence[torch.Tensor],
        in_place_of: Sequence[torch.Tensor] | None = None,
        shards: Sequence[LocalShard | None] | None = None,
    ) -> None:
        """Update ``parameters`` from their ``.grad``, as the optimizer's ``step()`` would, and nothing else.

        The optimizer's and torch's global step hooks do not run. Version counters are bumped even where the
        kernel does not (fused ones), so that autograd still notices a weight that was saved for a later node.

        Args:
            in_place_of: the optimizer's own parameters, where ``parameters`` are aliases of them.
            shards: this rank's shards, of those parameters of which ``parameters`` holds an alias of the shard.

        Raises:
            HyperparameterChangedError: a group was changed since another bucket of this step.
            StaleAttachmentError: a parameter is in no group any more, or the optimizer is gone.
            UnsupportedOptimizerError: the update does what bucket by bucket comes out otherwise than in one call.
        """
        optimizer = self.optimizer()
        running = self._begun(optimizer)
        owned = parameters if in_place_of is None else in_place_of
        if self.takes_all and not all(map(self._layout.holds, owned)):
            self._layout = running.take_in(optimizer)
        try:
            if not self.takes_all:
                running.step(optimizer, parameters, owned, shards)
                return
            for part in self._parts_of(parameters):
                drawing = self.draws.drawing(self.name, owned[part.start]) if self.draws and self.is_keyed else None
                of_part = None if shards is None else shards[part]
                running.step(optimizer, parameters[part], owned[part], of_part, drawing=drawing)
        finally:
            self.wrote_in_place |= running.writes.in_place

    @property
    def is_keyed(self) -> bool:
        """Whether each parameter is stepped by a call of its own, which draws by its key. torch's own never draw."""
        return self.draws is not None and not is_torchs_own(self.optimizer())

    def _parts_of(self, parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
        """What is stepped by a call of its own: each parameter, or as much as there is room for its state."""
        if self.is_keyed or self.home is None:
            yield from (slice(number, number + 1) for number in range(len(parameters)))
        else:
            yield from self.home.portions_of(parameters)

    def require_unchanged(self) -> None:
        """Raise ``HyperparameterChangedError`` if groups or state are not those the buckets were stepped with."""
        optimizer = self.optimizer()
        if self._running is None or not self._running.is_in(optimizer.state):
            raise HyperparameterChangedError(
                f"the state of {self.name} was replaced (load_state_dict?) after backward had already stepped "
                "parameters with the old one. Load before backward() or after optimizer.step()"
            )
        self._running.require_unchanged(optimizer, self._on_device)

    def reached(self) -> list[torch.Tensor]:
        """The optimizer's parameters to which its attributes refer too: nobody knows what an update does with them."""
        return list(self._begun(self.optimizer()).updates.reached)

    def look_elsewhere(self, parameters: Sequence[torch.Tensor]) -> Elsewhere | None:
        """Before a trial of ``parameters``: note where the optimizer may keep values of them. ``None``: torch's own
        optimizers keep all in their state.

        Raises:
            UnsupportedOptimizerError: the optimizer keeps values of parameters outside of its ``state``.
        """
        optimizer = self.optimizer()
        if is_torchs_own(optimizer):
            return None
        places = {f"its attribute {name!r}": value for name, value in read_by_update(optimizer).items()}
        for index, group in enumerate(optimizer.param_groups):
            places |= {f"param_groups[{index}][{k!r}]": v for k, v in group.items() if k not in PER_PARAMETER}
        before = Elsewhere(places | held_by_classes(optimizer), parameters)
        self._kept_in = self._kept_in or before.kept
        if self._kept_in is not None:
            raise self._keeps_in(self._kept_in)
        return before

    def require_all_in_state(self, before: Elsewhere | None) -> None:
        """After the trial: raise ``UnsupportedOptimizerError`` if the update has put values of parameters outside of
        ``state``. They are taken out again."""
        found = None if before is None else before.restore()
        if found is not None:
            self._kept_in, whole = found
            self.wrote_in_place |= not whole
            raise self._keeps_in(self._kept_in)

    def _keeps_in(self, place: str) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"{self.name} keeps values of single parameters in {place}, which undo does not put back. Use "
            "schedule='forward', or no undo"
        )

    @property
    def state_was_written(self) -> bool:
        """Whether the state of a parameter was written since its update in this step, or replaced."""
        optimizer = self._optimizer()
        return optimizer is not None and self._running is not None and self._running.state_was_written(optimizer)

    @property
    def wrote_elsewhere(self) -> bool:
        """Whether this step wrote anything but parameters and their own state."""
        return self._running is not None and bool(self._running.writes)

    @property
    def gave_back(self) -> bool:
        """Whether an update of this step has given back memory of an accelerator that it has read."""
        return self._running is not None and self._running.updates.gave_back

    def commit(self, into: Optimizer | None = None) -> None:
        """End the step: write into the user's optimizer what the shadows wrote outside the parameters' own state.

        Args:
            into: the user's optimizer, where this one steps a copy of it.
        """
        optimizer = into or self.optimizer()
        if self._running is not None:
            self.settle()
            self._running.commit(optimizer)
        self._running = None

    def abort(self) -> None:
        """Forget the step."""
        if self._running is not None:
            self.settle()
        self._running = None

    @property
    def takes_all(self) -> bool:
        """Whether the optimizer's own ``step()`` is to find no gradient: it could not step with the state where that
        is, or draws by another key."""
        return self.home is not None or self.is_keyed

    def bring_home(self) -> None:
        """From now on the state is on the parameters' device."""
        home, self.home = self.home, None
        if home is not None:
            home.give_back()

    def settle(self) -> None:
        """Return when the host may read and write the state."""
        if self.home is not None:
            self.home.finish()

    def optimizer(self) -> Optimizer:
        """The user's optimizer; ``StaleAttachmentError`` if it is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise StaleAttachmentError(
                f"the attached {self.name} no longer exists: keep a reference to an optimizer. Call "
                "instep.attached(model).detach(), and attach another one"
            )
        return optimizer

    def _begun(self, optimizer: Optimizer) -> OptimizerStep:
        """The step that runs; with its first bucket it begins."""
        if self._running is None:
            if not self._layout.is_of(optimizer.param_groups):
                self._layout = GroupLayout(self.name, optimizer.param_groups)
            self._running = OptimizerStep(
                self.name, optimizer, self._layout, self.home, looks_back=self._looks_back, keyed=self.is_keyed
            )
        return self._running


def writes_without_gradient(optimizer: str, parameter: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer}.step() writes parameters without a gradient too: {parameter!r}, which had been updated, was "
        f"written a second time. {STEPPED_WHOLE}"
    )
