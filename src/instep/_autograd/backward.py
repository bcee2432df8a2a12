"""The running backward: in which order everything that waits for its end is called."""

import threading
import weakref
from collections.abc import Callable
from enum import Enum, IntEnum, auto

import torch

from instep._autograd.engine import EndOfBackward, call_at_end
from instep._autograd.tracing import untraced


class Phase(IntEnum):
    """When an end is called, after the backward's last node. Ends of one phase are called in the order of asking."""

    BEFORE_DDP = 0
    """Nothing else has run but the ends of torch's own that were asked for earlier, such as FSDP2's. A DDP instance
    asks for its end right after it has handed over its last bucket: an end that is asked for at that bucket is called
    before DDP's. ``.grad`` must stay as DDP's hooks have left it, and nothing may be raised."""
    AFTER_DDP = 1
    """The ends of DDP and FSDP have run: ``.grad`` is theirs no more, and errors may be raised."""
    SETTLED = 2
    """Every source has handed over its gradients and raised its errors: the books of this backward are closed, and an
    optimizer that steps itself does so."""
    LAST = 3
    """Nothing of instep's is left to run in this backward: recorders note when it ended."""


class _Turn(Enum):
    """What the engine will do next about the phases of a backward."""

    NONE = auto()
    """All that was asked for has been called."""
    IDLE = auto()
    """A turn is in the engine's queue, and will call nothing."""
    DUE = auto()
    """A turn is in the engine's queue, and will call the ends of the earliest phase that has any."""
    RUNNING = auto()


class Backward:
    """One run of the engine, from when ``current`` was first asked for it. A backward that reentrant checkpointing
    nests in another has an object of its own.

    The engine calls what it has been given in order, at the end of its queue too: each phase is one turn in that
    queue, and a turn asks for the next one. DDP asks for its own end while gradients arrive, or (``static_graph``) in a
    callback. So a turn that was in the queue already when an end was asked for calls nothing: DDP's end may be behind
    it.

    It may be kept: the ends are the engine's alone (``_Ends``).
    """

    __slots__ = ("_ends", "_turn")

    def __init__(self, task: int) -> None:
        ends = _Ends(self, task)
        self._ends = weakref.ref(ends)
        self._turn = _Turn.IDLE
        call_at_end(ends)

    def at(self, phase: Phase, end: Callable[[], None], failed: Callable[[], None] = lambda: None) -> None:
        """Call ``end`` in ``phase`` of this backward, or ``failed`` if the backward, or an end before this one, raises.

        To be called while the backward runs, or by one of its ends: one that an end asks for in its own phase is called
        in that phase. An exception in ``end`` surfaces from ``backward()`` with its own type.
        """
        if phase is Phase.BEFORE_DDP:
            call_at_end(EndOfBackward(end, failed))
            if self._turn is _Turn.DUE:
                self._turn = _Turn.IDLE
            return
        self._asked()[EndOfBackward(end, failed)] = phase
        if self._turn is _Turn.NONE:
            call_at_end(self._take_turn)
        if self._turn is not _Turn.RUNNING:
            self._turn = _Turn.IDLE

    @untraced
    def _take_turn(self) -> None:
        due, self._turn = self._turn is _Turn.DUE, _Turn.RUNNING
        if due:
            phase = min(self._asked().values())
            while (end := self._next(phase)) is not None:
                end.run()
        self._turn = _Turn.DUE if self._asked() else _Turn.NONE
        if self._turn is _Turn.DUE:
            call_at_end(self._take_turn)

    def _next(self, phase: Phase) -> EndOfBackward | None:
        for end, asked in self._asked().items():
            if asked is phase:
                del self._asked()[end]
                return end
        return None

    def _asked(self) -> "dict[EndOfBackward, Phase]":
        # Never in a variable: the traceback of an exception would keep it, and with it the ends from being dropped.
        ends = self._ends()
        assert ends is not None, "the engine keeps it while this backward runs"
        return ends.asked


class _Ends:
    """Keeps the ends of a backward. Nothing but the engine keeps this: where the backward raises, they are dropped.

    Attributes:
        asked: in the order of asking, in which a ``dict`` lets go of them, too.
    """

    __slots__ = ("__weakref__", "_backward", "_task", "asked")

    def __init__(self, backward: Backward, task: int) -> None:
        self.asked: dict[EndOfBackward, Phase] = {}
        self._backward = backward
        self._task = task

    def __call__(self) -> None:
        self._backward._take_turn()

    def __del__(self) -> None:
        _running.pop(getattr(self, "_task", -1), None)  # Ctrl-C may have come while this was made


_running: dict[int, Backward] = {}
"""By number, as ``graph_task`` has it: those whose ends the engine keeps."""
_making = threading.RLock()


def current() -> Backward:
    """The backward that this thread runs. ``RuntimeError`` outside of one."""
    task = torch._C._current_graph_task_id()
    backward = _running.get(task)
    if backward is None:
        with _making:  # on accelerators the engine runs one thread for each device
            backward = _running.get(task)
            if backward is None:
                backward = _running[task] = Backward(task)
    return backward
