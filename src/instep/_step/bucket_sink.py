"""``schedule="backward"``, as sources of gradients see it: they offer final gradients, and hand over full buckets."""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from time import perf_counter
from typing import cast

import torch

from instep._autograd.engine import graph_task
from instep._optim.parameters import GRADIENT, AttachedParameter, AttachedParameters, all_there
from instep._optim.unchanged import require_in_place
from instep._profile import profiled
from instep._ranks.votes import error_of
from instep._step.first_error import FirstError
from instep._step.members import gradient_of
from instep._step.recorder import Recorder
from instep._step.running_step import HoldsStep, RunningStep
from instep._step.states import Event
from instep._step.writes import Writes


class SeenBackwards:
    """The running backward, and those nested in it by reentrant checkpointing, by the number of their graph task.

    Attributes:
        running: the one that was seen to begin last, at an output of the model; ``None``: it is over.
    """

    def __init__(self) -> None:
        self.running: int | None = None
        self._of_step: set[int | None] = set()

    def begins(self, task: int | None) -> bool:
        """Whether this is the first of it."""
        if task == self.running:
            return False
        self.running = task
        return task not in self._of_step

    def steps(self, task: int | None) -> None:
        """It is the first of its step."""
        self._of_step = {task}

    def gives_gradients(self, task: int | None) -> None:
        self._of_step.add(task)


class BucketSink(HoldsStep):
    """
    Attributes:
        recorder: told of each bucket's step and communication; ``None`` when nobody listens.
        on_open: called when a step opens.
    """

    def __init__(self, step: RunningStep, writes: Writes) -> None:
        self.recorder: Recorder | None = None
        self.on_open: Callable[[], None] = lambda: None
        self._step = step
        self._writes = writes
        self._seen = SeenBackwards()
        self._failure = FirstError()  # raised where the running backward ends

    def arrive(self, parameters: Sequence[AttachedParameter]) -> bool:
        """Final gradients are offered. ``False``: they stay in ``.grad``, this step must not be written now.

        Raises ``AccumulationError`` when one of them was offered before in this step: before anything more is
        written.
        """
        step = self._step
        if step.passes.running != "measuring":
            step.accumulation.count()
            step.has_gradients = True
            if step.accumulation.holding or self.keeps_gradients:
                return False
        with step.lock:
            if step.ledger.torn is not None:
                if step.ledger.torn.task == graph_task():
                    return False  # the backward in which it tore still has to unwind
                raise step.ledger.torn.error()
            step.passes.require_running()
            if step.passes.running == "measuring":
                step.passes.measure(parameters)
                return False
            if not step.members.offered:
                self._open()
            self._seen.gives_gradients(graph_task())
            step.backwards.begin(parameters[0].spec.device)
            self._offer(AttachedParameters.of(parameters))
            return self._writes.may_write(seen=self._seen.running is not None)

    def _open(self) -> None:
        if self._step.passes.running is None:
            self._step.passes.clipping.begin()
        self._writes.begin()
        self.on_open()
        self._step.ledger.happened(Event.OFFERED)

    def _offer(self, parameters: AttachedParameters) -> None:
        offered, round_ = self._step.members.offered, self._step.round
        for attached in parameters if not offered.isdisjoint(parameters.indices) else ():
            if attached.spec.index in offered and (error := self._writes.second_gradient(attached)) is not None:
                try:
                    self._stop(error)
                    raise error
                finally:
                    del error  # or it would refer to itself, by way of this frame
            offered.add(attached.spec.index)
            round_.owing.add(attached.stepper)
        offered.update(parameters.indices)
        round_.owing.update(parameters.steppers)

    def apply(
        self, bucket: Sequence[AttachedParameter], fetch: Callable[[], None] | None = None, *, final: bool = True
    ) -> bool:
        """Step the parameters of ``bucket`` from their ``.grad``. ``False`` if that failed, or is not to be done.

        An error is kept for ``raise_failure``: raised here, inside a hook, it would leave DDP unusable.

        Args:
            fetch: called first, on the step's stream, to wait for the gradients and put them into ``.grad``.
            final: whether these are the very tensors that ``.grad`` will hold. On an accelerator the norm of another
                one with the same values may differ in the last bit.
        """
        step, writes = self._step, self._writes
        with step.lock:
            if step.ledger.torn is not None or self._failure.error is not None or step.ledger.redoes:
                return False
            writes.begun = AttachedParameters()
            try:
                for stepper in step.members.steppers:
                    stepper.optimizer()
                with step.streams.on(bucket[0].spec.device):
                    if fetch is not None:
                        fetch()
                    members, parameters, gradients = _with_gradient(AttachedParameters.of(bucket))
                    if not members:
                        return True
                    require_in_place(members, parameters)
                    started = perf_counter()
                    with profiled("update", members[0].spec.name):
                        if not writes.update(members, parameters, gradients, final=final):
                            return False
                # In here, too: Ctrl-C that comes before this is noted comes after a write.
                step.members.apply(members, parameters)
                writes.begun = AttachedParameters()
                writes.updated(members, gradients)
            except BaseException as error:
                if not (isinstance(error, Exception) and writes.takes_back(error)):
                    begun = (a for a in writes.begun if a.shard is None or not a.shard.is_empty)
                    self.fail(error, [a.spec.name for a in begun])
                return False
            step.times.ran(started)
            if self.recorder is not None:
                self.recorder("step", [attached.spec.name for attached in members], started, perf_counter())
            return True

    def freed(self, bucket: Sequence[AttachedParameter]) -> None:
        """Of those that were applied nobody has the gradients any more."""
        step, bucket = self._step, AttachedParameters.of(bucket)
        if not self.frees_gradients:
            return
        if not step.members.applied.issuperset(bucket.indices):
            bucket = AttachedParameters(filter(step.members.is_applied, bucket))
        step.freed_bytes += bucket.nbytes

    def retire(self, bucket: Iterable[AttachedParameter]) -> None:
        """Nobody but instep needs ``.grad`` of these any more, as far as they were applied."""
        self._writes.retire(AttachedParameters.of(bucket))

    def is_applied(self, attached: AttachedParameter) -> bool:
        return self._step.members.is_applied(attached)

    @property
    def by_bucket(self) -> bool:
        """Whether buckets must not be applied together: their norms are their own, or a difference would not show."""
        return self._step.passes.clipping.mode == "per_bucket" or self._step.checks

    @property
    def keeps_gradients(self) -> bool:
        """Whether all of the running step is left to ``optimizer.step()``. Not where backward has begun to apply it."""
        return self._step.accumulation.is_kept and not self._step.members.applied

    @property
    def frees_gradients(self) -> bool:
        """Whether applied gradients are not needed any more."""
        return self._writes.frees_gradients

    @property
    def waits_for_all(self) -> bool:
        """Whether nothing may be applied before all gradients are final, and ``compute_total_norm`` was called."""
        return self._step.passes.running == "all"

    def compute_total_norm(self) -> None:
        """All gradients are final, and in ``.grad``."""
        self._step.passes.clipping.compute_total_norm(self._step.members.all, gradient_of)

    def fail(self, error: BaseException, begun: Sequence[str] = ()) -> None:
        """Something stopped the step: torn if anything was written, else forgotten, as if it had never opened.

        The error is kept until the end of this backward, where the source raises it; the first one wins.

        Args:
            begun: names of the parameters whose update was stopped, too.
        """
        with self._step.lock:
            self._failure.keep(error)
            self._stop(error, begun)

    def updated_on_all(self) -> bool:
        """This rank has updated its parts of the parameters, or has failed to. Whether all ranks have updated theirs:
        each of them must ask once in a backward, before it writes a part that another rank has updated. If one has
        failed, the step is torn here, too."""
        step, failed = self._step, self._failure.error is not None
        with step.lock:
            if step.ledger.torn is not None:
                return False  # the others know it
            try:
                vote = step.ledger.votes.updated(step.number, failed=failed)
                error = None if vote is None or failed else error_of(vote)
            except BaseException as stopped:  # such as Ctrl-C: nothing may be raised before DDP's own end
                self.fail(stopped)
                return False
            if error is not None:
                self._writes.tear(error, is_known=True)
                self._failure.keep(step.ledger.torn_error(error))
            return not failed and error is None

    def received(self, parameters: AttachedParameters) -> None:
        """The parts of these that other ranks have updated were written."""
        self._step.members.received.update(parameters.indices)

    def backward_raised(self) -> None:
        """Backward is ending with an exception of its own. Nothing of this step is written any more."""
        with self._step.lock:
            self._failure.forget()
            self._stop(None)
            self._step.streams.finish()

    def raise_failure(self) -> None:
        """At the end of a backward: raise what stopped the step, with its own type."""
        self._failure.raise_if_any()

    def _stop(self, cause: BaseException | None, begun: Sequence[str] = ()) -> None:
        if self._step.ledger.torn is None:
            self._writes.stopped(cause, begun)


def _with_gradient(
    bucket: AttachedParameters,
) -> tuple[AttachedParameters, list[torch.Tensor], list[torch.Tensor]]:
    """Those of ``bucket`` that have a gradient, with parameters and gradients: a parameter that was frozen after the
    forward is offered, and has none."""
    parameters = bucket.tensors()
    gradients = list(map(GRADIENT, parameters))
    if not all_there(gradients):
        there = [gradient is not None for gradient in gradients]
        bucket = AttachedParameters(compress(bucket, there))
        parameters, gradients = bucket.tensors(), list(compress(gradients, there))
    return bucket, parameters, cast(list[torch.Tensor], gradients)
