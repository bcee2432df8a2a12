"""``schedule="backward"``: a step is a transaction, IDLE → OPEN(k) → COMMITTED(k) or TORN(k).

It opens when the first final gradient is announced, and is committed by the user's ``optimizer.step()``. While it is
open, buckets are applied; when something stops it in between, it is torn, nothing more is written, and every later
forward, backward and step says so. With ``undo`` it is put back instead, and ``optimizer.step()`` does it again as the
plain loop would.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from instep._autograd.engine import Backwards, graph_task
from instep._autograd.placeholders import ACCUMULATE, CONVERSION, UNSCALE, HeldGradient, Placeholder
from instep._autograd.watch import GET_GRAD, Watch
from instep._gradients.clipping import Clipping
from instep._gradients.finite import Policy, all_finite, ask_if_finite, nonfinite_error
from instep._gradients.scaling import LossScale, found_inf, is_power_of_two, kernel_scale, take_off_here
from instep._life.life import owe, settled
from instep._life.weak import WeakMethod
from instep._optim.autocast import require_same_in_autocast
from instep._optim.generators import Generators
from instep._optim.lending import Lent, Outcome
from instep._optim.parameters import AttachedParameter, calls_of
from instep._optim.parts import version_of
from instep._optim.plan import Bucket, ParameterSpec
from instep._optim.stepper import Stepper, asks_for_state, is_torchs_own, remember_settings, writes_without_gradient
from instep._optim.undo import Undo
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.checking import Check
from instep._step.streams import StepStreams
from instep._step.torn import Torn
from instep.errors import (
    AccumulationError,
    HyperparameterChangedError,
    InstepError,
    NonFiniteGradientError,
    SpentGradientError,
    StepMismatchError,
    UncommittedStepError,
    UnsupportedOptimizerError,
)


class Recorder(Protocol):
    """Told what ran when, on the thread that it ran on: ``kind`` is ``"step"`` for the update of these parameters,
    ``"communication"`` for their gradients on their way between ranks, which any thread tells, or ``"waiting"`` for
    either. Times are ``perf_counter`` seconds."""

    def __call__(self, kind: str, names: Sequence[str], start: float, end: float) -> None: ...


_GIVE_UP = "To give this step up, as after an interrupt: overlap.accept_torn(), and then load a checkpoint"

Gather = Callable[[Sequence[AttachedParameter]], Callable[[], None]]
"""Sends the parts of parameters that this rank has stepped; returns what waits for those of the others. All ranks must
call it with the same parameters."""


class BackwardSchedule:
    """The current step of one attachment, and the steps before it.

    Attributes:
        step_count: how many committed steps wrote anything.
        redo_count: how many steps were put back, and left to ``optimizer.step()``.
        skip_count: how many steps were left out, for a gradient that was not finite.
        recorder: told of each bucket's step and communication; ``None`` when nobody listens.
        backwards: those that were seen to begin.
        lock: held while gradients are announced and applied. On accelerators the engine runs one thread per device,
            each of which may complete a bucket.
        on_open: called when a step opens.
        gather: where each rank steps its own part of parameters: gets the others' parts.
    """

    def __init__(
        self,
        steppers: Sequence[Stepper],
        ranks: StepVotes,
        accumulation: Accumulation,
        clipping: Clipping,
        undo: Undo | None = None,
        scale: LossScale | None = None,
        nonfinite: Policy = "allow",
        check: Check | None = None,
    ) -> None:
        self.parameters: tuple[AttachedParameter, ...] = ()
        self.streams = StepStreams()
        self.step_count = 0
        self.redo_count = 0
        self.skip_count = 0
        self.recorder: Recorder | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.gather: Gather | None = None
        self.backwards = Backwards()
        self._steppers = tuple(steppers)
        self._ranks = ranks
        self._accumulation = accumulation
        self._clipping = clipping
        self._undo = undo
        self._scale = scale
        self._nonfinite = nonfinite
        self._check = check
        # Whether this step is taken, once that is known; and what puts back what step() does without gradients.
        self._taken: bool | None = None
        self._asked_in_vain: set[Stepper] = set()  # that stepped without any gradient: that ends no step
        self._settings: Callable[[], None] | None = None
        # With undo: puts back what an interrupted step() has written beside parameters and their state.
        self._settings_before: Callable[[], None] | None = None
        self._watch = Watch(values=self._used, gradient=None if undo is None else self._used)
        # With undo: what the running step() does not find is missed by nobody else, either.
        self._watch_in_step = Watch(values=self._used_in_step, gradient=self._used_in_step)
        self._when_used = WeakMethod(self._used_gradient)
        self.lock = threading.RLock()
        self._arrived: set[int] = set()
        self._applied: set[int] = set()
        self._uncommitted: set[Stepper] = set()
        # The running backward, and those nested in it by reentrant checkpointing.
        self._backwards: set[int | None] = set()
        # The running backward, if it was seen to begin: at an output of the model.
        self._running: int | None = None
        # Of each optimizer one parameter that was left with a spent gradient when the last step was committed.
        self._left: dict[Stepper, AttachedParameter] = {}
        self._flushing: Stepper | None = None
        # Whose step() has returned, with the numbers of steps that are to be when this has been taken note of.
        self._committing: tuple[Stepper, int, int] | None = None
        self._ending = False  # whether one of the two is being brought to its end
        self._restoring = False  # whether put_back runs
        # With undo, or applied here in step(): gradients that step() does not find, and everybody does when it is over.
        self._taken_off: list[tuple[AttachedParameter, torch.Tensor]] = []
        self._failure: BaseException | None = None
        self._torn: Torn | None = None
        # With undo: the gradients of applied parameters, with their version; and whether the step was put back.
        self._kept: dict[int, tuple[torch.Tensor, int]] = {}
        self._outcomes: dict[int, Outcome] = {}  # of those that their update wrote
        self._at_rest: list[tuple[AttachedParameter, int]] = []
        self._plain = False
        self._raises = False  # whether the update has raised on trial
        # While the step is put back: whose state, and which parameters, somebody had written. Who is interrupted in it
        # does it again, at the next use.
        self._putting_back: tuple[str | None, list[str]] | None = None
        self._added_up = False  # whether there are gradients since the last step
        # With two passes: which of them is running.
        self._pass: str | None = None
        # The gradients that the second pass has left, with their version: until optimizer.step() has looked at them.
        self._measured: dict[int, tuple[torch.Tensor, int]] | None = None

    # What happens during backward.

    def begin_backward(self) -> bool:
        """An output of the model is about to get its gradient, before any parameter does. Returns whether this is
        the first of them in the running backward.

        Raises ``AccumulationError``, before anything is written or reduced, if an earlier backward of this step has
        already updated weights. Some outputs lie deep in the graph: in the same backward they are met later.
        """
        task = graph_task()
        if task == self._running:
            return False
        self._running = task
        if task in self._backwards:
            return False
        if self._accumulation.distributed and not self._applied:
            # DDP's reducer would be unusable after the error that this gradient raises when it is added to.
            for attached in self._left.values():
                parameter = attached.get()
                if attached.spent is not None and parameter.requires_grad and parameter.grad is attached.spent:
                    raise _never_cleared(attached.spec.name, "backward()")
        if self._applied and self._undo is not None:
            self.put_back()
        self._accumulation.begin()
        if self._pass is None and self._undo is not None and not self._applied:
            self._clipping.begin()  # more gradients: what was measured of the step so far is not all
        if self._accumulation.holds_next:
            return True
        self._ranks.begin_backward(self.step_count)
        self._hear(wait=True)
        if self._applied:
            raise AccumulationError(
                "a second backward began before optimizer.step(), but the first has already updated the weights. Wrap "
                "all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync()), or add the losses and "
                "call backward() once"
            )
        self._backwards = {task}
        return True

    def end_backward(self) -> None:
        """The backward that ``begin_backward`` told of is over."""
        self._running = None

    def arrive(self, parameters: Sequence[AttachedParameter]) -> bool:
        """Announce final gradients. ``False``: leave them in ``.grad``, this step must not be written now.

        With ``undo`` that is so too in a backward that nobody has seen to begin, at an output of the model or of one
        of its modules: another one may follow that goes through the same weights, and comes to them unseen.

        Raises ``AccumulationError`` when one of them was announced before in this step: before anything more is
        written.
        """
        if self._pass != "measuring":
            self._accumulation.count()
            self._added_up = True
            if self._accumulation.holding:
                return False
        with self.lock:
            if self._torn is not None:
                if self._torn.task == graph_task():
                    return False  # the backward in which it tore still has to unwind
                raise self._torn.error()
            self._require_pass()
            if self._pass == "measuring":
                self._measure_only(parameters)
                return False
            if not self._arrived:
                self._open()
            self._backwards.add(graph_task())
            self.backwards.begin(parameters[0].spec.device)
            for attached in parameters:
                index = attached.spec.index
                if index in self._arrived:
                    if self._undo is not None:
                        if self._applied:
                            self.put_back()
                        continue
                    error = AccumulationError(
                        f"a second gradient for {attached.spec.name!r} arrived before optimizer.step(). Wrap all but "
                        "the last micro-batch in `with overlap.accumulate():` (DDP: no_sync()). Reentrant "
                        "checkpointing that visits a parameter twice needs use_reentrant=False"
                    )
                    self._stop(error, False)
                    raise error
                self._arrived.add(index)
                self._uncommitted.add(attached.stepper)
            return not self._plain and (self._undo is None or self._running is not None)

    def _open(self) -> None:
        if self._pass is None:
            self._clipping.begin()
        if self._scale is not None:
            self._scale.begin()
        self.on_open()

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
        with self.lock:
            if self._torn is not None or self._plain or self._failure is not None:
                return False
            writing = False
            try:
                parameters = [attached.get() for attached in bucket]
                for stepper in self._steppers:
                    stepper.optimizer()
                with self.streams.on(parameters[0].device):
                    if fetch is not None:
                        fetch()
                    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
                    # A parameter that was frozen after the forward is announced, and has none.
                    if len(gradients) < len(parameters):
                        bucket = [a for a, p in zip(bucket, parameters, strict=True) if p.grad is not None]
                        parameters = [attached.get() for attached in bucket]
                    if not bucket:
                        return True
                    if self._scale is not None and not all(map(_can_be_unscaled, parameters)):
                        self.put_back()
                        return False
                    if self._undo is None:
                        self._require_finite(bucket)
                    started = perf_counter()
                    with self._as_applied(bucket, parameters, gradients, final) as made:
                        for stepper in self._steppers:
                            mine = [(a, g) for a, g in zip(bucket, made, strict=True) if a.stepper is stepper]
                            elsewhere = None
                            if mine and self._undo is not None:
                                own = [a.get() for a, _ in mine]
                                elsewhere = stepper.look_elsewhere(own)
                                self._undo.save([*own, *stepper.reached()], stepper.optimizer())
                            for call in calls_of(mine, alias=False):
                                if self._check is not None:
                                    self._check.keep(stepper, call, stepper.optimizer().state)
                                writing = True
                                call.step(stepper)
                            stepper.require_all_in_state(elsewhere)
            except Exception as error:
                if self._undo is None or not writing or any(s.wrote_in_place for s in self._steppers):
                    self.fail(error, writing=writing)
                else:
                    # Left to optimizer.step(), which steps all of them together: the plain loop's raises there, if at
                    # all, and in a step that the plain loop leaves out nobody hears of an error.
                    self.put_back()
                    self._raises = not isinstance(error, UnsupportedOptimizerError)  # which is not step()'s own
                return False
            except BaseException as error:
                self.fail(error, writing=writing)
                return False
            self._applied.update([attached.spec.index for attached in bucket])
            if self._undo is not None:
                owe(self)
            for parameter, attached in zip(parameters, bucket, strict=True):
                attached.version = _version(parameter)
            if self._undo is None:  # else they stay until the step is committed
                self.streams.hold(gradients)  # as they were: some optimizers replace .grad
            if self.recorder is not None:
                self.recorder("step", [attached.spec.name for attached in bucket], started, perf_counter())
            return True

    @contextmanager
    def _as_applied(
        self,
        bucket: Sequence[AttachedParameter],
        parameters: Sequence[torch.Tensor],
        gradients: list[torch.Tensor],
        final: bool,
    ) -> Iterator[list[torch.Tensor]]:
        """Make of each ``.grad`` what is to be applied: unscaled, measured and clipped."""
        # The plain loop's gradients stay untouched where it may turn out that optimizer.step() needs them.
        copied = self._undo is not None and (self._scale is not None or self._clipping.mode is None)
        if copied and (self._scale is not None or self._clipping.policy is not None):
            made = [g.clone() for g in gradients] if self._scale is None else self._scale.unscaled(gradients)
            for parameter, gradient in zip(parameters, made, strict=True):
                parameter.grad = gradient
        else:
            made = gradients
        # Without undo nothing is left to measure later, and no plain loop has taken this norm.
        if (final or self._undo is None) and self._pass is None:
            self._clipping.measure(bucket, made)
        self._clipping.clip(parameters)
        lent = self._lend(bucket, parameters, made)
        try:
            yield [lent[a].given if a in lent else gradient for a, gradient in zip(bucket, made, strict=True)]
        finally:
            if any(stepper.gave_back for stepper in self._steppers):
                self.streams.let_go(parameters[0].device)
            if self._undo is not None:
                for attached, one in lent.items():
                    if (outcome := one.outcome()) is not None:
                        self._outcomes[attached.spec.index] = outcome
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient

    def _lend(
        self, bucket: Sequence[AttachedParameter], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> dict[AttachedParameter, Lent]:
        """On trial an update must leave the plain loop's gradients alone. torch's own optimizers do."""
        if self._undo is None:
            return {}
        return {
            attached: Lent(parameter, gradient)
            for attached, parameter, gradient in zip(bucket, parameters, gradients, strict=True)
            if not is_torchs_own(attached.stepper.optimizer())
        }

    def retire(self, bucket: Iterable[AttachedParameter]) -> None:
        """The gradients of applied parameters have served: free them, leaving spent ones. With ``undo`` they stay.
        Until ``optimizer.step()`` the plain loop would find the old weights: who uses one is told so, or with ``undo``
        has the step put back first."""
        if self._undo is None:
            watched = []
            applied = self._applied
            for attached in bucket:
                if attached.spec.index in applied:
                    parameter, spent = attached.get(), attached.spent
                    parameter.grad = spent
                    if spent is not None:
                        watched.append(parameter)
            if self._torn is None:  # else weights are there to be read, and loaded anew
                self._watch.start(watched)
            return
        for attached in filter(self.is_applied, bucket):
            parameter = attached.get()
            gradient = parameter.grad
            assert gradient is not None
            self._kept[attached.spec.index] = gradient, version_of(gradient)
            if self._scale is not None:
                parameter.grad = HeldGradient(gradient, self._when_used)
            self._watch.start([parameter])

    def is_applied(self, attached: AttachedParameter) -> bool:
        return attached.spec.index in self._applied

    @property
    def by_bucket(self) -> bool:
        """Whether buckets must not be applied together: their norms are their own, or a difference would not show."""
        return self._clipping.mode == "per_bucket" or (self._check is not None and self._check.due)

    @property
    def frees_gradients(self) -> bool:
        """Whether applied gradients are not needed any more."""
        return self._undo is None

    @property
    def waits_for_all(self) -> bool:
        """Whether nothing may be applied before all gradients are final, and ``know_total`` was called."""
        return self._pass == "all"

    def compute_total_norm(self) -> None:
        """All gradients are final, and in ``.grad``."""
        self._clipping.compute_total_norm(self.parameters, _gradient)

    def fail(self, error: BaseException, *, writing: bool = False) -> None:
        """Something stopped the step: torn if anything was written, else forgotten, as if it had never opened.

        The error is kept until the end of this backward, where the source raises it; the first one wins.
        """
        with self.lock:
            if self._failure is None:
                self._failure = error
            self._stop(error, writing)

    def backward_raised(self) -> None:
        """Backward is ending with an exception of its own. Nothing of this step is written any more."""
        with self.lock:
            self._failure = None
            self._stop(None, False)
            self.streams.finish()

    def raise_failure(self) -> None:
        """At the end of a backward: raise what stopped the step, with its own type."""
        error, self._failure = self._failure, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame, and to all that the loop holds

    def _stop(self, cause: BaseException | None, writing: bool) -> None:
        if self._torn is not None:
            return
        if self._undo is not None:
            if self._applied or writing:
                self.put_back()
        elif self._applied or writing or (self._ranks.voting is not None and isinstance(cause, NonFiniteGradientError)):
            self._tear(cause)  # other ranks may have applied theirs
        else:
            self._reset()

    # Two passes.

    @contextmanager
    def measuring(self) -> Iterator[list[torch.Tensor]]:
        """Around a backward that only measures: gradients are freed as they arrive. Those of earlier micro-batches
        are kept, and are part of the norm.

        Yields the parameters that are to get a gradient.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. Nothing was written.
        """
        parameters = [a for a in self.parameters if a.get().requires_grad]
        before = {a.spec.index: a.get().grad for a in self.parameters}
        earlier = {a.spec.index: gradient for a in self.parameters if (gradient := _gradient(a)) is not None}
        handles = [
            a.get().register_hook(partial(_accumulate_into, a.get(), earlier[a.spec.index]))
            for a in parameters
            if a.spec.index in earlier
        ]
        # Hooks, and segments that are computed once more, are to draw the same in both passes.
        generators = Generators({a.spec.device for a in self.parameters})
        self._clipping.begin()
        self._pass = "measuring"
        for attached in self.parameters:
            attached.get().grad = None
        try:
            yield [a.get() for a in parameters]
            # Of those that have no hook: added or thawed since the forward, or before one that nobody has seen.
            self._measure_only([a for a in self.parameters if _gradient(a) is not None])
        finally:
            self._pass = None
            for handle in handles:
                handle.remove()
            for attached in self.parameters:
                attached.get().grad = before[attached.spec.index]
            generators.restore(even_shared=True)
        self.compute_total_norm()

    def _measure_only(self, parameters: Sequence[AttachedParameter]) -> None:
        found = [(a, gradient) for a in parameters if (gradient := _gradient(a)) is not None]  # a hook may clear some
        self._clipping.measure([a for a, _ in found], [gradient for _, gradient in found])
        for attached in parameters:
            attached.get().grad = attached.spent

    @contextmanager
    def measured(self, *, waits_for_all: bool = False) -> Iterator[None]:
        """Around the backward that steps with the norm that is known; or will be known when all gradients are."""
        if waits_for_all:
            self._clipping.begin()
        self._pass = "all" if waits_for_all else "stepping"
        self._measured = None
        try:
            yield
            self._measured = {index: (g, version_of(g)) for index, g in self._not_applied().items()}
        finally:
            self._pass = None

    def _not_applied(self) -> dict[int, torch.Tensor]:
        """The gradients that ``optimizer.step()`` will find."""
        rest = (a for a in self.parameters if not self.is_applied(a))
        return {a.spec.index: gradient for a in rest if (gradient := _gradient(a)) is not None}

    def _require_measured(self) -> None:
        """Two passes: the plain loop takes the norm now, of the gradients that it finds. If they are not those that
        were measured, another norm is taken; or, if backward has clipped by the first, the step is torn."""
        measured, self._measured = self._measured, None
        if measured is None:
            return
        found = {index: (g, version_of(g)) for index, g in self._not_applied().items()}
        changed = [
            attached.spec.name
            for attached in self.parameters
            if not _same_gradient(measured.get(attached.spec.index), found.get(attached.spec.index))
        ]
        if not changed:
            return
        if not self._applied:
            self._clipping.begin()
            return
        error = SpentGradientError(
            f"the gradient of {changed[0]!r} was set, written or cleared, or the parameter was added to the optimizer, "
            "between overlap.backward() and optimizer.step(), but backward had already clipped other gradients by the "
            "norm without that, and applied them. Do it before overlap.backward() or after optimizer.step(), or use "
            "undo=True or schedule='forward'"
        )
        self._tear(error)
        raise error

    def _require_pass(self) -> None:
        if self._clipping.mode == "two_pass" and self._pass is None:
            raise InstepError(
                "ClipNorm(mode='two_pass') needs the norm before the first update: call overlap.backward(loss) in "
                "place of loss.backward(). Nothing was updated"
            )

    # What the user does.

    def before_forward(self) -> None:
        """Before a forward: raise if the weights are not those the plain loop would read."""
        self.backwards.let_go()
        self._end_commit()
        self._hear(wait=False)
        self.require_whole()
        if self._applied and self._undo is not None:
            self.put_back()
        if self._applied:
            raise UncommittedStepError(
                f"backward has updated {len(self._applied)} parameters, and optimizer.step() has not been called "
                "since: the plain loop would still read the old weights here. Call optimizer.step() after each "
                "backward; to accumulate, wrap all but the last micro-batch in `with overlap.accumulate():`; a loop "
                "that leaves out step() on some iterations needs undo=True or schedule='forward'. "
                f"{_GIVE_UP}"
            )
        if not self._arrived:
            self._clipping.begin()
        if self._plain and all(_gradient(attached) is None for attached in self.parameters):
            self._reset()  # a step that was put back and never taken: zero_grad() has ended it

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        self.backwards.let_go()
        self._end_commit()
        if self._flushing is not None and self._torn is None and not self._ending:
            if self._undo is None:
                self._tear(InstepError(f"{self._flushing.name}.step() raised"))
            else:
                self._ending = True
                try:
                    self._put_back_flush(self._undo)
                finally:
                    self._ending = False
        if self._torn is not None:
            raise self._torn.error()

    def _put_back_flush(self, undo: Undo) -> None:
        """``optimizer.step()`` has raised, or was interrupted. Who is interrupted here does it again."""
        with torch._C.DisableTorchFunctionSubclass():
            for attached, gradient in self._taken_off:
                if attached.get().grad is None:
                    attached.get().grad = gradient
        for settings in (self._settings, self._settings_before):
            if settings is not None:
                settings()
        if undo.devices:
            self.put_back()
        self._release()
        self._clipping.begin()  # what was clipped is what is measured, and clipped, if step() is called again
        self._plain = True
        self._taken_off = []
        self._taken = self._settings = self._settings_before = self._flushing = None

    def _end_stopped(self) -> None:
        """An error or Ctrl-C may have ended ``optimizer.step()`` before its gradients were back."""
        stepper = self._flushing if self._committing is None else self._committing[0]
        if stepper is not None and not self._ending and stepper.was_stopped:
            self.require_whole()

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""
        self.backwards.let_go()
        if self._flushing is not None or self._committing is not None:
            self.require_whole()  # another call of step(), which has raised
        stepper.called()

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        """``optimizer.step()`` is about to do otherwise than backward has done: ``error`` says how."""
        if not self._applied_by(stepper) or self._torn is not None:
            return
        if self._undo is not None:
            self.put_back()
            return
        self._tear(error)
        raise error

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update what backward left. Spent gradients are taken off the parameters."""
        if self._flushing is stepper:
            return  # a closure that is called more than once
        self._accumulation.require_reduced()
        self._hear(wait=True)  # for a backward that nobody has seen to begin
        self.require_whole()
        if self._putting_back is not None:
            self.put_back()
        left = self._left_by(stepper)
        for attached in left:
            if attached.spent is not None and attached.get().grad is attached.spent:
                raise _never_cleared(attached.spec.name, f"{stepper.name}.step()")
        if not self._added_up:
            self._count_unannounced(stepper.optimizer())
        if self._undo is None:
            self._flush(stepper, left)
            self._flushing = stepper
            return
        self._flushing = stepper
        try:
            self._watch_in_step.take_from(self._watch, (a.get() for a in self._applied_by(stepper)))
            if not self._is_taken(stepper):
                self._leave_out(stepper)
            else:
                self._validate(stepper)
                self._flush(stepper, self._left_by(stepper))
        except Exception:
            self._watch.take_from(self._watch_in_step, (a.get() for a in self._applied_by(stepper)))
            self._flushing = None
            raise

    def _flush(self, stepper: Stepper, left: Sequence[AttachedParameter]) -> None:
        applied = self._applied_by(stepper)
        parameters = [attached.get() for attached in applied]
        self._watch.stop(parameters)
        try:
            if applied:
                require_same_in_autocast(stepper.optimizer())
                stepper.require_unchanged()
            for attached, parameter in zip(applied, parameters, strict=True):
                if attached.spent is None and self._undo is None:
                    continue  # nobody has come between: backward has not returned
                if _version(parameter) != attached.version:
                    raise UncommittedStepError(
                        f"parameter {attached.spec.name!r} was written between backward() and optimizer.step(), but "
                        "backward had already updated it: the plain loop would have updated what was written. Change "
                        "or load weights after optimizer.step() or before the forward"
                    )
                if self._undo is None and parameter.grad is not attached.spent:
                    raise SpentGradientError(
                        f"the gradient of {attached.spec.name!r} was cleared or replaced between backward() and "
                        "optimizer.step(), but backward had already applied it. Call zero_grad() after "
                        "optimizer.step() or before backward()"
                    )
        except InstepError as error:
            self._tear(error)
            raise
        if self._undo is None:
            try:
                self._require_finite(left)
            except NonFiniteGradientError as error:
                self._tear(error)
                raise
            self._clip_rest(left)
        if self._check is not None:
            self._prepare_check(self._check, stepper)
        if self._undo is not None:
            self._save_rest(self._undo, stepper, left)
        self._apply_rest(stepper, left)
        if self._undo is not None:
            self._take_off([(a, self._kept[a.spec.index][0]) for a in applied])
        else:
            for parameter in parameters:
                parameter.grad = None
        known = is_torchs_own(stepper.optimizer())
        self._at_rest = [] if known else [(a, _version(p)) for a, p in zip(applied, parameters, strict=True)]

    def _count_unannounced(self, optimizer: Optimizer) -> None:
        """Gradients that no source has told of make a step, too."""
        found = [(a.stepper, g) for a in self.parameters if (g := self._real_gradient(a)) is not None]
        if not asks_for_state(optimizer, (gradient for _, gradient in found), first=self.step_count == 0):
            self._added_up = bool(found)
            self._uncommitted.update(stepper for stepper, _ in found)

    def _prepare_check(self, check: Check, stepper: Stepper) -> None:
        """Keep what ``optimizer.step()`` is about to write. With undo, what backward has written is compared now, while
        it can be put back."""
        applied = self._applied_by(stepper)
        if not applied:
            return
        check.keep_rest(stepper, self._of(stepper), set(applied), _gradient)
        if self._undo is not None:
            error = check.error(stepper, self.step_count + 1, applied, groups=False)
            if error is not None:
                self.put_back()
                raise error

    def _save_rest(self, undo: Undo, stepper: Stepper, left: Sequence[AttachedParameter]) -> None:
        """What ``optimizer.step()`` is about to write is put back too, if an error or Ctrl-C stops it half way."""
        if self._raises:
            return  # again, most likely: what it then leaves is the plain loop's
        if not is_torchs_own(stepper.optimizer()):
            self._settings_before = remember_settings(stepper.optimizer())
        # On the stream that step() will write on.
        undo.save([a.get() for a in left if _gradient(a) is not None], stepper.optimizer())

    def _apply_rest(self, stepper: Stepper, left: Sequence[AttachedParameter]) -> None:
        """What backward did not apply is applied by torch, in one call. Its foreach kernels refuse plain tensors beside
        DTensors, and DTensors of several meshes, and it knows nothing of parts: such a rest is another bucket."""
        rest = [a for a in left if _gradient(a) is not None]
        if not rest:
            return
        parts = [a for a in rest if a.part is not None and a.part.state_is_sharded]
        mixed = self._undo is None and len({a.mesh for a in rest}) > 1 and kernel_scale(stepper.optimizer()) is None
        if parts or mixed:
            require_same_in_autocast(stepper.optimizer())
            for call in calls_of([(a, g) for a in rest if (g := _gradient(a)) is not None], alias=False):
                call.step(stepper)
            if self.gather is not None:
                self.gather(parts)()
            self._take_off([(a, g) for a in rest if (g := _gradient(a)) is not None])

    def _require_finite(self, parameters: Iterable[AttachedParameter]) -> None:
        """Before they are written, for good."""
        if self._nonfinite != "raise":
            return
        gradients = [(a.spec.name, g) for a in parameters if (g := _gradient(a)) is not None]
        if not all_finite(g for _, g in gradients):
            raise nonfinite_error(gradients, self._ranks.rank(), "It was not applied; others of the step may have been")

    def _is_taken(self, stepper: Stepper) -> bool:
        """With undo: whether the step is to be taken, asked once for all of its optimizers."""
        if self._nonfinite == "allow" or found_inf(stepper.optimizer()):
            return True  # the kernel skips its update
        gradients = [(a.spec.name, g) for a in self.parameters if (g := self._real_gradient(a)) is not None]
        if self._asked_in_vain and (gradients or stepper in self._asked_in_vain):
            self._taken = None  # of a step that was none
            self._asked_in_vain.clear()
        if not gradients:
            self._asked_in_vain.add(stepper)
        if self._taken is None:
            try:
                rank = ask_if_finite(gradients, self._ranks, self.step_count + 1)
            except Exception as error:
                if self._applied:
                    self.put_back()
                self._set_torn(self.step_count + 1, [], [name for name, _ in gradients], error)
                raise
            if rank is not None:
                if self._applied:
                    self.put_back()
                if self._nonfinite == "raise":
                    raise nonfinite_error(gradients, rank, "Nothing of the step was applied")
                self._clipping.compute_total_norm(self.parameters, _gradient)
            self._taken = rank is None
        return self._taken

    def _leave_out(self, stepper: Stepper) -> None:
        """``optimizer.step()`` finds no gradient, and what it writes nevertheless is put back."""
        self._settings = remember_settings(stepper.optimizer())
        self._take_off([(a, g) for a in self._of(stepper) if (g := _gradient(a)) is not None])

    def _take_off(self, gradients: Sequence[tuple[AttachedParameter, torch.Tensor]]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for attached, gradient in gradients:
                if self._undo is not None:
                    self._watch_in_step.start([attached.get()])
                self._taken_off.append((attached, gradient))
                attached.get().grad = None

    def _clip_rest(self, left: Sequence[AttachedParameter]) -> None:
        """What backward did not apply is applied by torch: a bucket of its own."""
        if self._clipping.policy is not None:
            self._require_measured()
            self.compute_total_norm()
            rest = [a.get() for a in left if _gradient(a) is not None]
            self._clipping.clip(rest)

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` returned. The step is committed when every optimizer with gradients has stepped."""
        if self._flushing is stepper:
            self._require_at_rest(stepper)
            self._committing = stepper, self.step_count + 1, self.skip_count + 1
            self._end_commit()

    def _require_at_rest(self, stepper: Stepper) -> None:
        """``optimizer.step()`` has found no gradient of what backward had applied, and must have left it alone."""
        at_rest, self._at_rest = self._at_rest, []
        for attached, version in at_rest:
            if _version(attached.get()) != version:
                error = writes_without_gradient(stepper.name, attached.spec.name)
                self._flushing = None
                self._tear(error)
                raise error

    def _end_commit(self) -> None:
        """Commit. Who is interrupted in it (Ctrl-C) does it again, at the next use: the step stands."""
        if self._committing is None or self._ending:
            return
        self._ending = True
        try:
            self._commit(*self._committing)
        finally:
            self._ending = False

    def _commit(self, stepper: Stepper, step_count: int, skip_count: int) -> None:
        self._flushing = None
        stepper.commit()
        with torch._C.DisableTorchFunctionSubclass():
            for attached, gradient in self._taken_off:
                attached.get().grad = gradient
        self._taken_off = []
        if self._settings is not None:
            self._settings()
            self._settings = None
        self._require_checked(stepper)
        # The plain loop still has its gradients here, until the user clears them.
        applied = self._applied_by(stepper)
        if self._undo is not None:
            self._settings_before = None
            self._undo.forget(attached.get() for attached in self._of(stepper))
            for attached in applied:
                gradient, outcome = self._kept[attached.spec.index][0], self._outcomes.get(attached.spec.index)
                left = gradient if outcome is None else outcome.of(gradient)
                with torch._C.DisableTorchFunctionSubclass():
                    attached.get().grad = left
                self._applied.discard(attached.spec.index)
                self._kept.pop(attached.spec.index)
                self._outcomes.pop(attached.spec.index, None)
        else:
            for attached in applied:
                attached.get().grad = attached.spent
            if applied:
                self._left[stepper] = applied[0]
        self._watch_in_step.stop(attached.get() for attached in self._of(stepper))
        self._accumulation.stepped()
        self._clipping.stepped(stepper)
        self._uncommitted.discard(stepper)
        if not self._added_up or self._uncommitted:
            self._committing = None
        elif self._taken is False:
            self.skip_count = skip_count
            self._reset()
        else:
            self.step_count = step_count
            if self._check is not None:
                self._check.stepped()
            self._reset()
            try:
                self._ranks.committed(self.step_count)
            except Exception as error:
                self._tear_here(error)
                raise

    def _require_checked(self, stepper: Stepper) -> None:
        """Raise, and tear the step, if it differs from a plain one."""
        if self._check is None or not self._applied_by(stepper):
            return
        error = self._check.error(stepper, self.step_count + 1, self._of(stepper))
        if error is not None:
            self._committing = None
            self._applied.update(a.spec.index for a in self._of(stepper) if a.spec.index in self._arrived)
            self._tear(error)
            raise error

    def forget(self, *, gradients: bool) -> None:
        """Go back to IDLE from any state, and take spent gradients, or all of them, off the parameters."""
        self.backwards.let_go()
        self._release()
        for attached in self.parameters:
            parameter = attached.peek()
            if parameter is not None and (gradients or parameter.grad is attached.spent):
                parameter.grad = None
        self._failure = self._torn = None
        self._accumulation.stepped()
        self._reset()

    def last_complete_step(self) -> int | None:
        """The number of the last step if all of it was applied here, else ``None``."""
        self.backwards.let_go()
        if self._torn is None:
            return self.step_count if not self._applied else None
        return None if self._torn.in_part else self._torn.accepted

    def accept(self) -> bool:
        """Go on from a step that is torn, or open with weights written, as if it had been committed. ``False``: there
        is none."""
        self.backwards.let_go()
        self._end_commit()
        if self._torn is None and self._undo is None and (self._applied or self._flushing is not None):
            self._tear(InstepError("it was given up"))
        if self._torn is None:
            return False
        self.step_count = self._torn.accepted
        self.forget(gradients=True)
        return True

    def close(self) -> None:
        """The step that is open is the plain loop's from now on, as far as it can be: of a step that was applied in
        part, the rest is clipped as that part was."""
        self.settle()
        try:
            if self._torn is None and self._applied and graph_task() is None:
                self._clip_rest([a for a in self.parameters if not self.is_applied(a) and a.peek() is not None])
        finally:
            self.forget(gradients=False)

    def settle(self) -> None:
        """The interpreter is about to end, or to fork: a step on trial is not the plain loop's."""
        self.backwards.let_go()
        self._end_commit()
        if self._undo is not None and self._torn is None:
            if self._flushing is not None and self._flushing.was_stopped:
                self.require_whole()
            if self._applied:
                self.put_back()

    def abandon(self) -> None:
        """The optimizers are gone: nobody can commit the step that is open."""
        try:
            self.settle()
        finally:
            for stepper in self._steppers:
                stepper.abort()

    def synchronize(self) -> None:
        self.backwards.let_go()
        self.streams.join_all()
        self._hear(wait=True)

    @property
    def state(self) -> str:
        """``"idle"``, ``"open"`` or ``"torn"``."""
        self.backwards.let_go()
        return "torn" if self._torn is not None else "open" if self._arrived else "idle"

    # With undo.

    def put_back(self) -> None:
        """Restore parameters and state as they were before this step. Its gradients stay, and what is left of it is
        done by ``optimizer.step()``, as in the plain loop."""
        assert self._undo is not None
        with self.lock:
            if self._restoring:
                return
            self._restoring = True
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    self._restore(self._undo)
            finally:
                self._restoring = False

    def _restore(self, undo: Undo) -> None:
        self._release_gradients()
        if self._putting_back is None:
            self._putting_back = (
                next((stepper.name for stepper in self._steppers if stepper.state_was_written), None),
                [a.spec.name for a in self.parameters if self.is_applied(a) and _version(a.get()) != a.version],
            )
        written, overwritten = self._putting_back
        for device in undo.devices:
            with self.streams.on(device):
                undo.restore(device)
        self.streams.join_all()
        for stepper in self._steppers:
            stepper.abort()
        self._applied.clear()
        settled(self)
        self._outcomes.clear()
        self._clipping.forget_norms()
        if self._check is not None:
            self._check.forget()
        self._plain = True
        self._stop_watching()
        self._putting_back = None
        self.redo_count += 1
        if overwritten:
            raise UncommittedStepError(
                f"parameter {overwritten[0]!r} was written between backward() and optimizer.step(), through "
                "another tensor of the same memory, when it held the value of a trial step. The step was put back, "
                "and the write with it: write weights after optimizer.step() or before backward()"
            )
        if written is not None:
            raise HyperparameterChangedError(
                f"the state of {written} was written between backward() and optimizer.step(), but it was that "
                "of a trial step. The step was put back, and the write with it: write state after "
                "optimizer.step() or before backward()"
            )

    def rollback(self) -> None:
        """Put the step back, and clear its gradients: the loop is where it was after the last ``optimizer.step()``."""
        if self._undo is None:
            raise InstepError(
                "rollback() needs the copies of undo=True (or undo='host'), taken before a step writes: "
                "attach(…, undo=True)"
            )
        self.backwards.let_go()
        if self._undo.devices or self._putting_back is not None:
            self.put_back()
        self.forget(gradients=True)

    def _release(self) -> None:
        """Nobody is told any more, and held gradients are the real ones again."""
        self._release_gradients()
        self._stop_watching()

    def _release_gradients(self) -> None:
        for attached in self.parameters:
            parameter = attached.peek()
            kept = self._kept.get(attached.spec.index)
            if parameter is not None and kept is not None and isinstance(parameter.grad, HeldGradient):
                parameter.grad = kept[0]
        self._kept.clear()

    def _stop_watching(self) -> None:
        parameters = [parameter for attached in self.parameters if (parameter := attached.peek()) is not None]
        self._watch.stop(parameters)
        self._watch_in_step.stop(parameters)

    def _used(self, parameter: torch.Tensor, func: Any) -> None:
        """Somebody is about to read or write an applied parameter, or its gradient."""
        self.backwards.let_go()
        if self._torn is not None:
            return  # there to be read
        if self._undo is None:
            where = "between backward() and optimizer.step()" if graph_task() is None else "in backward"
            raise UncommittedStepError(
                f"parameter {self._name_of(parameter)!r} was used {where}, but backward has already updated it: the "
                "plain loop would find the old value. Use weights before backward() or after optimizer.step(), and "
                "checkpoint with use_reentrant=False; or use undo=True or schedule='forward'. "
                f"{_GIVE_UP}"
            )
        if func == GET_GRAD and self._scale is not None and not self._scale.taken_off:
            return  # may be GradScaler: the gradient that is held says what is done with it
        self.put_back()

    def _used_in_step(self, parameter: torch.Tensor, func: Any) -> None:
        """``step()`` itself, if it still runs."""
        self._end_stopped()

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """The optimizer's state is about to be saved or loaded: the plain loop's is that of before this step. What is
        torn may be loaded anew, and not be saved."""
        self.backwards.let_go()
        if saving:
            self.before_save()
        applied = self._applied_by(stepper) if self._flushing is None else []
        if applied and self._undo is not None:
            self.put_back()
        elif applied and self._torn is None:
            raise UncommittedStepError(
                f"state_dict() or load_state_dict() of {stepper.name} was called between backward() and "
                "optimizer.step(), but backward has already updated its state: the plain loop would find the old one. "
                "Call it after optimizer.step() or before backward(), or use undo=True or schedule='forward'. "
                f"{_GIVE_UP}"
            )

    def before_save(self) -> None:
        """The model or its optimizer's state is about to be saved: not a step that is torn, here or on another rank."""
        self.backwards.let_go()
        self._end_stopped()
        self._hear(wait=True)
        if self._torn is not None:
            raise self._torn.error()

    def _used_gradient(self, operation: str, args: Sequence[Any]) -> None:
        assert self._scale is not None
        if operation == UNSCALE and self._kept and self._scale.take_off(args[2]):
            return
        if self._applied:
            self.put_back()

    def _validate(self, stepper: Stepper) -> None:
        """Were the buckets applied as the plain loop would apply them now? If not, put them back."""
        optimizer = stepper.optimizer()
        applied = self._applied_by(stepper)
        clips = self._clipping.policy is not None
        scaled = kernel_scale(optimizer)
        try:
            if applied:
                require_same_in_autocast(stepper.optimizer())
                stepper.require_unchanged()
            right = self._are_as_kept(applied) and self._scale_was_taken_off(optimizer)
        except HyperparameterChangedError:
            right = False  # put_back tells a changed group, which is right then, from written state
        if applied and not right:
            self.put_back()
        if found_inf(optimizer):
            if self._applied_by(stepper):
                self.put_back()
            return  # the kernel skips its update, of gradients as they are
        if scaled is not None and (clips or self._applied_by(stepper)):
            take_off_here(optimizer, [g for a in self._of(stepper) if (g := self._real_gradient(a)) is not None])
        with torch._C.DisableTorchFunctionSubclass():
            for attached in self._applied_by(stepper):
                attached.get().grad = self._kept[attached.spec.index][0]
        if self._clipping.policy is None:
            return
        if self._clipping.mode is not None and self._clipping.total is None:
            try:
                self._clipping.compute_total_norm(self.parameters, self._real_gradient)
            except RuntimeError:
                if self._applied:
                    self.put_back()
                raise
            if self._clipping.scales_down():
                if self._applied:
                    self.put_back()
                self._clipping.clip([a.get() for a in self.parameters if _gradient(a) is not None])
        elif self._clipping.mode is None:
            self._clipping.clip([a.get() for a in self._of(stepper) if _gradient(a) is not None])

    def _are_as_kept(self, applied: Sequence[AttachedParameter]) -> bool:
        """Whether nobody has changed an applied gradient through another reference to it."""
        taken_off = self._scale is not None and self._scale.taken_off
        return all(
            # Taken off through the gradient that stands in its place, which autograd does not count.
            version_of(gradient) in (version, version + taken_off)
            for gradient, version in (self._kept[attached.spec.index] for attached in applied)
        )

    def _scale_was_taken_off(self, optimizer: Optimizer) -> bool:
        """Whether the plain loop's gradients are without the loss scale by now, or in its optimizer's kernel."""
        if self._scale is None or self._scale.taken_off:
            return True
        scale = kernel_scale(optimizer)
        return scale is not None and is_power_of_two(scale) and self._scale.is_inverse_of(scale)

    def _name_of(self, parameter: torch.Tensor) -> str:
        return next(attached.spec.name for attached in self.parameters if attached.peek() is parameter)

    def _real_gradient(self, attached: AttachedParameter) -> torch.Tensor | None:
        kept = self._kept.get(attached.spec.index)
        return _gradient(attached) if kept is None else kept[0]

    def error_for_use(self, spec: ParameterSpec, operation: str) -> InstepError | None:
        """The error for ``operation`` on a spent gradient; ``None`` lets a model move between steps.

        The step is torn if its weights are now known to be wrong.
        """
        error: InstepError
        if self._pass == "measuring":
            if operation in ACCUMULATE:
                return AccumulationError(
                    f"the gradient of {spec.name!r} arrived twice in one backward, which ClipNorm(mode='two_pass') "
                    "cannot measure. A parameter that reentrant checkpointing visits twice needs use_reentrant=False"
                )
            return SpentGradientError(
                f"{operation} was called, in a hook during backward, on the gradient of {spec.name!r}, which the first "
                "of two passes has already measured and freed. Read each gradient in a hook on its own parameter that "
                "is registered before attach, or use undo=True or schedule='forward'"
            )
        if spec.index not in self._applied:
            return None if operation == CONVERSION else _never_cleared(spec.name, operation)
        if graph_task() is not None and operation in ACCUMULATE:
            error = AccumulationError(
                f"the gradient of {spec.name!r} arrived again before optimizer.step(), but this step has already "
                "applied it. Wrap all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync(); "
                "losses that share a graph: add them and call backward() once). A parameter that reentrant "
                "checkpointing visits twice needs use_reentrant=False"
            )
        elif "unscale" in operation:
            error = SpentGradientError(
                f"GradScaler found the gradient of {spec.name!r} already applied, still scaled: this step's "
                "weights are wrong. Give the scaler to attach(…, scaler=scaler, undo=True), use schedule='forward', or "
                "train in bfloat16 without a scaler"
            )
        elif graph_task() is not None:
            return SpentGradientError(
                f"{operation} was called, in a hook during backward, on the gradient of {spec.name!r}, which this "
                "backward has already applied and freed. Read each gradient in a hook on its own parameter that is "
                "registered before attach, or use undo=True or schedule='forward'"
            )
        else:
            return SpentGradientError(
                f"{operation} was called on the gradient of {spec.name!r}, which was applied during backward and "
                "freed. Between backward() and optimizer.step() there is nothing left to read, clip or change: "
                "use attach(…, clip=…), schedule='forward' or undo=True, or move the operation into a gradient hook"
            )
        if self._torn is None:
            self._tear(error)
        return error

    def _of(self, stepper: Stepper) -> list[AttachedParameter]:
        return [a for a in self.parameters if a.stepper is stepper]

    def _applied_by(self, stepper: Stepper) -> list[AttachedParameter]:
        applied = self._applied
        return [a for a in self.parameters if a.stepper is stepper and a.spec.index in applied] if applied else []

    def _left_by(self, stepper: Stepper) -> list[AttachedParameter]:
        """Those that backward has not applied."""
        applied = self._applied
        return [a for a in self.parameters if a.stepper is stepper and a.spec.index not in applied]

    def _tear(self, cause: BaseException | None) -> None:
        names = [a.spec.name for a in self.parameters if self.is_applied(a)]
        pending = [a.spec.name for a in self.parameters if a.spec.index in self._arrived and not self.is_applied(a)]
        self._set_torn(self.step_count + 1, names, pending, cause)
        self._ranks.say_failed(self.step_count + 1)

    def _hear(self, *, wait: bool) -> None:
        """What the ranks have said of the last step: raise, if it does not stand on all of them."""
        error = self._ranks.heard(wait=wait)
        if error is not None and self._torn is None:
            self._tear_here(error)
            if isinstance(error, StepMismatchError):
                raise error
            self.require_whole()

    def _tear_here(self, cause: BaseException) -> None:
        """The last step was committed here, and is not known to stand on the other ranks."""
        self._set_torn(self.step_count, [a.spec.name for a in self.parameters], [], cause)

    def _set_torn(self, step: int, applied: Sequence[str], pending: Sequence[str], cause: BaseException | None) -> None:
        self._torn = Torn(step, applied, pending, self._ranks.rank(), cause, step, bool(pending), graph_task())
        self._release()

    def _reset(self) -> None:
        self._arrived.clear()
        self._applied.clear()
        self._uncommitted.clear()
        self._flushing = self._committing = self._putting_back = None
        self._plain = self._raises = self._added_up = False
        self._taken = self._settings = self._settings_before = None
        self._asked_in_vain.clear()
        self._kept.clear()
        self._outcomes.clear()
        self._taken_off.clear()
        self._measured = None
        self._clipping.begin()
        if self._undo is not None:
            self._undo.forget_all()
            settled(self)
        if self._check is not None:
            self._check.forget()
        for stepper in self._steppers:
            stepper.abort()

    # What the attachment asks.

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan: those of the sources."""
        return tuple(buckets)

    def read_by(self, streams: object) -> None:
        """Weights are written before backward returns: no other stream reads them meanwhile."""

    def crosses(self, flights: object, at_once: object) -> None:
        """``cross_iteration`` is for ``schedule="forward"``."""

    def after_forward(self) -> None:
        """The model's forward has returned: note the streams of a forward that is trained."""
        if torch.is_grad_enabled():
            self.streams.see(self.parameters[0].spec.device)

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters: raise, or put back, if backward has updated one of them."""
        if self.state == "open" and any(map(self.is_applied, parameters)):
            self.before_forward()

    def begin_on_device(self) -> None:
        """A backward has come to an output of the model: on an accelerator another thread may run it."""
        self.backwards.begin(self.parameters[0].spec.device)

    def let_go_of_backwards(self) -> None:
        """Return once a backward that raised has ended on every device."""
        self.backwards.let_go()


def _version(parameter: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return version_of(parameter)


def _gradient(attached: AttachedParameter) -> torch.Tensor | None:
    """What is in ``.grad``; ``None`` also for what only stands there in place of a gradient."""
    parameter = attached.get()
    with torch._C.DisableTorchFunctionSubclass():  # instep's own question
        gradient = parameter.grad
    if isinstance(gradient, HeldGradient):
        parameter.grad = gradient = gradient.use()
    return None if isinstance(gradient, Placeholder) else gradient


def _accumulate_into(parameter: torch.Tensor, earlier: torch.Tensor, _: torch.Tensor) -> None:
    """Just before ``parameter`` gets its gradient: what earlier micro-batches left is there, and stays as it is."""
    if parameter.grad is None:
        parameter.grad = earlier.clone()


def _same_gradient(one: tuple[torch.Tensor, int] | None, other: tuple[torch.Tensor, int] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]


def _can_be_unscaled(parameter: torch.Tensor) -> bool:
    # GradScaler refuses half-precision gradients, and coalesces sparse ones first: left to it, and the plain step.
    gradient = parameter.grad
    return gradient is not None and not gradient.is_sparse and gradient.dtype != torch.float16


def _never_cleared(name: str, operation: str) -> SpentGradientError:
    return SpentGradientError(
        f"{operation} met the gradient of {name!r} from a step that is over: it was applied during backward and freed, "
        "so it can neither be added to nor zeroed in place nor read. Call zero_grad() with set_to_none=True, the "
        "default, between optimizer.step() and the next backward(). Where something else needs the gradient (another "
        "optimizer of that parameter, a log), use undo=True or schedule='forward'"
    )
