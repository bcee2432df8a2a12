"""Methods whose owner is not kept alive by those who call them."""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class WeakMethod(Generic[Method]):
    """``method``, as long as its owner lives: calling this returns it, or ``None``.

    Not ``weakref.WeakMethod``, whose callback raises where the interpreter ends and the collector finds both at once.
    """

    __slots__ = ("_function", "_owner")

    def __init__(self, method: Method) -> None:
        bound: Any = method
        self._owner = weakref.ref(bound.__self__)
        self._function = bound.__func__

    def __call__(self) -> Method | None:
        owner = self._owner()
        return None if owner is None else self._function.__get__(owner)


def weakly(method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """``method`` with ``args`` before what it is called with, for as long as its owner lives; nothing after that.

    For what a parameter, a gradient or a graph refers to: autograd keeps these where the garbage collector does not
    look, so that a way from there back to a parameter would never be freed. ``args`` must not lead to one either.
    """
    ref = WeakMethod(method)

    def call(*more: Any) -> Any:
        alive = ref()
        return None if alive is None else alive(*args, *more)

    return call
