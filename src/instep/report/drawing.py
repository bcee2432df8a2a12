"""What a page draws, as shares of its width and height: lanes of a few iterations, and the curves of memory."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from instep.report.figures import COMPUTE, covers, interruptions
from instep.report.memory import Memory
from instep.report.overlap import Interval, outside, within
from instep.report.run import Rank, Run
from instep.report.spans import Span
from instep.report.table import MIB

RANKS = 8
"""As many are drawn."""

LANES = (("compute", COMPUTE), ("communication", ("communication",)), ("optimizer", ("step",)))


@dataclass(frozen=True)
class Bar:
    """From ``left``, ``width`` wide, both in per cent of the lane; ``look`` is its CSS class, ``title`` the text that
    is read where one points at the bar."""

    left: float
    width: float
    look: str
    title: str


@dataclass(frozen=True)
class TimelineRow:
    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Timeline:
    """Attributes:
    seconds: its width.
    ranks: the lanes of each that is drawn.
    """

    seconds: float
    ranks: Sequence[tuple[str, Sequence[TimelineRow]]]
    left_out: int


def timelines(runs: Sequence[Run]) -> list[Timeline]:
    """All as wide as the longest: of each the iteration that took about as long as most of them, and the one after."""
    windows = [_window(run.ranks[0].iterations) for run in runs]
    seconds = max(end - start for start, end in windows)
    drawn = [
        [_lanes(rank, window, seconds) for rank in run.ranks[:RANKS]] for run, window in zip(runs, windows, strict=True)
    ]
    names = [[f"rank {rank.rank}" if len(run.ranks) > 1 else "" for rank in run.ranks[:RANKS]] for run in runs]
    return [
        Timeline(seconds, list(zip(named, lanes, strict=True)), max(0, len(run.ranks) - RANKS))
        for run, named, lanes in zip(runs, names, drawn, strict=True)
    ]


def _window(iterations: Sequence[Interval]) -> Interval:
    # Not the first, in which things are made, nor the last, after which there is nothing to hide behind.
    candidates = range(1, len(iterations) - 1) if len(iterations) > 2 else range(1)
    middle = sorted(candidates, key=lambda i: iterations[i][1] - iterations[i][0])[len(candidates) // 2]
    return iterations[middle][0], iterations[min(middle + 1, len(iterations) - 1)][1]


def _lanes(rank: Rank, window: Interval, seconds: float) -> list[TimelineRow]:
    lanes = []
    for name, kinds in LANES:
        spans = [span for span in rank.spans if span.kind in kinds]
        bars = [bar for span in _plain_first(spans) for bar in _bars(rank, span, window, seconds)]
        if name != "communication" or spans:
            lanes.append(TimelineRow(name, bars))
    waiting = [span for span in rank.spans if span.kind == "waiting"]
    lanes.append(TimelineRow("waiting", [bar for span in waiting for bar in _bars(rank, span, window, seconds)]))
    return lanes


def _plain_first(spans: Iterable[Span]) -> list[Span]:
    """What encloses others is drawn before them."""
    return sorted(spans, key=lambda span: span.start - span.end)


def _bars(rank: Rank, span: Span, window: Interval, seconds: float) -> Iterator[Bar]:
    whole = (span.start, span.end)
    looks = [(span.kind, [whole])]
    if span.kind in COMPUTE:
        looks = [(span.kind, outside([whole], interruptions(rank, span.thread)))]
    elif span.kind in ("step", "communication"):
        bare = outside([whole], covers(rank, span))
        looks = [(f"{span.kind} hidden", [whole]), (f"{span.kind} exposed", bare)]
    for look, pieces in looks:
        named = span.name if span.name.startswith(span.kind) else f"{span.kind}, {span.name}"
        title = f"{named}{', hidden' if look.endswith('hidden') else ''}: {1e3 * (span.end - span.start):.2f} ms"
        for start, end in within(pieces, window):
            # Narrower ones cannot be seen.
            yield Bar(100 * (start - window[0]) / seconds, max(0.05, 100 * (end - start) / seconds), look, title)


@dataclass(frozen=True)
class Curve:
    """Bytes alive over time, of one recording.

    Attributes:
        path: the ``d`` of an SVG path in a box of 1000 by 100, without the last line down to nothing.
        points: milliseconds from the recording's beginning, and MiB from then on.
    """

    label: str
    path: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curves:
    """All recordings in one box, ``seconds`` wide, with ``heights`` in MiB."""

    seconds: float
    heights: Sequence["Tick"]
    lines: Sequence[Curve]


def curves(runs: Sequence[Run]) -> Curves:
    """The first rank's memory of each."""
    memories = [run.ranks[0].memory for run in runs]
    seconds = max(memory.times[-1] - memory.times[0] for memory in memories) or 1.0
    top = 1.05 * max(memory.peak for memory in memories) or 1.0
    lines = [_curve(run.setup.label, run.ranks[0].memory, seconds, top) for run in runs]
    return Curves(seconds, ticks(top / MIB, 4), lines)


def _curve(label: str, memory: Memory, seconds: float, top: float) -> Curve:
    times = [time - memory.times[0] for time in memory.times]
    points, height = [], 100.0
    for time, nbytes in zip(times, memory.nbytes, strict=True):
        x = 1000 * time / seconds
        points.append(f"{x:.2f} {height:.2f}")
        height = 100 - 100 * nbytes / top
        points.append(f"{x:.2f} {height:.2f}")
    values = [(round(1e3 * t, 4), round(n / MIB, 3)) for t, n in zip(times, memory.nbytes, strict=True)]
    return Curve(label, f"M{' L'.join(points[1:])}", values)


@dataclass(frozen=True)
class Tick:
    """``at`` per cent of an axis."""

    at: float
    text: str


def ticks(end: float, most: int = 5) -> list[Tick]:
    """Round numbers from 0 to ``end``, at most ``most`` steps of 1, 2 or 5 times a power of ten."""
    least = end / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [Tick(100 * i * step / end, f"{i * step:.{digits}f}") for i in range(int(end / step * (1 + 1e-9)) + 1)]
