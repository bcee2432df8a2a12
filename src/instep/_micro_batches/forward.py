"""The forward of one micro-batch: on a thread of its own, and otherwise as on the loop's.

Autograd numbers the nodes of each thread by itself, and backward comes to higher numbers first. On the loop's thread
the nodes of a second forward would all have higher numbers than those of the first, and one backward of both would end
the second before it began the first: all gradients would be alive together. On a thread each, the graphs have the same
numbers, and backward walks them side by side.

torch has state for each thread, and ``ThreadState`` carries it over. Entered modes and hooks for saved tensors have no
public function that reads them, or enters them once more without calling their ``__enter__``.
``tests/parity/test_micro_batches.py`` fails clearly when torch changes those used here.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from instep._optim.guards import as_thread, of_this_thread
from instep._torch.worker import Worker
from instep._wiring.hooks import ACTING_FOR

_AHEAD = 256
"""How many nodes are made on the first micro-batch's thread before its forward; on each later one, one fewer. So
backward comes to each node of the first before it comes to the same node of the second, and a sum never has to keep
more than itself. With more micro-batches than this the sums are right all the same, and keep some terms."""


class Forward:
    """One forward that has run.

    Attributes:
        loss: as ``loss_of`` returned it.
        first: the number of its first node, in the count of its thread.
    """

    __slots__ = ("first", "loss")

    def __init__(self, loss: object, first: int) -> None:
        self.loss = loss
        self.first = first


def run_forward(number: int, compute: Callable[[], object], state: "ThreadState", thread: int) -> Forward:
    """Call ``compute`` on a new thread, in the caller's context, and return when the thread has ended.

    An exception in ``compute`` is raised here. Ctrl-C is raised once the forward has returned, so that no thread is
    left behind.

    Args:
        number: of the micro-batch.
        state: of the loop's thread.
        thread: the loop's thread: hooks take the forward for one of its forwards.
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
    """Use up the first ``count`` numbers of this thread."""
    one = torch.zeros(1, requires_grad=True, device="cpu")
    for _ in range(count):
        one.view_as(one)


def _take_over(context: contextvars.Context) -> None:
    """Set the context variables here that the forward has set in ``context``: they may be the user's."""
    for variable, value in context.items():
        if variable is not ACTING_FOR and variable.get(context) is not value:
            variable.set(value)


_saving = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Reads the innermost hooks for saved tensors. ``None`` in torch 2.6, where nothing reads them: there they do not see
these forwards."""


class ThreadState:
    """The state that torch has for the thread that makes this: grad mode, autocast, default device, current stream,
    number of threads; and what was entered there: modes of ``__torch_function__`` and ``__torch_dispatch__``, hooks for
    saved tensors.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._grad = torch.is_grad_enabled()
        self._of_thread = of_this_thread()
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)
        }
        self._modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        self._saving = None if _saving is None else _saving(True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Give another thread this state: once, and for the rest of the thread's life."""
        if threading.get_ident() == self._thread:  # the interpreter is about to end: there are no threads any more
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(as_thread(self._of_thread))
            # Left again, unlike the rest: that clears the copies of weights that autocast has kept.
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            self._enter_the_rest()
            yield

    def _enter_the_rest(self) -> None:
        """Set what ends with the thread, and so is never set back."""
        torch.set_grad_enabled(self._grad)
        if self._stream is not None:
            torch.accelerator.set_device_index(self._stream.device_index)
            torch.accelerator.set_stream(self._stream)
        if self._saving is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._saving)
        functions, operations = self._modes
        for mode in functions:
            torch._C._push_on_torch_function_stack(mode)
        for mode in operations:
            torch._C._push_on_torch_dispatch_stack(mode)
