"""How long objects live: methods that keep nobody alive, and what is still to be done when an owner is gone."""

import atexit
import os
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any, Generic, Protocol, TypeVar

from instep._torch.worker import start_no_more, stop_all

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
    bound: Any = method
    owner_of, function = weakref.ref(bound.__self__), bound.__func__

    def call(*more: Any) -> Any:
        owner = owner_of()
        return None if owner is None else function(owner, *args, *more)

    return call


# What is still to be done for parameters, and who sees to it when those who would have done it are gone.


class Unsettled(Protocol):
    """The steps of one attachment."""

    def settle(self) -> None:
        """Make parameters and state those of the plain loop. No thread is started for this at exit."""


_unsettled: set[Unsettled] = set()
_process: int | None = None  # in which multiprocessing was asked to settle


def owe(steps: Unsettled) -> None:
    """Keep ``steps`` alive until they are ``settled``, whoever else lets go of them. At exit they are asked to settle,
    and before a fork: parent and child would both write memory that they share."""
    global _process
    _unsettled.add(steps)
    if _process != os.getpid():
        _process = os.getpid()
        if parent_process() is not None:
            # A child that multiprocessing has forked ends without atexit, and has forgotten what its parent asked for.
            Finalize(None, _settle_all, exitpriority=100)


def settled(steps: Unsettled) -> None:
    """Nothing is left to do for them."""
    _unsettled.discard(steps)


def _settle_all() -> None:
    for steps in list(_unsettled):
        try:
            steps.settle()
        except Exception:  # others are to be settled too, and their own next use says what is wrong with these
            traceback.print_exc()


def _end() -> None:
    start_no_more()
    _settle_all()
    stop_all()


def _before_fork() -> None:
    # A child has none of its parent's threads, and would wait for ever for one that was in the middle of a task.
    _settle_all()
    stop_all()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


class Owners:
    """Calls ``gone`` when none of ``objects`` is left."""

    def __init__(self, objects: Sequence[Any], gone: Callable[[], Any]) -> None:
        left = len(objects)

        def one_is_gone() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                gone()

        self._finalizers = [weakref.finalize(item, one_is_gone) for item in objects]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    def remove(self) -> None:
        for finalizer in self._finalizers:
            finalizer.detach()


def reference_to(function: Any) -> Callable[[], Any]:
    """Weak, where its class takes such references; a method of an extension's class does not."""
    try:
        return weakref.ref(function)
    except TypeError:
        return lambda: function
