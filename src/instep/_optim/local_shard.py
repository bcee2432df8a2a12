"""Parameters that are spread over ranks: the part of one that this rank updates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch

_WITHOUT_LOCAL = frozenset({torch.Tensor, torch.nn.Parameter})
VERSION: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How many writes of a plain tensor autograd has counted."""


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


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory: of a ``DTensor`` its local tensor."""
    if type(tensor) in _WITHOUT_LOCAL:
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def version_of(tensor: torch.Tensor) -> int:
    """What changes with every write that autograd counts. A ``DTensor`` counts those through itself, and those through
    its local tensor, or an alias of that, are counted there."""
    if tensor.is_inference():
        return 0  # none is counted
    memory = memory_of(tensor)
    return tensor._version if memory is tensor else tensor._version + memory._version


def are_plain(values: Iterable[object]) -> bool:
    """Whether all are tensors of torch's own two classes."""
    return _WITHOUT_LOCAL.issuperset(map(type, values))


def are_counted(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are plain tensors of whose writes torch keeps count."""
    return are_plain(tensors) and not any(map(torch.Tensor.is_inference, tensors))


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The ``version_of`` each. There may be thousands, which are seldom anything but plain."""
    if _WITHOUT_LOCAL.issuperset(map(type, tensors)):
        try:
            return list(map(VERSION, tensors))
        except RuntimeError:  # one is an inference tensor
            pass
    return list(map(version_of, tensors))
