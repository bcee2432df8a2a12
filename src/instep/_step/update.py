"""Updates that run apart from the call that asks for them: after ``step()`` has returned, or beside backward.

    ``Update``           One bucket, for one optimizer. It is prepared, with all that it reads noted as it is; it runs
                         here, on a side stream, or on a worker's thread; and whoever reads the parameters waits for it.
    ``PartOfStep``       The optimizer as it was when its updates were prepared.
    ``Outcome``          What has become of them, in names of parameters and in the votes of all ranks.
    ``AsLeft``           What an update reads and writes, as it was left: nobody else is to write it before.
    ``DeferredBuckets``  The updates of steps that were put off, and everything that waits for one of them.

An update refers to nothing of the attachment, which may be dropped while a thread runs it.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, repeat
from time import perf_counter
from typing import Any, cast

import torch
from torch.optim import Optimizer

from instep._gradients.clipping import Clip
from instep._optim.guards import EntriesAsLeft
from instep._optim.kernels import GRADIENT
from instep._optim.kinds import is_fused, multiplies_matrices
from instep._optim.parameters import AttachedParameters, OptimizerCall, calls_of, none_there
from instep._optim.shadow import end_state, order_added, snapshot_of
from instep._optim.stepper import Stepper, halves_of, look_at_masters, note_masters
from instep._ranks.vote import Vote, error_of
from instep._ranks.votes import StepVotes
from instep._step.deferral import PUT_OFF, Wording
from instep._step.schedule import Schedule
from instep._step.state import Gather, Gathered, StepTimes, gradient_of, without_frames
from instep._step.step import RunningStep
from instep._step.streams import Mark
from instep._torch.engine import BeforeRuns, Run, is_captured, listen, profiled
from instep._torch.lifetime import owe, settled, weakly
from instep._torch.switches import DEFAULT_DTYPE, as_then, as_thread, of_this_thread, switched, switches
from instep._torch.versions import PLAIN, VERSION, are_counted, memory_of
from instep._torch.watch import StateWatch, Watch
from instep._torch.worker import Task, Worker
from instep.errors import InstepError, StepMismatchError, UncommittedStepError

Begun = dict[str, bool]
"""By the name of each parameter whose update has begun, in that order: whether the update is over. Of one that is not,
nobody knows whether it was written."""


class Outcome:
    """What has become of one optimizer's updates in one step: here, and on the other ranks.

    Args:
        number: of the step.
        vote: whether all ranks take the step; ``None``: there is one rank.
        begun: of the parameters of all optimizers whose ``step()`` was called in the step.

    Attributes:
        failure: the first error, after which no further update is begun.
        refused: whether that are the other ranks.
        lost: whether a communication with them has failed: none is waited for any more.
        told: whether the others were told how the updates of this rank's shards went.
    """

    def __init__(self, number: int, vote: Vote | None, begun: Begun) -> None:
        self.number = number
        self.begun = begun
        self.failure: BaseException | None = None
        self.refused = self.lost = self.told = False
        self._vote = vote
        self._on_updates: Vote | None = None

    def fails(self, error: BaseException) -> None:
        """The first error counts."""
        self.failure = self.failure or error

    def loses(self, error: BaseException) -> None:
        """A communication with the other ranks has failed."""
        self.fails(error)
        self.lost = True

    def hear(self) -> None:
        """Wait until all ranks stand behind this step, before anything of it is written."""
        vote, self._vote = self._vote, None
        if vote is not None:
            self._wait_for(vote)

    def _wait_for(self, vote: Vote) -> None:
        """The ranks may have found an error; or this one cannot hear what they have found."""
        if (error := error_of(vote)) is not None:
            self.fails(error)
            self.refused, self.lost = True, not isinstance(error, InstepError)

    def is_refused(self) -> bool:
        """Whether some rank does not take the step, as far as it is not known yet. Waits for them."""
        return self._vote is not None and error_of(self._vote) is not None

    def tell_of_updates(self, votes: StepVotes) -> None:
        """All shards that this rank updates were updated and sent, or that has failed: tell the others, once. Nobody
        does who has lost them: each wait for them would take as long as the process group's timeout."""
        if self.told or self.lost:
            return
        try:
            self.told = True
            self._on_updates = votes.updated(self.number, failed=self.failure is not None)
        except BaseException as error:
            self.loses(error)

    def hear_of_updates(self) -> None:
        """Wait until all ranks have updated their shards, before those of others are written here: of a rank that could
        not, what arrives is no part of the step, and parameters would hold parts of two steps."""
        vote, self._on_updates = self._on_updates, None
        if vote is not None and self.failure is None:
            self._wait_for(vote)


class _SwitchesAtStep:
    """torch's switches as they were when ``step()`` was called, and which of them the update reads.

    Attributes:
        are_read: whether it matters that the loop leaves torch's switches alone: they are everybody's.
        leave_python: whether the update may run while the loop goes on. ``torch.compiler.is_compiling()`` is true for
            all threads while one of them compiles, and a step then computes its bias corrections in another way. Fused
            kernels do not, nor does Muon.
        counts_writes: whether the plain loop's ``step()`` counts a write of each parameter, for autograd to notice.
        then: torch's, which an update reads.
        thread: what torch keeps for that of the loop.
    """

    def __init__(self, optimizer: Optimizer, *, is_known: bool) -> None:
        self.then = switches()
        self.thread = of_this_thread()
        self.are_read = not (is_known and is_fused(optimizer))
        self.leave_python = not self.are_read or (is_known and multiplies_matrices(optimizer))
        self.counts_writes = self.are_read  # a fused kernel counts none (tests/unit/test_kernels.py)

    def other_dtype(self) -> str | None:
        """In words, where state that is made now is of float64, and would not have been then; or the other way round.
        An update that reads more than that runs under the switches as they were."""
        dtypes = (self.then[DEFAULT_DTYPE], torch.get_default_dtype())
        return switched(self.then) if dtypes.count(torch.float64) == 1 else None


class PartOfStep:
    """One optimizer's part of a step, as it was when its updates were prepared.

    Attributes:
        put_off: whether ``step()`` returns before the updates have run. They step with a copy, for the loop may change
            groups before: but a foreign optimizer, which is waited for in ``step()``, steps itself.
        optimizer: the user's, weakly.
        entries_before: how many entries its state had.
        stepper: of what updates step with.
        state: that they read and write, the optimizer's own.
        is_known: whether the optimizer is torch's own, and its update one that may run on aliases.
        outstanding: updates that nobody has waited for.
    """

    def __init__(
        self,
        stepper: Stepper,
        parameters: AttachedParameters,
        outcome: Outcome,
        times: StepTimes,
        *,
        put_off: bool = True,
        wording: Wording = PUT_OFF,
    ) -> None:
        optimizer = stepper.optimizer()
        look_at_masters(stepper)
        self.optimizer = weakref.ref(optimizer)
        self.entries_before = len(optimizer.state)
        self.is_known = not stepper.is_foreign
        self.stepper, self._stepped_with = stepper, optimizer
        self.put_off = put_off
        if put_off and self.is_known:
            self._stepped_with = snapshot_of(optimizer)  # held here, since a stepper holds its optimizer weakly
            self.stepper = stepper.of_copy(self._stepped_with)
        self.state: Mapping[Any, Any] = self._stepped_with.state
        self.switches = _SwitchesAtStep(optimizer, is_known=self.is_known)
        self.parameters = parameters
        self.outcome = outcome
        self.times = times
        self.wording = wording
        self.outstanding: list[Update] = []


class AsLeft:
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
        self._entries = EntriesAsLeft.of(self._tensors, state)

    def require(self, names: Sequence[str], state: Mapping[Any, Any], written: str) -> None:
        """Raise ``UncommittedStepError`` if somebody has written one of them.

        Args:
            written: the message. See ``Wording``.
        """
        versions = self._found()
        if versions != self._versions:
            of_all = (*names, *(f"{name}.grad" for name in names))
            name = next(n for n, now, then in zip(of_all, versions, self._versions, strict=True) if now != then)
            raise UncommittedStepError(written.format(what=repr(name), through="another tensor of the same memory"))
        if not self._entries.are_as_left(state):
            what = f"the state of {names[0]!r}, or of another parameter of its bucket,"
            raise UncommittedStepError(written.format(what=what, through="a reference that was taken before"))

    def _found(self) -> list[int]:
        if self._memory is None:
            return list(map(VERSION, self._all))
        return [-1 if tensor is None else VERSION(tensor) for tensor in self._memory]


class Update:
    """The update of one bucket, or of one optimizer's parameters in it.

    Args:
        clip: what is left to be done to the gradients before they are applied.
        place: of its parameters in the order in which forwards read them. Where all are 0, updates run in the order in
            which they were prepared.

    Attributes:
        gradients: which were taken off ``.grad``.
        is_due: whether it has neither been begun nor dropped.
        done: the task of the worker that runs it; ``None``: none was given.
        mark: on the side stream, after the update; ``None``: not there yet.
    """

    def __init__(self, members: AttachedParameters, step: PartOfStep, clip: Clip | None, place: float = 0) -> None:
        self.members = members
        self.names = members.names
        self.tensors = members.tensors()
        self.gradients = gradients_of(members, self.tensors)
        self.device = self.tensors[0].device
        self.step = step
        self.is_due = True
        self.done: Task | None = None
        self.mark: Mark | None = None
        self._gathered: Gathered | None = None  # the parts that other ranks update, on their way
        self._clip = clip
        self._place = place
        applied = self.gradients
        if step.put_off:
            # Aliases, too: the gradients are put back into .grad, where whoever uses one is noticed.
            applied = [g.detach() if type(g) in PLAIN else g for g in applied]
        # Aliases: the parameters' own .grad, flags and attributes are the user's, to be read and changed meanwhile.
        self._calls = calls_of(members, applied, alias=step.is_known)
        written = self.tensors if step.switches.counts_writes else halves_of(step.stepper, self.tensors)
        if written:
            # From here on a graph that has saved the old weights refuses to run, as after the plain loop's step.
            torch.autograd.graph.increment_version(written)
            note_masters(step.stepper, written, written)
        self._as_left: AsLeft | None = AsLeft(self.tensors, self.gradients, step.state)
        step.outstanding.append(self)
        if step.times.listener is not None:
            step.times.listener.handed_over(self.gradients)

    # Its run.

    def apply(self, *, beside: bool = False) -> None:
        """Update the parameters, once, unless an earlier update of the step has failed; ``beside``: while the loop goes
        on. An error is kept."""
        step, outcome = self.step, self.step.outcome
        if not self.is_due:
            return
        outcome.hear()
        self.is_due = False
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
        names = self.names
        if not self.members.are_plain:  # of some, other ranks update a part
            names = [a.spec.name for a in self.members if a.shard is None or not a.shard.is_shared]
        outcome.begun.update(dict.fromkeys(names, True))
        step.times.ran(self.members, started)

    def _update(self, *, beside: bool) -> None:
        step, at_step = self.step, self.step.switches
        self.require_left_alone()
        makes_state = not at_step.are_read and not all(map(step.state.get, self.tensors))
        if makes_state and (difference := at_step.other_dtype()) is not None:
            raise UncommittedStepError(
                f"{difference}, since optimizer.step(), which has put off the update of {self.names[0]!r}. "
                f"{step.wording.remedy}"
            )
        # Whoever may ask for the switches meanwhile waits for this update, unless it runs beside the loop.
        as_before = as_then(at_step.then) if at_step.are_read and not beside else nullcontext()
        with as_before, as_thread(at_step.thread):
            for call in self._calls:
                self._step(call)
        if beside and at_step.are_read and (changed := switched(at_step.then)) is not None:
            raise UncommittedStepError(
                f"{changed}, while the update of {self.names[0]!r} was under way beside the loop, and may have been "
                f"computed in another way. {step.wording.remedy}, or attach with defer=False"
            )

    def _step(self, call: OptimizerCall) -> None:
        if self._clip is not None:
            self._clip(call.tensors)
        call.step(self.step.stepper, self._begins)

    def _begins(self) -> None:
        names = self.names
        if not self.members.are_plain:  # of some, this rank updates nothing
            names = [a.spec.name for a in self.members if a.shard is None or not a.shard.is_empty]
        self.step.outcome.begun.update(dict.fromkeys(names, False))

    def look(self) -> None:
        """Parameters, gradients and state are to be as they are now when somebody waits for them."""
        if self._as_left is not None:
            self._as_left.look(self.step.state)

    def require_left_alone(self) -> None:
        """Raise ``UncommittedStepError`` if somebody has written what the update reads or writes."""
        if self._as_left is not None:
            self._as_left.require(self.names, self.step.state, self.step.wording.written)

    # The parts of other ranks.

    def send(self, gather: Gather) -> None:
        """Update this rank's shards now, and send them. It is left to wait for those of the others."""
        self.apply()
        if self.step.outcome.lost:
            return
        # Whether that failed or not: the other ranks wait for it.
        try:
            self._gathered = gather([a for a in self.members if a.is_divided])
        except BaseException as error:
            self.step.outcome.loses(error)

    def _receive(self, gathered: Gathered) -> None:
        """Write the parts that other ranks have updated: all of this bucket, or nothing. Of a step that has failed on
        any rank, or of which a communication was lost, nothing is waited for."""
        outcome, self._gathered = self.step.outcome, None
        outcome.hear_of_updates()
        if outcome.failure is not None:
            return
        try:
            gathered.wait()
        except BaseException as error:
            outcome.loses(error)
            return
        try:
            shared = [a.spec.name for a in self.members if a.shard is not None and a.shard.is_shared]
            outcome.begun.update(dict.fromkeys(shared, False))
            with torch._C.DisableTorchFunctionSubclass():
                gathered.write()
            outcome.begun.update(dict.fromkeys(shared, True))
        except BaseException as error:
            outcome.fails(error)

    # Who runs it, and who waits.

    def finish(self, *, beside: bool = False) -> None:
        """Do all that is left to do; ``beside``: while the loop goes on. Not now, where the loop has changed torch's
        switches since, and the update reads them: whoever waits for it has it done under those of then."""
        if self._gathered is not None:
            self._receive(self._gathered)
        elif not (beside and self.step.switches.are_read and switched(self.step.switches.then) is not None):
            self.apply(beside=beside)

    def give_to(self, worker: Worker) -> None:
        """Have the worker run it beside the loop."""
        self.done = worker.run(partial(self.finish, beside=True), self._place)

    def wait_for(self, worker: Worker) -> None:
        """Return when the worker has run it, or that has failed."""
        with _not_compiling():
            self.done = self.done or worker.run(self.finish)
            if not self.done.done:
                worker.hurry(self.done)
            started = perf_counter()
            with profiled("wait for update", self.names[0]):
                self.done.wait()
                if self.is_due:  # it could not be done beside the loop
                    self.done = worker.run(self.finish)
                    self.done.wait()
            self.step.times.waited(self.members, started)


@contextmanager
def _not_compiling() -> Iterator[None]:
    """While this thread, which may be compiling, waits for an update. torch has a private flag for all threads."""
    flag, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = flag


def gradients_of(parameters: AttachedParameters, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those in ``.grad`` of ``parameters``, which are these ``tensors`` and have one; in place of a placeholder the
    gradient that it stands for."""
    gradients = list(map(GRADIENT, tensors))
    if PLAIN.issuperset(map(type, gradients)):
        return cast(list[torch.Tensor], gradients)
    return [gradient for attached in parameters if (gradient := gradient_of(attached)) is not None]


# Those of a step that was put off, until they have run, and whoever waits for one of them.


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
        self._due: dict[int, Update] = {}  # by the parameter's id
        self._begun: tuple[int, Begun] = 0, {}  # of the step with this number
        self._watch = Watch(values=self._used)
        self.watch_in_step = Watch(values=self._used, gradient=self._used_in_step)
        self._gradient_watch = Watch(values=self._used_gradient)
        self.state_watch = StateWatch(self._used_state)
        self._before_runs = BeforeRuns(weakly(self._run_begins))
        # The gradients that are in ``.grad`` again, or that somebody has, by the parameter's id.
        self._shown: dict[int, weakref.ref[torch.Tensor]] = {}

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
        self._before_runs.start()
        self.worker.start()

    def begun_in(self, number: int) -> Begun:
        """What becomes of the parameters of all optimizers whose ``step()`` is called in this step."""
        if self._begun[0] != number:
            self._begun = number, {}
        return self._begun[1]

    def add(self, bucket: Update) -> None:
        self._due.update(zip(map(id, bucket.tensors), repeat(bucket), strict=False))

    def take_back(self, parameters: Sequence[torch.Tensor]) -> None:
        """An error has come in the middle: nothing was handed over."""
        self.watch_in_step.stop(parameters)
        for parameter in parameters:
            self._due.pop(id(parameter), None)
        self._settle_if_none()

    def settle(self, parameters: Iterable[torch.Tensor]) -> None:
        """``step()`` has returned: whoever uses one of these, which it was not to find, waits if it is due."""
        parameters = list(parameters)
        self._watch.take_from(self.watch_in_step, (p for p in parameters if id(p) in self._due))
        self.watch_in_step.stop(parameters)

    def show(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """``gradient`` is in ``.grad`` again: whoever uses it waits until it has been applied."""
        if id(parameter) in self._due:
            self._gradient_watch.start([gradient])
            self._shown[id(parameter)] = weakref.ref(gradient)

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
                        every = self.all()
                        for other in every:
                            self._run(other)
                        self._tear(bucket.step, every)
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
                    bucket.step.outcome.begun.update(dict.fromkeys(bucket.names, False))
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
        self._watch.stop(bucket.tensors)
        for tensor in bucket.tensors:
            self._due.pop(id(tensor), None)
            shown = self._shown.pop(id(tensor), _nothing)()
            if shown is not None:
                self._gradient_watch.stop([shown])
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
                if not step.entries_before:  # some were begun
                    here = (a.peek() for a in step.parameters if a.shard is None or a.shard.is_owner)
                    end_state(optimizer, [parameter for parameter in here if parameter is not None])
                order_added(optimizer, step.entries_before)
        self._settle_if_none()

    def _settle_if_none(self) -> None:
        if not self._due:
            self._before_runs.stop()
            if (owner := self._owner()) is not None:
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
        of_step = (bucket for bucket in due if bucket.step.outcome.begun is outcome.begun)
        pending = [name for bucket in of_step for name in bucket.names if name not in outcome.begun]
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

    def _run_begins(self, run: Run) -> None:
        """A backward may add to a gradient that is due, and that nobody has cleared: autograd tells nobody."""
        with torch._C.DisableTorchFunctionSubclass():
            not_cleared = [update for update in self.all() if not none_there(map(GRADIENT, update.tensors))]
        if not_cleared and run.accumulates and run.comes_to(chain.from_iterable(u.tensors for u in not_cleared)):
            self.finish(not_cleared)

    def _used_gradient(self, gradient: torch.Tensor, func: object) -> None:
        """A gradient is about to be used that may not have been applied yet."""
        self.finish(self.all())
        self._gradient_watch.stop([gradient])

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
        self.watch_in_step.stop(self._step.members.living())


def _nothing() -> None: ...
