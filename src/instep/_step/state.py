"""The state of a step, and what is kept of it: states, the torn step, the parameters, and the calls of ``step()``.

The theory, before the table.

A *step* is what the plain loop does between two calls of ``optimizer.zero_grad()``: gradients are accumulated, and
``optimizer.step()`` writes parameters and state. instep moves the writes: ahead, into backward, or behind, into the
next forward. So a step is written by several hands, on several threads, over some time, and it may be ended in the
middle: by an error in an update, by another rank, by Ctrl-C. Everything here serves one promise: at each moment
somebody can say which parameters hold the old values, which hold the new ones, and what the plain loop would have.

Three objects say how far a step has come. ``Ledger`` has its *state*, one of six; ``TRANSITIONS`` is the whole of
its behaviour. ``StepMembers`` has, for each parameter, whether its final gradient was *offered* by a source, whether
it was *applied* by backward, and with which version counter its update left it. ``Round`` has the calls of
``optimizer.step()`` that make up the step, one for each optimizer with gradients.

A step ends when the last optimizer that has gradients has returned from ``step()`` (``COMMITTED``). Until then:

- With ``schedule="backward"`` it opens with the first gradient that is offered (``OFFERED``), and buckets are applied
  while it is ``OPEN``. Until the commit nobody may see that: a forward, a read of a weight or of its gradient would
  find what the plain loop does not have yet. Such a use raises, or, with ``undo``, rolls the step back
  (``ROLLED_BACK``): to ``REDO``, from which ``step()`` does all of it, plainly.
- With ``schedule="forward"`` nothing is written before ``step()``, and the step is ``IDLE`` until then. ``step()``
  takes the gradients of deferred buckets off, and commits; between two optimizers of one step it is ``OPEN``. A
  deferred bucket is not a state: the next step may begin while it waits, and whoever needs one of its parameters
  waits for the bucket (``DeferredBuckets``).

A step is *torn* where it stands on some parameters and cannot be completed or put back, or where it stands on this
rank and is not known to stand on the others. ``Ledger.tear`` is the only place that declares it; ``Torn`` keeps which
parameters were updated, which were not, and of which nobody knows. From then on nothing is written, and every use
says so, until the loop accepts the weights as they are, or loads others.

An update is noted as *begun* before its first write, and as applied after its last one. Whoever changes any of this
holds the step's lock, under which nothing is ended in the middle but by what tears the step (``_torch/interrupts.py``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Protocol

import torch

from instep._gradients.scaling import Named, Policy, ask_if_finite, nonfinite_error
from instep._optim.parameters import NONE, AttachedParameter, AttachedParameters
from instep._optim.stepper import Stepper
from instep._optim.undo import keep_all, keep_beside
from instep._ranks.votes import StepVotes
from instep._torch.engine import graph_task
from instep._torch.interrupts import StepLock
from instep._torch.placeholders import HeldGradient, Placeholder
from instep._torch.versions import versions_of
from instep._torch.watch import SET_GRAD
from instep.errors import StepMismatchError, TornStepError

# The states of a step. Everything that may follow upon what stands in these tables; nothing else changes a state.
#
# The picture in ``docs/architecture.md`` is drawn from them (``tests/unit/test_states.py``).


class State(Enum):
    """Of the step that is running, in one attachment."""

    IDLE = "idle"
    """No gradient of the next step has been offered."""
    OPEN = "open"
    """Gradients have been offered. With ``schedule="backward"`` buckets may have been written."""
    REDO = "redo"
    """``undo`` has rolled the step back. Its gradients stay, and ``optimizer.step()`` is to do all of it."""
    STEPPING = "stepping"
    """An optimizer's ``step()`` runs, and finds what has been left to it."""
    REDOING = "redoing"
    """An optimizer's ``step()`` runs, and does all of the step, as in the plain loop."""
    TORN = "torn"
    """The step stands on some parameters, or on some ranks, only. Nothing is written until that is accepted."""


class Event(Enum):
    """What happens to a step."""

    OFFERED = "the first final gradient is offered"
    DROPPED = "nothing was written, and the gradients are not those of a step any more"
    ROLLED_BACK = "parameters and state are as they were before the step"
    STEP_BEGINS = "an optimizer's step() is about to update"
    STEP_REFUSED = "instep has raised in it, before anything was written"
    STEP_STOPPED = "it raised or was interrupted, and what it had written is rolled back"
    STEP_RETURNS = "it returns, and other optimizers owe theirs"
    STEP_IN_VAIN = "it returns, and there was nothing to step"
    COMMITTED = "it returns, and was the last: the step is taken, or left out"
    TORE = "it stands in part"
    GIVEN_UP = "the loop gives it up, or accepts it as it is"


_I, _O, _R, _S, _RS, _T = State.IDLE, State.OPEN, State.REDO, State.STEPPING, State.REDOING, State.TORN

TRANSITIONS: Mapping[Event, Mapping[State, State]] = {
    # A closure may run backward inside of step(), after a first evaluation.
    Event.OFFERED: {_I: _O, _O: _O, _R: _R, _S: _S, _RS: _RS},
    Event.DROPPED: {_I: _I, _O: _I, _R: _I, _S: _I},
    Event.ROLLED_BACK: {_I: _R, _O: _R, _R: _R, _S: _RS, _RS: _RS, _T: _T},
    Event.STEP_BEGINS: {_I: _S, _O: _S, _R: _RS},
    Event.STEP_REFUSED: {_I: _I, _O: _O, _R: _R, _S: _O, _RS: _R, _T: _T},
    Event.STEP_STOPPED: {_I: _R, _O: _R, _R: _R, _S: _R, _RS: _R},
    # The user's step() may have caught the error that told of a torn step.
    Event.STEP_RETURNS: {_O: _O, _R: _R, _S: _O, _RS: _R, _T: _T},
    Event.STEP_IN_VAIN: {_I: _I, _R: _R, _S: _I, _RS: _R, _T: _T},
    Event.COMMITTED: {_I: _I, _S: _I, _RS: _I, _T: _T},
    Event.TORE: dict.fromkeys(State, _T),
    Event.GIVEN_UP: dict.fromkeys(State, _I),
}


class IllegalEventError(AssertionError):
    """An event that cannot happen in this state: a defect of instep's."""


def state_after(state: State, event: Event) -> State:
    """The state that follows upon ``event``.

    Raises:
        IllegalEventError: none does, from this state.
    """
    following = TRANSITIONS[event].get(state)
    if following is None:
        raise IllegalEventError(f"{event.name} ({event.value}) cannot happen to a step that is {state.value}")
    return following


class FirstError:
    """The first error of a backward, kept while raising it would do harm: inside of a hook, or before DDP's own end."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def keep(self, error: BaseException) -> None:
        """Something has gone wrong. Errors after the first one follow from it, and are dropped."""
        self.error = self.error or error

    def raise_if_any(self) -> None:
        """Raise the error with its own type, once."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame, and to all that the loop holds


@dataclass(frozen=True, slots=True)
class Torn:
    """A step that does not stand on every parameter, or is not known to stand on every rank.

    Attributes:
        step: its number, counted from 1.
        applied: names of the parameters that were updated.
        cause: what stopped it, without the frames it was raised in: these refer to the model, which this outlives.
        pending: names of those that were to be, and were not.
        accepted: how many steps were taken, once it is accepted.
        in_part: whether this rank may have neither the weights of before nor those of after the step.
        unsure: names of the parameters of which nobody knows whether they were updated.
        task: the backward in which it tore, as ``graph_task`` names it; ``None``: outside.
    """

    step: int
    applied: Sequence[str]
    pending: Sequence[str]
    rank: int
    cause: BaseException | None
    accepted: int
    in_part: bool = False
    task: int | None = None
    unsure: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", without_frames(self.cause))

    def error(self) -> TornStepError:
        """A new one each time: whoever catches an error adds frames to it."""
        return TornStepError(self.step, self.applied, self.pending, self.rank, self.cause, self.unsure)


def without_frames(error: BaseException | None) -> BaseException | None:
    """The same error, without those it was raised in."""
    if error is None:
        return None
    # No constructor runs: its arguments need not be those of the error.
    copied = type(error).__new__(type(error), *error.args)
    vars(copied).update(vars(error))
    return copied


class Ledger:
    """What has become of each step of one attachment.

    Attributes:
        state: of the running step; changed by ``happened`` alone.
        step_count: how many committed steps wrote anything.
        redo_count: how many steps were rolled back, and left to ``optimizer.step()``.
        skip_count: how many steps were left out, for a gradient that was not finite.
        has_added: whether some had a backward that only added to gradients.
        torn: the step that stands in part, until that is accepted.
        nonfinite: what becomes of a step whose gradients may hold NaN or infinity; ``"allow"`` asks nobody.
        when_torn: called then: whoever is about to read a weight is to be told.
    """

    def __init__(self, votes: StepVotes, nonfinite: Policy) -> None:
        self.state = State.IDLE
        self.when_torn: Callable[[], object] = int
        self.step_count = 0
        self.redo_count = 0
        self.skip_count = 0
        self.has_added = False
        self.torn: Torn | None = None
        self.votes = votes
        self.nonfinite = nonfinite

    def happened(self, event: Event) -> None:
        self.state = state_after(self.state, event)

    @property
    def redoes(self) -> bool:
        """Whether ``optimizer.step()`` is to do all of the running step."""
        return self.state in (State.REDO, State.REDOING)

    def takes_step(self, gradients: Named) -> bool:
        """Whether the running step, with these gradients of this rank, is taken: all ranks give one answer. All must
        ask; waits for them.

        Raises:
            NonFiniteGradientError: ``nonfinite="raise"``, and a gradient of some rank is not finite.
        """
        if self.nonfinite == "allow":
            return True
        rank = ask_if_finite(gradients, self.votes, self.step_count + 1)
        if rank is not None and self.nonfinite == "raise":
            raise nonfinite_error(gradients, rank, "Nothing of the step was applied")
        return rank is None

    def tear(
        self,
        number: int,
        applied: Sequence[str],
        pending: Sequence[str],
        cause: BaseException | None,
        *,
        accepted: int | None = None,
        in_part: bool = False,
        unsure: Sequence[str] = (),
    ) -> None:
        """Step ``number`` stands in part. See ``Torn``."""
        accepted = number if accepted is None else accepted
        rank, in_part = self.votes.rank(), in_part or bool(unsure)
        self.torn = Torn(number, applied, pending, rank, cause, accepted, in_part, graph_task(), unsure)
        self.when_torn()
        self.happened(Event.TORE)

    def torn_error(self, error: Exception) -> Exception:
        """What to raise of ``error``, which other ranks have found, and has torn the step."""
        return error if self.torn is None or isinstance(error, StepMismatchError) else self.torn.error()

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step stands in part."""
        if self.torn is not None:
            raise self.torn.error()

    def give_up(self) -> None:
        """Forget the running step, or the torn one."""
        self.torn = None
        self.happened(Event.GIVEN_UP)


class StepMembers:
    """The attached parameters, and how far the running step has come with each of them.

    Attributes:
        all: the attached parameters, in the model's order.
        by_index: the same, by their place in the plan.
        offered: the indices of those whose final gradient a source has offered in this step.
        applied: the indices of those that backward has updated in this step.
        versions: by index, of parameters that were applied: as their update has left them.
        received: the indices of those of which the parts that other ranks have updated were written here.
    """

    def __init__(self, steppers: Sequence[Stepper]) -> None:
        self.steppers = tuple(steppers)
        self.offered: set[int] = set()
        self.applied: set[int] = set()
        self.received: set[int] = set()
        self.versions: dict[int, int] = {}
        self.attach(())

    def attach(self, parameters: Iterable[AttachedParameter]) -> None:
        """These are all that are attached."""
        self.all = AttachedParameters(parameters)
        self.by_index = {attached.spec.index: attached for attached in self.all}
        self._of = {
            stepper: AttachedParameters(a for a in self.all if a.stepper is stepper) for stepper in self.steppers
        }

    def of(self, stepper: Stepper) -> AttachedParameters:
        """Those of one optimizer."""
        return self._of[stepper]

    def apply(self, bucket: AttachedParameters, versions: Sequence[int]) -> None:
        """Backward has just updated ``bucket``, and left its parameters with these ``versions``."""
        self.versions.update(zip(bucket.indices, versions, strict=True))
        self.applied.update(bucket.indices)

    def versions_as_applied(self, applied: AttachedParameters) -> list[int]:
        """The versions of parameters, as their update in backward left them."""
        return list(map(self.versions.__getitem__, applied.indices))

    def applied_by(self, stepper: Stepper) -> AttachedParameters:
        """Those of one optimizer that backward has updated."""
        applied, members = self.applied, self._of[stepper]
        if not applied:
            return NONE
        return members if applied.issuperset(members.indices) else AttachedParameters(filter(self.is_applied, members))

    def left_by(self, stepper: Stepper) -> AttachedParameters:
        """Those of one optimizer that backward has not updated."""
        applied, members = self.applied, self._of[stepper]
        if not applied:
            return members
        if applied.issuperset(members.indices):
            return NONE
        return AttachedParameters(a for a in members if a.spec.index not in applied)

    def is_applied(self, attached: AttachedParameter) -> bool:
        return attached.spec.index in self.applied

    def is_whole(self, attached: AttachedParameter) -> bool:
        """Whether all of it was updated, also the parts that other ranks update."""
        return self.is_applied(attached) and not self._lacks_parts(attached)

    def is_mixed(self, attached: AttachedParameter) -> bool:
        """Whether this rank's part of it was updated, and other ranks' parts were not."""
        has_part = attached.shard is not None and not attached.shard.is_empty
        return has_part and self.is_applied(attached) and self._lacks_parts(attached)

    def _lacks_parts(self, attached: AttachedParameter) -> bool:
        shard = attached.shard
        return shard is not None and shard.is_shared and attached.spec.index not in self.received

    def living(self) -> list[torch.Tensor]:
        """The parameters that are still there."""
        return [parameter for attached in self.all if (parameter := attached.peek()) is not None]

    def name_of(self, parameter: torch.Tensor) -> str:
        return next(attached.spec.name for attached in self.all if attached.peek() is parameter)

    def end_step(self) -> None:
        """The step is over, or was none."""
        self.offered.clear()
        self.applied.clear()
        self.received.clear()
        self.versions.clear()


GradientOf = Callable[[AttachedParameter], torch.Tensor | None]


def gradient_of(attached: AttachedParameter) -> torch.Tensor | None:
    """The gradient in ``.grad``; ``None`` also for a placeholder of one that is gone."""
    parameter = attached.get()
    with torch._C.DisableTorchFunctionSubclass():  # instep's own question: nobody who watches need be told
        gradient = parameter.grad
    if isinstance(gradient, HeldGradient):
        parameter.grad = gradient = gradient.use()
    return None if isinstance(gradient, Placeholder) else gradient


def first_written(members: AttachedParameters, versions: Sequence[int]) -> AttachedParameter | None:
    """The first of ``members`` with another version than it had then."""
    current = versions_of(members.tensors())
    if current == versions:
        return None
    return next(a for a, now, then in zip(members, current, versions, strict=True) if now != then)


class Round:
    """The calls of ``optimizer.step()``, one for each optimizer with gradients, that make up one step.

    Attributes:
        lock: held in place of the step's where ``step()`` is prepared, and the optimizer's own code runs: that may run
            a backward, whose hooks take the step's, on an accelerator on the engine's own threads.
        steppers_left: the optimizers with gradients of this step whose ``step()`` has not returned.
        stepper: of the optimizer whose ``step()`` runs, or was ended by an error that nobody has noticed yet.
        takes_step: whether the step is taken; ``None``: not known yet.
        finds: parameters that the running ``step()`` has found gradients of.
        hidden: parameters whose gradient the running ``step()`` is not to find, with the gradient. Parameters are held
            weakly: a loop that drops its model after a ``step()`` that has raised is to get it freed.
    """

    def __init__(self) -> None:
        self.lock = StepLock()
        self.steppers_left: set[Stepper] = set()
        self.stepper: Stepper | None = None
        self.takes_step: bool | None = None
        self.finds: Sequence[AttachedParameter] = ()
        self.hidden: list[tuple[AttachedParameter, torch.Tensor]] = []
        self._settings: Callable[[], None] | None = None  # puts back what a step that is left out writes
        self._settings_before: Callable[[], None] | None = None  # the same, of a step that is stopped

    def begins(self, stepper: Stepper, ledger: Ledger, finds: Sequence[AttachedParameter] = ()) -> None:
        """``step()`` is about to update."""
        self.stepper, self.finds = stepper, finds
        ledger.happened(Event.STEP_BEGINS)

    def refuse(self, ledger: Ledger) -> None:
        """instep raises in it, and nothing was written."""
        ledger.happened(Event.STEP_REFUSED)
        self.stepper = None

    @property
    def was_stopped(self) -> bool:
        """Whether an error has ended the ``step()`` that was begun last."""
        return self.stepper is not None and self.stepper.was_stopped

    @property
    def evaluates_again(self) -> bool:
        """Whether a ``step()`` that has begun to update has called its closure once more."""
        return self.stepper is not None and self.stepper.runs

    # Gradients.

    def hide(self, gradients: Sequence[tuple[AttachedParameter, torch.Tensor]]) -> None:
        """The running ``step()`` finds no gradient of these parameters."""
        self.hidden.extend(gradients)
        with torch._C.DisableTorchFunctionSubclass():
            for attached, _ in gradients:
                SET_GRAD(attached.get(), None)

    def show(self, *, where_none: bool = False) -> None:
        """The hidden gradients are the parameters' again: all, or where no other one has been put in the place."""
        with torch._C.DisableTorchFunctionSubclass():
            for attached, gradient in self.hidden:
                parameter = attached.peek()
                if parameter is not None and not (where_none and parameter.grad is not None):
                    parameter.grad = gradient
        self.hidden = []

    # What step() writes beside parameters and their state.

    def leave_out(self, stepper: Stepper) -> None:
        """The step is left out. ``step()`` writes some things without gradients, too: of a foreign optimizer nobody
        knows which."""
        keep = keep_all if stepper.is_foreign else keep_beside
        self._settings = keep(stepper.optimizer())

    def remember_settings(self, stepper: Stepper) -> None:
        """The step may be stopped."""
        self._settings_before = keep_beside(stepper.optimizer())

    def restore_settings(self, *, stopped: bool = False) -> None:
        """Of a step that was left out; with ``stopped``, of one that was stopped as well."""
        for settings in (self._settings, self._settings_before if stopped else None):
            if settings is not None:
                settings()
        self._settings = self._settings_before = None

    # How it ends.

    def drop_call(self) -> None:
        """No call runs any more. Others may still be owed."""
        self.stepper = self._settings = self._settings_before = None
        self.hidden, self.finds = [], ()

    def end_step(self) -> None:
        """The step is over, or was none."""
        self.steppers_left.clear()
        self.takes_step = None
        self.drop_call()


class Gathered(Protocol):
    """The shards of parameters that other ranks have stepped, on their way to this one."""

    def wait(self) -> None:
        """Return when they are there, for the current stream. Nothing is written."""

    def write(self) -> None:
        """Write them into the parameters."""


Gather = Callable[[Sequence[AttachedParameter]], Gathered]
"""Sends the shards of parameters that this rank has stepped. All ranks must call it with the same parameters."""


class Recorder(Protocol):
    """Told what ran when, on the thread that it ran on: ``kind`` is ``"step"`` for the update of these parameters,
    ``"communication"`` for their gradients on their way between ranks, which any thread tells, or ``"waiting"`` for
    either. Times are ``perf_counter`` seconds."""

    def __call__(self, kind: str, names: Sequence[str], start: float, end: float) -> None: ...


class Listener(Recorder, Protocol):
    """Told of memory, too."""

    def handed_over(self, gradients: Sequence[torch.Tensor]) -> None:
        """Another thread will let go of these, once it has updated by them."""


class StepTimes:
    """How long the loop was held up by its steps, and how long updates ran beside it, from one commit to the next: by
    the host's clock.

    Attributes:
        exposed: seconds within ``optimizer.step()`` and of waiting for updates, before the last commit; ``None``: there
            was none.
        outside: seconds of updates outside of ``optimizer.step()``, less those in which they were waited for.
        recorder: told of each bucket's update, communication, and of waiting for it; ``None``: nobody listens.
        listener: told of gradients that are handed over to another thread; ``None``: nobody is.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.listener: Listener | None = None
        self.exposed: float | None = None
        self.outside = 0.0
        self._began: float | None = None
        self._in_step = 0.0
        self._waited = 0.0
        self._ran: list[float] = []  # by any thread

    @property
    def spent(self) -> float | None:
        """Seconds that the loop has spent on the last step's updates, and in ``optimizer.step()``."""
        return None if self.exposed is None else self.exposed + self.outside

    def step_begins(self) -> None:
        self._began = perf_counter()

    def step_returns(self) -> None:
        if self._began is not None:
            self._in_step += perf_counter() - self._began
            self._began = None

    def ran(self, bucket: AttachedParameters, started: float) -> None:
        """The update of ``bucket`` that began then has ended."""
        ended = perf_counter()
        self._ran.append(ended - started)
        if self.recorder is not None:
            self.recorder("step", bucket.names, started, ended)

    def waited(self, bucket: AttachedParameters, started: float) -> None:
        """The update of ``bucket`` was waited for, from then on."""
        ended = perf_counter()
        if self._began is None:  # else it is a part of step()
            self._waited += ended - started
        if self.recorder is not None:
            self.recorder("waiting", bucket.names, started, ended)

    def committed(self) -> None:
        ran, self._ran = self._ran, []
        self.exposed, self.outside = self._in_step + self._waited, max(0.0, sum(ran) - self._waited)
        self._in_step = self._waited = 0.0
