"""The two acts: one device, where gradients are freed in backward; and two ranks, where no bucket is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from instep.demo.job import (
    WARM_UP_STEPS,
    Alone,
    Finished,
    Held,
    InRank,
    Line,
    Placement,
    Progress,
    Shape,
    Stepped,
    Turn,
)
from instep.demo.launch import Workers, workers

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
