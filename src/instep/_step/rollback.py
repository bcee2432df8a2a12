"""``undo``: parameters and state go back to the copies that were taken before a trial wrote them."""

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from instep._autograd.watch import Watch
from instep._life.life import Unsettled, settled
from instep._optim.parameters import AttachedParameters
from instep._optim.undo import Undo
from instep._profile import profiled
from instep._step.kept import KeptGradients
from instep._step.members import StepMembers, versions_of
from instep._step.running_step import RunningStep
from instep._step.states import Event
from instep._step.ways_out import WRITE_LATER
from instep.errors import HyperparameterChangedError, InstepError, UncommittedStepError


class Owner(Unsettled, Protocol):
    """The schedule that writes on trial."""

    def end_stopped(self) -> None:
        """Bring a ``step()`` that an error or Ctrl-C has ended to its end."""

    def require_whole(self) -> None: ...


class Rollback:
    """
    Args:
        copies: of parameters and their state.
        kept: the gradients of parameters that a trial has written.
        watches: tell who uses these parameters.
        owner: the schedule, which is kept alive while a trial stands.

    Attributes:
        copies: those.
    """

    def __init__(
        self,
        step: RunningStep,
        copies: Undo,
        kept: KeptGradients,
        watches: Sequence[Watch],
        owner: "weakref.ref[Owner]",
    ) -> None:
        self.copies = copies
        self._step = step
        self._kept = kept
        self._watches = tuple(watches)
        self._owner = owner
        self._runs = False  # whether one does: its own writes ask for no other one
        # Once one has begun, until it is done: whose state, and which parameters, somebody had written.
        self._found: tuple[str | None, list[str]] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether one began, and was not finished: Ctrl-C has ended it."""
        return self._found is not None

    def __call__(self) -> None:
        """Parameters and state are as they were before this step. Its gradients stay, and what is left of it is done
        by ``optimizer.step()``, as in the plain loop. Who is interrupted in it does it again.

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

    def step_begins(self) -> None:
        """None runs. Ctrl-C may have ended one at its last line, where it was about to say so."""
        self._runs = False

    def if_applied(self) -> None:
        """Where backward has written anything."""
        if self._step.members.applied:
            self()

    def _restore(self) -> InstepError | None:
        step = self._step
        self._kept.release(step.members.all)
        if self._found is None:
            self._found = _written_since(step.members)
        for stepper in step.members.steppers:
            stepper.settle()
        for device in self.copies.devices:
            # On the side stream, which comes after the trial.
            with step.streams.on(device):
                self.copies.restore(device)
        step.streams.join_all()
        for stepper in step.members.steppers:
            stepper.abort()
        step.members.applied.clear()
        self.settled()
        self._kept.forget_outcomes()
        step.passes.clipping.forget_norms()
        if step.check is not None:
            step.check.forget()
        step.ledger.happened(Event.ROLLED_BACK)
        self.stop_watching()
        found, self._found = self._found, None
        step.ledger.redo_count += 1
        return _lost(*found)

    def settled(self) -> None:
        """Nothing stands on trial: nobody need see to it at exit."""
        if (owner := self._owner()) is not None:
            settled(owner)

    def stop_watching(self) -> None:
        parameters = self._step.members.living()
        for watch in self._watches:
            watch.stop(parameters)

    def forget(self) -> None:
        """The step is over."""
        self._found = None
        self.copies.forget_all()
        self.settled()


def _written_since(members: StepMembers) -> tuple[str | None, list[str]]:
    applied = AttachedParameters(filter(members.is_applied, members.all))
    now, then = versions_of(applied.tensors()), members.versions_as_applied(applied)
    return (
        next((stepper.name for stepper in members.steppers if stepper.state_was_written), None),
        [a.spec.name for a, found, left in zip(applied, now, then, strict=True) if found != left],
    )


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
