"""What a recording says, in numbers, beside others of the same job."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from instep.report.run import Job, Rank, Run
from instep.report.spans import Interval, Span, busy, exposed, intervals, outside, title, within

# What a recording says, in numbers: how long things took in an iteration, and how much of it something else hid.
#
# Hidden is the step that ran while gradients were on their way between ranks, or while another thread computed; and the
# communication that ran while any thread computed or stepped. A step that runs inside backward, on its thread,
# is not hidden: backward takes longer by it.


COMPUTE = ("forward", "backward")


@dataclass(frozen=True)
class Part:
    """Seconds in an iteration, the median over those recorded, of rank 0 unless said."""

    total: float
    exposed: float

    @property
    def hidden(self) -> float:
        return max(0.0, self.total - self.exposed)


@dataclass(frozen=True)
class BucketFigures:
    """Attributes:
    nbytes: of its gradients.
    step: seconds of an iteration, the mean over those recorded.
    hidden: how many of these something hid.
    flight: seconds from when its gradients were handed over for communication to when they had come back; ``None``
        where nobody saw it.
    """

    name: str
    parameters: Sequence[str]
    nbytes: int
    step: float
    hidden: float
    flight: float | None


@dataclass(frozen=True)
class Figures:
    """Seconds of an iteration: the median over those recorded, of the first rank; ``by_rank`` of all.

    Attributes:
        iteration: all of it. Nothing else adds up to it: what is hidden runs at the same time as something else.
        other: in which the loop did none of these.
    """

    iteration: float
    forward: float
    backward: float
    step: Part
    communication: Part
    waiting: float
    other: float
    by_rank: Sequence[float]
    buckets: Sequence[BucketFigures]


def figures(run: Run) -> Figures:
    rank = run.ranks[0]
    return Figures(
        iteration=_median(rank, lambda window: window[1] - window[0]),
        forward=_median(rank, lambda window: busy(within(_alone(rank, "forward"), window))),
        backward=_median(rank, lambda window: busy(within(_alone(rank, "backward"), window))),
        step=_part(rank, "step"),
        communication=_part(rank, "communication"),
        waiting=_median(rank, lambda window: busy(within(_of(rank, "waiting"), window))),
        other=_median(rank, lambda window: exposed([window], intervals(rank.spans))),
        by_rank=[_median(one, lambda window: window[1] - window[0]) for one in run.ranks],
        buckets=_buckets(run),
    )


def _median(rank: Rank, seconds: Callable[[Interval], float]) -> float:
    return statistics.median(seconds((start, end)) for start, end in rank.iterations)


def _of(rank: Rank, *kinds: str) -> list[Interval]:
    return intervals(span for span in rank.spans if span.kind in kinds)


def _alone(rank: Rank, *kinds: str, thread_is_not: int | None = None) -> list[Interval]:
    """The work of these kinds itself: without what else its thread did or waited for meanwhile."""
    found: list[Interval] = []
    for thread in {span.thread for span in rank.spans if span.kind in kinds} - {thread_is_not}:
        work = intervals(span for span in rank.spans if span.thread == thread and span.kind in kinds)
        found += outside(work, interruptions(rank, thread))
    return found


def interruptions(rank: Rank, thread: int) -> list[Interval]:
    """When a thread waited, or stepped, in the middle of something else."""
    return intervals(span for span in rank.spans if span.thread == thread and span.kind in ("step", "waiting"))


def covers(rank: Rank, span: Span) -> list[Interval]:
    """What a step, or communication, of this thread may be hidden behind."""
    if span.kind == "step":
        return _of(rank, "communication") + _alone(rank, *COMPUTE, thread_is_not=span.thread)
    return _alone(rank, *COMPUTE) + _of(rank, "step")


def _part(rank: Rank, kind: str) -> Part:
    spans = [span for span in rank.spans if span.kind == kind]
    bare: list[Interval] = []
    for thread in {span.thread for span in spans}:
        here = [span for span in spans if span.thread == thread]
        bare += outside(intervals(here), covers(rank, here[0]))
    return Part(
        total=_median(rank, lambda window: busy(within(intervals(spans), window))),
        exposed=_median(rank, lambda window: busy(within(bare, window))),
    )


def _buckets(run: Run) -> list[BucketFigures]:
    """As the plan has them. Several that were stepped together share the time by their bytes."""
    rank, iterations, sizes = run.ranks[0], len(run.ranks[0].iterations), run.setup.gradients
    number_of = {name: number for number, names in enumerate(run.setup.buckets) for name in names}
    steps, hidden, flights = (dict.fromkeys(range(len(run.setup.buckets)), 0.0) for _ in range(3))
    for span in rank.spans:
        whole = sum(sizes.get(name, 0) for name in span.parameters) or 1
        if span.kind == "step":
            bare = exposed([(span.start, span.end)], covers(rank, span))
            for name in span.parameters:
                if name in number_of:
                    share = sizes.get(name, 0) / whole / iterations
                    steps[number_of[name]] += share * (span.end - span.start)
                    hidden[number_of[name]] += share * (span.end - span.start - bare)
        elif span.kind == "flight" and span.parameters and span.parameters[0] in number_of:
            flights[number_of[span.parameters[0]]] += (span.end - span.start) / iterations
    return [
        BucketFigures(title(names), names, sum(sizes.get(n, 0) for n in names), steps[i], hidden[i], flights[i] or None)
        for i, names in enumerate(run.setup.buckets)
    ]


# Recordings of one job may be compared, and no others: a smaller model has a lower peak, whatever instep does.


@dataclass(frozen=True)
class Compared:
    """Recordings of one job, beside each other.

    Attributes:
        name: what this job is to the reader; empty where there is nothing to say.
        weights: what whoever made the recordings has found of their weights, in words; ``None``: they are compared by
            the digests that were recorded.
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
        """The job in words."""
        job = self.job
        ranks = "one rank" if job.ranks == 1 else f"{job.ranks} ranks"
        batch = f", given {' and '.join(job.batch)}" if job.batch else ""
        said = f"{job.model}, {numbers(job.count)} of {' and '.join(job.dtypes)}, {ranks}, {job.device}{batch}"
        return f"{self.name}: {said}" if self.name else said


def by_job(runs: Sequence[Run]) -> list[Compared]:
    """In the order of the first recording of each job."""
    found: dict[Job, list[Run]] = {}
    for run in runs:
        found.setdefault(run.job, []).append(run)
    return [Compared(same) for same in found.values()]


def numbers(count: int) -> str:
    """How many parameters, counted by element."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit} parameters"
    return f"{count} parameters"
