"""A report: one HTML page with nothing to load from elsewhere (``page``), a table in a terminal (``show``), or JSON
(``summary``).

Page and terminal have the same table (``rows``), a column for each recording. The page adds a timeline of two
iterations, whose bars are measured here in shares of its width; ``templates/page.html`` places them. Whoever wants to
look closer opens the recording in a trace viewer.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.console import Console

from instep_tools.output import print_line, size_of, table, time_of
from instep_tools.report.figures import COMPUTE, Figures, covers, figures, interruptions
from instep_tools.report.run import Rank, Run
from instep_tools.report.spans import Interval, Span, outside, within

FIRST = ("iteration", "step, exposed", "gradients at once")
"""The rows of the table that stand above all else on the page."""


def page(runs: Sequence[Run], said: Sequence[str] = ()) -> str:
    """Return the page of one recording, or of several side by side.

    ``said`` stands above them, a line each: what the command that recorded them prints last.
    """
    environment = Environment(
        loader=PackageLoader("instep_tools.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a name that only the template has is an error, and no empty place
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["size"] = size_of
    environment.filters["time"] = time_of
    found = list(map(figures, runs))
    made = rows(runs, found)
    windows = [_window(run.ranks[0].iterations) for run in runs]
    seconds = max(end - start for start, end in windows)
    return environment.get_template("page.html").render(
        runs=runs,
        said=said,
        rows=made,
        first=[row for row in made if row.name in FIRST],
        timelines=[_timeline(run, window, seconds) for run, window in zip(runs, windows, strict=True)],
        seconds=seconds,
    )


def breakable(name: str) -> Markup:
    """Return a name, escaped, that a browser may break after a mark between two of its words, and nowhere else."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._,=(])(?=[^._,=(\s])", name))


def show(console: Console, runs: Sequence[Run]) -> None:
    """Print what the page says, without its pictures."""
    found = list(map(figures, runs))
    made = table("", *(run.setup.label for run in runs))
    for row in rows(runs, found):
        made.add_row(row.name, *row.values)
    console.print(made)
    for run in runs:
        print_line(console, f"{run.setup.label}: {run.setup.job}")


def summary(run: Run) -> dict[str, Any]:
    """Return the figures for machines: seconds and bytes."""
    found = figures(run)
    parts = {"step": found.step, "communication": found.communication}
    # ``hidden`` is a property, which ``asdict`` leaves out.
    hidden = {name: {**asdict(part), "hidden": part.hidden} for name, part in parts.items()}
    return {
        "setup": asdict(run.setup),
        "figures": {**asdict(found), **hidden},
        "gradient_bytes": run.ranks[0].gradient_bytes,
    }


class Row(NamedTuple):
    """A row of the table: a value of each recording, and a sentence that explains the row."""

    name: str
    values: Sequence[str]
    meaning: str


def rows(runs: Sequence[Run], found: Sequence[Figures]) -> list[Row]:
    """Return the table of all figures. Communication has rows where there was any."""

    def time(name: str, seconds: Callable[[Figures], float], meaning: str) -> Row:
        return Row(name, [time_of(seconds(one)) for one in found], meaning)

    made = [
        time("iteration", lambda one: one.iteration, "From forward to forward, with the profiler's own time in it."),
        time("forward", lambda one: one.forward, "Without what was waited for, or stepped, inside."),
        time("backward", lambda one: one.backward, "The same, until its last operation."),
        time("step", lambda one: one.step.total, "In which any thread updated parameters."),
        time("step, hidden", lambda one: one.step.hidden, "Gradients were under way, or another thread computed."),
        time("step, exposed", lambda one: one.step.exposed, "The rest: iterations are longer by it."),
    ]
    if any(one.communication.total for one in found):
        made += [
            time("communication", lambda one: one.communication.total, "Gradients or parameters were under way."),
            time("communication, hidden", lambda one: one.communication.hidden, "Meanwhile something was computed."),
            time("communication, exposed", lambda one: one.communication.exposed, "The rest."),
        ]
    return [
        *made,
        time("waiting", lambda one: one.waiting, "Of the loop: for communication or for another thread's step."),
        time("other", lambda one: one.other, "Of the loop: data, the scheduler, a pipeline's bubbles, all else."),
        Row(
            "gradients at once",
            [size_of(run.ranks[0].gradient_bytes) for run in runs],
            "The most bytes of gradients that were alive at once.",
        ),
    ]


# The timeline.

RANKS = 8
"""The most ranks that a timeline draws."""
LANES = (
    ("compute", COMPUTE),  # in a pipeline a lane for each stage of the rank
    ("communication", ("communication",)),
    ("optimizer", ("step",)),
    ("waiting", ("waiting",)),
)


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


Lane = tuple[str, list[Bar]]


def _window(iterations: Sequence[Interval]) -> Interval:
    """Return the iteration of median length and the one after it."""
    # Not the first iteration, in which buffers and state are made, nor the last: no forward follows for a step to hide
    # behind.
    candidates = range(1, len(iterations) - 1) if len(iterations) > 2 else range(1)
    middle = sorted(candidates, key=lambda i: iterations[i][1] - iterations[i][0])[len(candidates) // 2]
    return iterations[middle][0], iterations[min(middle + 1, len(iterations) - 1)][1]


def _timeline(run: Run, window: Interval, seconds: float) -> list[tuple[str, list[Lane]]]:
    """Return the name and the lanes of each rank that is drawn, ``seconds`` wide."""
    found = []
    for rank in run.ranks[:RANKS]:
        lanes = []
        for name, spans in _spans_of_lanes(rank):
            # The longest first: what encloses another bar is drawn before it, and lies under it.
            longest_first = sorted(spans, key=lambda span: span.start - span.end)
            lanes.append((name, [bar for span in longest_first for bar in _bars(rank, span, window, seconds)]))
        found.append((f"rank {rank.rank}" if len(run.ranks) > 1 else "", lanes))
    return found


def _spans_of_lanes(rank: Rank) -> Iterator[tuple[str, list[Span]]]:
    for name, kinds in LANES:
        spans = [span for span in rank.spans if span.kind in kinds]
        if kinds == COMPUTE and rank.stages:
            for stage in rank.stages:
                yield f"stage {stage}", [span for span in spans if span.stage == stage]
        elif spans or name != "communication":
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
