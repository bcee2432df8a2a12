"""``schedule="forward"``: the buckets that were handed over and are still due. Whoever needs one waits for it here."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from threading import get_ident
from time import perf_counter
from typing import Protocol

import torch
from torch.optim import Optimizer

from instep._autograd.placeholders import HeldGradient, become_real
from instep._autograd.tracing import Compiles, listen
from instep._autograd.watch import Watch
from instep._life.life import Unsettled, owe, settled
from instep._life.weak import WeakMethod
from instep._life.worker import Worker
from instep._optim.initial_state import end_state, order_added
from instep._optim.parameters import AttachedParameters
from instep._optim.parts import version_of
from instep._optim.stepper import Stepper
from instep._optim.waiting import StateWatch
from instep._profile import profiled
from instep._step.outcome import Outcome, Outcomes
from instep._step.pending import HandedOverStep, PendingBucket
from instep._step.recorder import Recorder
from instep._step.running_step import RunningStep
from instep._step.stand_ins import StandIns
from instep._step.streams import Mark
from instep.errors import StepMismatchError, UncommittedStepError


class Owner(Unsettled, Compiles, Protocol):
    """The schedule that hands buckets over."""

    def end_stopped(self) -> None:
        """Bring a ``step()`` that an error or Ctrl-C has ended to its end."""


class PendingBuckets:
    """
    Args:
        owner: held weakly, for it has this.

    Attributes:
        recorder: told of updates, and of waiting; ``None`` when nobody listens.
        worker: applies buckets of parameters in host memory.
        is_beginning: whether a bucket that was handed over is being sent: its own update uses parameters.
        met: parameters that were handed over, and that ``step()`` itself has come to nevertheless, by name, with the
            version that it has found.
        watch_in_step: of parameters whose ``.grad`` the running ``step()`` does not find.
    """

    def __init__(self, step: RunningStep, owner: Owner) -> None:
        self.recorder: Recorder | None = None
        self.worker = Worker()
        self.is_beginning = False
        self.met: list[tuple[str, torch.Tensor, int]] = []
        self._step = step
        self._owner = weakref.ref(owner)
        self._due: dict[int, PendingBucket] = {}  # by the parameter's id
        self._outcomes: tuple[int, Outcomes] = 0, {}  # of the step with this number
        self._watch = Watch(values=self._used)
        self.watch_in_step = Watch(values=self._used, gradient=self._used_in_step)
        self._gradient_watch = Watch(values=self._used_spread_gradient)
        self._state_watch = StateWatch(self._used_state)
        self._stand_ins = StandIns(WeakMethod(self._used_gradient))

    def __bool__(self) -> bool:
        return bool(self._due)

    def all(self) -> list[PendingBucket]:
        return list(dict.fromkeys(self._due.values()))

    def of(self, parameter: torch.Tensor | None) -> PendingBucket | None:
        return self._due.get(id(parameter))

    # What is handed over.

    def begin(self) -> None:
        """Buckets are about to be handed over: whoever drops the model may be anywhere, and starts no thread."""
        if (owner := self._owner()) is not None:
            owe(owner)
            listen(owner)
        self.worker.start()

    def outcomes_of(self, number: int) -> Outcomes:
        """What becomes of the parameters of the optimizers whose ``step()`` is called in this step."""
        if self._outcomes[0] != number:
            self._outcomes = number, {}
        return self._outcomes[1]

    def leave(self, number: int, stepper: Stepper, parameters: AttachedParameters) -> None:
        """``step()`` begins. These are not put off, and updated before it returns."""
        outcomes = self.outcomes_of(number)
        outcomes.pop((id(stepper), True), None)  # of a call that has raised, and handed nothing over
        outcome = outcomes[id(stepper), False] = Outcome(parameters)
        outcome.begun.update(dict.fromkeys(parameters.names))

    def returned(self, number: int, stepper: Stepper) -> None:
        """``step()`` has returned: so those that were not put off were updated."""
        outcome = self.outcomes_of(number).get((id(stepper), False))
        if outcome is not None:
            outcome.applied = outcome.pending

    def add(self, bucket: PendingBucket) -> None:
        self._due.update(zip(map(id, bucket.tensors), repeat(bucket), strict=False))

    def take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ctrl-C, say, has come in the middle: nothing was handed over."""
        for parameter in parameters:
            self._due.pop(id(parameter), None)
        self._settle_if_none()

    def watch_state(self, optimizer: Optimizer) -> None:
        """Whoever asks for the optimizer's ``state`` waits for its buckets."""
        self._state_watch.start(optimizer)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """``step()`` has returned: whoever uses one of these, which are due, waits for its bucket."""
        parameters = list(parameters)
        self._watch.take_from(self.watch_in_step, (p for p in parameters if id(p) in self._due))
        self.watch_in_step.stop(parameters)

    def stand_in_for(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The tensor to put into ``.grad`` until ``gradient`` has been applied."""
        if id(parameter) not in self._due:
            return gradient
        if type(gradient) is torch.Tensor:
            return self._stand_ins.lend(parameter, gradient)
        self._gradient_watch.start([gradient])  # a DTensor: its users ask for its class, and its own attributes
        return gradient

    # Waiting.

    def finish(self, buckets: Iterable[PendingBucket | None]) -> None:
        """Wait for these buckets. Raises what stopped one of them, once."""
        if self.worker.is_here:
            return  # an update that comes upon the model or its optimizer: who waits for it has the lock
        with self._step.lock:
            for bucket in buckets:
                if bucket is not None and id(bucket.tensors[0]) in self._due:
                    self._run(bucket)
                    if bucket.step.outcome.failure is not None and self._step.ledger.torn is None:
                        self._tear(bucket.step)
                        self._raise_failure(bucket.step)
                    self._let_go(bucket)

    def wait(self, bucket: PendingBucket) -> None:
        """Return when it was applied, or has failed. Nobody waits for it any more."""
        self._run(bucket)
        self._let_go(bucket)

    def _run(self, bucket: PendingBucket) -> None:
        """Return when it was applied, or has failed."""
        if bucket.device.type != "cpu":
            self._step.streams.wait(bucket.mark or self.finished(bucket))
            if bucket.step.outcome.failure is None:
                try:
                    bucket.require_left_alone()
                except UncommittedStepError as error:
                    bucket.raced(error)
        else:
            with _not_compiling():
                bucket.done = bucket.done or self.worker.run(bucket.finish)
                started = perf_counter()
                with profiled("wait for update", bucket.names[0]):
                    bucket.done.wait()
                self._step.times.waited(started)
                if self.recorder is not None:
                    self.recorder("waiting", bucket.names, started, perf_counter())

    def finished(self, bucket: PendingBucket) -> Mark:
        """Launch all that is left of it on the side stream."""
        with self.on_side(bucket):
            bucket.finish()
        bucket.look()
        return self._step.streams.mark(bucket.device)

    @contextmanager
    def on_side(self, bucket: PendingBucket) -> Iterator[None]:
        with self._step.streams.on(bucket.device):
            yield
        if bucket.step.stepper.gave_back:
            self._step.streams.let_go(bucket.device)

    def _let_go(self, bucket: PendingBucket) -> None:
        """It has been applied, or has failed."""
        self._watch.stop(bucket.tensors)
        for tensor in reversed(bucket.tensors):  # the first one last: finish() asks for that one, if Ctrl-C comes here
            self._due.pop(id(tensor), None)
            gradient = tensor.grad
            if isinstance(gradient, HeldGradient):
                tensor.grad = gradient.held  # nobody has cleared it: the plain loop's is still there
            elif gradient is not None:
                self._gradient_watch.stop([gradient])
            gradient = None  # or it would seem to be in use
        self._stand_ins.take_back(bucket.tensors)
        step = bucket.step
        step.outstanding = [one for one in step.outstanding if one is not bucket]
        if not step.outstanding:
            self._end(step)

    def _end(self, step: HandedOverStep) -> None:
        """All its buckets were waited for."""
        if (optimizer := step.optimizer()) is not None:
            self._state_watch.stop(optimizer)
        if step.outcome.is_whole:
            step.stepper.commit(optimizer)
            if optimizer is not None:
                end_state(optimizer, step.stepped_here())
                order_added(optimizer, step.entries_before)
        self._settle_if_none()

    def _settle_if_none(self) -> None:
        if not self._due and (owner := self._owner()) is not None:
            settled(owner)

    def _tear(self, step: HandedOverStep) -> None:
        buckets = self.all()
        for bucket in buckets:
            self._run(bucket)
            if bucket.step is not step:
                bucket.step.outcome.is_over()
        step.stepper.settle()
        outcome, ledger = step.outcome, self._step.ledger
        outcomes = step.outcomes.values()
        applied = [name for one in outcomes for name in one.applied]
        unsure = [name for one in outcomes for name in one.in_doubt]
        pending = [name for one in outcomes for name in one.untouched]
        accepted = step.number if applied or unsure else step.number - 1
        in_part = bool(applied and pending)
        ledger.tear(step.number, applied, pending, outcome.failure, accepted=accepted, in_part=in_part, unsure=unsure)
        if not outcome.refused and not (step.ranks.know and not outcome.lost):
            ledger.votes.say_failed(step.number + 1)
        # Not before: whoever is interrupted here comes to this step again by way of a bucket that is due.
        for bucket in buckets:
            self._let_go(bucket)

    def _raise_failure(self, step: HandedOverStep) -> None:
        """Nothing keeps the error that is raised here: its frames refer to the model."""
        torn, outcome = self._step.ledger.torn, step.outcome
        assert torn is not None
        failure, outcome.failure = outcome.failure, torn.cause
        others = outcome.refused or outcome.lost
        is_news = not outcome.told and (not others or isinstance(failure, StepMismatchError))
        try:
            if failure is not None and is_news:
                raise failure
        finally:
            del failure
        self._step.ledger.require_whole()

    # Whoever uses something that is due.

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        """A parameter is about to be read or written in Python."""
        round_ = self._step.round
        if self.is_beginning and round_.stepper is not None and not round_.was_stopped:
            return  # by the update itself, which is sent; Ctrl-C may have left the flag behind that
        self._end_stopped()
        bucket = self.of(parameter)
        self.finish([bucket])
        if bucket is not None and round_.stepper is not None and round_.thread == get_ident():
            name = next(name for name, one in zip(bucket.names, bucket.tensors, strict=True) if one is parameter)
            self.met.append((name, parameter, version_of(parameter)))
        self._watch.stop([parameter])
        self._step.ledger.require_whole()

    def _used_in_step(self, parameter: torch.Tensor, func: object) -> None:
        """A ``.grad`` that was taken off is about to be read or replaced: by ``step()``, if it still runs."""
        if self._step.round.was_stopped:
            self._end_stopped()

    def _end_stopped(self) -> None:
        if (owner := self._owner()) is not None:
            owner.end_stopped()

    def _used_state(self, optimizer: Optimizer) -> None:
        """An optimizer's ``state`` is about to be read, replaced or copied."""
        self._end_stopped()
        stepper = self._step.round.stepper
        if stepper is not None and stepper.optimizer() is optimizer:
            return  # by the running step() itself, which has nothing to update
        self.finish(bucket for bucket in self.all() if bucket.step.optimizer() is optimizer)

    def _used_gradient(self, operation: str, args: object) -> None:
        """A gradient is about to be used that may not have been applied yet."""
        self.finish(self.all())

    def _used_spread_gradient(self, gradient: torch.Tensor, func: object) -> None:
        self.finish(self.all())
        self._gradient_watch.stop([gradient])

    def give_to_compiler(self) -> None:
        """Finish all, and make plain gradients of the stand-ins that somebody has: torch.compile may be given one."""
        lent = self._stand_ins.lent()
        self.finish(self.all())
        for stand_in in lent:
            become_real(stand_in)

    # Where the model, or the process, ends.

    def abandon(self) -> None:
        """The optimizers are gone. Others have the parameters, so the buckets that are due are applied, and without
        waiting: this may be called from anywhere."""
        self._settle_if_none()  # Ctrl-C may have come between the last bucket and this
        if not self.worker.started:
            return  # whoever uses one of them waits for it, and so does the end of the process
        for bucket in self.all():
            if bucket.device.type == "cpu":
                bucket.done = bucket.done or self.worker.run(bucket.finish)
            elif bucket.mark is not None:
                self._step.streams.wait(bucket.mark)
        if self._due:
            self.worker.last(self._let_go_of_all)

    def _let_go_of_all(self) -> None:
        with self._step.lock:
            failed = [bucket.step for bucket in self.all() if bucket.step.outcome.failure is not None]
            for bucket in self.all():
                self._let_go(bucket)
            if failed and self._step.ledger.torn is None:
                self._tear(failed[0])
                self._raise_failure(failed[0])  # perhaps nobody else will be told

    def close(self) -> None:
        """Finish what is due, and stop watching."""
        self.finish(self.all())
        self._settle_if_none()
        self.watch_in_step.stop(self._step.members.living())


@contextmanager
def _not_compiling() -> Iterator[None]:
    """While this thread, which may be compiling, waits for an update. torch has a private flag for all threads."""
    flag, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = flag
