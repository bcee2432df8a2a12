"""One call of an optimizer's update, and the stages around it: what an option, or a kind of optimizer, adds to it.

A bucket's update is: divide the bucket into calls (``parameters.calls_of``), prepare and run each (``stepper``). The
regular case, an optimizer of torch's own without options, enters no stage around its call. Others enter, in this order,
and leave in the opposite one:

    ``UndoCopies`` (``undo``)          ``undo``: copies of what the update writes
    ``CopiedEntries`` (here)           the state that the update finds is not simply that of the optimizer
    ``OffloadedState`` (``offload``)   ``offload="host"``: state is on the device for this update
    ``BelongingsGuard`` (``belongings``)  a foreign optimizer: what is kept of its parameters is noted
    ``KeyedDraws`` (``random_numbers``)  ``random="keyed"``: generators are seeded for this update

Two stages look at a step as a whole: ``SettingsGuard`` (``guards``), whose settings each update is prepared with, and
``StateGuard``, which notes the state as each has left it.

An update counts as begun once the first is entered: what that raises leaves everything as it was.

torch's own optimizers are stepped by their kernels (``kernels``) or by a *shadow*: an object of the same class with the
same attributes, whose groups hold these parameters alone. Nothing that such an object holds reaches the user's. A
foreign optimizer steps as itself (``own_object``).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.kinds import CHECKED_ONCE
from instep._optim.local_shard import LocalShard, shard_of_entry, whole_of_entry
from instep._optim.shadow import GroupLayout, Members, shadow_of, without_autocast
from instep._torch.engine import AS_IT_IS
from instep._torch.hooks import undecorated_step


@dataclass(slots=True, eq=False)
class Update:
    """One call of the update, over some of the optimizer's parameters, as its stages find it and fill it in.

    Attributes:
        optimizer: the user's, or a copy of it that stands in for it.
        tensors: to step: parameters, aliases of them, or aliases of this rank's shards of them.
        owned: the optimizer's own parameter for each.
        shards: for each the shard that is stepped in the parameter's place; ``None``: all are stepped whole.
        members: by group, where the parameters stand in the bucket, and in the group.
        state: the mapping that the update finds: the optimizer's own, unless a stage replaces it.
        has_run: whether the update was called: what it has written is written.
    """

    optimizer: Optimizer
    tensors: Sequence[torch.Tensor]
    owned: Sequence[torch.Tensor]
    shards: Sequence[LocalShard | None] | None
    members: Sequence[Members] = ()
    state: MutableMapping[Any, Any] = field(init=False)
    has_run: bool = False

    def __post_init__(self) -> None:
        self.state = self.optimizer.state


class ShadowCall(NamedTuple):
    """The update of some parameters by an object of the same class, one of torch's, that lives for this call.

    Attributes:
        shadow: it. Its groups hold these parameters alone, with the settings that the optimizer's had when it was made.
        lists: what a kernel would be given of the state: that is not known.
    """

    optimizer: Optimizer
    shadow: Optimizer
    device_type: str
    lists: Sequence[list[torch.Tensor]] = ()

    @classmethod
    def of(
        cls, optimizer: Optimizer, tensors: Sequence[torch.Tensor], members: Sequence[Members], state: Any
    ) -> "ShadowCall":
        """``state``: the mapping that the update finds."""
        groups = []
        for index, live in enumerate(optimizer.param_groups):
            # All groups, empty ones too, in the optimizer's order. One that was added since the step began holds none.
            in_bucket = members[index].in_bucket if index < len(members) else ()
            groups.append({**live, "params": [tensors[i] for i in in_bucket]})
        return cls(optimizer, shadow_of(optimizer, groups, state), tensors[0].device.type)

    def run(self, gradients: Sequence[torch.Tensor]) -> None:
        """``gradients``: of the parameters. They are in ``.grad``, where the shadow finds them."""
        with torch.no_grad(), without_autocast(self.device_type):
            undecorated_step(type(self.shadow))(self.shadow)
        if (checked := vars(self.shadow).get(CHECKED_ONCE)) is not None:
            setattr(self.optimizer, CHECKED_ONCE, checked)


def step_shadow(update: Update) -> None:
    ShadowCall.of(update.optimizer, update.tensors, update.members, update.state).run(())


class StagedCall(NamedTuple):
    """One call of the update inside of the stages around it.

    Attributes:
        step: steps the tensors of ``update``, with its state.
        lists: as those of ``ShadowCall``.
    """

    stages: Sequence["Stage"]
    update: Update
    step: Callable[[Update], None]
    lists: Sequence[list[torch.Tensor]] = ()

    def run(self, gradients: Sequence[torch.Tensor]) -> None:
        """``gradients``: of the parameters. They are in ``.grad``."""
        with ExitStack() as entered:
            for stage in self.stages:
                entered.enter_context(stage.around(self.update))
            self.update.has_run = True
            self.step(self.update)


class Stage:
    """What one option, or one kind of optimizer, adds to the updates of one optimizer. Here: nothing.

    Attributes:
        place: among the stages of options: those with a lower number are entered first.
    """

    place = 0

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        """A step begins, with its first bucket."""

    def around(self, update: Update) -> AbstractContextManager[Any]:
        """Entered before the update runs, and left after it: with its error, if it has raised."""
        return AS_IT_IS

    def require_unchanged(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` is called: raise ``HyperparameterChangedError`` if it would find other things than the
        updates of this step have found, or have left."""

    def end_step(self) -> None:
        """The step is over, or was none."""


Begins = Callable[[], None]
"""Called when an update is about to run, inside of the stages of options: these have copied what they put back."""


class CopiedEntries(Stage):
    """The update of a shadow finds the entries of its parameters in a mapping of its own: where it steps aliases or
    shards, and where state lives elsewhere. Over the parameters themselves it needs none: torch's own optimizers read
    and write the entries of the parameters that they are given, and no others."""

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        entries = list(map(update.optimizer.state.get, update.owned))
        if update.shards is not None:
            entries = [shard_of_entry(entry, shard) for entry, shard in zip(entries, update.shards, strict=True)]
        own = {p: entry for p, entry in zip(update.tensors, entries, strict=True) if entry is not None}
        update.state = defaultdict(dict, own)
        given = list(update.state.values())
        try:
            yield
        finally:
            if update.has_run:  # after an update that raised, too: what it has written is written
                _put_entries(update, update.state, given)


def _put_entries(update: Update, entries: MutableMapping[Any, Any], given: Sequence[Any]) -> None:
    """Put the entries that the update has made into the user's optimizer."""
    state, pairs = update.optimizer.state, list(zip(update.tensors, update.owned, strict=True))
    if update.shards is not None:
        for (p, own), shard in zip(pairs, update.shards, strict=True):
            if shard is not None and p in entries:
                entries[p] = whole_of_entry(entries[p], state.get(own), shard)
    made = len(entries) != len(given) or not all(map(is_, entries.values(), given))
    if made:
        state.update((own, entries[p]) for p, own in pairs if p in entries)
        for own in (own for p, own in pairs if p not in entries):
            state.pop(own, None)  # the update has deleted it
    if update.shards is not None:
        torch.autograd.graph.increment_version(update.owned)
