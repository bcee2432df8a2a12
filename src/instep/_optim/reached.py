"""What a foreign optimizer reaches by its attributes, shared state and methods: modules, parameters, tensors."""

import inspect
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import beside_parameters, classes_of, read_by_update
from instep._optim.shadow import GroupLayout, parameters_of
from instep._optim.values import put_dict, reachable_values, settings_in


def reached(optimizer: Optimizer, kind: type, more: Iterable[object] = ()) -> Iterator[Any]:
    """What there is of ``kind`` that its attributes, groups and shared state reach, or ``more``."""
    own = [read_by_update(optimizer), beside_parameters(optimizer.state), *map(settings_in, optimizer.param_groups)]
    return (value for value in reachable_values([*own, *more], optimizer) if isinstance(value, kind))


def in_modules(optimizer: Optimizer, layout: GroupLayout) -> Iterator[torch.Tensor]:
    """The parameters and buffers of modules that it reaches, without its own parameters. They may be large, and are not
    copied."""
    every = chain.from_iterable(map(_tensors_of, reached(optimizer, torch.nn.Module)))
    return (tensor for tensor in every if not layout.holds(tensor) and not tensor.is_inference())


def _tensors_of(value: Any) -> Iterable[Any]:
    if isinstance(value, torch.nn.Module):
        return chain(value.parameters(), value.buffers())
    return (value,) if isinstance(value, torch.Tensor) else ()


class Tables:
    """By which modules that an optimizer reaches know their parameters, buffers and attributes, as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        modules = reached(optimizer, torch.nn.Module, _of_functions(optimizer))
        every = {id(module): module for module in chain.from_iterable(module.modules() for module in modules)}
        tables = (table for m in every.values() for table in (m._parameters, m._buffers, vars(m)))
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in tables]

    def have_changed(self) -> bool:
        return next(self._changed(), None) is not None

    def put_back(self) -> bool:
        """Whether one had changed."""
        changed = list(self._changed())
        for table, before in changed:
            put_dict(table, before)
        return bool(changed)

    def _changed(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for table, before in self._before:
            if table.keys() != before.keys() or not all(map(is_, map(table.get, before), before.values())):
                yield table, before


def in_functions(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The tensors to which its methods refer otherwise than by the object: those in closures, and in globals that the
    methods name."""
    own = set(map(id, parameters_of(optimizer)))
    every = chain.from_iterable(map(_tensors_of, reachable_values(_of_functions(optimizer), optimizer)))
    return (tensor for tensor in every if id(tensor) not in own and not tensor.is_inference())


def _of_functions(optimizer: Optimizer) -> list[Any]:
    # All instances share the attributes of their classes, and methods enclose values.
    shared = {f"{cls.__name__}.{name}": value for cls in classes_of(optimizer) for name, value in vars(cls).items()}
    methods = (inspect.unwrap(value) for cls in classes_of(optimizer) for value in vars(cls).values())
    functions = [method for method in methods if isinstance(method, FunctionType)]
    named = (f.__globals__.get(name) for f in functions for name in f.__code__.co_names)
    return [shared, *(value for value in named if isinstance(value, _HOLDERS))]


_HOLDERS = (torch.nn.Module, torch.Tensor, dict, list, tuple)


def reached_by(optimizer: Optimizer, layout: GroupLayout) -> list[torch.Tensor]:
    """The optimizer's parameters to which its attributes, groups, shared state or methods refer too: nobody knows what
    an update does with them.

    To look for them takes longer than a bucket, so they are looked for where groups change, and after parts of an
    update were compared (``Stepper.begin_parts``).
    """
    if layout.reached is None:
        tensors = reached(optimizer, torch.Tensor, _of_functions(optimizer))
        layout.reached = [weakref.ref(tensor) for tensor in tensors if layout.holds(tensor)]
    return [parameter for ref in layout.reached if (parameter := ref()) is not None]
