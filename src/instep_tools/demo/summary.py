"""The numbers of a finished demo, what may be said about them, and how they are shown.

``summarize`` puts the answers of both acts together in a ``Summary``, which ``--json`` writes as it is.
``show_summary`` prints a table of each act and the ``conclusion``: what was saved, what it cost, and whether the
weights are right.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from instep_tools.demo.job import MICRO_BATCHES, WARM_UP_STEPS, AloneResult, Line, Placement, RankResult, Size, Stepped
from instep_tools.report.figures import change
from instep_tools.report.memory import MIB


@dataclass(frozen=True, slots=True)
class TrainedLoop:
    """The answers of one loop of the first act, from its first step to its result."""

    line: Line
    steps: tuple[Stepped, ...]
    result: AloneResult


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a loop's steps, beside those of the plain loop that were taken in turn with them.

    Attributes:
        median_seconds: the median of a step.
        ratio: the plain loop's median, divided by this loop's.
        p10: a tenth of the pairs of steps have a lower ratio.
        p90: a tenth of the pairs have a higher ratio.
    """

    median_seconds: float
    ratio: float
    p10: float
    p90: float

    @property
    def differs(self) -> bool:
        """Whether the ratio is more than chance."""
        # Then nine pairs of ten agree on which loop is faster.
        return not self.p10 <= 1.0 <= self.p90


@dataclass(frozen=True, slots=True)
class LoopSummary:
    """One loop of the first act.

    Attributes:
        line: how the loop was attached.
        code: the line of code that was added to the loop.
        peak_bytes: the most bytes of tensors that were alive at once.
        resident_bytes: the most memory that the process had; ``None`` where that is not known.
        difference: how weights or state differ from the plain loop's, in words; ``None``: they do not.
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
    """The deepest model that trains, with the step in backward, in the memory of the plain loop's model."""

    parameters: int
    depth: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class AccumulationSummary:
    """The loop with several micro-batches in a step: plain, and by ``overlap.micro_batches()``.

    Attributes:
        plain_peak_bytes: the most bytes of tensors that were alive at once in the plain loop.
        peak_bytes: the same, by ``overlap.micro_batches()``.
        difference: how weights or state differ from the plain loop's, in words; ``None``: they do not.
    """

    micro_batches: int
    plain_peak_bytes: int
    peak_bytes: int
    difference: str | None


@dataclass(frozen=True, slots=True)
class OneDevice:
    """The first act."""

    parameters: int
    depth: int
    weight_bytes: int
    loops: tuple[LoopSummary, ...]
    larger: LargerSummary | None
    accumulation: AccumulationSummary

    @property
    def plain(self) -> LoopSummary:
        return self.loops[list(Line).index(Line.PLAIN)]  # ``loops`` are in the order of ``Line``

    @property
    def backward(self) -> LoopSummary:
        return self.loops[list(Line).index(Line.BACKWARD)]

    @property
    def differences(self) -> list[str]:
        found = [f"{one.line}: {one.difference}" for one in self.loops if one.difference is not None]
        if self.accumulation.difference is not None:
            found.append(f"micro_batches(): {self.accumulation.difference}")
        return found


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """The second act.

    Attributes:
        ddp_gradient_bytes: the most bytes of gradients that were alive at once, with DDP.
        gradient_bytes: the same, with ``replicate``.
        time: the time of ``replicate``, beside DDP's.
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
        """All differences that were found, each in words."""
        found = self.one_device.differences
        if self.two_ranks is not None and self.two_ranks.difference is not None:
            found.append(self.two_ranks.difference)
        return found


def summarize(
    size: Size,
    depth: int,
    placement: Placement,
    trained: Sequence[TrainedLoop],
    larger: LargerSummary | None,
    accumulated: Sequence[TrainedLoop],
    ranks: Sequence[RankResult],
) -> Summary:
    """Put the answers of both acts together.

    Args:
        accumulated: the plain loop with several micro-batches in a step, and that by ``overlap.micro_batches()``.
        ranks: in rank order; empty: there was no second act.
    """
    plain = trained[list(Line).index(Line.PLAIN)]
    return Summary(
        model=size.value,
        device=placement.device,
        steps=len(plain.steps),
        warm_up_steps=WARM_UP_STEPS,
        one_device=OneDevice(
            parameters=plain.result.parameters,
            depth=depth,
            weight_bytes=plain.result.weight_bytes,
            loops=tuple(_loop(one, plain) for one in trained),
            larger=larger,
            accumulation=_accumulation(*accumulated),
        ),
        two_ranks=_two_ranks(placement, ranks) if ranks else None,
    )


def _loop(one: TrainedLoop, plain: TrainedLoop) -> LoopSummary:
    seconds = tuple(step.seconds for step in one.steps)
    return LoopSummary(
        line=one.line.value,
        code=one.line.code,
        first_loss=one.steps[0].loss,
        last_loss=one.steps[-1].loss,
        peak_bytes=one.result.peak_bytes,
        resident_bytes=one.result.resident_bytes,
        time=_time_of([step.seconds for step in plain.steps], seconds),
        difference=_difference(one, plain),
        losses=tuple(step.loss for step in one.steps),
        step_seconds=seconds,
    )


def _accumulation(plain: TrainedLoop, freed: TrainedLoop) -> AccumulationSummary:
    return AccumulationSummary(
        MICRO_BATCHES, plain.result.peak_bytes, freed.result.peak_bytes, _difference(freed, plain)
    )


def _difference(one: TrainedLoop, plain: TrainedLoop) -> str | None:
    # Weights are compared after each step; the state once, at the end: only a wrong last step is in the state alone.
    for number, (mine, theirs) in enumerate(zip(one.steps, plain.steps, strict=True), 1):
        if mine.weights != theirs.weights:
            return f"after step {number} weights differ from the plain loop's"
    return None if one.result.state == plain.result.state else "the optimizer's state differs from the plain loop's"


def _two_ranks(placement: Placement, ranks: Sequence[RankResult]) -> TwoRanks:
    first = ranks[0]
    differences = [f"rank {rank}, {a.difference}" for rank, a in enumerate(ranks) if a.difference is not None]
    assert placement.backend is not None
    return TwoRanks(
        ranks=placement.ranks,
        backend=placement.backend,
        parameters=first.parameters,
        tensors_compared=first.tensors,
        ddp_gradient_bytes=first.plain_gradient_bytes,
        # The same on each rank, but for when a bucket arrives: the most of any rank counts.
        gradient_bytes=max(one.gradient_bytes for one in ranks),
        ddp_median_seconds=statistics.median(first.plain_seconds[WARM_UP_STEPS:]),
        time=_time_of(first.plain_seconds, first.seconds),
        difference=differences[0] if differences else None,
    )


def _time_of(plain: Sequence[float], other: Sequence[float]) -> Time:
    # Ratios of steps that were taken in turn: what slows the machine down for a while slows both of a pair.
    plain, other = plain[WARM_UP_STEPS:], other[WARM_UP_STEPS:]
    deciles = statistics.quantiles((p / o for p, o in zip(plain, other, strict=True)), n=10, method="inclusive")
    median = statistics.median(other)
    return Time(median, statistics.median(plain) / median, deciles[0], deciles[-1])


def show_summary(console: Console, summary: Summary) -> None:
    """Print a table of each act, the differences if there are any, and the conclusion."""
    for one in summary.one_device.loops:
        print_line(console, f"  {one.line:10} {one.code}")
    console.print(_one_device(summary.one_device))
    if summary.two_ranks is not None:
        console.print(_two_ranks_table(summary.two_ranks))
    for difference in summary.differences:
        console.print(f"NOT EQUAL: {difference}", style="bold red", markup=False, highlight=False)
    for line in conclusion(summary):
        print_line(console, line)


def _one_device(act: OneDevice) -> Table:
    table = Table(
        f"one device, {act.parameters / 1e6:.1f} M parameters",
        *(one.line for one in act.loops),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_row("loss, first → last", *(f"{one.first_loss:.3f} → {one.last_loss:.3f}" for one in act.loops))
    table.add_row("weights and state", "", *(_equal(one.difference) for one in act.loops[1:]))
    table.add_row("tensors, peak", *(_mib(one.peak_bytes) for one in act.loops))
    resident = [one.resident_bytes for one in act.loops if one.resident_bytes is not None]
    if resident:  # of all processes, or, where the operating system does not say, of none
        table.add_row("process, peak", *map(_mib, resident))
    table.add_row("iteration, median", *(_milliseconds(one.time.median_seconds) for one in act.loops))
    table.add_row("plain / this (p10–p90)", "", *(_ratio(one.time) for one in act.loops[1:]))
    return table


def _two_ranks_table(act: TwoRanks) -> Table:
    title = f"{act.ranks} ranks over {act.backend}, {act.parameters / 1e6:.1f} M parameters"
    table = Table(title, "DistributedDataParallel", "instep.replicate", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row("weights and state", "", _equal(act.difference))
    table.add_row("gradients, peak", _mib(act.ddp_gradient_bytes), _mib(act.gradient_bytes))
    table.add_row("iteration, median", _milliseconds(act.ddp_median_seconds), _milliseconds(act.time.median_seconds))
    table.add_row("DDP / this (p10–p90)", "", _ratio(act.time))
    return table


def _equal(difference: str | None) -> str:
    return "equal" if difference is None else "[bold red]NOT EQUAL"


def _ratio(time: Time) -> str:
    return f"{time.ratio:.2f} ({time.p10:.2f}–{time.p90:.2f})"


def conclusion(summary: Summary) -> Iterator[str]:
    """Yield a line on each: what was saved, what it cost, and whether the weights are right."""
    yield from _memory_saved(summary.one_device)
    yield _accumulated(summary.one_device)
    act, ranks = summary.one_device, summary.two_ranks
    if ranks is not None:
        yield (
            f"{ranks.ranks} ranks: gradients take {_mib(ranks.gradient_bytes)} with instep.replicate and "
            f'schedule="backward", {_mib(ranks.ddp_gradient_bytes)} with DistributedDataParallel.'
        )
    times = _time_taken(act.plain.time.median_seconds, act.backward.time)
    yield f'Time: with schedule="backward" an iteration takes {times}.'
    if ranks is not None:
        yield f"On {ranks.ranks} ranks: {_time_taken(ranks.ddp_median_seconds, ranks.time)}."
    # Otherwise the differences have been printed, and nothing is claimed.
    if not summary.differences:
        yield f"Weights: equal bit for bit in every loop, after each of {summary.steps} steps."


def _memory_saved(act: OneDevice) -> Iterator[str]:
    before, after = act.plain.peak_bytes, act.backward.peak_bytes
    saved = before - after
    # As a tiny model may have it, whose gradients are not what sets the peak.
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


def _accumulated(act: OneDevice) -> str:
    found = act.accumulation
    return (
        f"Accumulation: with {found.micro_batches} micro-batches a step, tensors take {_mib(found.peak_bytes)} at the "
        f"peak by overlap.micro_batches(), in place of {_mib(found.plain_peak_bytes)}."
    )


def _time_taken(plain_seconds: float, time: Time) -> str:
    # The ratio is the plain loop's by this one's; what is said is how this one's time changed.
    noise = None if time.differs else (1 / time.p90, 1 / time.p10)
    changed = change(1 / time.ratio, noise)
    return f"{1e3 * time.median_seconds:.0f} ms in place of {1e3 * plain_seconds:.0f} ms, {changed}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def print_line(console: Console, line: str) -> None:
    """Print a line in which brackets are no markup."""
    console.print(line, markup=False, highlight=False)
