"""What a recording says in numbers: how long things took in an iteration, and how much of it something else hid.

Hidden is the step that ran while gradients were on their way between ranks, or while another thread computed; and the
communication that ran while any thread computed or stepped. A step that runs inside backward, on backward's thread,
is not hidden: backward takes longer by it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instep_tools.report.run import Rank, Run
from instep_tools.report.spans import Interval, Span, busy, exposed, intervals, outside, within

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
class Figures:
    """The seconds of an iteration: the median over the recorded iterations of the first rank; ``by_rank`` of each rank.

    Attributes:
        iteration: the whole iteration. The others do not add up to it: hidden work runs at the same time as other work.
        other: the time in which the loop did nothing of what has a span, bubbles of a pipeline among it.
    """

    iteration: float
    forward: float
    backward: float
    step: WorkTime
    communication: WorkTime
    waiting: float
    other: float
    by_rank: Sequence[float]


def figures(run: Run) -> Figures:
    """Measure a recording by its first rank."""
    rank = run.ranks[0]
    return Figures(
        iteration=_median(rank, _length),
        forward=_median_of(rank, _uninterrupted(rank, "forward")),
        backward=_median_of(rank, _uninterrupted(rank, "backward")),
        step=_work_time(rank, "step"),
        communication=_work_time(rank, "communication"),
        waiting=_median_of(rank, _of(rank, "waiting")),
        # Of the first rank's window without the spans of any thread.
        other=_median(rank, lambda window: exposed([window], intervals(rank.spans))),
        by_rank=[_median(one, _length) for one in run.ranks],
    )


def _length(window: Interval) -> float:
    return window[1] - window[0]


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
    return WorkTime(total=_median_of(rank, intervals(spans)), exposed=_median_of(rank, bare))


def covers(rank: Rank, span: Span) -> list[Interval]:
    """Return the work behind which ``span``, a step or communication, may be hidden."""
    # A step hides behind gradients that are on their way, too; communication behind any step. Neither hides behind
    # itself, and waiting hides nothing.
    if span.kind == "step":
        return _of(rank, "communication") + _uninterrupted(rank, *COMPUTE, thread_is_not=span.thread)
    return _uninterrupted(rank, *COMPUTE) + _of(rank, "step")


def _of(rank: Rank, kind: str) -> list[Interval]:
    return intervals(span for span in rank.spans if span.kind == kind)


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
