"""``schedule="forward"``: ``optimizer.step()`` hands over, and returns; weights are written by the time they are read.

Until ``optimizer.step()`` this is the plain loop: gradients are in ``.grad``, to be clipped, scaled, accumulated or
thrown away. ``step()`` takes them off, with the optimizer's groups as they are at that moment, and they are applied
bucket by bucket in the order in which the model reads its parameters: by a worker thread on CPU, on a side stream on
accelerators. Before a module runs, and whenever anybody uses a parameter in Python, its bucket is waited for.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from instep._autograd.engine import graph_task
from instep._autograd.placeholders import HeldGradient
from instep._gradients.clipping import Clipping
from instep._optim.owners import Owners
from instep._optim.parameters import AttachedParameter
from instep._optim.plan import Bucket
from instep._optim.stepper import Stepper
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.agreement import Agreement
from instep._step.checking import Check
from instep._step.deferring import Deferring
from instep._step.hand_over import HandOver
from instep._step.hand_over_calls import HandOverCalls
from instep._step.measuring import MeasuringSink
from instep._step.members import StepMembers
from instep._step.observed import Gains, Observed
from instep._step.pending import InFlightBucket
from instep._step.pending_buckets import PendingBuckets
from instep._step.reading import ReadHook, Reading
from instep._step.recorder import Recorder
from instep._step.running_step import HoldsStep, RunningStep
from instep._step.writes import Gather
from instep.errors import InstepError

COMPILES = 3
"""After so many functions that torch.compile has begun to trace while an update was due, no step is put off: it traces
a function for plain parameters anew after each step that is, up to eight times."""


class ForwardSchedule(HoldsStep):
    """The steps of one attachment that were handed over.

    Args:
        can_wait: the optimizers whose update can be put off. The others are stepped at once, by torch.
        bucket_bytes: bytes of gradient at which a bucket is full.
        agreement: whether a step is taken.
        deferring: whether it is put off.

    Attributes:
        observed: what ordinary steps show of what the loop could gain.
        measuring: what sources tell in backward, where nothing is written yet.
    """

    def __init__(
        self,
        steppers: Sequence[Stepper],
        can_wait: Iterable[Stepper],
        votes: StepVotes,
        accumulation: Accumulation,
        clipping: Clipping,
        bucket_bytes: int,
        agreement: Agreement,
        check: Check | None,
        deferring: Deferring,
    ) -> None:
        self._step = RunningStep(StepMembers(steppers), votes, accumulation, clipping, check)
        self.measuring = MeasuringSink(accumulation, clipping)
        self._pending = PendingBuckets(self._step, self)
        self._reading = Reading(bucket_bytes)
        self._hand_over = HandOver(self._step, self._pending, self._reading, can_wait, agreement, deferring)
        self._calls = HandOverCalls(self._step, self._pending, self._hand_over)
        self._deferring = deferring
        self._compiles = 0  # so often torch.compile has begun while an update was due
        self.observed = Observed(self._step.members.living)
        self._backward: int | None = None  # the last one that was seen to begin

    @property
    def follows(self) -> bool:
        """Whether it must know of parameters that are replaced or added, and of threads: not where no step is put off,
        and nothing is done to gradients."""
        return self._hand_over.acts_in_each_step or not self._deferring.never

    @property
    def deferral(self) -> str:
        """Whether steps are put off, and why."""
        return f"{'put off' if self._deferring.puts_off else 'taken at once'} ({self._deferring.why})"

    @property
    def gains(self) -> Gains | None:
        """What the loop could gain by another schedule; ``None``: not known yet."""
        return self.observed.gains

    def lost(self, error: InstepError) -> None:
        """The loop does what a step that is put off cannot follow: no further one is, unless that was asked for."""
        try:
            if self._hand_over.acts_in_each_step or not self._deferring.gives_up:
                if self._deferring.otherwise is not None and not self._hand_over.acts_in_each_step:
                    error.args = (f"{error}. {self._deferring.otherwise}",)
                raise error
            self._deferring.cannot(str(error))
        finally:
            del error  # or it would refer to itself, by way of this frame

    def before_compile(self) -> None:
        """torch.compile is about to trace a function. Of parameters and gradients whose update is due it would make
        another one, or none, and compute with other kernels than in the plain loop. They are made plain before."""
        if self._pending and not self._pending.worker.is_here:
            self._pending.give_to_compiler()
            self._compiles += 1
            if self._compiles == COMPILES:
                self._deferring.must_not("torch.compile traces a function again and again while updates are due")

    # What the model reads.

    def before_forward(self) -> None:
        """The model is about to run."""
        step = self._step
        step.backwards.let_go()
        self.observed.let_go()
        self._reading.forward_begins()
        self._calls.end_commit()
        if step.round.stepper is not None and not step.round.evaluates_again:
            self._calls.end_raised(step.round.stepper)
        self.before_read(())
        if step.accumulation.distributed:
            # DDP may lay out its buckets anew now, and copy the gradients that are in .grad.
            held = (b for b in self._pending.all() if any(isinstance(t.grad, HeldGradient) for t in b.tensors))
            self._pending.finish(held)

    def before_read(self, parameters: Sequence[AttachedParameter]) -> None:
        """These parameters are about to be read."""
        step, pending = self._step, self._pending
        if self._deferring.never and not pending:
            step.ledger.require_whole()
            return
        if torch.is_grad_enabled() and parameters:
            self._reading.reads(parameters)
            step.streams.makers.saw(parameters[0].spec.device)
        if pending:
            # Without gradients some modules choose a fused path, for which they read the parameters of others.
            some = torch.is_grad_enabled()
            pending.finish([pending.of(a.peek()) for a in parameters] if some else pending.all())
        step.streams.follow()  # the loop's stream has waited for buckets that this forward's may not have
        step.ledger.require_whole()

    def synchronize(self) -> None:
        """Wait for everything that is due."""
        self._step.backwards.let_go()
        self.end_stopped()
        self._pending.finish(self._pending.all())
        self._step.streams.follow()
        self._step.ledger.require_whole()

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        self._step.ledger.require_whole()

    # Backward.

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient. Returns whether this is the first of them in the
        running backward."""
        step, task = self._step, graph_task()
        if self._backward == task:
            return False
        self._backward = task
        # A graph that was made before the last step() may have saved weights, which the plain loop has written by now.
        self._pending.finish(self._pending.all())
        step.has_gradients = True
        step.accumulation.begin()
        self._calls.drop_round()  # of a step that not all of its optimizers have taken
        if not step.accumulation.holds_next:
            self._deferring.backward_begins()
            step.ledger.votes.begin_backward(step.ledger.step_count)
            self._hand_over.hear()
        self._hand_over.begin_norms()
        return True

    def end_backward(self) -> None:
        """Nothing was written in it."""
        self.observed.backward_ended()

    # What optimizer.step() does.

    def leave_to_optimizer(self, stepper: Stepper, error: object) -> None:
        """``optimizer.step()`` is about to do otherwise than an update that is put off: this step is taken at once."""
        self._calls.leave_to_optimizer(stepper, error)

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self.observed.let_go()
        self._calls.begin(stepper)

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update."""
        self.measuring.close()
        self.observed.let_go()  # a closure has run backward in step(): nobody else watches what is watched
        if not self._step.round.owing:
            self.observed.step_begins()
        self._calls.before_update(stepper)

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to return."""
        self._calls.returned(stepper)
        self.observed.step_returned(is_last=not self._step.round.owing)

    def end_stopped(self) -> None:
        """An error or Ctrl-C may have ended ``optimizer.step()``: the buckets that it has handed over stand."""
        self._calls.end_stopped()

    # What the user asks for.

    def before_save(self) -> None:
        """The model is about to be saved: not a step that is torn."""
        self.end_stopped()
        self._step.ledger.require_whole()

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """The optimizer's state is about to be saved or loaded. What is torn may be loaded anew, and not be saved."""
        if saving or self._step.ledger.torn is None:
            self.synchronize()

    def rollback(self) -> None:
        """Throw away the gradients since the last ``optimizer.step()``: nothing of them has been written."""
        self.synchronize()
        self.forget(gradients=True)

    def last_complete_step(self) -> int | None:
        """The number of the last step if all of it was applied here, else ``None``."""
        if self._step.ledger.torn is None:
            self.synchronize()
        return self._step.ledger.last_complete_step(is_open=False)

    def accept(self) -> bool:
        """Go on from a torn step, as if it had been committed, unless nothing of it was written. ``False``: there is
        none."""
        with suppress(Exception):  # a bucket that is due may tear it; the loop gives up the step whose error this is
            self.synchronize()
        if self._step.ledger.torn is None:
            return False
        self._step.ledger.accept()
        self.forget(gradients=True)
        return True

    def forget(self, *, gradients: bool) -> None:
        """Let go of a torn step; with ``gradients``, clear all of them."""
        step, pending = self._step, self._pending
        step.backwards.let_go()
        for bucket in pending.all():
            pending.wait(bucket)
        for parameter in step.members.living() if gradients else ():
            parameter.grad = None
        pending.watch_in_step.stop(p for attached, _ in step.round.hidden if (p := attached.peek()) is not None)
        pending.met = []
        step.round.forget()
        step.ledger.give_up()
        if step.check is not None:
            step.check.forget()
        self._hand_over.forget_call()
        self._hand_over.begin_norms()
        step.accumulation.stepped()

    def settle(self) -> None:
        """The interpreter is about to end, or to fork."""
        self._pending.finish(self._pending.all())

    def abandon(self) -> None:
        """The optimizers are gone."""
        self._pending.abandon()

    def close(self) -> None:
        """Finish what is due, and end the thread."""
        try:
            self.measuring.close()
            self.observed.let_go()
            self.end_stopped()
            self._pending.close()
        finally:
            self._pending.worker.stop()

    # What others ask of the step.

    @property
    def state(self) -> str:
        """``"idle"``, ``"pending"`` or ``"torn"``."""
        return "torn" if self._step.ledger.torn is not None else "pending" if self._pending else "idle"

    @property
    def readers(self) -> list[ReadHook]:
        """The hooks of the modules that read parameters."""
        return self._reading.hooks

    @property
    def recorder(self) -> Recorder | None:
        """Told of each bucket's step and communication; ``None`` when nobody listens."""
        return self._pending.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._pending.recorder = self.measuring.recorder = recorder

    @property
    def gather(self) -> Gather | None:
        return self._hand_over.gather

    @gather.setter
    def gather(self, gather: Gather | None) -> None:
        self._hand_over.gather = gather

    # What the attachment asks.

    def planned(self, sent: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan: those that cross the iteration (``sent``), then all other trainable parameters in
        the order in which forwards read them."""
        inside = {spec.index for bucket in sent for spec in bucket.parameters}
        others = (
            a for a in self.parameters if a.spec.index not in inside and (p := a.peek()) is not None and p.requires_grad
        )
        return *sent, *self._hand_over.buckets_of(others)

    def divides(self, owners_in_views: Owners) -> None:
        """Gradients may be views of buckets, whose memory has so many owners."""
        self._hand_over.owners_in_views = owners_in_views

    def read_by(self, streams: Callable[[], Iterable[torch.Stream]]) -> None:
        """``streams``: on which parameters are read, beside the one that is current."""
        self.streams.readers = streams

    def crosses(self, in_flight: Callable[[], Sequence[InFlightBucket]], at_once: Callable[[], bool]) -> None:
        """With ``cross_iteration``: the buckets that may still be on their way, and whether nothing is to be put off at
        present, since that would take more time than it saves."""
        self._hand_over.in_flight, self._hand_over.at_once = in_flight, at_once

    def after_forward(self) -> None:
        """The model's forward has returned: wait for the buckets that this forward did not read. DDP's next backward
        writes the memory in which their gradients may lie."""
        self.synchronize()
        self.streams.see(self.parameters[0].spec.device)

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters: wait for their buckets."""
        self.before_read(parameters)
