"""Spans of time, the arithmetic on them, and how much memory there was when."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

# Spans of time, and the recorder to set as ``Attachment.recorder``.


class Span(NamedTuple):
    """Something that ran, or was waited for, from ``start`` to ``end``, in seconds.

    Attributes:
        kind: ``"forward"``, ``"backward"``, ``"step"`` (an update of parameters), ``"communication"`` (between ranks),
            ``"flight"`` (of a bucket's gradients, from when they are handed over to when they have come back) or
            ``"waiting"``.
        name: for people.
        thread: on which it was, as the operating system numbers them.
        parameters: whose; empty where it is not about some of them.
    """

    kind: str
    name: str
    start: float
    end: float
    thread: int = 0
    parameters: tuple[str, ...] = ()


class SpanRecorder:
    """Collects spans in ``perf_counter`` seconds. Called from any thread: communication ends on the backend's own."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __call__(self, kind: str, names: Sequence[str], start: float, end: float) -> None:
        self._spans.append(Span(kind, title(names), start, end, threading.get_native_id(), tuple(names)))

    def take(self) -> list[Span]:
        """The spans that ended since the last call, in the order in which they ended."""
        spans, self._spans = self._spans, []
        return spans


def title(parameters: Sequence[str]) -> str:
    """What a bucket of these is called."""
    if len(parameters) < 3:
        return ", ".join(parameters)
    return f"{parameters[0]} … {parameters[-1]} ({len(parameters)} parameters)"


# How much of one kind of work ran while another was under way. Pure arithmetic on intervals, in their own unit.


Interval = tuple[float, float]


def intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start, span.end) for span in spans]


def union(parts: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of ``parts`` covers: disjoint intervals in order, touching ones joined.

    One that ends where it starts, or before, covers nothing.
    """
    merged: list[Interval] = []
    for start, end in sorted(part for part in parts if part[0] < part[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def outside(parts: Iterable[Interval], cover: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of ``parts`` covers, and none of ``cover``."""
    covering = union(cover)
    return [piece for part in union(parts) for piece in _pieces(part, covering)]


def within(parts: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of ``parts`` lies in ``window``."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in parts)
    return [(start, end) for start, end in cut if start < end]


def busy(parts: Iterable[Interval]) -> float:
    """For how long at least one of ``parts`` ran."""
    return sum(end - start for start, end in union(parts))


def exposed(parts: Iterable[Interval], cover: Iterable[Interval]) -> float:
    """For how long at least one of ``parts`` ran while none of ``cover`` did: the part that nothing hid."""
    return sum(end - start for start, end in outside(parts, cover))


def _pieces(interval: Interval, covering: list[Interval]) -> Iterator[Interval]:
    start, end = interval
    for cover_start, cover_end in covering:
        if start < cover_end and cover_start < end:
            if start < cover_start:
                yield start, cover_start
            start = cover_end
    if start < end:
        yield start, end


# How much memory there was when, and what it held when there was most. Pure arithmetic on allocations, in bytes.


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
