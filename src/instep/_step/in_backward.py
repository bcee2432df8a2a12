"""``schedule="backward"``: sources offer final gradients, buckets are stepped, and ``optimizer.step()`` commits."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import compress, repeat
from operator import attrgetter, is_not
from time import perf_counter
from typing import Any

import torch

from instep._gradients.scaling import LossScale
from instep._optim.kernels import GRADIENT, are_usual
from instep._optim.parameters import NONE, AttachedParameter, AttachedParameters, require_in_place
from instep._optim.stepper import PreparedUpdate, Stepper
from instep._optim.undo import Undo
from instep._ranks.vote import error_of
from instep._step.beside_backward import MOST, UpdatesBeside
from instep._step.deferral import Deferring
from instep._step.judging import Judge
from instep._step.norms import COMPILED_TWICE, Losses
from instep._step.on_trial import TrialWrites
from instep._step.remedies import KEEP_ALL, after_update, never_cleared, several_backwards, while_measuring
from instep._step.schedule import Schedule
from instep._step.state import Event, FirstError, State, gradient_of
from instep._step.step import RunningStep, finds_gradient
from instep._step.step_calls import StepCalls
from instep._step.update import Update
from instep._step.writes import FinalWrites, Writes, owed_steps
from instep._torch.engine import (
    AS_IT_IS,
    Run,
    as_default_device,
    default_device,
    graph_task,
    is_captured,
    is_of_written,
    is_profiled,
    profiled,
    set_default_device,
)
from instep._torch.lifetime import WeakMethod, owe, settled, weakly
from instep._torch.placeholders import (
    ACCUMULATE,
    CONVERSION,
    DETACH,
    NEW_LIKE,
    ZERO,
    ZeroedGradient,
    dtype_of_gradient,
)
from instep._torch.versions import versions_of
from instep.buckets import ParameterSpec
from instep.errors import AccumulationError, InstepError, UncommittedStepError

_DEVICE = attrgetter("device")


class BucketSink(Schedule):
    """Takes final gradients from the sources, and steps full buckets while backward runs.

    Args:
        deferring: makes the decision whether a worker updates buckets, when the first backward begins; ``None``: none
            does.

    Attributes:
        at_open: what is called when a step opens, as far as it is still there.
    """

    def __init__(self, step: RunningStep, writes: Writes, deferring: Callable[[], Deferring] | None) -> None:
        super().__init__(step)
        self.at_open: Sequence[weakref.ref[Callable[[], None]]] = ()
        self.frees_gradients = writes.frees_gradients
        self._clips = step.passes.clipping.policy is not None
        self._looks = self._clips or step.ledger.nonfinite == "raise"  # at gradients, before they are applied
        self._writes = writes
        self._deferring = deferring
        self._beside: UpdatesBeside | None = None
        self._failure = FirstError()  # raised where the running backward ends
        # The loop's, when its last forward with gradients returned: a hook of backward finds none.
        self._default_device: torch.device | None = None
        self._has_default_device = False

    def arrive(self, parameters: AttachedParameters) -> bool:
        """Final gradients are offered. ``False``: they stay in ``.grad``, this step must not be written now.

        Raises ``AccumulationError`` when one of them was offered before in this step: before anything more is
        written.
        """
        step = self._step
        if step.passes.running != "measuring":
            # Before the step is looked at: a gradient that only adds up opens none. Where several of the engine's
            # threads may count, they are in hooks of ``LocalSource``, which hold the lock already.
            step.has_gradients = True
            leaves_all = step.accumulation.kept or (step.judge is not None and step.judge.leaves_all)
            if step.accumulation.count():
                return False
            if leaves_all and not step.members.applied:
                if step.judge is not None:
                    step.judge.come(parameters)
                return False
        with step.lock:
            if step.ledger.torn is not None:
                if step.ledger.torn.task == graph_task():
                    return False  # the backward in which it tore still has to unwind
                raise step.ledger.torn.error()
            if self._clips:
                step.passes.require_running()
                if step.passes.running == "measuring":
                    step.passes.measure(parameters)
                    return False
            if not step.members.offered:
                self._open()
            step.backwards.gives_gradients(parameters[0].spec.device)
            self._offer(parameters)
            seen = step.backwards.running is not None or step.accumulation.runs_stages is not None
            return self._writes.accepts_update(seen=seen)

    def _open(self) -> None:
        if self._clips and self._step.passes.running is None:
            self._step.passes.clipping.begin()
        self._writes.begin()
        if self._step.judge is not None:
            self._step.judge.step_opens(self._step.number, self._step.buckets() or ())
        for begin in self.at_open:
            if (call := begin()) is not None:
                call()
        self._step.ledger.happened(Event.OFFERED)

    def _offer(self, parameters: AttachedParameters) -> None:
        offered, round_ = self._step.members.offered, self._step.round
        if offered.isdisjoint(parameters.indices):  # as mostly
            offered.update(parameters.indices)
            round_.steppers_left.update(parameters.steppers)
            return
        for attached in parameters:
            if attached.spec.index in offered and (error := self._writes.second_gradient(attached)) is not None:
                try:
                    self._stop(error)
                    raise error
                finally:
                    del error  # or it would refer to itself, by way of this frame
            offered.add(attached.spec.index)
            round_.steppers_left.add(attached.stepper)

    def apply(self, bucket: AttachedParameters, fetch: Callable[[], None] | None = None, *, final: bool = True) -> bool:
        """Step the parameters of ``bucket`` from their ``.grad``. ``False`` if that failed, or is not to be done.

        An error is kept for ``raise_failure``: raised here, inside a hook, it would leave DDP unusable.

        Args:
            fetch: called first, on the step's stream, to wait for the gradients and put them into ``.grad``.
            final: whether these are the very tensors that ``.grad`` will hold. On an accelerator the norm of another
                one with the same values may differ in the last bit.
        """
        step, writes = self._step, self._writes
        try:
            with step.lock:
                if self._beside is not None and self._beside.steps:
                    self._note_updates()  # one thread at a time steps with an optimizer
                if step.ledger.torn is not None or self._failure.error is not None or step.ledger.redoes:
                    return False
                if step.judge is not None and step.judge.leaves(bucket):
                    return False
                writes.begun = NONE
                try:
                    if not step.members.applied:
                        for stepper in step.members.steppers:
                            stepper.optimizer()  # raises, before anything is written, if one is gone
                    with self._around(bucket):
                        if fetch is not None:
                            fetch()
                        return self._update(bucket, final=final)
                except BaseException as error:
                    if not (isinstance(error, Exception) and writes.takes_back(error)):
                        begun = (a for a in writes.begun if a.shard is None or not a.shard.is_empty)
                        self.fail(error, [a.spec.name for a in begun])
                    return False
        except BaseException as error:  # of a signal's handler, which has waited for the bucket
            self.fail(error)
            return False

    def _around(self, bucket: AttachedParameters) -> AbstractContextManager[Any]:
        """The step's stream, the loop's default device, and a range in a profile: around the update of a bucket."""
        spec = bucket[0].spec
        contexts = (
            self._step.streams.on(spec.device),
            as_default_device(self._loops_device),
            profiled("update", spec.name),
        )
        some = [context for context in contexts if context is not AS_IT_IS]
        if not some:  # as mostly, on a CPU
            return AS_IT_IS
        with ExitStack() as stack:
            for context in some:
                stack.enter_context(context)
            return stack.pop_all()

    @property
    def _loops_device(self) -> torch.device | None:
        """The default device of the loop."""
        return self._default_device if self._has_default_device else set_default_device()

    def _update(self, bucket: AttachedParameters, *, final: bool) -> bool:
        """Step those of ``bucket`` that have a gradient, on the stream that is current."""
        step, writes = self._step, self._writes
        parameters = bucket.tensors()
        gradients: list[Any] = list(map(GRADIENT, parameters))
        if not all(map(is_not, gradients, repeat(None))):
            # A parameter that was frozen after the forward is offered, and has none.
            there = [gradient is not None for gradient in gradients]
            bucket = AttachedParameters(compress(bucket, there))
            parameters, gradients = bucket.tensors(), list(compress(gradients, there))
            if not bucket:
                return True
        require_in_place(bucket, parameters)
        writes.in_graph = not parameters[0].is_cpu and is_captured(bucket[0].spec.device)
        started = perf_counter()
        if not writes.update(bucket, parameters, gradients, final=final):
            return False
        step.members.apply(bucket, versions_of(parameters))
        writes.begun = NONE
        writes.updated(bucket, gradients)
        step.times.ran(bucket, started)
        return True

    def apply_and_free(self, bucket: AttachedParameters) -> bool:
        beside = self._beside
        done = (beside is not None and beside.takes_some and self._hand_over(beside, bucket)) or self.apply(bucket)
        self._writes.retire(bucket)
        self.count_freed(bucket)
        return done

    def prepare(self, buckets: Sequence[AttachedParameters]) -> Sequence[PreparedUpdate | None]:
        """The running backward has been found to give a step its gradients: the updates of its ``buckets``, as far as
        nothing is left to be asked when the gradients are there but whether these are what they should be."""
        step, stopped = self._step, self._step.ledger.state is not State.OPEN
        beside = self._beside is not None and self._beside.takes_some
        if stopped or beside or not self._writes.are_prepared or is_profiled():
            return ()
        if any(bucket.devices[0].type != "cpu" and is_captured(bucket.devices[0]) for bucket in buckets):
            return ()  # each is a part of the graph, on streams that are
        self._writes.in_graph = False
        with step.lock:
            if step.judge is not None and step.judge.leaves_some:
                return ()
            return self._writes.prepare(buckets)

    def step_prepared(self, bucket: AttachedParameters, update: PreparedUpdate, *, arrived: bool = False) -> bool:
        """The gradients of a prepared bucket are final: step it. ``False``: it is not as it was found, and is to be
        offered, and applied, as others are. The caller holds the lock.

        Args:
            arrived: whether ``arrive`` was called with it.
        """
        step, tensors = self._step, update.tensors
        gradients: list[Any] = list(map(GRADIENT, tensors))
        if (
            step.ledger.state is not State.OPEN
            or self._failure.error is not None  # which has dropped the step, and this one is none of another
            or not (arrived or step.members.offered.isdisjoint(bucket.indices))
            or list(map(_DEVICE, tensors)) != bucket.devices
            or not are_usual(tensors, gradients, of_masters=update.of_masters)
        ):
            return False
        started = perf_counter()
        step.members.offered.update(bucket.indices)
        step.round.steppers_left.update(bucket.steppers)
        try:
            if tensors[0].is_cpu and self._has_default_device and self._default_device is None:
                if self._looks:
                    self._writes.ready(bucket, tensors, gradients)
                self._writes.begun = bucket
                update.run(gradients)
            else:
                self._run_as_loop(bucket, update, gradients)
            step.members.versions.update(zip(bucket.indices, update.versions, strict=True))  # as ``apply`` does
            step.members.applied.update(bucket.indices)
            self._writes.begun = NONE
        except BaseException as error:
            self.fail(error, self._writes.begun.names)
            return True
        del gradients
        step.times.ran(bucket, started)
        self._writes.retire(bucket, tensors)
        step.freed_bytes += bucket.nbytes
        return True

    def _run_as_loop(self, bucket: AttachedParameters, update: PreparedUpdate, gradients: list[torch.Tensor]) -> None:
        """On the step's stream; and, where the update may make tensors, with the loop's default device."""
        device = bucket.devices[0]
        side = None if device.type == "cpu" else self._step.streams.side(device)
        before = None if side is None else side.enter()
        try:
            with as_default_device(self._loops_device) if update.may_make_tensors else AS_IT_IS:
                if self._looks:
                    self._writes.ready(bucket, update.tensors, gradients)
                self._writes.begun = bucket
                update.run(gradients)
        finally:
            if side is not None and before is not None:
                if update.may_make_tensors:
                    self._writes.let_go_of_memory(device)
                side.leave(*before)
        if side is not None:
            side.hold(gradients)  # as they were: some optimizers replace .grad

    def _hand_over(self, beside: UpdatesBeside, bucket: AttachedParameters) -> bool:
        """Have the worker update ``bucket`` while backward goes on. ``False``: it is to be updated here."""
        step = self._step
        try:
            with step.lock:
                self._note_updates(MOST - 1)
                stopped = step.ledger.torn is not None or self._failure.error is not None or step.ledger.redoes
                if stopped or not beside.takes(bucket):
                    return False
                tensors = bucket.tensors()
                require_in_place(bucket, tensors)
                beside.hand_over(bucket)
                owe(self)
                step.members.apply(bucket, versions_of(tensors))
                return True
        except BaseException as error:  # also of a signal's handler: raised in a hook, it would leave DDP unusable
            self.fail(error)
            return False

    def _note_updates(self, most: int = 0) -> None:
        """Wait for updates beside backward until ``most`` are left, and note what has become of the others. If one has
        failed, wait for all: the step is torn."""
        beside = self._beside
        if beside is None or not beside.steps or beside.is_here:
            return
        with self._step.lock:  # another thread may fork, or synchronize
            for handed in beside.finished(most):
                self._note_update(beside, handed)
            if beside.failed is not None:
                most = 0
                for handed in beside.finished():
                    self._note_update(beside, handed)
                failure = beside.failed.step.outcome.failure
                assert failure is not None
                self._failure.keep(failure)
                if self._step.ledger.torn is None:
                    begun = beside.failed.step.outcome.begun
                    self._writes.stopped(failure, [name for name, is_over in begun.items() if not is_over])
            if not most:
                settled(self)
                beside.end_step()

    def _note_update(self, beside: UpdatesBeside, handed: Update) -> None:
        if handed.step.outcome.begun.get(handed.names[0]):
            self._step.members.apply(handed.members, versions_of(handed.tensors))  # with the versions that it has left
            return
        self._step.members.applied.difference_update(handed.members.indices)
        self._writes.take_back(handed.members, handed.gradients)
        beside.failed = beside.failed or handed

    def join(self) -> None:
        """The loop goes on after what was stepped on side streams, or by the worker."""
        self._step.streams.join()
        try:
            self._note_updates()
        except BaseException as error:  # of a signal's handler: raised here, it would leave DDP unusable
            try:
                self.fail(error)
            except BaseException:  # of another one, while that waited: it comes out of backward itself
                self._failure.error = None
                raise

    def count_freed(self, bucket: AttachedParameters) -> None:
        """Of those that were applied nobody has the gradients any more."""
        step = self._step
        if not self._writes.frees_gradients:
            return
        if not step.members.applied.issuperset(bucket.indices):
            bucket = AttachedParameters(filter(step.members.is_applied, bucket))
        step.freed_bytes += bucket.nbytes

    def retire(self, bucket: AttachedParameters) -> None:
        self._writes.retire(bucket)

    @property
    def updates_beside(self) -> bool:
        """Whether the worker may update a bucket after ``apply_and_free`` has returned."""
        return self._beside is not None and self._beside.takes_some

    @property
    def keeps_gradients(self) -> bool:
        """Whether all of the running step is left to ``optimizer.step()``. Not where backward has begun to apply it."""
        return self._step.leaves_all and not self._step.members.applied

    @property
    def measures(self) -> bool:
        """Whether the running backward takes the norms of gradients alone, and another one follows that steps."""
        return self._step.passes.running == "measuring"

    @property
    def only_adds(self) -> bool:
        return self._step.accumulation.only_adds

    @property
    def next_only_adds(self) -> bool:
        return self._step.accumulation.next_only_adds

    @property
    def waits_for_all(self) -> bool:
        """Whether nothing may be applied before all gradients are final, and ``compute_total_norm`` was called."""
        return self._step.passes.running == "all"

    def compute_total_norm(self) -> None:
        self._step.passes.clipping.compute_total_norm(self._step.members.all, gradient_of)

    def fail(self, error: BaseException, begun: Sequence[str] = ()) -> None:
        """Something stopped the step: torn if anything was written, else forgotten, as if it had never opened.

        The error is kept until the end of this backward, where the source raises it; the first one wins. ``begun``:
        names of the parameters whose update was stopped, too.
        """
        with self._step.lock:
            self._failure.keep(error)
            self._stop(error, begun)

    def updated_on_all(self) -> bool:
        """This rank has updated its parts of the parameters, or has failed to. Whether all ranks have updated theirs:
        each of them must ask once in a backward, before it writes a part that another rank has updated. If one has
        failed, the step is torn here, too."""
        step, failed = self._step, self._failure.error is not None
        try:
            with step.lock:
                if step.ledger.torn is not None:
                    return False  # the others know it
                vote = step.ledger.votes.updated(step.number, failed=failed)
                error = None if vote is None or failed else error_of(vote)
                if error is not None:
                    self._writes.tear(error, is_known=True)
                    self._failure.keep(step.ledger.torn_error(error))
                return not failed and error is None
        except BaseException as stopped:  # also of a signal's handler: nothing may be raised before DDP's own end
            self.fail(stopped)
            return False

    def backward_raised(self) -> None:
        """Backward is ending with an exception of its own. Nothing of this step is written any more."""
        with self._step.lock:
            self._failure.error = None
            self._stop(None)
            self._step.streams.finish()

    def raise_failure(self) -> None:
        """At the end of a backward: raise what stopped the step, with its own type."""
        self._failure.raise_if_any()

    def _stop(self, cause: BaseException | None, begun: Sequence[str] = ()) -> None:
        self._note_updates()  # what has become of them is a part of what is said
        if self._step.ledger.torn is None:
            self._writes.stopped(cause, begun)


# ``schedule="backward"``: buckets are stepped in backward, as soon as their gradients are final.
#
# A step opens with the first final gradient that a source offers, and is committed by the user's ``optimizer.step()``.
# While it is open, buckets are applied. What an update means until the commit is the affair of its ``Writes``: it is
# final, and an error tears the step, after which nothing more is written, and every later forward, backward and step
# says so; or it is a trial (``undo``), which an error rolls back.


class BackwardSchedule(BucketSink):
    """The current step of one attachment, and the steps before it."""

    def __init__(
        self,
        step: RunningStep,
        deferring: Callable[[], Deferring] | None = None,
        undo: Undo | None = None,
        scale: LossScale | None = None,
    ) -> None:
        if undo is None:
            writes: Writes = FinalWrites(step)
        else:
            writes = TrialWrites(step, undo, scale, self)
        super().__init__(step, writes, deferring)
        step.lock.torn_by = step.round.lock.torn_by = weakly(self._ended_anywhere)
        step.ledger.votes.follows_writes = True
        self.calls: BackwardCalls = BackwardCalls(step, writes, WeakMethod(self._note_updates))

    def _ended_anywhere(self, error: BaseException) -> None:
        if self._step.ledger.torn is None:
            self._writes.tear(error, [a.spec.name for a in self._step.members.all])

    # What happens during backward.

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient, before any parameter does. Returns whether this is
        the first of them in the running backward.

        Raises ``AccumulationError``, before anything is written or reduced, if an earlier backward of this step has
        already updated weights. Some outputs lie deep in the graph: in the same backward they are met later.
        """
        step = self._step
        if not step.backwards.is_new():
            return False
        if step.accumulation.runs_stages is False:
            step.require_run()
        if step.accumulation.runs_stages:
            return True  # other stages of this rank may be stepped by now; the source says when this one is through
        self._writes.before_backward()
        step.accumulation.begin()
        if step.accumulation.next_only_adds:
            step.ledger.has_added = True
        else:
            self.begin_final_backward()
        return True

    def hear_of_last_step(self) -> None:
        self.cast_owed()
        self._step.hear(self._writes.stop_watching, wait=True)

    def run_failed(self) -> None:
        self.backward_raised()
        if self._step.ledger.torn is None:  # else they have been told, or have told it
            self._step.ledger.votes.say_failed(self._step.number)

    def begin_final_backward(self) -> None:
        step = self._step
        super().begin_final_backward()
        step.hear(self._writes.stop_watching, wait=True)
        if step.members.applied:
            raise AccumulationError(
                f"a second backward began before {owed_steps(step)}, but the first has already updated the weights. "
                f"{several_backwards()}, or add the losses and call backward() once. {KEEP_ALL}"
            )
        step.backwards.begins_step()
        for stepper in step.members.steppers:  # a trainer may have replaced the ``step`` of an optimizer since
            if stepper.is_foreign and (step.judge is None or stepper not in step.judge.due):
                step.judge = step.judge or Judge((), in_parts=True)
                step.judge.meet(stepper)
        if self._deferring is not None and self._beside is None:
            self._beside = UpdatesBeside(step, self._deferring(), self._note_updates)
        if self._beside is not None:
            self._beside.backward_begins()

    def backward_failed(self) -> None:
        """An error may have come when a gradient was offered, and before its source had asked for the end of backward.
        If an update was begun, the source has."""
        members = self._step.members
        if members.offered and not members.applied and self._step.ledger.torn is None:
            self.backward_raised()

    def run_raised(self, run: Run, error: BaseException) -> BaseException | None:
        """Any backward, or ``torch.autograd.grad``, has raised: one that may write has been heard of in its hooks. Half
        a step is not to be committed: what a later one has left out, the loop must not step without."""
        step = self._step
        step.backwards.drain_failed()
        with step.lock:
            is_refused = is_of_written(error) or isinstance(error, AccumulationError)
            members = step.members
            if step.ledger.torn is not None or not members.applied or not step.backwards.is_loops():
                return None
            gives = run.accumulates and (not run.inputs or not _ids(run.inputs).isdisjoint(_ids(members.living())))
            if not (gives or is_refused) or not run.comes_to(members.living()):
                return None  # as in the plain loop, whose gradients it has not changed
            instead: AccumulationError | None = None
            if is_of_written(error):
                what = "a second backward()" if run.accumulates else run.call
                instead = AccumulationError(
                    f"{what} came, before {owed_steps(step)}, to weights that the first backward has already updated. "
                    f"{several_backwards()}, or add the losses and call backward() once. {KEEP_ALL}"
                )
            self._stop(error if instead is None else instead)
            return instead

    def stop(self, error: InstepError) -> None:
        """The backward that has just ended did not compute the plain loop's step: put it back, or it is torn."""
        try:
            self._writes.stopped(error)
            raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    # Two passes.

    def backward(self, loss: Losses, gradient: torch.Tensor | None, adopt: Callable[[], None]) -> None:
        """With ``ClipNorm(mode="two_pass")``: a backward that measures, and one that steps. See ``Passes``."""
        passes, accumulation = self._step.passes, self._step.accumulation
        if passes.clipping.mode != "two_pass" or accumulation.next_only_adds or self.keeps_gradients:
            torch.autograd.backward(loss, gradient)
            return
        if self.state != "open":
            adopt()
        if accumulation.distributed:
            with passes.measured(waits_for_all=True):
                torch.autograd.backward(loss, gradient)
            return
        self._measure(loss, gradient)
        if unproved := passes.unproved_in(loss):
            # Before anything is written of it for the first time, its second backward is seen to give the first's.
            with passes.proving(unproved):
                self._measure(loss, gradient)
        with passes.measured():
            torch.autograd.backward(loss, gradient)
            try:
                left = [(a, g) for a in self._step.members.all if (g := gradient_of(a)) is not None]
                passes.require_measured([a for a, _ in left], [g for _, g in left])
            except InstepError as error:
                self.stop(error)

    def _measure(self, loss: Losses, gradient: torch.Tensor | None) -> None:
        passes = self._step.passes
        with passes.measuring() as parameters:
            if not parameters:
                return  # all that are attached may be frozen
            try:
                torch.autograd.backward(loss, gradient, retain_graph=True, inputs=parameters)
            except RuntimeError as error:
                passes.require_seen(loss)  # torch names inputs=, which the loop has not given
                if "donated_buffer" in str(error):  # and a switch, which is not enough
                    raise InstepError(
                        f"the graph cannot be run twice. Nothing was updated. {COMPILED_TWICE}"
                    ) from error
                raise
            passes.require_seen(loss)

    # What the user does.

    def before_forward(self) -> None:
        """Before a forward: raise if the weights are not those the plain loop would read."""
        step = self._step
        if not (torch.is_grad_enabled() or step.backwards.is_loops()):
            # Another thread evaluates. What is to be brought to its end may be under way on the loop's.
            step.ledger.require_whole()
            self._writes.before_forward()
            return
        step.backwards.drain_failed()
        # A rank that has found parts to differ raises here, and a forward under FSDP would wait for it.
        step.hear(self._writes.stop_watching, wait=step.judge is not None and step.judge.has_compared)
        self.calls.require_not_torn()
        if step.judge is not None:
            step.judge.look(step.members.all)
        step.accumulation.waiting()  # what the loop has thrown away is freed before the forward needs memory
        self._writes.before_forward()
        if self._clips and not step.members.offered:
            step.passes.clipping.begin()
        if step.ledger.redoes and not [a for a in step.members.all if gradient_of(a) is not None]:
            # A step that was rolled back and never taken: zero_grad() has ended it.
            step.ledger.happened(Event.DROPPED)
            self._writes.end_step()

    def require_whole(self) -> None:
        self.calls.require_whole()

    # What the user asks for.

    def give_up(self, *, gradients: bool) -> None:
        """Go back to IDLE from any state, and take spent gradients, or all of them, off the parameters."""
        step = self._step
        step.backwards.drain_failed()
        self._writes.stop_watching()
        for attached in step.members.all:
            parameter = attached.peek()
            if parameter is not None and (gradients or parameter.grad is attached.spent):
                parameter.grad = None
        self._failure.error = None
        step.ledger.give_up()
        step.accumulation.stepped()
        self._writes.end_step()

    def last_complete_step(self) -> int | None:
        self._step.backwards.drain_failed()
        return super().last_complete_step()

    def accept(self) -> bool:
        """A step that is open with weights written is torn, too."""
        step = self._step
        step.backwards.drain_failed()
        is_written = bool(step.members.applied) or step.round.stepper is not None
        if step.ledger.torn is None and self._writes.frees_gradients and is_written:
            self._writes.tear(InstepError("it was given up"))
        return super().accept()

    def close(self) -> None:
        """The step that is open is the plain loop's from now on, as far as it can be: of a step that was applied in
        part, the rest is clipped as that part was."""
        self.settle()
        members = self._step.members
        try:
            if self._step.ledger.torn is None and members.applied and graph_task() is None:
                for stepper in members.steppers:
                    if stepper.groups and members.applied_by(stepper):  # else the optimizer is gone
                        # What its updates have left in attributes stands, as parameters do.
                        left = members.left_by(stepper)
                        stepper.commit(rest=[a.get() for a in left if gradient_of(a) is not None])
                self._writes.clip_rest([a for a in members.all if not members.is_applied(a) and a.peek() is not None])
        finally:
            self.give_up(gradients=False)
            if self._beside is not None:
                self._beside.close()

    def settle(self) -> None:
        """A child has no worker, and a step on trial is not the plain loop's."""
        self._step.backwards.drain_failed()
        self._note_updates()
        self._writes.settle()

    def abandon(self) -> None:
        """The optimizers are gone: nobody can commit the step that is open."""
        try:
            self.settle()
        finally:
            for stepper in self._step.members.steppers:
                stepper.abort()

    def synchronize(self) -> None:
        self._step.backwards.drain_failed()
        self._step.streams.join_all()
        for stepper in self._step.members.steppers:
            stepper.wait_for_state()
        self._step.hear(self._writes.stop_watching, wait=True)

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """The optimizer's state is about to be saved or loaded: the plain loop's is that of before this step. What is
        torn may be loaded anew, and not be saved."""
        self._step.backwards.drain_failed()
        if saving:
            self.before_save()
        if self._step.round.stepper is None and self._step.members.applied_by(stepper):
            self._writes.before_state(stepper)

    def before_save(self) -> None:
        """The model or its optimizer's state is about to be saved: not a step that is torn, here or on another rank."""
        self._step.backwards.drain_failed()
        self.end_stopped()
        self._step.hear(self._writes.stop_watching, wait=True)
        self._step.ledger.require_whole()

    def before_load(self, model: str) -> None:
        """The model's ``load_state_dict()`` is called, which would name each parameter that it may not write."""
        self._step.backwards.drain_failed()
        self._writes.before_load(model)

    def rollback(self) -> None:
        """Put the step back, and clear its gradients: the loop is where it was after the last ``optimizer.step()``."""
        self._writes.rollback_if_any()
        self.give_up(gradients=True)

    def error_for_use(self, spec: ParameterSpec, operation: str) -> InstepError | None:
        """The error for ``operation`` on a spent gradient; ``None`` lets it pass.

        The step is torn if its weights are now known to be wrong.
        """
        if self._step.passes.running == "measuring":
            return while_measuring(spec.name, operation)
        if spec.index not in self._step.members.applied:
            return None if self._needs_no_values(spec, operation) else never_cleared(spec.name, operation)
        error, is_wrong = after_update(spec.name, operation, clips=self._step.passes.clipping.policy is not None)
        if is_wrong and self._step.ledger.torn is None:
            self._writes.tear(error)
        return error

    def _needs_no_values(self, spec: ParameterSpec, operation: str) -> bool:
        """Between steps: whether ``operation`` on a gradient of the step before is done without its values. If it is
        to be zeroed, it is now."""
        attached, wrapped = self._step.members.by_index[spec.index], self._step.accumulation.distributed
        if operation in ZERO:
            attached.get().grad = _zeros(attached, lasting=wrapped)
        # Added to, it is as little known as before: an actor's loss adds to its critic's gradients, which the loop
        # clears before they count. Where it does not, optimizer.step() finds a spent gradient. But DDP's reducer and
        # FSDP would take the sum at once.
        adds = operation in ACCUMULATE and graph_task() is not None and not wrapped and attached.mesh is None
        return adds or operation in (*ZERO, CONVERSION, DETACH) or operation in NEW_LIKE

    @property
    def deferral(self) -> str | None:
        return None if self._beside is None else self._beside.said

    @property
    def state(self) -> str:
        """``"idle"``, ``"open"`` or ``"torn"``."""
        self._step.backwards.drain_failed()
        return "torn" if self._step.ledger.torn is not None else "open" if self._step.members.offered else "idle"

    def after_forward(self) -> None:
        """The model's forward has returned: its streams have read weights."""
        self.streams.see(self._step.members.all[0].spec.device)
        if torch.is_grad_enabled():  # an evaluation in between may have another one
            self._default_device, self._has_default_device = default_device(), True

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters: raise, or roll back, if backward has updated one of them."""
        if self.state == "open" and any(map(self.is_applied, parameters)):
            self.before_forward()


def _ids(tensors: Iterable[torch.Tensor]) -> set[int]:
    return set(map(id, tensors))


def _zeros(attached: AttachedParameter, *, lasting: bool) -> torch.Tensor:
    """A gradient of zeros. A ``lasting`` one is real: DDP or FSDP adds to it."""
    parameter = attached.get()
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        dtype = dtype_of_gradient(parameter)
        if any(getattr(place.module(), "sparse", False) for place in attached.places):
            # As torch zeroes a sparse one, in which lazy optimizers find nothing to step.
            where = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            rows = parameter.new_empty((0, *parameter.shape[1:]), dtype=dtype)
            return torch.sparse_coo_tensor(where, rows, parameter.shape, check_invariants=False)
        if lasting or attached.mesh is not None:
            return torch.zeros_like(parameter, dtype=dtype)
        return ZeroedGradient(parameter, dtype=dtype)


class BackwardCalls(StepCalls):
    """The calls of ``optimizer.step()``, which find spent gradients taken off the parameters that backward has updated.

    Args:
        note_updates: waits for updates beside backward: a signal's handler may have ended that.
    """

    def __init__(self, step: RunningStep, writes: Writes, note_updates: "WeakMethod[Callable[[], None]]") -> None:
        super().__init__(step)
        self._writes = writes
        self._note_updates = note_updates

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        self._step.backwards.drain_failed()
        self.require_not_torn()

    def require_not_torn(self) -> None:
        """The same, where no backward and no commit is under way."""
        step = self._step
        if step.round.stepper is not None:  # else no step() runs, or has raised
            self.end_unless_it_evaluates_again()
            if step.round.evaluates_again:
                return  # a line search: all of the step is left to step(), which goes on
        if step.ledger.torn is not None:
            step.ledger.require_whole()

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        if self._step.members.applied_by(stepper) and self._step.ledger.torn is None:
            try:
                self._writes.leave_to_optimizer(error)
            finally:
                del error  # or it would refer to itself, by way of this frame

    def _prepare(self, stepper: Stepper) -> None:
        step, writes = self._step, self._writes
        if step.backwards.running is not None and step.accumulation.distributed:
            self._require_backward_over(stepper)
        if (note_updates := self._note_updates()) is not None:
            note_updates()
        step.accumulation.require_reduced()
        step.hear(writes.stop_watching, wait=True)  # for a backward that nobody has seen to begin
        self.require_not_torn()
        if writes.in_graph:
            self._require_one_graph()
        members, owed = step.members, step.round.steppers_left
        # Whether it has stepped already in this step, in which others owe theirs.
        again = owed and stepper not in owed and writes.frees_gradients and members.applied_by(stepper)
        left = members.left_by(stepper)
        for attached in members.of(stepper) if again else left:
            if attached.spent is not None and attached.get().grad is attached.spent:
                raise never_cleared(attached.spec.name, f"{stepper.name}.step()")
        if again and not finds_gradient(stepper.optimizer()):
            return  # torch does nothing then
        if not step.round.steppers_left:
            step.count_gradients(stepper, writes.real_gradient)
        writes.before_step(stepper, left)

    def _require_backward_over(self, stepper: Stepper) -> None:
        """``step()`` may be called in a callback of backward, where DDP, or FSDP, may not be through with it."""
        step = self._step
        is_early = not step.members.offered or step.members.all[0].spec.group is None
        if is_early and step.backwards.running == graph_task():
            raise AccumulationError(
                f"{stepper.name}.step() was called in the running backward, by a callback (queue_callback), before the "
                "gradients of all ranks were there and stepped. Call it once backward() has returned, or attach "
                "without schedule=, which leaves it to torch"
            )

    def _require_one_graph(self) -> None:
        """``step()`` is recorded with the backward that has stepped, or neither is."""
        step = self._step
        if step.members.applied and not is_captured(step.members.all[0].spec.device):
            raise UncommittedStepError(
                "backward was recorded in a CUDA graph, with the updates of its buckets, and optimizer.step() is "
                "called outside of it: each replay would step by itself. Record optimizer.step() and zero_grad() in "
                "the same graph, or attach with schedule='forward'. To go on without the graph: overlap.accept_torn()"
            )

    def _finish(self, stepper: Stepper) -> None:
        if self._step.judge is not None:
            self._require_in_parts(self._step.judge, stepper)
        self._writes.require_at_rest(stepper)

    def _require_in_parts(self, judge: Judge, stepper: Stepper) -> None:
        """Raise, and tear the step, if parts of it were taken in backward, and should not have been."""
        error = judge.after_update(stepper)
        try:
            if error is not None:
                self._step.round.stepper = None
                self._writes.tear(error)
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def _settle(self, stepper: Stepper) -> None:
        step = self._step
        stepper.commit()
        step.round.show()
        step.round.restore_settings()
        applied = step.members.applied_by(stepper)
        # The plain loop still has its gradients here, until the user clears them.
        self._writes.committed(stepper, applied)

    def _committed(self, *, taken: bool) -> None:
        self._writes.end_step()
        if not taken:
            return
        step = self._step
        try:
            objects = step.judge is not None and step.judge.committed()
            step.ledger.votes.committed(step.ledger.step_count, objects=objects)
        except Exception as error:
            self._writes.tear_last(error)
            raise

    def end_stopped(self) -> None:
        if self._step.round.was_stopped:
            self.require_whole()

    def _end_raised(self, stepper: Stepper) -> None:
        if self._step.ledger.torn is None:
            self._writes.step_stopped(stepper)
        self._step.ledger.require_whole()
