"""``schedule="forward"``: the buckets that were handed over, until they are applied, and whoever waits for one."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from time import perf_counter
from typing import Any, cast

import torch
from torch.optim import Optimizer

from instep._gradients.clipping import Clip
from instep._optim.guards import (
    DEFAULT_DTYPE,
    MKLDNN,
    Entries,
    EntriesAsLeft,
    as_then,
    as_thread,
    of_this_thread,
    switched,
    switches,
)
from instep._optim.kernels import GRADIENT
from instep._optim.kinds import fused_counts_writes, is_fused, multiplies_matrices
from instep._optim.parameters import AttachedParameter, AttachedParameters, OptimizerCall, calls_of
from instep._optim.shadow import end_state, order_added, snapshot_of
from instep._optim.stepper import Stepper
from instep._ranks.vote import Vote, error_of
from instep._ranks.votes import StepVotes
from instep._step.schedule import Schedule
from instep._step.state import Gather, Gathered, StepTimes, without_frames
from instep._step.step import RunningStep
from instep._step.streams import Mark
from instep._torch.engine import is_captured, listen, profiled
from instep._torch.lifetime import WeakMethod, owe, settled
from instep._torch.placeholders import BeforeUse, HeldGradient, become_real
from instep._torch.versions import VERSION, are_counted, memory_of
from instep._torch.watch import StateWatch, Watch
from instep._torch.worker import Task, Worker
from instep.errors import InstepError, StepMismatchError, UncommittedStepError


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
        for parameter in parameters:
            key = id(parameter)
            lent = [self._lent.pop(key, None)]
            # Somebody else who has it, as a loop that has kept .grad in a variable, goes on to find this gradient.
            if lent[0] is not None and not _is_shared(lent):
                lent[0].let_go()
                self._idle[key] = lent[0]


def _is_shared(holder: Sequence[HeldGradient | None]) -> bool:
    """Whether anybody but this sequence refers to the stand-in that it holds: in Python, or in C++ by torch's private
    count. Where torch does not tell, it may be so."""
    return next(map(sys.getrefcount, holder)) > _ALONE or _COUNT is None or _COUNT(holder[0]) > 1


# torch's own reference count of a tensor (torch/csrc/autograd/python_variable.cpp). All references of Python's count as
# one, so more than one means that C++ holds the tensor, too.
_COUNT: Callable[[Any], int] | None = getattr(torch.Tensor, "_use_count", None)
# The reference count of an object that only a list refers to. Versions of Python count temporaries in different ways,
# so it is measured, and by the same expression as below: one more variable there would change the answer.
_ALONE = next(map(sys.getrefcount, [object()]))


class StepOutcome:
    """What has become of a step that was handed over.

    Attributes:
        names: of the parameters that it is to update.
        applied: names of those that it has updated.
        begun: names of those that it has begun to update.
        refused: whether that are the other ranks.
        lost: whether a communication with them has failed: none is waited for any more.
    """

    def __init__(self, parameters: AttachedParameters) -> None:
        self.names = parameters.names
        self.applied: list[str] = []
        self.begun: dict[str, None] = {}
        self.failure: BaseException | None = None
        self.refused = False
        self.lost = False

    @property
    def is_whole(self) -> bool:
        return len(self.applied) == len(self.names) and self.failure is None

    def fails(self, error: BaseException) -> None:
        """The first error counts."""
        self.failure = self.failure or error

    def loses(self, error: BaseException) -> None:
        """A communication with the other ranks has failed."""
        self.fails(error)
        self.lost = True

    def hears(self, error: Exception) -> None:
        """The ranks have found ``error``; or this one could not hear what they have found."""
        self.fails(error)
        self.refused, self.lost = True, not isinstance(error, InstepError)

    @property
    def in_doubt(self) -> list[str]:
        """Names of the parameters of which nobody knows whether they were updated."""
        return [name for name in self.begun if name not in self.applied]

    @property
    def untouched(self) -> list[str]:
        return [name for name in self.names if name not in self.begun]

    def doubt(self, names: Sequence[str], error: BaseException) -> None:
        """These were updated, and nobody knows what they hold now."""
        self.fails(error)
        self.applied = [name for name in self.applied if name not in names]


StepOutcomes = dict[tuple[int, bool], StepOutcome]
"""By the stepper's id, and whether the parameters were put off: an optimizer may put off some, and step others."""


class VotesOnStep:
    """The votes of all ranks on one optimizer's step, and, of shards, on their updates.

    Args:
        vote: whether all of them take it; ``None``: there is one rank.

    Attributes:
        know: whether the others were told how the updates of this rank's shards went.
    """

    def __init__(self, number: int, vote: Vote | None, outcome: StepOutcome) -> None:
        self.know = False
        self._number = number
        self._vote = vote
        self._on_updates: Vote | None = None
        self._outcome = outcome

    def hear(self) -> None:
        """Wait until all ranks stand behind this step, before anything of it is written."""
        vote, self._vote = self._vote, None
        if vote is not None and (error := error_of(vote)) is not None:
            self._outcome.hears(error)

    def refuse(self) -> bool:
        """Whether some rank does not take the step, as far as it is not known yet. Waits for them."""
        vote = self._vote
        return vote is not None and error_of(vote) is not None

    def tell_of_updates(self, votes: StepVotes) -> None:
        """All shards that this rank updates were updated and sent, or that has failed: tell the others, once. Nobody
        does who has lost them: each wait for them would take as long as the process group's timeout."""
        if self.know or self._outcome.lost:
            return
        try:
            self.know = True
            self._on_updates = votes.updated(self._number, failed=self._outcome.failure is not None)
        except BaseException as error:
            self._outcome.loses(error)

    def hear_of_updates(self) -> None:
        """Wait until all ranks have updated their shards, before those of others are written here: of a rank that could
        not, what arrives is no part of the step, and parameters would hold parts of two steps."""
        vote, self._on_updates = self._on_updates, None
        if vote is not None and self._outcome.failure is None and (error := error_of(vote)) is not None:
            self._outcome.hears(error)


class Shards:
    """Of the parameters of one bucket, which this rank updates whole, or a part of each.

    Attributes:
        whole: names of those of which no other rank updates a part.
        updated_here: names of those of which this rank updates something.
        gathered: the parts that other ranks update, on their way; ``None``: none are waited for.
    """

    def __init__(self, parameters: AttachedParameters) -> None:
        self.whole: Sequence[str] = parameters.names
        self.updated_here: Sequence[str] = parameters.names
        self.gathered: Gathered | None = None
        self._shared: Sequence[str] = ()
        if not parameters.are_plain:
            shards = [(a.spec.name, a.shard) for a in parameters]
            self.updated_here = [name for name, shard in shards if shard is None or not shard.is_empty]
            self._shared = [name for name, shard in shards if shard is not None and shard.is_shared]
            self.whole = [name for name in self.whole if name not in self._shared]

    def receive(self, ranks: VotesOnStep, outcome: StepOutcome) -> None:
        """Write the parts that other ranks have updated: all of this bucket, or nothing. Of a step that has failed on
        any rank, or of which a communication was lost, nothing is waited for."""
        gathered, self.gathered = self.gathered, None
        ranks.hear_of_updates()
        if gathered is None or outcome.failure is not None:
            return
        try:
            gathered.wait()
        except BaseException as error:
            outcome.loses(error)
            return
        try:
            outcome.begun.update(dict.fromkeys(self._shared))
            with torch._C.DisableTorchFunctionSubclass():
                gathered.write()
            outcome.applied += self._shared
        except BaseException as error:
            outcome.fails(error)


# ``schedule="forward"``: one ``step()`` that was handed over, and its buckets, which are still to be applied.
#
# Nothing here refers to the attachment, which may be dropped while a thread applies a bucket.


class _SwitchesAtStep:
    """torch's switches as they were when ``step()`` was called, and which of them the update reads.

    Attributes:
        runs_beside: whether the update may run while the loop goes on. ``torch.compiler.is_compiling()`` is true for
            all threads while one of them compiles, and a step then computes its bias corrections in another way. Fused
            kernels do not, nor does Muon.
        reads_switches: whether it matters then that the loop leaves torch's switches alone: they are everybody's.
        known: whether the optimizer is torch's own, and steps as a copy.
        counts_writes: whether the plain loop's ``step()`` counts a write of each parameter, for autograd to notice.
        switches: torch's, which an update reads.
        thread: what torch keeps for that of the loop.
    """

    def __init__(self, stepper: Stepper) -> None:
        optimizer = stepper.optimizer()
        self.known = not stepper.is_foreign
        self.switches = switches()
        self.thread = of_this_thread()
        is_fused_one = self.known and is_fused(optimizer)
        self.runs_beside = is_fused_one or (self.known and multiplies_matrices(optimizer))
        self.reads_switches = not is_fused_one
        self.counts_writes = not is_fused_one or fused_counts_writes(optimizer)

    def difference(self, *, makes_state: bool) -> str | None:
        """The switch that has changed since and matters to the update, in words.

        Args:
            makes_state: whether the update makes state, which is of float64, or not.
        """
        if not self.reads_switches and makes_state:
            dtypes = (self.switches[DEFAULT_DTYPE], torch.get_default_dtype())
            if dtypes.count(torch.float64) == 1:
                return switched(self.switches)
        # It runs under the others as they were: torch.export, say, which has switched mkldnn off, may be what waits.
        return None if self.known else switched(self.switches, but=(DEFAULT_DTYPE, MKLDNN))


class DeferredStep:
    """An optimizer as it was when its ``step()`` was called.

    Args:
        outcomes: those of the optimizers whose ``step()`` was called before in the same step. This one's is added.

    Attributes:
        remedy: what a loop does before it changes what the update reads.
        optimizer: the user's, weakly.
        entries_before: how many entries its state had.
        stepper: of the copy, whose groups are as they were then.
        unapplied: its buckets that are still to be applied.
        outstanding: its buckets that nobody has waited for.
    """

    remedy = "Call overlap.synchronize() before such a change"

    def __init__(
        self,
        stepper: Stepper,
        parameters: AttachedParameters,
        number: int,
        vote: Vote | None,
        times: StepTimes,
        outcomes: StepOutcomes,
    ) -> None:
        optimizer = stepper.optimizer()
        self.number = number
        self.optimizer = weakref.ref(optimizer)
        self.entries_before = len(optimizer.state)
        self._frozen, self.stepper = self._stepped(stepper, optimizer)
        self.at_step = _SwitchesAtStep(stepper)
        self.outcome = StepOutcome(parameters)
        self.outcomes = outcomes
        outcomes[id(stepper), True] = self.outcome
        self.unapplied: list[DeferredBucket] = []
        self.outstanding: list[DeferredBucket] = []
        self.times = times
        self.ranks = VotesOnStep(number, vote, self.outcome)
        self.parameters = tuple(parameters)

    def _stepped(self, stepper: Stepper, optimizer: Optimizer) -> tuple[Optimizer, Stepper]:
        """What updates step with: a copy, for the loop may change groups before they run. It is held here, since the
        stepper holds it weakly. A foreign optimizer, which is waited for in ``step()``, steps itself."""
        if stepper.is_foreign:
            return optimizer, stepper
        frozen = snapshot_of(optimizer)
        return frozen, stepper.of_copy(frozen)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimizer's own."""
        return self._frozen.state

    def was_written(self, what: str, through: str) -> str:
        """The message where somebody has written what an update reads or writes."""
        return (
            f"{what} was written after optimizer.step(), through {through}, while the update was due: in the plain "
            "loop it had been applied by then. Call overlap.synchronize() before such a write"
        )


class _VersionsAtStep:
    """The parameters, gradients and state of a bucket as ``step()`` has left them: nobody else is to write them before
    the update has."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], state: Mapping[Any, Any]
    ) -> None:
        self._tensors = tensors
        # A gradient that is a view shares its version counter with the whole bucket, and would seem written when others
        # zero or clip theirs. That nobody else has this part of the bucket was found out in step(). The parameter is
        # compared in its place, which keeps the lists aligned.
        alone = [p if g._is_view() else g for p, g in zip(tensors, gradients, strict=True)]
        self._all = [*tensors, *alone]
        self._memory: list[torch.Tensor | None] | None = None
        if not are_counted(self._all):
            # Kept, not looked up again: whoever reads the local tensor of a watched DTensor waits for this very update.
            self._memory = [None if tensor.is_inference() else memory_of(tensor) for tensor in self._all]
        self.look(state)

    def look(self, state: Mapping[Any, Any]) -> None:
        """They are to stay as they are now."""
        self._versions = self._found()
        self._entries = EntriesAsLeft.of(Entries.of(self._tensors, state))

    def require(self, names: Sequence[str], state: Mapping[Any, Any], why: Callable[[str, str], str]) -> None:
        """Raise ``UncommittedStepError`` if somebody has written one of them.

        Args:
            why: given what was written, and by way of what: the message.
        """
        versions = self._found()
        if versions != self._versions:
            of_all = (*names, *(f"{name}.grad" for name in names))
            written = next(n for n, now, then in zip(of_all, versions, self._versions, strict=True) if now != then)
            raise UncommittedStepError(why(repr(written), "another tensor of the same memory"))
        if not self._entries.are_as_left(state):
            state_of = f"the state of {names[0]!r}, or of another parameter of its bucket,"
            raise UncommittedStepError(why(state_of, "a reference that was taken before"))

    def _found(self) -> list[int]:
        if self._memory is None:
            return list(map(VERSION, self._all))
        return [-1 if tensor is None else VERSION(tensor) for tensor in self._memory]


class DeferredBucket:
    """One bucket of a step that was handed over.

    Attributes:
        gradients: which were taken off ``.grad``.
        done: the task of the worker that applies it; ``None``: none was given.
        place: of its parameters in the order in which forwards read them; ``None``: buckets are applied in the order in
            which they were handed over, since all ranks send them so.
        sent: whether this rank's shards are on their way to the others.
        mark: on the side stream, after the update; ``None``: not there yet.
    """

    def __init__(self, parameters: AttachedParameters, step: DeferredStep, clip: Clip | None) -> None:
        self.members = parameters
        self.names = parameters.names
        self.tensors = parameters.tensors()
        self.gradients = gradients_in(parameters, self.tensors)
        self.device = self.tensors[0].device
        self.step = step
        self.done: Task | None = None
        self.place: int | None = None
        self.sent = False
        self.mark: Mark | None = None
        self._shards = Shards(parameters)
        self._clip = clip
        # Aliases: the parameters' own .grad, flags and attributes are the user's, to be read and changed meanwhile.
        self._calls = calls_of(parameters, self.gradients, alias=step.at_step.known)
        if step.at_step.counts_writes:
            # From here on a graph that has saved the old weights refuses to run, as after the plain loop's step.
            torch.autograd.graph.increment_version(self.tensors)
        self._as_left: _VersionsAtStep | None = _VersionsAtStep(self.tensors, self.gradients, step.state)
        step.unapplied.append(self)
        step.outstanding.append(self)
        if step.times.listener is not None:
            step.times.listener.handed_over(self.gradients)

    def apply(self, *, beside: bool = False) -> None:
        """Update the parameters, once, unless an earlier bucket of the step failed; ``beside``: while the loop goes on.
        An error is kept."""
        step, outcome = self.step, self.step.outcome
        if self not in step.unapplied:
            return
        step.ranks.hear()
        step.unapplied.remove(self)
        if outcome.failure is not None:
            return
        try:
            started = perf_counter()
            # Whoever watches a parameter waits for this thread.
            with torch._C.DisableTorchFunctionSubclass(), profiled("update", self.names[0]):
                self._update(beside=beside)
        except BaseException as error:
            outcome.failure = error
            return
        self._calls = []
        if self.device.type == "cpu":
            self._as_left, self.gradients = None, []
        # Else the side stream still reads them: they stay until it was waited for, and who writes them races with it.
        outcome.applied += self._shards.whole
        step.times.ran(self.members, started)

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

    def finish_beside(self) -> None:
        """Do all that is left to do, while the loop goes on. Not now, where it has changed torch's switches since, and
        the update reads them: whoever waits for it has it done under those of then."""
        if self.sent:
            self.finish()
        elif switched(self.step.at_step.switches) is None:
            self.apply(beside=True)

    def finish(self) -> None:
        """Do all that is left to do."""
        if self.sent:
            self._shards.receive(self.step.ranks, self.step.outcome)
        else:
            self.apply()

    def give_to(self, worker: Worker) -> None:
        """Have the worker apply it beside the loop."""
        finish = self.finish_beside if self.step.at_step.reads_switches else self.finish
        self.done = worker.run(finish, self.place or 0)

    def wait_for(self, worker: Worker) -> None:
        """Return when the worker has applied it, or that has failed."""
        with _not_compiling():
            self.done = self.done or worker.run(self.finish)
            if not self.done.done:
                if self.place is None:
                    worker.wake()
                else:
                    worker.hurry(self.done)
            started = perf_counter()
            with profiled("wait for update", self.names[0]):
                self.done.wait()
                if self in self.step.unapplied:  # it could not be done beside the loop
                    self.done = worker.run(self.finish)
                    self.done.wait()
            self.step.times.waited(self.members, started)

    def look(self) -> None:
        """Parameters, gradients and state are to be as they are now when somebody waits for them."""
        if self._as_left is not None:
            self._as_left.look(self.step.state)

    def require_left_alone(self) -> None:
        """Raise ``UncommittedStepError`` if somebody has written what the update reads or writes."""
        if self._as_left is not None:
            self._as_left.require(self.names, self.step.state, self.step.was_written)

    def _update(self, *, beside: bool) -> None:
        self.require_left_alone()
        at_step = self.step.at_step
        makes_state = not at_step.reads_switches and not all(map(self.step.state.get, self.tensors))
        if (difference := at_step.difference(makes_state=makes_state)) is not None:
            raise UncommittedStepError(
                f"{difference}, since optimizer.step(), which has put off the update of {self.names[0]!r}. "
                f"{self.step.remedy}"
            )
        # Whoever may ask for the switches meanwhile waits for this update, unless it runs beside the loop.
        as_before = as_then(at_step.switches) if at_step.reads_switches and not beside else nullcontext()
        with as_before, as_thread(at_step.thread):
            for call in self._calls:
                self._step(call)
        if beside and at_step.reads_switches and (changed := switched(at_step.switches)) is not None:
            raise UncommittedStepError(
                f"{changed}, while the update of {self.names[0]!r} was under way beside the loop, and may have been "
                f"computed in another way. {self.step.remedy}, or attach with defer=False"
            )

    def _step(self, call: OptimizerCall) -> None:
        if self._clip is not None:
            self._clip(call.tensors)
        call.step(self.step.stepper, self._begins)

    def _begins(self) -> None:
        self.step.outcome.begun.update(dict.fromkeys(self._shards.updated_here))


def gradients_in(parameters: AttachedParameters, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``in_grad`` of all of ``parameters``, which are these ``tensors``."""
    gradients = list(map(GRADIENT, tensors))
    if _PLAIN.issuperset(map(type, gradients)):
        return cast(list[torch.Tensor], gradients)
    return list(map(in_grad, parameters))


_PLAIN = frozenset({torch.Tensor})


def in_grad(attached: AttachedParameter) -> torch.Tensor:
    """The gradient in ``.grad``: the real one, where somebody put back a stand-in of an earlier step."""
    parameter = attached.get()
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, HeldGradient):
        parameter.grad = gradient = gradient.use()
    return gradient


def in_grad_if_any(attached: AttachedParameter) -> torch.Tensor | None:
    return None if attached.get().grad is None else in_grad(attached)


class DeferredBuckets:
    """The buckets that are put off and not applied yet, and everything that waits for one of them.

    Args:
        owner: held weakly, for it has this.

    Attributes:
        worker: applies buckets of parameters in host memory.
        is_sending: whether a bucket that was handed over is being sent: its own update uses parameters.
        watch_in_step: of parameters whose ``.grad`` the running ``step()`` does not find.
        state_watch: whoever asks for an optimizer's ``state`` waits for its buckets.
    """

    def __init__(self, step: RunningStep, owner: Schedule) -> None:
        self.worker = Worker()
        self.is_sending = False
        self._step = step
        self._owner = weakref.ref(owner)
        self._due: dict[int, DeferredBucket] = {}  # by the parameter's id
        self._outcomes: tuple[int, StepOutcomes] = 0, {}  # of the step with this number
        self._watch = Watch(values=self._used)
        self.watch_in_step = Watch(values=self._used, gradient=self._used_in_step)
        self._gradient_watch = Watch(values=self._used_spread_gradient)
        self.state_watch = StateWatch(self._used_state)
        self._stand_ins = StandIns(WeakMethod(self._used_gradient))

    def __bool__(self) -> bool:
        return bool(self._due)

    def all(self) -> list[DeferredBucket]:
        return list(dict.fromkeys(self._due.values()))

    def of(self, parameter: torch.Tensor | None) -> DeferredBucket | None:
        return self._due.get(id(parameter))

    # What is handed over.

    def begin(self) -> None:
        """Buckets are about to be handed over: whoever drops the model may be anywhere, and starts no thread."""
        if (owner := self._owner()) is not None:
            owe(owner)
            listen(owner)
        self.worker.start()

    def outcomes_of(self, number: int) -> StepOutcomes:
        """What becomes of the parameters of the optimizers whose ``step()`` is called in this step."""
        if self._outcomes[0] != number:
            self._outcomes = number, {}
        return self._outcomes[1]

    def leave(self, number: int, stepper: Stepper, parameters: AttachedParameters) -> None:
        """``step()`` begins. These are not put off, and updated before it returns."""
        outcomes = self.outcomes_of(number)
        outcomes.pop((id(stepper), True), None)  # of a call that has raised, and handed nothing over
        outcome = outcomes[id(stepper), False] = StepOutcome(parameters)
        outcome.begun.update(dict.fromkeys(parameters.names))

    def returned(self, number: int, stepper: Stepper) -> None:
        """``step()`` has returned: so those that were not put off were updated."""
        outcome = self.outcomes_of(number).get((id(stepper), False))
        if outcome is not None:
            outcome.applied = outcome.names

    def add(self, bucket: DeferredBucket) -> None:
        self._due.update(zip(map(id, bucket.tensors), repeat(bucket), strict=False))

    def take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """An error has come in the middle: nothing was handed over."""
        for parameter in parameters:
            self._due.pop(id(parameter), None)
        self._settle_if_none()

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

    def finish(self, buckets: Iterable[DeferredBucket | None]) -> None:
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
                        self._tear(bucket.step)
                        self._raise_failure(bucket.step)
                    self._let_go(bucket)

    def wait(self, bucket: DeferredBucket) -> None:
        """Return when it was applied, or has failed. Nobody waits for it any more."""
        self._run(bucket)
        self._let_go(bucket)

    def _run(self, bucket: DeferredBucket) -> None:
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
                    bucket.step.outcome.doubt(bucket.names, error)
        else:
            bucket.wait_for(self.worker)

    def finished(self, bucket: DeferredBucket) -> Mark:
        """Launch all that is left of it on the side stream."""
        with self.on_side(bucket):
            bucket.finish()
        bucket.look()
        return self._step.streams.mark(bucket.device)

    @contextmanager
    def on_side(self, bucket: DeferredBucket) -> Iterator[None]:
        with self._step.streams.on(bucket.device):
            yield
        if bucket.step.stepper.gave_back:
            self._step.streams.let_go(bucket.device)

    def _let_go(self, bucket: DeferredBucket) -> None:
        """It has been applied, or has failed."""
        self._watch.stop(bucket.tensors)
        for tensor in bucket.tensors:
            self._due.pop(id(tensor), None)
            gradient = tensor.grad
            if isinstance(gradient, HeldGradient):
                tensor.grad = gradient.held  # nobody has cleared it: the plain loop's is still there
            elif gradient is not None:
                self._gradient_watch.stop([gradient])
            gradient = None  # or it would seem to be in use
        self._stand_ins.take_back(bucket.tensors)
        step = bucket.step
        step.outstanding = [other for other in step.outstanding if other is not bucket]
        if not step.outstanding:
            self._end(step)

    def _end(self, step: DeferredStep) -> None:
        """All its buckets were waited for."""
        if (optimizer := step.optimizer()) is not None:
            self.state_watch.stop(optimizer)
        if step.outcome.is_whole:
            step.stepper.commit(optimizer)
            if optimizer is not None:
                here = (a.peek() for a in step.parameters if a.shard is None or a.shard.is_owner)
                end_state(optimizer, [parameter for parameter in here if parameter is not None])
                order_added(optimizer, step.entries_before)
        self._settle_if_none()

    def _settle_if_none(self) -> None:
        if not self._due and (owner := self._owner()) is not None:
            settled(owner)

    def _tear(self, step: DeferredStep) -> None:
        buckets = self.all()
        for bucket in buckets:
            self._run(bucket)
            if bucket.step is not step:
                # Nobody raises it any more. The frames that it was raised in refer to the buckets, and these to it.
                bucket.step.outcome.failure = without_frames(bucket.step.outcome.failure)
        step.stepper.wait_for_state()
        outcome, ledger = step.outcome, self._step.ledger
        outcomes = step.outcomes.values()
        applied = [name for o in outcomes for name in o.applied]
        unsure = [name for o in outcomes for name in o.in_doubt]
        pending = [name for o in outcomes for name in o.untouched]
        accepted = step.number if applied or unsure else step.number - 1
        in_part = bool(applied and pending)
        ledger.tear(step.number, applied, pending, outcome.failure, accepted=accepted, in_part=in_part, unsure=unsure)
        if not outcome.refused and not (step.ranks.know and not outcome.lost):
            ledger.votes.say_failed(step.number + 1)  # the vote on this step was cast before it was handed over
        for bucket in buckets:
            self._let_go(bucket)

    def _raise_failure(self, step: DeferredStep) -> None:
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
        if not self.worker.started:
            return  # whoever uses one of them waits for it, and so does the end of the process
        for bucket in self.all():
            if bucket.device.type == "cpu":
                # What was to run beside the loop may not have been done; what was done is not done again.
                if bucket.done is None or bucket.step.at_step.reads_switches:
                    bucket.done = self.worker.run(bucket.finish)
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
