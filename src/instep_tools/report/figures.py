"""What a recording says in numbers: how long things took in an iteration, and how much of it something else hid.

``figures`` measures one recording; ``by_job`` puts the recordings of one job beside each other (``Compared``). The
functions at the end say such numbers, and how they changed, in words.

Hidden is the step that ran while gradients were on their way between ranks, or while another thread computed; and the
communication that ran while any thread computed or stepped. A step that runs inside backward, on backward's thread,
is not hidden: backward takes longer by it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from instep_tools.report.memory import MIB
from instep_tools.report.run import Job, Rank, Run
from instep_tools.report.spans import (
    Interval,
    Span,
    busy,
    exposed,
    exposed_of_each,
    intervals,
    outside,
    title,
    within,
)

COMPUTE = ("forward", "backward")
"""The kinds of spans in which a thread computes."""


@dataclass(frozen=True)
class WorkTime:
    """The seconds that one kind of work took in an iteration, and the part of them that nothing hid.

    Both are medians over the recorded iterations of the first rank.
    """

    total: float
    exposed: float

    @property
    def hidden(self) -> float:
        return max(0.0, self.total - self.exposed)


@dataclass(frozen=True)
class BucketFigures:
    """One bucket of the plan: its size, and the seconds of an iteration that it took.

    Attributes:
        nbytes: the bytes of its gradients.
        step: seconds of its step, the mean over the recorded iterations.
        hidden: how many of these seconds something hid.
        flight: seconds from when its gradients were handed over for communication to when they had come back; ``None``
            where no communication of the bucket was seen.
    """

    name: str
    parameters: Sequence[str]
    nbytes: int
    step: float
    hidden: float
    flight: float | None


@dataclass(frozen=True)
class PipelineFigures:
    """The seconds of an iteration in a pipeline, of each rank: the medians over its recorded iterations.

    Attributes:
        bubbles: inside ``schedule.step()``, in which no stage of the rank computed, nor was stepped.
        step_inside: of the step, inside ``schedule.step()``: in what the plain loop has as bubbles.
        step_after: the rest of the step.
    """

    bubbles: Sequence[float]
    step_inside: Sequence[float]
    step_after: Sequence[float]


@dataclass(frozen=True)
class Figures:
    """The seconds of an iteration: the median over the recorded iterations of the first rank; ``by_rank`` of each rank.

    Attributes:
        iteration: the whole iteration. The others do not add up to it: hidden work runs at the same time as other work.
        other: the time in which the loop did nothing of what has a span.
        pipeline: ``None`` where there is no pipeline.
    """

    iteration: float
    forward: float
    backward: float
    step: WorkTime
    communication: WorkTime
    waiting: float
    other: float
    by_rank: Sequence[float]
    buckets: Sequence[BucketFigures]
    pipeline: PipelineFigures | None = None


def figures(run: Run) -> Figures:
    """Measure a recording by its first rank."""
    rank = run.ranks[0]
    return Figures(
        iteration=_median(rank, lambda window: window[1] - window[0]),
        forward=_median(rank, lambda window: busy(within(_uninterrupted(rank, "forward"), window))),
        backward=_median(rank, lambda window: busy(within(_uninterrupted(rank, "backward"), window))),
        step=_work_time(rank, "step"),
        communication=_work_time(rank, "communication"),
        waiting=_median(rank, lambda window: busy(within(_of(rank, "waiting"), window))),
        # Of the first rank's window without the spans of any thread.
        other=_median(rank, lambda window: exposed([window], intervals(rank.spans))),
        by_rank=[_median(one, lambda window: window[1] - window[0]) for one in run.ranks],
        buckets=_buckets(run),
        pipeline=_pipeline(run.ranks) if any(one.stages for one in run.ranks) else None,
    )


def _pipeline(ranks: Sequence[Rank]) -> PipelineFigures:
    after = [outside(_of(rank, "step"), rank.runs) for rank in ranks]
    inside = [outside(_of(rank, "step"), parts) for rank, parts in zip(ranks, after, strict=True)]
    return PipelineFigures(
        bubbles=[_median_of(rank, _of(rank, "bubble")) for rank in ranks],
        step_inside=[_median_of(rank, parts) for rank, parts in zip(ranks, inside, strict=True)],
        step_after=[_median_of(rank, parts) for rank, parts in zip(ranks, after, strict=True)],
    )


def _median_of(rank: Rank, parts: Sequence[Interval]) -> float:
    return _median(rank, lambda window: busy(within(parts, window)))


def _median(rank: Rank, seconds: Callable[[Interval], float]) -> float:
    return statistics.median(seconds((start, end)) for start, end in _counted(rank))


def _counted(rank: Rank) -> Sequence[Interval]:
    """Return the iterations without the first where steps are put off: that one has no step, and each other has that of
    the one before it."""
    begins = [span.start for span in rank.spans if span.kind == "step"]
    if any(start <= begin < end for begin in begins for start, end in rank.iterations[:1]):
        return rank.iterations
    later = rank.iterations[1:]
    return later if any(start <= begin < end for begin in begins for start, end in later) else rank.iterations


def _work_time(rank: Rank, kind: str) -> WorkTime:
    spans = [span for span in rank.spans if span.kind == kind]
    bare: list[Interval] = []
    # Thread by thread: a step may hide behind what other threads compute, and not behind its own thread's backward.
    for thread in {span.thread for span in spans}:
        here = [span for span in spans if span.thread == thread]
        bare += outside(intervals(here), covers(rank, here[0]))
    return WorkTime(
        total=_median(rank, lambda window: busy(within(intervals(spans), window))),
        exposed=_median(rank, lambda window: busy(within(bare, window))),
    )


def covers(rank: Rank, span: Span) -> list[Interval]:
    """Return the work behind which ``span``, a step or communication, may be hidden."""
    # A step hides behind gradients that are on their way, too; communication behind any step. Neither hides behind
    # itself, and waiting hides nothing.
    if span.kind == "step":
        return _of(rank, "communication") + _uninterrupted(rank, *COMPUTE, thread_is_not=span.thread)
    return _uninterrupted(rank, *COMPUTE) + _of(rank, "step")


def backwards_in_an_iteration(run: Run) -> int:
    """Return how many there are on the first rank: the median."""
    begins = [span.start for span in run.ranks[0].spans if span.kind == "backward"]
    return round(_median(run.ranks[0], lambda window: sum(window[0] <= begin < window[1] for begin in begins)))


def _of(rank: Rank, *kinds: str) -> list[Interval]:
    return intervals(span for span in rank.spans if span.kind in kinds)


def _uninterrupted(rank: Rank, *kinds: str, thread_is_not: int | None = None) -> list[Interval]:
    """Return when threads did work of these kinds, without the steps and the waiting inside of it."""
    found: list[Interval] = []
    for thread in {span.thread for span in rank.spans if span.kind in kinds} - {thread_is_not}:
        work = intervals(span for span in rank.spans if span.thread == thread and span.kind in kinds)
        found += outside(work, interruptions(rank, thread))
    return found


def interruptions(rank: Rank, thread: int) -> list[Interval]:
    """Return when a thread waited, or stepped, in the middle of other work."""
    return intervals(span for span in rank.spans if span.thread == thread and span.kind in ("step", "waiting"))


def _buckets(run: Run) -> list[BucketFigures]:
    """Return the figures of each bucket of the plan."""
    rank, iterations, sizes = run.ranks[0], len(_counted(run.ranks[0])), run.setup.gradients
    number_of = {name: number for number, names in enumerate(run.setup.buckets) for name in names}
    steps, hidden, flights = (dict.fromkeys(range(len(run.setup.buckets)), 0.0) for _ in range(3))
    bare: dict[Span, float] = {}
    for thread in {span.thread for span in rank.spans if span.kind == "step"}:
        here = [span for span in rank.spans if span.kind == "step" and span.thread == thread]
        bare |= zip(here, exposed_of_each(intervals(here), covers(rank, here[0])), strict=True)
    for span in rank.spans:
        # Buckets that were stepped together share the time of that step by their bytes.
        whole = sum(sizes.get(name, 0) for name in span.parameters) or 1
        if span.kind == "step":
            for name in span.parameters:
                if name in number_of:
                    share = sizes.get(name, 0) / whole / iterations
                    steps[number_of[name]] += share * (span.end - span.start)
                    hidden[number_of[name]] += share * (span.end - span.start - bare[span])
        elif span.kind == "flight" and span.parameters and span.parameters[0] in number_of:
            flights[number_of[span.parameters[0]]] += (span.end - span.start) / iterations
    return [
        BucketFigures(title(names), names, sum(sizes.get(n, 0) for n in names), steps[i], hidden[i], flights[i] or None)
        for i, names in enumerate(run.setup.buckets)
    ]


@dataclass(frozen=True)
class Compared:
    """Recordings of one job, beside each other. Others are never compared: a smaller model has a lower peak, whatever
    instep does.

    Attributes:
        name: what this job is to the reader; empty where there is nothing to say.
        weights: how the weights of the loops compare, in words, if the caller has compared them; ``None``: they are
            compared by the digests that were recorded.
    """

    runs: Sequence[Run]
    name: str = ""
    weights: str | None = None

    @cached_property
    def figures(self) -> list[Figures]:
        return [figures(run) for run in self.runs]

    @property
    def job(self) -> Job:
        return self.runs[0].job

    @property
    def title(self) -> str:
        """The job, in words."""
        job = self.job
        ranks = "one rank" if job.ranks == 1 else f"{job.ranks} ranks"
        batch = f", given {' and '.join(job.batch)}" if job.batch else ""
        said = (
            f"{job.model}, {parameters_in_words(job.count)} of {' and '.join(job.dtypes)}, {ranks}, {job.device}{batch}"
        )
        return f"{self.name}: {said}" if self.name else said


def by_job(runs: Sequence[Run]) -> list[Compared]:
    """Group recordings by job, in the order of the first recording of each job."""
    found: dict[Job, list[Run]] = {}
    for run in runs:
        found.setdefault(run.job, []).append(run)
    return [Compared(same) for same in found.values()]


def ms(seconds: float) -> str:
    """Return a duration in words."""
    return f"{1e3 * seconds:.1f} ms"


def by_rank(seconds: Sequence[float]) -> str:
    """Return a duration of each rank in words, where there are many of them the least and the most."""
    if len(seconds) > 4:
        return f"{ms(min(seconds))} to {ms(max(seconds))}"
    return ", ".join(map(ms, seconds))


def mib(nbytes: float) -> str:
    """Return a size in words."""
    return f"{nbytes / MIB:.1f} MiB"


def parameters_in_words(count: int) -> str:
    """Return how many parameters there are, counted by element, in words."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit} parameters"
    return f"{count} parameters"


def duration_change(runs: Sequence[Run], found: Sequence[Figures]) -> str:
    """Return how the last recording's iteration differs from the first one's, in words; empty for one recording.

    Where the two ranges of durations overlap, the difference may be chance: then the range of the ratio is said, too.
    """
    if len(runs) == 1:
        return ""
    first, last = (sorted(end - start for start, end in run.ranks[0].iterations) for run in (runs[0], runs[-1]))
    ratio = found[-1].iteration / found[0].iteration
    # The least and the most that the ratio of two iterations can be.
    low, high = last[0] / first[-1], last[-1] / first[0]
    return change(ratio, None if low > 1 or high < 1 else (low, high))


def change(ratio: float, noise: tuple[float, float] | None) -> str:
    """Return how a duration changed, in words.

    Args:
        ratio: the duration, divided by what it was before.
        noise: the range of that ratio, if 1 lies in it.
    """
    changed = f"{abs(1 - ratio):.0%} {'shorter' if ratio < 1 else 'longer'}"
    # Rounded: a change of less than half a per cent is none.
    if changed.startswith("0%"):
        changed = "as long"
    return changed if noise is None else f"{changed} here; too noisy to tell ({noise[0]:.2f} to {noise[1]:.2f})"


def bytes_change(values: Sequence[int]) -> str:
    """Return how the last size differs from the first, in words; empty for one size, and where the first is 0."""
    if len(values) == 1 or values[0] == 0:
        return ""
    difference = values[-1] - values[0]
    if abs(difference) < 0.01 * values[0]:
        return "the same"
    return f"{mib(abs(difference))} {'less' if difference < 0 else 'more'}"
