"""What a model may return, or store, in place of a tensor: how each is made, and the tensor taken out."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass(slots=True)
class SlottedData:
    value: Any


@dataclass(frozen=True)
class Data:
    value: torch.Tensor


class Named(NamedTuple):
    value: torch.Tensor


class Mapping(OrderedDict[str, Any]):
    """As the Hugging Face libraries have."""


class Iterable:
    def __init__(self, value: torch.Tensor) -> None:
        self._get: Callable[[], torch.Tensor] = lambda: value

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self._get()


class Computed:
    """A property, over something that is no attribute of its own."""

    __slots__ = ("_inside",)

    def __init__(self, value: torch.Tensor) -> None:
        self._inside = Slotted(value)

    @property
    def value(self) -> torch.Tensor:
        return self._inside.value


class Special(torch.Tensor):
    """A tensor of a class of its own."""


def _stored(net: Any, x: torch.Tensor) -> None:
    net.stored = x


def _nested(net: Any, x: torch.Tensor) -> Any:
    return list({"a": [y]} for y in (x, x))  # noqa: C400


Wrap = Callable[[Any, torch.Tensor], Any]
Take = Callable[[Any, Any], torch.Tensor]
OUTPUTS: dict[str, tuple[Wrap, Take]] = {
    "tensor": (lambda net, x: x, lambda net, out: out),
    "stored": (_stored, lambda net, out: net.stored),
    "slotted": (lambda net, x: Slotted(x), lambda net, out: out.value),
    "slotted data": (lambda net, x: SlottedData(x), lambda net, out: out.value),
    "data": (lambda net, x: Data(x), lambda net, out: out.value),
    "named": (lambda net, x: Named(x), lambda net, out: out.value),
    "nested": (_nested, lambda net, out: out[1]["a"][0]),
    "mapping": (lambda net, x: Mapping(value=x), lambda net, out: out["value"]),
    "user mapping": (lambda net, x: UserDict(value=x), lambda net, out: out["value"]),
    "iterable": (lambda net, x: Iterable(x), lambda net, out: next(iter(out))),
    "generator": (lambda net, x: (y for y in [x]), lambda net, out: next(out)),
    "set": (lambda net, x: {x}, lambda net, out: next(iter(out))),
    "function": (lambda net, x: lambda: x, lambda net, out: out()),
    "special": (lambda net, x: x.as_subclass(Special), lambda net, out: out.as_subclass(torch.Tensor)),
    "computed": (lambda net, x: Computed(x), lambda net, out: out.value),
    "deep": (lambda net, x: [{"a": SlottedData([Data(x)])}], lambda net, out: out[0]["a"].value[0].value),
    "detached too": (lambda net, x: (x.detach(), Slotted(x)), lambda net, out: out[1].value),
}
FOUND_BY_DDP = ("tensor", "data", "named", "nested", "mapping")
"""In which DDP looks for tensors too, as it has to with ``find_unused_parameters``."""
