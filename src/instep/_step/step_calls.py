"""The calls of ``optimizer.step()``, with ``schedule="backward"``: each completes the step for its optimizer, and the
last one commits it."""

from instep._optim.stepper import Stepper
from instep._step.checking import Check
from instep._step.running_step import RunningStep
from instep._step.spent_uses import never_cleared
from instep._step.states import Event
from instep._step.writes import Writes
from instep.errors import InstepError


class StepCalls:
    """Of one attachment. See ``Round`` for what is kept of a call."""

    def __init__(self, step: RunningStep, writes: Writes) -> None:
        self._step = step
        self._writes = writes

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        step = self._step
        step.backwards.let_go()
        self.end_commit()
        if step.round.stepper is not None and step.ledger.torn is None and not step.round.is_ending:
            self._writes.step_stopped(step.round.stepper)
        step.ledger.require_whole()

    def end_stopped(self) -> None:
        """An error or Ctrl-C may have ended ``optimizer.step()`` before its gradients were back."""
        if self._step.round.was_stopped and not self._step.round.is_ending:
            self.require_whole()

    def begin(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self._step.backwards.let_go()
        if self._step.round.is_under_way:
            self.require_whole()  # another call of step(), which has raised
        stepper.called()

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        """``optimizer.step()`` is about to do otherwise than backward has done: ``error`` says how."""
        if self._step.members.applied_by(stepper) and self._step.ledger.torn is None:
            try:
                self._writes.leave_to_optimizer(error)
            finally:
                del error  # or it would refer to itself, by way of this frame

    def before_update(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update what backward left. Spent gradients are taken off the parameters."""
        step = self._step
        if step.round.stepper is stepper:
            return  # a closure that is called more than once
        step.accumulation.require_reduced()
        self._writes.hear(wait=True)  # for a backward that nobody has seen to begin
        self.require_whole()
        step.require_keys(stepper)
        self._writes.finish_rollback()
        left = step.members.left_by(stepper)
        for attached in left:
            if attached.spent is not None and attached.get().grad is attached.spent:
                raise never_cleared(attached.spec.name, f"{stepper.name}.step()")
        if not step.round.owing:
            step.count_gradients(stepper, self._writes.real_gradient)
        self._writes.before_step(stepper, left)
        step.keep_draws(stepper)

    def returned(self, stepper: Stepper) -> None:
        """``optimizer.step()`` returned. The step is committed when every optimizer with gradients has stepped."""
        round_ = self._step.round
        if round_.stepper is stepper and not round_.has_returned_unnoted:
            self._writes.require_at_rest(stepper)
            round_.has_returned(stepper, self._step.ledger)
        self.end_commit()

    def end_commit(self) -> None:
        """Commit. Who is interrupted in it (Ctrl-C) does it again, at the next use: the step stands."""
        self._step.round.end(self._commit)

    def _commit(self, stepper: Stepper, step_count: int, skip_count: int) -> None:
        step = self._step
        round_, ledger = step.round, step.ledger
        round_.stepper = None
        stepper.commit()
        round_.show()
        round_.restore_settings()
        applied = step.members.applied_by(stepper)
        if step.check is not None and applied:
            self._require_checked(step.check, stepper)
        # The plain loop still has its gradients here, until the user clears them.
        self._writes.committed(stepper, applied)
        step.accumulation.stepped()
        step.passes.clipping.stepped(stepper)
        round_.owing.discard(stepper)
        if not step.has_gradients or round_.owing:
            ledger.happened(Event.STEP_RETURNS if round_.owing else Event.STEP_IN_VAIN)
            round_.is_noted()
            return
        ledger.happened(Event.COMMITTED)
        if round_.takes_step is False:
            ledger.skip_count = skip_count
            self._writes.forget()
            return
        ledger.step_count = step_count
        step.times.step_returns()
        step.times.committed()
        if step.check is not None:
            step.check.stepped()
        self._writes.forget()
        try:
            ledger.votes.committed(step_count)
        except Exception as error:
            self._writes.tear_last(error)
            raise

    def _require_checked(self, check: Check, stepper: Stepper) -> None:
        """Raise, and tear the step, if it differs from a plain one."""
        members = self._step.members
        error = check.error(stepper, self._step.number, members.of(stepper))
        try:
            if error is not None:
                self._step.round.is_noted()
                members.applied.update(a.spec.index for a in members.of(stepper) if a.spec.index in members.offered)
                self._writes.tear(error)
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame
