"""Parameters that are spread over ranks: the part of one that this rank updates."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class LocalShard(Protocol):
    """This rank's part of one parameter, of its gradient and of its state, as plain tensors.

    It is less than the whole only where the update is elementwise (``is_elementwise``).

    Attributes:
        state_is_sharded: the state is that of the part, so that the parameter can be stepped in no other way.
        is_owner: whether this rank updates any of it.
        is_shared: whether other ranks update parts of what this rank has of the parameter, and send them.
        is_empty: whether this rank updates nothing of it.
    """

    state_is_sharded: bool
    is_owner: bool
    is_shared: bool
    is_empty: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The part of the parameter or of its gradient, in the same memory; ``None`` if ``tensor`` is laid out in
        another way than the parameter."""

    def fits(self, entry: Mapping[Any, Any]) -> bool:
        """Whether all of the parameter's state is spread as the parameter is, or not at all."""

    def of_state(self, value: Any) -> Any:
        """The part of an entry of the optimizer's state; what is not spread stays as it is."""

    def as_state(self, value: Any) -> Any:
        """The entry to keep for one that was made for the part."""


def shard_of_entry(entry: dict[Any, Any] | None, shard: LocalShard | None) -> dict[Any, Any] | None:
    """The part of a parameter's state; ``None``: there is none yet."""
    if entry is None or shard is None:
        return entry
    return {key: shard.of_state(value) for key, value in entry.items()}


def whole_of_entry(stepped: dict[Any, Any], entry: dict[Any, Any] | None, shard: LocalShard) -> dict[Any, Any]:
    """The parameter's own entry, with what an update of its part, whose state is ``stepped``, has added or replaced."""
    entry = {} if entry is None else entry
    for key, value in stepped.items():
        if key not in entry or shard.of_state(entry[key]) is not value:
            entry[key] = shard.as_state(value)
    return entry
