"""What an update can get at beside what it is given: through the attributes, groups and state of its optimizer."""

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch

_NUMBERS = frozenset({bool, int, float, str, type(None)})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def reached_from(owners: Iterable[object]) -> Iterator[Any]:
    """``owners`` and all that they refer to through containers, attributes, and what functions of theirs enclose.
    Numbers are left out; tensors and classes are not looked into, nor is what a module holds but parameters."""
    seen: set[int] = set()
    left = list(owners)
    while left:
        value = left.pop()
        if type(value) in _NUMBERS or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in _TENSORS:
            continue
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        elif isinstance(value, torch.nn.Module):
            left.extend(value.parameters())
        elif isinstance(value, MethodType):
            left.append(value.__self__)
        elif isinstance(value, FunctionType):
            left.extend(cell.cell_contents for cell in value.__closure__ or () if is_filled(cell))
        elif not isinstance(value, (torch.Tensor, type)) and not callable(value):
            left.extend(getattr(value, "__dict__", {}).values())


def is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
