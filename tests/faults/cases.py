"""What is injected: one fault, in one process, at one named point of one step."""

from dataclasses import dataclass

ALL = -1
"""In place of a rank: every rank has the fault, at the same point."""

STEPS = 5
TIMEOUT = 8.0
"""Seconds after which a collective of these process groups gives up."""
LIMIT = TIMEOUT + 5.0
"""Seconds from a fault within which every surviving rank must have raised, by the clock of ``tests.pace``."""

RAISES = {"raise": "InjectedError", "interrupt": "KeyboardInterrupt", "exit": "SystemExit", "late interrupt": "Alarm"}
"""Kinds that are an exception on the rank itself, and its class."""
LOSES_A_RANK = ("kill", "stop", "hang", "partition")
NONFINITE = ("nan", "inf", "-inf")
DIFFERS = "differs"
"""The kind of fault that is no event: a rank trains in another way."""
KINDS = (*RAISES, *LOSES_A_RANK, *NONFINITE, "error", "save", DIFFERS)

TURNS = 150
"""Into how many moments a step is divided, for interrupts at any time."""

STAGED_SGD = "SGD in stages"
"""The optimizer that has a place between state and parameter where updates wait; elsewhere it is ``"Staged"``."""

POINTS = {
    "forward": "before a block runs",
    "in FSDP's forward": "FSDP2 calls a function of its own while the model's forward runs",
    "model": "at a node of the autograd graph",
    "gradient": "a parameter's own gradient on this rank, before it is reduced",
    "before launch": "a bucket's collective is about to be called",
    "in flight": "a bucket's collective was called, and nobody has waited for it",
    "after completion": "a bucket has arrived, and is about to be written",
    "before write": "a bucket's gradients are being made ready: nothing of it is written yet",
    "before rows": "the rows that this rank has updated are about to be sent to the others (``shard_state``)",
    "rows in flight": "they were sent, and nobody has waited for those of other ranks",
    "in the update": "before an operation of the optimizer's kernel",
    "between state and parameter": "the optimizer has written its state, and not yet the parameter",
    "after write": "a bucket was written",
    "end of backward": "in the engine's callbacks, before backward() returns",
    "before step": "between backward() and optimizer.step()",
    "handing over": "in optimizer.step(), which hands a bucket over to a later forward",
    "in step": "in a step pre-hook of the user's",
    "after step": "between optimizer.step() and the next forward",
    "vote": "in the collective by which ranks agree on a step",
    "attach": "attach() on this rank is given other options than on the others",
    "any time": "so many of the ``TURNS`` parts of a step's length after the step began",
}
"""Every point by name. ``inject.SEAMS`` has how each is reached."""


@dataclass(frozen=True)
class Case:
    """One training run with one fault.

    Attributes:
        source: ``"local"``, ``"ddp"``, ``"zero"`` (DDP with ``shard_state=True``), ``"joined"`` (DDP, after a
            ``join()`` of unequally many iterations), ``"fsdp2"`` or ``"2d"`` (FSDP2 over tensor parallelism, on four
            ranks).
        way: ``"backward"``, ``"forward"``, ``"undo"``, ``"default"``, ``"beside"`` (``"backward"`` with
            ``defer=True``); ``"plain"`` is the loop without instep, ``"torch"`` the
            one with torch's own step in backward.
        point: a name in ``POINTS``; ``""`` for a run without a fault.
        kind: a name in ``KINDS``.
        where: which bucket, node, operation or parameter: how often the point is passed in that step before.
        then: what a rank does after an error: ``"again"`` (catches it, clears gradients, and does the same step once
            more) or ``"leave"`` (lets it end the process).
        nonfinite: the option of ``attach``; ``None``: not given.
        device: ``"cpu"``, or ``"emu"``, the emulated accelerator, on which nothing may be left to chance either.
    """

    source: str = "local"
    way: str = "backward"
    point: str = ""
    kind: str = ""
    where: int = 0
    rank: int = 0
    step: int = 2
    then: str = "again"
    optimizer: str = "AdamW"
    model: str = "Blocks"
    world: int = 1
    nonfinite: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        assert self.point in (*POINTS, ""), self
        assert self.kind in (*KINDS, ""), self

    @property
    def row(self) -> int:
        """The row of the contract that it is a case of; ``docs/checkpoints.md`` has them."""
        if self.kind == "save":
            return 14
        if self.kind == DIFFERS:
            return 15
        if self.kind in NONFINITE:
            return 5
        if self.kind in LOSES_A_RANK:
            return 4
        if self.kind == "error":
            return 3
        if self.point in ("model", "forward", "in FSDP's forward", "before step", "any time") or self.kind != "raise":
            return 2
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those with the fault."""
        return tuple(range(self.world)) if self.rank == ALL else (self.rank,)

    def __str__(self) -> str:
        who = (
            "" if self.world == 1 else f" on {'all ranks' if self.rank == ALL else f'rank {self.rank}'} of {self.world}"
        )
        more = "" if self.nonfinite is None else f", nonfinite={self.nonfinite}"
        more += "" if self.device == "cpu" else f" on {self.device}"
        what = f"{self.source}/{self.way}/{self.model}/{self.optimizer}{more}"
        return f"{what}: {self.kind}, {self.point} {self.where}, step {self.step}{who}, then {self.then}"


ROWS = {
    1: "the update or a callback raises",
    2: "the model raises, Ctrl-C, SystemExit",
    3: "a future has an error",
    4: "a peer is killed, stopped, hangs or is cut off",
    5: "NaN and infinity",
    14: "state_dict of a step that is open or torn",
    15: "a rank is attached in another way",
}
