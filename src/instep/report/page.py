"""A report: the table, the pictures, the verdict and the advice, as one HTML page and in a terminal."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from instep.report.figures import COMPUTE, BucketFigures, Compared, Figures, covers, figures, interruptions
from instep.report.run import Rank, Run
from instep.report.spans import BUCKETS, GRADIENTS, Interval, Memory, Span, outside, within

# The figures of some recordings beside each other, for a page and a terminal.


MIB = 2**20


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f} MiB"


@dataclass(frozen=True)
class Row:
    """Attributes:
    values: one of each recording.
    meaning: a sentence.
    """

    name: str
    values: Sequence[str]
    meaning: str


def rows(runs: Sequence[Run], found: Sequence[Figures]) -> list[Row]:
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


# What a page draws, as shares of its width and height: lanes of a few iterations, and the curves of memory.


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


# The first row of a page: the five figures that say what instep has changed, with a word on each.


@dataclass(frozen=True)
class Card:
    """One figure.

    Attributes:
        values: one of each recording.
        change: from the first recording to the last, in words; empty where there is one recording.
        meaning: a sentence.
    """

    name: str
    values: Sequence[str]
    change: str
    meaning: str


def cards(compared: Compared) -> list[Card]:
    """Peak memory, iteration, exposed step, gradients, and, of several recordings, whether the weights are equal."""
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
    most = run.ranks[0].memory.most
    return most.get(GRADIENTS, 0) + most.get(BUCKETS, 0)


def duration_change(runs: Sequence[Run], found: Sequence[Figures]) -> str:
    """From the first recording's iteration to the last one's, of the same job. Where the two ranges of durations
    overlap, the difference may be chance, and the ratio is said from one end to the other."""
    if len(runs) == 1:
        return ""
    first, last = (sorted(end - start for start, end in run.ranks[0].iterations) for run in (runs[0], runs[-1]))
    ratio = found[-1].iteration / found[0].iteration
    low, high = last[0] / first[-1], last[-1] / first[0]
    return change(ratio, None if low > 1 or high < 1 else (low, high))


def change(ratio: float, noise: tuple[float, float] | None) -> str:
    """Of a duration, in words.

    Args:
        ratio: of the duration to what it was before.
        noise: from where to where that ratio goes, if 1 lies between them.
    """
    changed = f"{abs(1 - ratio):.0%} {'shorter' if ratio < 1 else 'longer'}"
    if changed.startswith("0%"):
        changed = "as long"
    return changed if noise is None else f"{changed} here; too noisy to tell ({noise[0]:.2f} to {noise[1]:.2f})"


def _weights(runs: Sequence[Run]) -> str:
    every = [[tuple(rank.weights) for rank in run.ranks] for run in runs]
    steps = {len(run.ranks[0].iterations) for run in runs}
    known = all(weights for ranks in every for weights in ranks)
    if not known or len(steps) > 1 or len({len(ranks) for ranks in every}) > 1:
        return "not compared"
    before, after = ([[weights[which] for weights in ranks] for ranks in every] for which in (0, 1))
    if any(one != before[0] for one in before):
        return "not compared: the loops began with different weights"
    return "equal, bit for bit" if all(one == after[0] for one in after) else "different"


def bytes_change(values: Sequence[int]) -> str:
    """From the first to the last; empty where there is one, or nothing to begin with."""
    if len(values) == 1 or values[0] == 0:
        return ""
    difference = values[-1] - values[0]
    if abs(difference) < 0.01 * values[0]:
        return "the same"
    return f"{mib(abs(difference))} {'less' if difference < 0 else 'more'}"


# What to change, in at most three sentences, from the figures of a recording.


BUCKET_BYTES = 16 * MIB
"""What ``attach`` takes for one bucket unless told."""

_BACKWARD = "instep.attach(model, optimizer, schedule='backward')"
_TEMPORARIES = ("temporaries of backward", "temporaries of the step")

WORTH = 0.02
"""Of an iteration, or of a peak: less than that is not worth a change."""


def advice(run: Run, found: Figures) -> list[str]:
    """Between one and three sentences, the most important first."""
    memory = run.ranks[0].memory
    rules: Sequence[Callable[[Run, Figures, Memory], str | None]]
    if not run.setup.options:
        rules = (_time_to_gain, _memory_to_gain, _bucket_view, _fused)
    else:
        rules = (_steps_hidden, _crossing, _memory_kept, _bucket_view, _large_bucket, _fused)
    said = [sentence for rule in rules if (sentence := rule(run, found, memory)) is not None]
    return said[:3] or ["Nothing to change."]


def advice_beside(runs: Sequence[Run], found: Sequence[Figures]) -> list[list[str]]:
    """Of each of several recordings. A plain loop that was recorded with instep, too, is told what that has changed, in
    place of what it might."""
    figured = list(zip(runs, found, strict=True))
    said = []
    for run, one in figured:
        # What another optimizer changes is not instep's doing.
        same = [(other, its) for other, its in figured if other.setup.optimizer == run.setup.optimizer]
        attached = [(other, its) for other, its in same if other.setup.options]
        said.append(_measured(run, one, attached) if attached and not run.setup.options else advice(run, one))
    return said


def _measured(run: Run, found: Figures, attached: Sequence[tuple[Run, Figures]]) -> list[str]:
    said = []
    for other, its in attached:
        memory = bytes_change([run.ranks[0].memory.peak, other.ranks[0].memory.peak])
        time = duration_change([run, other], [found, its])
        said.append(f"{other.setup.label}, as recorded here: peak memory: {memory}; iteration: {time}.")
    rules = (_bucket_view, _fused)
    return [*said, *(sentence for rule in rules if (sentence := rule(run, found, run.ranks[0].memory)) is not None)]


def _time_to_gain(run: Run, found: Figures, memory: Memory) -> str | None:
    if run.job.ranks == 1 or found.communication.total == 0:
        return None
    step, late = found.step.exposed, found.communication.exposed
    if late < WORTH * found.iteration:
        return (
            f"Communication is over when backward is ({ms(late)} of it stay exposed), so there is next to nothing to "
            f"hide the step of {ms(step)} behind: expect no shorter iterations from instep here."
        )
    if run.setup.wrapper == "DistributedDataParallel":
        return (
            f"Attach: communication outlasts backward by {ms(late)}, and {_BACKWARD} runs up to "
            f"{ms(min(step, late))} of the step meanwhile; with cross_iteration=True in its place the next forward "
            f"({ms(found.forward)}) hides communication too."
        )
    return (
        f"Attach: {ms(late)} of communication stay exposed, and {_BACKWARD} runs up to "
        f"{ms(min(step, late))} of the step meanwhile."
    )


def _memory_to_gain(run: Run, found: Figures, memory: Memory) -> str | None:
    if run.setup.wrapper == "DistributedDataParallel":
        return None
    gradients, total = memory.alive.get("gradients", 0), run.setup.nbytes.get("gradients", 0)
    bucket, said = BUCKET_BYTES, ""
    if run.setup.wrapper:
        bucket = min(BUCKET_BYTES, total // 2)  # FSDP's groups, which nobody has told of
    elif total < 4 * BUCKET_BYTES:
        bucket = MIB * max(1, total // MIB // 8)
        said = f", bucket_bytes={bucket // MIB} * 2**20"
    saved = gradients - bucket
    if saved > WORTH * memory.peak:
        return (
            f"Attach for memory: gradients are {mib(gradients)} of the peak of {mib(memory.peak)}; with "
            f"instep.attach(model, optimizer, schedule='backward'{said}) they are stepped bucket by bucket in backward "
            f"and never all alive, which saves up to {mib(saved)}."
        )
    passing = {name: memory.alive.get(name, 0) for name in ("activations", *_TEMPORARIES, "other")}
    largest = max(passing, key=lambda name: passing[name])
    return (
        f"At the peak of {mib(memory.peak)} there are {mib(gradients)} of gradients and {mib(passing[largest])} of "
        f"{largest}, which set it: stepping in backward would save next to nothing."
    )


def _bucket_view(run: Run, found: Figures, memory: Memory) -> str | None:
    if run.setup.wrapper != "DistributedDataParallel" or run.setup.bucket_view:
        return None
    return (
        "Build DistributedDataParallel with gradient_as_bucket_view=True: gradients then lie in its buckets, and the "
        f"second copy of {mib(run.setup.nbytes.get('gradients', 0))} goes."
    )


def _fused(run: Run, found: Figures, memory: Memory) -> str | None:
    if run.setup.fused or found.step.total < 5 * WORTH * found.iteration or not _has_fused(run.setup.optimizer):
        return None
    return (
        f"The step takes {ms(found.step.total)}: with fused=True the optimizer needs one pass over memory (and its "
        "numbers differ from the other implementations' in the last bit)."
    )


def _steps_hidden(run: Run, found: Figures, memory: Memory) -> str | None:
    step = found.step
    if run.job.ranks == 1 and run.setup.options.get("schedule") == "'backward'":
        return f"On one device the step of {ms(step.total)} inside backward is not hidden, and is not meant to be: " + (
            "undo also keeps copies until optimizer.step(). Without undo instep saves memory there."
            if "undo" in run.setup.options
            else "there instep saves memory, not time."
        )
    if step.total == 0:
        return None
    share = step.hidden / step.total
    if share >= 0.5 or step.exposed < WORTH * found.iteration:
        return f"{share:.0%} of the step is hidden, and {ms(step.exposed)} of an iteration are left of it."
    if run.job.ranks == 1:
        return (
            f"{ms(step.exposed)} of the step stay exposed: it is taken at once, or there is nothing to hide it behind."
        )
    if found.communication.exposed < WORTH * found.iteration:
        return (
            f"{ms(step.exposed)} of the step stay exposed: communication ends with backward, and there is nothing to "
            "hide them behind. The plain loop takes as long here."
        )
    return (
        f"{ms(step.exposed)} of the step stay exposed although {ms(found.communication.exposed)} of communication "
        "do, too: smaller buckets (bucket_cap_mb) arrive, and are stepped, earlier."
    )


def _crossing(run: Run, found: Figures, memory: Memory) -> str | None:
    """A tenth: less is lost again in the order and the bookkeeping of it."""
    late = found.communication.exposed
    crosses = "cross_iteration" in run.setup.options
    refused = {"clip", "nonfinite", "comm_hook", "shard_state"} & set(run.setup.options)
    if crosses or refused or run.setup.wrapper != "DistributedDataParallel" or late < 0.1 * found.iteration:
        return None
    return (
        f"{ms(late)} of communication stay exposed: schedule='forward', cross_iteration=True lets the next forward "
        f"({ms(found.forward)}) begin meanwhile."
    )


def _memory_kept(run: Run, found: Figures, memory: Memory) -> str | None:
    gradients = memory.alive.get("gradients", 0)
    if run.setup.wrapper == "DistributedDataParallel" or gradients < 2 * WORTH * memory.peak:
        return None
    if run.setup.options.get("schedule") == "'forward'" or "undo" in run.setup.options:
        option = "undo" if "undo" in run.setup.options else "schedule='forward'"
        return (
            f"{option} keeps all gradients until they are applied: {mib(gradients)} of the peak. "
            "schedule='backward' does not, if the loop can do without."
        )
    return None


def _large_bucket(run: Run, found: Figures, memory: Memory) -> str | None:
    """Half: with one bucket there is nothing to overlap with another, and all of its memory is alive at once."""
    total = sum(bucket.nbytes for bucket in found.buckets)
    if not found.buckets or len(run.setup.gradients) < 4:
        return None
    largest = max(found.buckets, key=lambda bucket: bucket.nbytes)
    if largest.nbytes <= total / 2 or len(largest.parameters) < 2:
        return None
    option = "bucket_cap_mb of DistributedDataParallel" if run.setup.wrapper else "bucket_bytes"
    return (
        f"One bucket holds {largest.nbytes / total:.0%} of the gradients ({mib(largest.nbytes)}): a smaller {option} "
        "lets steps begin earlier."
    )


def _has_fused(optimizer: str) -> bool:
    return optimizer.split("(")[0] in ("SGD", "Adam", "AdamW", "Adagrad")


# A report as one HTML page, with nothing to load from elsewhere.


def page(jobs: Sequence[Compared]) -> str:
    """Of one recording, or of several side by side, each job by itself. The page can be read without its script, which
    shows the values under a pointer, and zooms."""
    environment = Environment(
        loader=PackageLoader("instep.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ms"] = lambda seconds: f"{1e3 * seconds:.1f}"
    environment.filters["mib"] = lambda nbytes: f"{nbytes / MIB:.1f}"
    environment.filters["breakable"] = breakable
    return environment.get_template("page.html").render(jobs=[_shown(job) for job in jobs], ticks=ticks)


def _shown(compared: Compared) -> dict[str, Any]:
    runs, found = compared.runs, compared.figures
    sections = [
        {"run": run, "setup": run.setup, "figures": one, "timeline": timeline, "memory": run.ranks[0].memory}
        for run, one, timeline in zip(runs, found, timelines(runs), strict=True)
    ]
    return {
        "title": compared.title,
        "sections": sections,
        "cards": cards(compared),
        "advice": advice_beside(runs, found),
        "rows": rows(runs, found),
        "curves": curves(runs),
    }


def breakable(name: str) -> Markup:
    """A name that may go on in the next line behind a mark between two of its words, and nowhere else."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._,=(])(?=[^._,=(\s])", name))


# A report in a terminal, and as JSON.


def show(console: Console, jobs: Sequence[Compared]) -> None:
    """Print it: what the page says, without its pictures."""
    for compared in jobs:
        if len(jobs) > 1:
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
    for run, one, sentences in zip(runs, found, advice_beside(runs, found), strict=True):
        memory = run.ranks[0].memory
        held = sorted(memory.alive.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {nbytes / MIB:.1f}" for name, nbytes in held if nbytes >= MIB / 20)
        console.print(Text(f"{run.setup.label}: at the peak, in MiB: {parts}"))
        if one.buckets:
            console.print(_table(one.buckets))
        for sentence in sentences:
            console.print(Text(f"- {sentence}"))


def _table(buckets: Sequence[BucketFigures]) -> Table:
    table = Table("bucket", "MiB", "step, ms", "hidden", "on its way", box=box.SIMPLE_HEAD, pad_edge=False)
    for bucket in buckets:
        flight = "–" if bucket.flight is None else f"{1e3 * bucket.flight:.1f}"
        times = (f"{1e3 * bucket.step:.1f}", f"{1e3 * bucket.hidden:.1f}", flight)
        table.add_row(Text(bucket.name), f"{bucket.nbytes / MIB:.1f}", *times)
    return table


def summary(run: Run) -> dict[str, Any]:
    """For machines: seconds and bytes."""
    found, memory = figures(run), run.ranks[0].memory
    parts = {"step": found.step, "communication": found.communication}
    hidden = {name: {**asdict(part), "hidden": part.hidden} for name, part in parts.items()}
    return {
        "setup": asdict(run.setup),
        "figures": {**asdict(found), **hidden},
        "peak": {"bytes": memory.peak, "alive": dict(memory.alive)},
        "advice": advice(run, found),
    }
