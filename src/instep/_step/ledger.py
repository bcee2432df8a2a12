"""What has become of each step: its state, how many there were, and which one does not stand."""

from collections.abc import Sequence

from instep._autograd.engine import graph_task
from instep._ranks.votes import StepVotes
from instep._step.states import Event, Machine, State
from instep._step.torn import Torn
from instep.errors import StepMismatchError


class Ledger:
    """Of one attachment.

    Attributes:
        machine: the state of the running step.
        step_count: how many committed steps wrote anything.
        redo_count: how many steps were rolled back, and left to ``optimizer.step()``.
        skip_count: how many steps were left out, for a gradient that was not finite.
        torn: the step that stands in part, until that is accepted.
        votes: what the ranks say of each step.
    """

    def __init__(self, votes: StepVotes) -> None:
        self.machine = Machine()
        self.step_count = 0
        self.redo_count = 0
        self.skip_count = 0
        self.torn: Torn | None = None
        self.votes = votes

    def happened(self, event: Event) -> None:
        self.machine.happened(event)

    @property
    def redoes(self) -> bool:
        """Whether ``optimizer.step()`` is to do all of the running step."""
        return self.machine.state in (State.REDO, State.REDOING)

    def tear(
        self,
        number: int,
        applied: Sequence[str],
        pending: Sequence[str],
        cause: BaseException | None,
        *,
        accepted: int | None = None,
        in_part: bool = False,
        unsure: Sequence[str] = (),
    ) -> None:
        """Step ``number`` stands in part. See ``Torn``."""
        accepted = number if accepted is None else accepted
        rank, in_part = self.votes.rank(), in_part or bool(unsure)
        self.torn = Torn(number, applied, pending, rank, cause, accepted, in_part, graph_task(), unsure)
        self.happened(Event.TORE)

    def torn_error(self, error: Exception) -> Exception:
        """What to raise of ``error``, which other ranks have found, and has torn the step."""
        return error if self.torn is None or isinstance(error, StepMismatchError) else self.torn.error()

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step stands in part."""
        if self.torn is not None:
            raise self.torn.error()

    def heard(self, *, wait: bool) -> Exception | None:
        """What the ranks have found wrong with the last step; ``None`` also where that is known to stand in part."""
        error = self.votes.heard(wait=wait)
        return error if self.torn is None else None

    def last_complete_step(self, *, is_open: bool) -> int | None:
        """The number of the last step if all of it was applied here, else ``None``.

        Args:
            is_open: whether parameters hold a step that is not committed.
        """
        if self.torn is None:
            return None if is_open else self.step_count
        return None if self.torn.in_part else self.torn.accepted

    def accept(self) -> None:
        """Count the torn step, as far as anything of it was written."""
        assert self.torn is not None
        self.step_count = self.torn.accepted

    def give_up(self) -> None:
        """Forget the running step, or the torn one."""
        self.torn = None
        self.happened(Event.GIVEN_UP)
