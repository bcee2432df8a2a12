"""What an update can get at beside what it is given: through the attributes, groups and state of its optimizer."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_NUMBERS = frozenset({bool, int, float, str, type(None)})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def reached_from(owners: Iterable[object], *, by_name: bool = False) -> Iterator[Any]:
    """``owners`` and all that they refer to through containers, attributes, and what functions of theirs enclose.
    Numbers are left out; tensors and classes are not looked into, nor is what a module holds but parameters.

    Args:
        by_name: also through callable objects, and global variables that functions name, torch's own aside.
    """
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
            if by_name:
                left.extend(_globals_of(value))
        elif by_name and isinstance(value, partial):
            left.extend((value.func, value.args, value.keywords))
        elif by_name and isinstance(value, BuiltinMethodType):
            left.append(value.__self__)  # of a bound one, as {}.get: the dict
        elif by_name and not isinstance(value, (torch.Tensor, type, ModuleType)):
            left.extend(getattr(value, "__dict__", {}).values())
            left.extend(getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name))
        elif not isinstance(value, (torch.Tensor, type)) and not callable(value):
            left.extend(getattr(value, "__dict__", {}).values())


def is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _globals_of(function: FunctionType) -> Iterator[Any]:
    known = function.__globals__
    if not str(known.get("__name__")).startswith("torch."):
        found = (known[name] for name in _names_in(function.__code__) if name in known)
        yield from (value for value in found if not isinstance(value, (ModuleType, type)))


@lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of ``code``, and of functions that are defined in it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _slots_of(cls: type) -> Iterator[str]:
    for one in cls.__mro__:
        slots = vars(one).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
