"""A step is a transaction: IDLE → OPEN(k) → COMMITTED(k) or TORN(k).

It opens when the first final gradient is announced, and is committed by the user's ``optimizer.step()``. While it is
open, buckets are applied; when something stops it in between, it is torn, nothing more is written, and every later
forward, backward and step says so.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

from instep._core.engine import graph_task
from instep._core.parameters import AttachedParameter
from instep._core.plan import ParameterSpec
from instep._core.spent import CONVERSION
from instep._core.stepper import Stepper
from instep._core.streams import StepStreams
from instep.errors import (
    AccumulationError,
    InstepError,
    SpentGradientError,
    TornStepError,
    UncommittedStepError,
)


class Recorder(Protocol):
    """Told what ran when: ``kind`` is ``"step"`` or ``"communication"``, times are ``perf_counter`` seconds."""

    def __call__(self, kind: str, name: str, start: float, end: float) -> None: ...


class Transaction:
    """The current step of one attachment, and the steps before it.

    Attributes:
        step_count: how many committed steps wrote anything.
        accumulating: while true, gradients are left to accumulate and no step opens.
        recorder: told of each bucket's step and communication; ``None`` when nobody listens.
        on_open: called when a step opens.
        in_no_sync: under DDP: whether its gradients accumulate now.
    """

    def __init__(self, steppers: Sequence[Stepper], rank: Callable[[], int]) -> None:
        self.parameters: tuple[AttachedParameter, ...] = ()
        self.streams = StepStreams()
        self.step_count = 0
        self.accumulating = False
        self.recorder: Recorder | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.in_no_sync: Callable[[], bool] | None = None
        self._steppers = tuple(steppers)
        self._rank = rank
        # On accelerators the engine runs one thread per device, each of which may complete a bucket.
        self._lock = threading.RLock()
        self._arrived: set[int] = set()
        self._applied: set[int] = set()
        self._uncommitted: set[Stepper] = set()
        # The running backward, and those nested in it by reentrant checkpointing.
        self._backwards: set[int | None] = set()
        # Of each optimizer one parameter that was left with a spent gradient when the last step was committed.
        self._left: dict[Stepper, AttachedParameter] = {}
        self._flushing: Stepper | None = None
        self._failure: BaseException | None = None
        self._torn: Callable[[], TornStepError] | None = None
        self._torn_in: int | None = None

    # What happens during backward.

    def begin_backward(self, gradients: object) -> None:
        """An output of the model is about to get its gradient, before any parameter does.

        Raises ``AccumulationError``, before anything is written or reduced, if an earlier backward of this step has
        already updated weights. Some outputs lie deep in the graph: in the same backward they are met later.
        """
        task = graph_task()
        if task in self._backwards:
            return
        if self.in_no_sync is not None and not self._applied:
            # DDP's reducer would be unusable after the error that this gradient raises when it is added to.
            for attached in self._left.values():
                parameter = attached.get()
                if attached.spent is not None and parameter.requires_grad and parameter.grad is attached.spent:
                    raise _never_cleared(attached.spec.name, "backward()")
        if self.accumulating:
            return
        if self._applied:
            raise AccumulationError(
                "a second backward began before optimizer.step(), but the first has already updated the weights. Wrap "
                "all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync()), or add the losses and "
                "call backward() once"
            )
        self._backwards = {task}

    def arrive(self, parameters: Sequence[AttachedParameter]) -> bool:
        """Announce final gradients. ``False``: leave them in ``.grad``, this step must not be written now.

        Raises ``AccumulationError`` when one of them was announced before in this step: before anything more is
        written.
        """
        if self.accumulating or (self.in_no_sync is not None and self.in_no_sync()):
            return False
        with self._lock:
            if self._torn is not None:
                if self._torn_in == graph_task():
                    return False  # the backward in which it tore still has to unwind
                raise self._torn()
            if not self._arrived:
                self.on_open()
            self._backwards.add(graph_task())
            for attached in parameters:
                if attached.spec.index in self._arrived:
                    error = AccumulationError(
                        f"a second gradient for {attached.spec.name!r} arrived before optimizer.step(). Wrap all but "
                        "the last micro-batch in `with overlap.accumulate():` (DDP: no_sync()). Reentrant "
                        "checkpointing that visits a parameter twice needs use_reentrant=False"
                    )
                    self._stop(error, False)
                    raise error
                self._arrived.add(attached.spec.index)
                self._uncommitted.add(attached.stepper)
            return True

    def apply(self, bucket: Sequence[AttachedParameter], fetch: Callable[[], None] | None = None) -> bool:
        """Step the parameters of ``bucket`` from their ``.grad``. ``False`` if that failed, or the step is torn.

        ``fetch`` is called first, on the step's stream, to wait for the gradients and put them into ``.grad``. An
        error is kept for :meth:`raise_failure`: raised here, inside a hook, it would leave DDP unusable.
        """
        with self._lock:
            if self._torn is not None:
                return False
            writing = False
            try:
                parameters = [attached.get() for attached in bucket]
                for stepper in self._steppers:
                    stepper.optimizer()
                with self.streams.on(parameters[0].device):
                    if fetch is not None:
                        fetch()
                    started = perf_counter()
                    writing = True
                    for stepper in self._steppers:
                        mine = [p for p, a in zip(parameters, bucket, strict=True) if a.stepper is stepper]
                        if mine:
                            stepper.step(mine)
            except BaseException as error:
                self.fail(error, writing=writing)
                return False
            self._applied.update(attached.spec.index for attached in bucket)
            for parameter, attached in zip(parameters, bucket, strict=True):
                attached.version = parameter._version
            self.streams.keep(p.grad for p in parameters if p.grad is not None)
            if self.recorder is not None:
                self.recorder("step", bucket[0].spec.name, started, perf_counter())
            return True

    def spend(self, bucket: Iterable[AttachedParameter]) -> None:
        """Free the gradients of applied parameters, leaving spent ones."""
        for attached in bucket:
            attached.get().grad = attached.spent

    def is_applied(self, attached: AttachedParameter) -> bool:
        return attached.spec.index in self._applied

    def fail(self, error: BaseException, *, writing: bool = False) -> None:
        """Something stopped the step: torn if anything was written, else forgotten, as if it had never opened.

        The error is kept until the end of this backward, where the source raises it; the first one wins.
        """
        with self._lock:
            if self._failure is None:
                self._failure = error
            self._stop(error, writing)

    def backward_raised(self) -> None:
        """Backward is ending with an exception of its own. Nothing of this step is written any more."""
        with self._lock:
            self._failure = None
            self._stop(None, False)

    def raise_failure(self) -> None:
        """At the end of a backward: raise what stopped the step, with its own type."""
        error, self._failure = self._failure, None
        if error is not None:
            raise error

    def _stop(self, cause: BaseException | None, writing: bool) -> None:
        if self._torn is None:
            if self._applied or writing:
                self._tear(cause)
            else:
                self._reset()

    # What the user does.

    def require_readable(self) -> None:
        """Before a forward: raise if the weights are not those the plain loop would read."""
        self.require_whole()
        if self._applied:
            raise UncommittedStepError(
                f"backward has updated {len(self._applied)} parameters, and optimizer.step() has not been called "
                "since: the plain loop would still read the old weights here. Call optimizer.step() after each "
                "backward; to accumulate, wrap all but the last micro-batch in `with overlap.accumulate():`; a loop "
                "that leaves out step() on some iterations cannot step during backward"
            )

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was not applied to all of its parameters."""
        if self._flushing is not None and self._torn is None:
            self._tear(InstepError(f"{self._flushing.name}.step() raised"))
        if self._torn is not None:
            raise self._torn()

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update what backward left. Spent gradients are taken off the parameters."""
        if self._flushing is stepper:
            return  # a step() that calls its parent class's step(), where torch runs the hooks again
        self.require_whole()
        applied = self._applied_by(stepper)
        try:
            if applied:
                stepper.require_unchanged()
            for attached in applied:
                parameter = attached.get()
                if attached.spent is None:
                    continue  # nobody has come between: backward has not returned
                if parameter._version != attached.version:
                    raise UncommittedStepError(
                        f"parameter {attached.spec.name!r} was written between backward() and optimizer.step(), but "
                        "backward had already updated it: the plain loop would have updated what was written. Change "
                        "or load weights after optimizer.step() or before the forward"
                    )
                if parameter.grad is not attached.spent:
                    raise SpentGradientError(
                        f"the gradient of {attached.spec.name!r} was cleared or replaced between backward() and "
                        "optimizer.step(), but backward had already applied it. Call zero_grad() after "
                        "optimizer.step() or before backward()"
                    )
        except InstepError as error:
            self._tear(error)
            raise
        for attached in applied:
            attached.get().grad = None
        self._flushing = stepper

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` returned. The step is committed when every optimizer with gradients has stepped."""
        if self._flushing is stepper:
            self._flushing = None
            stepper.commit()
            # The plain loop still has its gradients here, until the user clears them.
            applied = self._applied_by(stepper)
            self.spend(applied)
            if applied:
                self._left[stepper] = applied[0]
            if stepper in self._uncommitted:
                self._uncommitted.discard(stepper)
                if not self._uncommitted:
                    self._reset()
                    self.step_count += 1

    def forget(self, *, gradients: bool) -> None:
        """Go back to IDLE from any state, and take spent gradients, or all of them, off the parameters."""
        for attached in self.parameters:
            parameter = attached.peek()
            if parameter is not None and (gradients or parameter.grad is attached.spent):
                parameter.grad = None
        self._failure = self._torn = None
        self._reset()

    @property
    def state(self) -> str:
        """``"idle"``, ``"open"`` or ``"torn"``."""
        return "torn" if self._torn is not None else "open" if self._arrived else "idle"

    def misuse(self, spec: ParameterSpec, operation: str) -> InstepError | None:
        """The error for ``operation`` on a spent gradient; ``None`` lets a model move between steps.

        The step is torn if its weights are now known to be wrong.
        """
        error: InstepError
        if spec.index not in self._applied:
            return None if operation == CONVERSION else _never_cleared(spec.name, operation)
        if graph_task() is not None:
            error = AccumulationError(
                f"the gradient of {spec.name!r} arrived again before optimizer.step(), but this step has already "
                "applied it. Wrap all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync(); "
                "losses that share a graph: add them and call backward() once). A parameter that reentrant "
                "checkpointing visits twice needs use_reentrant=False"
            )
        elif "unscale" in operation:
            error = SpentGradientError(
                f"GradScaler found the gradient of {spec.name!r} already applied, still scaled: this step's "
                "weights are wrong. A loss scale cannot be undone once backward has stepped; train in bfloat16 "
                "without a scaler, or detach() before using GradScaler"
            )
        else:
            return SpentGradientError(
                f"{operation} was called on the gradient of {spec.name!r}, which was applied during backward and "
                "freed. Between backward() and optimizer.step() there is nothing left to read, clip or change: "
                "detach() to use plain steps, or move the operation into a gradient hook"
            )
        if self._torn is None:
            self._tear(error)
        return error

    def _applied_by(self, stepper: Stepper) -> list[AttachedParameter]:
        return [a for a in self.parameters if a.stepper is stepper and self.is_applied(a)]

    def _tear(self, cause: BaseException | None) -> None:
        names = [a.spec.name for a in self.parameters if self.is_applied(a)]
        pending = [a.spec.name for a in self.parameters if a.spec.index in self._arrived and not self.is_applied(a)]
        self._torn = partial(TornStepError, self.step_count + 1, names, pending, self._rank(), cause)
        self._torn_in = graph_task()

    def _reset(self) -> None:
        self._arrived.clear()
        self._applied.clear()
        self._uncommitted.clear()
        self._flushing = None
        for stepper in self._steppers:
            stepper.abort()


def _never_cleared(name: str, operation: str) -> SpentGradientError:
    return SpentGradientError(
        f"{operation} met the gradient of {name!r} from a step that is over: it was applied during backward and freed, "
        "so it can neither be added to nor zeroed in place nor read. Call zero_grad() with set_to_none=True, the "
        "default, between optimizer.step() and the next backward()"
    )
