"""One step of an optimizer, from its first bucket to ``optimizer.step()``."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.attributes import attributes_of, read_by_update, shared_by_updates
from instep._optim.changes import Snapshot, changes, private
from instep._optim.entries import Entries
from instep._optim.foreign import watched
from instep._optim.host_state import StateHome
from instep._optim.layout import GroupLayout, Members
from instep._optim.parts import LocalShard
from instep._optim.update import Update
from instep._optim.used import UsedSettings, WrittenOnDevice
from instep._optim.written import SharedWrites
from instep.errors import HyperparameterChangedError

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
