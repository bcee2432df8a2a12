"""``schedule="forward"``: what becomes of a step that was handed over, here and on the other ranks."""

from collections.abc import Sequence

import torch

from instep._optim.parameters import AttachedParameters
from instep._ranks.votes import StepVotes, Vote, error_of
from instep._step.torn import without_frames
from instep._step.writes import Gathered
from instep.errors import InstepError


class Outcome:
    """What has become of a step that was handed over.

    Attributes:
        pending: names of the parameters that it is to update.
        applied: names of those that it has updated.
        begun: names of those that it has begun to update.
        failure: what stopped it.
        refused: whether that are the other ranks.
        lost: whether a communication with them has failed: none is waited for any more.
        told: whether the loop has heard of it.
    """

    def __init__(self, parameters: AttachedParameters) -> None:
        self.pending = parameters.names
        self.applied: list[str] = []
        self.begun: dict[str, None] = {}
        self.failure: BaseException | None = None
        self.refused = False
        self.lost = False
        self.told = False

    @property
    def is_whole(self) -> bool:
        return len(self.applied) == len(self.pending) and self.failure is None

    def fails(self, error: BaseException) -> None:
        """The first error counts."""
        self.failure = self.failure or error

    def loses(self, error: BaseException) -> None:
        """A communication with the other ranks has failed."""
        self.fails(error)
        self.lost = True

    def hears(self, error: Exception) -> None:
        """The ranks have found ``error``; or this one could not hear what they have found."""
        self.fails(error)
        self.refused, self.lost = True, not isinstance(error, InstepError)

    @property
    def in_doubt(self) -> list[str]:
        """Names of the parameters of which nobody knows whether they were updated."""
        return [name for name in self.begun if name not in self.applied]

    @property
    def untouched(self) -> list[str]:
        return [name for name in self.pending if name not in self.begun]

    def is_in_doubt(self, names: Sequence[str], error: BaseException) -> None:
        """These were updated, and nobody knows what they hold now."""
        self.fails(error)
        self.applied = [name for name in self.applied if name not in names]

    def is_over(self) -> None:
        """Nobody raises the error any more. The frames that it was raised in refer to the buckets, and these to it."""
        self.failure = without_frames(self.failure)


Outcomes = dict[tuple[int, bool], Outcome]
"""By the stepper's id, and whether the parameters were put off: an optimizer may put off some, and step others."""


class Ranks:
    """What they say of one optimizer's step.

    Args:
        vote: whether all of them take it; ``None``: there is one rank.

    Attributes:
        know: whether the others were told how the updates of this rank's shards went.
    """

    def __init__(self, number: int, vote: Vote | None, outcome: Outcome) -> None:
        self.know = False
        self._number = number
        self._vote = vote
        self._on_updates: Vote | None = None
        self._outcome = outcome

    def hear(self) -> None:
        """Wait until all ranks stand behind this step, before anything of it is written."""
        vote, self._vote = self._vote, None
        if vote is not None and (error := error_of(vote)) is not None:
            self._outcome.hears(error)

    def tell_of_updates(self, votes: StepVotes) -> None:
        """All shards that this rank updates were updated and sent, or that has failed: tell the others, once. Nobody
        does who has lost them: each wait for them would take as long as the process group's timeout."""
        if self.know or self._outcome.lost:
            return
        try:
            self.know = True
            self._on_updates = votes.updated(self._number, failed=self._outcome.failure is not None)
        except BaseException as error:
            self._outcome.loses(error)
            if not isinstance(error, Exception):
                raise

    def hear_of_updates(self) -> None:
        """Wait until all ranks have updated their shards, before those of others are written here: of a rank that could
        not, what arrives is no part of the step, and parameters would hold parts of two steps."""
        vote, self._on_updates = self._on_updates, None
        if vote is not None and self._outcome.failure is None and (error := error_of(vote)) is not None:
            self._outcome.hears(error)


class Shards:
    """Of the parameters of one bucket, which this rank updates whole, or a part of each.

    Attributes:
        whole: names of those of which no other rank updates a part.
        updated_here: names of those of which this rank updates something.
        gathered: the parts that other ranks update, on their way; ``None``: none are waited for.
    """

    def __init__(self, parameters: AttachedParameters) -> None:
        self.whole: Sequence[str] = parameters.names
        self.updated_here: Sequence[str] = parameters.names
        self.gathered: Gathered | None = None
        self._shared: Sequence[str] = ()
        if not parameters.are_plain:
            shards = [(a.spec.name, a.shard) for a in parameters]
            self.updated_here = [name for name, shard in shards if shard is None or not shard.is_empty]
            self._shared = [name for name, shard in shards if shard is not None and shard.is_shared]
            self.whole = [name for name in self.whole if name not in self._shared]

    def receive(self, ranks: Ranks, outcome: Outcome) -> None:
        """Write the parts that other ranks have updated: all of this bucket, or nothing. Of a step that has failed on
        any rank, or of which a communication was lost, nothing is waited for."""
        gathered, self.gathered = self.gathered, None
        ranks.hear_of_updates()
        if gathered is None or outcome.failure is not None:
            return
        try:
            gathered.wait()
        except BaseException as error:
            outcome.loses(error)
            return
        try:
            outcome.begun.update(dict.fromkeys(self._shared))
            with torch._C.DisableTorchFunctionSubclass():
                gathered.write()
            outcome.applied += self._shared
        except BaseException as error:
            outcome.fails(error)
