"""One call of an optimizer's update, and the stages around it: what an option, or a kind of optimizer, adds to it.

A bucket's update is: divide the bucket into calls (``parameters.calls_of``), enter the stages, run the user's own
update, leave the stages (``stepper``). The regular case, an optimizer of torch's own without options, has two. They are
entered in this order, and left in the opposite one:

    ``UndoCopies`` (``undo``)          ``undo``: copies of what the update writes
    ``CheckedSteps`` (``_step/checking``)  ``check_steps``: copies that the plain ``step()`` steps
    ``SettingsGuard`` (``guards``)     always: one step has one set of settings, which ``optimizer.step()`` finds again
    ``ForeignGuard`` (``foreign``)     an optimizer that is not torch's own: what it reads, writes and draws beside
    ``StateGuard`` (``guards``)        always, where somebody asks: the state is as the update has left it
    ``CopiedEntries`` (here)           the state that the update finds is not simply that of the optimizer
    ``OffloadedState`` (``offload``)   ``offload="host"``: state is on the device for this update
    ``KeyedDraws`` (``random_numbers``)  ``random="keyed"``: generators are seeded for this update

An update counts as begun once the first two are entered: what they raise leaves everything as it was.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.local_shard import LocalShard, shard_of_entry, whole_of_entry
from instep._optim.shadow import GroupLayout, Members, StepCopy, shadow_of, without_autocast
from instep._torch.engine import AS_IT_IS


class Update:
    """One call of the update, over some of the optimizer's parameters, as its stages find it and fill it in.

    Args:
        optimizer: the user's, or a copy of it that stands in for it.
        tensors: to step: parameters, aliases of them, or aliases of this rank's shards of them.
        owned: the optimizer's own parameter for each.
        shards: for each the shard that is stepped in the parameter's place; ``None``: all are stepped whole.

    Attributes:
        members: by group, where the parameters stand in the bucket, and in the group.
        groups: copies of the optimizer's groups, with ``tensors`` as members.
        shared: a copy of what ``state`` holds beside parameters; empty where the update uses none of it.
        state: the mapping that the update finds: the optimizer's own, unless a stage replaces it.
        entries: of each parameter, its state; where ``CopiedEntries`` was entered.
        attributes: to set on the shadow beside those of the optimizer.
        shadow: the optimizer object that steps; ``None``: not made yet.
        made_with: the shadow's attributes as it was made.
    """

    __slots__ = (
        "attributes",
        "entries",
        "groups",
        "made_with",
        "members",
        "optimizer",
        "owned",
        "shadow",
        "shards",
        "shared",
        "state",
        "tensors",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: Sequence[torch.Tensor],
        owned: Sequence[torch.Tensor],
        shards: Sequence[LocalShard | None] | None,
    ) -> None:
        self.optimizer = optimizer
        self.tensors = tensors
        self.owned = owned
        self.shards = shards
        self.members: Sequence[Members] = ()
        self.groups: list[dict[str, Any]] = []
        self.shared: Mapping[Any, Any] = {}
        self.state: MutableMapping[Any, Any] = optimizer.state
        self.entries: list[Any] = []
        self.attributes: dict[str, Any] = {}
        self.shadow: Optimizer | None = None
        self.made_with: dict[str, Any] = {}

    def run(self, step: StepCopy, *, counts_writes: bool) -> None:
        """The user's own update, by a *shadow* of the optimizer: an object of the same class with the same attributes,
        whose ``param_groups`` hold these parameters alone. It lives for this call.

        Args:
            step: steps a copy of the optimizer.
            counts_writes: whether a write of each parameter is counted where the kernel does not: fused ones do not,
                and autograd must notice that a weight was saved for a node that runs later.
        """
        try:
            self._step_shadow(step)
        finally:
            if counts_writes:  # also of an update that raised: what it has written is written
                torch.autograd.graph.increment_version(self.tensors)

    def _step_shadow(self, step: StepCopy) -> None:
        shadow = self.shadow = shadow_of(self.optimizer, self.groups, self.state)
        vars(shadow).update(self.attributes)
        self.made_with = dict(vars(shadow))
        with torch.no_grad(), without_autocast(self.tensors[0].device.type):
            step(shadow, self.members)


class Stage:
    """What one option, or one kind of optimizer, adds to the updates of one optimizer. Here: nothing.

    Attributes:
        steps_every_parameter: whether ``optimizer.step()`` itself is to find no gradient: it could not step with the
            state where that is, or would draw by another key.
        wrote_in_place: whether an update has changed an object beside parameters and their state: nobody can put that
            back. It stays so.
        place: among the stages of options: those with a lower number are entered first.
        gave_back: whether an update of this step has given back memory of an accelerator that it has read.
    """

    steps_every_parameter = False
    wrote_in_place = False
    place = 0
    gave_back = False

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        """A step begins, with its first bucket."""

    def around(self, update: Update) -> AbstractContextManager[Any]:
        """Entered before the update runs, and left after it: with its error, if it has raised."""
        return AS_IT_IS

    def portions_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
        """Where it ``steps_every_parameter``: what of a bucket is stepped by an update of its own."""
        yield slice(0, len(tensors))

    def require_unchanged(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` is called: raise ``HyperparameterChangedError`` if it would find other things than the
        updates of this step have found, or have left."""

    def commit(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` has returned: write into ``optimizer`` what the updates have left for it."""

    def forget(self) -> None:
        """The step is over."""


Begins = Callable[[], None]
"""Called when an update is about to run, after the stages that may refuse it."""


class CopiedEntries(Stage):
    """The update finds the entries of its own parameters alone, in a mapping of its own: where it steps aliases or
    shards, where state lives elsewhere, and of an optimizer of which nobody knows what else it reads. torch's own, over
    the parameters themselves, need none of this: they read and write the entries of the parameters that they are given,
    and no others."""

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        entries = list(map(update.optimizer.state.get, update.owned))
        if update.shards is not None:
            entries = [shard_of_entry(entry, shard) for entry, shard in zip(entries, update.shards, strict=True)]
        update.entries = entries
        own = {p: entry for p, entry in zip(update.tensors, entries, strict=True) if entry is not None}
        update.state = defaultdict(dict, {**update.shared, **own})
        given = list(update.state.values())
        try:
            yield
        finally:
            if update.shadow is not None:  # after an update that raised, too: what it has written is written
                _put_entries(update, update.shadow.state, given)


def _put_entries(update: Update, found: MutableMapping[Any, Any], given: Sequence[Any]) -> None:
    """Put the entries that the update has made into the user's optimizer."""
    state, pairs = update.optimizer.state, list(zip(update.tensors, update.owned, strict=True))
    if update.shards is not None:
        for (p, own), shard in zip(pairs, update.shards, strict=True):
            if shard is not None and p in found:
                found[p] = whole_of_entry(found[p], state.get(own), shard)
    made = len(found) != len(given) or not all(map(is_, found.values(), given))
    if made:
        state.update((own, found[p]) for p, own in pairs if p in found)
        for own in (own for p, own in pairs if p not in found):
            state.pop(own, None)  # the update has deleted it
    if made or update.shards is not None:
        update.entries = list(map(state.get, update.owned))
    if update.shards is not None:
        torch.autograd.graph.increment_version(update.owned)
