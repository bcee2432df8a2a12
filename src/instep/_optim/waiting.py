"""Makes it known when somebody asks an optimizer for its ``state``, as ``watch`` does for parameters: meanwhile the
optimizer's class is a subclass of its own with a property."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from instep._life.weak import WeakMethod


class StateWatch:
    """Watches optimizers until told to stop.

    Args:
        used: a method, called before ``state`` is read, replaced or copied.
    """

    def __init__(self, used: Callable[[Optimizer], None]) -> None:
        self._used = WeakMethod(used)  # its owner owns the watch
        self._classes: dict[type, type] = {}

    def start(self, optimizer: Optimizer) -> None:
        cls = type(optimizer)
        if not issubclass(cls, _Waiting):
            if cls not in self._classes:
                names = {"_plain": cls, "_used": self._used, "__module__": cls.__module__}
                self._classes[cls] = type(cls.__name__, (_Waiting, cls), {**names, "__qualname__": cls.__qualname__})
            optimizer.__class__ = self._classes[cls]

    def stop(self, optimizer: Optimizer) -> None:
        _unwatch(optimizer)


def class_of(optimizer: Optimizer) -> type[Optimizer]:
    """Its class, as it is when nobody watches."""
    return optimizer._plain if isinstance(optimizer, _Waiting) else type(optimizer)


class _Waiting:
    _plain: Any
    _used: Any

    def __init_subclass__(cls) -> None:
        """The class that is watched need not know of this one."""

    @contextmanager
    def _told(self) -> Iterator[Any]:
        """Itself, as its own class. The watch goes on after that if its owner has not stopped it."""
        used = self._used()
        if used is not None:
            used(self)
        watched = type(self)
        _unwatch(self)
        try:
            yield self
        finally:
            if used is not None and issubclass(watched, _Waiting):
                self.__class__ = watched

    @property
    def state(self) -> Any:
        with self._told() as plain:
            return plain.state

    @state.setter
    def state(self, value: Any) -> None:
        with self._told() as plain:
            plain.state = value

    @state.deleter
    def state(self) -> None:
        with self._told() as plain:
            del plain.state

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._told() as plain:
            return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._told() as plain:
            return copy.deepcopy(plain, memo)

    def __copy__(self) -> Any:
        with self._told() as plain:
            return copy.copy(plain)


def _unwatch(optimizer: Any) -> None:
    if isinstance(optimizer, _Waiting):
        optimizer.__class__ = optimizer._plain
