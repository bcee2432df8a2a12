"""The forward of one micro-batch, on a thread of its own, and otherwise as on the loop's."""

import contextvars
from collections.abc import Callable

import torch

from instep._life.worker import Worker
from instep._micro_batches.thread_state import ThreadState
from instep._wiring.threads import ACTING_FOR

_AHEAD = 256
"""So many nodes are made on the first micro-batch's thread before its forward, and one less on each later one. So
backward comes to each node of the first before it comes to the same node of the second, and a sum never has to keep
more than itself. With more micro-batches than this the sums are right all the same, and keep some terms."""


class Forward:
    """One forward that has run.

    Attributes:
        loss: as ``loss_of`` returned it.
        first: how many nodes the thread had made before.
    """

    __slots__ = ("first", "loss")

    def __init__(self, loss: object, first: int) -> None:
        self.loss = loss
        self.first = first


def run_forward(number: int, compute: Callable[[], object], state: ThreadState, thread: int) -> Forward:
    """Call ``compute`` on a new thread, in the caller's context, and return when the thread has ended.

    Autograd counts the nodes of each thread from 0: that is what the thread is for. An exception in ``compute`` is
    raised here. Ctrl-C is raised once the forward has returned: no thread is left behind.

    Args:
        thread: the thread that the forward counts as one of.
    """
    found: list[Forward] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            _make_nodes(max(0, _AHEAD - number))
            ACTING_FOR.set(thread)
            with state.entered():
                first = torch.autograd._get_sequence_nr()
                found.append(Forward(compute(), first))
        except BaseException as error:  # raised on the loop's thread
            errors.append(error)

    worker = Worker()
    task = worker.run(lambda: context.run(run))
    try:
        task.wait()
    finally:
        worker.stop()
    _take_over(context)
    try:
        if errors:
            raise errors[0]
        return found[0]
    finally:
        errors.clear()  # the traceback refers to this frame


def _make_nodes(count: int) -> None:
    one = torch.zeros(1, requires_grad=True, device="cpu")
    for _ in range(count):
        one.view_as(one)


def _take_over(context: contextvars.Context) -> None:
    """The forward may have set context variables of the user's."""
    for variable, value in context.items():
        if variable is not ACTING_FOR and variable.get(context) is not value:
            variable.set(value)
