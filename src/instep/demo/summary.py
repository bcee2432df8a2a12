"""The numbers of a finished demo, and what may be said about them."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instep.demo.acts import Larger, Trained
from instep.demo.job import WARM_UP_STEPS, Finished, Line, Placement, Size
from instep.report.verdict import change

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
