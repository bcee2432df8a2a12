"""Collectives of one process group that are sent in an order of our own, the same on all ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

Future = torch.futures.Future[Any]


class Sent:
    """A bucket that is to be sent, or has been.

    Args:
        launch: starts the collective.

    Attributes:
        nbytes: its size.
        start: when it was sent.
        end: when it had arrived, if its lane is ``timed``.
    """

    __slots__ = ("_error", "_future", "_launch", "_promise", "end", "nbytes", "start")

    def __init__(self, launch: Callable[[], Future], nbytes: int) -> None:
        self._launch: Callable[[], Future] | None = launch
        self._future: Future | None = None
        self._promise: Future | None = None
        self._error: BaseException | None = None
        self.nbytes = nbytes
        self.start = self.end = 0.0

    def wait(self) -> None:
        """Return when it has arrived, for the current stream. Raises what kept it from that. Once backward has ended:
        all buckets are sent by then, or given up."""
        if self._error is not None:
            raise self._error
        assert self._future is not None
        self._future.wait()

    def future(self, device: torch.device) -> Future:
        """That of its result, for who cannot wait until it is sent."""
        if self._future is not None:
            return self._future
        self._promise = future_on(device)
        if self._error is not None:
            _set_exception(self._promise, self._error)
        return self._promise

    def launch(self, *, timed: bool) -> None:
        launch, self._launch = self._launch, None
        assert launch is not None, "a bucket is sent once"
        self.start = perf_counter()
        self._future = launch()
        if timed:
            self._future.add_done_callback(self._ended)
        if self._promise is not None:
            self._future.add_done_callback(partial(_hand_on, self._promise))

    def give_up(self, error: BaseException) -> None:
        self._launch, self._error = None, error
        if self._promise is not None:
            _set_exception(self._promise, error)

    def _ended(self, _: Future) -> None:
        self.end = perf_counter()


class OrderedCollectives:
    """The buckets of one backward. Each is handed to the backend when it is ready and those before it have been; the
    last ones where backward ends. How many are on their way at once is the backend's affair: their memory is DDP's, and
    there in any case.

    Args:
        order: numbers of buckets, in the order in which they are sent; those that it lacks are sent after them, as
            they are added.
        timed: whether to note when each has arrived, which takes a thread of the backend's to Python.
    """

    def __init__(self, order: Sequence[int], *, timed: bool) -> None:
        self._order = list(order)
        self._timed = timed
        self._next = 0
        self._ready: dict[int, Sent] = {}
        self._all: list[Sent] = []
        self.failure: BaseException | None = None
        """What went wrong first, as far as is known."""

    def add(self, number: int, sent: Sent) -> None:
        """A bucket is ready. It is sent when its turn comes."""
        if number not in self._order:
            self._order.append(number)
        self._ready[number] = sent
        self._all.append(sent)
        if self.failure is not None:
            self.abandon(self.failure)
        self._send()

    def keep_order(self, number: int) -> None:
        """What is to come from ``number`` on are not the buckets that the order was made for: those before it that
        have not had their turn, and then the others, go as they come. Called on all ranks for the same bucket."""
        turn = 0
        while turn < len(self._order) and self._order[turn] < number:
            turn += 1
        before = [i for i in range(number) if i not in self._order[:turn]]
        self._order = [*self._order[:turn], *before]
        self._send()

    def abandon(self, error: BaseException) -> None:
        """Nothing more is sent: some buckets will never be ready, or could not be sent."""
        self.failure = self.failure or error
        waiting, self._ready = self._ready, {}
        for sent in waiting.values():
            sent.give_up(error)

    def drain(self) -> list[Sent]:
        """Return when nothing is on its way any more, with what was sent, in no order."""
        for sent in self._all:
            try:
                sent.wait()
            except Exception as error:
                self.failure = self.failure or error
        return [sent for sent in self._all if sent.start]

    def busy(self) -> tuple[int, float]:
        """How many bytes were sent, and for how many seconds any of them was under way."""
        total, seconds, until = 0, 0.0, 0.0
        for sent in sorted((sent for sent in self._all if sent.end), key=lambda sent: sent.start):
            total += sent.nbytes
            seconds += max(0.0, sent.end - max(until, sent.start))
            until = max(until, sent.end)
        return total, seconds

    def _send(self) -> None:
        while self._next < len(self._order) and (sent := self._ready.pop(self._order[self._next], None)) is not None:
            self._next += 1
            try:
                sent.launch(timed=self._timed)
            except Exception as error:
                sent.give_up(error)
                self.abandon(error)
                return


def future_on(device: torch.device) -> Future:
    """One whose value may be of a kernel that is still to run."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _hand_on(promise: Future, future: Future) -> None:
    try:
        value = future.value()
    except Exception as error:
        _set_exception(promise, error)
        return
    promise.set_result(value)


def _set_exception(future: Any, error: BaseException) -> None:
    future.set_exception(error)  # torch's own annotation takes values alone
