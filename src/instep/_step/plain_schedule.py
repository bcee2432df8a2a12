"""``INSTEP_DISABLE=1``: torch takes every step, and gradients are clipped, and looked at, where ``step()`` begins."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from instep._autograd.engine import graph_task
from instep._autograd.watch import Watch
from instep._gradients.clipping import Clipping
from instep._gradients.finite import Policy, ask_if_finite, nonfinite_error
from instep._gradients.policies import ClipNorm, ClipValue
from instep._gradients.scaling import found_inf, take_off_here
from instep._optim.parameters import AttachedParameter
from instep._optim.plan import Bucket
from instep._optim.stepper import Stepper, remember_settings
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.backward_schedule import Gather, Recorder


class PlainSchedule:
    """The steps of a model that would be attached, as the plain loop takes them.

    Attributes:
        step_count: how many steps were taken: calls of ``optimizer.step()`` with gradients; with several optimizers,
            rounds of them.
        skip_count: how many steps were left out, for a gradient that was not finite.
    """

    redo_count = 0
    state = "disabled"

    def __init__(self, ranks: StepVotes, accumulation: Accumulation, clipping: Clipping, nonfinite: Policy) -> None:
        self.parameters: tuple[AttachedParameter, ...] = ()
        self.step_count = 0
        self.skip_count = 0
        self.recorder: Recorder | None = None
        self.gather: Gather | None = None
        self._ranks = ranks
        self._accumulation = accumulation
        self._clipping = clipping
        self._nonfinite = nonfinite
        self._owing: set[Stepper] = set()  # with gradients of this step, not yet stepped
        self._taken = True
        self._backward: int | None = None
        self._flushing: Stepper | None = None
        self._left_out: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._settings: Callable[[], None] | None = None
        self._watch = Watch(gradient=self._used)

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient. Returns whether this is the first of them in the
        running backward."""
        if self._backward == graph_task():
            return False
        self._backward = graph_task()
        self._accumulation.begin()
        self._put_back()  # of a step() that raised
        self._flushing = None
        self._owing.clear()
        return True

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self._put_back()
        self._flushing = None
        stepper.called()

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update."""
        if self._flushing is stepper:
            return  # a closure that is called more than once
        self._accumulation.require_reduced()
        if stepper not in self._owing:
            self._begin(stepper.optimizer())
        self._flushing = stepper
        if not self._taken:
            self._leave_out(stepper)
        elif isinstance(self._clipping.policy, ClipValue):
            self._clip_values(stepper)

    def _begin(self, optimizer: Optimizer) -> None:
        """The first of the step's optimizers. The plain loop clips the gradients of all of them by their norm before
        it."""
        found = [(a, gradient) for a in self.parameters if (gradient := a.get().grad) is not None]
        if not found:
            self._taken = True
        elif not found_inf(optimizer):  # else the kernel skips its update, of gradients as they are
            self._taken = self._is_taken([(a.spec.name, gradient) for a, gradient in found])
            if isinstance(self._clipping.policy, ClipNorm):
                take_off_here(optimizer, [g for a, g in found if a.stepper.optimizer() is optimizer])
                self._clip([a.get() for a, _ in found])
        self._owing = {a.stepper for a, _ in found}

    def _clip(self, parameters: Sequence[torch.Tensor]) -> None:
        self._clipping.begin()
        self._clipping.compute_total_norm(self.parameters, lambda a: a.get().grad)
        if self._taken:
            self._clipping.clip(parameters)

    def _clip_values(self, stepper: Stepper) -> None:
        """Of this optimizer alone: GradScaler may not have unscaled the others' gradients."""
        optimizer = stepper.optimizer()
        mine = [p for a in self.parameters if a.stepper is stepper and (p := a.get()).grad is not None]
        if mine and not found_inf(optimizer):
            take_off_here(optimizer, [p.grad for p in mine if p.grad is not None])
            self._clipping.clip(mine)

    def _is_taken(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> bool:
        if self._nonfinite == "allow":
            return True
        rank = ask_if_finite(gradients, self._ranks, self.step_count + 1)
        if rank is not None and self._nonfinite == "raise":
            raise nonfinite_error(gradients, rank, "Nothing of the step was applied")
        return rank is None

    def _leave_out(self, stepper: Stepper) -> None:
        """``optimizer.step()`` finds no gradient, and what it writes nevertheless is put back."""
        self._settings = remember_settings(stepper.optimizer())
        for attached in self.parameters:
            parameter = attached.get()
            gradient = parameter.grad
            if attached.stepper is stepper and gradient is not None:
                self._watch.start([parameter])
                self._left_out.append((parameter, gradient))
                parameter.grad = None

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        """Somebody is about to read or replace a ``.grad`` that was taken off: ``step()``, if it still runs."""
        if self._flushing is not None and self._flushing.was_stopped:
            self._put_back()

    def _put_back(self) -> None:
        """Who is interrupted here does it again, at the next use."""
        if self._settings is not None:
            self._settings()
            self._settings = None
        while self._left_out:
            parameter, gradient = self._left_out[-1]
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = gradient
            self._left_out.pop()
            self._watch.stop([parameter])

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` returned."""
        if self._flushing is not stepper:
            return
        self._put_back()
        self._flushing = None
        self._accumulation.stepped()
        if stepper in self._owing:
            self._owing.discard(stepper)
            if not self._owing:
                self.step_count += self._taken
                self.skip_count += not self._taken

    def leave_to_optimizer(self, stepper: Stepper, error: object) -> None: ...

    def end_backward(self) -> None: ...

    def abandon(self) -> None: ...

    def before_forward(self) -> None: ...

    def synchronize(self) -> None: ...

    def require_whole(self) -> None: ...

    def is_applied(self, attached: AttachedParameter) -> bool:
        return False

    def last_complete_step(self) -> int:
        return self.step_count

    def accept(self) -> bool:
        return False

    def rollback(self) -> None:
        """Clear the gradients: nothing of them has been written."""
        self.forget(gradients=True)

    def forget(self, *, gradients: bool) -> None:
        """Begin anew; with ``gradients``, clear all of them."""
        self._put_back()
        for attached in self.parameters:
            if gradients and (parameter := attached.peek()) is not None:
                parameter.grad = None
        self._flushing = None
        self._owing.clear()
        self._accumulation.stepped()

    def before_save(self) -> None: ...

    def before_state(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None:
        self.forget(gradients=False)

    # What the attachment asks.

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        return tuple(buckets)

    def read_by(self, streams: object) -> None: ...

    def crosses(self, flights: object, at_once: object) -> None: ...

    def after_forward(self) -> None: ...

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None: ...

    def begin_on_device(self) -> None: ...

    def let_go_of_backwards(self) -> None: ...
