"""How long the loop was held up by its steps, and how long updates ran beside it: counted for each bucket."""

from time import perf_counter


class StepTimes:
    """From one commit to the next, by the host's clock.

    Attributes:
        exposed: seconds within ``optimizer.step()`` and of waiting for updates, before the last commit; ``None``: there
            was none.
        outside: seconds of updates outside of ``optimizer.step()``, less those in which they were waited for.
    """

    def __init__(self) -> None:
        self.exposed: float | None = None
        self.outside = 0.0
        self._began: float | None = None
        self._in_step = 0.0
        self._waited = 0.0
        self._ran: list[float] = []  # by any thread

    def step_begins(self) -> None:
        self._began = perf_counter()

    def step_returns(self) -> None:
        if self._began is not None:
            self._in_step += perf_counter() - self._began
            self._began = None

    def ran(self, started: float) -> None:
        """An update that began then has ended."""
        self._ran.append(perf_counter() - started)

    def waited(self, started: float) -> None:
        """An update was waited for, from then on."""
        if self._began is None:  # else it is a part of step()
            self._waited += perf_counter() - started

    def committed(self) -> None:
        ran, self._ran = self._ran, []
        self.exposed, self.outside = self._in_step + self._waited, max(0.0, sum(ran) - self._waited)
        self._in_step = self._waited = 0.0
