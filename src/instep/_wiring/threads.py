"""A model is trained on one thread at a time."""

import threading
from collections.abc import Callable
from contextvars import ContextVar

from instep._autograd.backward import Phase, current
from instep._step.schedule import Schedule
from instep.errors import ConcurrentBackwardError

ACTING_FOR: ContextVar[int | None] = ContextVar("instep_acting_for", default=None)
"""The thread that the running one is a part of: ``micro_batches()`` has threads of its own, and is called on one."""


def this_thread() -> int:
    """The thread that a forward which runs here belongs to."""
    acting_for = ACTING_FOR.get()
    return threading.get_ident() if acting_for is None else acting_for


class Threads:
    """
    Attributes:
        in_backward: whether a backward of the model is running.
    """

    def __init__(self, name: str, schedule: Schedule) -> None:
        self.in_backward = False
        self._name = name
        self._schedule = schedule
        # The thread whose forward the running backward, or the open step, belongs to.
        self._thread: int | None = None

    def require_one(self, thread: int, what: str) -> None:
        """A forward, or a backward whose forward was on ``thread``, is about to begin: raise
        ``ConcurrentBackwardError`` while the step of another thread is open."""
        if self._thread not in (None, thread) and (self.in_backward or self._schedule.state == "open"):
            raise ConcurrentBackwardError(
                f"a {what} of {self._name} began on one thread while the step of another one is open: their "
                "gradients would be mixed. Train a model on one thread at a time, or give each thread a model and an "
                "optimizer of its own"
            )

    def begin_backward(self, thread: int, end: Callable[[], None], failed: Callable[[], None]) -> None:
        """A backward has come to an output of the model. For the first output ask for the backward's ``end``.

        Without a lock, which Ctrl-C might leave taken: on accelerators the threads of two devices may both ask, and the
        second call of ``end`` finds nothing to do.
        """
        try:
            self.require_one(thread, "backward")
        except ConcurrentBackwardError as error:
            self._schedule.lost(error)
        self._thread = thread
        if not self.in_backward:
            current().at(Phase.SETTLED, end, failed)
            self.in_backward = True  # now that its end will be heard of, whatever comes

    def end_backward(self) -> None:
        """The backward has ended, or raised."""
        self.in_backward = False
