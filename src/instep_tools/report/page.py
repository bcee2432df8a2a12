"""A report: one HTML page with nothing to load from elsewhere (``page``), lines in a terminal (``show``), or JSON
(``summary``).

Page and terminal have the same table (``rows``) and the same suggestions. The page adds cards with the figures that
instep changes, a timeline of two iterations, and the curves of memory. What the page draws is measured here in shares
of its width and height; ``templates/page.html`` places it.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from instep_tools.report.figures import (
    COMPUTE,
    BucketFigures,
    Compared,
    Figures,
    by_rank,
    bytes_change,
    covers,
    duration_change,
    figures,
    interruptions,
    mib,
    ms,
)
from instep_tools.report.memory import BUCKETS, GRADIENTS, MIB, Memory
from instep_tools.report.run import Rank, Run
from instep_tools.report.spans import Interval, Span, outside, within
from instep_tools.report.suggestions import suggestions, suggestions_beside


def page(jobs: Sequence[Compared], said: Sequence[str] = ()) -> str:
    """Return the page of one recording, or of several side by side, each job by itself.

    ``said`` stands above them, a line each: what the command that recorded them prints last. The page can be read
    without its script, which shows the values under a pointer, and zooms.
    """
    environment = Environment(
        loader=PackageLoader("instep_tools.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a name that only the template has is an error, and no empty place
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ms"] = lambda seconds: f"{1e3 * seconds:.1f}"
    environment.filters["mib"] = lambda nbytes: f"{nbytes / MIB:.1f}"
    environment.filters["breakable"] = breakable
    return environment.get_template("page.html").render(jobs=[_shown(job) for job in jobs], said=said, ticks=ticks)


def _shown(compared: Compared) -> dict[str, Any]:
    """Return what the template shows of one job."""
    runs, found = compared.runs, compared.figures
    sections = [
        {
            "run": run,
            "setup": run.setup,
            "figures": one,
            "buckets": worth_a_table(one.buckets),
            "timeline": timeline,
            "memory": run.ranks[0].memory,
        }
        for run, one, timeline in zip(runs, found, timelines(runs), strict=True)
    ]
    return {
        "title": compared.title,
        "sections": sections,
        "cards": cards(compared),
        "advice": suggestions_beside(runs, found),
        "rows": rows(runs, found),
        "curves": curves(runs),
    }


def breakable(name: str) -> Markup:
    """Return a name, escaped, that a browser may break after a mark between two of its words, and nowhere else."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._,=(])(?=[^._,=(\s])", name))


def show(console: Console, jobs: Sequence[Compared]) -> None:
    """Print what the page says, without its pictures."""
    for compared in jobs:
        if len(jobs) > 1:
            # ``Text``, here and below: names of a recording are never read as markup.
            console.print(Text(f"\n{compared.title}", style="bold"))
        _show(console, compared)


def _show(console: Console, compared: Compared) -> None:
    runs, found = compared.runs, compared.figures
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for run in runs:
        table.add_column(Text(run.setup.label), justify="right")
    for row in rows(runs, found):
        table.add_row(row.name, *row.values)
    console.print(table)
    for run, one, sentences in zip(runs, found, suggestions_beside(runs, found), strict=True):
        memory = run.ranks[0].memory
        held = sorted(memory.alive.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {nbytes / MIB:.1f}" for name, nbytes in held if nbytes >= MIB / 20)
        console.print(Text(f"{run.setup.label}: at the peak, in MiB: {parts}"))
        if buckets := worth_a_table(one.buckets):
            console.print(_table(buckets))
        for sentence in sentences:
            console.print(Text(f"- {sentence}"))
    if len(runs) > 1:
        console.print(Text(f"Weights: {compared.weights or _weights(runs)}"))


def worth_a_table(buckets: Sequence[BucketFigures]) -> Sequence[BucketFigures]:
    """Return the buckets of a loop that has stepped or sent any by itself: of others there is nothing to tell."""
    return buckets if any(bucket.step or bucket.flight for bucket in buckets) else ()


def _table(buckets: Sequence[BucketFigures]) -> Table:
    table = Table("bucket", "MiB", "step, ms", "hidden", "on its way", box=box.SIMPLE_HEAD, pad_edge=False)
    for bucket in buckets:
        flight = "–" if bucket.flight is None else f"{1e3 * bucket.flight:.1f}"
        times = (f"{1e3 * bucket.step:.1f}", f"{1e3 * bucket.hidden:.1f}", flight)
        table.add_row(Text(bucket.name), f"{bucket.nbytes / MIB:.1f}", *times)
    return table


def summary(run: Run) -> dict[str, Any]:
    """Return the figures for machines: seconds and bytes."""
    found, memory = figures(run), run.ranks[0].memory
    parts = {"step": found.step, "communication": found.communication}
    # ``hidden`` is a property, which ``asdict`` leaves out.
    hidden = {name: {**asdict(part), "hidden": part.hidden} for name, part in parts.items()}
    return {
        "setup": asdict(run.setup),
        "figures": {**asdict(found), **hidden},
        "peak": {"bytes": memory.peak, "alive": dict(memory.alive)},
        "advice": suggestions(run, found),
    }


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        values: one for each recording.
        meaning: a sentence that explains the row.
    """

    name: str
    values: Sequence[str]
    meaning: str


def rows(runs: Sequence[Run], found: Sequence[Figures]) -> list[Row]:
    """Return the table of all figures. Communication has rows where there was some."""

    def row(name: str, value: Callable[[Run, Figures], str], meaning: str) -> Row:
        return Row(name, [value(run, one) for run, one in zip(runs, found, strict=True)], meaning)

    def time(name: str, seconds: Callable[[Figures], float], meaning: str) -> Row:
        return row(name, lambda run, one: ms(seconds(one)), meaning)

    made = [
        time("iteration", lambda one: one.iteration, "From forward to forward, with the profiler's own time in it."),
        time("forward", lambda one: one.forward, "Without what was waited for, or stepped, inside."),
        time("backward", lambda one: one.backward, "The same, until its last operation."),
        time("step", lambda one: one.step.total, "In which any thread updated parameters."),
        time(
            "step, hidden",
            lambda one: one.step.hidden,
            "Gradients were under way, or another thread computed.",
        ),
        time("step, exposed", lambda one: one.step.exposed, "The rest: iterations are longer by it."),
    ]
    if any(one.communication.total for one in found):
        made += [
            time("communication", lambda one: one.communication.total, "Gradients or parameters were under way."),
            time("communication, hidden", lambda one: one.communication.hidden, "Meanwhile something was computed."),
            time("communication, exposed", lambda one: one.communication.exposed, "The rest."),
        ]
    made += _pipeline_rows(runs, found)
    made += [
        time("waiting", lambda one: one.waiting, "Of the loop: for communication or for another thread's step."),
        time("other", lambda one: one.other, "Of the loop: data, the scheduler, everything else."),
        row(
            "peak memory",
            lambda run, one: mib(run.ranks[0].memory.peak),
            "Of tensors: parameters, state, gradients, and what was allocated while it was recorded.",
        ),
    ]
    return made


def _pipeline_rows(runs: Sequence[Run], found: Sequence[Figures]) -> list[Row]:
    """Return the rows of a pipeline, whose ranks differ: each value is of all ranks, in their order."""
    shown = [
        ("bubbles", "bubbles", "Inside schedule.step(): no stage of the rank computes, nor is stepped."),
        ("step, in schedule.step()", "step_inside", "A stage is stepped when its last micro-batch is through."),
        ("step, after schedule.step()", "step_after", "The rest: in optimizer.step(), say."),
    ]
    if all(one.pipeline is None for one in found):
        return []
    made = []
    for name, figure, meaning in shown:
        values = [by_rank(getattr(one.pipeline, figure)) if one.pipeline else "–" for one in found]
        made.append(Row(name, values, f"{meaning} By rank." if len(runs[0].ranks) > 1 else meaning))
    return made


@dataclass(frozen=True)
class Card:
    """A figure in the first row of a page: what instep has changed.

    Attributes:
        values: one for each recording.
        change: from the first recording to the last, in words; empty where there is one recording.
        meaning: a sentence that explains the figure.
    """

    name: str
    values: Sequence[str]
    change: str
    meaning: str


def cards(compared: Compared) -> list[Card]:
    """Return a card for peak memory, iteration, exposed step, gradients and, of several recordings, equal weights."""
    runs, found = compared.runs, compared.figures
    peaks = [run.ranks[0].memory.peak for run in runs]
    gradients = [gradients_at_once(run) for run in runs]
    exposed = [ms(one.step.exposed) for one in found]
    made = [
        Card(
            "peak memory",
            list(map(mib, peaks)),
            bytes_change(peaks),
            "The most bytes of tensors that were alive at once.",
        ),
        Card(
            "iteration",
            [ms(one.iteration) for one in found],
            duration_change(runs, found),
            "From one forward to the next: the median of the recorded iterations. The recording itself takes time.",
        ),
        Card(
            "exposed step",
            exposed,
            f"{exposed[0]} to {exposed[-1]}" if len(runs) > 1 else "",
            "The part of the optimizer step during which nothing else ran: the iteration is longer by this time.",
        ),
        Card(
            "gradients at once",
            list(map(mib, gradients)),
            bytes_change(gradients),
            "The most bytes of gradients that were alive at once. A gradient that is freed in backward makes room for "
            "the next.",
        ),
    ]
    if len(runs) > 1:
        meaning = "After the last recorded step. Other batches, settings or optimizers make them differ."
        meaning = meaning if compared.weights is None else "As the loops were compared while they trained."
        made.append(Card("weights", [compared.weights or _weights(runs)], "", meaning))
    return made


def gradients_at_once(run: Run) -> int:
    """Return the most bytes of gradients that were alive at once on the first rank, DDP's buckets among them."""
    most = run.ranks[0].memory.most
    return most.get(GRADIENTS, 0) + most.get(BUCKETS, 0)


def _weights(runs: Sequence[Run]) -> str:
    """Return whether the loops ended with equal weights, by the digests of all ranks, in words."""
    every = [[tuple(rank.weights) for rank in run.ranks] for run in runs]
    steps = {len(run.ranks[0].iterations) for run in runs}
    known = all(weights for ranks in every for weights in ranks)
    if not known or len(steps) > 1 or len({len(ranks) for ranks in every}) > 1:
        return "not compared"
    # Only loops that began alike, and took as many steps, can be expected to end alike.
    before, after = ([[weights[which] for weights in ranks] for ranks in every] for which in (0, 1))
    if any(one != before[0] for one in before):
        return "not compared: the loops began with different weights"
    return "equal, bit for bit" if all(one == after[0] for one in after) else "different"


RANKS = 8
"""The most ranks that a timeline draws."""
LANES = (
    ("compute", COMPUTE),  # in a pipeline a lane for each stage of the rank
    ("communication", ("communication",)),
    ("optimizer", ("step",)),
    ("bubbles", ("bubble",)),
    ("waiting", ("waiting",)),
)
_IF_ANY = ("communication", "bubbles")
"""The lanes that are left out where they would be empty."""


@dataclass(frozen=True)
class Bar:
    """A bar of a lane.

    Attributes:
        left: where it begins, in per cent of the lane, as its width is.
        look: its CSS classes.
        title: the text for a pointer that is on the bar.
    """

    left: float
    width: float
    look: str
    title: str


@dataclass(frozen=True)
class TimelineRow:
    """One lane of a rank."""

    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Timeline:
    """The timeline of one recording.

    Attributes:
        seconds: its width.
        ranks: the name and the lanes of each rank that is drawn.
        left_out: how many ranks are not drawn.
    """

    seconds: float
    ranks: Sequence[tuple[str, Sequence[TimelineRow]]]
    left_out: int


def timelines(runs: Sequence[Run]) -> list[Timeline]:
    """Return a timeline of each recording, all as wide as the longest. Each shows the iteration of median length and
    the one after it."""
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
    # Not the first iteration, in which buffers and state are made, nor the last: no forward follows for a step to hide
    # behind.
    candidates = range(1, len(iterations) - 1) if len(iterations) > 2 else range(1)
    middle = sorted(candidates, key=lambda i: iterations[i][1] - iterations[i][0])[len(candidates) // 2]
    return iterations[middle][0], iterations[min(middle + 1, len(iterations) - 1)][1]


def _lanes(rank: Rank, window: Interval, seconds: float) -> list[TimelineRow]:
    lanes = []
    for name, spans in _spans_of_lanes(rank):
        # The longest first: what encloses another bar is drawn before it, and lies under it.
        longest_first = sorted(spans, key=lambda span: span.start - span.end)
        bars = [bar for span in longest_first for bar in _bars(rank, span, window, seconds)]
        lanes.append(TimelineRow(name, bars))
    return lanes


def _spans_of_lanes(rank: Rank) -> Iterator[tuple[str, list[Span]]]:
    for name, kinds in LANES:
        spans = [span for span in rank.spans if span.kind in kinds]
        if kinds == COMPUTE and rank.stages:
            for stage in rank.stages:
                yield f"stage {stage}", [span for span in spans if span.stage == stage]
        elif spans or name not in _IF_ANY:
            yield name, spans


def _bars(rank: Rank, span: Span, window: Interval, seconds: float) -> Iterator[Bar]:
    whole = (span.start, span.end)
    # A span is drawn as a whole in its hidden look, and its exposed pieces on top of that.
    looks = [(span.kind, [whole])]
    if span.kind in COMPUTE:
        looks = [(span.kind, outside([whole], interruptions(rank, span.thread)))]
    elif span.kind in ("step", "communication"):
        bare = outside([whole], covers(rank, span))
        looks = [(f"{span.kind} hidden", [whole]), (f"{span.kind} exposed", bare)]
    for look, pieces in looks:
        named = span.label if span.name.startswith(span.kind) else f"{span.kind}, {span.label}"
        title = f"{named}{', hidden' if look.endswith('hidden') else ''}: {1e3 * (span.end - span.start):.2f} ms"
        for start, end in within(pieces, window):
            # A narrower bar could not be seen.
            yield Bar(100 * (start - window[0]) / seconds, max(0.05, 100 * (end - start) / seconds), look, title)


@dataclass(frozen=True)
class Curve:
    """The bytes alive over time in one recording.

    Attributes:
        path: the ``d`` of an SVG path in a box of 1000 by 100, without the last line down to nothing.
        points: milliseconds from the recording's beginning, and MiB from that moment on.
    """

    label: str
    path: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curves:
    """The curves of all recordings in one box, ``seconds`` wide, with ``heights`` in MiB."""

    seconds: float
    heights: Sequence["Tick"]
    lines: Sequence[Curve]


def curves(runs: Sequence[Run]) -> Curves:
    """Return the memory curve of each recording's first rank."""
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
        # Two points for each change: memory jumps, and does not slope.
        points.append(f"{x:.2f} {height:.2f}")
        height = 100 - 100 * nbytes / top
        points.append(f"{x:.2f} {height:.2f}")
    values = [(round(1e3 * t, 4), round(n / MIB, 3)) for t, n in zip(times, memory.nbytes, strict=True)]
    return Curve(label, f"M{' L'.join(points[1:])}", values)


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, ``at`` per cent of its length."""

    at: float
    text: str


def ticks(end: float, most: int = 5) -> list[Tick]:
    """Return round numbers from 0 to ``end``: at most ``most`` steps of 1, 2 or 5 times a power of ten."""
    least = end / most
    power = 10.0 ** math.floor(math.log10(least))
    # 1e-9: a quotient that was rounded must not cost the best step, or the last tick.
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [Tick(100 * i * step / end, f"{i * step:.{digits}f}") for i in range(int(end / step * (1 + 1e-9)) + 1)]
