"""Updates that come as late as they can: whoever reads a weight without waiting for it sees the old one, always."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from unittest.mock import patch

from instep._torch.worker import Task, Worker
from tests import net

PATIENCE = net.SECONDS / 10
"""Seconds after which an update runs although nobody has waited for it, and a wait for it ends. Both are errors."""


@contextmanager
def late_updates() -> Iterator[Callable[[], None]]:
    """With ``schedule="forward"``: a bucket is updated once somebody waits for it, or for a later one; not before.

    Yields a function that has all updates run that were given so far.
    """
    run = Worker.run
    asked: dict[Task, threading.Event] = {}
    never_asked: list[object] = []

    def run_late(worker: Worker, do: Callable[[], None], place: float = 0) -> Task:
        # All at one place: each waits to be asked, and would keep those behind it waiting.
        event = threading.Event()

        def once_asked() -> None:
            if not event.wait(PATIENCE):
                never_asked.append(do)
            do()

        task = run(worker, once_asked)
        asked[task] = event
        return task

    def ask_and_wait(task: Task) -> None:
        while task in asked:
            first = next(iter(asked))
            asked.pop(first).set()
        patience = monotonic() + PATIENCE
        while not task.done:
            assert monotonic() < patience, "an update waits for itself"
            sleep(0.0001)

    def run_all() -> None:
        for task in list(asked):
            ask_and_wait(task)

    try:
        with (
            patch.object(Worker, "run", run_late),
            patch.object(Worker, "hurry", lambda worker, task: None),
            patch.object(Task, "wait", ask_and_wait),
        ):
            yield run_all
    finally:
        for event in asked.values():
            event.set()
    assert not never_asked, "nobody waited for an update"
