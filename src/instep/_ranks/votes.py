"""What ranks tell each other about a step: a small vote, of which all of them hear the same outcome.

``StepVotes`` is what a step sees of its ranks. The ranks themselves (``StepRanks``) are behind the protocols
``Meeting`` and ``Voting``, so that the step knows nothing of how they communicate.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from instep.errors import InstepError, StepMismatchError


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a vote: what all ranks said together.

    Attributes:
        failed_on: the first rank on which the step failed, ``None`` if it did on none.
        nonfinite_on: the first rank with a gradient that is not finite, ``None`` if all are. Of the vote on a commit:
            the first rank that has found the step to be one that must be taken whole.
        first: the lowest number of the step that a rank named.
        last: the highest.
        same: whether all ranks said it of the same attachment.
    """

    failed_on: int | None
    nonfinite_on: int | None
    first: int
    last: int
    same: bool

    def error(self) -> InstepError | None:
        """What is wrong with the step; ``None``: nothing. A gradient that is not finite is no error here."""
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
                "ranks are at steps of different attachments: some of them have left out a backward of one model, or "
                "run one more. Load a checkpoint on all ranks, and attach again on all of them"
            )
        return None


class Vote(Protocol):
    """A vote that was cast, and may still be under way."""

    def done(self) -> bool:
        """Whether ``verdict`` would not wait."""

    def verdict(self) -> Verdict:
        """Wait for all ranks. Safe to call twice, and from several threads.

        Raises what the communication raised.
        """


class Meeting(Protocol):
    """The ranks that step together, before their first step.

    Attributes:
        has_told: whether this rank has told the others what it trains.
        has_met: whether this rank has been in a backward with them.
        mismatch: what is not the same on all ranks, in words; ``None``: nothing, as far as is known.
    """

    has_told: bool
    has_met: bool
    mismatch: str | None

    def tell(self) -> None:
        """The first forward begins: tell the others what this rank trains, and in which way."""

    def hear_soon(self) -> None:
        """Wait a little for the others to tell the same."""

    def meet(self) -> None:
        """The first backward begins that communicates."""

    def look(self) -> None:
        """See what the others have told by now."""

    def step_begins(self) -> None:
        """``optimizer.step()`` is called: ``look``, now and then."""

    def require_same(self) -> None:
        """Raise ``StepMismatchError`` if the ranks train in different ways, as far as is known."""


class Voting(Protocol):
    """The ranks that step together. Every rank casts its votes in the same order."""

    def open(self) -> None:
        """Make ready. All ranks must call this; it is called once for each backward, and costs nothing later."""

    def cast(self, step: int, *, failed: bool = False, nonfinite: bool = False) -> Vote | None:
        """Say how ``step`` went here, without waiting. ``None`` where nobody is asked."""

    def abstain(self) -> Vote:
        """Take part in a vote of the others, on a step that this rank has no part in."""


class StepVotes:
    """The ranks that step together, as one of them sees it.

    Each rank casts exactly one vote for each backward that communicates, so that the votes of all ranks stay in the
    same order whatever happens: on the commit of the step; or on its failure; or, where it takes no step, when the next
    such backward begins. With ``shard_state``, where each rank updates a part of the parameters for all, there is a
    second one, on the updates. A rank whose update has failed casts no other.

    Attributes:
        rank: the number of this rank.
        ranks: those that take the steps together; ``None``: there is only one.
        voting: the same, where they vote; ``None``: nobody is asked.
        count: how many votes this rank has cast.
        objected_on: the first rank that has found the last step to be one that must be taken whole; ``None``: none.
        asks_first: with ``undo`` and ``nonfinite``, whether ranks first vote on whether all gradients are finite, and
            then again on the commit.
        communicates: whether the running backward is one that all ranks run, and not ``autograd.grad`` of one of them.
        stand_aside: has gradients reduced as torch does without instep, and left in ``.grad``: ranks that train in
            different ways could not answer each other otherwise.
    """

    def __init__(self, rank: Callable[[], int]) -> None:
        self.rank = rank
        self.ranks: Meeting | None = None
        self.voting: Voting | None = None
        self.count = 0
        self.objected_on: int | None = None
        self.asks_first = False
        self.communicates: Callable[[], bool] = lambda: True
        self.stand_aside: Callable[[], None] = lambda: None
        self._vote: Vote | None = None  # on the last step, whose outcome was not asked for yet
        self._owes = False  # whether a backward that communicates was not followed by this rank's vote yet
        self._reduces = False  # whether a backward of the running step reduces gradients, and ranks may differ
        self._before = 0  # steps that were taken here before join() ended: other ranks may have taken more

    def begin_forward(self) -> None:
        """A forward begins from which a backward may begin.

        Raises ``StepMismatchError`` if ranks differ and have reduced gradients in this step: others may be in
        ``optimizer.step()``, where they raise, while this rank would reduce once more.
        """
        ranks = self.ranks
        if ranks is None:
            return
        if not ranks.has_told:
            ranks.tell()
        if self._reduces:
            ranks.look()
            if ranks.mismatch is not None:
                self._reduces = False
                ranks.require_same()

    def differ(self) -> bool:
        """Whether the ranks train in different ways. Waits a little for them to say."""
        if self.ranks is None:
            return False
        self.ranks.hear_soon()
        return self.mismatch is not None

    @property
    def mismatch(self) -> str | None:
        """What is not the same on all ranks; ``None``: nothing, as far as is known."""
        return None if self.ranks is None else self.ranks.mismatch

    def begin_backward(self, step: int) -> None:
        """A backward begins, ``step`` steps having been taken here."""
        ranks = self.ranks
        if ranks is None:
            return
        asks_nobody = self.voting is None and ranks.has_met and ranks.mismatch is None
        if asks_nobody or not self.communicates():
            return
        self._meet(ranks)
        self._reduces = True
        if self.voting is not None:
            # For the backward before this one, which no step has followed here: votes stay in order on all ranks.
            if self._owes:
                self.committed(step)
            self._owes = True

    def _meet(self, ranks: Meeting) -> None:
        if not ranks.has_met:
            ranks.meet()
            if ranks.mismatch is not None:
                # The other ranks run this backward, too. All of them raise in optimizer.step(), behind it.
                self.voting = None
                self.stand_aside()
        if self.voting is not None:
            self.voting.open()

    def require_same(self) -> None:
        """``optimizer.step()`` is called: raise ``StepMismatchError`` if the ranks train in different ways. Not before
        they have been in a backward together: some may be behind."""
        if self.ranks is not None and self.ranks.has_met:
            self._reduces = False
            self.ranks.step_begins()
            self.ranks.require_same()

    def say(self, step: int, *, nonfinite: bool = False) -> Vote | None:
        """This rank stands behind ``step``, so far."""
        self._owes = False
        if self.ranks is not None and not self.ranks.has_met:
            self._meet(self.ranks)  # nobody has seen the first backward begin
        if self.voting is None:
            return None
        self.count += 1
        return self.voting.cast(step - self._before, nonfinite=nonfinite)

    def updated(self, step: int, *, failed: bool) -> Vote | None:
        """This rank has updated its parts of the parameters, or has ``failed`` to: a vote beside that on the step."""
        self._owes = self._owes and not failed  # who fails in these updates casts no vote on the step
        if self.voting is None:
            return None
        self.count += 1
        return self.voting.cast(step - self._before, failed=failed)

    def committed(self, step: int, *, objects: bool = False) -> None:
        """This rank has taken ``step``. What the others say is heard later.

        Args:
            objects: it has found that such steps must be taken whole: no rank is to take them in parts any more.
        """
        self._vote = self.say(step, nonfinite=objects)

    def say_failed(self, step: int) -> None:
        """``step`` failed here. What the others say of it does not matter any more."""
        self._vote = None
        self._owes = False
        if self.voting is not None:
            self.count += 1
            with suppress(Exception):  # of what may have failed it: the communication
                self.voting.cast(step - self._before, failed=True)

    @property
    def owes(self) -> bool:
        """Whether a backward that communicates was not followed by this rank's vote yet."""
        return self._owes

    def cast_owed(self, step: int) -> None:
        """The others are about to be waited for, and may wait for this rank's vote on a backward that no step has
        followed here: they hear that ``step`` steps were taken, which are too few if they have stepped."""
        if self._owes:
            self.committed(step)

    def heard(self, *, wait: bool) -> Exception | None:
        """What is wrong with the last step, as the ranks have said; each outcome is returned once.

        Args:
            wait: until all have; else only if they already have.
        """
        vote = self._vote
        if vote is None or not (wait or vote.done()):
            return None
        self._vote = None
        error = error_of(vote)
        self.objected_on = None if error is not None else vote.verdict().nonfinite_on
        return error

    def forget(self) -> None:
        """All ranks start anew from one of them: what was said of the last step does not matter any more."""
        self._vote = None
        self._owes = False
        self._before = 0

    # In DDP's join(), once this rank has no data left.

    def is_about_to_abstain(self) -> None:
        """The others may be about to begin a backward, and this rank has never been in one: meet them. Waits."""
        if self.ranks is not None:
            self._meet(self.ranks)

    def abstain(self, step: int) -> None:
        """The others have run a backward, and will vote on it. ``step`` steps were taken here. Waits for them if they
        ask first: of a step that they leave out, or that has failed, there is no second vote."""
        self.require_same()
        if self.voting is None:
            return
        if self._owes:  # of this rank's own last backward, which was before
            self.committed(step)
        self.count += 1
        vote = self.voting.abstain()
        if self.asks_first:
            verdict = vote.verdict()
            if verdict.nonfinite_on is not None or verdict.error() is not None:
                return
            self.count += 1
            vote = self.voting.abstain()
        self._vote = vote

    def joined(self, step: int) -> None:
        """``join()`` is over on all ranks, which have taken unequally many steps: from now on as many."""
        self._before = step


def error_of(vote: Vote) -> Exception | None:
    """What the ranks found wrong, or what kept this one from hearing it. Waits for all ranks."""
    try:
        return vote.verdict().error()
    except Exception as lost:
        return lost
