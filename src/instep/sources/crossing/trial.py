"""Which of two ways to run an iteration is faster, on this machine and this network: both are tried, in training."""

from statistics import median

_PLAN, _PERIOD, _SOME = 32, 512, 8


class Trial:
    """One way is tried in iterations 8 to 15, the other in the rest of the first 32, and the one that took less time is
    kept. From then on the one that was not kept has eight iterations of every 512.

    All ranks count the same iterations, and give ``keep`` the same times: so all choose alike.
    """

    def __init__(self) -> None:
        self._first = True  # the way that is kept
        self._took: dict[bool, list[float]] = {True: [], False: []}

    def first(self, iteration: int) -> bool:
        """Whether this iteration goes the first way; the second one, else."""
        if iteration < _PLAN:
            return not _SOME <= iteration < 2 * _SOME
        return self._first if iteration % _PERIOD >= _SOME else not self._first

    def took(self, iteration: int, first: bool, seconds: float) -> None:
        if iteration >= _SOME:  # before that nobody is warm
            self._took[first].append(seconds)

    def times(self) -> tuple[float, float]:
        """What an iteration took either way since a way was last chosen; ``inf`` where none was seen."""
        first, second = (median(self._took[way] or [float("inf")]) for way in (True, False))
        return first, second

    def keep(self, iteration: int, first: float, second: float) -> None:
        """Choose by the mean of all ranks' times, which they have exchanged in ``iteration``. With one of them unknown
        everything stays as it is."""
        if iteration >= _PLAN - 1 and max(first, second) < float("inf"):
            self._first = first <= second
            self._took = {True: [], False: []}
