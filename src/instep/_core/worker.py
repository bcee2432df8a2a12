"""One thread that steps while the user's thread goes on. It lives from its first task until it is stopped."""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
        try:
            if run is not None:
                run()
        finally:
            del run
            self.done = True
            self._gate.release()

    def wait(self) -> None:
        """Return when it has run. For one thread at a time, which may be interrupted, and come again."""
        while not self.done:
            self._gate.acquire()


class Worker:
    """Runs tasks one after the other, in the order in which they were given."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        _workers.add(self)

    def run(self, do: Callable[[], None]) -> Task:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)
        task = Task(do)
        self._executor.submit(task)
        return task

    def stop(self) -> None:
        """Finish what was given, and end the thread."""
        if self._executor is not None:
            # The last reference to its owner may have been dropped in a task: a thread cannot wait for itself.
            mine = threading.current_thread().name.startswith(NAME)
            self._executor.shutdown(wait=not mine)
            self._executor = None


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _before_fork() -> None:
    for worker in list(_workers):
        worker.stop()


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads, and would wait for ever for one that was in the middle of a task.
    os.register_at_fork(before=_before_fork)
