"""``schedule="forward"``: ``optimizer.step()`` hands over, and returns; weights are written by the time they are read.

Until ``optimizer.step()`` this is the plain loop: gradients are in ``.grad``, to be clipped, scaled, accumulated or
thrown away. ``step()`` takes them off, with the optimizer's groups as they are at that moment, and they are applied
bucket by bucket in the order in which the model reads its parameters: by a worker thread on CPU, on a side stream on
accelerators. Before a module runs, and whenever anybody uses a parameter in Python, its bucket is waited for.
"""

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import is_
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from instep._autograd.engine import Backwards, graph_task
from instep._autograd.placeholders import HeldGradient
from instep._autograd.watch import Watch, plain_type
from instep._gradients.clipping import Clip, Clipping
from instep._gradients.finite import Policy, ask_if_finite, nonfinite_error
from instep._gradients.scaling import found_inf, take_off_here
from instep._life.life import owe, settled
from instep._life.weak import WeakMethod
from instep._life.worker import Task, Worker, ending
from instep._optim.autocast import autocast_matters, require_same_in_autocast
from instep._optim.entries import Entries
from instep._optim.parameters import AttachedParameter, OptimizerCall, calls_of, part_of_gradient
from instep._optim.parts import memory_of, version_of
from instep._optim.plan import Bucket, fill_buckets
from instep._optim.stepper import (
    Stepper,
    asks_for_state,
    begin_state,
    can_be_frozen,
    end_state,
    frozen,
    is_torchs_own,
    remember_settings,
    writes_without_gradient,
)
from instep._optim.switches import DEFAULT_DTYPE, MKLDNN, default_dtype, switched, switches
from instep._optim.waiting import StateWatch
from instep._ranks.votes import StepVotes, Vote, error_of
from instep._step.accumulation import Accumulation
from instep._step.backward_schedule import Gather, Recorder
from instep._step.checking import Check
from instep._step.streams import Mark, StepStreams
from instep._step.torn import Torn
from instep.errors import InstepError, StepMismatchError, UncommittedStepError, UnsupportedOptimizerError


class Reader:
    """The forward pre-hook of a module that reads parameters.

    Attributes:
        parameters: those that its forward reads.
        traced: whether it was compiled together with the module: then it does not run, and cannot wait.
    """

    def __init__(self, parameters: Sequence[AttachedParameter], before_read: Callable[..., None]) -> None:
        self.parameters = tuple(parameters)
        self.traced = False
        self._before_read = WeakMethod(before_read)  # its owner has this in a list

    def __call__(self, module: object, args: object) -> None:
        if torch.compiler.is_compiling():
            self.traced = True
        elif graph_task() is None and (before_read := self._before_read()) is not None:
            before_read(self.parameters)


class InFlightBucket(Protocol):
    """A bucket whose gradients may still be on their way when ``optimizer.step()`` is called."""

    @property
    def parameters(self) -> Sequence[AttachedParameter]: ...

    def gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """What will hold it; ``None`` if something else is in ``.grad`` by now."""

    def wait(self) -> None:
        """Return when it has arrived, for the current stream. Raises what the communication raised."""

    def land(self) -> None:
        """Wait, and have ``.grad`` be what it is in the plain loop."""


class HandedOverStep:
    """An optimizer as it was when its ``step()`` was called, with what has become of that step."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[AttachedParameter], number: int, vote: Vote | None
    ) -> None:
        self.number = number
        self.optimizer = weakref.ref(optimizer)
        self._frozen = frozen(optimizer)  # held here: the stepper holds it weakly
        self.stepper = Stepper(self._frozen)
        # torch.compiler.is_compiling() is true for all threads while one of them compiles, and a step then computes
        # its bias corrections in another way. Fused kernels do not.
        self.known = is_torchs_own(optimizer)
        self.switches = switches()
        self.at_any_time = self.known and all(group.get("fused") for group in optimizer.param_groups)
        self.dues: list[PendingBucket] = []  # that are still to be applied
        self.outstanding: list[PendingBucket] = []  # that nobody has waited for
        self.pending = [attached.spec.name for attached in parameters]
        self.applied: list[str] = []
        self.failure: BaseException | None = None
        self.written = False  # anything of it
        self.refused = False  # by the other ranks
        self.told = False  # whether the loop has heard of the failure
        self._vote = vote
        self._parameters = tuple(parameters)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimizer's own."""
        return self._frozen.state

    def hear(self) -> None:
        """Wait until all ranks stand behind this step, before anything of it is written."""
        vote, self._vote = self._vote, None
        if vote is not None and (error := error_of(vote)) is not None:
            self.failure, self.refused = error, True

    def raise_interrupt(self) -> None:
        """Ctrl-C in an update that the loop's own thread has run is for the loop, at once; and the step is torn."""
        error = self.failure
        if error is not None and not isinstance(error, Exception):
            self.failure, self.told = InstepError(f"{self.stepper.name}.step() was interrupted"), True
            raise error

    def stepped_here(self) -> list[torch.Tensor]:
        """Its parameters, those aside that another rank updates."""
        here = [a.peek() for a in self._parameters if a.part is None or a.part.is_owner]
        return [parameter for parameter in here if parameter is not None]


class PendingBucket:
    """One bucket of it. Nothing here refers to the attachment, which may be dropped while a thread runs this."""

    def __init__(
        self,
        parameters: Sequence[AttachedParameter],
        step: HandedOverStep,
        clip: Clip | None,
        recorder: Recorder | None,
        flight: InFlightBucket | None,
        keep: Callable[[OptimizerCall, Mapping[Any, Any]], None] | None,
    ) -> None:
        self.names = [attached.spec.name for attached in parameters]
        self.tensors = [attached.get() for attached in parameters]
        self.gradients = [_gradient(attached, flight) for attached in parameters]
        self._flight = flight
        self.device = self.tensors[0].device
        self.step = step
        self.done: Task | None = None
        self.sent = False
        self._receive: Callable[[], None] | None = None
        self.mark: Mark | None = None
        self._clip = clip
        self._recorder = recorder
        self._keep = keep
        # The parameters' own .grad, flags and attributes are the user's: they may be read and changed meanwhile.
        self._calls = calls_of(zip(parameters, self.gradients, strict=True), alias=True)
        for tensor in self.tensors:
            tensor.grad = None
        # From here on a graph that has saved the old weights refuses to run, as after the plain loop's step.
        torch.autograd.graph.increment_version(self.tensors)
        # Kept, not looked up again: whoever reads the local tensor of a watched DTensor waits for this very update.
        all_of_it = (*self.tensors, *self.gradients)
        self._memory = [None if tensor.is_inference() else (tensor, memory_of(tensor)) for tensor in all_of_it]
        self._versions = self._found()
        self._entries = Entries()
        self._entries.add(self.tensors, step.state)
        step.dues.append(self)
        step.outstanding.append(self)

    def _found(self) -> list[int]:
        return [-1 if both is None else both[0]._version + both[1]._version for both in self._memory]

    def apply(self) -> None:
        """Update the parameters, once, unless an earlier bucket of the step failed. An error is kept."""
        if self not in self.step.dues:
            return
        self.step.hear()
        self.step.dues.remove(self)
        if self.step.failure is not None:
            return
        try:
            self._arrive()
            started = perf_counter()
            # Whoever watches a parameter waits for this thread.
            with torch._C.DisableTorchFunctionSubclass():
                self._apply()
        except BaseException as error:
            self.step.failure = error
            return
        self._calls = []
        if self.device.type == "cpu":
            self._memory, self.gradients, self._entries = [], [], Entries()
        # Else the side stream still reads them: they stay until it was waited for, and who writes them races with it.
        self.step.applied += self.names
        if self._recorder is not None:
            self._recorder("step", self.names, started, perf_counter())

    def _arrive(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.wait()
            self._versions = self._found()  # it has been written since

    def send(self, parameters: Sequence[AttachedParameter], gather: Gather) -> None:
        """Update this rank's parts now, and send them. What is left is to wait for those of the others."""
        self.sent = True
        self.apply()
        # Whether that failed or not: the other ranks wait for it.
        try:
            self._receive = gather([a for a in parameters if a.part is not None and a.part.state_is_sharded])
        except BaseException as error:
            self._receive = lambda: None
            self.step.failure = self.step.failure or error

    def finish(self) -> None:
        """Do what is left to do."""
        receive, self._receive = self._receive, None
        if receive is None:
            self.apply()
            return
        try:
            with torch._C.DisableTorchFunctionSubclass():
                receive()
        except BaseException as error:
            self.step.failure = self.step.failure or error

    def look(self) -> None:
        """What is there now is what is to be there when somebody waits for it."""
        self._versions = self._found()
        self._entries = Entries()
        self._entries.add(self.tensors, self.step.state)

    def require_left_alone(self) -> None:
        names = (*self.names, *(f"{name}.grad" for name in self.names))
        for name, found, version in zip(names, self._found(), self._versions, strict=True):
            if found != version:
                raise UncommittedStepError(
                    f"{name!r} was written after optimizer.step(), through another tensor of the same memory, while "
                    "the update was due: in the plain loop it had been applied by then. Call overlap.synchronize() "
                    "before such a write"
                )
        if self._entries.written or not self._entries.are_in(self.step.state):
            raise UncommittedStepError(
                f"the state of {self.names[0]!r}, or of another parameter of its bucket, was written after "
                "optimizer.step(), through a reference that was taken before, while the update was due: in the plain "
                "loop it had been applied by then. Call overlap.synchronize() before such a write"
            )

    def raced(self, error: BaseException) -> None:
        """Somebody has written what the update, which is under way, reads or writes."""
        self.step.failure = self.step.failure or error
        self.step.applied = [name for name in self.step.applied if name not in self.names]

    def _apply(self) -> None:
        self.require_left_alone()
        self._require_same_switches()
        # Whoever may ask for the default dtype meanwhile waits for this update, unless it can run at any time.
        with nullcontext() if self.step.at_any_time else default_dtype(self.step.switches[DEFAULT_DTYPE]):
            self._step()

    def _require_same_switches(self) -> None:
        # torch.export may be what waits: it has switched mkldnn off.
        difference = None if self.step.known else switched(self.step.switches, but=(DEFAULT_DTYPE, MKLDNN))
        if self.step.at_any_time and not all(map(self.step.state.get, self.tensors)):
            # State that is made there is of float64, or not.
            dtypes = (self.step.switches[DEFAULT_DTYPE], torch.get_default_dtype())
            if dtypes.count(torch.float64) == 1:
                difference = switched(self.step.switches)
        if difference is not None:
            raise UncommittedStepError(
                f"{difference}, since optimizer.step(), which has put off the update of {self.names[0]!r}. Call "
                "overlap.synchronize() before such a change"
            )

    def _step(self) -> None:
        for call in self._calls:
            if self._clip is not None:
                with self._noticed_by_none():
                    self._clip(call.tensors)
            if self._keep is not None:
                self._keep(call, self.step.state)
            self.step.written = True
            gradients = [tensor.grad for tensor in call.tensors]
            call.step(self.step.stepper)
            if not self.step.known:
                self._require_contained([tensor.grad for tensor in call.tensors], gradients)

    def _require_contained(self, found: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
        """What the update left elsewhere would have been there when ``optimizer.step()`` returned."""
        stepper = self.step.stepper
        replaced = not all(map(is_, found, given))
        if replaced or stepper.wrote_elsewhere:
            where = "the gradient of a parameter" if replaced else "a value of its groups, its attributes or its state"
            raise UnsupportedOptimizerError(
                f"{stepper.name} replaced {where} in step(), for the first time in a step that was put off: until now "
                "the loop would have found the old one. Use schedule='backward', or this optimizer without instep"
            )

    @contextmanager
    def _noticed_by_none(self) -> Iterator[None]:
        """Around a write of this bucket's gradients. Those that are views of one of DDP's buckets count their writes
        together, wherever they are stepped."""
        right = [due for due in self.step.outstanding if due._found() == due._versions]
        yield
        for due in right:
            due._versions = due._found()


class ForwardSchedule:
    """The steps of one attachment that were handed over.

    Args:
        can_wait: the optimizers whose update can be put off. The others are stepped at once, by torch.
        bucket_bytes: bytes of gradient at which a bucket is full.

    Attributes:
        step_count: how many steps were taken: calls of ``optimizer.step()`` with gradients to apply; with several
            optimizers, rounds of them.
        skip_count: how many steps were left out, for a gradient that was not finite.
        recorder: told of each bucket's step and communication; ``None`` when nobody listens.
        readers: the hooks of the modules that read parameters.
        gather: where each rank steps its own part of parameters: gets the others' parts.
        backwards: those that were seen to begin.
        flights: the buckets that may still be on their way.
        at_once: whether nothing is to be put off at present: it would take more time than it saves.
    """

    redo_count = 0

    def __init__(
        self,
        can_wait: Iterable[Stepper],
        ranks: StepVotes,
        accumulation: Accumulation,
        clipping: Clipping,
        bucket_bytes: int,
        nonfinite: Policy = "allow",
        check: Check | None = None,
    ) -> None:
        self.parameters: tuple[AttachedParameter, ...] = ()
        self.readers: list[Reader] = []
        self.streams = StepStreams()
        self.step_count = 0
        self.skip_count = 0
        self.recorder: Recorder | None = None
        self.gather: Gather | None = None
        self.backwards = Backwards()
        self.flights: Callable[[], Sequence[InFlightBucket]] = lambda: ()
        self.at_once: Callable[[], bool] = lambda: False
        self._can_wait = frozenset(can_wait)
        self._ranks = ranks
        self._nonfinite = nonfinite
        self._check = check
        self._vote: Vote | None = None  # on the step that is being handed over
        self._taken = True
        self._settings: Callable[[], None] | None = None
        self._accumulation = accumulation
        self._clipping = clipping
        self._bucket_bytes = bucket_bytes
        self._worker = Worker()
        self._lock = threading.RLock()
        self._watch = Watch(values=self._used)
        self._watch_in_step = Watch(values=self._used, gradient=self._used_in_step)
        self._gradient_watch = Watch(values=self._used_spread_gradient)
        self._state_watch = StateWatch(self._used_state)
        self._when_used = WeakMethod(self._used_gradient)
        self._due: dict[int, PendingBucket] = {}  # by the parameter's id
        self._read: dict[int, None] = {}  # in the order in which forwards read them
        self._switches_in_forward: dict[str, Any] | None = None
        self._went_back = False  # whether a backward was seen to begin since the last step
        self._backward: int | None = None
        self._owing: set[Stepper] = set()
        self._clipped: set[Stepper] = set()
        self._flushing: Stepper | None = None
        # Whose step() has returned, with the numbers of steps that are to be when this has been taken note of.
        self._committing: tuple[Stepper, int, int] | None = None
        self._ending_commit = False
        self._beginning = False  # whether what was handed over is being sent
        self._now = False
        self._placeholders: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rest: list[str] = []  # left to step() itself, beside what is handed over
        # What was handed over, and step() itself has come to nevertheless, with the version that it has found.
        self._met: list[tuple[str, torch.Tensor, int]] = []
        self._torn: Torn | None = None

    # What the model reads.

    def before_forward(self) -> None:
        """The model is about to run."""
        self.backwards.let_go()
        self._switches_in_forward = switches()
        self._end_commit()
        if self._flushing is not None:
            self._end_raised(self._flushing)
        self.before_read(())
        if self._accumulation.distributed:
            # DDP may lay out its buckets anew now, and copy what is in .grad.
            self._finish(due for due in self._dues() if any(isinstance(t.grad, HeldGradient) for t in due.tensors))

    def before_read(self, parameters: Sequence[AttachedParameter]) -> None:
        """These parameters are about to be read."""
        if torch.is_grad_enabled():
            for attached in parameters:
                self._read.setdefault(attached.spec.index)
            if parameters:
                self.streams.makers.saw(parameters[0].spec.device)
        if self._due:
            # Without gradients some modules choose a fused path, for which they read the parameters of others.
            some = torch.is_grad_enabled()
            self._finish([self._due.get(id(a.peek())) for a in parameters] if some else self._dues())
        self.streams.follow()  # what the loop's stream has waited for, this forward's may not have
        self.require_whole()

    def synchronize(self) -> None:
        """Wait for everything that is due."""
        self.backwards.let_go()
        self._end_stopped()
        self._finish(self._dues())
        self.streams.follow()
        self.require_whole()

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        if self._torn is not None:
            raise self._torn.error()

    def _dues(self) -> list[PendingBucket]:
        return list(dict.fromkeys(self._due.values()))

    def _finish(self, dues: Iterable[PendingBucket | None]) -> None:
        """Wait for these buckets. Raises what stopped one of them, once."""
        if self._worker.is_here:
            return  # an update that comes upon the model or its optimizer: who waits for it has the lock
        with self._lock:
            for due in dues:
                if due is not None and id(due.tensors[0]) in self._due:
                    self._wait(due)
                    if due.step.failure is not None and self._torn is None:
                        self._tear(due.step)
                        self._raise_failure(due.step)

    def _raise_failure(self, step: HandedOverStep) -> None:
        """Nothing keeps what is raised here: its frames refer to the model."""
        assert self._torn is not None
        failure, step.failure = step.failure, self._torn.cause
        try:
            if failure is not None and not step.told and (not step.refused or isinstance(failure, StepMismatchError)):
                raise failure
        finally:
            del failure
        self.require_whole()

    def _wait(self, due: PendingBucket) -> None:
        if due.device.type != "cpu":
            self.streams.wait(due.mark or self._finished(due))
            if due.step.failure is None:
                try:
                    due.require_left_alone()
                except UncommittedStepError as error:
                    due.raced(error)
        else:
            with _not_compiling():
                due.done = due.done or self._worker.run(due.finish)
                started = perf_counter()
                due.done.wait()
                if self.recorder is not None:
                    self.recorder("waiting", due.names, started, perf_counter())
        self._let_go(due)

    def _let_go(self, due: PendingBucket) -> None:
        """It has been applied, or has failed."""
        self._watch.stop(due.tensors)
        for tensor in due.tensors:
            self._due.pop(id(tensor), None)
            if isinstance(tensor.grad, HeldGradient):
                tensor.grad = tensor.grad.held  # nobody has cleared it: the plain loop's is still there
            elif tensor.grad is not None:
                self._gradient_watch.stop([tensor.grad])
        step = due.step
        step.outstanding = [one for one in step.outstanding if one is not due]
        if any(d.step is step for d in self._dues()):
            return
        if (optimizer := step.optimizer()) is not None:
            self._state_watch.stop(optimizer)
        if len(step.applied) == len(step.pending) and step.failure is None:
            step.stepper.commit(optimizer)
            if optimizer is not None:
                end_state(optimizer, step.stepped_here())
        if not self._due:
            settled(self)

    def _tear(self, step: HandedOverStep) -> None:
        for due in self._dues():
            self._wait(due)
        pending = [name for name in step.pending if name not in step.applied]
        accepted = step.number if step.written else step.number - 1
        in_part = bool(step.written and pending)
        self._torn = Torn(step.number, step.applied, pending, self._ranks.rank(), step.failure, accepted, in_part)
        if not step.refused:
            self._ranks.say_failed(step.number + 1)

    def _end_stopped(self) -> None:
        """An error or Ctrl-C may have ended ``optimizer.step()``: what it has handed over stands."""
        if self._worker.is_here or self._ending_commit:
            return
        if self._committing is not None:
            if self._committing[0].was_stopped:
                self._end_commit()
        elif self._flushing is not None and self._flushing.was_stopped:
            self._end_raised(self._flushing)

    def _end_raised(self, stepper: Stepper) -> None:
        """``step()`` has raised. What was handed over stands; what was left to ``step()`` itself beside that may have
        been written in part."""
        rest = self._rest
        self.commit(stepper)
        if rest and self._torn is None:
            self._finish(self._dues())
            names = [a.spec.name for a in self.parameters if a.stepper is stepper and a.spec.name not in rest]
            cause = InstepError(f"{stepper.name}.step() raised")
            self._torn = Torn(self.step_count, names, rest, self._ranks.rank(), cause, self.step_count, True)
            self._ranks.say_failed(self.step_count + 1)

    def _used_in_step(self, parameter: torch.Tensor, func: object) -> None:
        """Somebody is about to read or replace a ``.grad`` that was taken off: ``step()``, if it still runs."""
        self._end_stopped()

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        """Somebody is about to read or write a parameter in Python."""
        if self._beginning:
            return  # the update itself, which is sent
        self._end_stopped()
        due = self._due.get(id(parameter))
        self._finish([due])
        if due is not None and self._flushing is not None:
            name = next(name for name, tensor in zip(due.names, due.tensors, strict=True) if tensor is parameter)
            self._met.append((name, parameter, version_of(parameter)))
        self._watch.stop([parameter])
        self.require_whole()

    def _used_state(self, optimizer: Optimizer) -> None:
        """Somebody is about to read, replace or copy an optimizer's ``state``."""
        self._end_stopped()
        if self._flushing is not None and self._flushing.optimizer() is optimizer:
            return  # the running step() itself, which has nothing to update
        self._finish(due for due in self._dues() if due.step.optimizer() is optimizer)

    def _held(self, gradient: torch.Tensor) -> torch.Tensor:
        """What stands in ``.grad`` until ``gradient`` has been applied."""
        if type(gradient) is torch.Tensor:
            return HeldGradient(gradient, self._when_used)
        self._gradient_watch.start([gradient])  # a DTensor: its users ask for its class, and its own attributes
        return gradient

    def _used_gradient(self, operation: str, args: object) -> None:
        """Somebody is about to use a gradient that may not have been applied yet."""
        self._finish(self._dues())

    def _used_spread_gradient(self, gradient: torch.Tensor, func: object) -> None:
        self._finish(self._dues())
        self._gradient_watch.stop([gradient])

    # What the optimizer steps.

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient. Returns whether this is the first of them in the
        running backward."""
        if self._backward == graph_task():
            return False
        self._backward = graph_task()
        self._went_back = True
        self._accumulation.begin()
        self._owing.clear()  # of a step that not all of its optimizers have taken
        if not self._accumulation.holds_next:
            self._ranks.begin_backward(self.step_count)
            self._hear()
        self._clipping.begin()
        self._clipped.clear()
        return True

    def end_backward(self) -> None:
        """Nothing was written in it."""

    def _hear(self) -> None:
        """Wait for what the ranks have said of the last step: raise, if it does not stand on all of them."""
        if (error := self._ranks.heard(wait=True)) is not None:
            names = [attached.spec.name for attached in self.parameters]
            self._torn = Torn(self.step_count, names, [], self._ranks.rank(), error, self.step_count)
            raise error if isinstance(error, StepMismatchError) else self._torn.error()

    def leave_to_optimizer(self, stepper: Stepper, error: object) -> None:
        """``optimizer.step()`` is about to do otherwise than an update that is put off: this step is taken at once."""
        self._now = True

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self.backwards.let_go()
        self._end_commit()
        if self._flushing is not None:
            self._end_raised(self._flushing)  # another call of step()
        self._now = False
        stepper.called()

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update: take over what can be applied later."""
        if self._flushing is stepper:
            return  # a closure that is called more than once
        try:
            self._flush(stepper)
        except BaseException:
            if self._flushing is None:  # nothing has been handed over
                self._owing.clear()
                self._taken, self._vote, self._settings, self._rest = True, None, None, []
                if self._check is not None:
                    self._check.forget()
            raise

    def _flush(self, stepper: Stepper) -> None:
        self._accumulation.require_reduced()
        mine = [a for a in self.parameters if a.stepper is stepper]
        self._finish([self._due.get(id(a.peek())) for a in mine])
        self.require_whole()
        with_gradient = [a for a in mine if a.get().grad is not None]
        in_loop = self._in_loop(stepper.optimizer(), with_gradient)
        if in_loop and not self._owing:
            if not self._went_back:  # these gradients are of a backward that nobody has seen to begin
                self._hear()
                self._clipping.begin()
                self._clipped.clear()
            self._owing = {a.stepper for a in self.parameters if a.get().grad is not None}
            self._taken = not self._owing or found_inf(stepper.optimizer()) or self._is_taken()
        clip = self._clip_of(stepper, with_gradient)
        if in_loop and not self._taken:
            self._leave_out(stepper, with_gradient)
            return
        traced = {a.spec.index for reader in self.readers if reader.traced for a in reader.parameters}
        flying = self._flying(mine)
        if any(a.part is not None and a.part.state_is_sharded for a in with_gradient):
            require_same_in_autocast(stepper.optimizer())  # this rank's parts are updated by instep, put off or not
        put_off = in_loop and not self.at_once() and not ending() and can_be_frozen(stepper.optimizer())
        put_off = put_off and not autocast_matters(stepper.optimizer()) and self._forward_is_alike()
        waiting = {a: put_off and self._can_be_put_off(a, flying.get(a), traced) for a in with_gradient}
        for attached, flight in list(flying.items()):
            if not waiting[attached]:
                flight.land()
                flying = {a: f for a, f in flying.items() if f is not flight}
        later = [a for a, can_wait in waiting.items() if can_wait or (a.part is not None and a.part.state_is_sharded)]
        if len(later) < len(with_gradient):
            self._require_agreement()
        if clip is not None and len(later) < len(with_gradient):
            clip([a.get() for a in set(waiting).difference(later)])
        if self._check is not None and in_loop:
            self._check.keep_rest(stepper, mine, set(later), _gradient_if_any)
        self._now = False
        if not later:
            self._flushing = stepper
        else:
            self._rest = [attached.spec.name for attached in with_gradient if attached not in later]
            first = not stepper.optimizer().state and not is_torchs_own(stepper.optimizer())
            self._put_off(stepper, later, flying, clip)
            if first:  # one bucket of it makes state, see begin_state
                self._finish([self._due.get(id(later[0].get()))])
            self._finish([self._due.get(id(a.get())) for a, can_wait in waiting.items() if not can_wait])

    def _forward_is_alike(self) -> bool:
        """Whether the forward, behind which the update would run, is under the switches that ``step()`` is under."""
        return self._switches_in_forward is None or switched(self._switches_in_forward, but=(DEFAULT_DTYPE,)) is None

    def _flying(self, mine: Iterable[AttachedParameter]) -> dict[AttachedParameter, InFlightBucket]:
        """Those whose gradient may still be on its way."""
        wanted = set(mine)
        return {
            a: flight
            for flight in self.flights()
            for a in flight.parameters
            if a in wanted and flight.gradient(a) is not None
        }

    def _is_taken(self) -> bool:
        """Whether the step that begins here is to be taken. The ranks vote on it: where nobody needs the answer now,
        it is waited for before the first write."""
        number = self.step_count + 1
        if self._nonfinite == "allow":
            self._vote = self._ranks.say(number)
            return True
        gradients = [(a.spec.name, _gradient(a)) for a in self.parameters if a.get().grad is not None]
        rank = ask_if_finite(gradients, self._ranks, number)
        if rank is not None and self._nonfinite == "raise":
            raise nonfinite_error(gradients, rank, "Nothing of the step was applied")
        return rank is None

    def _leave_out(self, stepper: Stepper, with_gradient: Sequence[AttachedParameter]) -> None:
        """``optimizer.step()`` finds no gradient, and what it writes nevertheless is put back."""
        self._settings = remember_settings(stepper.optimizer())
        gradients = [(attached.get(), _gradient(attached)) for attached in with_gradient]
        self._flushing = stepper
        self._take_off(gradients)

    def _take_off(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Until ``step()`` is over, who asks these parameters for their gradients is not to find them gone."""
        for parameter, gradient in gradients:
            self._watch_in_step.start([parameter])
            self._placeholders.append((parameter, gradient))
            parameter.grad = None

    def _require_agreement(self) -> None:
        """Something of this step is about to be written by torch itself."""
        vote, self._vote = self._vote, None
        if vote is not None and (error := error_of(vote)) is not None:
            raise error

    def _in_loop(self, optimizer: Optimizer, with_gradient: Iterable[AttachedParameter]) -> bool:
        """Whether this is a step of a training loop: else who made the gradients wants the step now."""
        first = self.step_count == 0
        return self._went_back or not asks_for_state(optimizer, map(_gradient, with_gradient), first=first)

    def _can_be_put_off(
        self, attached: AttachedParameter, flight: InFlightBucket | None, traced: Container[int]
    ) -> bool:
        gradient = _gradient(attached, flight)
        return (
            not self._now
            and attached.stepper in self._can_wait
            # Some optimizers treat parameters of a class of their own in their own way. Steps that communicate must not
            # come when one rank waits for them and another does not.
            and (
                plain_type(attached.get()) in (torch.nn.Parameter, torch.Tensor)
                or part_of_gradient(attached, gradient) is not None
            )
            and attached.spec.index not in traced
            and gradient.layout is torch.strided
        )

    def _clip_of(self, stepper: Stepper, with_gradient: Sequence[AttachedParameter]) -> Clip | None:
        """What is left to do to these gradients before they are applied."""
        if self._clipping.policy is None or stepper in self._clipped:
            return None
        optimizer = stepper.optimizer()
        if found_inf(optimizer):
            return None  # the kernel skips its update, of gradients as they are
        take_off_here(optimizer, [_gradient(a) for a in with_gradient])
        if self._clipping.mode is not None and self._clipping.total is None:
            self._clipping.compute_total_norm(self.parameters, lambda a: None if a.get().grad is None else _gradient(a))
            # The plain loop clips all of them at once, before the first of its optimizers steps.
            others = [a for a in self.parameters if a.stepper is not stepper and a.get().grad is not None]
            self._clipping.clip([a.get() for a in others])
            self._clipped = {a.stepper for a in others}
        return self._clipping.frozen()

    def _put_off(
        self,
        stepper: Stepper,
        parameters: Sequence[AttachedParameter],
        flying: Mapping[AttachedParameter, InFlightBucket],
        clip: Clip | None,
    ) -> None:
        gradients = [(attached.get(), attached.get().grad) for attached in parameters]
        try:
            owe(self)
            self._worker.start()  # here, since whoever drops the model may be anywhere
            dues = self._take_over(stepper, parameters, flying, clip)
        except BaseException:  # such as Ctrl-C: nothing has been handed over
            self._flushing = None
            self._watch_in_step.stop(tensor for tensor, _ in gradients)
            for tensor, gradient in gradients:
                self._due.pop(id(tensor), None)
                tensor.grad = gradient
            self._placeholders.clear()
            if not self._due:
                settled(self)
            raise
        self._beginning = True
        try:
            self._begin(dues, parameters)
        except BaseException:
            self._begin(dues, parameters)  # handed over is handed over, and other ranks wait for what is sent
            raise
        finally:
            self._beginning = False

    def _take_over(
        self,
        stepper: Stepper,
        parameters: Sequence[AttachedParameter],
        flying: Mapping[AttachedParameter, InFlightBucket],
        clip: Clip | None,
    ) -> list[PendingBucket]:
        """Take the gradients off."""
        step = HandedOverStep(stepper.optimizer(), parameters, self.step_count + 1, self._vote)
        by_index = {attached.spec.index: attached for attached in parameters}
        begin_state(stepper.optimizer(), [attached.get() for attached in parameters])
        there = self.buckets_of(a for a in parameters if a not in flying)
        buckets = [[by_index[spec.index] for spec in bucket.parameters] for bucket in there]
        check = self._check
        keep = partial(check.keep, stepper) if check is not None and check.due else None
        dues = [PendingBucket(bucket, step, clip, self.recorder, None, keep) for bucket in buckets]
        for flight in dict.fromkeys(flying.values()):  # in the order in which they arrive
            members = [attached for attached in flight.parameters if flying.get(attached) is flight]
            dues.append(PendingBucket(members, step, clip, self.recorder, flight, keep))
        for due in dues:
            self._due.update((id(tensor), due) for tensor in due.tensors)
            self._take_off(list(zip(due.tensors, due.gradients, strict=True)))
        self._state_watch.start(stepper.optimizer())
        self._flushing = stepper
        return dues

    def _begin(self, dues: Sequence[PendingBucket], parameters: Sequence[AttachedParameter]) -> None:
        """Start what need not be asked for."""
        by_id = {id(attached.get()): attached for attached in parameters}
        for due in dues:
            if due.sent:
                continue
            if self.gather is not None:
                with self._on_side(due):
                    due.send([by_id[id(tensor)] for tensor in due.tensors], self.gather)
            if due.device.type == "cpu":
                # Others are stepped when they are waited for, by the same thread: who waits may be in the middle of
                # tracing, or in inference mode.
                at_once = due.step.at_any_time or self.gather is not None
                due.done = self._worker.run(due.finish) if at_once else None
        for due in dues:  # once all are sent: the side stream waits for those of other ranks
            if due.device.type != "cpu" and due.mark is None:
                due.mark = self._finished(due)
        for due in dues:
            due.step.raise_interrupt()

    def _finished(self, due: PendingBucket) -> Mark:
        """Do what is left of it on the side stream."""
        with self._on_side(due):
            due.finish()
        due.look()
        return self.streams.mark(due.device)

    @contextmanager
    def _on_side(self, due: PendingBucket) -> Iterator[None]:
        with self.streams.on(due.device):
            yield
        if due.step.stepper.gave_back:
            self.streams.let_go(due.device)

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to return. Who is interrupted here begins again with the next use."""
        if self._flushing is not stepper:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, gradient in self._placeholders:
                if tensor.grad is None:  # the plain loop's is still there, until the user clears it
                    tensor.grad = self._held(gradient) if id(tensor) in self._due else gradient
        if self._settings is not None:
            self._settings()
        self._committing = stepper, self.step_count + 1, self.skip_count + 1
        self._end_commit()

    def _require_left_alone(self, stepper: Stepper) -> None:
        """``optimizer.step()`` has found no gradient of what it had handed over."""
        met, self._met = self._met, []
        for name, parameter, version in met:
            if version_of(parameter) != version:
                error = writes_without_gradient(stepper.name, name)
                names = [a.spec.name for a in self.parameters if a.stepper is stepper]
                number = self.step_count + 1
                self._torn = Torn(number, names, [], self._ranks.rank(), error, number)
                self._ranks.say_failed(number + 1)
                raise error

    def _end_commit(self) -> None:
        if self._committing is None:
            return
        stepper, step_count, skip_count = self._committing
        self._ending_commit = True
        try:
            self._count(stepper, step_count, skip_count)
        except Exception:
            self._owing.discard(stepper)
            self._committing = None
            raise
        finally:
            self._ending_commit = False
        self._owing.discard(stepper)
        self._committing = None

    def _count(self, stepper: Stepper, step_count: int, skip_count: int) -> None:
        self._watch.take_from(self._watch_in_step, (p for p, _ in self._placeholders if id(p) in self._due))
        self._watch_in_step.stop(p for p, _ in self._placeholders)
        self._placeholders, self._settings, self._flushing, self._rest = [], None, None, []
        self._accumulation.stepped()
        self._clipped.discard(stepper)
        self._clipping.stepped(stepper)
        self._require_left_alone(stepper)
        if stepper in self._owing and self._taken:
            self._require_checked(stepper)
        if self._owing == {stepper}:
            if self._taken:
                self.step_count = step_count
                if self._check is not None:
                    self._check.stepped()
            else:
                self.skip_count = skip_count
            self._taken, self._vote = True, None
            self._went_back = False

    def _require_checked(self, stepper: Stepper) -> None:
        """Wait for the step, raise, and call it torn, if it differs from a plain one."""
        if self._check is None or not self._check.due:
            return
        mine = [a for a in self.parameters if a.stepper is stepper]
        self._finish([self._due.get(id(a.peek())) for a in mine])
        self.require_whole()
        number = self.step_count + 1
        error = self._check.error(stepper, number, mine)
        if error is not None:
            names = [a.spec.name for a in mine]
            self._torn = Torn(number, names, [], self._ranks.rank(), error, number)
            self._ranks.say_failed(number + 1)
            raise error

    def buckets_of(self, parameters: Iterable[AttachedParameter]) -> tuple[Bucket, ...]:
        """In the order in which forwards read them; those not read yet in the model's order."""
        # What is sent must be in the same order on all ranks, which may read in another one.
        place = {} if self.gather is not None else {index: number for number, index in enumerate(self._read)}
        ordered = sorted(parameters, key=lambda a: place.get(a.spec.index, len(place) + a.spec.index))
        return fill_buckets("forward", (attached.spec for attached in ordered), self._bucket_bytes)

    # What the user asks for.

    @property
    def state(self) -> str:
        """``"idle"``, ``"pending"`` or ``"torn"``."""
        return "torn" if self._torn is not None else "pending" if self._due else "idle"

    def before_save(self) -> None:
        """The model is about to be saved: not a step that is torn."""
        self._end_stopped()
        if self._torn is not None:
            raise self._torn.error()

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """The optimizer's state is about to be saved or loaded. What is torn may be loaded anew, and not be saved."""
        if saving or self._torn is None:
            self.synchronize()

    def rollback(self) -> None:
        """Throw away the gradients since the last ``optimizer.step()``: nothing of them has been written."""
        self.synchronize()
        self.forget(gradients=True)

    def last_complete_step(self) -> int | None:
        """The number of the last step if all of it was applied here, else ``None``."""
        if self._torn is None:
            self.synchronize()
            return self.step_count
        return None if self._torn.in_part else self._torn.accepted

    def accept(self) -> bool:
        """Go on from a torn step, as if it had been committed, unless nothing of it was written. ``False``: there is
        none."""
        if self._torn is None:
            return False
        self.step_count = self._torn.accepted
        self.forget(gradients=True)
        return True

    def forget(self, *, gradients: bool) -> None:
        """Let go of a torn step; with ``gradients``, clear all of them."""
        self.backwards.let_go()
        for due in self._dues():
            self._wait(due)
        for attached in self.parameters:
            parameter = attached.peek()
            if parameter is not None and gradients:
                parameter.grad = None
        self._watch_in_step.stop(tensor for tensor, _ in self._placeholders)
        self._torn = self._flushing = self._committing = self._vote = self._settings = None
        if self._check is not None:
            self._check.forget()
        self._taken = True
        self._placeholders.clear()
        self._rest, self._met = [], []
        self._owing.clear()
        self._clipped.clear()
        self._clipping.begin()
        self._accumulation.stepped()

    def settle(self) -> None:
        """The interpreter is about to end, or to fork."""
        self._finish(self._dues())

    def abandon(self) -> None:
        """The optimizers are gone. Others have the parameters, so what is due is applied, and without waiting: this may
        be called from anywhere."""
        if not self._worker.started:
            return  # whoever uses one of them waits for it, and so does the end of the process
        for due in self._dues():
            if due.device.type == "cpu":
                due.done = due.done or self._worker.run(due.finish)
            elif due.mark is not None:
                self.streams.wait(due.mark)
        if self._due:
            self._worker.last(self._let_go_of_all)

    def _let_go_of_all(self) -> None:
        with self._lock:
            failed = [due.step for due in self._dues() if due.step.failure is not None]
            for due in self._dues():
                self._let_go(due)
            if failed and self._torn is None:
                self._tear(failed[0])
                self._raise_failure(failed[0])  # perhaps nobody else will be told

    def close(self) -> None:
        """Finish what is due, and end the thread."""
        try:
            self._end_stopped()
            self._finish(self._dues())
            self._watch_in_step.stop(p for attached in self.parameters if (p := attached.peek()) is not None)
        finally:
            self._worker.stop()

    # What the attachment asks.

    def planned(self, sent: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan: those that cross the iteration (``sent``), then all other trainable parameters in
        the order in which forwards read them."""
        inside = {spec.index for bucket in sent for spec in bucket.parameters}
        others = (
            a for a in self.parameters if a.spec.index not in inside and (p := a.peek()) is not None and p.requires_grad
        )
        return *sent, *self.buckets_of(others)

    def read_by(self, streams: Callable[[], Iterable[torch.Stream]]) -> None:
        """``streams``: on which parameters are read, beside the one that is current."""
        self.streams.readers = streams

    def crosses(self, flights: Callable[[], Sequence[InFlightBucket]], at_once: Callable[[], bool]) -> None:
        """With ``cross_iteration``: the buckets in flight, and whether nothing is to be put off at present."""
        self.flights, self.at_once = flights, at_once

    def after_forward(self) -> None:
        """The model's forward has returned: wait for the buckets that this forward did not read. DDP's next backward
        writes the memory in which their gradients may lie."""
        self.synchronize()
        if torch.is_grad_enabled():
            self.streams.see(self.parameters[0].spec.device)

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters: wait for their buckets."""
        self.before_read(parameters)

    def begin_on_device(self) -> None:
        """A backward has come to an output of the model: on an accelerator another thread may run it."""
        self.backwards.begin(self.parameters[0].spec.device)

    def let_go_of_backwards(self) -> None:
        """Return once a backward that raised has ended on every device."""
        self.backwards.let_go()


def _gradient(attached: AttachedParameter, flight: InFlightBucket | None = None) -> torch.Tensor:
    """What is in ``.grad``: the real one, where somebody put back what was held of an earlier step. With ``flight``,
    what will hold it."""
    if flight is not None and (arriving := flight.gradient(attached)) is not None:
        return arriving
    parameter = attached.get()
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, HeldGradient):
        parameter.grad = gradient = gradient.use()
    return gradient


def _gradient_if_any(attached: AttachedParameter) -> torch.Tensor | None:
    return None if attached.get().grad is None else _gradient(attached)


@contextmanager
def _not_compiling() -> Iterator[None]:
    """While this thread, which may be compiling, waits for an update. torch has a private flag for all threads."""
    flag, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = flag
