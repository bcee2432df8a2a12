"""How much memory was alive when, and what it held at the peak.

``pair`` joins each allocation with its free; ``curve`` makes of them the curve and its peak. Both are pure arithmetic,
in bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter

MIB = 2**20

GRADIENTS, BUCKETS = "gradients", "DDP's buckets of gradients"
"""Two of the categories of memory; instep frees both early."""
POINTS = 2000
"""The most points of a curve that a page can draw."""


@dataclass(frozen=True)
class Allocation:
    """Memory that was alive from ``start`` to ``end``, in seconds; ``None``: it was never seen to be freed."""

    address: int
    nbytes: int
    start: float
    end: float | None
    category: str


def pair(events: Iterable[tuple[float, int, int, str]]) -> list[Allocation]:
    """Pair allocations with frees. ``events`` are ``(time, address, bytes, category)`` in order of time, with negative
    bytes for a free."""
    open_: dict[int, Allocation] = {}
    done: list[Allocation] = []
    for time, address, nbytes, category in events:
        # An address that is given out again was freed, and nobody saw it. A free without an allocation is of memory
        # from before the recording. It is left out: on a CPU the profiler does not tell of such frees.
        known = open_.pop(address, None)
        if known is not None:
            done.append(replace(known, end=time))
        if nbytes > 0:
            open_[address] = Allocation(address, nbytes, time, None, category)
    return sorted([*done, *open_.values()], key=lambda allocation: allocation.start)


@dataclass(frozen=True)
class Memory:
    """The curve of what was alive, and its peak.

    Attributes:
        times: in seconds, ascending.
        nbytes: the bytes that were alive from each of ``times`` on.
        peak_at: when most bytes were alive.
        peak: how many these were.
        alive: what the peak held, by category; the values add up to ``peak``.
        most: the most bytes of each category that were ever alive at once.
    """

    times: Sequence[float]
    nbytes: Sequence[int]
    peak_at: float
    peak: int
    alive: Mapping[str, int]
    most: Mapping[str, int]


def curve(allocations: Sequence[Allocation], baseline: Mapping[str, int], start: float, end: float) -> Memory:
    """Return what was alive from ``start`` to ``end``: ``baseline``, by category, and ``allocations``."""
    changes = [(a.start, a.nbytes) for a in allocations]
    changes += [(a.end, -a.nbytes) for a in allocations if a.end is not None]
    now = peak = sum(baseline.values())
    peak_at = start
    times, nbytes = [start], [now]
    for time, together in groupby(sorted(changes), key=itemgetter(0)):
        # All changes of one moment at once: a tensor that is freed as another is made is no peak.
        now += sum(change for _, change in together)
        times.append(time)
        nbytes.append(now)
        if now > peak:
            peak, peak_at = now, time
    times.append(max(end, times[-1]))
    nbytes.append(now)
    alive = dict(baseline)
    for allocation in allocations:
        if allocation.start <= peak_at and (allocation.end is None or allocation.end > peak_at):
            alive[allocation.category] = alive.get(allocation.category, 0) + allocation.nbytes
    alive = {name: size for name, size in alive.items() if size}
    return Memory(*_thinned(times, nbytes), peak_at, peak, alive, _most(allocations, baseline))


def _most(allocations: Sequence[Allocation], baseline: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for category in {*baseline, *(a.category for a in allocations)}:
        mine = [a for a in allocations if a.category == category]
        # At the same moment frees come first: they are negative, and the pairs are sorted.
        changes = sorted([(a.start, a.nbytes) for a in mine] + [(a.end, -a.nbytes) for a in mine if a.end is not None])
        found[category] = max(accumulate((nbytes for _, nbytes in changes), initial=baseline.get(category, 0)))
    return found


def _thinned(times: Sequence[float], nbytes: Sequence[int]) -> tuple[list[float], list[int]]:
    """Keep the highest and the lowest point of each stretch, so that a page can draw the curve and no peak is lost."""
    if len(times) <= POINTS:
        return list(times), list(nbytes)
    kept = {0, len(times) - 1}
    stretch = 2 * len(times) / POINTS
    for number in range(POINTS // 2):
        among = range(int(number * stretch), min(len(times), int((number + 1) * stretch)))
        kept |= {max(among, key=nbytes.__getitem__), min(among, key=nbytes.__getitem__)}
    chosen = sorted(kept)
    return [times[i] for i in chosen], [nbytes[i] for i in chosen]
