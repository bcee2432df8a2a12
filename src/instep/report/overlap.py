"""How much of one kind of work ran while another was under way. Pure arithmetic on spans, in their own unit of time."""

from collections.abc import Iterable, Iterator

from instep.report.record import Span

Interval = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Interval]:
    """The time in which at least one of ``spans`` ran: disjoint intervals in order, touching ones joined.

    A span that ends where it starts, or before, covers nothing.
    """
    merged: list[Interval] = []
    for start, end in sorted((span.start, span.end) for span in spans if span.start < span.end):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy(spans: Iterable[Span]) -> float:
    """How long at least one of ``spans`` ran."""
    return _length(union(spans))


def exposed(steps: Iterable[Span], cover: Iterable[Span]) -> float:
    """How long at least one of ``steps`` ran while none of ``cover`` did: the part that nothing hid."""
    covering = union(cover)
    return _length(piece for step in union(steps) for piece in _outside(step, covering))


def _outside(interval: Interval, covering: list[Interval]) -> Iterator[Interval]:
    start, end = interval
    for cover_start, cover_end in covering:
        if start < cover_end and cover_start < end:
            if start < cover_start:
                yield start, cover_start
            start = cover_end
    if start < end:
        yield start, end


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
