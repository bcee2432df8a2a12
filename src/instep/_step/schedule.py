"""When buckets are stepped, as seen from outside; and the schedule that leaves every step to torch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from instep._gradients.clipping import ClipNorm, Clipping, ClipValue
from instep._gradients.scaling import Policy, found_inf, take_off_here
from instep._optim.memory import Owners
from instep._optim.parameters import AttachedParameter, Bucket
from instep._optim.random_numbers import KeyedDraws
from instep._optim.stepper import Stepper
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.deferral import Gains
from instep._step.deferred_buckets import InFlightBucket
from instep._step.norms import Losses
from instep._step.state import Recorder, StepMembers, StepTimes
from instep._step.step import Agreement, HoldsStep, RunningStep
from instep._step.writes import Gather
from instep._torch.engine import graph_task
from instep._torch.watch import Watch
from instep.errors import InstepError

# When buckets are stepped, as seen from outside: the attachment holds one schedule.


class Schedule(Protocol):
    """One attachment's steps: ``BackwardSchedule``, ``ForwardSchedule`` or ``PlainSchedule``.

    Attributes:
        parameters: those that are attached, in the model's order.
        step_count: how many committed steps wrote anything.
        recorder: told of each bucket's step and communication; ``None`` when nobody listens.
        gather: with ``shard_state``: exchanges the shards that the ranks have stepped.
    """

    parameters: tuple[AttachedParameter, ...]
    step_count: int
    recorder: Recorder | None
    gather: Gather | None

    @property
    def redo_count(self) -> int:
        """The user asks how many steps were put back."""

    @property
    def skip_count(self) -> int:
        """The user asks how many steps were left out."""

    @property
    def times(self) -> StepTimes:
        """The user asks, and ``optimizer.step()`` tells, how long steps take the loop."""

    @property
    def freed_bytes(self) -> int:
        """The user asks how many bytes of gradients backward has freed before ``optimizer.step()``."""

    @property
    def state(self) -> str:
        """Hooks and checkpoints ask: ``"idle"``, ``"open"``, ``"pending"``, ``"torn"``, ``"disabled"``."""

    @property
    def follows(self) -> bool:
        """Whether it must know of parameters that are replaced or added, and of threads. Where ``step()`` does what the
        plain loop does, it need not."""

    @property
    def deferral(self) -> str | None:
        """Whether steps are put off, and why; ``None``: that is not the question."""

    @property
    def gains(self) -> Gains | None:
        """What the loop could gain by another schedule, as far as its steps show."""

    def lost(self, error: InstepError) -> None:
        """The loop does what the schedule cannot follow: raise ``error``, or leave all further steps to torch."""

    def stop(self, error: InstepError) -> None:
        """The backward that has just ended did not compute the plain loop's step: ``error`` says why, and is raised."""

    # What torch's hooks call.

    def before_forward(self) -> None:
        """The model's forward is about to run."""

    def after_forward(self) -> None:
        """The model's forward has returned."""

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters."""

    def begin_on_device(self) -> None:
        """A backward has come to an output of the model, before ``begin_backward``."""

    def begin_backward(self) -> bool:
        """The same; ``True`` for the first output of each backward."""

    def end_backward(self) -> None:
        """The backward has ended, or raised."""

    def backward_failed(self) -> None:
        """The backward that ``begin_backward`` told of has raised."""

    def let_go_of_backwards(self) -> None:
        """FSDP's state is about to be rebuilt: return once a backward that raised has ended on every device."""

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        """This ``optimizer.step()`` computes otherwise than a bucket's step: ``error`` says how."""

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update, after its closure."""

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to return."""

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """``state_dict()`` or ``load_state_dict()`` of the optimizer is called."""

    def before_save(self) -> None:
        """``state_dict()`` of the model is called."""

    def before_load(self, model: str) -> None:
        """``load_state_dict()`` of the model, of this class, is called."""

    # What the user's verbs, checkpoints and recordings call.

    def backward(self, loss: Losses, gradient: torch.Tensor | None, adopt: Callable[[], None]) -> None:
        """``torch.autograd.backward(loss, gradient)``; twice, if the norm is measured in a backward of its own.
        ``adopt`` takes in the parameters that were added to an optimizer since the forward: these are measured too."""

    @property
    def draws(self) -> KeyedDraws | None:
        """With ``random="keyed"``: what updates draw from."""

    def draw_by(self, seed: int) -> None:
        """From now on each update draws by its key, with this seed."""

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan, given those of the sources."""

    def synchronize(self) -> None:
        """Wait until parameters hold what the steps so far have written."""

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was applied in part."""

    def last_complete_step(self) -> int | None:
        """The number of the last step, if all of it was applied on this rank."""

    def rollback(self) -> None:
        """Go back to where the last ``optimizer.step()`` left everything."""

    def accept(self) -> bool:
        """Take a torn step as it is; ``False``: there is none."""

    def forget(self, *, gradients: bool) -> None:
        """Give up a step that is open or torn; with ``gradients``, clear all of them."""

    def abandon(self) -> None:
        """The optimizers are gone."""

    def close(self) -> None:
        """The attachment is detached."""

    # What the attachment says once, when it is built, and when its model is gone.

    def read_by(self, streams: Callable[[], Iterable[torch.Stream]]) -> None:
        """FSDP2 reads shards on these streams."""

    def divides(self, owners_in_views: Owners) -> None:
        """Under DDP and ``replicate``: gradients may be views of buckets, whose memory has so many owners."""

    def crosses(self, in_flight: Callable[[], Sequence[InFlightBucket]], at_once: Callable[[], bool]) -> None:
        """With ``cross_iteration``: the buckets in flight, and whether nothing is to be put off."""


# ``INSTEP_DISABLE=1``: torch takes every step, and gradients are clipped, and looked at, where ``step()`` begins.
# So it is where nobody but torch can take the steps of a model.


class PlainSchedule(HoldsStep):
    """The steps of a model that would be attached, as the plain loop takes them.

    Args:
        why: nobody but torch can take them; ``None``: nobody else is to.
        takes_any_loop: whether nothing is asked for that needs knowledge of the loop.
    """

    def __init__(
        self,
        steppers: Sequence[Stepper],
        votes: StepVotes,
        accumulation: Accumulation,
        clipping: Clipping,
        nonfinite: Policy,
        why: str | None = None,
        *,
        takes_any_loop: bool = False,
    ) -> None:
        self._why = why
        self._takes_any_loop = takes_any_loop
        self.recorder: Recorder | None = None
        self.gather: Gather | None = None
        self._step = RunningStep(StepMembers(steppers), votes, accumulation, clipping, check=None)
        self._agreement = Agreement(nonfinite, votes)
        self._backward: int | None = None
        self._called: set[Stepper] = set()  # of a model that is left to torch, since the last backward
        self._watch = Watch(gradient=self._used)

    @property
    def state(self) -> str:
        return "disabled" if self._why is None else "idle"

    @property
    def deferral(self) -> str | None:
        return None if self._why is None else f"taken at once ({self._why})"

    @property
    def follows(self) -> bool:
        """Only with ``INSTEP_DISABLE=1``, where gradients may be clipped and looked at: what is left to torch needs no
        knowledge of parameters."""
        return self._why is None

    def lost(self, error: InstepError) -> None:
        """The loop does what nobody but torch can follow: from now on nobody does."""
        try:
            if not self._takes_any_loop:
                raise error
            self._why = str(error)
        finally:
            del error  # or it would refer to itself, by way of this frame

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient. Returns whether this is the first of them in the
        running backward."""
        if self._backward == graph_task():
            return False
        self._backward = graph_task()
        self._step.accumulation.begin()
        self._restore()  # of a step() that raised
        self._step.round.stepper = None
        self._step.round.owing.clear()
        self._called.clear()
        if not self._step.accumulation.holds_next:
            self._step.ledger.votes.begin_backward(self._step.ledger.step_count)
        return True

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self._restore()
        self._step.round.stepper = None
        stepper.called()

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update."""
        round_, clipping = self._step.round, self._step.passes.clipping
        if round_.stepper is stepper:
            return  # a closure that is called more than once
        if not self.follows:
            self._begin_left_to_torch(stepper)
            return
        self._step.accumulation.require_reduced()
        if stepper not in round_.owing:
            self._begin(stepper.optimizer())
        round_.stepper = stepper
        if round_.takes_step is False:
            self._leave_out(stepper)
        elif isinstance(clipping.policy, ClipValue):
            self._clip_values(stepper)

    def _begin_left_to_torch(self, stepper: Stepper) -> None:
        """The optimizer may step other parameters than those that are known. Optimizers that are called one after the
        other take one step, until there is a backward, or one of them is called again."""
        if stepper in self._called:
            self._called.clear()
        parameters = (p for group in stepper.optimizer().param_groups for p in group["params"])
        is_first = not self._called and any(p.grad is not None for p in parameters)
        self._called.add(stepper)
        self._step.round.owing = {stepper} if is_first else set()
        self._step.round.stepper = stepper

    def _begin(self, optimizer: Optimizer) -> None:
        """The first of the step's optimizers. The plain loop clips the gradients of all of them by their norm before
        it."""
        step = self._step
        found = [(a, gradient) for a in step.members.all if (gradient := a.get().grad) is not None]
        if not found:
            step.round.takes_step = True
        elif not found_inf(optimizer):  # else the kernel skips its update, of gradients as they are
            named = [(a.spec.name, gradient) for a, gradient in found]
            step.round.takes_step = self._agreement.takes_step(step.number, named)
            if isinstance(step.passes.clipping.policy, ClipNorm):
                take_off_here(optimizer, [g for a, g in found if a.stepper.optimizer() is optimizer])
                self._clip([a.get() for a, _ in found])
        step.round.owing = {a.stepper for a, _ in found}

    def _clip(self, parameters: Sequence[torch.Tensor]) -> None:
        clipping = self._step.passes.clipping
        clipping.begin()
        clipping.compute_total_norm(self._step.members.all, lambda a: a.get().grad)
        if self._step.round.takes_step is not False:
            clipping.clip(parameters)

    def _clip_values(self, stepper: Stepper) -> None:
        """Of this optimizer alone: GradScaler may not have unscaled the others' gradients."""
        optimizer = stepper.optimizer()
        mine = [p for a in self._step.members.of(stepper) if (p := a.get()).grad is not None]
        if mine and not found_inf(optimizer):
            take_off_here(optimizer, [p.grad for p in mine if p.grad is not None])
            self._step.passes.clipping.clip(mine)

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
        """Who is interrupted here does it again, at the next use."""
        round_ = self._step.round
        round_.restore_settings()
        hidden = [parameter for attached, _ in round_.hidden if (parameter := attached.peek()) is not None]
        round_.show()
        self._watch.stop(hidden)

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` returned."""
        step = self._step
        if step.round.stepper is not stepper:
            return
        self._restore()
        step.round.stepper = None
        step.accumulation.stepped()
        if stepper in step.round.owing:
            step.round.owing.discard(stepper)
            if not step.round.owing:
                left_out = step.round.takes_step is False
                step.ledger.step_count += not left_out
                step.times.step_returns()
                step.times.committed()
                step.ledger.skip_count += left_out

    def leave_to_optimizer(self, stepper: Stepper, error: object) -> None: ...

    def end_backward(self) -> None: ...

    def abandon(self) -> None: ...

    def before_forward(self) -> None: ...

    def synchronize(self) -> None: ...

    def require_whole(self) -> None: ...

    def is_applied(self, attached: AttachedParameter) -> bool:
        return False

    def last_complete_step(self) -> int:
        return self._step.ledger.step_count

    def accept(self) -> bool:
        return False

    def rollback(self) -> None:
        """Clear the gradients: nothing of them has been written."""
        self.forget(gradients=True)

    def forget(self, *, gradients: bool) -> None:
        """Begin anew; with ``gradients``, clear all of them."""
        self._restore()
        for parameter in self._step.members.living() if gradients else ():
            parameter.grad = None
        self._step.round.stepper = None
        self._step.round.owing.clear()
        self._step.accumulation.stepped()

    def before_save(self) -> None: ...

    def before_state(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None:
        self.forget(gradients=False)

    # What the attachment asks.

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        return tuple(buckets)

    def read_by(self, streams: object) -> None: ...

    def crosses(self, in_flight: object, at_once: object) -> None: ...

    def after_forward(self) -> None: ...

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None: ...

    def begin_on_device(self) -> None: ...

    def let_go_of_backwards(self) -> None: ...
