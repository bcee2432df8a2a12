"""One round of ``optimizer.step()``: the calls, of all optimizers that have gradients, that make up one step."""

from collections.abc import Callable, Sequence
from threading import get_ident

import torch

from instep._autograd.watch import SET_GRAD
from instep._optim.generators import TorchGenerators
from instep._optim.parameters import AttachedParameter
from instep._optim.settings import remember_settings
from instep._optim.stepper import Stepper
from instep._step.ledger import Ledger
from instep._step.states import Event, State


class Round:
    """
    Attributes:
        owing: the optimizers with gradients of this step whose ``step()`` has not returned.
        stepper: of the optimizer whose ``step()`` runs, or was ended by an error that nobody has noticed yet.
        thread: on which that runs. Other threads may read parameters meanwhile.
        takes_step: whether the step is taken; ``None``: not known yet.
        hidden: parameters whose gradient the running ``step()`` is not to find, with the gradient. Parameters are held
            weakly: a loop that drops its model after a ``step()`` that has raised is to get it freed.
        is_ending: whether a call that has returned, or was stopped, is being brought to its end.
    """

    def __init__(self) -> None:
        self.owing: set[Stepper] = set()
        self.stepper: Stepper | None = None
        self.thread: int | None = None
        self.takes_step: bool | None = None
        self.hidden: list[tuple[AttachedParameter, torch.Tensor]] = []
        self.is_ending = False
        # The call that has returned, with the numbers of steps that are to be once that has been taken note of. Ctrl-C
        # in the middle of taking note leaves it here, and it is done again: the step stands.
        self._returned: tuple[Stepper, int, int] | None = None
        self._draws: TorchGenerators | None = None  # as the loop has left them
        self._settings: Callable[[], None] | None = None  # puts back what a step that is left out writes
        self._settings_before: Callable[[], None] | None = None  # the same, of a step that is stopped

    def begins(self, stepper: Stepper, ledger: Ledger) -> None:
        """``step()`` is about to update."""
        self.thread = get_ident()
        self.is_ending = False  # Ctrl-C may have left it so at the last line of the call before
        self.stepper = stepper  # before the event: who is interrupted in between is known to run
        ledger.happened(Event.STEP_BEGINS)

    def is_refused(self, ledger: Ledger) -> None:
        """instep raises in it, and nothing was written."""
        ledger.happened(Event.STEP_REFUSED)
        self.stepper = None

    @property
    def was_stopped(self) -> bool:
        """Whether an error or Ctrl-C has ended the ``step()`` that was begun last, before it was taken note of."""
        stepper = self.stepper if self._returned is None else self._returned[0]
        return stepper is not None and stepper.was_stopped

    @property
    def evaluates_again(self) -> bool:
        """Whether a ``step()`` that has begun to update has called its closure once more."""
        return self.stepper is not None and self._returned is None and self.stepper.runs

    @property
    def is_under_way(self) -> bool:
        return self.stepper is not None or self._returned is not None

    @property
    def has_returned_unnoted(self) -> bool:
        return self._returned is not None

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
        """The step is left out. ``step()`` writes some things without gradients, too."""
        self._settings = remember_settings(stepper.optimizer())

    def remember_settings(self, stepper: Stepper) -> None:
        """The step may be stopped."""
        self._settings_before = remember_settings(stepper.optimizer())

    def restore_settings(self, *, stopped: bool = False) -> None:
        """Of a step that was left out; with ``stopped``, of one that was stopped as well."""
        for settings in (self._settings, self._settings_before if stopped else None):
            if settings is not None:
                settings()
        self._settings = self._settings_before = None

    def keep_draws(self, devices: set[torch.device]) -> None:
        """What ``step()`` draws is no draw of the loop's."""
        self._draws = TorchGenerators(devices)

    # How it ends.

    def has_returned(self, stepper: Stepper, ledger: Ledger) -> None:
        if self._draws is not None:
            self._draws.restore()
            self._draws = None
        if ledger.machine.state not in (State.STEPPING, State.REDOING, State.TORN):
            ledger.happened(Event.STEP_BEGINS)  # Ctrl-C has come in ``begins``
        self._returned = stepper, ledger.step_count + 1, ledger.skip_count + 1

    def end(self, take_note: Callable[[Stepper, int, int], None]) -> None:
        """Take note of a call that has returned, if there is one, with the numbers of the step. ``take_note`` says
        ``is_noted`` when it has; where Ctrl-C ends it before, it is called again at the next use."""
        if self._returned is None or self.is_ending:
            return
        try:
            self.is_ending = True
            take_note(*self._returned)
        finally:
            self.is_ending = False

    def is_noted(self) -> None:
        self._returned = None

    def is_gone(self) -> None:
        """No call runs any more, nor is one to be taken note of. Others may still be owed."""
        self.stepper = self._returned = self._draws = self._settings = self._settings_before = None
        self.hidden = []

    def forget(self) -> None:
        """The step is over."""
        self.owing.clear()
        self.takes_step = None
        self.is_gone()
