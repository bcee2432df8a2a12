"""What is still to be done for parameters, and who sees to it when those who would have done it are gone."""

import atexit
import os
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any, Protocol

from instep._life.worker import start_no_more, stop_all


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

        self._finalizers = [weakref.finalize(one, one_is_gone) for one in objects]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    def remove(self) -> None:
        for finalizer in self._finalizers:
            finalizer.detach()
