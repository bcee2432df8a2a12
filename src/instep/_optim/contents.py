"""What a value of optimizer state holds, copied, to be put back into the same objects: others may refer to them."""

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from instep._optim.changes import is_immutable
from instep._optim.reach import is_filled

Restore = Callable[[], Any]
"""Puts back what a value held. Returns the value, which is the same object."""


class Contents:
    """Copies the contents of values, each object once, however often it is referred to.

    Args:
        host: keep the copies of tensors in host memory, pinned where the tensors are on an accelerator.
    """

    def __init__(self, host: bool) -> None:
        self._host = host
        self._known: dict[int, Restore] = {}

    def known(self, value: Any) -> None:
        """``value`` is put back by whoever says so."""
        self._known[id(value)] = lambda: value

    def of(self, value: Any) -> Restore:
        """The present contents of ``value``.

        Raises:
            TypeError: an object cannot be copied.
        """
        known = self._known.get(id(value))
        if known is None:
            if isinstance(value, torch.Tensor):
                known = partial(restore, value, copy_of(value, self._host))
            elif is_immutable(value):
                return lambda: value
            else:
                self.known(value)  # while what it holds is copied, which may be itself
                known = self._copied(value)
            self._known[id(value)] = known
        return known

    def _copied(self, value: Any) -> Restore:
        if isinstance(value, dict):
            return _dict(value, {key: self.of(item) for key, item in value.items()})
        if isinstance(value, (list, deque)):
            return _list(value, [self.of(item) for item in value])
        if isinstance(value, tuple):
            return _tuple(value, [self.of(item) for item in value])
        if isinstance(value, set):
            return _set(value, set(value))
        if isinstance(value, FunctionType):
            return _function(value, [self._filled(cell) for cell in value.__closure__ or ()])
        if isinstance(value, MethodType):
            return _tuple(value, [self.of(value.__self__)])
        if isinstance(value, partial):
            return _tuple(value, [self.of(item) for item in (value.func, value.args, value.keywords)])
        if hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
            return _object(value, {name: self.of(item) for name, item in vars(value).items()})
        copied = copy.deepcopy(value)
        return lambda: copied

    def _filled(self, cell: Any) -> Restore | None:
        return self.of(cell.cell_contents) if is_filled(cell) else None


def copy_of(tensor: torch.Tensor, host: bool) -> torch.Tensor:
    if not host or tensor.device.type == "cpu":
        _await_copies(tensor)
        return tensor.detach().clone()
    kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return kept.copy_(tensor.detach(), non_blocking=True)


def _await_copies(tensor: torch.Tensor) -> None:
    """Some optimizers keep state in pinned memory, from and to which an accelerator copies while the host goes on."""
    if tensor.device.type == "cpu" and tensor.is_pinned():
        torch.accelerator.current_stream().synchronize()


def restore(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    _await_copies(tensor)
    if tensor.shape != values.shape:
        tensor.resize_(values.shape)
    tensor.detach().copy_(values, non_blocking=True)
    return tensor


# Never empty in between, where that can be: Ctrl-C may come anywhere, and then this is done again.


def _dict(held: dict[Any, Any], items: dict[Any, Restore]) -> Restore:
    def put() -> dict[Any, Any]:
        held.update((key, item()) for key, item in items.items())
        for key in held.keys() - items.keys():
            del held[key]
        return held

    return put


def _list(held: Any, items: list[Restore]) -> Restore:
    def put() -> Any:
        values = [item() for item in items]
        if isinstance(held, list):
            held[:] = values
        else:
            held.clear()
            held.extend(values)
        return held

    return put


def _tuple(held: Any, items: list[Restore]) -> Restore:
    """Of what cannot be made to refer to something else."""

    def put() -> Any:
        for item in items:
            item()
        return held

    return put


def _set(held: set[Any], items: set[Any]) -> Restore:
    def put() -> set[Any]:
        held.update(items)
        held.intersection_update(items)
        return held

    return put


def _object(held: Any, attributes: dict[str, Restore]) -> Restore:
    def put() -> Any:
        vars(held).update((name, item()) for name, item in attributes.items())
        for name in vars(held).keys() - attributes.keys():
            delattr(held, name)
        return held

    return put


def _function(held: FunctionType, enclosed: list[Restore | None]) -> Restore:
    def put() -> FunctionType:
        for cell, item in zip(held.__closure__ or (), enclosed, strict=True):
            if item is not None:
                cell.cell_contents = item()
        return held

    return put
