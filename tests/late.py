"""Updates that come as late as they can: whoever reads a weight without waiting for it sees the old one, always."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from unittest.mock import patch

from instep._core import deferral
from instep._core.worker import Worker

PATIENCE = 10.0
"""Seconds after which an update runs although nobody has waited for it, and a wait for it ends. Both are errors."""


@contextmanager
def late_updates() -> Iterator[Callable[[], None]]:
    """With ``schedule="forward"``: a bucket is updated once somebody waits for it, or for a later one; not before.

    Yields a function that has all updates run that were given so far.
    """
    run, wait = Worker.run, deferral.wait
    asked: dict[Future[None], threading.Event] = {}
    never_asked: list[object] = []

    def run_late(worker: Worker, task: Callable[[], None]) -> "Future[None]":
        event = threading.Event()

        def once_asked() -> None:
            if not event.wait(PATIENCE):
                never_asked.append(task)
            task()

        future = run(worker, once_asked)
        asked[future] = event
        return future

    def ask_and_wait(futures: Sequence["Future[None]"]) -> None:
        while asked.keys() & futures:
            first = next(iter(asked))
            asked.pop(first).set()
        assert not wait(futures, PATIENCE).not_done, "an update waits for itself"

    try:
        with patch.object(Worker, "run", run_late), patch.object(deferral, "wait", ask_and_wait):
            yield lambda: ask_and_wait(list(asked))
    finally:
        for event in asked.values():
            event.set()
    assert not never_asked, "nobody waited for an update"
