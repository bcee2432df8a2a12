"""``schedule="backward"``: buckets are stepped in backward, as soon as their gradients are final.

A step opens with the first final gradient that a source offers, and is committed by the user's ``optimizer.step()``.
While it is open, buckets are applied. What an update means until the commit is the affair of its ``Writes``: it is
final, and an error tears the step, after which nothing more is written, and every later forward, backward and step says
so; or it is a trial (``undo``), which an error rolls back.
"""

from collections.abc import Callable, Sequence

import torch

from instep._autograd.engine import graph_task
from instep._autograd.placeholders import ACCUMULATE, CONVERSION, DETACH, ZERO, ZeroedGradient
from instep._gradients.clipping import Clipping
from instep._gradients.finite import Policy
from instep._gradients.scaling import LossScale
from instep._optim.parameters import AttachedParameter
from instep._optim.plan import Bucket, ParameterSpec
from instep._optim.stepper import Stepper
from instep._optim.undo import Undo
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.agreement import Agreement
from instep._step.bucket_sink import BucketSink
from instep._step.checking import Check
from instep._step.final_writes import FinalWrites
from instep._step.members import StepMembers
from instep._step.passes import Losses
from instep._step.running_step import RunningStep
from instep._step.spent_uses import after_update, never_cleared, while_measuring
from instep._step.states import Event
from instep._step.step_calls import StepCalls
from instep._step.trial_writes import TrialWrites
from instep._step.ways_out import KEEP_ALL, MICRO_BATCHES
from instep._step.writes import Gather, Writes, owed_steps
from instep.errors import AccumulationError, InstepError


class BackwardSchedule(BucketSink):
    """The current step of one attachment, and the steps before it."""

    def __init__(
        self,
        steppers: Sequence[Stepper],
        votes: StepVotes,
        accumulation: Accumulation,
        clipping: Clipping,
        undo: Undo | None = None,
        scale: LossScale | None = None,
        nonfinite: Policy = "allow",
        check: Check | None = None,
    ) -> None:
        step = RunningStep(StepMembers(steppers), votes, accumulation, clipping, check)
        if undo is None:
            writes: Writes = FinalWrites(step, nonfinite)
        else:
            writes = TrialWrites(step, undo, scale, Agreement(nonfinite, votes), self)
        super().__init__(step, writes)
        self._calls = StepCalls(step, writes)

    # What happens during backward.

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient, before any parameter does. Returns whether this is
        the first of them in the running backward.

        Raises ``AccumulationError``, before anything is written or reduced, if an earlier backward of this step has
        already updated weights. Some outputs lie deep in the graph: in the same backward they are met later.
        """
        task, step = graph_task(), self._step
        if not self._seen.begins(task):
            return False
        self._writes.before_backward()
        step.accumulation.begin()
        if step.accumulation.holds_next:
            return True
        step.ledger.votes.begin_backward(step.ledger.step_count)
        self._writes.hear(wait=True)
        if step.members.applied:
            raise AccumulationError(
                f"a second backward began before {owed_steps(step)}, but the first has already updated the weights. "
                f"{MICRO_BATCHES}, or add the losses and call backward() once. {KEEP_ALL}"
            )
        self._seen.steps(task)
        return True

    def end_backward(self) -> None:
        """The backward that ``begin_backward`` told of is over."""
        self._seen.running = None

    def backward_failed(self) -> None:
        """Ctrl-C may have come when a gradient was offered, and before its source had asked for the end of backward. If
        an update was begun, the source has."""
        members = self._step.members
        if members.offered and not members.applied and self._step.ledger.torn is None:
            self.backward_raised()

    def stop(self, error: InstepError) -> None:
        """The backward that has just ended did not compute the plain loop's step: put it back, or it is torn."""
        try:
            self._writes.stopped(error)
            raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    # Two passes.

    def backward(self, loss: Losses, gradient: torch.Tensor | None, adopt: Callable[[], None]) -> None:
        """With ``ClipNorm(mode="two_pass")``: a backward that measures, and one that steps. See ``Passes``."""
        passes, accumulation = self._step.passes, self._step.accumulation
        if passes.clipping.mode != "two_pass" or accumulation.holds_next or self.keeps_gradients:
            torch.autograd.backward(loss, gradient)
            return
        if self.state != "open":
            adopt()
        if accumulation.distributed:
            with passes.measured(waits_for_all=True):
                torch.autograd.backward(loss, gradient)
            return
        with passes.measuring() as parameters:
            if parameters:  # all that are attached may be frozen
                torch.autograd.backward(loss, gradient, retain_graph=True, inputs=parameters)
        with passes.measured():
            torch.autograd.backward(loss, gradient)

    # What the user does.

    def before_forward(self) -> None:
        """Before a forward: raise if the weights are not those the plain loop would read."""
        step = self._step
        step.backwards.let_go()
        self._calls.end_commit()
        self._writes.hear(wait=False)
        self.require_whole()
        self._writes.before_forward()
        if not step.members.offered:
            step.passes.clipping.begin()
        if step.ledger.redoes and not step.members.with_gradient():
            # A step that was rolled back and never taken: zero_grad() has ended it.
            step.ledger.happened(Event.DROPPED)
            self._writes.forget()

    # What optimizer.step() does.

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self._calls.begin(stepper)

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        """``optimizer.step()`` is about to do otherwise than backward has done: ``error`` says how."""
        try:
            self._calls.leave_to_optimizer(stepper, error)
        finally:
            del error  # or it would refer to itself, by way of this frame

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update what backward left."""
        self._calls.before_update(stepper)

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` returned."""
        self._calls.returned(stepper)

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        self._calls.require_whole()

    def end_stopped(self) -> None:
        """An error or Ctrl-C may have ended ``optimizer.step()`` before its gradients were back."""
        self._calls.end_stopped()

    # What the user asks for.

    def forget(self, *, gradients: bool) -> None:
        """Go back to IDLE from any state, and take spent gradients, or all of them, off the parameters."""
        step = self._step
        step.backwards.let_go()
        self._writes.release()
        for attached in step.members.all:
            parameter = attached.peek()
            if parameter is not None and (gradients or parameter.grad is attached.spent):
                parameter.grad = None
        self._failure.forget()
        step.ledger.give_up()
        step.accumulation.stepped()
        self._writes.forget()

    def last_complete_step(self) -> int | None:
        """The number of the last step if all of it was applied here, else ``None``."""
        self._step.backwards.let_go()
        return self._step.ledger.last_complete_step(is_open=bool(self._step.members.applied))

    def accept(self) -> bool:
        """Go on from a step that is torn, or open with weights written, as if it had been committed. ``False``: there
        is none."""
        step = self._step
        step.backwards.let_go()
        self._calls.end_commit()
        is_written = bool(step.members.applied) or step.round.stepper is not None
        if step.ledger.torn is None and self._writes.frees_gradients and is_written:
            self._writes.tear(InstepError("it was given up"))
        if step.ledger.torn is None:
            return False
        step.ledger.accept()
        self.forget(gradients=True)
        return True

    def close(self) -> None:
        """The step that is open is the plain loop's from now on, as far as it can be: of a step that was applied in
        part, the rest is clipped as that part was."""
        self.settle()
        members = self._step.members
        try:
            if self._step.ledger.torn is None and members.applied and graph_task() is None:
                self._writes.clip_rest([a for a in members.all if not members.is_applied(a) and a.peek() is not None])
        finally:
            self.forget(gradients=False)

    def settle(self) -> None:
        """The interpreter is about to end, or to fork: a step on trial is not the plain loop's."""
        self._step.backwards.let_go()
        self._calls.end_commit()
        self._writes.settle()

    def abandon(self) -> None:
        """The optimizers are gone: nobody can commit the step that is open."""
        try:
            self.settle()
        finally:
            for stepper in self._step.members.steppers:
                stepper.abort()

    def synchronize(self) -> None:
        self._step.backwards.let_go()
        self._step.streams.join_all()
        for stepper in self._step.members.steppers:
            stepper.settle()
        self._writes.hear(wait=True)

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """The optimizer's state is about to be saved or loaded: the plain loop's is that of before this step. What is
        torn may be loaded anew, and not be saved."""
        self._step.backwards.let_go()
        if saving:
            self.before_save()
        if self._step.round.stepper is None and self._step.members.applied_by(stepper):
            self._writes.before_state(stepper)

    def before_save(self) -> None:
        """The model or its optimizer's state is about to be saved: not a step that is torn, here or on another rank."""
        self._step.backwards.let_go()
        self.end_stopped()
        self._writes.hear(wait=True)
        self._step.ledger.require_whole()

    def before_load(self, model: str) -> None:
        """The model's ``load_state_dict()`` is called, which would name each parameter that it may not write."""
        self._step.backwards.let_go()
        self._writes.before_load(model)

    def rollback(self) -> None:
        """Put the step back, and clear its gradients: the loop is where it was after the last ``optimizer.step()``."""
        self._writes.rollback_if_any()
        self.forget(gradients=True)

    def error_for_use(self, spec: ParameterSpec, operation: str) -> InstepError | None:
        """The error for ``operation`` on a spent gradient; ``None`` lets it pass.

        The step is torn if its weights are now known to be wrong.
        """
        if self._step.passes.running == "measuring":
            return while_measuring(spec.name, operation)
        if spec.index not in self._step.members.applied:
            return None if self._needs_no_values(spec, operation) else never_cleared(spec.name, operation)
        error, is_wrong = after_update(spec.name, operation, clips=self._step.passes.clipping.policy is not None)
        if is_wrong and self._step.ledger.torn is None:
            self._writes.tear(error)
        return error

    def _needs_no_values(self, spec: ParameterSpec, operation: str) -> bool:
        """Between steps: whether ``operation`` on a gradient of the step before is done without its values. If it is
        to be zeroed, it is now."""
        attached, wrapped = self._step.members.at(spec.index), self._step.accumulation.distributed
        if operation in ZERO:
            attached.get().grad = _zeros(attached, lasting=wrapped)
        # Added to, it is as little known as before: an actor's loss adds to its critic's gradients, which the loop
        # clears before they count. Where it does not, optimizer.step() finds a spent gradient. But DDP's reducer and
        # FSDP would take the sum at once.
        adds = operation in ACCUMULATE and graph_task() is not None and not wrapped and attached.mesh is None
        return adds or operation in (*ZERO, CONVERSION, DETACH)

    @property
    def state(self) -> str:
        """``"idle"``, ``"open"`` or ``"torn"``."""
        self._step.backwards.let_go()
        return "torn" if self._step.ledger.torn is not None else "open" if self._step.members.offered else "idle"

    @property
    def gather(self) -> Gather | None:
        return self._writes.gather

    @gather.setter
    def gather(self, gather: Gather | None) -> None:
        self._writes.gather = gather

    # What the attachment asks.

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan: those of the sources."""
        return tuple(buckets)

    def read_by(self, streams: object) -> None:
        """Weights are written before backward returns: no other stream reads them meanwhile."""

    def crosses(self, in_flight: object, at_once: object) -> None:
        """``cross_iteration`` is for ``schedule="forward"``."""

    def after_forward(self) -> None:
        """The model's forward has returned: its streams have read weights."""
        self.streams.see(self.parameters[0].spec.device)

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters: raise, or roll back, if backward has updated one of them."""
        if self.state == "open" and any(map(self.is_applied, parameters)):
            self.before_forward()


def _zeros(attached: AttachedParameter, *, lasting: bool) -> torch.Tensor:
    """A gradient of zeros.

    Args:
        lasting: DDP or FSDP adds to it, which need real ones.
    """
    parameter = attached.get()
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if any(getattr(place.module(), "sparse", False) for place in attached.places):
            # As torch zeroes a sparse one, in which lazy optimizers find nothing to step.
            where = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            rows = parameter.new_empty((0, *parameter.shape[1:]))
            return torch.sparse_coo_tensor(where, rows, parameter.shape, check_invariants=False)
        if lasting or attached.mesh is not None:
            return torch.zeros_like(parameter)
        return ZeroedGradient(parameter)
