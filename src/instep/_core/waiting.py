"""Makes it known when somebody asks an optimizer for its ``state``, as ``watch`` does for parameters: meanwhile the
optimizer's class is a subclass of its own with a property."""

import copy
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from instep._core.weak import WeakMethod


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

    def _tell(self) -> Any:
        used = self._used()
        if used is not None:
            used(self)
        _unwatch(self)
        return self

    @property
    def state(self) -> Any:
        return self._tell().state

    @state.setter
    def state(self, value: Any) -> None:
        self._tell().state = value

    @state.deleter
    def state(self) -> None:
        del self._tell().state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._tell().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._tell(), memo)

    def __copy__(self) -> Any:
        return copy.copy(self._tell())


def _unwatch(optimizer: Any) -> None:
    if isinstance(optimizer, _Waiting):
        optimizer.__class__ = optimizer._plain
