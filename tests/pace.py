"""A clock that stands still while a busy machine runs something else."""

import threading
from time import monotonic, sleep
from types import TracebackType

TICK = 0.05


class Pace:
    """Counts how often a thread of this process could sleep for ``TICK`` seconds.

    On a machine with nothing else to do that is the time; on a busy one it is less, as all that runs in this process
    takes longer. A promise of so many seconds is kept if so many were counted.
    """

    def __init__(self) -> None:
        self._ticks: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Pace":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def since(self, start: float) -> float:
        """The seconds of this clock since ``start``, which is ``time.monotonic()``'s."""
        return seconds(self.ticks(), start)

    def ticks(self) -> list[float]:
        return list(self._ticks)

    def _run(self) -> None:
        while not self._over.is_set():
            sleep(TICK)
            self._ticks.append(monotonic())


def seconds(ticks: list[float], start: float, end: float = float("inf")) -> float:
    return TICK * sum(start < tick <= end for tick in ticks)
