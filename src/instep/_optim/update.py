"""One call of an optimizer's update over one bucket, and the checks on optimizers that are not torch's own."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.guards import SharedWrites
from instep._optim.kinds import (
    MANAGER,
    STEPPED_WHOLE,
    beside_parameters,
    is_torchs_own,
    moved,
    places_in_bucket,
    read_by_update,
    step_bucket,
    without_autocast,
)
from instep._optim.local_shard import LocalShard, memory_of, shard_of_entry, version_of, whole_of_entry
from instep._optim.memory import Places
from instep._optim.offload import LentEntries, StateHome
from instep._optim.random_numbers import Generators
from instep._optim.shadow import GroupLayout, shadow_of
from instep._optim.values import alike, fingerprint, is_immutable, reached_from
from instep.errors import UnsupportedOptimizerError

# One call of an optimizer's update over one bucket, by a shadow of the optimizer.


class Update:
    """One call of the update.

    Args:
        optimizer: the user's.
        groups: copies of its groups, with the tensors to step as members.
        shared: a copy of what its ``state`` holds beside parameters.
        tensors: to step: parameters, aliases of them, or aliases of this rank's shards of them.
        owned: the optimizer's own parameter for each.
        shards: for each the shard that is stepped in the parameter's place; ``None``: all are stepped whole.
        home: where the state lives, if that is not on the parameters' device.
        counts_writes: whether a write of each parameter is counted where the kernel does not.

    Attributes:
        shadow: the optimizer object that steps.
        entries: the state of each parameter as the shadow finds it, ``None`` where there is none yet; of an optimizer
            that is not torch's own.
    """

    __slots__ = (
        "_counts_writes",
        "_home",
        "_in_place",
        "_lent",
        "_shards",
        "_values",
        "entries",
        "optimizer",
        "owned",
        "shadow",
        "tensors",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        groups: list[dict[str, Any]],
        shared: Mapping[Any, Any],
        tensors: Sequence[torch.Tensor],
        owned: Sequence[torch.Tensor],
        shards: Sequence[LocalShard | None] | None,
        home: StateHome | None,
        *,
        counts_writes: bool,
    ) -> None:
        self._counts_writes = counts_writes
        self._home = home
        self._lent: LentEntries | None = None
        self.optimizer = optimizer
        self.tensors = tensors
        self.owned = owned
        self._shards = shards
        # torch's own read and write the entries of the parameters that they are given, and no others.
        self._in_place = tensors is owned and is_torchs_own(optimizer) and home is None
        self._values: list[Any] = []
        self.entries: list[Any] = []
        if self._in_place:
            self.shadow = shadow_of(optimizer, groups, optimizer.state)
            return
        self.entries = list(map(optimizer.state.get, owned))
        if shards is not None:
            self.entries = [shard_of_entry(entry, shard) for entry, shard in zip(self.entries, shards, strict=True)]
        given = self.entries
        if home is not None:
            self._lent = home.lend(owned, shards, self.entries)
            given = self._lent.entries
        state = {p: entry for p, entry in zip(tensors, given, strict=True) if entry is not None}
        self.shadow = shadow_of(optimizer, groups, defaultdict(dict, {**shared, **state}))
        self._values = list(self.shadow.state.values())

    def give_overrides(self, places: Sequence[Sequence[int]]) -> None:
        """The shadow finds the settings of single parameters where they stand in it. ``places``: see ``run``."""
        if self._in_place:
            return
        ids = ((id(own), id(p)) for own, p in zip(self.owned, self.tensors, strict=True))
        if (overrides := moved(self.optimizer, places_in_bucket(places), ids)) is not None:
            setattr(self.shadow, MANAGER, overrides)

    def run(self, places: Sequence[Sequence[int]]) -> None:
        """``places``: by group, the index of each of its parameters in the user's own group."""
        with torch.no_grad(), without_autocast(self.tensors[0].device.type):
            step_bucket(self.shadow, places)

    def keep_state(self) -> None:
        """Put the entries that the update made into the user's optimizer, and count a write of each parameter. Also
        after an update that raised: what it has written is written."""
        optimizer, found = self.optimizer, self.shadow.state
        if self._counts_writes:
            # Fused kernels count no write, and autograd must notice that a weight was saved for a node that runs later.
            torch.autograd.graph.increment_version(self.tensors)
        if self._in_place:
            return
        if self._home is not None and self._lent is not None:
            beside = [tensor for p in self.tensors for tensor in (p, p.grad) if tensor is not None]
            kept = self._home.take_back(self._lent, list(map(found.get, self.tensors)), beside)
            found.update((p, entry) for p, entry in zip(self.tensors, kept, strict=True) if entry is not None)
        if self._shards is not None:
            for p, own, shard in zip(self.tensors, self.owned, self._shards, strict=True):
                if shard is not None and p in found:
                    found[p] = whole_of_entry(found[p], optimizer.state.get(own), shard)
        made = len(found) != len(self._values) or not all(map(is_, found.values(), self._values))
        if made:
            optimizer.state.update(
                (own, found[p]) for p, own in zip(self.tensors, self.owned, strict=True) if p in found
            )
        if made or self._shards is not None:
            self.entries = list(map(optimizer.state.get, self.owned))
        if self._shards is not None:
            torch.autograd.graph.increment_version(self.owned)


# Checks on the updates of optimizers that are not torch's own: whether one wrote, or drew, beside its parameters.
#
# ``WatchedUpdates`` checks each update of one step. What torch's own optimizers read and write is known: in their steps
# ``TrustedUpdates`` stands in its place, which checks nothing.


class TrustedUpdate:
    """One update of an optimizer of torch's own."""

    def wrote_in_place(self) -> bool:
        """Whether the update, which raised, has changed an object that the optimizer itself holds, too."""
        return False

    def take_back_draws(self) -> None:
        """The update has raised: random numbers that it has drawn are to be drawn again, if it runs again."""

    def end(self) -> None:
        """The update has run, or raised."""

    def require_contained(self) -> None:
        """Raise ``UnsupportedOptimizerError`` if the update wrote or drew something that depends on the buckets."""

    def require_attributes_kept(self) -> None:
        """Raise ``UnsupportedOptimizerError`` if the update changed an attribute of the optimizer in place."""


class TrustedUpdates:
    """The updates of one step, of an optimizer of torch's own.

    Attributes:
        reached: the optimizer's parameters to which its attributes refer too: an update may write them.
        gave_back: whether an update of this step has given back memory of an accelerator that it has read.
    """

    reached: Sequence[torch.Tensor] = ()
    gave_back = False

    def begin(self, update: Update) -> TrustedUpdate:
        return _TRUSTED


class WatchedUpdates(TrustedUpdates):
    """The updates of one step, of another optimizer.

    Args:
        name: of the optimizer.
        read: its attributes that an update may read.
        shared: what its ``state`` holds beside parameters.
        writes: of the same step.
        keyed: whether torch's default generators are seeded for each update, and put back before anybody looks.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        layout: GroupLayout,
        read: Mapping[str, Any],
        shared: Mapping[Any, Any],
        writes: SharedWrites,
        *,
        keyed: bool,
    ) -> None:
        self.name = name
        self._keyed = keyed
        self.writes = writes
        self.containers = [name for name, value in read.items() if name != "defaults" and not is_immutable(value)]
        found = list(reached_from([read, shared, *({**group, "params": None} for group in optimizer.param_groups)]))
        self.reached = [value for value in found if layout.holds(value)]
        held = (tensor for value in found if isinstance(value, torch.nn.Module) for tensor in _tensors_of(value))
        self.in_modules = [tensor for tensor in held if not layout.holds(tensor)]
        # By the address of each tensor in the parameters' state: the parameter that first had the tensor, and the
        # version as the last update has left it. The step holds all of these tensors.
        self._seen: dict[int, tuple[int, int]] = {}

    def begin(self, update: Update) -> TrustedUpdate:
        return _WatchedUpdate(self, update)

    def refuse_draws(self) -> UnsupportedOptimizerError:
        """The error to raise when an update has drawn what is not keyed."""
        return draws_what_has_no_key(self.name) if self._keyed else draws_in_step(self.name)

    def require_state_of_one(self, update: Update, versions: Mapping[int, int]) -> None:
        """Raise ``UnsupportedOptimizerError`` if state that several parameters share was written.

        Args:
            versions: of the tensors in the parameters' state before the update.
        """
        for own, tensor in _state_tensors(update):
            # One that is empty, or of a wrapper class, has no memory to tell it by.
            place, now = memory_of(tensor).data_ptr() or id(tensor), version_of(tensor)
            first, left = self._seen.get(place, (id(own), now))
            self._seen[place] = first, now
            # A table that all look up was made by one update, and comes to the state of other parameters unwritten.
            if first != id(own) and versions.get(id(tensor), left) != now:
                raise UnsupportedOptimizerError(
                    f"{self.name} writes a state tensor that several parameters share, in an order that bucket by "
                    f"bucket is not that of the plain loop. {STEPPED_WHOLE}"
                )


class _WatchedUpdate(TrustedUpdate):
    """One update, with what it may write as that was before."""

    def __init__(self, step: WatchedUpdates, update: Update) -> None:
        self._step = step
        self._update = update
        shadow, device = update.shadow, update.tensors[0].device
        self._attributes = {name: (vars(shadow)[name], fingerprint(vars(shadow)[name])) for name in step.containers}
        # Of a CPU nobody reads later what was given back.
        self._places = None if device.type == "cpu" else Places(update.tensors, self._entries())
        owners = [read_by_update(shadow), beside_parameters(shadow.state), *shadow.param_groups]
        self._generators = Generators({device}, owners)
        self._state = {id(tensor): version_of(tensor) for _, tensor in _state_tensors(update)}
        others = [p for p in step.reached if not any(p is own for own in update.owned)]
        self._others = [(p, version_of(p)) for p in others]
        self._in_modules = [(tensor, version_of(tensor)) for tensor in step.in_modules]

    def wrote_in_place(self) -> bool:
        return _any_written(self._in_modules) or any(True for _ in self._changed_attributes())

    def take_back_draws(self) -> None:
        if self._generators.drawn() == "yes":
            self._generators.restore()

    def end(self) -> None:
        if self._places is not None:
            self._step.gave_back |= self._places.were_left(self._entries())

    def require_contained(self) -> None:
        name = self._step.name
        if _any_written(self._others):
            raise UnsupportedOptimizerError(
                f"{name} writes parameters that it was not given, to which its attributes refer: bucket by bucket "
                f"that would happen once per bucket. {STEPPED_WHOLE}"
            )
        if _any_written(self._in_modules):
            self._step.writes.in_place = True
            raise UnsupportedOptimizerError(
                f"{name} writes tensors of a module to which its attributes refer (an average of the weights?): "
                "bucket by bucket that would happen once per bucket. Update that module in the loop, after "
                f"optimizer.step(). {STEPPED_WHOLE}"
            )
        self._step.require_state_of_one(self._update, self._state)
        if self._generators.drawn() == "yes":
            self._generators.restore()
            raise self._step.refuse_draws()

    def require_attributes_kept(self) -> None:
        for name in self._changed_attributes():
            raise self._step.writes.refuse_in_place(f"its attribute {name!r}")

    def _changed_attributes(self) -> Iterator[str]:
        """Attributes that are the objects they were, and do not hold what they held."""
        for name, (value, content) in self._attributes.items():
            if vars(self._update.shadow).get(name) is value and not alike(fingerprint(value), content):
                yield name

    def _entries(self) -> Iterator[Any]:
        return map(self._update.optimizer.state.get, self._update.owned)


def watched(
    name: str,
    optimizer: Optimizer,
    layout: GroupLayout,
    read: Mapping[str, Any],
    shared: Mapping[Any, Any],
    writes: SharedWrites,
    *,
    keyed: bool,
) -> TrustedUpdates:
    """Look at the updates of a step that begins, as far as this optimizer needs it."""
    if is_torchs_own(optimizer):
        return TrustedUpdates()
    return WatchedUpdates(name, optimizer, layout, read, shared, writes, keyed=keyed)


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


_TRUSTED = TrustedUpdate()


def _any_written(versions: Sequence[tuple[torch.Tensor, int]]) -> bool:
    return any(version_of(tensor) != version for tensor, version in versions)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Those of whose writes torch keeps count."""
    return (tensor for tensor in chain(module.parameters(), module.buffers()) if not tensor.is_inference())


def _state_tensors(update: Update) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of the parameters' state, each with its parameter."""
    for own, entry in zip(update.owned, update.entries, strict=True):
        for value in (entry or {}).values():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and memory_of(value).numel():
                yield own, value
