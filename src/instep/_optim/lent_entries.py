"""Entries of optimizer state that live in host memory, copied to a device for one update, and back."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from instep._optim.parts import are_plain, memory_of
from instep._optim.reach import reached_from
from instep.errors import UnsupportedOptimizerError

Entry = dict[Any, Any]
"""The state of one parameter."""

_CONTAINERS = (dict, list, tuple)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of state that live in host memory."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_at_home(value):
                yield value
        elif type(value) is dict:
            yield from tensors_in(value.values())
        elif type(value) in _CONTAINERS:
            yield from tensors_in(value)


def is_at_home(tensor: torch.Tensor) -> bool:
    """A tensor of one element stays where the optimizer has made it: some count steps on the host, others on the
    device."""
    return tensor.device.type == "cpu" and tensor.numel() > 1


class LentEntries:
    """Copies of ``entries`` on ``device``, made on the current stream.

    Args:
        optimizer: its name.

    Attributes:
        entries: the copies.
        used: tensors on the device that copies were made into, or from.
        others: tensors on the device that somebody else has put into the state.
    """

    def __init__(self, optimizer: str, entries: Sequence[Entry | None], device: torch.device) -> None:
        self.device = device
        self.used: list[torch.Tensor] = []
        self._optimizer = optimizer
        # By the id of what was lent: that, and what it is a copy of.
        self._homes: dict[int, tuple[Any, Any]] = {}
        self.others: list[torch.Tensor] = []
        self._made: dict[int, torch.Tensor] = {}  # by the id of the host tensor
        self._memory: set[int] = set()
        with torch.no_grad():
            self.entries: list[Entry | None] = [self._lent(entry) for entry in entries]
        self._made.clear()

    def _lent(self, value: Any) -> Any:
        copied: Any
        if isinstance(value, torch.Tensor):
            if not is_at_home(value):
                if value.numel() > 1:
                    self.others.append(value)
                return value
            if (copied := self._made.get(id(value))) is None:
                copied = torch.empty_like(value, device=self.device).copy_(value, non_blocking=True)
                self._made[id(value)] = copied
                self.used.append(copied)
        elif type(value) is dict:
            copied = {key: self._lent(item) for key, item in value.items()}
        elif type(value) in _CONTAINERS:
            copied = type(value)(map(self._lent, value))
        else:
            return value
        self._homes[id(copied)] = copied, value
        return copied

    def are_at_home(self, entries: Sequence[Entry | None]) -> None:
        """Pinned tensors in ``entries`` are not to be moved."""
        self._homes.update((id(t), (t, t)) for t in tensors_in(entries) if t.is_pinned())

    def take_back(self, stepped: Sequence[Entry | None], beside: Sequence[torch.Tensor]) -> list[Entry | None]:
        """Copy what was stepped to the host, on the current stream: lent tensors into those that they are copies of,
        new ones into new ones in pinned memory. Returns the entries, which are in host memory.

        Args:
            beside: parameters and gradients, whose memory no state may share.

        Raises:
            UnsupportedOptimizerError: there is state that cannot live in host memory.
        """
        self._memory = {_address(tensor) for tensor in (*beside, *self.used)}
        with torch.no_grad():
            return [self._back(entry, "") for entry in stepped]

    def _back(self, value: Any, key: Any) -> Any:
        lent, home = self._homes.get(id(value), (None, None))
        if isinstance(value, torch.Tensor):
            if lent is value and _is_alike(value, home):
                return home if home is value else home.copy_(value, non_blocking=True)
            return self._moved(value, key)
        if type(value) is dict:
            items = {name: self._back(item, name) for name, item in value.items()}
            kept = value if lent is None else home
            for name in kept.keys() - items.keys():
                del kept[name]
            kept.update(items)
            return kept
        if type(value) in _CONTAINERS:
            kept, found = value if lent is None else home, [self._back(item, key) for item in value]
            if type(value) is list:
                kept[:] = found
            return kept if list(map(id, kept)) == list(map(id, found)) else tuple(found)
        if any(isinstance(one, torch.Tensor) and one.numel() > 1 for one in reached_from([value])):
            raise self._refusal(key, f"holds tensors in a {type(value).__name__}")
        return value

    def _moved(self, value: torch.Tensor, key: Any) -> torch.Tensor:
        """A tensor that the update has made."""
        if value.numel() <= 1:
            return value
        if value.device != self.device:
            raise self._refusal(key, f"is on {value.device}, where the optimizer itself has put it")
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
            raise self._refusal(key, f"is a {type(value).__name__}" + f" ({value.layout})" * value.is_sparse)
        memory = value.untyped_storage()
        if memory.data_ptr() in self._memory or memory.nbytes() != value.numel() * value.element_size():
            raise self._refusal(key, "shares memory with another tensor")
        self._memory.add(memory.data_ptr())
        kept = torch.empty_like(value, device="cpu", pin_memory=True)
        self._homes[id(value)] = value, kept
        self.used.append(value)
        return kept.copy_(value, non_blocking=True)

    def _refusal(self, key: Any, found: str) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"offload='host' keeps plain tensors of optimizer state in host memory, each with memory of its own, and "
            f"state[…][{key!r}] of {self._optimizer} {found}. Attach without offload"
        )


def _address(tensor: torch.Tensor) -> int:
    memory = memory_of(tensor)
    has_one = are_plain([memory]) and memory.layout is torch.strided
    return memory.untyped_storage().data_ptr() if has_one else 0


def _is_alike(value: torch.Tensor, home: torch.Tensor) -> bool:
    return value.shape == home.shape and value.stride() == home.stride() and value.dtype == home.dtype
