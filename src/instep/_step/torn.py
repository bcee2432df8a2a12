"""What is remembered of a step that does not stand on every parameter, or not on every rank, until it is accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

from instep.errors import TornStepError


@dataclass(frozen=True, slots=True)
class Torn:
    """
    Attributes:
        step: its number, counted from 1.
        applied: names of the parameters that were updated.
        cause: what stopped it, without the frames it was raised in: these refer to the model, which this outlives.
        pending: names of those that were to be, and were not.
        accepted: how many steps were taken, once it is accepted.
        in_part: whether this rank may have neither the weights of before nor those of after the step.
        unsure: names of the parameters of which nobody knows whether they were updated.
        task: the backward in which it tore, as ``graph_task`` names it; ``None``: outside.
    """

    step: int
    applied: Sequence[str]
    pending: Sequence[str]
    rank: int
    cause: BaseException | None
    accepted: int
    in_part: bool = False
    task: int | None = None
    unsure: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", without_frames(self.cause))

    def error(self) -> TornStepError:
        """A new one each time: whoever catches an error adds frames to it."""
        return TornStepError(self.step, self.applied, self.pending, self.rank, self.cause, self.unsure)


def without_frames(error: BaseException | None) -> BaseException | None:
    """The same error, without those it was raised in."""
    if error is None:
        return None
    # No constructor runs: its arguments need not be those of the error.
    copied = type(error).__new__(type(error), *error.args)
    vars(copied).update(vars(error))
    return copied
