"""One call of an optimizer's update over one bucket, by a shadow of the optimizer."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.calling import step_bucket, without_autocast
from instep._optim.kinds import is_torchs_own
from instep._optim.parts import LocalShard
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
        counts_writes: whether a write of each parameter is counted where the kernel does not.

    Attributes:
        shadow: the optimizer object that steps.
        entries: the state of each parameter as the shadow finds it, ``None`` where there is none yet; of an optimizer
            that is not torch's own.
    """

    __slots__ = (
        "_counts_writes",
        "_in_place",
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
        *,
        counts_writes: bool,
    ) -> None:
        self._counts_writes = counts_writes
        self.optimizer = optimizer
        self.tensors = tensors
        self.owned = owned
        self._shards = shards
        # torch's own read and write the entries of the parameters that they are given, and no others.
        self._in_place = tensors is owned and is_torchs_own(optimizer)
        self._values: list[Any] = []
        self.entries: list[Any] = []
        if self._in_place:
            self.shadow = shadow_of(optimizer, groups, optimizer.state)
            return
        self.entries = list(map(optimizer.state.get, owned))
        if shards is not None:
            self.entries = [_shard_of(entry, shard) for entry, shard in zip(self.entries, shards, strict=True)]
        state = {p: entry for p, entry in zip(tensors, self.entries, strict=True) if entry is not None}
        self.shadow = shadow_of(optimizer, groups, defaultdict(dict, {**shared, **state}))
        self._values = list(self.shadow.state.values())

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
        if self._shards is not None:
            for p, own, shard in zip(self.tensors, self.owned, self._shards, strict=True):
                if shard is not None and p in found:
                    found[p] = _whole_of(found[p], optimizer.state.get(own), shard)
        made = len(found) != len(self._values) or not all(map(is_, found.values(), self._values))
        if made:
            optimizer.state.update(
                (own, found[p]) for p, own in zip(self.tensors, self.owned, strict=True) if p in found
            )
        if made or self._shards is not None:
            self.entries = list(map(optimizer.state.get, self.owned))
        if self._shards is not None:
            torch.autograd.graph.increment_version(self.owned)


def _shard_of(entry: dict[Any, Any] | None, shard: LocalShard | None) -> dict[Any, Any] | None:
    if entry is None or shard is None:
        return entry
    return {key: shard.of_state(value) for key, value in entry.items()}


def _whole_of(stepped: dict[Any, Any], entry: dict[Any, Any] | None, shard: LocalShard) -> dict[Any, Any]:
    """The parameter's own entry, with what the update of its shard has added or replaced."""
    entry = {} if entry is None else entry
    for key, value in stepped.items():
        if key not in entry or shard.of_state(entry[key]) is not value:
            entry[key] = shard.as_state(value)
    return entry
