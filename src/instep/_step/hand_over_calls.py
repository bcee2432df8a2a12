"""The calls of ``optimizer.step()``, with ``schedule="forward"``: each hands buckets over, and the last one commits the
step."""

import torch

from instep._autograd.watch import GET_GRAD, SET_GRAD
from instep._optim.parts import version_of
from instep._optim.stepper import Stepper, writes_without_gradient
from instep._step.hand_over import HandOver
from instep._step.pending_buckets import PendingBuckets
from instep._step.running_step import RunningStep
from instep._step.states import Event, State
from instep.errors import InstepError


class HandOverCalls:
    """Of one attachment. See ``Round`` for what is kept of a call."""

    def __init__(self, step: RunningStep, pending: PendingBuckets, hand_over: HandOver) -> None:
        self._step = step
        self._pending = pending
        self._hand_over = hand_over

    def drop_round(self) -> None:
        """A backward begins: no optimizer owes a step any more, unless one has called its closure once more."""
        if self._step.round.evaluates_again:
            return
        self._step.round.owing.clear()
        if self._step.ledger.machine.state is State.OPEN:
            self._step.ledger.happened(Event.DROPPED)

    def leave_to_optimizer(self, stepper: Stepper, error: object) -> None:
        """``optimizer.step()`` is about to do otherwise than an update that is put off: this step is taken at once."""
        self._hand_over.now = True

    def begin(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self._step.backwards.let_go()
        self.end_commit()
        if self._step.round.stepper is not None:
            self.end_raised(self._step.round.stepper)  # another call of step()
        self._hand_over.now = False
        stepper.called()

    def before_update(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update: take over the gradients that can be applied later."""
        step = self._step
        if step.round.stepper is stepper:
            return  # a closure that is called more than once
        step.require_keys(stepper)
        try:
            self._hand_over.before_update(stepper)
            step.keep_draws(stepper)
        except BaseException:
            if step.round.stepper is None:  # nothing has been handed over
                self.drop_round()
                step.round.takes_step = None
                step.round.is_gone()
                self._hand_over.forget_call()
                if step.check is not None:
                    step.check.forget()
            raise

    def returned(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to return. Who is interrupted here begins again."""
        if self._step.round.stepper is stepper:
            self._pending.returned(self._step.number, stepper)
            self._end(stepper)
        else:
            self.end_commit()

    def _end(self, stepper: Stepper) -> None:
        round_ = self._step.round
        with torch._C.DisableTorchFunctionSubclass():
            for attached, gradient in round_.hidden:
                parameter = attached.get()
                if GET_GRAD(parameter) is None:  # the plain loop's is still there, until the user clears it
                    SET_GRAD(parameter, self._pending.stand_in_for(parameter, gradient))
        stepper.commit()
        round_.restore_settings()
        round_.has_returned(stepper, self._step.ledger)
        self.end_commit()

    def end_commit(self) -> None:
        self._step.round.end(self._commit)

    def _commit(self, stepper: Stepper, step_count: int, skip_count: int) -> None:
        try:
            self._count(stepper, step_count, skip_count)
        except Exception:
            self._step.round.owing.discard(stepper)
            self._step.round.is_noted()
            raise
        self._step.round.owing.discard(stepper)
        self._step.round.is_noted()

    def _count(self, stepper: Stepper, step_count: int, skip_count: int) -> None:
        step, round_ = self._step, self._step.round
        self._pending.watch([parameter for a, _ in round_.hidden if (parameter := a.peek()) is not None])
        round_.hidden, round_.stepper, self._hand_over.rest = [], None, []
        step.accumulation.stepped()
        self._hand_over.clipped.discard(stepper)
        step.passes.clipping.stepped(stepper)
        self._require_left_alone(stepper)
        taken = round_.takes_step is not False
        if stepper in round_.owing and taken:
            self._require_checked(stepper)
        if round_.owing != {stepper}:
            others = round_.owing - {stepper}
            step.ledger.happened(Event.STEP_RETURNS if others else Event.STEP_IN_VAIN)
            return
        step.ledger.happened(Event.COMMITTED)
        if taken:
            step.ledger.step_count = step_count
            step.times.step_returns()
            step.times.committed()
            if step.check is not None:
                step.check.stepped()
        else:
            step.ledger.skip_count = skip_count
        round_.takes_step = None
        self._hand_over.vote = None
        step.has_gradients = False

    def _require_left_alone(self, stepper: Stepper) -> None:
        """``optimizer.step()`` has found no gradient of the parameters that it had handed over."""
        met, self._pending.met = self._pending.met, []
        for name, parameter, version in met:
            if version_of(parameter) != version:
                error = writes_without_gradient(stepper.name, name)
                try:
                    self._tear(stepper, error)
                    raise error
                finally:
                    del error  # or it would refer to itself, by way of this frame

    def _require_checked(self, stepper: Stepper) -> None:
        """Wait for the step, raise, and call it torn, if it differs from a plain one."""
        step = self._step
        if step.check is None or not step.check.due:
            return
        mine = step.members.of(stepper)
        self._pending.finish([self._pending.of(a.peek()) for a in mine])
        step.ledger.require_whole()
        error = step.check.error(stepper, step.number, mine)
        try:
            if error is not None:
                self._tear(stepper, error)
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def _tear(self, stepper: Stepper, error: BaseException) -> None:
        ledger, number = self._step.ledger, self._step.number
        ledger.tear(number, [a.spec.name for a in self._step.members.of(stepper)], [], error)
        ledger.votes.say_failed(number + 1)

    def end_stopped(self) -> None:
        """An error or Ctrl-C may have ended ``optimizer.step()``: the buckets that it has handed over stand."""
        round_ = self._step.round
        if self._pending.worker.is_here or round_.is_ending or not round_.was_stopped:
            return
        if round_.has_returned_unnoted:
            self.end_commit()
        elif round_.stepper is not None:
            self.end_raised(round_.stepper)

    def end_raised(self, stepper: Stepper) -> None:
        """``step()`` has raised. The buckets that were handed over stand; parameters that were left to ``step()``
        itself beside those may have been written in part."""
        rest, ledger, check = self._hand_over.rest, self._step.ledger, self._step.check
        handed_over = [attached.spec.name for attached, _ in self._step.round.hidden]
        if check is not None and (rest or not handed_over):
            check.forget()  # a plain step would have raised, too
        stepper.abort()
        self._end(stepper)
        if rest and ledger.torn is None:
            self._pending.finish(self._pending.all())
            error = InstepError(f"{stepper.name}.step() raised")
            ledger.tear(ledger.step_count, handed_over, [], error, unsure=rest)
            ledger.votes.say_failed(ledger.step_count + 1)
