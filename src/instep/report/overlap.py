"""How much of one kind of work ran while another was under way. Pure arithmetic on intervals, in their own unit."""

from collections.abc import Iterable, Iterator

from instep.report.spans import Span

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
