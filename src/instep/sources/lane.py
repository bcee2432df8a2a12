"""Collectives of one process group that are sent in an order of our own, the same on all ranks, a few at a time."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

Launch = Callable[[], torch.futures.Future[torch.Tensor]]
"""Starts a collective."""

IN_FLIGHT = 4
"""How many are given to the backend at once. gloo runs two; the others are there when one of them ends."""


class Sent:
    """A bucket that is to be sent, or has been.

    Attributes:
        future: of its result. It may be waited for before the bucket is sent.
    """

    __slots__ = ("_launch", "end", "future", "nbytes", "start")

    def __init__(self, launch: Launch, device: torch.device, nbytes: int) -> None:
        self._launch: Launch | None = launch
        self.nbytes = nbytes
        self.start = self.end = 0.0
        self.future = future_on(device)

    def launch(self) -> torch.futures.Future[torch.Tensor]:
        launch, self._launch = self._launch, None
        assert launch is not None, "a bucket is sent once"
        self.start = perf_counter()
        return launch()


class Lane:
    """The buckets of one backward. No thread: whoever completes a collective starts the next one.

    Args:
        order: numbers of buckets, in the order in which they are sent; those that it lacks are sent after them, as
            they are added.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._next = 0
        self._ready: dict[int, Sent] = {}
        self._all: list[Sent] = []
        self._under_way = 0
        self._failure: BaseException | None = None
        # Reentrant: an accelerator's collective is complete once it is queued, and says so within the call.
        self._lock = threading.RLock()

    @property
    def failure(self) -> BaseException | None:
        """What went wrong first: nothing has been sent since."""
        return self._failure

    def add(self, number: int, sent: Sent) -> None:
        """A bucket is ready. It is sent when its turn comes."""
        with self._lock:
            if number not in self._order:
                self._order.append(number)
            self._ready[number] = sent
            self._all.append(sent)
            if self._failure is not None:
                self._fail(self._failure)
            self._pump()

    def keep_order(self, number: int) -> None:
        """What is to come from ``number`` on are not the buckets that the order was made for: those before it that
        have not had their turn, and then the others, go as they come. Called on all ranks for the same bucket."""
        with self._lock:
            turn = 0
            while turn < len(self._order) and self._order[turn] < number:
                turn += 1
            before = [i for i in range(number) if i not in self._order[:turn]]
            self._order = [*self._order[:turn], *before]
            self._pump()

    def abandon(self, error: BaseException) -> None:
        """Some buckets will never be ready: nothing more is sent."""
        with self._lock:
            self._fail(error)

    def busy(self) -> tuple[int, float]:
        """How many bytes were sent, and for how many seconds any of them was under way."""
        total, seconds, until = 0, 0.0, 0.0
        for sent in sorted((sent for sent in self._all if sent.end), key=lambda sent: sent.start):
            total += sent.nbytes
            seconds += max(0.0, sent.end - max(until, sent.start))
            until = max(until, sent.end)
        return total, seconds

    def _pump(self) -> None:
        while self._under_way < IN_FLIGHT and self._next < len(self._order) and self._failure is None:
            sent = self._ready.pop(self._order[self._next], None)
            if sent is None:
                return
            self._next += 1
            self._under_way += 1
            try:
                future = sent.launch()
            except Exception as error:
                _set_exception(sent.future, error)
                self._fail(error)
                return
            future.add_done_callback(partial(self._complete, sent))

    def _complete(self, sent: Sent, future: torch.futures.Future[torch.Tensor]) -> None:
        sent.end = perf_counter()
        try:
            result = future.value()
        except Exception as error:
            with self._lock:
                self._fail(error)
            _set_exception(sent.future, error)
            return
        with self._lock:
            self._under_way -= 1
            self._pump()
        sent.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        waiting, self._ready = self._ready, {}
        for sent in waiting.values():
            _set_exception(sent.future, error)


def future_on(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """One whose value may be of a kernel that is still to run."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _set_exception(future: Any, error: BaseException) -> None:
    future.set_exception(error)  # torch's own annotation takes values alone
