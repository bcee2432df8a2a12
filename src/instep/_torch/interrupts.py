"""What becomes of Ctrl-C, and of whatever else ends a line of Python where it stands: one policy, here.

Python runs a signal's handler between any two lines of its main thread, and the handler may raise. On a CPU backward
runs on that thread too, and none of Python's but in hooks: nearly every Ctrl-C in a backward would come out of a line
of instep's, with a bucket half stepped.

- *In the loop's own code* (its hooks, its modules, its closure, what it does between two calls) it is an error like any
  other: of that backward, forward or ``step()``.
- *While a thread holds the lock of a step*, which it does wherever it changes the step, or that of its calls
  (``Round.lock``), handlers wait until it lets go: there every bucket is stepped or is not, and noted. What the handler
  raises is then an error of the hook.
- *What ends these lines nevertheless* tears the step, and every use says so: a second Ctrl-C, which does not wait (the
  first may wait for another thread, or for another rank), and an exception that another thread has sent.

So nothing that is done under the lock need be safe to end in the middle, or to be done twice. What is done outside of
it (a hook that counts, or asks for the end of backward) must be: it notes last what it has done.
"""

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from types import FrameType, TracebackType
from typing import Any

# ``signal.signal`` and ``getsignal`` are these functions, and make enums of what they return, which takes ten times as
# long. Both are called twice for each signal where a lock is taken and given back.
_set_handler: Callable[[int, object], object] = _signal.signal
_handler_of: Callable[[int], Any] = _signal.getsignal

_FIRST_OF_REAL_TIME = int(getattr(signal, "SIGRTMIN", 32))
_NUMBERS = sorted(int(number) for number in signal.valid_signals() if number < _FIRST_OF_REAL_TIME)


def heard() -> list[int]:
    """The signals that have a handler written in Python, or Python's own for Ctrl-C."""
    return list(compress(_NUMBERS, map(callable, map(_handler_of, _NUMBERS))))


_waits: Sequence[int] = heard()  # those whose handlers wait for the lock of a step


def look_for_handlers() -> None:
    """Once a forward, and once a step: the loop may have set a handler since."""
    global _waits
    _waits = heard()


class _Waiting:
    """The handlers of these signals wait, from here to ``release``. Main thread only."""

    __slots__ = ("_before", "_came", "_waits")

    def __init__(self, numbers: Sequence[int]) -> None:
        self._waits = True
        self._came: list[int] = []
        self._before: dict[int, Any] = {}
        try:
            for number in numbers:
                # Noted before it is exchanged: the handler of one that is not among them yet may raise in between.
                self._before[number] = _handler_of(number)
                _set_handler(number, self._note)
        except BaseException:  # of a handler that is not among them yet
            self._waits = False
            self._put_back()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waits and (number != signal.SIGINT or number not in self._came):
            self._came.append(number)
        else:
            self._before[number](number, frame)

    def _put_back(self) -> None:
        """Where ``release`` was ended. Once: where the interpreter ends there are no handlers any more."""
        for number, handler in self._before.items():
            if _handler_of(number) == self._note:
                _set_handler(number, handler)

    def release(self) -> None:
        """Put the handlers back, and run those whose signal has come. Raises what they raise."""
        self._waits = False  # from here on each goes through, whether it is put back yet or not
        try:
            for number, handler in self._before.items():
                if _handler_of(number) == self._note:  # else somebody has set another one meanwhile
                    _set_handler(number, handler)
        except BaseException:  # of one that came meanwhile
            self._put_back()
            raise
        if self._came:
            with ExitStack() as stack:  # each is run, also where one before it has raised
                for number in reversed(dict.fromkeys(self._came)):
                    stack.callback(signal.raise_signal, number)


@contextmanager
def held(numbers: Sequence[int]) -> Iterator[None]:
    """The handlers of these signals run right after this block, on the main thread. On another one nothing is held."""
    if not numbers or threading.get_ident() != threading.main_thread().ident:
        yield
        return
    waiting = _Waiting(numbers)
    try:
        yield
    finally:
        waiting.release()


class StepLock:
    """The lock of a step: held by the one thread that changes it, whose signals wait meanwhile. May be taken again by
    the thread that holds it.

    On accelerators the engine runs one thread for each device, each of which may complete a bucket.

    Attributes:
        torn_by: called with what has ended the lines under the lock, where it was none of Python's ordinary errors.
    """

    def __init__(self) -> None:
        self.torn_by: Callable[[BaseException], None] = _nobody
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: _Waiting | None = None
        look_for_handlers()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        # Signals first: with the lock taken, nothing may come between.
        # Python runs all handlers on its main thread: no signal comes on another one.
        waiting = _Waiting(_waits) if _waits and me == threading.main_thread().ident else None
        try:
            self._lock.acquire()
        except BaseException:  # a second Ctrl-C, while another thread has it
            if waiting is not None:
                waiting.release()
            raise
        self._owner, self._depth, self._waiting = me, 1, waiting

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        waiting, self._waiting = self._waiting, None
        try:
            if error is not None and not isinstance(error, Exception):
                self.torn_by(error)
        finally:
            self._owner = None
            self._lock.release()
            if waiting is not None:
                waiting.release()


def _nobody(error: BaseException) -> None: ...
