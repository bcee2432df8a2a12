"""``schedule="forward"``: one ``step()`` that was handed over, and its buckets, which are still to be applied.

Nothing here refers to the attachment, which may be dropped while a thread applies a bucket.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import is_
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from torch.optim import Optimizer

from instep._autograd.placeholders import HeldGradient
from instep._gradients.clipping import Clip
from instep._life.worker import Task
from instep._optim.calls import OptimizerCall, calls_of
from instep._optim.entries import Entries
from instep._optim.kinds import fused_counts_writes, is_torchs_own
from instep._optim.parameters import GRADIENT, AttachedParameter, AttachedParameters
from instep._optim.parts import VERSION, are_counted, memory_of
from instep._optim.shadow import snapshot_of
from instep._optim.stepper import Stepper
from instep._optim.switches import DEFAULT_DTYPE, MKLDNN, as_then, in_threads, switched, switches
from instep._profile import profiled
from instep._ranks.votes import Vote
from instep._step.outcome import Outcome, Outcomes, Ranks, Shards
from instep._step.recorder import Recorder
from instep._step.streams import Mark
from instep._step.times import StepTimes
from instep._step.writes import Gather
from instep.errors import InstepError, UncommittedStepError, UnsupportedOptimizerError


class InFlightBucket(Protocol):
    """A bucket whose gradients may still be on their way when ``optimizer.step()`` is called."""

    @property
    def parameters(self) -> Sequence[AttachedParameter]: ...

    def gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The tensor that will hold the gradient; ``None`` if something else is in ``.grad`` by now."""

    def wait(self) -> None:
        """Return when it has arrived, for the current stream. Raises what the communication raised."""

    def wait_into_grad(self) -> None:
        """Wait, and have ``.grad`` be as in the plain loop."""


class _Circumstances:
    """Under which ``step()`` was called.

    Attributes:
        at_any_time: whether the update may run while the loop goes on. ``torch.compiler.is_compiling()`` is true for
            all threads while one of them compiles, and a step then computes its bias corrections in another way. Fused
            kernels do not.
        known: whether the optimizer is torch's own.
        counts_writes: whether the plain loop's ``step()`` counts a write of each parameter, for autograd to notice.
        switches: torch's, which an update reads.
        threads: of torch's, on a CPU.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.known = is_torchs_own(optimizer)
        self.switches = switches()
        self.threads = torch.get_num_threads()
        self.at_any_time = self.known and all(group.get("fused") for group in optimizer.param_groups)
        self.counts_writes = not self.at_any_time or fused_counts_writes(optimizer)

    def difference(self, *, makes_state: bool) -> str | None:
        """The switch that has changed since and matters to the update, in words.

        Args:
            makes_state: whether the update makes state, which is of float64, or not.
        """
        if self.at_any_time and makes_state:
            dtypes = (self.switches[DEFAULT_DTYPE], torch.get_default_dtype())
            if dtypes.count(torch.float64) == 1:
                return switched(self.switches)
        # It runs under the others as they were: torch.export, say, which has switched mkldnn off, may be what waits.
        return None if self.known else switched(self.switches, but=(DEFAULT_DTYPE, MKLDNN))


class HandedOverStep:
    """An optimizer as it was when its ``step()`` was called.

    Args:
        stepper: of the optimizer.
        outcomes: those of the optimizers whose ``step()`` was called before in the same step. This one's is added.

    Attributes:
        number: of the step.
        optimizer: the user's, weakly.
        entries_before: how many entries its state had.
        stepper: of the copy, whose groups are as they were then.
        unapplied: its buckets that are still to be applied.
        outstanding: its buckets that nobody has waited for.
        recorder: told of each update.
        times: are told of each update's.
        ranks: what they say of it.
    """

    def __init__(
        self,
        stepper: Stepper,
        parameters: AttachedParameters,
        number: int,
        vote: Vote | None,
        recorder: Recorder | None,
        times: StepTimes,
        outcomes: Outcomes,
    ) -> None:
        optimizer = stepper.optimizer()
        self.number = number
        self.optimizer = weakref.ref(optimizer)
        self.entries_before = len(optimizer.state)
        self._frozen = snapshot_of(optimizer)  # held here: the stepper holds it weakly
        self.stepper = Stepper(self._frozen, looks_back=False, home=stepper.home)
        self.circumstances = _Circumstances(optimizer)
        self.outcome = Outcome(parameters)
        self.outcomes = outcomes
        outcomes[id(stepper), True] = self.outcome
        self.unapplied: list[PendingBucket] = []
        self.outstanding: list[PendingBucket] = []
        self.recorder = recorder
        self.times = times
        self.ranks = Ranks(number, vote, self.outcome)
        self._parameters = tuple(parameters)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimizer's own."""
        return self._frozen.state

    def raise_interrupt(self) -> None:
        """Ctrl-C in an update that the loop's own thread has run is for the loop, at once; and the step is torn."""
        error = self.outcome.failure
        try:
            if error is not None and not isinstance(error, Exception):
                self.outcome.failure = InstepError(f"{self.stepper.name}.step() was interrupted")
                self.outcome.told = True
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame, which has the gradients

    def stepped_here(self) -> list[torch.Tensor]:
        """Its parameters, without those that another rank updates."""
        here = [a.peek() for a in self._parameters if a.shard is None or a.shard.is_owner]
        return [parameter for parameter in here if parameter is not None]


class _AsLeft:
    """The parameters, gradients and state of a bucket as ``step()`` has left them: nobody else is to write them before
    the update has."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], state: Mapping[Any, Any]
    ) -> None:
        self._tensors = tensors
        # A view counts the writes of its whole bucket, where others zero or clip gradients of their own. That nobody
        # else has this part of the bucket was found out in step(). Its place takes what is looked at in any case.
        alone = [p if g._is_view() else g for p, g in zip(tensors, gradients, strict=True)]
        self._all = [*tensors, *alone]
        self._memory: list[torch.Tensor | None] | None = None
        if not are_counted(self._all):
            # Kept, not looked up again: whoever reads the local tensor of a watched DTensor waits for this very update.
            self._memory = [None if tensor.is_inference() else memory_of(tensor) for tensor in self._all]
        self.look(state)

    def look(self, state: Mapping[Any, Any]) -> None:
        """They are to stay as they are now."""
        self.look_at_versions()
        self._entries = Entries()
        self._entries.add(self._tensors, state)

    def look_at_versions(self) -> None:
        self._versions = self._found()

    def require(self, names: Sequence[str], state: Mapping[Any, Any]) -> None:
        """Raise ``UncommittedStepError`` if somebody has written one of them."""
        found = self._found()
        if found != self._versions:
            of_all = (*names, *(f"{name}.grad" for name in names))
            written = next(n for n, now, then in zip(of_all, found, self._versions, strict=True) if now != then)
            raise UncommittedStepError(
                f"{written!r} was written after optimizer.step(), through another tensor of the same memory, while "
                "the update was due: in the plain loop it had been applied by then. Call overlap.synchronize() "
                "before such a write"
            )
        if not self._entries.are_as_left(state):
            raise UncommittedStepError(
                f"the state of {names[0]!r}, or of another parameter of its bucket, was written after "
                "optimizer.step(), through a reference that was taken before, while the update was due: in the plain "
                "loop it had been applied by then. Call overlap.synchronize() before such a write"
            )

    def _found(self) -> list[int]:
        if self._memory is None:
            return list(map(VERSION, self._all))
        return [-1 if tensor is None else tensor._version for tensor in self._memory]


class PendingBucket:
    """One bucket of a step that was handed over.

    Attributes:
        names: of its parameters.
        tensors: its parameters.
        gradients: theirs, which were taken off ``.grad``.
        step: that it is of.
        done: the task of the worker that applies it; ``None``: none was given.
        sent: whether this rank's shards are on their way to the others.
        mark: on the side stream, after the update; ``None``: not there yet.
    """

    def __init__(
        self,
        parameters: AttachedParameters,
        step: HandedOverStep,
        clip: Clip | None,
        flight: InFlightBucket | None,
        keep: Callable[[OptimizerCall, Mapping[Any, Any]], None] | None,
    ) -> None:
        self.names = parameters.names
        self.tensors = parameters.tensors()
        self.gradients = gradients_in(parameters, self.tensors, flight)
        self.device = self.tensors[0].device
        self.step = step
        self.done: Task | None = None
        self.sent = False
        self.mark: Mark | None = None
        self._flight = flight
        self._shards = Shards(parameters)
        self._clip = clip
        self._keep = keep
        # Aliases: the parameters' own .grad, flags and attributes are the user's, to be read and changed meanwhile.
        self._calls = calls_of(parameters, self.gradients, alias=True)
        if step.circumstances.counts_writes:
            # From here on a graph that has saved the old weights refuses to run, as after the plain loop's step.
            torch.autograd.graph.increment_version(self.tensors)
        self._as_left: _AsLeft | None = _AsLeft(self.tensors, self.gradients, step.state)
        step.unapplied.append(self)
        step.outstanding.append(self)

    def apply(self) -> None:
        """Update the parameters, once, unless an earlier bucket of the step failed. An error is kept."""
        step, outcome = self.step, self.step.outcome
        if self not in step.unapplied:
            return
        step.ranks.hear()
        step.unapplied.remove(self)
        if outcome.failure is not None:
            return
        try:
            self._arrive()
            started = perf_counter()
            # Whoever watches a parameter waits for this thread.
            with torch._C.DisableTorchFunctionSubclass(), profiled("update", self.names[0]):
                self._update()
        except BaseException as error:
            outcome.failure = error
            return
        self._calls = []
        if self.device.type == "cpu":
            self._as_left, self.gradients = None, []
        # Else the side stream still reads them: they stay until it was waited for, and who writes them races with it.
        outcome.applied += self._shards.whole
        step.times.ran(started)
        if step.recorder is not None:
            step.recorder("step", self.names, started, perf_counter())

    def _arrive(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.wait()
            assert self._as_left is not None
            self._as_left.look_at_versions()  # it has been written since

    def send(self, parameters: Sequence[AttachedParameter], gather: Gather) -> None:
        """Update this rank's shards now, and send them. It is left to wait for those of the others."""
        self.apply()
        self.sent = True
        if self.step.outcome.lost:
            return
        # Whether that failed or not: the other ranks wait for it.
        try:
            self._shards.gathered = gather([a for a in parameters if a.is_divided])
        except BaseException as error:
            self.step.outcome.loses(error)

    def finish(self) -> None:
        """Do all that is left to do."""
        if self.sent:
            self._shards.receive(self.step.ranks, self.step.outcome)
        else:
            self.apply()

    def look(self) -> None:
        """Parameters, gradients and state are to be as they are now when somebody waits for them."""
        if self._as_left is not None:
            self._as_left.look(self.step.state)

    def require_left_alone(self) -> None:
        """Raise ``UncommittedStepError`` if somebody has written what the update reads or writes."""
        if self._as_left is not None:
            self._as_left.require(self.names, self.step.state)

    def raced(self, error: BaseException) -> None:
        """Somebody has, while the update was under way."""
        self.step.outcome.is_in_doubt(self.names, error)

    def _update(self) -> None:
        self.require_left_alone()
        circumstances = self.step.circumstances
        makes_state = circumstances.at_any_time and not all(map(self.step.state.get, self.tensors))
        if (difference := circumstances.difference(makes_state=makes_state)) is not None:
            raise UncommittedStepError(
                f"{difference}, since optimizer.step(), which has put off the update of {self.names[0]!r}. Call "
                "overlap.synchronize() before such a change"
            )
        # Whoever may ask for the switches meanwhile waits for this update, unless it can run at any time.
        as_before = nullcontext() if circumstances.at_any_time else as_then(circumstances.switches)
        with as_before, in_threads(circumstances.threads):
            for call in self._calls:
                self._step(call)

    def _step(self, call: OptimizerCall) -> None:
        if self._clip is not None:
            self._clip(call.tensors)
        if self._keep is not None:
            self._keep(call, self.step.state)
        gradients = [tensor.grad for tensor in call.tensors]
        self.step.outcome.begun.update(dict.fromkeys(self._shards.updated_here))
        call.step(self.step.stepper)
        if not self.step.circumstances.known:
            self._require_contained([tensor.grad for tensor in call.tensors], gradients)

    def _require_contained(self, found: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
        """Whatever else the update has written would have been there when ``optimizer.step()`` returned."""
        stepper = self.step.stepper
        replaced = not all(map(is_, found, given))
        if replaced or stepper.wrote_elsewhere:
            where = "the gradient of a parameter" if replaced else "a value of its groups, its attributes or its state"
            raise UnsupportedOptimizerError(
                f"{stepper.name} replaced {where} in step(), for the first time in a step that was put off: until now "
                "the loop would have found the old one. Use defer='auto', without cross_iteration and shard_state: "
                "step() is then called as it is"
            )


def gradients_in(
    parameters: AttachedParameters, tensors: Sequence[torch.Tensor], flight: InFlightBucket | None = None
) -> list[torch.Tensor]:
    """``in_grad`` of all of ``parameters``, which are these ``tensors``."""
    gradients = list(map(GRADIENT, tensors))
    if flight is None and _PLAIN.issuperset(map(type, gradients)):
        return cast(list[torch.Tensor], gradients)
    return [in_grad(attached, flight) for attached in parameters]


_PLAIN = frozenset({torch.Tensor})


def in_grad(attached: AttachedParameter, flight: InFlightBucket | None = None) -> torch.Tensor:
    """The gradient in ``.grad``: the real one, where somebody put back a stand-in of an earlier step. With ``flight``,
    the tensor that will hold it."""
    if flight is not None and (arriving := flight.gradient(attached)) is not None:
        return arriving
    parameter = attached.get()
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, HeldGradient):
        parameter.grad = gradient = gradient.use()
    return gradient


def in_grad_if_any(attached: AttachedParameter) -> torch.Tensor | None:
    return None if attached.get().grad is None else in_grad(attached)
