"""What the processes of the demo are asked to do, and what they answer: plain values that cross process borders.

A process gets one ``ProcessJob``. A process with an ``Alone`` is told each ``Turn`` through its pipe; it answers
``Stepped``, and at the end ``AloneResult``. A process with an ``InRank`` takes all steps by itself; it sends
``Progress``, and at the end ``RankResult``. In place of any answer a ``DemoError`` may come.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from instep_tools.report.run import Run


class DemoError(Exception):
    """The demo cannot run. The message is for the user: what was found and what to do, in a line or two.

    The message has a traceback only when a process raised something unforeseen.
    """


WARM_UP_STEPS = 3
"""The first steps, which are not timed: the optimizer makes its state in them, and memory is counted."""
MICRO_BATCHES = 4
"""Into so many each row is cut where the demo accumulates."""
RECORDED_STEPS = 4
"""Steps after all others, which are recorded for the report."""
CONTEXT = 64
"""The bytes in a row of a batch, from which the model predicts the next."""
MIN_STEPS = WARM_UP_STEPS + 2  # quantiles need two timed steps


class Size(str, Enum):
    """The size of the model, as the command line names it."""

    SMALL = "small"
    MEDIUM = "medium"


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a transformer."""

    width: int
    depth: int
    heads: int


# 18 and 38 million parameters.
SHAPES = {Size.SMALL: Shape(width=384, depth=10, heads=6), Size.MEDIUM: Shape(width=512, depth=12, heads=8)}
SIZE_OF_RANKS = Size.SMALL
"""The model of the second act: each rank has two, and all ranks share the machine's cores and memory."""


class Line(Enum):
    """How a loop of the first act is attached."""

    PLAIN = "plain"
    DEFAULT = "default"
    BACKWARD = "backward"

    @property
    def code(self) -> str:
        """The line of code that was added to the loop."""
        # As a user would write it: with double quotes.
        given = "".join(f", {name}={value!r}" for name, value in (self.options or {}).items())
        return (
            "no line of instep's"
            if self.options is None
            else f"instep.attach(model, optimizer{given})".replace("'", '"')
        )

    @property
    def options(self) -> dict[str, Any] | None:
        """The options of ``attach``; ``None``: the loop is not attached."""
        return {Line.PLAIN: None, Line.DEFAULT: {}, Line.BACKWARD: {"schedule": "backward"}}[self]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the demo runs.

    Attributes:
        device: ``"cpu"`` for all processes, or ``"cuda"`` for one GPU for each rank.
        ranks: how many ranks the second act has; 1: there is no second act.
        note: why this is not what one would expect, if it is not.
    """

    device: str
    ranks: int
    note: str | None = None

    @property
    def backend(self) -> str | None:
        """The backend that the ranks communicate over; ``None`` for one rank alone."""
        if self.ranks == 1:
            return None
        return "nccl" if self.device == "cuda" else "gloo"


@dataclass(frozen=True, slots=True)
class Alone:
    """One loop on one device, in a process of its own, which takes a step whenever it is told to."""

    shape: Shape
    line: Line
    device: str
    micro_batches: int = 1  # into which each row is cut

    @property
    def name(self) -> str:
        return f"the loop {self.line.value!r}"


@dataclass(frozen=True, slots=True)
class InRank:
    """One rank of the second act: two loops side by side, one with DDP and one with ``replicate``."""

    shape: Shape
    steps: int
    placement: Placement
    rank: int

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


ProcessJob = Alone | InRank


class Turn(Enum):
    """What a loop that trains alone is told to do."""

    STEP = "take a step"
    RECORD = "record a few steps, and end"
    END = "end"


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of a loop that trains alone.

    Attributes:
        loss: the loss before the step.
        seconds: from the forward to the scheduler.
        weights: a fingerprint of all weights after the step.
    """

    loss: float
    seconds: float
    weights: str


@dataclass(frozen=True, slots=True)
class AloneResult:
    """What a loop that trained alone says at its end.

    Attributes:
        parameters: how many numbers the model has.
        weight_bytes: the size of all weights, which is that of all gradients.
        peak_bytes: the most bytes of tensors that were alive at once.
        resident_bytes: the most memory that the process had, by the operating system; ``None`` where that is not known.
        state: a fingerprint of weights and optimizer state.
        recorded: the recording of a few steps, if the loop was told to record.
    """

    parameters: int
    weight_bytes: int
    peak_bytes: int
    resident_bytes: int | None
    state: str
    recorded: Run | None


@dataclass(frozen=True, slots=True)
class Progress:
    """The loops of the second act have taken ``step`` steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank of the second act says at its end.

    Attributes:
        parameters: how many numbers the model has.
        tensors: how many tensors were compared after every step.
        difference: the first difference, with the step and the tensor's name; ``None`` if there was none.
        plain_gradient_bytes: the most bytes of gradients that were alive at once, with DDP.
        gradient_bytes: the same, with ``replicate``.
        plain_seconds: the seconds of each step with DDP.
        seconds: the seconds of each step with ``replicate``, taken in turn with DDP's.
        recorded: the recordings of both loops, on rank 0; empty on the others.
    """

    parameters: int
    tensors: int
    difference: str | None
    plain_gradient_bytes: int
    gradient_bytes: int
    plain_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    recorded: tuple[Run, ...]


Answer = Stepped | AloneResult | Progress | RankResult
