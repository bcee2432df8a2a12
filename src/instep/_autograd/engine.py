"""The five things instep asks of the autograd engine that have no public name.

torch's own code (DDP, FSDP, ``register_multi_grad_hook``) uses three; the fourth is the name of the engine's threads,
the fifth says whether it runs what torch has compiled.
``tests/unit/test_engine.py``, for the names ``tests/accelerator/test_host.py``, fail clearly when torch changes them.
"""

import _thread
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.graph import Node

from instep._autograd.tracing import untraced

_NO_GRAPH_TASK = -1


def graph_task() -> int | None:
    """The number of the backward this thread is running, ``None`` outside of one. Never used twice."""
    task = torch._C._current_graph_task_id()
    return None if task == _NO_GRAPH_TASK else task


def is_of_backward(native_id: int) -> bool:
    """Whether this thread is the engine's own, which runs an accelerator's backwards. False where nobody tells."""
    try:
        name = Path(f"/proc/self/task/{native_id}/comm").read_text()
    except OSError:  # not Linux, or the thread has ended
        return False
    return name.startswith("pt_autograd")


def runs(node: Node) -> bool:
    """Whether the running backward comes to ``node``. Backwards that are nested in it (reentrant checkpointing) are
    others. False for a parameter that ``autograd.grad`` was asked about, which gets no ``.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a leaf that autograd.grad was asked about
        return False


_expected: dict[int, int] = {}
"""By ``id`` of each ``EndOfBackward`` that is still to be called or dropped: the number of its backward."""

_LET_GO_SECONDS = 10.0
"""How long a backward is waited for that another thread of the loop's may be running: a mistake, told of later."""


class _Unsaid:
    """What is to be done for one backward that raised, of which nobody but the loop's thread may do it."""

    __slots__ = ("__weakref__", "failed")

    def __init__(self) -> None:
        self.failed: list[Callable[[], None]] = []

    def say(self) -> None:
        while self.failed:
            failed = self.failed.pop(0)  # before: what is done may come to let_go() again
            try:
                failed()
            except KeyboardInterrupt:
                self.failed.insert(0, failed)  # what Ctrl-C has cut short is done again
                raise


_unsaid: "weakref.WeakValueDictionary[int, _Unsaid]" = weakref.WeakValueDictionary()
"""By number of each backward that a ``Backwards`` has seen to begin on an accelerator."""
_making = threading.Lock()


class Backwards:
    """Those of one attachment that were seen to begin.

    On an accelerator each device has a thread of the engine's, which may let go of a backward that raised only when
    the exception has reached the loop. The loop may be clearing gradients by then, and torch does not bear two threads
    at one ``.grad``: what is left to be done waits for ``let_go``.
    """

    def __init__(self) -> None:
        self._tasks: dict[int, _Unsaid] = {}

    def begin(self, device: torch.device) -> None:
        """The running backward has come to something on ``device``."""
        task = graph_task()
        if device.type != "cpu" and task is not None:  # on the CPU the engine's thread is the loop's
            with _making:
                self._tasks[task] = _unsaid.setdefault(task, _Unsaid())

    def let_go(self) -> None:
        """Return when nothing will be heard of them any more, unless one is running. Ends that the engine's own thread
        has dropped are told here that they failed."""
        if not self._tasks or graph_task() is not None:
            return
        last = time.monotonic() + _LET_GO_SECONDS
        while not self._tasks.keys().isdisjoint(_expected.copy().values()) and time.monotonic() < last:
            time.sleep(0.0001)
        for unsaid in list(self._tasks.values()):
            unsaid.say()
        self._tasks.clear()


class EndOfBackward:
    """One end of the running backward: called once the backward has ended, dropped without a call when the backward
    raises.

    Whatever keeps it must be freed by the engine together with the backward. On CPU the engine frees a failed
    backward's callbacks before the exception reaches Python, so ``failed`` has run by the time the user's ``except``
    clause does. On an accelerator ``Backwards.let_go`` waits for that, and calls it where the engine's own thread was
    the last to have the callbacks.
    """

    __slots__ = ("_end", "_failed")

    def __init__(self, end: Callable[[], None], failed: Callable[[], None]) -> None:
        self._end = end
        _expected[id(self)] = torch._C._current_graph_task_id()
        self._failed: Callable[[], None] | None = failed

    def run(self) -> None:
        """An end that raises has noted what it was to note. Ctrl-C may have come before it could: ``failed`` is called,
        too, when this is dropped."""
        try:
            self._end()
        except Exception:
            self._is_over()
            raise
        self._is_over()

    def _is_over(self) -> None:
        self._failed = None
        _expected.pop(id(self), None)

    @untraced
    def __call__(self) -> None:
        self.run()

    @untraced
    def __del__(self) -> None:
        failed = getattr(self, "_failed", None)  # Ctrl-C may have come while this was made
        if failed is None:
            return
        try:
            unsaid = _unsaid.get(_expected.get(id(self), _NO_GRAPH_TASK))
            if unsaid is not None and is_of_backward(threading.get_native_id()):
                unsaid.failed.append(failed)
            else:
                failed()
        except KeyboardInterrupt:  # which is lost here, and would be in what is left of this call
            failed()
            _thread.start_new_thread(_interrupt, (sys._getframe().f_code,))
        finally:
            _expected.pop(id(self), None)


def _interrupt(dropping: CodeType) -> None:
    """Ctrl-C again, in the main thread, once ``dropping`` runs there no more: in it, it would be lost again."""
    main = threading.main_thread().ident
    while main is not None and dropping in _codes(sys._current_frames().get(main)):
        time.sleep(0.001)
    _thread.interrupt_main()


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def is_compiled() -> bool:
    """Whether the running backward is one that torch has compiled (compiled autograd). torch has no public name for
    that: ``torch.compiler.is_compiling`` is of a function that is traced."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def call_at_end(callback: Callable[[], None]) -> None:
    """Have the engine call ``callback`` after the running backward's last node, on the thread that called
    ``backward()``: behind the callbacks that are in its queue by then.

    An exception in it surfaces from ``backward()`` with its own type. The engine frees all callbacks with the backward,
    called or not.
    """
    queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue_callback(callback)
