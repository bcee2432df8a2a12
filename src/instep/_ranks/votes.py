"""What a step sees of its ranks, if there are others: when this one votes, and when it hears what they have said."""

from collections.abc import Callable
from contextlib import suppress

from instep._ranks.step_ranks import StepRanks
from instep._ranks.vote import Vote, error_of
from instep.errors import StepMismatchError


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
        follows_writes: whether ranks vote on steps that they have taken, and not on those that they are about to take.
        furthest: then, the highest number of a step that a rank has taken, where they have taken unequally many.
        asks_first: with ``undo`` and ``nonfinite``, whether ranks first vote on whether all gradients are finite, and
            then again on the commit.
        communicates: whether the running backward is one that all ranks run, and not ``autograd.grad`` of one of them.
        stand_aside: has gradients reduced as torch does without instep, and left in ``.grad``: ranks that train in
            different ways could not answer each other otherwise.
        owes: whether a backward that communicates was not followed by this rank's vote yet.
    """

    def __init__(self, rank: Callable[[], int], ranks: StepRanks | None, voting: StepRanks | None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.voting = voting
        self.count = 0
        self.objected_on: int | None = None
        self.asks_first = False
        self.follows_writes = False
        self.furthest = 0
        self.communicates: Callable[[], bool] = lambda: True
        self.stand_aside: Callable[[], None] = lambda: None
        self._vote: Vote | None = None  # on the last step, whose outcome was not asked for yet
        self.owes = False
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
        self.meet()
        self._reduces = True
        if self.voting is not None:
            # For the backward before this one, which no step has followed here: votes stay in order on all ranks.
            if self.owes:
                self.committed(step)
            self.owes = True

    def meet(self) -> None:
        """A backward begins, here or on the others. Waits for the others before the first one."""
        ranks = self.ranks
        if ranks is not None and not ranks.has_met:
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
        self.owes = False
        if self.ranks is not None and not self.ranks.has_met:
            self.meet()  # nobody has seen the first backward begin
        return None if self.voting is None else self._cast(self.voting, step, nonfinite=nonfinite)

    def updated(self, step: int, *, failed: bool) -> Vote | None:
        """This rank has updated its parts of the parameters, or has ``failed`` to: a vote beside that on the step."""
        self.owes = self.owes and not failed  # who fails in these updates casts no vote on the step
        return None if self.voting is None else self._cast(self.voting, step, failed=failed)

    def _cast(self, voting: StepRanks, step: int, **outcome: bool) -> Vote:
        self.count += 1
        return voting.cast(step - self._before, **outcome)

    def committed(self, step: int, *, objects: bool = False) -> None:
        """This rank has taken ``step``. What the others say is heard later.

        Args:
            objects: it has found that such steps must be taken whole: no rank is to take them in parts any more.
        """
        self._vote = self.say(step, nonfinite=objects)

    def say_failed(self, step: int) -> None:
        """``step`` failed here. What the others say of it does not matter any more."""
        self._vote = None
        self.owes = False
        if self.voting is not None:
            with suppress(Exception):  # of what may have failed it: the communication
                self._cast(self.voting, step, failed=True)

    def cast_owed(self, step: int) -> None:
        """The others are about to be waited for, and may wait for this rank's vote on a backward that no step has
        followed here: they hear that ``step`` steps were taken, which are too few if they have stepped."""
        if self.owes:
            self.committed(step)

    def heard(self, *, wait: bool) -> Exception | None:
        """What is wrong with the last step, as the ranks have said; each outcome is returned once. ``wait`` until all
        have; else only if they already have."""
        vote = self._vote
        if vote is None or not (wait or vote.done()):
            return None
        self._vote = None
        error = error_of(vote)
        if self.follows_writes and isinstance(error, StepMismatchError):
            self.furthest = vote.verdict().last + self._before
        self.objected_on = None if error is not None else vote.verdict().nonfinite_on
        return error

    def start_anew(self) -> None:
        """All ranks start anew from one of them: what was said of the last step does not matter any more."""
        self._vote = None
        self.owes = False
        self._before = 0

    # In DDP's join(), once this rank has no data left.

    def abstain(self, step: int) -> None:
        """The others have run a backward, and will vote on it. ``step`` steps were taken here. Waits for them if they
        ask first: of a step that they leave out, or that has failed, there is no second vote."""
        self.require_same()
        if self.voting is None:
            return
        if self.owes:  # of this rank's own last backward, which was before
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
