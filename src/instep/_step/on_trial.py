"""``undo``: an update in backward is a trial, which ``optimizer.step()`` lets stand, or puts back and takes anew."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from instep._gradients.scaling import LossScale, found_inf, is_power_of_two, kernel_scale, take_off_here, tells_kernel
from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.stepper import Stepper
from instep._optim.undo import LentGradient, Undo, UndoCopies
from instep._step.remedies import WRITE_LATER
from instep._step.schedule import Schedule
from instep._step.state import Event, gradient_of
from instep._step.step import RunningStep
from instep._step.writes import Writes, require_settings_as_left
from instep._torch.engine import profiled
from instep._torch.lifetime import WeakMethod, owe, settled
from instep._torch.placeholders import UNSCALE, HeldGradient
from instep._torch.versions import version_of, versions_of
from instep._torch.watch import GET_GRAD, Watch
from instep.errors import (
    HyperparameterChangedError,
    InstepError,
    NonFiniteGradientError,
    UncommittedStepError,
    UnsupportedOptimizerError,
)


class KeptGradients:
    """The gradients of parameters that a trial has written, each with its version when it was kept. The plain loop
    still has them until ``optimizer.step()``, and they are what the step is done again with.

    Attributes:
        outcomes: what updates have made of those that they were lent, and have written.
    """

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}
        self.outcomes: dict[int, LentGradient] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients)

    def keep(self, attached: AttachedParameter, gradient: torch.Tensor) -> None:
        self._gradients[attached.spec.index] = gradient, version_of(gradient)

    def of(self, attached: AttachedParameter) -> torch.Tensor | None:
        kept = self._gradients.get(attached.spec.index)
        return None if kept is None else kept[0]

    def pairs(self, applied: Iterable[AttachedParameter]) -> list[tuple[AttachedParameter, torch.Tensor]]:
        return [(attached, self._gradients[attached.spec.index][0]) for attached in applied]

    def are_as_left(self, applied: Sequence[AttachedParameter], *, unscaled: bool) -> bool:
        """Whether nobody has changed one of them through another reference to it.

        Args:
            unscaled: whether the loss scale was taken off, through the gradients that stand in their places, which
                autograd does not count.
        """
        return all(
            version_of(gradient) in (version, version + unscaled)
            for gradient, version in (self._gradients[attached.spec.index] for attached in applied)
        )

    def after_step(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The gradient as the plain loop's ``step()`` leaves it."""
        gradient, outcome = self._gradients[attached.spec.index][0], self.outcomes.get(attached.spec.index)
        return gradient if outcome is None else outcome.of(gradient)

    def drop(self, attached: AttachedParameter) -> None:
        self._gradients.pop(attached.spec.index)
        self.outcomes.pop(attached.spec.index, None)

    def put_back(self, members: Iterable[AttachedParameter]) -> None:
        """Put the gradients in the places of those that stand in for them, and forget them."""
        for attached in members:
            parameter = attached.peek()
            kept = self._gradients.get(attached.spec.index)
            if parameter is not None and kept is not None and isinstance(parameter.grad, HeldGradient):
                parameter.grad = kept[0]
        self._gradients.clear()

    def drop_all(self) -> None:
        self._gradients.clear()
        self.outcomes.clear()


class Rollback:
    """Puts a step that was written on trial back: parameters and state are as they were before it.

    Args:
        watches: tell who uses these parameters.
        owner: the schedule, which is kept alive while a trial stands.
    """

    def __init__(
        self,
        step: RunningStep,
        copies: Undo,
        kept: KeptGradients,
        watches: Sequence[Watch],
        owner: "weakref.ref[Schedule]",
    ) -> None:
        self.copies = copies
        self._step = step
        self._kept = kept
        self._watches = tuple(watches)
        self._owner = owner
        self._runs = False  # whether one does: its own writes ask for no other one

    def __call__(self) -> None:
        """Parameters and state are as they were before this step. Its gradients stay, and what is left of it is done
        by ``optimizer.step()``, as in the plain loop.

        Raises:
            UncommittedStepError: a parameter was written meanwhile through another tensor of its memory.
            HyperparameterChangedError: the state was.
        """
        with self._step.lock:
            if self._runs:
                return
            try:
                self._runs = True
                with torch._C.DisableTorchFunctionSubclass(), profiled("rollback"):
                    error = self._restore()
            finally:
                self._runs = False
            try:
                if error is not None:
                    raise error
            finally:
                del error  # or it would refer to itself, by way of this frame

    def if_applied(self) -> None:
        """Where backward has written anything."""
        if self._step.members.applied:
            self()

    def _restore(self) -> InstepError | None:
        step = self._step
        self._kept.put_back(step.members.all)
        living = (
            attached for attached in step.members.all if attached.peek() is not None
        )  # none of a model that is gone
        applied = AttachedParameters(filter(step.members.is_applied, living))
        now, then = versions_of(applied.tensors()), step.members.versions_as_applied(applied)
        overwritten = [a.spec.name for a, version, left in zip(applied, now, then, strict=True) if version != left]
        state_of = next((stepper.name for stepper in step.members.steppers if stepper.state_was_written), None)
        for stepper in step.members.steppers:
            stepper.wait_for_state()
        for device in self.copies.devices:
            # On the side stream, which comes after the trial.
            with step.streams.on(device):
                self.copies.restore(device)
        step.streams.join_all()
        for stepper in step.members.steppers:
            stepper.abort()
        step.members.applied.clear()
        self.settled()
        self._kept.outcomes.clear()
        step.passes.clipping.drop_norms()
        if step.judge is not None:
            step.judge.end_step()
        step.ledger.happened(Event.ROLLED_BACK)
        self.stop_watching()
        step.ledger.redo_count += 1
        return _lost(state_of, overwritten)

    def settled(self) -> None:
        """Nothing stands on trial: nobody need see to it at exit."""
        if (owner := self._owner()) is not None:
            settled(owner)

    def stop_watching(self) -> None:
        parameters = self._step.members.living()
        for watch in self._watches:
            watch.stop(parameters)

    def end_step(self) -> None:
        """The step is over."""
        self.copies.drop_all()
        self.settled()


def _lost(written: str | None, overwritten: Sequence[str]) -> InstepError | None:
    """The error for writes between backward and ``step()``, which the rollback has taken back too."""
    if overwritten:
        return UncommittedStepError(
            f"parameter {overwritten[0]!r} was written between backward() and optimizer.step(), through "
            "another tensor of the same memory, when it held the value of a trial step. The step was put back, "
            f"and the write with it. Write weights after optimizer.step() or before backward(). {WRITE_LATER}"
        )
    if written is not None:
        return HyperparameterChangedError(
            f"the state of {written} was written between backward() and optimizer.step(), but it was that "
            "of a trial step. The step was put back, and the write with it: write state after "
            "optimizer.step() or before backward()"
        )
    return None


class TrialValidation:
    """Decides in ``optimizer.step()`` whether a trial is what the plain loop would do now, and rolls it back if not."""

    def __init__(
        self,
        step: RunningStep,
        kept: KeptGradients,
        rollback: Rollback,
        scale: LossScale | None,
    ) -> None:
        self._step = step
        self._kept = kept
        self._rollback = rollback
        self._scale = scale
        self.asked_in_vain: set[Stepper] = set()  # that stepped without any gradient: that ends no step

    def real_gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The gradient that the plain loop has in ``.grad``."""
        kept = self._kept.of(attached)
        return gradient_of(attached) if kept is None else kept

    def takes_step(self, stepper: Stepper) -> bool:
        """Whether the step is taken: asked once for all of its optimizers."""
        step = self._step
        if step.ledger.nonfinite == "allow" or found_inf(stepper.optimizer()):
            return True  # the kernel skips its update
        gradients = [(a.spec.name, g) for a in step.members.all if (g := self.real_gradient(a)) is not None]
        if self.asked_in_vain and (gradients or stepper in self.asked_in_vain):
            step.round.takes_step = None  # of a step that was none
            self.asked_in_vain.clear()
        if not gradients:
            self.asked_in_vain.add(stepper)
        if step.round.takes_step is None:
            step.round.takes_step = self._agree(gradients)
        return step.round.takes_step

    def _agree(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> bool:
        step = self._step
        try:
            takes_step = step.ledger.takes_step(gradients)
        except NonFiniteGradientError:
            self._rollback.if_applied()
            raise
        except Exception as error:
            self._rollback.if_applied()
            step.ledger.tear(step.number, [], [name for name, _ in gradients], error, in_part=bool(gradients))
            self._kept.put_back(step.members.all)
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
        scale = kernel_scale(optimizer)
        if self._scale is None:
            return scale is None  # nobody has asked for it to be taken off in backward
        if self._scale.taken_off:
            return True
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


class TrialWrites(Writes):
    """Writes of a step with ``undo``. Parameters and state are copied before, and rolled back where the plain loop
    turns out to do otherwise; ``optimizer.step()`` then does the step as the plain loop does.

    Args:
        scale: the loop's loss scale, if it has one.
        owner: held weakly, for it has this.
    """

    frees_gradients = False

    def __init__(self, step: RunningStep, copies: Undo, scale: LossScale | None, owner: Schedule) -> None:
        super().__init__(step)
        for stepper in step.members.steppers:
            stepper.add(UndoCopies(copies))
        self._scale = scale
        self._owner = weakref.ref(owner)
        self._kept = KeptGradients()
        self._watch = Watch(values=self._used, gradient=self._used)
        # While step() runs, these gradients are hidden. If anybody but step() asks for one, step() has been stopped,
        # and is brought to its end first.
        self._watch_in_step = Watch(values=self._used_in_step, gradient=self._used_in_step)
        self._when_used = WeakMethod(self._used_gradient)
        watches = self._watch, self._watch_in_step
        self._rollback = Rollback(step, copies, self._kept, watches, self._owner)
        self._validation = TrialValidation(step, self._kept, self._rollback, scale)
        self._raises = False  # whether the update has raised on trial
        self._scales_in_kernel = False  # which takes the scale off the loop's own gradients, in place

    # In backward.

    def before_backward(self) -> None:
        self._rollback.if_applied()
        if self._step.passes.running is None and not self._step.members.applied:
            self._step.passes.clipping.begin()  # more gradients: what was measured of the step so far is not all

    def begin(self) -> None:
        self._scales_in_kernel = False
        for stepper in self._step.members.steppers:
            self._scales_in_kernel |= tells_kernel(stepper.optimizer())
        if self._scale is not None:
            self._scale.begin()

    def second_gradient(self, attached: AttachedParameter) -> InstepError | None:
        self._rollback.if_applied()
        return None

    def accepts_update(self, *, seen: bool) -> bool:
        """Not in a backward that nobody has seen to begin, either: another one may follow that goes through the same
        weights, and comes to them unseen. Nor after a step that was clipped: this one will be too, most likely, and
        would be put back."""
        return seen and not self._step.ledger.redoes and not self._step.passes.clipping.has_clipped

    def update(
        self,
        bucket: AttachedParameters,
        parameters: Sequence[torch.Tensor],
        gradients: list[torch.Tensor],
        *,
        final: bool,
    ) -> bool:
        if self._scales_in_kernel or (self._scale is not None and not all(map(_can_be_unscaled, parameters))):
            self._rollback()
            return False
        made = self._made_of(gradients)
        # On an accelerator the norm of another tensor than that in .grad, with the same values, may differ in the last
        # bit.
        clipping = self._step.passes.clipping
        if final and self._step.passes.running is None:
            clipping.measure(bucket, made)
            if clipping.will_scale_down(bucket):  # whatever comes after them
                self._rollback()  # now, and not after the updates and copies of the rest
                return False
        if made is not gradients:
            _put_in_grad(parameters, made)
        clipping.clip(parameters)
        lent = self._lend(bucket, parameters, made)
        try:
            given = [lent[a].given if a in lent else gradient for a, gradient in zip(bucket, made, strict=True)]
            self._call(bucket, parameters, given)
        finally:
            self.let_go_of_memory(parameters[0].device)
            for attached, gradient in lent.items():
                if gradient.was_changed():
                    self._kept.outcomes[attached.spec.index] = gradient
            _put_in_grad(parameters, gradients)
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
    ) -> dict[AttachedParameter, LentGradient]:
        """On trial an update must leave the plain loop's gradients alone. torch's own optimizers do."""
        return {
            attached: LentGradient(parameter, gradient)
            for attached, parameter, gradient in zip(bucket, parameters, gradients, strict=True)
            if attached.stepper.is_foreign
        }

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

    def retire(self, bucket: AttachedParameters, applied: Sequence[torch.Tensor] | None = None) -> None:
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
        if self._step.members.applied:  # asked once: another thread may be about to apply some
            self._require_loops_thread("the model was called")
            self._rollback()

    def before_state(self, stepper: Stepper) -> None:
        self._require_loops_thread(f"state_dict() or load_state_dict() of {stepper.name} was called")
        self._rollback()

    def before_load(self, model: str) -> None:
        """The first weight that is written puts the step back."""

    def real_gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        return self._validation.real_gradient(attached)

    def rollback_if_any(self) -> None:
        self._step.backwards.drain_failed()
        if self._rollback.copies.devices:
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

    def stop_watching(self) -> None:
        """Held gradients are the real ones again, too."""
        self._kept.put_back(self._step.members.all)
        self._rollback.stop_watching()

    def _used(self, parameter: torch.Tensor, func: Any) -> None:
        """An applied parameter, or its gradient, is about to be read or written."""
        self._step.backwards.drain_failed()
        if self._step.ledger.torn is not None:
            return  # there to be read
        if func == GET_GRAD and self._scale is not None and not self._scale.taken_off:
            return  # may be GradScaler: the gradient that is held says what is done with it
        self._require_loops_thread(f"parameter {self._step.members.name_of(parameter)!r} was used")
        for stepper in self._step.members.steppers:
            if stepper.own_object is not None:
                stepper.own_object.refuse_use()  # else the bucket that runs would be stepped, and not be put back
        self._rollback()

    def _require_loops_thread(self, what: str) -> None:
        """Raise ``UncommittedStepError`` on any other: it would put weights and state back while the loop's thread goes
        through them, in backward or ``step()``."""
        if not self._step.backwards.is_loops():
            raise UncommittedStepError(
                f"{what} on another thread than the loop's, while a step is on trial (undo): only that thread can put "
                "back the weights that the plain loop would find. Evaluate after optimizer.step(), or a copy of the "
                "model; or attach without schedule='backward'"
            )

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
            taken = self._validation.takes_step(stepper)
            if taken:
                self._validation.validate(stepper)
                rest = self._prepare(stepper, step.members.left_by(stepper))
            else:
                step.round.leave_out(stepper)
                self._hide([(a, g) for a in step.members.of(stepper) if (g := gradient_of(a)) is not None])
        except Exception:
            self._watch.take_from(self._watch_in_step, (a.get() for a in step.members.applied_by(stepper)))
            step.round.refuse(step.ledger)
            raise
        applied = step.members.applied_by(stepper)
        if taken:  # what raises here has written, as step() itself may
            if rest:
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
        step.before_update(stepper, left)
        if step.judge is not None and step.judge.wants_whole(stepper):
            self._rollback()
            left = step.members.left_by(stepper)
        rest = self._rest_of(stepper, left)
        self._save_rest(stepper, left)
        return rest

    def _save_rest(self, stepper: Stepper, left: Sequence[AttachedParameter]) -> None:
        """What ``step()`` is about to write is rolled back too, if an error stops it half way."""
        if self._raises:
            return  # again, most likely: what it then leaves is the plain loop's
        try:
            if stepper.is_foreign:
                self._step.round.remember_settings(stepper)
            # On the stream that step() will write on.
            self._rollback.copies.save([a.get() for a in left if gradient_of(a) is not None], stepper.optimizer())
        except UnsupportedOptimizerError:
            if self._step.members.applied:
                raise
            # Nothing stands on trial, and backward says so. What an error leaves of step() is the plain loop's.

    def _hide(self, gradients: Sequence[tuple[AttachedParameter, torch.Tensor]]) -> None:
        self._watch_in_step.start(attached.get() for attached, _ in gradients)
        super()._hide(gradients)

    def step_stopped(self, stepper: Stepper) -> None:
        step = self._step
        step.round.stepper = None  # first: what is put back here is watched, and none is to be told of it
        step.round.show(where_none=True)
        step.round.restore_settings(stopped=True)
        if self._rollback.copies.devices:
            self._rollback()
        self.stop_watching()
        step.passes.clipping.begin()  # what was clipped is what is measured, and clipped, if step() is called again
        step.ledger.happened(Event.STEP_STOPPED)
        step.round.takes_step = None
        step.round.drop_call()

    def committed(self, stepper: Stepper, applied: AttachedParameters) -> None:
        members = self._step.members
        self._rollback.copies.drop(attached.get() for attached in members.of(stepper))
        for attached in applied:
            left = self._kept.after_step(attached)
            with torch._C.DisableTorchFunctionSubclass():
                attached.get().grad = left
            members.applied.discard(attached.spec.index)
            self._kept.drop(attached)
        self._watch_in_step.stop(attached.get() for attached in members.of(stepper))

    def end_step(self) -> None:
        super().end_step()
        self._kept.drop_all()
        self._validation.asked_in_vain.clear()
        self._raises = False
        self._rollback.end_step()


def _put_in_grad(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _can_be_unscaled(parameter: torch.Tensor) -> bool:
    # GradScaler refuses half-precision gradients, and coalesces sparse ones first: left to it, and the plain step.
    gradient = parameter.grad
    return gradient is not None and not gradient.is_sparse and gradient.dtype != torch.float16
