"""One call of ``optimizer.step()``, from its beginning to the commit: the order of events that all schedules share.

    ``begin``          ``step()`` is called. A call that has raised before is brought to its end (``_end_raised``).
    ``before_update``  Its closure has run. ``_prepare`` steps, defers or leaves out what is the schedule's, and what
                       ``step()`` is not to find is hidden.
    ``returned``       ``step()`` has returned (``_finish``). ``_settle`` gives back what was hidden. With the last
                       optimizer that has gradients the step is committed (``_committed``).
    ``end_stopped``    An error has ended ``step()``, and somebody uses what it has left.

Each of them holds a lock: ``before_update``, in which the optimizer's own code may run, that of the round, and the
others that of the step. In between runs the optimizer's own ``step()``, which any error may end.

Where the schedule rests, a call is ``begin_at_rest`` and ``returned`` alone: torch takes it, and it is counted.
"""

from instep._optim.stepper import Stepper
from instep._step.state import Event
from instep._step.step import RunningStep, finds_gradient
from instep._torch.interrupts import look_for_handlers
from instep.errors import InstepError


class StepCalls:
    """The calls of one attachment. See ``Round`` for what is kept of one."""

    def __init__(self, step: RunningStep) -> None:
        self._step = step
        # How many steps there are to be, once the call at rest has returned, or an error has ended it; ``None``: none
        # was begun. Computed as it begins: it is not under the lock, and counting again changes nothing.
        self._count_at_rest: int | None = None

    # Where the schedule rests.

    def begin_at_rest(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called, without a closure: torch takes it, and nobody else has to do with it."""
        step, optimizer = self._step, stepper.optimizer()
        if step.round.stepper is not None or self._count_at_rest is not None:
            self.begin(stepper)  # the call before, with a closure or at rest, has raised
        step.times.step_begins()
        # Of gradients and learning rates no value is asked for: the host would wait for an accelerator in each step. A
        # tool that steps to make state (DCP) calls ``step(closure=None)``, which is not at rest.
        self._count_at_rest = step.ledger.step_count + finds_gradient(optimizer)

    def _note_at_rest(self, *, raised: bool) -> None:
        """It has returned, or raised: what torch has written then stands, as in the plain loop."""
        step, step_count = self._step, self._count_at_rest
        if step_count is None:
            return  # another thread was first
        step.accumulation.stepped()
        if step_count > step.ledger.step_count:
            step.ledger.step_count = step_count
            if not raised:
                step.times.step_returns()
                step.times.committed()
        step.has_gradients = False
        self._count_at_rest = None

    # Before the update.

    def begin(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        step = self._step
        if self._count_at_rest is not None:
            self._note_at_rest(raised=True)
        step.backwards.drain_failed()  # which waits for threads of the engine, that may wait for the lock
        look_for_handlers()
        if step.round.stepper is not None:
            with step.lock:
                self._end_raised(step.round.stepper)  # another call
        stepper.called()

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        """This ``optimizer.step()`` computes otherwise than a bucket's step: ``error`` says how."""

    def before_update(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update, after its closure."""
        with self._step.round.lock:
            if self._step.round.stepper is stepper:
                return  # a closure that is called more than once
            if (keyed := stepper.keyed) is not None:
                keyed.require_names(stepper.optimizer())  # nothing is written yet
            try:
                self._prepare(stepper)
                if keyed is not None and self._step.round.stepper is stepper:  # else it finds nothing to do
                    keyed.keep({a.spec.device for a in self._step.members.of(stepper)})
            except Exception:
                self._refused()
                raise

    def _prepare(self, stepper: Stepper) -> None:
        """Do what is to be done before ``step()`` itself updates; ``Round.begins`` right before the first write."""
        raise NotImplementedError

    def _refused(self) -> None:
        """``_prepare`` has raised."""

    # After it.

    def returned(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to return."""
        if self._count_at_rest is not None:
            self._note_at_rest(raised=False)
            return
        with self._step.lock:
            if self._step.round.stepper is stepper:
                self._finish(stepper)
                if stepper.draws is not None:
                    stepper.draws.give_back()
                self._commit(stepper)

    def _finish(self, stepper: Stepper) -> None:
        """``step()`` has left alone what it was to leave alone: look, while that can still be seen."""

    def _commit(self, stepper: Stepper) -> None:
        """Take note of a call that has returned: what it has stepped stands."""
        step, round_, ledger = self._step, self._step.round, self._step.ledger
        is_owed, takes_step = stepper in round_.steppers_left, round_.takes_step is not False
        round_.stepper = None
        try:
            self._settle(stepper)
            step.accumulation.stepped()
            if step.passes.clipping.policy is not None:
                step.passes.clipping.stepped(stepper)
        finally:
            round_.steppers_left.discard(stepper)
        if round_.steppers_left or not is_owed:
            ledger.happened(Event.STEP_RETURNS if round_.steppers_left else Event.STEP_IN_VAIN)
            return
        ledger.happened(Event.COMMITTED)
        round_.takes_step = None
        if takes_step:
            ledger.step_count += 1
            step.times.step_returns()
            step.times.committed()
        else:
            ledger.skip_count += 1
        self._committed(taken=takes_step)

    def _settle(self, stepper: Stepper) -> None:
        """Give back what was hidden from ``step()``: gradients are as in the plain loop."""
        raise NotImplementedError

    def _committed(self, *, taken: bool) -> None:
        """All optimizers have stepped."""

    # Calls that have raised.

    def end_stopped(self) -> None:
        """An error may have ended ``optimizer.step()``."""
        if self._count_at_rest is not None and not any(stepper.is_stepping for stepper in self._step.members.steppers):
            self._note_at_rest(raised=True)
        round_ = self._step.round
        if round_.stepper is None:
            return  # as mostly, and asked before each read
        with self._step.lock:
            if round_.was_stopped:
                self._end_raised(round_.stepper)

    def end_unless_it_evaluates_again(self) -> None:
        """Unless a closure of ``step()`` runs what comes here, a ``step()`` that runs still has raised."""
        round_ = self._step.round
        if round_.stepper is not None and not round_.evaluates_again:
            with self._step.lock:
                self._end_raised(round_.stepper)

    def _end_raised(self, stepper: Stepper) -> None:
        """``step()`` has raised: put back what it has written, or tear the step."""
        raise NotImplementedError
