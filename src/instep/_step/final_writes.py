"""``schedule="backward"`` without ``undo``: an update in backward stays, and its gradients are freed."""

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import is_

import torch

from instep._autograd.callers import user_call
from instep._autograd.engine import graph_task, is_compiled
from instep._autograd.watch import Watch
from instep._gradients.finite import Policy, all_finite, nonfinite_error
from instep._optim.parameters import GRADIENT, AttachedParameter, AttachedParameters
from instep._optim.stepper import Stepper
from instep._step.members import gradient_of
from instep._step.running_step import RunningStep
from instep._step.spent_uses import never_cleared
from instep._step.ways_out import ANY_LOOP, KEEP_ALL, MICRO_BATCHES
from instep._step.writes import GIVE_UP, Writes, owed_steps
from instep.errors import (
    AccumulationError,
    InstepError,
    NonFiniteGradientError,
    SpentGradientError,
    UncommittedStepError,
)


class FinalWrites(Writes):
    """
    Args:
        nonfinite: ``"raise"``: a bucket with NaN or infinity is not written.
    """

    frees_gradients = True

    def __init__(self, step: RunningStep, nonfinite: Policy) -> None:
        super().__init__(step)
        self._raises_nonfinite = nonfinite == "raise"
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
            f"a second gradient for {attached.spec.name!r} arrived before optimizer.step(). {MICRO_BATCHES}. Reentrant "
            f"checkpointing that visits a parameter twice needs use_reentrant=False. {KEEP_ALL}"
        )

    def may_write(self, *, seen: bool) -> bool:
        return True

    def update(
        self,
        bucket: AttachedParameters,
        parameters: Sequence[torch.Tensor],
        gradients: list[torch.Tensor],
        *,
        final: bool,
    ) -> bool:
        self._require_finite(bucket)
        passes = self._step.passes
        # Nothing is left to measure later, so it does not matter whether these are the tensors that stay in .grad.
        if passes.running is None:
            passes.clipping.measure(bucket, gradients)
        passes.clipping.clip(parameters)
        try:
            for stepper in bucket.steppers:
                self._call(stepper, bucket, gradients)
        finally:
            self._let_go_of_memory(parameters[0].device)
        return True

    def takes_back(self, error: Exception) -> bool:
        return False

    def updated(self, bucket: AttachedParameters, gradients: Sequence[torch.Tensor]) -> None:
        # As they were: some optimizers replace .grad. Their memory goes back to the stream that made them, once that
        # waits for the side stream.
        self._step.streams.hold(gradients)

    def retire(self, bucket: AttachedParameters) -> None:
        if not self._step.members.applied.issuperset(bucket.indices):
            bucket = AttachedParameters(filter(self._step.members.is_applied, bucket))
        parameters = bucket.tensors()
        for parameter, spent in zip(parameters, bucket.spent, strict=True):
            parameter.grad = spent
        self._watch.start(compress(parameters, bucket.leave_spent))

    def stopped(self, cause: BaseException | None, begun: Sequence[str] = ()) -> None:
        others_may_have = self._step.ledger.votes.voting is not None and isinstance(cause, NonFiniteGradientError)
        if self._step.members.applied or begun or others_may_have:
            self.tear(cause, begun)
        else:
            self._drop()

    def _require_finite(self, parameters: Iterable[AttachedParameter]) -> None:
        """Before they are written, for good."""
        if not self._raises_nonfinite:
            return
        gradients = [(a.spec.name, g) for a in parameters if (g := gradient_of(a)) is not None]
        if not all_finite(g for _, g in gradients):
            rank = self._step.ledger.votes.rank()
            raise nonfinite_error(gradients, rank, "It was not applied; others of the step may have been")

    # Between backward and step().

    def before_forward(self) -> None:
        if self._step.members.applied:
            raise UncommittedStepError(
                f"backward has updated {len(self._step.members.applied)} parameters, and {owed_steps(self._step)} has "
                "not been called since: the plain loop would still read the old weights here. Call step() of every "
                f"attached optimizer after each backward. To accumulate: {MICRO_BATCHES}. For a loss that only passes "
                "through this model, as an actor's through its critic: model.requires_grad_(False) around it; or, if "
                "the model's own loss comes first, zero_grad() before its backward() and not after step(). "
                f"{KEEP_ALL}. {GIVE_UP}"
            )

    def before_state(self, stepper: Stepper) -> None:
        if self._step.ledger.torn is None:
            raise UncommittedStepError(
                f"state_dict() or load_state_dict() of {stepper.name} was called between backward() and "
                "optimizer.step(), but backward has already updated its state: the plain loop would find the old one. "
                f"Call it after optimizer.step() or before backward(). {ANY_LOOP}. {GIVE_UP}"
            )

    def real_gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        return gradient_of(attached)

    def rollback_if_any(self) -> None:
        raise InstepError(
            "rollback() needs the copies of undo=True (or undo='host'), taken before a step writes: "
            "attach(…, undo=True)"
        )

    def finish_rollback(self) -> None: ...

    def settle(self) -> None: ...

    def release(self) -> None:
        self._watch.stop(self._step.members.living())

    def before_load(self, model: str) -> None:
        if self._step.members.applied and self._step.ledger.torn is None:
            raise UncommittedStepError(
                f"{model}.load_state_dict() was called between backward() and optimizer.step(), but backward has "
                "already updated the weights: the plain loop would update those that are loaded. Load after "
                f"optimizer.step() or before backward(). {ANY_LOOP}. {GIVE_UP}"
            )

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        """An applied parameter is about to be read or written."""
        self._step.backwards.let_go()
        if self._step.ledger.torn is not None:
            return  # there to be read
        name, call = self._step.members.name_of(parameter), user_call(getattr(func, "__name__", str(func)))
        between = graph_task() is None
        where = "between backward() and optimizer.step()" if between else "in backward"
        how = "" if between else ", and checkpoint with use_reentrant=False"
        other = " That optimizer is not the attached one." if call.endswith(".step()") else ""
        raise UncommittedStepError(
            f"parameter {name!r} was used {where}, by {call}, but backward has already updated it: the plain loop "
            f"would find the old value.{other} Use weights before backward() or after optimizer.step(){how}. "
            f"{ANY_LOOP}. {GIVE_UP}"
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
        except InstepError as error:
            self.tear(error)
            raise
        try:
            self._require_finite(left)
        except NonFiniteGradientError as error:
            # Nothing was offered: nothing is written. Another rank may find only finite gradients in its shards.
            if self._step.members.offered or self._step.ledger.votes.voting is not None:
                self.tear(error)
            raise
        self.clip_rest(left)
        if self._step.check is not None:
            self._keep_for_check(self._step.check, stepper)
        rest = self._rest_of(stepper, left)
        self._step.round.begins(stepper, self._step.ledger)
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
        mine = [a for a in living if a.spec.index in members.offered or gradient_of(a) is not None]
        # Those that instep itself has stepped before step() began, and those whose optimizer's step() has returned.
        done = [attached for attached, _ in round_.hidden]
        done += [a for a in mine if a.stepper is not stepper and a.stepper not in round_.owing]
        members.applied.update(attached.spec.index for attached in done)
        unsure = [a.spec.name for a in mine if a.stepper is stepper and not members.is_applied(a)]
        self.tear(InstepError(f"{stepper.name}.step() raised"), unsure)

    def committed(self, stepper: Stepper, applied: AttachedParameters) -> None:
        for parameter, spent in zip(applied.tensors(), applied.spent, strict=True):
            parameter.grad = spent
        if applied:
            self._left_spent[stepper] = applied[0]
