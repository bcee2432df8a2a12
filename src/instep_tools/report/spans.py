"""Spans of time: what ran when, and how much of it ran while something else did.

The functions are pure arithmetic on intervals, in the intervals' own unit.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Something that ran, or was waited for, from ``start`` to ``end``, in seconds.

    Attributes:
        kind: ``"forward"``, ``"backward"``, ``"step"`` (an update of parameters), ``"communication"`` (between ranks),
            ``"flight"`` (of a bucket's gradients, from when they are handed over to when they have come back) or
            ``"waiting"``.
        name: for people.
        thread: the thread on which it ran, by the operating system's number.
        parameters: the names of the parameters that it is about; empty where it is about none in particular.
        stage: the place in its pipeline of the stage that it is about; ``None`` where it is about none.
    """

    kind: str
    name: str
    start: float
    end: float
    thread: int = 0
    parameters: tuple[str, ...] = ()
    stage: int | None = None

    @property
    def label(self) -> str:
        """The name, with the stage."""
        return self.name if self.stage is None else f"stage {self.stage}, {self.name}"


def title(parameters: Sequence[str]) -> str:
    """Return the name of a bucket of these parameters."""
    if len(parameters) < 3:
        return ", ".join(parameters)
    return f"{parameters[0]} … {parameters[-1]} ({len(parameters)} parameters)"


Interval = tuple[float, float]


def intervals(spans: Iterable[Span]) -> list[Interval]:
    """Return when each span began and ended."""
    return [(span.start, span.end) for span in spans]


def union(parts: Iterable[Interval]) -> list[Interval]:
    """Return the time that at least one of ``parts`` covers: disjoint intervals in order, touching ones joined.

    An interval that ends where it starts, or before, covers nothing.
    """
    merged: list[Interval] = []
    for start, end in sorted(part for part in parts if part[0] < part[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def outside(parts: Iterable[Interval], cover: Iterable[Interval]) -> list[Interval]:
    """Return the time that at least one of ``parts`` covers, and none of ``cover``."""
    covering, pieces = union(cover), []
    ends = [end for _, end in covering]
    for start, end in union(parts):
        for number in range(bisect_right(ends, start), len(covering)):
            cover_start, cover_end = covering[number]
            if cover_start >= end:
                break
            if start < cover_start:
                pieces.append((start, cover_start))
            start = cover_end
        if start < end:
            pieces.append((start, end))
    return pieces


def within(parts: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the pieces of ``parts`` that lie in ``window``."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in parts)
    return [(start, end) for start, end in cut if start < end]


def busy(parts: Iterable[Interval]) -> float:
    """Return for how long at least one of ``parts`` ran."""
    return sum(end - start for start, end in union(parts))


def exposed(parts: Iterable[Interval], cover: Iterable[Interval]) -> float:
    """Return for how long at least one of ``parts`` ran while none of ``cover`` did: the part that nothing hid."""
    return sum(end - start for start, end in outside(parts, cover))
