"""``schedule="forward"``: the buckets that were handed over, until they are applied, and whoever waits for one."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.shadow import end_state, order_added
from instep._step.schedule import Schedule
from instep._step.state import without_frames
from instep._step.step import RunningStep
from instep._step.streams import Mark
from instep._step.update import Begun, PartOfStep, Update
from instep._torch.engine import is_captured, listen
from instep._torch.lifetime import WeakMethod, owe, settled
from instep._torch.placeholders import BeforeUse, HeldGradient, become_real
from instep._torch.watch import StateWatch, Watch
from instep._torch.worker import Worker
from instep.errors import StepMismatchError, UncommittedStepError


class StandIns:
    """The tensors that stand in ``.grad`` for gradients that are still to be applied: one for each parameter, used
    again step after step, since to make one takes as long as a small update."""

    def __init__(self, before_use: Callable[[], BeforeUse | None]) -> None:
        self._before_use = before_use
        self._idle: dict[int, HeldGradient] = {}  # by the id of the parameter
        self._lent: dict[int, HeldGradient] = {}

    def lend(self, parameter: torch.Tensor, gradient: torch.Tensor) -> HeldGradient:
        """The tensor to put into ``.grad`` of ``parameter`` until ``take_back``."""
        key = id(parameter)
        stand_in = self._idle.pop(key, None)
        if stand_in is None or not stand_in.stand_for(gradient):
            stand_in = HeldGradient(gradient, self._before_use)
        self._lent[key] = stand_in
        return stand_in

    def lent(self) -> list[HeldGradient]:
        """Those that stand in ``.grad`` now, or that somebody has."""
        return list(self._lent.values())

    def take_back(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of ``parameters`` were applied, or never will be, and none of ``.grad`` is a stand-in."""
        lent = [self._lent.pop(id(parameter), None) for parameter in parameters]
        for parameter, stand_in, count in zip(parameters, lent, _references_to(lent), strict=True):
            # Somebody else who has it, in Python or in C++, goes on to find this gradient: as a loop that has kept
            # .grad in a variable. Where torch does not tell, there may be one.
            if stand_in is not None and count == _ALONE and _COUNT is not None and _COUNT(stand_in) == 1:
                stand_in.let_go()
                self._idle[id(parameter)] = stand_in


def _references_to(objects: Sequence[object]) -> list[int]:
    return list(map(sys.getrefcount, objects))


# Of an object that only a list refers to. Versions of Python count temporaries in different ways, so it is measured.
_ALONE = _references_to([object()])[0]
# torch's own reference count of a tensor (torch/csrc/autograd/python_variable.cpp). All references of Python's count as
# one, so more than one means that C++ holds the tensor, too.
_COUNT: Callable[[Any], int] | None = getattr(torch.Tensor, "_use_count", None)


class DeferredBuckets:
    """The buckets that are put off and not applied yet, and everything that waits for one of them.

    Args:
        owner: held weakly, for it has this.

    Attributes:
        worker: applies buckets of parameters in host memory.
        is_sending: whether a bucket that was handed over is being sent: its own update uses parameters.
        watched: whoever uses a parameter waits for its bucket; and, while ``step()`` does not find its ``.grad``, is
            told where an error has ended that.
        state_watch: whoever asks for an optimizer's ``state`` waits for its buckets.
    """

    def __init__(self, step: RunningStep, owner: Schedule) -> None:
        self.worker = Worker()
        self.is_sending = False
        self._step = step
        self._owner = weakref.ref(owner)
        self._due: dict[int, Update] = {}  # by the parameter's id
        self._begun: tuple[int, Begun] = 0, {}  # of the step with this number
        self._left: list[str] = []  # to the running step() itself
        self.watched = Watch(values=self._used, gradient=self._asked_for_gradient)
        self._gradients_watched = Watch(values=self._used_spread_gradient)
        self.state_watch = StateWatch(self._used_state)
        self._stand_ins = StandIns(WeakMethod(self._used_gradient))

    def __bool__(self) -> bool:
        return bool(self._due)

    def all(self) -> list[Update]:
        return list(dict.fromkeys(self._due.values()))

    def of(self, parameter: torch.Tensor | None) -> Update | None:
        return self._due.get(id(parameter))

    # What is handed over.

    def begin(self) -> None:
        """Buckets are about to be handed over: whoever drops the model may be anywhere, and starts no thread."""
        if (owner := self._owner()) is not None:
            owe(owner)
            listen(owner)
        self.worker.start()

    def begun_in(self, number: int) -> Begun:
        """What becomes of the parameters of all optimizers whose ``step()`` is called in this step."""
        if self._begun[0] != number:
            self._begun = number, {}
        return self._begun[1]

    def leave(self, number: int, names: list[str]) -> None:
        """``step()`` begins. These are not put off, and updated before it returns."""
        begun = self.begun_in(number)
        for name in self._left:
            begun.pop(name, None)  # of a call that has raised before anything was written
        self._left = names
        begun.update(dict.fromkeys(names, False))

    def returned(self, number: int) -> None:
        """``step()`` has returned: so those that were not put off were updated."""
        left, self._left = self._left, []
        self.begun_in(number).update(dict.fromkeys(left, True))

    def add(self, bucket: Update) -> None:
        self._due.update(zip(map(id, bucket.tensors), repeat(bucket), strict=False))

    def take_back(self, parameters: Sequence[torch.Tensor]) -> None:
        """An error has come in the middle: nothing was handed over."""
        self.watched.stop(parameters)
        for parameter in parameters:
            self._due.pop(id(parameter), None)
        self._settle_if_none()

    def settle(self, parameters: Iterable[torch.Tensor]) -> None:
        """``step()`` has returned, and has not found gradients of these: those that are not due are watched no more."""
        self.watched.stop(parameter for parameter in parameters if id(parameter) not in self._due)

    def _unwatch(self, parameters: Sequence[torch.Tensor]) -> None:
        """They are due no more. While a ``step()`` runs, it may be one that does not find their gradients."""
        if self._step.round.stepper is None:
            self.watched.stop(parameters)

    def stand_in_for(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The tensor to put into ``.grad`` until ``gradient`` has been applied."""
        if id(parameter) not in self._due:
            return gradient
        if type(gradient) is torch.Tensor:
            return self._stand_ins.lend(parameter, gradient)
        self._gradients_watched.start([gradient])  # a DTensor: its users ask for its class, and its own attributes
        return gradient

    # Waiting.

    def finish(self, buckets: Iterable[Update | None]) -> None:
        """Wait for these buckets. Raises what stopped one of them, once."""
        if self.worker.is_here:
            return  # an update that comes upon the model or its optimizer: who waits for it has the lock
        due = [bucket for bucket in buckets if bucket is not None and id(bucket.tensors[0]) in self._due]
        if not due:
            return  # as mostly, and asked before each read
        with self._step.lock:
            for bucket in due:
                if id(bucket.tensors[0]) in self._due:  # still: another thread may have been here
                    self._run(bucket)
                    if bucket.step.outcome.failure is not None and self._step.ledger.torn is None:
                        due = self.all()
                        for other in due:
                            self._run(other)
                        self._tear(bucket.step, due)
                        self._raise_failure(bucket.step)
                    self._let_go(bucket)

    def wait(self, bucket: Update) -> None:
        """Return when it was applied, or has failed. Nobody waits for it any more."""
        self._run(bucket)
        self._let_go(bucket)

    def _run(self, bucket: Update) -> None:
        """Return when it was applied, or has failed."""
        if is_captured(bucket.device):
            raise UncommittedStepError(
                f"a CUDA graph is being recorded, and optimizer.step() has put off the update of {bucket.names[0]!r} "
                "before that: each replay would step it again. Call overlap.synchronize() before you record"
            )
        if bucket.device.type != "cpu":
            self._step.streams.wait(bucket.mark or self.finished(bucket))
            if bucket.step.outcome.failure is None:
                try:
                    bucket.require_left_alone()
                except UncommittedStepError as error:  # another thread has written meanwhile
                    bucket.step.outcome.fails(error)
                    bucket.step.outcome.note(bucket.names, over=False)
        else:
            bucket.wait_for(self.worker)

    def finished(self, bucket: Update) -> Mark:
        """Launch all that is left of it on the side stream."""
        with self.on_side(bucket):
            bucket.finish()
        bucket.look()
        return self._step.streams.mark(bucket.device)

    @contextmanager
    def on_side(self, bucket: Update) -> Iterator[None]:
        with self._step.streams.on(bucket.device):
            yield
        if bucket.step.stepper.gave_back:
            self._step.streams.let_go(bucket.device)

    def _let_go(self, bucket: Update) -> None:
        """It has been applied, or has failed."""
        self._unwatch(bucket.tensors)
        for tensor in bucket.tensors:
            self._due.pop(id(tensor), None)
            gradient = tensor.grad
            if isinstance(gradient, HeldGradient):
                tensor.grad = gradient.held  # nobody has cleared it: the plain loop's is still there
            elif gradient is not None:
                self._gradients_watched.stop([gradient])
            gradient = None  # or it would seem to be in use
        self._stand_ins.take_back(bucket.tensors)
        step = bucket.step
        step.outstanding = [other for other in step.outstanding if other is not bucket]
        if not step.outstanding:
            self._end(step)

    def _end(self, step: PartOfStep) -> None:
        """All its buckets were waited for."""
        if (optimizer := step.optimizer()) is not None:
            self.state_watch.stop(optimizer)
        if step.outcome.failure is None:  # all of it was updated
            step.stepper.commit(optimizer)
            if optimizer is not None:
                here = (a.peek() for a in step.parameters if a.shard is None or a.shard.is_owner)
                end_state(optimizer, [parameter for parameter in here if parameter is not None])
                order_added(optimizer, step.entries_before)
        self._settle_if_none()

    def _settle_if_none(self) -> None:
        if not self._due and (owner := self._owner()) is not None:
            settled(owner)

    def _tear(self, step: PartOfStep, due: Sequence[Update]) -> None:
        """An update of ``step`` has failed. ``due``: those that were, each of which has run or failed by now."""
        for bucket in due:
            if bucket.step is not step:
                # Nobody raises it any more. The frames that it was raised in refer to the buckets, and these to it.
                bucket.step.outcome.failure = without_frames(bucket.step.outcome.failure)
            self._let_go(bucket)
        step.stepper.wait_for_state()
        outcome, ledger, number = step.outcome, self._step.ledger, step.outcome.number
        applied = [name for name, is_over in outcome.begun.items() if is_over]
        unsure = [name for name, is_over in outcome.begun.items() if not is_over]
        pending = [name for bucket in due for name in bucket.names if name not in outcome.begun]
        accepted = number if outcome.begun else number - 1
        in_part = bool(applied and pending)
        ledger.tear(number, applied, pending, outcome.failure, accepted=accepted, in_part=in_part, unsure=unsure)
        if not outcome.refused and (outcome.lost or not outcome.told):
            ledger.votes.say_failed(number + 1)  # the vote on this step was cast before it was handed over

    def _raise_failure(self, step: PartOfStep) -> None:
        """Nothing keeps the error that is raised here: its frames refer to the model."""
        torn, outcome = self._step.ledger.torn, step.outcome
        assert torn is not None
        failure, outcome.failure = outcome.failure, torn.cause
        others = outcome.refused or outcome.lost
        is_news = not others or isinstance(failure, StepMismatchError)
        try:
            if failure is not None and is_news:
                raise failure
        finally:
            del failure
        self._step.ledger.require_whole()

    # Whoever uses something that is due.

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        """A parameter is about to be read or written in Python."""
        if self.is_sending:
            return  # by the update itself, which is sent
        self._end_stopped()
        self.finish([self.of(parameter)])
        self._unwatch([parameter])
        self._step.ledger.require_whole()

    def _asked_for_gradient(self, parameter: torch.Tensor, func: object) -> None:
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
        self._gradients_watched.stop([gradient])

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
        if not self.worker.started:
            return  # whoever uses one of them waits for it, and so does the end of the process
        for bucket in self.all():
            if bucket.device.type == "cpu":
                # What was to run beside the loop may not have been done; what was done is not done again.
                if bucket.done is None or bucket.step.switches.are_read:
                    bucket.done = self.worker.run(bucket.finish)
            elif bucket.mark is not None:
                self._step.streams.wait(bucket.mark)
        if self._due:
            self.worker.last(self._let_go_of_all)

    def _let_go_of_all(self) -> None:
        with self._step.lock:
            due = self.all()
            failed = [bucket.step for bucket in due if bucket.step.outcome.failure is not None]
            if failed and self._step.ledger.torn is None:
                self._tear(failed[0], due)
                self._raise_failure(failed[0])  # perhaps nobody else will be told
            for bucket in due:
                self._let_go(bucket)

    def close(self) -> None:
        """Finish what is due, and stop watching."""
        self.finish(self.all())
        self._settle_if_none()
        self.watched.stop(self._step.members.living())
