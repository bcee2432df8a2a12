"""One thread that steps while the user's thread goes on. It lives from its first task until it is stopped."""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

NAME = "instep-step"


class Worker:
    """Runs tasks one after the other, in the order in which they were given."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        _workers.add(self)

    def run(self, task: Callable[[], None]) -> "Future[None]":
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)
        return self._executor.submit(task)

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
