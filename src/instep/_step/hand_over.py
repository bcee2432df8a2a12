"""``schedule="forward"``: the part of a step that ``optimizer.step()`` hands over, in buckets, and the part that is
done at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

from instep._autograd.tracing import is_captured
from instep._gradients.clipping import Clip
from instep._gradients.scaling import found_inf, take_off_here
from instep._life.worker import ending
from instep._optim.autocast import autocast_matters, require_same_in_autocast
from instep._optim.calls import calls_of
from instep._optim.initial_state import asks_for_state, begin_state
from instep._optim.kinds import is_torchs_own, steps_as_tested
from instep._optim.owners import Owners
from instep._optim.parameters import GRADIENT, AttachedParameter, AttachedParameters, all_there, none_there
from instep._optim.plan import Bucket
from instep._optim.shadow import is_copied_whole
from instep._optim.stepper import Stepper
from instep._ranks.votes import Vote, error_of
from instep._step.agreement import Agreement
from instep._step.deferring import Deferring
from instep._step.pending import HandedOverStep, InFlightBucket, PendingBucket, in_grad, in_grad_if_any
from instep._step.pending_buckets import PendingBuckets
from instep._step.reading import Reading
from instep._step.running_step import RunningStep
from instep._step.waiting import InFlight, waiting_of
from instep._step.writes import Gather
from instep.errors import StepMismatchError


class HandOver:
    """
    Args:
        can_wait: the optimizers whose update can be put off. The others are stepped at once, by torch.
        agreement: whether a step is taken.
        deferring: whether it is put off.

    Attributes:
        gather: where each rank steps its own shard of parameters: gets the others' shards.
        in_flight: the buckets that may still be on their way.
        owners_in_views: of the buckets of which gradients are views; ``None``: they are none.
        at_once: whether nothing is to be put off at present: it would take more time than it saves.
        now: whether nothing of the running call is to be put off: it does otherwise than a plain update.
        rest: names of the parameters that are left to ``step()`` itself, beside those that are handed over.
        vote: that on the step that is being handed over.
        clipped: the optimizers whose gradients were clipped where the first one of the step was called.
    """

    def __init__(
        self,
        step: RunningStep,
        pending: PendingBuckets,
        reading: Reading,
        can_wait: Iterable[Stepper],
        agreement: Agreement,
        deferring: Deferring,
    ) -> None:
        self.gather: Gather | None = None
        self.in_flight: Callable[[], Sequence[InFlightBucket]] = lambda: ()
        self.owners_in_views: Owners | None = None
        self.at_once: Callable[[], bool] = lambda: False
        self.now = False
        self.clipped: set[Stepper] = set()
        self._step = step
        self._pending = pending
        self._reading = reading
        self._can_wait = frozenset(can_wait)
        self._agreement = agreement
        self._deferring = deferring
        self.forget_call()

    def forget_call(self) -> None:
        """``step()`` has raised, and handed nothing over. Gradients that it has clipped stay so."""
        self.vote: Vote | None = None
        self.rest: list[str] = []

    def begin_norms(self) -> None:
        """More gradients: norms that were taken of the step so far are not of all."""
        self._step.passes.clipping.begin()
        self.clipped.clear()

    def hear(self) -> None:
        """Wait for what the ranks have said of the last step: raise, if it does not stand on all of them."""
        ledger = self._step.ledger
        error = ledger.heard(wait=True)
        try:
            if error is not None:
                self._step.tear_last(error)
                if isinstance(error, StepMismatchError):
                    raise error
                ledger.require_whole()
        finally:
            del error  # or it would refer to itself, by way of this frame

    def before_update(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update: take over the gradients that can be applied later."""
        step, pending = self._step, self._pending
        step.accumulation.require_reduced()
        mine = step.members.of(stepper)
        pending.finish([pending.of(a.peek()) for a in mine] if pending else ())
        step.ledger.require_whole()
        if not step.round.owing:
            self._deferring.step_begins()
        if self._is_torchs:
            self._leave(stepper, mine)
            return
        with_gradient = _with_gradient(mine)
        in_loop = self._in_loop(stepper.optimizer(), with_gradient)
        if in_loop and not step.round.owing:
            self._begin_round(stepper)
        clip = self._clip_of(stepper, with_gradient)
        if in_loop and step.round.takes_step is False:
            self._leave_out(stepper, with_gradient)
            return
        self._take(stepper, with_gradient, clip, in_loop=in_loop)

    @property
    def _is_torchs(self) -> bool:
        """Whether this step is the plain loop's: nothing is put off, and nothing done to gradients before."""
        asks_nobody = self._step.ledger.votes.voting is None and not self._step.checks
        return not self._deferring.puts_off and not self.acts_in_each_step and asks_nobody

    @property
    def acts_in_each_step(self) -> bool:
        """Whether ``clip``, ``nonfinite``, ``random`` or ``offload`` was asked for: for steps that are not put off,
        too."""
        touches_gradients = self._step.passes.clipping.policy is not None or self._agreement.policy != "allow"
        return touches_gradients or any(stepper.takes_all for stepper in self._step.members.steppers)

    def _leave(self, stepper: Stepper, mine: AttachedParameters) -> None:
        """``optimizer.step()`` steps all of it. Of the parameters no more is asked than which optimizers will."""
        step = self._step
        if not step.round.owing and (step.has_gradients or self._in_loop(stepper.optimizer(), _with_gradient(mine))):
            step.round.owing = {one for one in step.members.steppers if _finds_gradient(one.optimizer())}
            step.round.takes_step = True
        step.round.begins(stepper, step.ledger)

    def _take(self, stepper: Stepper, with_gradient: AttachedParameters, clip: Clip | None, *, in_loop: bool) -> None:
        """The step is taken: put off all that can wait, and leave the rest to ``optimizer.step()``."""
        step, mine = self._step, self._step.members.of(stepper)
        if stepper.takes_all or (not with_gradient.are_plain and any(a.is_divided for a in with_gradient)):
            require_same_in_autocast(stepper.optimizer())  # these are updated by instep, put off or not
        in_flight = _in_flight_of(mine, self.in_flight())
        may_wait = in_loop and self._can_be_put_off(stepper)
        waiting = dict.fromkeys(with_gradient, False)
        if may_wait:
            unseen, in_views = self._reading.unseen(), self.owners_in_views
            waiting = waiting_of(stepper, with_gradient, step.members.all, in_flight, unseen, in_views=in_views)
        in_flight = _without_landed(in_flight, waiting)
        later, here = with_gradient, AttachedParameters()
        if not all(waiting.values()):
            later = AttachedParameters(a for a, wait in waiting.items() if wait or a.is_divided)
            here = AttachedParameters(a for a, wait in waiting.items() if not (wait or a.is_divided))
        self._pending.leave(step.number, stepper, here)
        if here:
            self._require_agreement()
            if clip is not None:
                clip(here.tensors())
        if step.check is not None and in_loop:
            step.check.keep_rest(stepper, mine, set(later), in_grad_if_any)
        self.now = False
        if not later:
            # One that raises leaves what the plain loop's leaves. Other ranks, which may put theirs off, are told.
            told = may_wait and not self._deferring.gives_up and step.ledger.votes.voting is not None
            self.rest = here.names if told else []
            step.round.begins(stepper, step.ledger)
            self._step_here(stepper, here)
            return
        self.rest = here.names
        at_once = [] if later is with_gradient else [a for a, wait in waiting.items() if not wait]
        if not stepper.optimizer().state and not is_torchs_own(stepper.optimizer()):
            at_once.insert(0, later[0])  # one bucket makes state, see begin_state
        self._put_off(stepper, later, in_flight, clip)
        self._pending.finish([self._pending.of(attached.get()) for attached in at_once])
        if here:
            self._step_here(stepper, here)

    def _step_here(self, stepper: Stepper, rest: AttachedParameters) -> None:
        """What cannot wait is stepped here, where ``optimizer.step()`` itself is not to step anything."""
        if not stepper.takes_all:
            return
        gradients = [in_grad(attached) for attached in rest]
        for call in calls_of(rest, gradients, alias=False):
            call.step(stepper)
        self._hide(list(zip(rest, gradients, strict=True)))

    def _begin_round(self, stepper: Stepper) -> None:
        """This is the first of the step's optimizers."""
        step = self._step
        if not step.has_gradients:  # these gradients are of a backward that nobody has seen to begin
            self.hear()
            self.begin_norms()
        mine = {stepper: step.members.of(stepper).tensors() for stepper in step.members.steppers}
        step.round.owing = {one for one, tensors in mine.items() if not none_there(map(GRADIENT, tensors))}
        is_left_to_kernel = not step.round.owing or found_inf(stepper.optimizer())
        step.round.takes_step = is_left_to_kernel or self._takes_step()

    def _takes_step(self) -> bool:
        """Whether the step that begins here is to be taken. The ranks vote on it: where nobody needs the answer now,
        it is waited for before the first write."""
        step = self._step
        if self._agreement.policy == "allow":
            self.vote = step.ledger.votes.say(step.number)
            return True
        gradients = [(a.spec.name, in_grad(a)) for a in step.members.all if a.get().grad is not None]
        return self._agreement.takes_step(step.number, gradients)

    def _leave_out(self, stepper: Stepper, with_gradient: Sequence[AttachedParameter]) -> None:
        """``optimizer.step()`` finds no gradient, and what it writes nevertheless is put back."""
        step = self._step
        step.round.leave_out(stepper)
        gradients = [(attached, in_grad(attached)) for attached in with_gradient]
        step.round.begins(stepper, step.ledger)
        self._hide(gradients)

    def _hide(self, gradients: Sequence[tuple[AttachedParameter, torch.Tensor]]) -> None:
        """Until ``step()`` is over, whoever asks these parameters for their gradients is not to find them gone."""
        self._pending.watch_in_step.start(attached.get() for attached, _ in gradients)
        self._step.round.hide(gradients)

    def _require_agreement(self) -> None:
        """Something of this step is about to be written by torch itself."""
        vote, self.vote = self.vote, None
        error = None if vote is None else error_of(vote)
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def _in_loop(self, optimizer: Optimizer, with_gradient: Iterable[AttachedParameter]) -> bool:
        """Whether this is a step of a training loop: else whoever made the gradients wants the step now."""
        step = self._step
        return step.has_gradients or not asks_for_state(
            optimizer, map(in_grad, with_gradient), first=step.ledger.step_count == 0
        )

    # Which of them can wait.

    def _can_be_put_off(self, stepper: Stepper) -> bool:
        """Whether an update of this optimizer can run later, and need not run now."""
        optimizer = stepper.optimizer()
        return (
            self._deferring.puts_off
            and not self.now
            and stepper in self._can_wait
            and not self.at_once()
            and not ending()
            # State that was made in it can be written in it alone, and whoever updates later is not in the loop's.
            and not torch.is_inference_mode_enabled()
            and is_copied_whole(optimizer)
            and steps_as_tested(optimizer)  # its class may have got another step() since it was attached
            and not autocast_matters(optimizer)
            and self._reading.is_alike()
            and not is_captured(self._step.members.all[0].spec.device)
            # On a CPU another thread would step, and draw from the loop's generator, which it has seeded.
            and not (stepper.is_keyed and any(a.spec.device.type == "cpu" for a in self._step.members.of(stepper)))
        )

    def _clip_of(self, stepper: Stepper, with_gradient: Sequence[AttachedParameter]) -> Clip | None:
        """Whatever is left to do to these gradients before they are applied."""
        clipping, members = self._step.passes.clipping, self._step.members
        if clipping.policy is None or stepper in self.clipped:
            return None
        optimizer = stepper.optimizer()
        if found_inf(optimizer):
            return None  # the kernel skips its update, of gradients as they are
        take_off_here(optimizer, [in_grad(a) for a in with_gradient])
        if clipping.mode is not None and clipping.total is None:
            clipping.compute_total_norm(members.all, in_grad_if_any)
            # The plain loop clips all of them at once, before the first of its optimizers steps.
            others = [a for a in members.all if a.stepper is not stepper and a.get().grad is not None]
            clipping.clip([a.get() for a in others])
            self.clipped = {a.stepper for a in others}
        return clipping.as_of_now()

    # Handing over.

    def _put_off(
        self, stepper: Stepper, parameters: AttachedParameters, in_flight: InFlight, clip: Clip | None
    ) -> None:
        tensors = parameters.tensors()
        gradients = list(map(GRADIENT, tensors))
        step, pending = self._step, self._pending
        try:
            pending.begin()
            buckets = self._take_over(stepper, parameters, in_flight, clip)
        except BaseException:  # such as Ctrl-C: nothing has been handed over
            if step.round.stepper is not None:
                step.round.is_refused(step.ledger)
            pending.watch_in_step.stop(tensors)
            pending.take_back(tensors)
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
            step.round.hidden = []
            raise
        try:
            pending.is_beginning = True
            self._begin(buckets, parameters)
        except BaseException:
            self._begin(buckets, parameters)  # handed over is handed over, and other ranks wait for what is sent
            raise
        finally:
            pending.is_beginning = False

    def _take_over(
        self, stepper: Stepper, parameters: AttachedParameters, in_flight: InFlight, clip: Clip | None
    ) -> list[PendingBucket]:
        """Take the gradients off."""
        step, pending, optimizer = self._step, self._pending, stepper.optimizer()
        outcomes = pending.outcomes_of(step.number)
        handed_over = HandedOverStep(
            stepper, parameters, step.number, self.vote, pending.recorder, step.times, outcomes
        )
        handed_over.stepper.draws = None if stepper.draws is None else stepper.draws.of_this_step()
        begin_state(optimizer, parameters.tensors())
        keep = partial(step.check.keep, stepper) if step.check is not None and step.checks else None
        buckets = []
        for members, flight in self._buckets_of(parameters, in_flight):
            bucket = PendingBucket(members, handed_over, clip, flight, keep)
            pending.add(bucket)
            self._hide(list(zip(members, bucket.gradients, strict=True)))
            buckets.append(bucket)
        pending.watch_state(optimizer)
        step.round.begins(stepper, step.ledger)
        return buckets

    def _buckets_of(
        self, parameters: AttachedParameters, in_flight: InFlight
    ) -> Iterator[tuple[AttachedParameters, InFlightBucket | None]]:
        """As the next forward reads them; those that are in flight in the order in which they arrive."""
        there = AttachedParameters(a for a in parameters if a not in in_flight) if in_flight else parameters
        for members in self._reading.members_of_buckets(there, as_read=self.gather is None):
            yield members, None
        for flight in dict.fromkeys(in_flight.values()):
            yield AttachedParameters(a for a in flight.parameters if in_flight.get(a) is flight), flight

    def buckets_of(self, parameters: Iterable[AttachedParameter]) -> tuple[Bucket, ...]:
        # Shards are sent in the same order on all ranks.
        return self._reading.buckets_of(parameters, as_read=self.gather is None)

    def _begin(self, buckets: Sequence[PendingBucket], parameters: Sequence[AttachedParameter]) -> None:
        """Start all that need not be asked for."""
        pending = self._pending
        if self.gather is not None:
            by_id = {id(attached.get()): attached for attached in parameters}
            for bucket in (one for one in buckets if not one.sent):
                with pending.on_side(bucket):
                    bucket.send([by_id[id(tensor)] for tensor in bucket.tensors], self.gather)
            buckets[0].step.ranks.tell_of_updates(self._step.ledger.votes)  # they are all of one step
        for bucket in buckets:
            if bucket.device.type == "cpu" and bucket.done is None:
                # Others are stepped when they are waited for, by the same thread: who waits may be in the middle of
                # tracing, or in inference mode.
                at_once = bucket.step.circumstances.at_any_time or self.gather is not None
                bucket.done = pending.worker.run(bucket.finish) if at_once else None
        for bucket in buckets:  # once all are sent: the side stream waits for those of other ranks
            if bucket.device.type != "cpu" and bucket.mark is None:
                bucket.mark = pending.finished(bucket)
        for bucket in buckets:
            bucket.step.raise_interrupt()


def _with_gradient(parameters: AttachedParameters) -> AttachedParameters:
    if all_there(map(GRADIENT, parameters.tensors())):
        return parameters
    return AttachedParameters(a for a in parameters if a.get().grad is not None)


def _in_flight_of(mine: Iterable[AttachedParameter], buckets: Iterable[InFlightBucket]) -> InFlight:
    """Those of ``mine`` whose gradient may still be on its way."""
    wanted = set(mine)
    return {
        a: bucket for bucket in buckets for a in bucket.parameters if a in wanted and bucket.gradient(a) is not None
    }


def _finds_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _without_landed(in_flight: InFlight, waiting: Mapping[AttachedParameter, bool]) -> InFlight:
    """A bucket with a parameter that cannot wait is waited for now; the others stay in flight."""
    for attached, bucket in list(in_flight.items()):
        if not waiting[attached]:
            bucket.wait_into_grad()
            in_flight = {a: other for a, other in in_flight.items() if other is not bucket}
    return in_flight
