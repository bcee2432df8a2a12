"""What an optimizer holds, in values that can be compared between two loops."""

import functools
import random
from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

_OF_ALL = frozenset({"param_groups", "state", "step"})


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All attributes, hooks left out: instep has its own."""
    names = {id(p): name for name, p in model.named_parameters()}
    look = _Look({**names, id(model): "the model", id(optimizer): "the optimizer"})
    found = {name: value for name, value in vars(optimizer).items() if name not in _OF_ALL and "_hooks" not in name}
    found |= {name: getattr(optimizer, name) for name in slots_of(type(optimizer)) if hasattr(optimizer, name)}
    return {name: look.at(value) for name, value in found.items()}


def slots_of(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slot for slot in ((slots,) if isinstance(slots, str) else slots) if not slot.startswith("__"))


class _Look:
    def __init__(self, names: dict[int, str]) -> None:
        self._names = names

    def at(self, value: Any) -> Any:
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, int) and value in self._names:
            return f"id of {self._names[value]}"
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        self._names[id(value)] = f"seen {len(self._names)}"
        return type(value).__name__, *self._inside(value)

    def _inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value.dtype, tuple(value.shape), bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray):
            yield value.dtype.str, value.shape, value.tobytes()
        elif isinstance(value, dict):
            yield from sorted(((str(self.at(key)), self.at(item)) for key, item in value.items()), key=lambda i: i[0])
        elif isinstance(value, (list, tuple, deque)):
            yield from map(self.at, value)
        elif isinstance(value, (set, frozenset)):
            yield sorted(map(str, map(self.at, value)))
        elif isinstance(value, torch.Generator):
            yield bytes(value.get_state().numpy())
        elif isinstance(value, random.Random):
            yield value.getstate()
        elif isinstance(value, np.random.Generator):
            yield str(value.bit_generator.state)
        else:
            yield from self._inside_object(value)

    def _inside_object(self, value: Any) -> Iterator[Any]:
        value = getattr(value, "_torchdynamo_orig_callable", value)
        if isinstance(value, FunctionType):
            yield from (self.at(cell.cell_contents) for cell in value.__closure__ or ())
        elif isinstance(value, MethodType):
            yield self.at(value.__self__)
        elif isinstance(value, functools.partial):
            yield self.at((value.func, value.args, value.keywords))
        elif not isinstance(value, (type, nn.Module)) and not type(value).__module__.startswith("itertools"):
            yield self.at(dict(vars(value)) if hasattr(value, "__dict__") else {})
            yield from (self.at(getattr(value, name)) for name in slots_of(type(value)) if hasattr(value, name))
