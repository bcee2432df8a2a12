"""The first row of a page: the five figures that say what instep has changed, with a word on each."""

from collections.abc import Sequence
from dataclasses import dataclass

from instep.report.figures import Figures
from instep.report.jobs import Compared
from instep.report.memory import BUCKETS, GRADIENTS
from instep.report.run import Run
from instep.report.table import mib, ms


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
