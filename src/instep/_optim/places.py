"""Where tensors lie, to find out whether an update has given memory back: it is the next tensor's at once, and an
accelerator may still be reading it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from instep._optim.changes import held_in
from instep._optim.parts import memory_of

Entries = Iterable[Mapping[str, Any] | None]


class Places:
    """Where some parameters lie, their gradients, and all tensors in their entries of the optimizer's state."""

    def __init__(self, parameters: Sequence[torch.Tensor], entries: Entries) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._in_state = _tensors_in(entries)
        self._all = [(tensor, _place(tensor)) for tensor in (*parameters, *gradients, *self._in_state)]

    def were_left(self, entries: Entries) -> bool:
        """Whether one of them lies elsewhere by now, or is in the entries no more."""
        now = set(map(id, _tensors_in(entries)))
        return any(_place(t) != place for t, place in self._all) or any(id(t) not in now for t in self._in_state)


def _tensors_in(entries: Entries) -> list[torch.Tensor]:
    return [memory_of(t) for entry in entries if entry for t in held_in(dict(entry), (torch.Tensor,))]


def _place(tensor: torch.Tensor) -> int:
    memory = memory_of(tensor)
    is_plain = type(memory) in (torch.Tensor, torch.nn.Parameter) and memory.layout is torch.strided
    return memory.data_ptr() if is_plain else 0
