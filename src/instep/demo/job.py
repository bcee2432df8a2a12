"""What the ranks are asked to do, and what they answer: plain values that cross process borders."""

from dataclasses import dataclass
from enum import Enum

from instep.report.run import Run

WARM_UP_STEPS = 3
"""Steps that are not timed: the optimizer makes its state in them, and DDP its buckets."""

RECORDED_STEPS = 4
"""Steps after the others, for the report."""

MIN_STEPS = WARM_UP_STEPS + 2


class Size(str, Enum):
    """Which model is trained."""

    SMALL = "small"
    MEDIUM = "medium"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks run.

    Attributes:
        device: ``"cpu"`` for all of them, or ``"cuda"`` for one GPU each.
        note: why this is not what one would expect, if so.
    """

    device: str
    ranks: int
    note: str | None = None

    @property
    def backend(self) -> str | None:
        """What the ranks communicate over; ``None`` for one rank alone."""
        if self.ranks == 1:
            return None
        return "nccl" if self.device == "cuda" else "gloo"


@dataclass(frozen=True, slots=True)
class Job:
    """The training that every rank does."""

    size: Size
    steps: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One step of one loop, as one rank saw it.

    Attributes:
        loss: of this rank's batch, before the step.
        seconds: from the forward to the scheduler.
        optimizer_seconds: in which optimizer code ran.
        exposed_seconds: the part of these in which no gradient was on its way between ranks.
    """

    loss: float
    seconds: float
    optimizer_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """One loop from the first step to the last. ``peak_gradient_bytes`` is the most that was alive in ``.grad``."""

    steps: tuple[LoopStep, ...]
    peak_gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Both loops have done ``step`` steps."""

    step: int
    plain_loss: float
    attached_loss: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A rank has done all steps.

    Attributes:
        parameters: how many numbers the model has.
        gradient_bytes: the size of all its gradients.
        tensors: how many tensors were compared after every step.
        buckets: how many buckets instep stepped.
        difference: the first difference, with the step and the tensor's name; ``None`` if there was none.
        recorded: rank 0 alone: the plain loop, and the attached one.
    """

    parameters: int
    gradient_bytes: int
    tensors: int
    buckets: int
    difference: str | None
    plain: LoopRecord
    attached: LoopRecord
    recorded: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank cannot go on. ``message`` is for the user."""

    message: str
