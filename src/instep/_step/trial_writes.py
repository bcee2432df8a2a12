"""``undo``: an update in backward is a trial. Parameters and state are copied before, and rolled back where the plain
loop turns out to do otherwise; ``optimizer.step()`` then does the step as the plain loop does."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from instep._autograd.placeholders import UNSCALE, HeldGradient
from instep._autograd.watch import GET_GRAD, Watch
from instep._gradients.scaling import LossScale
from instep._life.life import owe
from instep._life.weak import WeakMethod
from instep._optim.kinds import is_torchs_own
from instep._optim.lending import Lent
from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.stepper import Stepper
from instep._optim.undo import Undo
from instep._step.agreement import Agreement
from instep._step.judgement import Judgement
from instep._step.kept import KeptGradients
from instep._step.members import gradient_of
from instep._step.rollback import Owner, Rollback
from instep._step.running_step import RunningStep
from instep._step.states import Event
from instep._step.writes import Writes
from instep.errors import (
    InstepError,
    UnsupportedOptimizerError,
)


class TrialWrites(Writes):
    """
    Args:
        copies: of parameters and state, from before the step.
        scale: the loop's loss scale, if it has one.
        agreement: whether the step is taken.
        owner: held weakly, for it has this.
    """

    frees_gradients = False

    def __init__(
        self, step: RunningStep, copies: Undo, scale: LossScale | None, agreement: Agreement, owner: Owner
    ) -> None:
        super().__init__(step)
        self._scale = scale
        self._owner = weakref.ref(owner)
        self._kept = KeptGradients()
        self._watch = Watch(values=self._used, gradient=self._used)
        # Gradients that the running step() does not find are missed by nobody else, either.
        self._watch_in_step = Watch(values=self._used_in_step, gradient=self._used_in_step)
        self._when_used = WeakMethod(self._used_gradient)
        watches = self._watch, self._watch_in_step
        self._rollback = Rollback(step, copies, self._kept, watches, self._owner)
        self._judgement = Judgement(step, self._kept, self._rollback, scale, agreement)
        self._raises = False  # whether the update has raised on trial

    # In backward.

    def before_backward(self) -> None:
        self._rollback.if_applied()
        if self._step.passes.running is None and not self._step.members.applied:
            self._step.passes.clipping.begin()  # more gradients: what was measured of the step so far is not all

    def begin(self) -> None:
        self._rollback.step_begins()
        if self._scale is not None:
            self._scale.begin()

    def second_gradient(self, attached: AttachedParameter) -> InstepError | None:
        self._rollback.if_applied()
        return None

    def may_write(self, *, seen: bool) -> bool:
        """Not in a backward that nobody has seen to begin, either: another one may follow that goes through the same
        weights, and comes to them unseen."""
        return seen and not self._step.ledger.redoes

    def update(
        self,
        bucket: AttachedParameters,
        parameters: Sequence[torch.Tensor],
        gradients: list[torch.Tensor],
        *,
        final: bool,
    ) -> bool:
        if self._scale is not None and not all(map(_can_be_unscaled, parameters)):
            self._rollback()
            return False
        made = self._made_of(gradients)
        if made is not gradients:
            for parameter, gradient in zip(parameters, made, strict=True):
                parameter.grad = gradient
        passes = self._step.passes
        # On an accelerator the norm of another tensor than that in .grad, with the same values, may differ in the last
        # bit.
        if final and passes.running is None:
            passes.clipping.measure(bucket, made)
        passes.clipping.clip(parameters)
        lent = self._lend(bucket, parameters, made)
        try:
            given = [lent[a].given if a in lent else gradient for a, gradient in zip(bucket, made, strict=True)]
            for stepper in bucket.steppers:
                self._try(stepper, bucket, given)
        finally:
            self._let_go_of_memory(parameters[0].device)
            for attached, one in lent.items():
                if (outcome := one.outcome()) is not None:
                    self._kept.written(attached, outcome)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        return True

    def _made_of(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """What is applied, unscaled, and to be clipped. The plain loop's gradients stay untouched where it may turn out
        that ``optimizer.step()`` needs them."""
        if self._scale is not None:
            return self._scale.unscaled(gradients)
        clipping = self._step.passes.clipping
        if clipping.mode is None and clipping.policy is not None:
            return [gradient.clone() for gradient in gradients]
        return gradients

    def _lend(
        self, bucket: Sequence[AttachedParameter], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> dict[AttachedParameter, Lent]:
        """On trial an update must leave the plain loop's gradients alone. torch's own optimizers do."""
        return {
            attached: Lent(parameter, gradient)
            for attached, parameter, gradient in zip(bucket, parameters, gradients, strict=True)
            if not is_torchs_own(attached.stepper.optimizer())
        }

    def _try(self, stepper: Stepper, bucket: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        """Step those of one optimizer, after copies were taken."""
        own = [a.get() for a in bucket if a.stepper is stepper]
        elsewhere = stepper.look_elsewhere(own)
        self._rollback.copies.save([*own, *stepper.reached()], stepper.optimizer())
        self._call(stepper, bucket, gradients)
        stepper.require_all_in_state(elsewhere)

    def takes_back(self, error: Exception) -> bool:
        """The step is left to ``optimizer.step()``, which steps all of it together: the plain loop's raises there, if
        at all, and in a step that the plain loop leaves out nobody hears of an error."""
        if not self.begun or any(stepper.wrote_in_place for stepper in self._step.members.steppers):
            return False
        self._rollback()
        self._raises = not isinstance(error, UnsupportedOptimizerError)  # which is not step()'s own
        return True

    def updated(self, bucket: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        if (owner := self._owner()) is not None:
            owe(owner)  # gradients stay until the step is committed: nobody need hold them

    def retire(self, bucket: AttachedParameters) -> None:
        for attached in filter(self._step.members.is_applied, bucket):
            parameter = attached.get()
            gradient = parameter.grad
            assert gradient is not None
            self._kept.keep(attached, gradient)
            if self._scale is not None:
                parameter.grad = HeldGradient(gradient, self._when_used)
            self._watch.start([parameter])

    def stopped(self, cause: BaseException | None, begun: Sequence[str] = ()) -> None:
        if self._step.members.applied or begun:
            self._rollback()

    # Between backward and step().

    def before_forward(self) -> None:
        self._rollback.if_applied()

    def before_state(self, stepper: Stepper) -> None:
        self._rollback()

    def before_load(self, model: str) -> None:
        """The first weight that is written puts the step back."""

    def real_gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        return self._judgement.real_gradient(attached)

    def rollback_if_any(self) -> None:
        self._step.backwards.let_go()
        if self._rollback.copies.devices or self._rollback.has_begun:
            self._rollback()

    def finish_rollback(self) -> None:
        if self._rollback.has_begun:
            self._rollback()

    def settle(self) -> None:
        """A step on trial is not the plain loop's."""
        owner = self._owner()
        if self._step.ledger.torn is not None or owner is None:
            return
        stepper = self._step.round.stepper
        if stepper is not None and stepper.was_stopped:
            owner.require_whole()
        self._rollback.if_applied()

    def release(self) -> None:
        """Held gradients are the real ones again, too."""
        self._kept.release(self._step.members.all)
        self._rollback.stop_watching()

    def _used(self, parameter: torch.Tensor, func: Any) -> None:
        """An applied parameter, or its gradient, is about to be read or written."""
        self._step.backwards.let_go()
        if self._step.ledger.torn is not None:
            return  # there to be read
        if func == GET_GRAD and self._scale is not None and not self._scale.taken_off:
            return  # may be GradScaler: the gradient that is held says what is done with it
        self._rollback()

    def _used_in_step(self, parameter: torch.Tensor, func: Any) -> None:
        """``step()`` itself, if it still runs."""
        if self._step.round.was_stopped and (owner := self._owner()) is not None:
            owner.end_stopped()

    def _used_gradient(self, operation: str, args: Sequence[Any]) -> None:
        """A gradient is about to be used that stands in for a kept one."""
        assert self._scale is not None
        if operation == UNSCALE and self._kept and self._scale.take_off(args[2]):
            return
        self._rollback.if_applied()

    # step() of an optimizer.

    def leave_to_optimizer(self, error: InstepError) -> None:
        self._rollback()

    def before_step(self, stepper: Stepper, left: AttachedParameters) -> None:
        step = self._step
        step.round.begins(stepper, step.ledger)
        rest: list[AttachedParameter] = []
        try:
            self._watch_in_step.take_from(self._watch, (a.get() for a in step.members.applied_by(stepper)))
            taken = self._judgement.takes_step(stepper)
            if taken:
                self._judgement.validate(stepper)
                rest = self._prepare(stepper, step.members.left_by(stepper))
            else:
                step.round.leave_out(stepper)
                self._hide([(a, g) for a in step.members.of(stepper) if (g := gradient_of(a)) is not None])
        except Exception:
            self._watch.take_from(self._watch_in_step, (a.get() for a in step.members.applied_by(stepper)))
            step.round.is_refused(step.ledger)
            raise
        if taken:  # what raises here has written, as step() itself may
            applied = step.members.applied_by(stepper)
            self._step_rest(stepper, rest)
            self._hide(self._kept.pairs(applied))
            self._leave_alone(stepper, applied)

    def _prepare(self, stepper: Stepper, left: Sequence[AttachedParameter]) -> list[AttachedParameter]:
        """Nothing was written since backward, and what is about to be written can be put back. Returns what ``step()``
        cannot step."""
        step = self._step
        applied = step.members.applied_by(stepper)
        try:
            self._require_as_left(stepper, applied)
        except InstepError as error:
            self.tear(error)
            raise
        if step.check is not None and applied:
            self._keep_for_check(step.check, stepper)
            if (difference := step.check.error(stepper, step.number, applied, groups=False)) is not None:
                try:
                    self._rollback()  # now, while it can be
                    raise difference
                finally:
                    del difference  # or it would refer to itself, by way of this frame
        rest = self._rest_of(stepper, left)
        self._save_rest(stepper, left)
        return rest

    def _save_rest(self, stepper: Stepper, left: Sequence[AttachedParameter]) -> None:
        """What ``step()`` is about to write is rolled back too, if an error or Ctrl-C stops it half way."""
        if self._raises:
            return  # again, most likely: what it then leaves is the plain loop's
        if not is_torchs_own(stepper.optimizer()):
            self._step.round.remember_settings(stepper)
        # On the stream that step() will write on.
        self._rollback.copies.save([a.get() for a in left if gradient_of(a) is not None], stepper.optimizer())

    def _hide(self, gradients: Sequence[tuple[AttachedParameter, torch.Tensor]]) -> None:
        self._watch_in_step.start(attached.get() for attached, _ in gradients)
        super()._hide(gradients)

    def step_stopped(self, stepper: Stepper) -> None:
        """Who is interrupted here does it again."""
        step = self._step
        try:
            step.round.is_ending = True
            step.round.show(where_none=True)
            step.round.restore_settings(stopped=True)
            if self._rollback.copies.devices:
                self._rollback()
            self.release()
            step.passes.clipping.begin()  # what was clipped is what is measured, and clipped, if step() is called again
            step.ledger.happened(Event.STEP_STOPPED)
            step.round.takes_step = None
            step.round.is_gone()
        finally:
            step.round.is_ending = False

    def committed(self, stepper: Stepper, applied: AttachedParameters) -> None:
        members = self._step.members
        self._rollback.copies.forget(attached.get() for attached in members.of(stepper))
        for attached in applied:
            left = self._kept.after_step(attached)
            with torch._C.DisableTorchFunctionSubclass():
                attached.get().grad = left
            members.applied.discard(attached.spec.index)
            self._kept.forget(attached)
        self._watch_in_step.stop(attached.get() for attached in members.of(stepper))

    def forget(self) -> None:
        super().forget()
        self._kept.forget_all()
        self._judgement.forget()
        self._raises = False
        self._rollback.forget()


def _can_be_unscaled(parameter: torch.Tensor) -> bool:
    # GradScaler refuses half-precision gradients, and coalesces sparse ones first: left to it, and the plain step.
    gradient = parameter.grad
    return gradient is not None and not gradient.is_sparse and gradient.dtype != torch.float16
