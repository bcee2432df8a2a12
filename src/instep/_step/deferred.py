"""``schedule="forward"``: ``optimizer.step()`` hands buckets over and returns; they are written by the next forward."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import nn

from instep._gradients.clipping import Clip
from instep._gradients.scaling import found_inf, take_off_here
from instep._optim.kernels import GRADIENT
from instep._optim.owners import OwnerCount
from instep._optim.parameters import AttachedParameter, AttachedParameters, all_there, calls_of, none_there
from instep._optim.shadow import begin_state
from instep._optim.stepper import Stepper
from instep._ranks.vote import Vote, error_of
from instep._step.deferrable import ReadHook, ReadOrder, can_wait, which_cannot_wait
from instep._step.deferral import PUT_OFF, Deferring, Gains, Observed
from instep._step.norms import MeasuringSink
from instep._step.schedule import Schedule
from instep._step.state import Event, State, gradient_of
from instep._step.step import RunningStep, finds_gradient, gradients_in
from instep._step.step_calls import StepCalls
from instep._step.update import DeferredBuckets, Outcome, PartOfStep, Update, gradients_of
from instep._step.writes import require_same_in_autocast
from instep._torch.lifetime import weakly
from instep._torch.watch import GET_GRAD, SET_GRAD, plain_type
from instep.buckets import Bucket
from instep.errors import InstepError


class ForwardCalls(StepCalls):
    """The calls of ``optimizer.step()``. Each finds no gradient of the parameters whose update is put off; the other
    updates are done in it.

    Attributes:
        owners_in_views: of the buckets of which gradients are views; ``None``: they are none.
    """

    def __init__(
        self,
        step: RunningStep,
        deferred: DeferredBuckets,
        reading: ReadOrder,
        deferring: Deferring,
        observed: Observed,
        measuring: MeasuringSink,
    ) -> None:
        super().__init__(step)
        self.owners_in_views: OwnerCount | None = None
        self._deferred = deferred
        self._reading = reading
        self._deferring = deferring
        self._observed = observed
        self._measuring = measuring
        # Whether nothing of the running call is to be put off: it does otherwise than a plain update.
        self._takes_at_once = False
        self._clipped: set[Stepper] = set()  # those whose gradients were clipped by the first call of the step
        self._vote: Vote | None = None  # on the step that is being handed over
        self._left: list[str] = []  # names of the parameters that the running call steps itself
        self._left_beside = False  # whether the call, or that of another rank, hands others over

    @property
    def acts_in_each_step(self) -> bool:
        """Whether ``clip``, ``nonfinite``, ``random`` or ``offload`` was asked for: for steps that are not put off,
        too."""
        touches_gradients = self._step.passes.clipping.policy is not None or self._step.ledger.nonfinite != "allow"
        return touches_gradients or any(stepper.steps_every_parameter for stepper in self._step.members.steppers)

    def begin_norms(self) -> None:
        """More gradients: norms that were taken of the step so far are not of all."""
        if self._step.passes.clipping.policy is not None:
            self._step.passes.clipping.begin()
        self._clipped.clear()

    def drop_call(self) -> None:
        """``step()`` has raised, and handed nothing over. Gradients that it has clipped stay so."""
        self._vote = None
        begun = self._deferred.begun_in(self._step.number)
        for name in self._left:
            begun.pop(name, None)
        self._left = []

    def drop_round(self) -> None:
        """A backward begins: no optimizer owes a step any more, unless one has called its closure once more."""
        if self._step.round.evaluates_again:
            return
        self._step.round.steppers_left.clear()
        if self._step.ledger.state is State.OPEN:
            self._step.ledger.happened(Event.DROPPED)

    # Before the update.

    def begin(self, stepper: Stepper) -> None:
        self._observed.let_go()
        self._takes_at_once = False
        super().begin(stepper)

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        """This step is taken at once."""
        self._takes_at_once = True

    def before_update(self, stepper: Stepper) -> None:
        if self._step.passes.clipping.policy is not None:
            self._measuring.end_measuring()
        self._observed.let_go()  # a closure has run backward in step(): what is watched is to be watched no more
        if not self._step.round.steppers_left:
            self._observed.step_begins()
        super().before_update(stepper)

    def _prepare(self, stepper: Stepper) -> None:
        """Take over the gradients that can be applied later."""
        step, deferred = self._step, self._deferred
        step.accumulation.require_reduced()
        members = step.members.of(stepper)
        deferred.finish([deferred.of(a.peek()) for a in members] if deferred else ())
        step.ledger.require_whole()
        if not step.round.steppers_left:
            self._deferring.step_begins()
        if not (self._deferring.puts_off or self.acts_in_each_step or step.ledger.votes.voting is not None):
            self._leave(stepper)
            return
        with_gradient = _with_gradient(members)
        # The generator is gone when this returns: whoever refers to a gradient keeps it from being put off.
        in_loop = step.is_in_loop(stepper.optimizer(), (g for a in with_gradient if (g := gradient_of(a)) is not None))
        if in_loop and not step.round.steppers_left:
            self._begin_round(stepper)
        clip = self._clip_of(stepper, with_gradient)
        if in_loop and step.round.takes_step is False:
            self._leave_out(stepper, with_gradient)
            return
        self._take(stepper, with_gradient, clip, in_loop=in_loop)

    def _leave(self, stepper: Stepper) -> None:
        """This step is the plain loop's: ``optimizer.step()`` steps all of it. Of the parameters, which the loop may
        have replaced, no more is asked than which optimizers will."""
        step, optimizer = self._step, stepper.optimizer()
        if not step.round.steppers_left and step.is_in_loop(optimizer, gradients_in(optimizer)):
            step.round.steppers_left = {s for s in step.members.steppers if finds_gradient(s.optimizer())}
            step.round.takes_step = True
        step.round.begins(stepper, step.ledger)

    def _begin_round(self, stepper: Stepper) -> None:
        """This is the first of the step's optimizers."""
        step = self._step
        if not step.has_gradients:  # these gradients are of a backward that nobody has seen to begin
            step.hear(wait=True)
            self.begin_norms()
        tensors_of = {stepper: step.members.of(stepper).tensors() for stepper in step.members.steppers}
        step.round.steppers_left = {s for s, tensors in tensors_of.items() if not none_there(map(GRADIENT, tensors))}
        if not step.round.steppers_left and step.is_owed_without_gradients:
            step.round.steppers_left = set(step.members.steppers)
        is_left_to_kernel = not step.round.steppers_left or found_inf(stepper.optimizer())
        step.round.takes_step = is_left_to_kernel or self._takes_step()

    def _takes_step(self) -> bool:
        """Whether the step that begins here is to be taken. The ranks vote on it: where nobody needs the answer now,
        it is waited for before the first write."""
        step = self._step
        if step.ledger.nonfinite == "allow":
            self._vote = step.ledger.votes.say(step.number)
            return True
        return step.ledger.takes_step([(a.spec.name, g) for a in step.members.all if (g := gradient_of(a)) is not None])

    def _clip_of(self, stepper: Stepper, with_gradient: AttachedParameters) -> Clip | None:
        """Whatever is left to do to these gradients before they are applied."""
        clipping, members = self._step.passes.clipping, self._step.members
        if clipping.policy is None or stepper in self._clipped:
            return None
        optimizer = stepper.optimizer()
        if found_inf(optimizer):
            return None  # the kernel skips its update, of gradients as they are
        take_off_here(optimizer, gradients_of(with_gradient, with_gradient.tensors()))
        if clipping.mode is not None and clipping.total is None:
            clipping.compute_total_norm(members.all, gradient_of)
            # The plain loop clips all of them at once, before the first of its optimizers steps.
            others = [a for a in members.all if a.stepper is not stepper and a.get().grad is not None]
            clipping.clip([a.get() for a in others])
            self._clipped = {a.stepper for a in others}
        return clipping.as_of_now()

    def _leave_out(self, stepper: Stepper, with_gradient: AttachedParameters) -> None:
        """``optimizer.step()`` finds no gradient, and what it writes nevertheless is put back."""
        step = self._step
        step.round.leave_out(stepper)
        gradients = gradients_of(with_gradient, with_gradient.tensors())
        step.round.begins(stepper, step.ledger)
        self._hide(with_gradient, gradients)

    def _hide(self, parameters: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        """Until ``step()`` is over, whoever asks these parameters for their gradients is not to find them gone."""
        self._deferred.watch_in_step.start(parameters.tensors())
        self._step.round.hide(list(zip(parameters, gradients, strict=True)))

    def _take(self, stepper: Stepper, with_gradient: AttachedParameters, clip: Clip | None, *, in_loop: bool) -> None:
        """The step is taken: put off all that can wait, and leave the rest to ``optimizer.step()``."""
        step, deferring = self._step, self._deferring
        if stepper.steps_every_parameter or (not with_gradient.are_plain and any(a.is_divided for a in with_gradient)):
            require_same_in_autocast(stepper)  # these are updated by instep, put off or not
            step.before_update(stepper, with_gradient)
        may_wait = (
            in_loop
            and deferring.puts_off
            and not self._takes_at_once
            and can_wait(stepper, step.members.of(stepper), in_vain=deferring.asked)
        )
        at_once = set(with_gradient)
        if may_wait:
            unseen, in_views = self._reading.unseen(), self.owners_in_views
            at_once = which_cannot_wait(stepper, with_gradient, step.members.all, unseen, in_views=in_views)
        later, here = with_gradient, AttachedParameters()
        if at_once:
            later = AttachedParameters(a for a in with_gradient if a not in at_once or a.is_divided)
            here = AttachedParameters(a for a in with_gradient if a in at_once and not a.is_divided)
        self._left = here.names
        self._deferred.begun_in(step.number).update(dict.fromkeys(self._left, False))
        if here:
            self._require_agreement()
            if clip is not None:
                clip(here.tensors())
        # A step that is not put off, and raises, leaves what the plain loop's leaves. Other ranks, which may put theirs
        # off, are told.
        told = may_wait and deferring.asked and step.ledger.votes.voting is not None
        self._left_beside = bool(later) or told
        if later:
            self._put_off(stepper, later, clip)
            if at_once:
                self._deferred.finish([self._deferred.of(attached.get()) for attached in later if attached in at_once])
        else:
            step.round.begins(stepper, step.ledger)
        if stepper.steps_every_parameter:
            self._step_here(stepper, here)

    def _require_agreement(self) -> None:
        """Something of this step is about to be written by torch itself."""
        vote, self._vote = self._vote, None
        error = None if vote is None else error_of(vote)
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def _step_here(self, stepper: Stepper, rest: AttachedParameters) -> None:
        """``optimizer.step()`` itself is not to step what cannot wait."""
        gradients = gradients_of(rest, rest.tensors())
        for call in calls_of(rest, gradients, alias=False):
            call.step(stepper)
        self._hide(rest, gradients)

    # Handing over.

    def _put_off(self, stepper: Stepper, parameters: AttachedParameters, clip: Clip | None) -> None:
        tensors = parameters.tensors()
        gradients = list(map(GRADIENT, tensors))
        step, deferred = self._step, self._deferred
        try:
            deferred.begin()
            updates = self._take_over(stepper, parameters, clip)
        except Exception:  # nothing has been handed over
            if step.gather is not None:
                step.ledger.votes.say_failed(step.number)  # the others wait for the parts that this rank updates
            if step.round.stepper is not None:
                step.round.refuse(step.ledger)
            deferred.take_back(tensors)
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
            step.round.hidden = []
            raise
        try:
            deferred.is_sending = True
            self._begin(updates)
        finally:
            deferred.is_sending = False

    def _take_over(self, stepper: Stepper, parameters: AttachedParameters, clip: Clip | None) -> list[Update]:
        """Take the gradients off."""
        step, deferred, optimizer = self._step, self._deferred, stepper.optimizer()
        outcome = Outcome(step.number, self._vote, deferred.begun_in(step.number))
        part = PartOfStep(stepper, parameters, outcome, step.times)
        begin_state(optimizer, parameters.tensors())
        as_read = step.gather is None  # shards are sent in the same order on all ranks
        updates = []
        for members in self._reading.members_of_buckets(parameters, as_read=as_read):
            update = Update(members, part, clip, self._reading.place_of(members) if as_read else 0)
            deferred.add(update)
            self._hide(members, update.gradients)
            updates.append(update)
        deferred.state_watch.start(optimizer)
        step.round.begins(stepper, step.ledger)
        return updates

    def _begin(self, updates: Sequence[Update]) -> None:
        """Start all that need not be asked for."""
        step, deferred = self._step, self._deferred
        if step.gather is not None:
            for update in updates:
                with deferred.on_side(update):
                    update.send(step.gather)
            updates[0].step.outcome.tell_of_updates(step.ledger.votes)  # they are all of one step
        for update in updates:
            # Others are stepped when they are waited for, by the same thread: who waits may be in the middle of
            # tracing, or in inference mode.
            begins = update.step.switches.leave_python or step.gather is not None
            if begins and update.device.type == "cpu":
                update.give_to(deferred.worker)
        for update in updates:  # once all are sent: the side stream waits for those of other ranks
            if update.device.type != "cpu":
                update.mark = deferred.finished(update)

    # After it.

    def _finish(self, stepper: Stepper) -> None:
        if self._step.judge is not None:
            self._step.judge.after_update(stepper)
        self._deferred.begun_in(self._step.number).update(dict.fromkeys(self._left, True))
        self._show_gradients()
        stepper.commit()
        self._step.round.restore_settings()

    def _show_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for attached, gradient in self._step.round.hidden:
                parameter = attached.get()
                if GET_GRAD(parameter) is None:  # the plain loop's is still there, until the user clears it
                    SET_GRAD(parameter, gradient)
                    self._deferred.show(parameter, gradient)

    def _settle(self, stepper: Stepper) -> None:
        round_ = self._step.round
        self._deferred.settle(parameter for a, _ in round_.hidden if (parameter := a.peek()) is not None)
        round_.hidden, self._left = [], []
        self._clipped.discard(stepper)

    def _committed(self, *, taken: bool) -> None:
        self._vote = None
        self._step.has_gradients = False

    # Calls that have raised.

    def _refused(self) -> None:
        step = self._step
        if step.round.stepper is None:  # nothing has been handed over
            self.drop_round()
            step.round.takes_step = None
            step.round.drop_call()
            self.drop_call()
            if step.judge is not None:
                step.judge.end_step()

    def end_stopped(self) -> None:
        """The buckets that it has handed over stand."""
        if not self._deferred.worker.is_here:
            super().end_stopped()

    def _end_raised(self, stepper: Stepper) -> None:
        """The buckets that were handed over stand; parameters that were left to ``step()`` itself beside those may have
        been written in part."""
        rest, round_, ledger = self._left, self._step.round, self._step.ledger
        handed_over = [attached.spec.name for attached, _ in round_.hidden]
        if self._step.judge is not None:
            self._step.judge.end_step()
        if stepper.draws is not None:
            stepper.draws.give_back()
        stepper.abort()
        self._show_gradients()
        round_.restore_settings()
        self._commit(stepper)
        if rest and self._left_beside and ledger.torn is None:
            self._deferred.finish(self._deferred.all())
            error = InstepError(f"{stepper.name}.step() raised")
            ledger.tear(ledger.step_count, handed_over, [], error, unsure=rest)
            ledger.votes.say_failed(ledger.step_count + 1)  # the last one was voted on before it was handed over


def _is_plain(gradient: torch.Tensor | None) -> bool:
    """Whether there is one, that is torch's own when nobody watches it."""
    return gradient is not None and plain_type(gradient) is torch.Tensor


def _with_gradient(parameters: AttachedParameters) -> AttachedParameters:
    if all_there(map(GRADIENT, parameters.tensors())):
        return parameters
    return AttachedParameters(a for a in parameters if a.get().grad is not None)


# ``schedule="forward"``: ``optimizer.step()`` hands over, and returns; weights are written by the time they are read.
#
# Until ``optimizer.step()`` this is the plain loop: gradients are in ``.grad``, to be clipped, scaled, accumulated or
# thrown away. ``step()`` takes them off, with the optimizer's groups as they are at that moment, and they are applied
# bucket by bucket in the order in which the model reads its parameters: by a worker thread on CPU, on a side stream on
# accelerators. Before a module runs, and whenever anybody uses a parameter in Python, its bucket is waited for.


COMPILES = 3
"""After so many functions that torch.compile has begun to trace while an update was due, no step is put off: it traces
a function for plain parameters anew after each step that is, up to eight times."""


class ForwardSchedule(Schedule):
    """The steps of one attachment that were handed over.

    Attributes:
        observed: what ordinary steps show of what the loop could gain.
        measuring: what sources tell in backward, where nothing is written yet.
    """

    def __init__(self, step: RunningStep, reading: ReadOrder, deferring: Deferring) -> None:
        super().__init__(step)
        step.lock.torn_by = step.round.lock.torn_by = weakly(self._ended_anywhere)
        self.measuring = MeasuringSink(step.accumulation, step.passes.clipping, step.times)
        self._deferred = DeferredBuckets(self._step, self)
        self._reading = reading
        self._deferring = deferring
        self._all_readers: list[ReadHook] = []
        self._readers_rest = False  # while nothing is due, nothing will be, and no step is torn
        self._step.ledger.when_torn = weakly(self._wake_readers)
        self._compiles = 0  # so often torch.compile has begun while an update was due
        self.observed = Observed(step.members.living, step.times)
        self.calls: ForwardCalls = ForwardCalls(
            self._step, self._deferred, reading, deferring, self.observed, self.measuring
        )

    @property
    def follows(self) -> bool:
        """Whether it must know of parameters that are replaced or added, and of threads: not where no step is put off,
        and nothing is done to gradients."""
        return self.calls.acts_in_each_step or not self._deferring.never

    def _ended_anywhere(self, error: BaseException) -> None:
        ledger, members = self._step.ledger, self._step.members
        if ledger.torn is None:
            ledger.tear(self._step.number, [], [], error, unsure=[a.spec.name for a in members.all])
            ledger.votes.say_failed(self._step.number)

    @property
    def deferral(self) -> str:
        return f"{PUT_OFF.later if self._deferring.puts_off else PUT_OFF.otherwise} ({self._deferring.why})"

    @property
    def gains(self) -> Gains | None:
        return self.observed.gains

    def lost(self, error: InstepError) -> None:
        """The loop does what a step that is put off cannot follow: no further one is, unless that was asked for."""
        try:
            if self.calls.acts_in_each_step or self._deferring.asked:
                if self._deferring.otherwise is not None and not self.calls.acts_in_each_step:
                    error.args = (f"{error}. {self._deferring.otherwise}",)
                raise error
            self._deferring.cannot(str(error))
        finally:
            del error  # or it would refer to itself, by way of this frame

    def before_compile(self) -> None:
        """torch.compile is about to trace a function. Of parameters and gradients whose update is due it would make
        another one, or none, and compute with other kernels than in the plain loop. They are made plain before."""
        if self._deferred and not self._deferred.worker.is_here:
            self._deferred.finish(self._deferred.all())
            self._compiles += 1
            if self._compiles == COMPILES:
                self._deferring.must_not("torch.compile traces a function again and again while updates are due")

    # What the model reads.

    def before_forward(self) -> None:
        step = self._step
        step.backwards.drain_failed()
        self.observed.let_go()
        never = self._deferring.never  # and so for good
        self.calls.end_unless_it_evaluates_again()
        self.before_read(())  # of no module yet: order this forward's stream, and raise if the last step is torn
        if never and not self._deferred and not self._readers_rest:
            self._readers_rest = True
            for reader in self._all_readers:
                reader.rest()
        self.rests = self.may_rest and self._readers_rest and self._is_left_alone
        if step.accumulation.distributed:
            # DDP may lay out its buckets anew now, and copy the gradients that are in .grad.
            self._deferred.finish(u for u in self._deferred.all() if any(map(_is_plain, map(GRADIENT, u.tensors))))

    @property
    def _is_left_alone(self) -> bool:
        """Whether each further step is one call of ``optimizer.step()``, that neither an option nor another rank has to
        do with."""
        step = self._step
        adds_up = (
            step.accumulation.steps > 1 or step.accumulation.distributed or step.accumulation.runs_stages is not None
        )
        return (
            self.observed.is_over
            and len(step.members.steppers) == 1
            and not self.calls.acts_in_each_step
            and not adds_up
            and step.ledger.votes.ranks is None
        )

    def before_read(self, parameters: Sequence[AttachedParameter]) -> None:
        """These parameters are about to be read."""
        step, deferred = self._step, self._deferred
        if self._deferring.never and not deferred:
            step.ledger.require_whole()
            return
        if torch.is_grad_enabled() and parameters:
            self._reading.reads(parameters)
            step.streams.producers.note_current(parameters[0].spec.device)
        if deferred:
            # Without gradients some modules choose a fused path, for which they read the parameters of others.
            some = torch.is_grad_enabled()
            deferred.finish([deferred.of(a.peek()) for a in parameters] if some else deferred.all())
        step.streams.follow()  # the loop's stream has waited for buckets that this forward's may not have
        step.ledger.require_whole()

    def synchronize(self) -> None:
        """Wait for everything that is due."""
        self._step.backwards.drain_failed()
        self.end_stopped()
        self._deferred.finish(self._deferred.all())
        self._step.streams.follow()
        self._step.ledger.require_whole()

    # Backward.

    def begin_backward(self) -> bool:
        step = self._step
        if not step.backwards.is_new():
            return False
        if step.accumulation.runs_stages is False:
            step.require_run()
        # A graph that was made before the last step() may have saved weights, which the plain loop has written by now.
        self._deferred.finish(self._deferred.all())
        step.has_gradients = True
        step.accumulation.begin()
        self.calls.drop_round()  # of a step that not all of its optimizers have taken
        if not step.accumulation.next_only_adds:
            self.begin_final_backward()
        self.calls.begin_norms()
        return True

    def hear_of_last_step(self) -> None:
        self.cast_owed()
        self._step.hear(wait=True)
        if any(update.step.outcome.is_refused() for update in self._deferred.all()):
            self.synchronize()  # raises what a read of these weights would, for which the run may have to wait

    def begin_final_backward(self) -> None:
        self._deferring.backward_begins()
        super().begin_final_backward()
        self._step.hear(wait=True)

    def end_micro_batches(self) -> None:
        self._deferred.finish(self._deferred.all())
        self._step.has_gradients = True
        self.calls.drop_round()
        self.begin_final_backward()
        self.calls.begin_norms()
        self.observed.backward_ended()

    def end_backward(self) -> None:
        """Nothing was written in it."""
        super().end_backward()
        self.observed.backward_ended()

    # What the user asks for.

    def before_save(self) -> None:
        """The model is about to be saved: not a step that is torn."""
        self.end_stopped()
        self._step.ledger.require_whole()

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """The optimizer's state is about to be saved or loaded. What is torn may be loaded anew, and not be saved."""
        if saving or self._step.ledger.torn is None:
            self.synchronize()

    def last_complete_step(self) -> int | None:
        if self._step.ledger.torn is None:
            self.synchronize()
        return super().last_complete_step()

    def accept(self) -> bool:
        with suppress(Exception):  # a bucket that is due may tear it; the loop gives up the step whose error this is
            self.synchronize()
        return super().accept()

    def give_up(self, *, gradients: bool) -> None:
        """Let go of a torn step; with ``gradients``, clear all of them."""
        step, deferred = self._step, self._deferred
        step.backwards.drain_failed()
        for bucket in deferred.all():
            deferred.wait(bucket)
        for parameter in step.members.living() if gradients else ():
            parameter.grad = None
        deferred.watch_in_step.stop(p for attached, _ in step.round.hidden if (p := attached.peek()) is not None)
        step.round.end_step()
        step.ledger.give_up()
        if step.judge is not None:
            step.judge.end_step()
        self.calls.drop_call()
        self.calls.begin_norms()
        step.accumulation.stepped()

    def settle(self) -> None:
        self._deferred.finish(self._deferred.all())

    def abandon(self) -> None:
        self._deferred.abandon()

    def close(self) -> None:
        """Finish what is due, and end the thread."""
        try:
            self.measuring.end_measuring()
            self.observed.let_go()
            self.end_stopped()
            self._deferred.close()
        finally:
            self._deferred.worker.stop()

    # What others ask of the step.

    @property
    def state(self) -> str:
        """``"idle"``, ``"pending"`` or ``"torn"``."""
        return "torn" if self._step.ledger.torn is not None else "pending" if self._deferred else "idle"

    def watch_reader(self, module: nn.Module, parameters: Sequence[AttachedParameter]) -> ReadHook:
        """``module`` reads these: wait for them before its forward."""
        reader = ReadHook(module, parameters, self.before_read)
        self._all_readers.append(reader)
        return reader

    def _wake_readers(self) -> None:
        """A step is torn, which a module that is called by itself is to tell, too."""
        self.rests = False
        if self._readers_rest:
            self._readers_rest = False
            for reader in self._all_readers:
                reader.wake()

    @property
    def readers(self) -> list[ReadHook]:
        """The hooks of the modules that read parameters."""
        return self._reading.hooks

    # What the attachment asks.

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan: all trainable parameters, in the order in which forwards read them."""
        trainable = (a for a in self.parameters if (p := a.peek()) is not None and p.requires_grad)
        return self._reading.buckets_of(trainable, as_read=self._step.gather is None)

    def divides(self, owners_in_views: OwnerCount) -> None:
        self.calls.owners_in_views = owners_in_views

    def read_by(self, streams: Callable[[], Iterable[torch.Stream]]) -> None:
        self.streams.readers = streams

    def after_forward(self) -> None:
        """The model's forward has returned: wait for the buckets that this forward did not read. DDP's next backward
        writes the memory in which their gradients may lie."""
        self.synchronize()
        self.streams.see(self._step.members.all[0].spec.device)

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters: wait for their buckets."""
        self.before_read(parameters)
