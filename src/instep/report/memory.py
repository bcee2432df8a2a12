"""How much memory there was when, and what it held when there was most. Pure arithmetic on allocations, in bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter

GRADIENTS, BUCKETS = "gradients", "DDP's buckets of gradients"
"""Two of the categories."""

POINTS = 2000
"""As many as a page can draw."""


@dataclass(frozen=True)
class Allocation:
    """Memory that was alive from ``start`` to ``end`` (seconds; ``None``: it still was when nobody looked any more)."""

    address: int
    nbytes: int
    start: float
    end: float | None
    category: str


@dataclass(frozen=True)
class Memory:
    """The curve, and its peak.

    Attributes:
        times: in seconds, ascending.
        nbytes: as many, alive from that time on.
        peak_at: when there was most.
        peak: how much that was.
        alive: what it held, by category; their sum is ``peak``.
        most: of each category, as many bytes as were ever alive at once.
    """

    times: Sequence[float]
    nbytes: Sequence[int]
    peak_at: float
    peak: int
    alive: Mapping[str, int]
    most: Mapping[str, int]


def pair(events: Iterable[tuple[float, int, int, str]]) -> list[Allocation]:
    """Allocations and frees, in order of time: ``(time, address, bytes, category)``, bytes negative for a free.

    An address that is given out again was freed before, by somebody who was not seen. What is freed and was never
    allocated was there before, and is left out: on CPU the profiler does not tell of it.
    """
    open_: dict[int, Allocation] = {}
    done: list[Allocation] = []
    for time, address, nbytes, category in events:
        known = open_.pop(address, None)
        if known is not None:
            done.append(replace(known, end=time))
        if nbytes > 0:
            open_[address] = Allocation(address, nbytes, time, None, category)
    return sorted([*done, *open_.values()], key=lambda allocation: allocation.start)


def curve(allocations: Sequence[Allocation], baseline: Mapping[str, int], start: float, end: float) -> Memory:
    """What was alive from ``start`` to ``end``: ``baseline`` by category, and ``allocations``."""
    changes = [(a.start, a.nbytes) for a in allocations]
    changes += [(a.end, -a.nbytes) for a in allocations if a.end is not None]
    now = peak = sum(baseline.values())
    peak_at = start
    times, nbytes = [start], [now]
    for time, together in groupby(sorted(changes), key=itemgetter(0)):
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
        # Of what happens at the same moment frees come first.
        changes = sorted([(a.start, a.nbytes) for a in mine] + [(a.end, -a.nbytes) for a in mine if a.end is not None])
        found[category] = max(accumulate((nbytes for _, nbytes in changes), initial=baseline.get(category, 0)))
    return found


def _thinned(times: Sequence[float], nbytes: Sequence[int]) -> tuple[list[float], list[int]]:
    """Of many points the highest and the lowest in each of as many stretches as a page can draw."""
    if len(times) <= POINTS:
        return list(times), list(nbytes)
    kept = {0, len(times) - 1}
    stretch = 2 * len(times) / POINTS
    for number in range(POINTS // 2):
        among = range(int(number * stretch), min(len(times), int((number + 1) * stretch)))
        kept |= {max(among, key=nbytes.__getitem__), min(among, key=nbytes.__getitem__)}
    chosen = sorted(kept)
    return [times[i] for i in chosen], [nbytes[i] for i in chosen]
