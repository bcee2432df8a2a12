"""Memory of an accelerator that an update of a foreign optimizer gives back, while the side stream still reads it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from instep._optim.values import address_of, held_in
from instep._torch.versions import memory_of

_Entries = Iterable[Mapping[str, Any] | None]


class StorageAddresses:
    """Where some parameters lie, their gradients, and all tensors in their entries of the optimizer's state. They tell
    whether an update has given memory of an accelerator back: it is the next tensor's at once, and the side stream may
    still be reading it."""

    def __init__(self, parameters: Sequence[torch.Tensor], entries: _Entries) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._in_state = _tensors_in(entries)
        self._all = [(tensor, address_of(tensor)) for tensor in (*parameters, *gradients, *self._in_state)]

    def were_left(self, entries: _Entries) -> bool:
        """Whether one of them lies elsewhere by now, or is in the entries no more."""
        now = set(map(id, _tensors_in(entries)))
        return any(address_of(t) != place for t, place in self._all) or any(id(t) not in now for t in self._in_state)


def _tensors_in(entries: _Entries) -> list[torch.Tensor]:
    return [memory_of(t) for entry in entries if entry for t in held_in(dict(entry), (torch.Tensor,))]
