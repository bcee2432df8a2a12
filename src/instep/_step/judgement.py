"""``undo``, at ``optimizer.step()``: whether a trial is what the plain loop does now, and the gradients that the call
is to find."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from instep._gradients.scaling import LossScale, found_inf, is_power_of_two, kernel_scale, take_off_here
from instep._optim.parameters import AttachedParameter
from instep._optim.stepper import Stepper
from instep._step.agreement import Agreement
from instep._step.kept import KeptGradients
from instep._step.members import gradient_of
from instep._step.rollback import Rollback
from instep._step.running_step import RunningStep
from instep._step.writes import require_settings_as_left
from instep.errors import HyperparameterChangedError, NonFiniteGradientError


class Judgement:
    """
    Args:
        kept: the gradients of parameters that the trial has written.
        rollback: of a trial that is not what the plain loop does.
        scale: the loop's loss scale, if it has one.
        agreement: whether the step is taken.
    """

    def __init__(
        self,
        step: RunningStep,
        kept: KeptGradients,
        rollback: Rollback,
        scale: LossScale | None,
        agreement: Agreement,
    ) -> None:
        self._step = step
        self._kept = kept
        self._rollback = rollback
        self._scale = scale
        self._agreement = agreement
        self._asked_in_vain: set[Stepper] = set()  # that stepped without any gradient: that ends no step

    def real_gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The gradient that the plain loop has in ``.grad``."""
        kept = self._kept.of(attached)
        return gradient_of(attached) if kept is None else kept

    def takes_step(self, stepper: Stepper) -> bool:
        """Whether the step is taken: asked once for all of its optimizers."""
        step = self._step
        if self._agreement.policy == "allow" or found_inf(stepper.optimizer()):
            return True  # the kernel skips its update
        gradients = [(a.spec.name, g) for a in step.members.all if (g := self.real_gradient(a)) is not None]
        if self._asked_in_vain and (gradients or stepper in self._asked_in_vain):
            step.round.takes_step = None  # of a step that was none
            self._asked_in_vain.clear()
        if not gradients:
            self._asked_in_vain.add(stepper)
        if step.round.takes_step is None:
            step.round.takes_step = self._agree(gradients)
        return step.round.takes_step

    def _agree(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> bool:
        step = self._step
        try:
            takes_step = self._agreement.takes_step(step.number, gradients)
        except NonFiniteGradientError:
            self._rollback.if_applied()
            raise
        except Exception as error:
            self._rollback.if_applied()
            step.ledger.tear(step.number, [], [name for name, _ in gradients], error, in_part=bool(gradients))
            self._kept.release(step.members.all)
            self._rollback.stop_watching()
            raise
        if not takes_step:
            self._rollback.if_applied()
            step.passes.clipping.compute_total_norm(step.members.all, gradient_of)
        return takes_step

    def validate(self, stepper: Stepper) -> None:
        """Were the buckets applied as the plain loop would apply them now? If not, they are rolled back. Then gradients
        are what ``step()`` is to find: unscaled, and clipped."""
        members, clipping = self._step.members, self._step.passes.clipping
        optimizer = stepper.optimizer()
        scaled = kernel_scale(optimizer)
        applied = members.applied_by(stepper)
        if applied and not self._is_right(stepper, applied):
            self._rollback()
        if found_inf(optimizer):
            if members.applied_by(stepper):
                self._rollback()
            return  # the kernel skips its update, of gradients as they are
        if scaled is not None and (clipping.policy is not None or members.applied_by(stepper)):
            take_off_here(optimizer, [g for a in members.of(stepper) if (g := self.real_gradient(a)) is not None])
        with torch._C.DisableTorchFunctionSubclass():
            for attached, gradient in self._kept.pairs(members.applied_by(stepper)):
                attached.get().grad = gradient
        if clipping.policy is None:
            return
        if clipping.mode is None:
            clipping.clip([a.get() for a in members.of(stepper) if gradient_of(a) is not None])
        elif clipping.total is None:
            self._clip_by_norm()

    def _is_right(self, stepper: Stepper, applied: Sequence[AttachedParameter]) -> bool:
        try:
            require_settings_as_left(stepper)
        except HyperparameterChangedError:
            return False  # the rollback tells a changed group, which is right then, from written state
        unscaled = self._scale is not None and self._scale.taken_off
        return self._kept.are_as_left(applied, unscaled=unscaled) and self._scale_was_taken_off(stepper.optimizer())

    def _scale_was_taken_off(self, optimizer: Optimizer) -> bool:
        """Whether the plain loop's gradients are without the loss scale by now, or in its optimizer's kernel."""
        if self._scale is None or self._scale.taken_off:
            return True
        scale = kernel_scale(optimizer)
        return scale is not None and is_power_of_two(scale) and self._scale.is_inverse_of(scale)

    def _clip_by_norm(self) -> None:
        members, clipping = self._step.members, self._step.passes.clipping
        try:
            clipping.compute_total_norm(members.all, self.real_gradient)
        except RuntimeError:
            self._rollback.if_applied()
            raise
        if clipping.scales_down():
            self._rollback.if_applied()
            clipping.clip([a.get() for a in members.all if gradient_of(a) is not None])

    def forget(self) -> None:
        """The step is over."""
        self._asked_in_vain.clear()
