"""The demo from its options to its verdict: two acts, their numbers, and what is shown."""

import dataclasses
import json as jsonlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from instep._version import __version__
from instep.demo.job import (
    MIN_STEPS,
    SHAPES,
    SIZE_OF_RANKS,
    WARM_UP_STEPS,
    Alone,
    DemoError,
    Finished,
    Held,
    InRank,
    Line,
    Placement,
    Progress,
    Shape,
    Size,
    Stepped,
    Turn,
)
from instep.demo.loops import load_text, place
from instep.demo.processes import Workers, workers
from instep.report.figures import Compared, change
from instep.report.files import NotWrittenError, require_writable, write
from instep.report.page import page

# The two acts: one device, where gradients are freed in backward; and two ranks, where no bucket is kept.


MOMENTS = 2
"""Of AdamW: numbers of its state for each of the weights."""

Tell = Callable[[int, float], None]
"""Told of each step, with the loss."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One loop of the first act, from its first step to its last."""

    line: Line
    steps: tuple[Stepped, ...]
    held: Held


@dataclass(frozen=True, slots=True)
class Larger:
    """The deepest model that fits where the plain loop's did, tried with the step in backward.

    Attributes:
        depth: of the model.
    """

    depth: int
    held: Held


def one_device(shape: Shape, device: str, steps: int, text: bytes, tell: Tell) -> list[Trained]:
    """Train each line of ``Line`` in a process of its own. The processes take turns."""
    lines = list(Line)
    taken: list[list[Stepped]] = [[] for _ in lines]
    with workers([Alone(shape, line, device) for line in lines], text) as started:
        for step in range(steps):
            # Whichever goes first finds other caches than the next.
            for number in islice(cycle(range(len(lines))), step % len(lines), step % len(lines) + len(lines)):
                started.tell(number, Turn.STEP)
                taken[number].append(_stepped(started, number))
            tell(step + 1, taken[0][-1].loss)
        held = [_end(started, number, Turn.RECORD) for number in range(len(lines))]
        started.join()
    return [Trained(*one) for one in zip(lines, map(tuple, taken), held, strict=True)]


def larger(shape: Shape, device: str, trained: Sequence[Trained], text: bytes) -> Larger | None:
    """Try the deepest model that should fit in the plain loop's peak, and if that does not, the next; ``None``: none is
    deeper."""
    by_line = {one.line: one.held for one in trained}
    budget, freed = by_line[Line.PLAIN].peak_bytes, by_line[Line.BACKWARD].peak_bytes
    block = by_line[Line.BACKWARD].weight_bytes / shape.depth * (1 + MOMENTS) + _activations(shape, by_line)
    for depth in range(shape.depth + int((budget - freed) / block), shape.depth, -1):
        job = Alone(replace(shape, depth=depth), Line.BACKWARD, device)
        with workers([job], text) as started:
            for _ in range(WARM_UP_STEPS):
                started.tell(0, Turn.STEP)
                _stepped(started, 0)
            held = _end(started, 0, Turn.END)
            started.join()
        if held.peak_bytes <= budget:
            return Larger(depth, held)
    return None


def two_ranks(shape: Shape, placement: Placement, steps: int, text: bytes, tell: Tell) -> list[Finished]:
    """The ranks' answers in the order of ranks."""
    jobs = [InRank(shape, steps, placement, rank) for rank in range(placement.ranks)]
    finished: dict[int, Finished] = {}
    with workers(jobs, text) as started:
        for rank, answer in started.answers():
            if isinstance(answer, Finished):
                finished[rank] = answer
            elif isinstance(answer, Progress):
                tell(answer.step, answer.loss)
        started.join()
    return [finished[rank] for rank in sorted(finished)]


def _activations(shape: Shape, held: dict[Line, Held]) -> float:
    """Bytes that a block keeps for backward, at most: all that the peak has beside weights and state, by block."""
    backward = held[Line.BACKWARD]
    return max(0.0, backward.peak_bytes - (1 + MOMENTS) * backward.weight_bytes) / shape.depth


def _stepped(started: Workers, number: int) -> Stepped:
    answer = started.answer(number)
    assert isinstance(answer, Stepped)
    return answer


def _end(started: Workers, number: int, turn: Turn) -> Held:
    started.tell(number, turn)
    answer = started.answer(number)
    assert isinstance(answer, Held)
    return answer


# The numbers of a finished demo, and what may be said about them.


MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Time:
    """Of the timed steps of a loop, beside those of the plain loop that were taken in turn with them.

    Attributes:
        median_seconds: of a step.
        ratio: the plain loop's median by this one's.
        p10: a tenth of the pairs of steps have a lower ratio.
        p90: a tenth have a higher one.
    """

    median_seconds: float
    ratio: float
    p10: float
    p90: float

    @property
    def differs(self) -> bool:
        """Whether more than chance is measured."""
        return not self.p10 <= 1.0 <= self.p90


@dataclass(frozen=True, slots=True)
class LoopSummary:
    """One loop of the first act.

    Attributes:
        line: how it was attached.
        code: the line that was added to the loop.
        peak_bytes: the most bytes of tensors that were alive at once.
        resident_bytes: the most memory that the process had; ``None`` where that is not told.
        difference: from the plain loop, in words; ``None``: there is none.
    """

    line: str
    code: str
    first_loss: float
    last_loss: float
    peak_bytes: int
    resident_bytes: int | None
    time: Time
    difference: str | None
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LargerSummary:
    """The deepest model that fits where the plain loop's did."""

    parameters: int
    depth: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class OneDevice:
    """The first act."""

    parameters: int
    depth: int
    weight_bytes: int
    loops: tuple[LoopSummary, ...]
    larger: LargerSummary | None

    @property
    def plain(self) -> LoopSummary:
        return self.loops[list(Line).index(Line.PLAIN)]

    @property
    def backward(self) -> LoopSummary:
        return self.loops[list(Line).index(Line.BACKWARD)]

    @property
    def differences(self) -> list[str]:
        return [f"{one.line}: {one.difference}" for one in self.loops if one.difference is not None]


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """The second act.

    Attributes:
        ddp_gradient_bytes: the most bytes of gradients that were alive at once, with DDP.
        gradient_bytes: the same, with ``replicate``.
        time: of ``replicate``; the plain loop is DDP's.
        difference: the first tensor that differed, on which rank and after which step; ``None``: none did.
    """

    ranks: int
    backend: str
    parameters: int
    tensors_compared: int
    ddp_gradient_bytes: int
    gradient_bytes: int
    ddp_median_seconds: float
    time: Time
    difference: str | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole demo, as ``--json`` writes it."""

    model: str
    device: str
    steps: int
    warm_up_steps: int
    one_device: OneDevice
    two_ranks: TwoRanks | None

    @property
    def differences(self) -> list[str]:
        """All that were found, each in words."""
        found = self.one_device.differences
        if self.two_ranks is not None and self.two_ranks.difference is not None:
            found.append(self.two_ranks.difference)
        return found


def summarize(
    size: Size,
    depth: int,
    placement: Placement,
    trained: Sequence[Trained],
    larger: Larger | None,
    ranks: Sequence[Finished],
) -> Summary:
    """Put the answers of both acts together. ``ranks`` are in rank order; empty: there was no second act."""
    plain = trained[list(Line).index(Line.PLAIN)]
    return Summary(
        model=size.value,
        device=placement.device,
        steps=len(plain.steps),
        warm_up_steps=WARM_UP_STEPS,
        one_device=OneDevice(
            parameters=plain.held.parameters,
            depth=depth,
            weight_bytes=plain.held.weight_bytes,
            loops=tuple(_loop(one, plain) for one in trained),
            larger=None
            if larger is None
            else LargerSummary(larger.held.parameters, larger.depth, larger.held.peak_bytes),
        ),
        two_ranks=_two_ranks(placement, ranks) if ranks else None,
    )


def verdict(summary: Summary) -> Iterator[str]:
    """What was saved, what it cost, and whether the weights are right: a line each, the gain first."""
    yield from _memory(summary.one_device)
    act, ranks = summary.one_device, summary.two_ranks
    if ranks is not None:
        yield (
            f"{ranks.ranks} ranks: gradients take {_mib(ranks.gradient_bytes)} with instep.replicate and "
            f'schedule="backward", {_mib(ranks.ddp_gradient_bytes)} with DistributedDataParallel.'
        )
    times = _time(act.plain.time.median_seconds, act.backward.time)
    yield f'Time: with schedule="backward" an iteration takes {times}.'
    if ranks is not None:
        yield f"On {ranks.ranks} ranks: {_time(ranks.ddp_median_seconds, ranks.time)}."
    if not summary.differences:
        yield f"Weights: equal bit for bit in every loop, after each of {summary.steps} steps."


def _memory(act: OneDevice) -> Iterator[str]:
    before, after = act.plain.peak_bytes, act.backward.peak_bytes
    saved = before - after
    if saved <= 0:
        yield f"Memory: nothing was saved: {_mib(after)} at the peak, {_mib(before)} in the plain loop."
        return
    resident = ""
    if act.plain.resident_bytes is not None and act.backward.resident_bytes is not None:
        resident = f"; the process, {_mib(act.backward.resident_bytes)} in place of {_mib(act.plain.resident_bytes)}"
    yield (
        f'Memory: schedule="backward" saves {_mib(saved)} of {_mib(act.weight_bytes)} of gradients. Tensors take '
        f"{_mib(after)} at the peak in place of {_mib(before)}, {saved / before:.0%} less{resident}."
    )
    if act.larger is not None:
        yield (
            f"That buys: in the plain loop's {_mib(before)} a model of {act.larger.parameters / 1e6:.1f} M parameters "
            f"trains in place of {act.parameters / 1e6:.1f} M ({act.larger.depth} layers in place of {act.depth}; "
            f"tried: {_mib(act.larger.peak_bytes)})."
        )


def _time(plain_seconds: float, time: Time) -> str:
    noise = None if time.differs else (1 / time.p90, 1 / time.p10)
    changed = change(1 / time.ratio, noise)
    return f"{1e3 * time.median_seconds:.0f} ms in place of {1e3 * plain_seconds:.0f} ms, {changed}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _loop(one: Trained, plain: Trained) -> LoopSummary:
    seconds = tuple(step.seconds for step in one.steps)
    return LoopSummary(
        line=one.line.value,
        code=one.line.code,
        first_loss=one.steps[0].loss,
        last_loss=one.steps[-1].loss,
        peak_bytes=one.held.peak_bytes,
        resident_bytes=one.held.resident_bytes,
        time=_time_of([step.seconds for step in plain.steps], seconds),
        difference=_difference(one, plain),
        losses=tuple(step.loss for step in one.steps),
        step_seconds=seconds,
    )


def _difference(one: Trained, plain: Trained) -> str | None:
    for number, (mine, theirs) in enumerate(zip(one.steps, plain.steps, strict=True), 1):
        if mine.weights != theirs.weights:
            return f"after step {number} weights differ from the plain loop's"
    return None if one.held.state == plain.held.state else "the optimizer's state differs from the plain loop's"


def _two_ranks(placement: Placement, ranks: Sequence[Finished]) -> TwoRanks:
    first = ranks[0]
    differences = [f"rank {rank}, {a.difference}" for rank, a in enumerate(ranks) if a.difference is not None]
    assert placement.backend is not None
    return TwoRanks(
        ranks=placement.ranks,
        backend=placement.backend,
        parameters=first.parameters,
        tensors_compared=first.tensors,
        ddp_gradient_bytes=first.plain_gradient_bytes,
        gradient_bytes=max(one.gradient_bytes for one in ranks),
        ddp_median_seconds=statistics.median(first.plain_seconds[WARM_UP_STEPS:]),
        time=_time_of(first.plain_seconds, first.seconds),
        difference=differences[0] if differences else None,
    )


def _time_of(plain: Sequence[float], other: Sequence[float]) -> Time:
    plain, other = plain[WARM_UP_STEPS:], other[WARM_UP_STEPS:]
    deciles = statistics.quantiles((p / o for p, o in zip(plain, other, strict=True)), n=10, method="inclusive")
    median = statistics.median(other)
    return Time(median, statistics.median(plain) / median, deciles[0], deciles[-1])


# What the demo shows: a header, the falling loss, a table of each act, and the verdict.


LINES = 4
"""Of each act, where the output is no terminal."""


def show_header(console: Console, placement: Placement, text: str) -> None:
    """Which versions run, on which text, and why the demo is not as one would expect."""
    _print(console, f"instep {__version__}, torch {torch.__version__}, on {text}")
    if placement.note is not None:
        _print(console, placement.note)


@contextmanager
def progress(console: Console, act: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A function to call after each step: it moves a bar on a terminal, and else prints a few lines in all."""
    _print(console, act)
    if not console.is_interactive:
        yield lambda step, loss: _line(console, step, steps, loss)
        return
    with Bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), console=console) as bar:
        task = bar.add_task("", total=steps, loss="starting")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"loss {loss:.3f}")


def show_summary(console: Console, summary: Summary) -> None:
    """A table of each act, the differences if there are any, and the verdict."""
    for one in summary.one_device.loops:
        _print(console, f"  {one.line:10} {one.code}")
    console.print(_one_device(summary.one_device))
    if summary.two_ranks is not None:
        console.print(_two_ranks_table(summary.two_ranks))
    for difference in summary.differences:
        console.print(f"NOT EQUAL: {difference}", style="bold red", markup=False, highlight=False)
    for line in verdict(summary):
        _print(console, line)


def show_report(console: Console, path: Path) -> None:
    """Where the report is; as a terminal can open it."""
    _print(console, f"Report: {path.resolve().as_uri()}")


def show_no_report(console: Console, reason: str) -> None:
    _print(console, f"No report: {reason}. --report FILE writes one elsewhere")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _line(console: Console, step: int, steps: int, loss: float) -> None:
    if step in (1, steps) or step % max(1, steps // LINES) == 0:
        _print(console, f"step {step}/{steps}: loss {loss:.3f}")


def _one_device(act: OneDevice) -> Table:
    table = Table(
        f"one device, {act.parameters / 1e6:.1f} M parameters",
        *(one.line for one in act.loops),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_row("loss, first → last", *(f"{one.first_loss:.3f} → {one.last_loss:.3f}" for one in act.loops))
    table.add_row("weights and state", "", *(_equal(one.difference) for one in act.loops[1:]))
    table.add_row("tensors, peak", *(_mebibytes(one.peak_bytes) for one in act.loops))
    if all(one.resident_bytes is not None for one in act.loops):
        table.add_row("process, peak", *(_mebibytes(one.resident_bytes) for one in act.loops))
    table.add_row("iteration, median", *(_milliseconds(one.time.median_seconds) for one in act.loops))
    table.add_row("plain / this (p10–p90)", "", *(_ratio(one.time) for one in act.loops[1:]))
    return table


def _two_ranks_table(act: TwoRanks) -> Table:
    title = f"{act.ranks} ranks over {act.backend}, {act.parameters / 1e6:.1f} M parameters"
    table = Table(title, "DistributedDataParallel", "instep.replicate", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row("weights and state", "", _equal(act.difference))
    table.add_row("gradients, peak", _mebibytes(act.ddp_gradient_bytes), _mebibytes(act.gradient_bytes))
    table.add_row("iteration, median", _milliseconds(act.ddp_median_seconds), _milliseconds(act.time.median_seconds))
    table.add_row("DDP / this (p10–p90)", "", _ratio(act.time))
    return table


def _equal(difference: str | None) -> str:
    return "equal" if difference is None else "[bold red]NOT EQUAL"


def _ratio(time: Time) -> str:
    return f"{time.ratio:.2f} ({time.p10:.2f}–{time.p90:.2f})"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _mebibytes(nbytes: int | None) -> str:
    return "n/a" if nbytes is None else f"{nbytes / MIB:.0f} MiB"


# The demo from its options to its verdict.


REPORT = Path("instep-demo-report.html")


def run(
    size: Size, steps: int, ranks: int | None, text: Path | None, json: Path | None, report: Path | None, quiet: bool
) -> bool:
    """Train, show and write what was found. Whether the weights were equal, bit for bit, in every loop.

    Whatever can be refused is refused before a process is started, with a ``DemoError`` or ``NotWrittenError``.
    Without ``report`` a page is written into the working directory, if that can be written.
    """
    if steps < MIN_STEPS:
        raise DemoError(f"--steps {steps}: at least {MIN_STEPS}, of which the first {WARM_UP_STEPS} are not timed")
    placement = place(ranks)
    content = load_text(text)
    if json is not None:
        require_writable("--json", json)
    no_report = _why_not(report)
    console, quietly = Console(), Console(quiet=quiet)
    show_header(quietly, placement, f"{len(content):,} bytes of {text or 'the text of Python’s help topics'}")
    shape, device = SHAPES[size], placement.device
    with progress(quietly, f"One device: three loops in three processes take {steps} steps, in turn", steps) as tell:
        trained = one_device(shape, device, steps, content, tell)
    deeper = larger(shape, device, trained, content)
    finished = []
    if placement.ranks > 1:
        with progress(quietly, f"{placement.ranks} ranks: two loops take {steps} steps, in turn", steps) as tell:
            finished = two_ranks(SHAPES[SIZE_OF_RANKS], placement, steps, content, tell)
    summary = summarize(size, shape.depth, placement, trained, deeper, finished)
    show_summary(console, summary)
    if json is not None:
        write("--json", json, _numbers(summary))
    if no_report is None:
        write("--report", report or REPORT, page(_acts(summary, trained, finished)))
        show_report(console, report or REPORT)
    else:
        show_no_report(console, no_report)
    return not summary.differences


def _acts(summary: Summary, trained: Sequence[Trained], finished: Sequence[Finished]) -> list[Compared]:
    """For the report. The two acts train models of their own."""
    alone = [one.held.recorded for one in trained if one.line is not Line.DEFAULT]
    act, ranks = summary.one_device, summary.two_ranks
    acts = [Compared([run for run in alone if run is not None], "One device", _weights(summary, act.differences))]
    if ranks is not None:
        found = [] if ranks.difference is None else [ranks.difference]
        acts.append(Compared(finished[0].recorded, f"{ranks.ranks} ranks", _weights(summary, found)))
    return acts


def _weights(summary: Summary, differences: Sequence[str]) -> str:
    return "different" if differences else f"equal, bit for bit, after each of {summary.steps} steps"


def _why_not(report: Path | None) -> str | None:
    """Why the page that nobody has asked for cannot be written; ``None``: it can. Raises for one that was asked for."""
    try:
        require_writable("--report", report or REPORT)
    except NotWrittenError as error:
        if report is not None:
            raise
        return str(error).replace("--report ", "")
    return None


def _numbers(summary: Summary) -> str:
    versions = {"instep_version": __version__, "torch_version": torch.__version__}
    found = {"equal": not summary.differences, "differences": summary.differences}
    return jsonlib.dumps({**versions, **found, **dataclasses.asdict(summary)}, indent=2) + "\n"
