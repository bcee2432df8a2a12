"""When buckets are stepped: what the attachment, its hooks and its sources ask of a schedule, in the order of an
iteration. ``BackwardSchedule``, ``ForwardSchedule`` and ``PlainSchedule`` say what is theirs."""

from collections.abc import Callable, Iterable, Sequence

import torch

from instep._optim.owners import OwnerCount
from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.stepper import Stepper
from instep._step.deferral import Gains
from instep._step.norms import Losses
from instep._step.step import RunningStep, finds_gradient
from instep._step.step_calls import StepCalls
from instep.buckets import Bucket
from instep.errors import InstepError


class Schedule:
    """One attachment's steps. What a schedule does not define is done as in the plain loop: nothing.

    Attributes:
        calls: those of ``optimizer.step()``, which the hooks around it tell of.
        lock: of the step.
        may_rest: whether nobody else needs to know of forwards and backwards.
        rests: whether nobody needs to any more, and of steps no more than that they come.
    """

    calls: StepCalls

    def __init__(self, step: RunningStep) -> None:
        self._step = step
        self.streams = step.streams
        self.lock = step.lock
        self.backwards = step.backwards
        self.times = step.times
        self.may_rest = self.rests = False

    # What the attachment says once, when it is built.

    @property
    def parameters(self) -> tuple[AttachedParameter, ...]:
        """The attached parameters, in the model's order."""
        return self._step.members.all

    @parameters.setter
    def parameters(self, parameters: tuple[AttachedParameter, ...]) -> None:
        self._step.members.attach(parameters)

    def read_by(self, streams: Callable[[], Iterable[torch.Stream]]) -> None:
        """FSDP2 reads shards on these streams."""

    def divides(self, owners_in_views: OwnerCount) -> None:
        """Under DDP and ``replicate``: gradients may be views of buckets, whose memory has so many owners."""

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan, given those of the sources."""
        return tuple(buckets)

    # Forward.

    @property
    def follows(self) -> bool:
        """Whether it must know of parameters that are replaced or added, and of threads. Where ``step()`` does what the
        plain loop does, it need not."""
        return True

    def lost(self, error: InstepError) -> None:
        """The loop does what the schedule cannot follow: raise ``error``, or leave all further steps to torch."""
        try:
            raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def before_forward(self) -> None:
        """The model's forward is about to run."""

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters."""

    def after_forward(self) -> None:
        """The model's forward has returned."""

    # Backward.

    def backward(self, loss: Losses, gradient: torch.Tensor | None, adopt: Callable[[], None]) -> None:
        """``torch.autograd.backward(loss, gradient)``; twice, if the norm is measured in a backward of its own.
        ``adopt`` takes in the parameters that were added to an optimizer since the forward: these are measured too."""
        torch.autograd.backward(loss, gradient)

    def begin_on_device(self, thread: int) -> None:
        """A backward has come to an output of the model, whose forward was on ``thread``, before ``begin_backward``: on
        an accelerator another thread may run it."""
        self.backwards.begin(self._step.members.all[0].spec.device, thread)

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient. Returns whether this is the first of them in the
        running backward."""
        raise NotImplementedError

    def hear_of_last_step(self) -> None:
        """Wait for what the ranks say of the last step; raise, if it does not stand on all of them."""
        self.cast_owed()

    def cast_owed(self) -> None:
        """This rank is about to wait for the others, or leaves a run of the pipeline out, with a step that it has not
        taken. The others may wait for its vote on that."""
        self._step.ledger.votes.cast_owed(self._step.ledger.step_count)

    def run_failed(self) -> None:
        """A run of the pipeline has raised on this rank. Others may be through with it, and step."""
        self._step.ledger.votes.say_failed(self._step.number)

    def begin_final_backward(self) -> None:
        """From now on gradients are final: ``begin_backward`` calls this for a backward that does not only add to them,
        and the source of a pipeline when its first stage is through."""
        self._step.ledger.votes.begin_backward(self._step.ledger.step_count)

    def steps_now(self, *, begun: bool) -> bool:
        """Whether a gradient that is final would be stepped at once. Not in a second backward of a step.

        Args:
            begun: whether the running backward is one that writes the open step.
        """
        if self._step.ledger.torn is not None:
            return False
        if self._step.members.offered:
            return begun
        accumulation, passes = self._step.accumulation, self._step.passes
        # What is measured is freed as well. But not where nothing is stepped before all of it is known.
        adds = accumulation.only_adds or accumulation.next_only_adds
        return not (self._step.leaves_all or adds or passes.running == "all")

    def is_applied(self, attached: AttachedParameter) -> bool:
        """Whether the running backward has updated this parameter."""
        return self._step.members.is_applied(attached)

    def received(self, parameters: AttachedParameters) -> None:
        """Other ranks have updated their parts of these, which have arrived."""
        self._step.members.received.update(parameters.indices)

    def end_micro_batches(self) -> None:
        """The last micro-batch of a pipeline's stage is through, of whose backwards nobody was told."""
        self.begin_final_backward()

    def end_backward(self) -> None:
        """The backward has ended, or raised."""
        self.backwards.running = None

    def backward_failed(self) -> None:
        """The backward that ``begin_backward`` told of has raised."""

    def stop(self, error: InstepError) -> None:
        """The backward that has just ended did not compute the plain loop's step: ``error`` says why, and is raised."""
        try:
            raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def drain_failed_backwards(self) -> None:
        """FSDP's state is about to be rebuilt: return once a backward that raised has ended on every device."""
        self.backwards.drain_failed()

    def closure_ran(self, stepper: Stepper) -> None:
        """A closure of ``optimizer.step()`` has returned."""
        if self.rests:  # nobody has looked at its backward
            self._step.has_gradients = finds_gradient(stepper.optimizer())

    # What the user, a hook or a checkpoint asks, at any time.

    @property
    def state(self) -> str:
        """``"idle"``, ``"open"``, ``"pending"``, ``"torn"`` or ``"disabled"``."""
        raise NotImplementedError

    @property
    def step_count(self) -> int:
        """How many committed steps wrote anything."""
        return self._step.ledger.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step.ledger.step_count = count

    @property
    def deferral(self) -> str | None:
        """Whether steps are put off, and why; ``None``: that is not the question."""
        return None

    @property
    def gains(self) -> Gains | None:
        """What the loop could gain by another schedule, as far as its steps show; ``None``: not known."""
        return None

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """``state_dict()`` or ``load_state_dict()`` of the optimizer is called."""

    def before_save(self) -> None:
        """``state_dict()`` of the model is called."""

    def before_load(self, model: str) -> None:
        """``load_state_dict()`` of the model, of this class, is called. Where nothing is written in backward, that may
        be."""

    def synchronize(self) -> None:
        """Wait until parameters hold what the steps so far have written."""

    def end_stopped(self) -> None:
        """An error may have ended ``optimizer.step()``: bring that to its end."""
        self.calls.end_stopped()

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        self._step.ledger.require_whole()

    def last_complete_step(self) -> int | None:
        """The number of the last step if all of it was applied on this rank, else ``None``."""
        ledger = self._step.ledger
        if ledger.torn is None:
            return None if self._step.members.applied else ledger.step_count
        return None if ledger.torn.in_part else ledger.torn.accepted

    def rollback(self) -> None:
        """Go back to where the last ``optimizer.step()`` left everything: clear the gradients, of which nothing has
        been written."""
        self.synchronize()
        self.give_up(gradients=True)

    def accept(self) -> bool:
        """Go on from a torn step, counted as far as anything of it was written; ``False``: there is none."""
        ledger = self._step.ledger
        if ledger.torn is None:
            return False
        ledger.step_count = ledger.torn.accepted
        self.give_up(gradients=True)
        return True

    def give_up(self, *, gradients: bool) -> None:
        """Give up a step that is open or torn; with ``gradients``, clear all of them."""
        raise NotImplementedError

    def before_compile(self) -> None:
        """torch.compile is about to trace a function."""

    def settle(self) -> None:
        """The interpreter is about to end, or to fork: parameters and state are to be those of the plain loop."""

    def abandon(self) -> None:
        """The optimizers are gone."""

    def close(self) -> None:
        """The attachment is detached."""
