"""Collectives of one process group that are sent in an order of our own, the same on all ranks.

All of this runs on the thread that runs backward, or on the loop's own, but for the callbacks of futures: these run on
a thread of the backend's, and write nothing but the time and the promise of their own collective.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

Future = torch.futures.Future[Any]


class OrderedCollective:
    """A collective that is sent when its turn comes: a communication whose future is not there from the beginning.

    Args:
        launch: starts the collective.

    Attributes:
        nbytes: the size of what is sent.
        start: when it was sent; 0: it was not, yet.
        end: when it had arrived, where its time is taken.
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
        """Return when the result is there, for the current stream. Raises what kept it from that. To be called once
        backward has ended: all collectives are sent by then, or given up."""
        if self._error is not None:
            raise self._error
        assert self._future is not None
        self._future.wait()

    def future(self, device: torch.device) -> Future:
        """The future of the result, for DDP, which cannot wait until the collective is sent."""
        if self._future is not None:
            return self._future
        self._promise = future_on(device)
        if self._error is not None:
            _set_exception(self._promise, self._error)
        return self._promise

    def launch(self, *, timed: bool) -> None:
        """Send it: its turn has come."""
        # Taken off: it refers to the bucket's memory, and a collective that was sent needs it no more.
        launch, self._launch = self._launch, None
        assert launch is not None, "a collective is sent once"
        self.start = perf_counter()
        self._future = launch()
        if timed:
            self._future.add_done_callback(self._ended)
        if self._promise is not None:
            self._future.add_done_callback(partial(_hand_on, self._promise))

    def give_up(self, error: BaseException) -> None:
        """Never send it, because of ``error``."""
        self._launch, self._error = None, error
        if self._promise is not None:
            _set_exception(self._promise, error)

    def _ended(self, _: Future) -> None:
        self.end = perf_counter()


class OrderedCollectives:
    """The collectives of one backward. Each is handed to the backend when it is ready and those before it have been;
    the last ones where backward ends. How many are under way at once is the backend's affair: their memory is DDP's,
    and there in any case.

    Args:
        order: numbers of collectives, in the order in which they are sent; those that it lacks are sent after them, as
            they are added.
        timed: whether to note when each has arrived, which takes a thread of the backend's to Python.

    Attributes:
        failure: what went wrong first, as far as is known; ``None``: nothing.
        is_drained: whether all have arrived or failed, and nothing writes their memory any more.
    """

    def __init__(self, order: Sequence[int], *, timed: bool) -> None:
        self.failure: BaseException | None = None
        self.is_drained = False
        self._order = list(order)
        self._timed = timed
        self._next = 0
        self._ready: dict[int, OrderedCollective] = {}
        self._all: list[OrderedCollective] = []

    def add(self, number: int, collective: OrderedCollective) -> None:
        """A collective is ready: its gradients are there. It is sent when its turn comes."""
        if number not in self._order:
            self._order.append(number)
        self._ready[number] = collective
        self._all.append(collective)
        if self.failure is not None:
            self.abandon(self.failure)
        self._send()

    def keep_order(self, number: int) -> None:
        """Keep to the order up to the collective ``number`` alone: from that one on they are not those that the order
        was made for. Those before it that have not had their turn, and then the others, are sent as they come. Called
        on all ranks for the same collective."""
        turn = 0
        while turn < len(self._order) and self._order[turn] < number:
            turn += 1
        before = [i for i in range(number) if i not in self._order[:turn]]
        self._order = [*self._order[:turn], *before]
        self._send()

    def abandon(self, error: BaseException) -> None:
        """Send nothing more: some collectives will never be ready, or could not be sent."""
        self.failure = self.failure or error
        waiting, self._ready = self._ready, {}
        # Those that were sent go on: the other ranks take part in them. DDP must not wait for the rest for ever.
        for collective in waiting.values():
            collective.give_up(error)

    def drain(self) -> list[OrderedCollective]:
        """Return when nothing is under way any more, with the collectives that were sent, as they were added. After one
        that was sent and has failed none is waited for: once a rank is lost, each takes as long as the process group
        waits. DDP has to be built anew then, and writes their memory no more."""
        for collective in self._all:
            try:
                collective.wait()
            except Exception as error:
                self.failure = self.failure or error
                if collective.start:
                    break
        self.is_drained = True
        return [collective for collective in self._all if collective.start]

    def busy(self) -> tuple[int, float]:
        """How many bytes were sent, and for how many seconds any of them was under way."""
        total, seconds, until = 0, 0.0, 0.0
        for sent in sorted((one for one in self._all if one.end), key=lambda one: one.start):
            total += sent.nbytes
            seconds += max(0.0, sent.end - max(until, sent.start))
            until = max(until, sent.end)
        return total, seconds

    def _send(self) -> None:
        while self._next < len(self._order) and (due := self._ready.pop(self._order[self._next], None)) is not None:
            self._next += 1
            try:
                due.launch(timed=self._timed)
            except Exception as error:  # kept, and not raised: this may be inside of a hook of DDP's reducer
                due.give_up(error)
                self.abandon(error)
                return


def future_on(device: torch.device) -> Future:
    """A future whose value may be of a kernel that is still to run on ``device``."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _hand_on(promise: Future, future: Future) -> None:
    # On a thread of the backend's.
    try:
        value = future.value()
    except Exception as error:
        _set_exception(promise, error)
        return
    promise.set_result(value)


def _set_exception(future: Any, error: BaseException) -> None:
    future.set_exception(error)  # torch's own annotation takes values alone
