"""Where backward starts: the autograd nodes of what a module returned."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass

import torch
from torch.autograd.graph import Node


def nodes_of(output: object) -> Iterator[Node]:
    """The autograd nodes of the tensors in a module's output: backward starts at them.

    A backward may also start elsewhere: at a loss that the module keeps for itself, or in an object of which nothing
    is known here. Nothing that must be right may hang on these nodes alone.
    """
    for tensor in tensors_of(output):
        assert tensor.grad_fn is not None
        yield tensor.grad_fn


def tensors_of(output: object) -> Iterator[torch.Tensor]:
    """The tensors in a module's output that have a node."""
    return (tensor for tensor in tensors_in(output) if tensor.grad_fn is not None)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors in what a module is given, or returns."""
    return _tensors_in(value, set())


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        members: Iterable[object] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        members = value
    elif isinstance(value, type):
        return
    else:
        # A dataclass, or an object of the model's own. Objects in it may refer to much else: the model, its settings.
        members = [item for item in _attributes(value) if _may_hold_tensors(item)]
    for item in members:
        yield from _tensors_in(item, seen)


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


def _may_hold_tensors(item: object) -> bool:
    holds = isinstance(item, (torch.Tensor, Mapping, list, tuple, set, frozenset)) or is_dataclass(item)
    return holds or any("__slots__" in vars(cls) for cls in type(item).__mro__[:-1])
