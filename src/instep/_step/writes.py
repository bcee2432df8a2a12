"""How an update in backward stands until ``optimizer.step()``: for good, or on trial (``on_trial``)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import is_
from typing import NoReturn

import torch

from instep._gradients.scaling import all_finite, kernel_scale, nonfinite_error
from instep._optim.kernels import GRADIENT, InBucket
from instep._optim.parameters import AttachedParameter, AttachedParameters, calls_of
from instep._optim.stepper import PreparedUpdate, Stepper, writes_state_without_gradient, writes_without_gradient
from instep._step.remedies import ANY_LOOP, KEEP_ALL, WRITE_LATER, never_cleared, several_backwards, several_losses
from instep._step.state import Event, Gathered, first_written, gradient_of
from instep._step.step import RunningStep
from instep._torch.engine import graph_task, is_compiled
from instep._torch.hooks import user_call
from instep._torch.versions import versions_of
from instep._torch.watch import Watch
from instep.errors import (
    AccumulationError,
    HyperparameterChangedError,
    InstepError,
    NonFiniteGradientError,
    SpentGradientError,
    UncommittedStepError,
)

GIVE_UP = "To give it up: overlap.accept_torn(), and a checkpoint"


_NONE: tuple[AttachedParameters, list[int]] = AttachedParameters(), []


class Writes(ABC):
    """How updates in backward stand until ``optimizer.step()``: ``FinalWrites`` for good, ``TrialWrites`` on trial.

    Attributes:
        frees_gradients: whether applied gradients are not needed any more.
        begun: parameters of the running bucket whose update has begun to write.
        in_graph: whether the last bucket's update is in a CUDA graph that was being recorded.
    """

    frees_gradients: bool

    def __init__(self, step: RunningStep) -> None:
        self.begun = AttachedParameters()
        self.in_graph = False
        self._step = step
        # Parameters that step() is not to write, since backward has, with their version then.
        self._at_rest = _NONE

    # In backward.

    @abstractmethod
    def before_backward(self) -> None:
        """A backward is about to give gradients. Nothing is accumulated or reduced yet."""

    @abstractmethod
    def begin(self) -> None:
        """The step opens."""

    @abstractmethod
    def second_gradient(self, attached: AttachedParameter) -> InstepError | None:
        """A parameter gets another gradient in the same step: the error to raise, if the step cannot be taken so."""

    def accepts_update(self, *, seen: bool) -> bool:
        """Whether a bucket may be written now.

        Args:
            seen: whether the running backward was seen to begin, at an output of the model.
        """
        return True

    @abstractmethod
    def update(
        self,
        bucket: AttachedParameters,
        parameters: Sequence[torch.Tensor],
        gradients: list[torch.Tensor],
        *,
        final: bool,
    ) -> bool:
        """Step a bucket from its ``.grad``, on the side stream that is current. ``False``: it must not be stepped now.

        Args:
            final: whether these are the very tensors that ``.grad`` will hold.
        """

    are_prepared = False
    """Whether buckets may be prepared: nothing is kept of one before it is written."""

    def ready(
        self, bucket: AttachedParameters, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """The gradients of ``bucket`` are about to be applied: look at them, and clip them in place."""
        raise NotImplementedError

    def prepare(self, buckets: Sequence[AttachedParameters]) -> list[PreparedUpdate | None]:
        """The updates of ``buckets``. ``None``: one cannot be made before the gradients are there."""
        applied, prepared = self._step.members.applied, list[PreparedUpdate | None]([None]) * len(buckets)
        for stepper in self._step.members.steppers:
            numbers = [
                number
                for number, bucket in enumerate(buckets)
                if bucket.steppers == (stepper,) and bucket.are_plain and applied.isdisjoint(bucket.indices)
            ]
            if not numbers or stepper.options:
                continue
            tensors = [buckets[number].tensors() for number in numbers]
            made = stepper.prepare([InBucket(p, p, buckets[n].placing) for n, p in zip(numbers, tensors, strict=True)])
            for number, update in zip(numbers, made, strict=True):
                prepared[number] = update
        return prepared

    def takes_back(self, error: Exception) -> bool:
        """``update`` has raised: whether nothing is left of it."""
        return False

    @abstractmethod
    def updated(self, bucket: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        """``update`` has stepped ``bucket``, on the side stream that is still current."""

    @abstractmethod
    def retire(self, bucket: AttachedParameters, applied: Sequence[torch.Tensor] | None = None) -> None:
        """Nobody but instep needs ``.grad`` of applied parameters any more. Until ``optimizer.step()`` the plain loop
        would find the old weights: whoever uses one is noticed.

        Args:
            applied: the parameters of ``bucket``, where all were applied; ``None``: that is not known.
        """

    def take_back(self, bucket: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        """``bucket``, whose gradients were taken off, has not been updated after all: the opposite of ``retire``."""
        raise NotImplementedError

    @abstractmethod
    def stopped(self, cause: BaseException | None, begun: Sequence[str] = ()) -> None:
        """An error has stopped the step in backward.

        Args:
            begun: names of the parameters whose update was stopped, too. Nobody knows what these hold.
        """

    # Between backward and step().

    @abstractmethod
    def before_forward(self) -> None:
        """Raise, or see to it, if weights are not those that the plain loop would read."""

    @abstractmethod
    def before_state(self, stepper: Stepper) -> None:
        """The state of an optimizer that backward has updated is about to be saved or loaded."""

    @abstractmethod
    def before_load(self, model: str) -> None:
        """``load_state_dict()`` of a model of this class is called."""

    def real_gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        """The gradient that the plain loop has in ``.grad``, as far as it is still there."""
        return gradient_of(attached)

    @abstractmethod
    def rollback_if_any(self) -> None:
        """The loop wants parameters and state as they were before the step."""

    @abstractmethod
    def settle(self) -> None:
        """The interpreter is about to end, or to fork."""

    @abstractmethod
    def stop_watching(self) -> None:
        """Nobody is noticed any more who uses a parameter or its gradient."""

    # step() of an optimizer.

    @abstractmethod
    def leave_to_optimizer(self, error: InstepError) -> None:
        """``step()`` is about to do otherwise than backward has done: ``error`` says how."""

    @abstractmethod
    def before_step(self, stepper: Stepper, left: AttachedParameters) -> None:
        """``step()`` is about to update ``left``, which backward has not, as far as these have gradients."""

    @abstractmethod
    def step_stopped(self, stepper: Stepper) -> None:
        """``step()`` has raised."""

    @abstractmethod
    def committed(self, stepper: Stepper, applied: AttachedParameters) -> None:
        """``step()`` has returned: what backward has applied stands, and ``.grad`` is as in the plain loop."""

    def end_step(self) -> None:
        """The step is over, or was none."""
        self._step.end_step()

    # What both do.

    def tear(self, cause: BaseException | None, unsure: Collection[str] = (), *, is_known: bool = False) -> None:
        """The running step stands in part: on this rank, and perhaps on others.

        Args:
            unsure: names of the parameters of which nobody knows whether they were updated.
            is_known: the other ranks know it.
        """
        step = self._step
        members, number = step.members, step.number
        mixed = dict.fromkeys([*(a.spec.name for a in members.all if members.is_mixed(a)), *unsure])
        names = [a.spec.name for a in members.all if members.is_whole(a) and a.spec.name not in mixed]
        offered = (a for a in members.all if a.spec.index in members.offered)
        pending = [a.spec.name for a in offered if not members.is_whole(a) and a.spec.name not in mixed]
        step.ledger.tear(number, names, pending, cause, in_part=bool(pending), unsure=tuple(mixed))
        self.stop_watching()
        for stepper in members.steppers:
            stepper.stops()  # its state is there to be read
        if is_known:
            step.ledger.votes.start_anew()
        else:
            step.ledger.votes.say_failed(number)

    def _tear_and_raise(self, error: InstepError) -> NoReturn:
        try:
            self.tear(error)
            raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def tear_last(self, cause: BaseException) -> None:
        """The last step was committed here, and is not known to stand on the other ranks."""
        self._step.tear_last(cause)
        self.stop_watching()

    def clip_rest(self, left: Sequence[AttachedParameter]) -> None:
        """The gradients that backward has left to ``step()`` are a bucket of their own."""
        passes = self._step.passes
        if passes.clipping.policy is None:
            return
        if (error := passes.what_is_wrong()) is not None:
            self._tear_and_raise(error)
        try:
            passes.clipping.compute_total_norm(self._step.members.all, gradient_of)
        except RuntimeError:
            if not self._step.members.applied:
                passes.clipping.drop_norms()  # the loop may change these gradients, and call step() again
            raise
        there = [a for a in left if gradient_of(a) is not None]
        passes.clipping.clip([a.get() for a in there])

    def require_at_rest(self, stepper: Stepper) -> None:
        """``step()`` returns: it has found no gradient of the parameters that backward had applied, and must have left
        them alone."""
        (at_rest, versions), self._at_rest = self._at_rest, _NONE
        if not at_rest:
            return
        if (written := first_written(at_rest, versions)) is not None:
            self._step.round.stepper = None
            self._tear_and_raise(writes_without_gradient(stepper.name, written.spec.name))
        if not stepper.state_is_as_left:
            self._step.round.stepper = None
            self._tear_and_raise(writes_state_without_gradient(stepper.name))

    def _require_as_left(self, stepper: Stepper, applied: AttachedParameters) -> None:
        """Raise if groups, state or parameters are not as backward has left them."""
        if applied:
            require_settings_as_left(stepper)
        self._require_unwritten(applied)

    def _require_unwritten(self, applied: AttachedParameters) -> None:
        if (written := first_written(applied, self._step.members.versions_as_applied(applied))) is not None:
            raise UncommittedStepError(
                f"parameter {written.spec.name!r} was written between backward() and optimizer.step(), but "
                "backward had already updated it: the plain loop would have updated what was written. Change "
                f"or load weights after optimizer.step() or before the forward. {WRITE_LATER}"
            )

    def _rest_of(self, stepper: Stepper, left: Sequence[AttachedParameter]) -> list[AttachedParameter]:
        """All of ``left`` that have a gradient, if the optimizer's own ``step()`` could not step them: torch's foreach
        kernels refuse plain tensors beside DTensors, and DTensors of several meshes, and know nothing of shards, nor of
        state that is elsewhere; nobody but instep draws by key."""
        if not left or not (rest := [a for a in left if gradient_of(a) is not None]):
            return []
        divided = [a for a in rest if a.is_divided]
        if not divided and not stepper.steps_every_parameter and not self._is_mixed(stepper, rest):
            return []
        require_same_in_autocast(stepper)
        return rest

    def _step_rest(self, stepper: Stepper, rest: Sequence[AttachedParameter]) -> None:
        """Step these now, and have ``step()`` find no gradient of them."""
        gradients = [g for a in rest if (g := gradient_of(a)) is not None]
        divided = AttachedParameters(a for a in rest if a.is_divided)
        gathered: Gathered | None = None
        try:
            for call in calls_of(rest, gradients, alias=False):
                call.step(stepper)
        finally:
            if divided and self._step.gather is not None:  # whether that failed or not: the other ranks wait for it
                gathered = self._step.gather(divided)
        if gathered is not None:
            gathered.wait()
            gathered.write()
            self._step.members.received.update(divided.indices)
        self._hide([(a, g) for a in rest if (g := gradient_of(a)) is not None])

    def _is_mixed(self, stepper: Stepper, rest: Sequence[AttachedParameter]) -> bool:
        """Whether parameters are left that one call of torch's kernels refuses together: plain tensors and DTensors, or
        DTensors of several meshes. Not on trial, where ``step()`` raises if the plain loop's does; nor where the kernel
        takes the loss scale off, which it does in ``step()`` alone."""
        return self.frees_gradients and len({a.mesh for a in rest}) > 1 and kernel_scale(stepper.optimizer()) is None

    def _hide(self, gradients: Sequence[tuple[AttachedParameter, torch.Tensor]]) -> None:
        self._step.round.hide(gradients)

    def _leave_alone(self, stepper: Stepper, applied: AttachedParameters) -> None:
        """``step()`` must not write parameters that backward has applied. torch's own do not."""
        # Noted anew in every call: one that has raised has not returned, and nobody has looked at its note.
        self._at_rest = (applied, versions_of(applied.tensors())) if applied and stepper.is_foreign else _NONE

    def _call(
        self, bucket: AttachedParameters, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Step ``bucket``, those of each optimizer by a call of its own."""
        if len(bucket.steppers) > 1:
            for part, mine in bucket.parts:
                self._call(part, list(compress(parameters, mine)), list(compress(gradients, mine)))
            return
        (stepper,), begins = bucket.steppers, partial(self._begins, bucket)
        if bucket.are_plain:  # as mostly: there is nothing to divide
            stepper.step(parameters, begins=begins, placing=bucket.placing)
            return
        for call in calls_of(bucket, gradients, alias=False):
            call.step(stepper, begins)

    def _begins(self, bucket: AttachedParameters) -> None:
        """An update is about to write these."""
        self.begun = bucket if not self.begun else AttachedParameters(dict.fromkeys([*self.begun, *bucket]))

    def let_go_of_memory(self, device: torch.device) -> None:
        """An update has run, or has failed, on the side stream of this device, which is still current."""
        if any(stepper.gave_back for stepper in self._step.members.steppers):
            self._step.streams.let_go(device)

    def _drop(self) -> None:
        """Nothing of the step was written: it is as if it had never opened."""
        self._step.ledger.happened(Event.DROPPED)
        self.end_step()


def require_same_in_autocast(stepper: Stepper) -> None:
    """Raise ``HyperparameterChangedError`` if ``step()`` was called in an autocast block that matters to it: updates of
    buckets were, or are about to be, computed outside of the block."""
    if stepper.autocast_matters():
        raise HyperparameterChangedError(
            f"{stepper.name}.step() was called inside an autocast block, and may compute other numbers there; instep's "
            "updates run outside of it. Call optimizer.step() outside of the block, as PyTorch advises"
        )


def require_settings_as_left(stepper: Stepper) -> None:
    """Raise if ``step()`` would update in another way than backward has."""
    require_same_in_autocast(stepper)
    stepper.require_unchanged()


def owed_steps(step: RunningStep) -> str:
    """The calls that the running step waits for: ``"AdamW.step()"``."""
    steppers_left = [stepper.name for stepper in step.members.steppers if stepper in step.round.steppers_left]
    return " and ".join(f"{name}.step()" for name in steppers_left) or "optimizer.step()"


class FinalWrites(Writes):
    """Writes of a step without ``undo``: an update stands, its gradients are freed, and an error tears the step. With
    ``nonfinite="raise"`` a bucket with NaN or infinity is not written."""

    frees_gradients = True
    are_prepared = True

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self._raises_nonfinite = step.ledger.nonfinite == "raise"
        self._watch = Watch(values=self._used)
        # Of each optimizer one parameter that was left with a spent gradient when the last step was committed.
        self._left_spent: dict[Stepper, AttachedParameter] = {}

    # In backward.

    def before_backward(self) -> None:
        if not self._step.accumulation.distributed or self._step.members.applied:
            return
        # DDP's reducer would be unusable after the error that this gradient raises when it is added to.
        for attached in self._left_spent.values():
            parameter = attached.get()
            if attached.spent is not None and parameter.requires_grad and parameter.grad is attached.spent:
                raise never_cleared(attached.spec.name, "backward()")

    def begin(self) -> None:
        if is_compiled():
            raise InstepError(
                "backward is compiled (torch._dynamo.config.compiled_autograd), and reads weights after they have got "
                "their gradients. Nothing was updated. Use undo=True or schedule='forward', or compile the model alone"
            )

    def second_gradient(self, attached: AttachedParameter) -> InstepError | None:
        return AccumulationError(
            f"a second gradient for {attached.spec.name!r} arrived before optimizer.step(). {several_backwards()}. "
            f"Reentrant checkpointing that visits a parameter twice needs use_reentrant=False. {KEEP_ALL}"
        )

    def update(
        self,
        bucket: AttachedParameters,
        parameters: Sequence[torch.Tensor],
        gradients: list[torch.Tensor],
        *,
        final: bool,
    ) -> bool:
        self.ready(bucket, parameters, gradients)
        try:
            self._call(bucket, parameters, gradients)
        finally:
            if parameters[0].device.type != "cpu":
                self.let_go_of_memory(parameters[0].device)
        return True

    def ready(
        self, bucket: AttachedParameters, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        if self._raises_nonfinite:
            self._require_finite(bucket)
        passes = self._step.passes
        if passes.clipping.policy is not None:
            # Nothing is left to measure later, so it does not matter whether these are the tensors that stay in .grad.
            if passes.running is None:
                passes.clipping.measure(bucket, gradients)
            passes.require_measured(bucket, gradients)
            passes.clipping.clip(parameters)

    def updated(self, bucket: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        # As they were: some optimizers replace .grad. Their memory goes back to the stream that made them, once that
        # waits for the side stream.
        if gradients[0].device.type != "cpu":
            self._step.streams.hold(gradients)

    def retire(self, bucket: AttachedParameters, applied: Sequence[torch.Tensor] | None = None) -> None:
        if applied is None and not self._step.members.applied.issuperset(bucket.indices):
            bucket = AttachedParameters(filter(self._step.members.is_applied, bucket))
        parameters = bucket.tensors() if applied is None else applied
        for parameter, spent in zip(parameters, bucket.spent, strict=True):
            parameter.grad = spent
        self._watch.start(parameters if all(bucket.leave_spent) else compress(parameters, bucket.leave_spent))

    def take_back(self, bucket: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        self._watch.stop(bucket.tensors())
        for parameter, gradient in zip(bucket.tensors(), gradients, strict=True):
            parameter.grad = gradient

    def stopped(self, cause: BaseException | None, begun: Sequence[str] = ()) -> None:
        others_may_have = self._step.ledger.votes.voting is not None and isinstance(cause, NonFiniteGradientError)
        if self._step.members.applied or begun or others_may_have:
            self.tear(cause, begun)
        else:
            self._drop()

    def _require_finite(self, parameters: Iterable[AttachedParameter]) -> None:
        """Before they are written, for good."""
        gradients = [(a.spec.name, g) for a in parameters if (g := gradient_of(a)) is not None]
        if not all_finite(g for _, g in gradients):
            rank = self._step.ledger.votes.rank()
            raise nonfinite_error(gradients, rank, "It was not applied; others of the step may have been")

    # Between backward and step().

    def before_forward(self) -> None:
        if self._step.members.applied:
            raise UncommittedStepError(
                f"backward has updated {len(self._step.members.applied)} parameters, and {owed_steps(self._step)} has "
                "not been called since: call it before this forward. Wrap all but the last micro-batch in `with "
                f"overlap.accumulate():`. {several_losses(len(self._step.members.steppers))}. {KEEP_ALL}. {GIVE_UP}"
            )

    def before_state(self, stepper: Stepper) -> None:
        if self._step.ledger.torn is None:
            raise UncommittedStepError(
                f"state_dict() or load_state_dict() of {stepper.name} was called between backward() and "
                "optimizer.step(), but backward has already updated its state. Call it after optimizer.step() or "
                f"before backward(). {ANY_LOOP}. {GIVE_UP}"
            )

    def rollback_if_any(self) -> None:
        raise InstepError(
            "rollback() needs the copies of undo=True (or undo='host'), taken before a step writes: "
            "attach(…, undo=True)"
        )

    def settle(self) -> None: ...

    def stop_watching(self) -> None:
        self._watch.stop(self._step.members.living())

    def before_load(self, model: str) -> None:
        if self._step.members.applied and self._step.ledger.torn is None:
            raise UncommittedStepError(
                f"{model}.load_state_dict() was called between backward() and optimizer.step(), but backward has "
                f"already updated the weights. Load after optimizer.step() or before backward(). {ANY_LOOP}. {GIVE_UP}"
            )

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        """An applied parameter is about to be read or written."""
        self._step.backwards.drain_failed()
        if self._step.ledger.torn is not None:
            return  # there to be read
        name, call = self._step.members.name_of(parameter), user_call(getattr(func, "__name__", str(func)))
        between = graph_task() is None
        where = "between backward() and optimizer.step()" if between else "in backward"
        how = "" if between else ", and checkpoint with use_reentrant=False, without .detach() of a weight"
        other = " That optimizer is not the attached one." if call.endswith(".step()") else ""
        raise UncommittedStepError(
            f"parameter {name!r} was used {where}, by {call}, but backward has already updated it.{other} Use weights "
            f"before backward() or after optimizer.step(){how}. {ANY_LOOP}. {GIVE_UP}"
        )

    # step() of an optimizer.

    def leave_to_optimizer(self, error: InstepError) -> None:
        try:
            self.tear(error)
            raise error
        finally:
            del error  # or it would refer to itself, by way of this frame

    def before_step(self, stepper: Stepper, left: AttachedParameters) -> None:
        applied = self._step.members.applied_by(stepper)
        parameters = applied.tensors()
        self._watch.stop(parameters)
        try:
            self._require_as_left(stepper, applied)
            if applied:
                stepper.require_same_scale()
        except InstepError as error:
            self.tear(error)
            raise
        try:
            if self._raises_nonfinite:
                self._require_finite(left)
        except NonFiniteGradientError as error:
            # Nothing was offered: nothing is written. Another rank may find only finite gradients in its shards.
            if self._step.members.offered or self._step.ledger.votes.voting is not None:
                self.tear(error)
            raise
        self.clip_rest(left)
        self._step.before_update(stepper, left)
        rest = self._rest_of(stepper, left)
        finds = [attached for attached in left if gradient_of(attached) is not None] if left else []
        self._step.round.begins(stepper, self._step.ledger, finds)
        if rest:
            self._step_rest(stepper, rest)
        for parameter in parameters:
            parameter.grad = None
        self._leave_alone(stepper, applied)

    def _require_unwritten(self, applied: AttachedParameters) -> None:
        # Without a spent gradient nobody has come between: backward has not returned.
        if not all(applied.leave_spent):
            applied = AttachedParameters(compress(applied, applied.leave_spent))
        super()._require_unwritten(applied)
        if all(map(is_, map(GRADIENT, applied.tensors()), applied.spent)):
            return
        for attached in applied:
            if attached.get().grad is not attached.spent:
                raise SpentGradientError(
                    f"the gradient of {attached.spec.name!r} was cleared or replaced between backward() and "
                    "optimizer.step(), but backward had already applied it. Call zero_grad() after "
                    f"optimizer.step() or before backward(). {ANY_LOOP}"
                )

    def step_stopped(self, stepper: Stepper) -> None:
        members, round_ = self._step.members, self._step.round
        living = [a for a in members.all if a.peek() is not None]
        known = members.offered.union(a.spec.index for a in round_.finds)  # also where the loop has cleared it since
        with_gradient = [a for a in living if a.spec.index in known or gradient_of(a) is not None]
        # Those that instep itself has stepped before step() began, and those whose optimizer's step() has returned.
        done = [attached for attached, _ in round_.hidden]
        done += [a for a in with_gradient if a.stepper is not stepper and a.stepper not in round_.steppers_left]
        members.applied.update(attached.spec.index for attached in done)
        unsure = [a.spec.name for a in with_gradient if a.stepper is stepper and not members.is_applied(a)]
        why = ""
        if not round_.finds and members.applied_by(stepper):
            why = ", where it found no gradient: backward had applied all. If it needs some, use schedule='forward'"
        self.tear(InstepError(f"{stepper.name}.step() raised{why}"), unsure)

    def committed(self, stepper: Stepper, applied: AttachedParameters) -> None:
        for parameter, spent in zip(applied.tensors(), applied.spent, strict=True):
            parameter.grad = spent
        if applied:
            self._left_spent[stepper] = applied[0]
