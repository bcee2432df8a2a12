"""One thread that steps while the user's thread goes on. It lives from its first task until it is stopped."""

import _thread
import threading
import traceback
import weakref
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue

NAME = "instep-step"


class Task:
    """One that was given, and can be waited for.

    Not a ``Future``: Ctrl-C in the middle of waiting for one leaves it locked, and the thread that would finish it too.
    """

    __slots__ = ("_gate", "_run", "done")

    def __init__(self, run: Callable[[], None]) -> None:
        self.done = False
        self._run: Callable[[], None] | None = run
        self._gate = threading.Lock()
        self._gate.acquire()

    def __call__(self) -> None:
        run, self._run = self._run, None  # it may refer to this task
        if run is None:
            return  # it has been hurried, and comes a second time
        try:
            run()
        finally:
            del run
            self.done = True
            self._gate.release()

    def wait(self) -> None:
        """Return when it has run. The thread that waits may be interrupted, and come again: also in the handler of a
        signal, while the first wait goes on."""
        while not self.done:
            self._gate.acquire()
            self._gate.release()  # for whoever waits beside this one


_Due = list[tuple[float, int, Task]]
"""A heap: the place of each task, the number in which it was given, and the task."""
_FIRST, _LAST = float("-inf"), float("inf")
_numbers = count()


class Worker:
    """Runs tasks one after the other: by their place, and those of one place in the order in which they were given.

    Not an executor: Ctrl-C in the middle of its ``submit``, or of a thread's ``start``, leaves a lock taken for ever.
    Python interrupts the main thread alone, and no code of a ``SimpleQueue`` or a ``heapq`` is Python's. A task goes
    into the heap first, and then a token into the queue, for which the thread runs what is first in the heap: a task
    whose token was lost to Ctrl-C in between is run for another's, or for that of whoever hurries it.
    """

    def __init__(self) -> None:
        self._tokens: SimpleQueue[bool] | None = None
        self._due: _Due = []
        _workers.add(self)

    @property
    def started(self) -> bool:
        return self._tokens is not None

    @property
    def is_here(self) -> bool:
        return self._tokens is not None and getattr(_serving, "tokens", None) is self._tokens

    def start(self) -> None:
        """Have a thread, unless the interpreter is about to end: then there may be none any more."""
        if self._tokens is None and not _ending:
            tokens: SimpleQueue[bool] = SimpleQueue()
            self._due = []
            _thread.start_new_thread(_start, (tokens, self._due))
            # Who drops this worker does not wait for the thread, which finishes what it was given.
            weakref.finalize(self, tokens.put, False).atexit = False
            self._tokens = tokens

    def run(self, do: Callable[[], None], place: float = 0) -> Task:
        """Have it run: in the thread, or here, where there can be none."""
        self.start()
        task = Task(do)
        if self._tokens is None:
            task()
        else:
            tokens = self._tokens
            self._give(tokens, task, place)
            if self._tokens is not tokens and not task.done:
                self.run(task, place)  # another thread has stopped it meanwhile, to fork: perhaps before this was there
        return task

    def hurry(self, task: Task) -> None:
        """Somebody waits for it: run it next, unless it has been."""
        if self._tokens is not None and not task.done:
            self._give(self._tokens, task, _FIRST)

    def last(self, do: Callable[[], None]) -> None:
        """Have it run after what was given, if there is a thread. Nobody waits for it."""
        if self._tokens is not None:
            self._give(self._tokens, Task(do), _LAST)

    def _give(self, tokens: "SimpleQueue[bool]", task: Task, place: float) -> None:
        heappush(self._due, (place, next(_numbers), task))
        tokens.put(True)

    def stop(self) -> None:
        """Finish what was given, and end the thread."""
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return
        ends: list[threading.Thread] = []
        last = Task(lambda: ends.append(threading.current_thread()))
        self._give(tokens, last, _LAST)
        tokens.put(False)
        # The last reference to its owner may have been dropped in a task: a thread cannot wait for itself.
        if threading.current_thread().name != NAME:
            last.wait()
            ends[0].join()


def _start(tokens: "SimpleQueue[bool]", due: _Due) -> None:
    # It ends with the process, which finishes its tasks before.
    threading.Thread(target=_serve, args=(tokens, due), name=NAME, daemon=True).start()


_serving = threading.local()


def _serve(tokens: "SimpleQueue[bool]", due: _Due) -> None:
    _serving.tokens = tokens
    while tokens.get():
        _run_first(due)
    while due:
        _run_first(due)


def _run_first(due: _Due) -> None:
    try:
        task = heappop(due)[2]
    except IndexError:  # it was run for the token of another
        return
    try:
        task()
    except BaseException:  # tasks keep their errors for who waits: this one is a defect, and must not stop the rest
        traceback.print_exc()


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


_ending = False


def stop_all() -> None:
    """Finish what all of them were given, and end their threads."""
    for worker in list(_workers):
        worker.stop()


def start_no_more() -> None:
    """The interpreter is about to end. A thread that is started now may never run, and who waits for it never end."""
    global _ending
    _ending = True


def ending() -> bool:
    """Whether nothing is to be put off any more."""
    return _ending
