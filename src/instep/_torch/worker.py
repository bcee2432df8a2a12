"""One thread that steps while the user's thread goes on. It lives from its first task until it is stopped."""

import _thread
import threading
import traceback
import weakref
from collections.abc import Callable
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
        try:
            if run is not None:
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


class Worker:
    """Runs tasks one after the other, in the order in which they were given.

    Not an executor: Ctrl-C in the middle of its ``submit``, or of a thread's ``start``, leaves a lock taken for ever.
    Python interrupts the main thread alone, and no code of a ``SimpleQueue`` is Python's.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] | None = None
        _workers.add(self)

    @property
    def started(self) -> bool:
        """Whether there is a thread."""
        return self._tasks is not None

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return self._tasks is not None and getattr(_serving, "tasks", None) is self._tasks

    def start(self) -> None:
        """Have a thread, unless the interpreter is about to end: then there may be none any more."""
        if self._tasks is None and not _ending:
            tasks: SimpleQueue[Task | None] = SimpleQueue()
            _thread.start_new_thread(_start, (tasks,))
            # Who drops this worker does not wait for the thread, which finishes what it was given.
            weakref.finalize(self, tasks.put, None).atexit = False
            self._tasks = tasks

    def run(self, do: Callable[[], None]) -> Task:
        """Have it run: in the thread, or here, where there can be none."""
        self.start()
        task = Task(do)
        if self._tasks is None:
            task()
        else:
            self._tasks.put(task)
        return task

    def last(self, do: Callable[[], None]) -> None:
        """Have it run after what was given, if there is a thread. Nobody waits for it."""
        if self._tasks is not None:
            self._tasks.put(Task(do))

    def stop(self) -> None:
        """Finish what was given, and end the thread."""
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        ends: list[threading.Thread] = []
        last = Task(lambda: ends.append(threading.current_thread()))
        tasks.put(last)
        tasks.put(None)
        # The last reference to its owner may have been dropped in a task: a thread cannot wait for itself.
        if threading.current_thread().name != NAME:
            last.wait()
            ends[0].join()


def _start(tasks: "SimpleQueue[Task | None]") -> None:
    # It ends with the process, which finishes its tasks before.
    threading.Thread(target=_serve, args=(tasks,), name=NAME, daemon=True).start()


_serving = threading.local()


def _serve(tasks: "SimpleQueue[Task | None]") -> None:
    _serving.tasks = tasks
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException:  # tasks keep their errors for who waits: this one is a defect, and must not stop the rest
            traceback.print_exc()
        del task  # it may be the last to refer to much


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
