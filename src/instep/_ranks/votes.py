"""What ranks tell each other about a step: a small vote, of which all of them hear the same outcome."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from instep.errors import InstepError, StepMismatchError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks said together.

    Attributes:
        failed_on: the first rank on which the step failed, ``None`` if it did on none.
        nonfinite_on: the first rank with a gradient that is not finite, ``None`` if all are.
        first: the lowest number of the step that a rank named.
        last: the highest.
        same: whether all ranks train the same model in the same way.
    """

    failed_on: int | None
    nonfinite_on: int | None
    first: int
    last: int
    same: bool

    def error(self) -> InstepError | None:
        """What is wrong, if anything is. That a gradient is not finite is not."""
        if self.failed_on is not None:
            return InstepError(f"rank {self.failed_on} said that this step failed there: its own error says why")
        if self.first != self.last:
            return StepMismatchError(
                f"ranks are at different steps, from {self.first} to {self.last}: some of them have left a step out, "
                "or taken one more. Every rank must call optimizer.step() equally often. Load a checkpoint on all "
                "ranks, or call overlap.resync_from(rank) on all"
            )
        if not self.same:
            return StepMismatchError(
                "ranks have attached different models, or in different ways: names, shapes and dtypes of parameters, "
                "schedule, clip, undo, nonfinite and accumulation_steps must be the same on all ranks"
            )
        return None


class Vote(Protocol):
    """One that was cast, and may still be under way."""

    def done(self) -> bool:
        """Whether ``verdict`` would not wait."""

    def verdict(self) -> Verdict:
        """Wait for all ranks. Safe to call twice, and from several threads.

        Raises what the communication raised.
        """


class Voting(Protocol):
    """The ranks that step together. Every rank casts its votes in the same order."""

    def open(self) -> None:
        """Make ready. All ranks must call this; it is called once for each backward, and costs nothing later."""

    def cast(self, step: int, *, failed: bool = False, nonfinite: bool = False) -> Vote | None:
        """Say how ``step`` went here, without waiting. ``None`` where nobody is asked."""


class StepVotes:
    """The ranks that step together, as one of them sees it.

    Every backward that communicates is followed by one vote of every rank, so that the votes of all of them stay in
    the same order whatever happens: by that on the step, or by that on its failure, or, on a rank that takes no step,
    by one at the next such backward. Where each rank updates a part of the parameters for all, there is one more, on
    these updates; who fails in them casts no other.

    Attributes:
        voting: how they vote; ``None``: there is only one.
        count: how many this rank has cast.
        communicates: whether the running backward is one that all ranks run, and not ``autograd.grad`` of one of them.
    """

    def __init__(self, rank: Callable[[], int]) -> None:
        self.rank = rank
        self.voting: Voting | None = None
        self.count = 0
        self.communicates: Callable[[], bool] = lambda: True
        self._vote: Vote | None = None
        self._owes = False

    def begin_backward(self, step: int) -> None:
        """A backward begins, ``step`` steps having been taken here."""
        if self.voting is not None and self.communicates():
            self.voting.open()
            if self._owes:
                self.committed(step)
            self._owes = True

    def say(self, step: int, *, nonfinite: bool = False) -> Vote | None:
        """This rank stands behind ``step``, so far."""
        self._owes = False
        if self.voting is None:
            return None
        self.count += 1
        return self.voting.cast(step, nonfinite=nonfinite)

    def updated(self, step: int, *, failed: bool) -> Vote | None:
        """This rank has updated its parts of the parameters, or has ``failed`` to: a vote beside that on the step."""
        self._owes = self._owes and not failed
        if self.voting is None:
            return None
        self.count += 1
        return self.voting.cast(step, failed=failed)

    def committed(self, step: int) -> None:
        """This rank has taken ``step``. What the others say is heard later."""
        self._vote = self.say(step)

    def say_failed(self, step: int) -> None:
        """``step`` failed here. What the others say of it does not matter any more."""
        self._vote = None
        self._owes = False
        if self.voting is not None:
            self.count += 1
            with suppress(Exception):  # of what may have failed it: the communication
                self.voting.cast(step, failed=True)

    def forget(self) -> None:
        """All ranks start anew from one of them: what was said of the last step does not matter any more."""
        self._vote = None
        self._owes = False

    def heard(self, *, wait: bool) -> Exception | None:
        """What is wrong with the last step, as the ranks have said; each outcome is returned once.

        Args:
            wait: until all have; else only if they already have.
        """
        vote = self._vote
        if vote is None or not (wait or vote.done()):
            return None
        self._vote = None
        return error_of(vote)


def error_of(vote: Vote) -> Exception | None:
    """What the ranks found wrong, or what kept this one from hearing it. Waits for all ranks."""
    try:
        return vote.verdict().error()
    except Exception as lost:
        return lost
