"""Why a demo stops early."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from instep.report.run import Run


class DemoError(Exception):
    """The demo cannot run. The message is for the user: what was found and what to do, in a line or two.

    It has a traceback only when a rank raised something unforeseen.
    """


# What the processes of the demo are asked to do, and what they answer: plain values that cross process borders.


WARM_UP_STEPS = 3
"""Steps that are not timed: the optimizer makes its state in them, and memory is counted."""

RECORDED_STEPS = 4
"""Steps after the others, for the report."""

MIN_STEPS = WARM_UP_STEPS + 2


class Size(str, Enum):
    """Which model is trained."""

    SMALL = "small"
    MEDIUM = "medium"


@dataclass(frozen=True, slots=True)
class Shape:
    """Width and depth of a transformer."""

    width: int
    depth: int
    heads: int


SHAPES = {Size.SMALL: Shape(width=384, depth=10, heads=6), Size.MEDIUM: Shape(width=512, depth=12, heads=8)}
SIZE_OF_RANKS = Size.SMALL
"""Of the second act's model: each rank has two, and all ranks share the machine's cores and memory."""


class Line(Enum):
    """How a loop is attached."""

    PLAIN = "plain"
    DEFAULT = "default"
    BACKWARD = "backward"

    @property
    def code(self) -> str:
        """The line that was added to the loop."""
        given = "".join(f", {name}={value!r}" for name, value in (self.options or {}).items())
        return (
            "no line of instep's"
            if self.options is None
            else f"instep.attach(model, optimizer{given})".replace("'", '"')
        )

    @property
    def options(self) -> dict[str, Any] | None:
        """Those of ``attach``; ``None``: the loop is not attached."""
        return {Line.PLAIN: None, Line.DEFAULT: {}, Line.BACKWARD: {"schedule": "backward"}}[self]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the demo runs.

    Attributes:
        device: ``"cpu"`` for all processes, or ``"cuda"`` for one GPU for each rank.
        ranks: of the second act; 1: there is none.
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
class Alone:
    """One loop on one device, in a process of its own. It takes a step whenever it is told to."""

    shape: Shape
    line: Line
    device: str

    @property
    def name(self) -> str:
        return f"the loop {self.line.value!r}"


@dataclass(frozen=True, slots=True)
class InRank:
    """One rank of the second act: two loops side by side, DDP's and that of ``replicate``."""

    shape: Shape
    steps: int
    placement: Placement
    rank: int

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


Job = Alone | InRank


class Turn(Enum):
    """What a loop that trains alone is told."""

    STEP = "take a step"
    RECORD = "record a few steps, and end"
    END = "end"


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of a loop that trains alone.

    Attributes:
        loss: before the step.
        seconds: from the forward to the scheduler.
        weights: a fingerprint of all weights after it.
    """

    loss: float
    seconds: float
    weights: str


@dataclass(frozen=True, slots=True)
class Held:
    """A loop that trained alone has ended.

    Attributes:
        parameters: how many numbers the model has.
        weight_bytes: the size of all weights, which is that of all gradients.
        peak_bytes: the most bytes of tensors that were alive at once.
        resident_bytes: the most memory that the process had, by the operating system; ``None`` where that is not told.
        state: a fingerprint of the optimizer's state.
        recorded: for the report.
    """

    parameters: int
    weight_bytes: int
    peak_bytes: int
    resident_bytes: int | None
    state: str
    recorded: Run | None


@dataclass(frozen=True, slots=True)
class Progress:
    """The second act's loops have taken ``step`` steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A rank of the second act has taken all steps.

    Attributes:
        parameters: how many numbers the model has.
        weight_bytes: the size of all weights.
        tensors: how many tensors were compared after every step.
        difference: the first difference, with the step and the tensor's name; ``None`` if there was none.
        plain_gradient_bytes: the most bytes of gradients that were alive at once, with DDP.
        gradient_bytes: the same, with ``replicate``.
        plain_seconds: of each step, in turn with
        seconds: those of ``replicate``.
        recorded: rank 0 alone: both loops.
    """

    parameters: int
    weight_bytes: int
    tensors: int
    difference: str | None
    plain_gradient_bytes: int
    gradient_bytes: int
    plain_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    recorded: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A process cannot go on. ``message`` is for the user."""

    message: str


Answer = Stepped | Held | Progress | Finished
