"""One call of an optimizer's update over one bucket, by a shadow of the optimizer."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.calling import step_bucket, without_autocast
from instep._optim.host_state import StateHome
from instep._optim.kinds import is_torchs_own
from instep._optim.lent_entries import LentEntries
from instep._optim.overrides import MANAGER, moved, places_in_bucket
from instep._optim.parts import LocalShard, shard_of_entry, whole_of_entry
from instep._optim.shadow import shadow_of


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
