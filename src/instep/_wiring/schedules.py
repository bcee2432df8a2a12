"""The one place that asks which schedule it is: it makes the schedule, with what goes with it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from instep._gradients.clipping import Clipping
from instep._gradients.policies import ClipNorm
from instep._gradients.scaling import LossScale
from instep._optim.kinds import steps_as_tested
from instep._optim.probe import Separability
from instep._optim.stepper import Stepper
from instep._optim.undo import Undo
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.agreement import Agreement
from instep._step.backward_schedule import BackwardSchedule
from instep._step.checking import Check
from instep._step.deferring import Deferring
from instep._step.forward_schedule import ForwardSchedule
from instep._step.measuring import MeasuringSink
from instep._step.plain_schedule import PlainSchedule
from instep._step.schedule import Schedule
from instep._wiring.gathering import ErrorForUse
from instep._wiring.hooks import BackwardHooks
from instep._wiring.late import Readers
from instep._wiring.readers import CheckedReaders, NoReaders, WaitingReaders
from instep.options import BY_ENVIRONMENT, Options


class Chosen(NamedTuple):
    """
    Attributes:
        sink: what the sources tell; ``None``: there are none.
        tells_all: whether the sink is told of every gradient, and not only where a source communicates for itself.
        readers: makes what is done before a module reads its parameters.
        error_for_use: what the use of a gradient that was applied raises; ``None``: nothing is put in its place.
    """

    schedule: Schedule
    sink: BackwardSchedule | MeasuringSink | None
    tells_all: bool
    readers: Callable[[BackwardHooks], Readers]
    error_for_use: ErrorForUse | None


def choose(
    options: Options,
    steppers: Sequence[Stepper],
    separability: Sequence[Separability],
    votes: StepVotes,
    accumulation: Accumulation,
    clipping: Clipping,
    check: Check | None,
    deferring: Deferring,
) -> Chosen:
    """The schedule that ``options`` ask for."""
    if options.disabled:
        why = None if options.left_to_torch == BY_ENVIRONMENT else options.left_to_torch
        any_loop = options.takes_any_loop
        plain = PlainSchedule(steppers, votes, accumulation, clipping, options.nonfinite, why, takes_any_loop=any_loop)
        return Chosen(plain, None, False, lambda _: NoReaders(), None)
    if options.schedule == "forward":
        # An update that runs later raises elsewhere: of a step() that is the user's own, the loop expects it there.
        may_wait = [
            s
            for s, found in zip(steppers, separability, strict=True)
            if found.contained and steps_as_tested(s.optimizer())
        ]
        size = options.bytes_of_a_bucket
        agreement = Agreement(options.nonfinite, votes)
        forward = ForwardSchedule(steppers, may_wait, votes, accumulation, clipping, size, agreement, check, deferring)
        measures = isinstance(options.clip, ClipNorm)
        return Chosen(forward, forward.measuring, measures, lambda _: WaitingReaders(forward), None)
    undo = Undo(host=options.undo == "host") if options.undo else None
    votes.asks_first = undo is not None and options.nonfinite != "allow"
    scale = None if options.scaler is None else LossScale(options.scaler)
    backward = BackwardSchedule(steppers, votes, accumulation, clipping, undo, scale, options.nonfinite, check)
    frees = undo is None and not options.steps_itself
    readers = partial(CheckedReaders, backward, on_trial=undo is not None)
    return Chosen(backward, backward, True, readers, backward.error_for_use if frees else None)
