"""The schedule that leaves every step to torch: with ``INSTEP_DISABLE=1``, and where nobody else can take the steps.

Gradients are clipped, and looked at, where ``optimizer.step()`` begins.
"""

import torch
from torch.optim import Optimizer

from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import found_inf, take_off_here
from instep._optim.stepper import Stepper
from instep._step.schedule import Schedule
from instep._step.state import Event
from instep._step.step import RunningStep, finds_gradient
from instep._step.step_calls import StepCalls
from instep._torch.watch import Watch
from instep.errors import InstepError


class PlainCalls(StepCalls):
    """torch takes the whole step. With ``INSTEP_DISABLE=1`` gradients are clipped, and looked at, where it begins.

    Attributes:
        why: nobody but torch can take these steps, and they may be of other parameters than those that are known;
            ``None``: nobody else is to.
    """

    def __init__(self, step: RunningStep, why: str | None) -> None:
        super().__init__(step)
        self.why = why
        self._called: set[Stepper] = set()  # of a model that is left to torch, since the last backward
        self._watch = Watch(gradient=self._used)

    def drop_round(self) -> None:
        """A backward begins, or the step is given up: no optimizer owes anything any more."""
        self._restore()  # of a step() that raised
        self._step.round.stepper = None
        self._step.round.steppers_left.clear()
        self._called.clear()
        self._step.ledger.happened(Event.DROPPED)

    def _prepare(self, stepper: Stepper) -> None:
        round_, clipping = self._step.round, self._step.passes.clipping
        if self.why is not None:
            self._begin_left_to_torch(stepper)
            round_.begins(stepper, self._step.ledger)
            return
        self._step.accumulation.require_reduced()
        if stepper not in round_.steppers_left:
            self._begin(stepper.optimizer())
        round_.begins(stepper, self._step.ledger)
        if round_.takes_step is False:
            self._leave_out(stepper)
        elif isinstance(clipping.policy, ClipValue):
            self._clip_values(stepper)

    def _begin_left_to_torch(self, stepper: Stepper) -> None:
        """The optimizer may step other parameters than those that are known. Optimizers that are called one after the
        other take one step, until there is a backward, or one of them is called again."""
        if stepper in self._called:
            self._called.clear()
        is_first = not self._called and finds_gradient(stepper.optimizer())
        self._called.add(stepper)
        self._step.round.steppers_left = {stepper} if is_first else set()

    def _begin(self, optimizer: Optimizer) -> None:
        """The first of the step's optimizers. The plain loop clips the gradients of all of them by their norm before
        it."""
        step, clipping = self._step, self._step.passes.clipping
        pairs = [(a, gradient) for a in step.members.all if (gradient := a.get().grad) is not None]
        if not pairs:
            step.round.takes_step = True
        elif not found_inf(optimizer):  # else the kernel skips its update, of gradients as they are
            named = [(a.spec.name, gradient) for a, gradient in pairs]
            step.round.takes_step = step.ledger.takes_step(named)
            if isinstance(clipping.policy, ClipNorm):
                take_off_here(optimizer, [g for a, g in pairs if a.stepper.optimizer() is optimizer])
                clipping.begin()
                clipping.compute_total_norm(step.members.all, lambda a: a.get().grad)
                if step.round.takes_step is not False:
                    clipping.clip([a.get() for a, _ in pairs])
        step.round.steppers_left = {a.stepper for a, _ in pairs}

    def _clip_values(self, stepper: Stepper) -> None:
        """Of this optimizer alone: GradScaler may not have unscaled the others' gradients."""
        optimizer = stepper.optimizer()
        parameters = [p for a in self._step.members.of(stepper) if (p := a.get()).grad is not None]
        if parameters and not found_inf(optimizer):
            take_off_here(optimizer, [p.grad for p in parameters if p.grad is not None])
            self._step.passes.clipping.clip(parameters)

    def _leave_out(self, stepper: Stepper) -> None:
        """``optimizer.step()`` finds no gradient, and what it writes nevertheless is put back."""
        self._step.round.leave_out(stepper)
        gradients = [(a, g) for a in self._step.members.of(stepper) if (g := a.get().grad) is not None]
        self._watch.start(a.get() for a, _ in gradients)
        self._step.round.hide(gradients)

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        """A ``.grad`` that was taken off is about to be read or replaced: by ``step()``, if it still runs."""
        if self._step.round.was_stopped:
            self._restore()

    def _restore(self) -> None:
        round_ = self._step.round
        round_.restore_settings()
        hidden = [parameter for attached, _ in round_.hidden if (parameter := attached.peek()) is not None]
        round_.show()
        self._watch.stop(hidden)

    def _settle(self, stepper: Stepper) -> None:
        self._restore()

    def _end_raised(self, stepper: Stepper) -> None:
        self._restore()
        self._step.round.stepper = None
        self._step.ledger.happened(Event.DROPPED)


class PlainSchedule(Schedule):
    """The steps of a model that would be attached, as the plain loop takes them.

    Args:
        why: nobody but torch can take them; ``None``: nobody else is to.
        takes_any_loop: whether nothing is asked for that needs knowledge of the loop.
    """

    def __init__(
        self,
        step: RunningStep,
        why: str | None = None,
        *,
        takes_any_loop: bool = False,
    ) -> None:
        super().__init__(step)
        self._takes_any_loop = takes_any_loop
        self.calls: PlainCalls = PlainCalls(step, why)

    @property
    def state(self) -> str:
        return "disabled" if self.calls.why is None else "idle"

    @property
    def deferral(self) -> str | None:
        return None if self.calls.why is None else f"taken at once ({self.calls.why})"

    @property
    def follows(self) -> bool:
        """Only with ``INSTEP_DISABLE=1``, where gradients may be clipped and looked at: what is left to torch needs no
        knowledge of parameters."""
        return self.calls.why is None

    def lost(self, error: InstepError) -> None:
        """The loop does what nobody but torch can follow: from now on nobody does."""
        try:
            if not self._takes_any_loop:
                raise error
            self.calls.why = str(error)
        finally:
            del error  # or it would refer to itself, by way of this frame

    def begin_backward(self) -> bool:
        if not self.backwards.is_new():
            return False
        self._step.accumulation.begin()
        self.calls.drop_round()
        if not self._step.accumulation.next_only_adds:
            self.begin_final_backward()
        return True

    def end_micro_batches(self) -> None:
        self.calls.drop_round()
        self.begin_final_backward()

    def give_up(self, *, gradients: bool) -> None:
        """Begin anew; with ``gradients``, clear all of them."""
        self.calls.drop_round()
        for parameter in self._step.members.living() if gradients else ():
            parameter.grad = None
        self._step.accumulation.stepped()

    def close(self) -> None:
        self.give_up(gradients=False)
