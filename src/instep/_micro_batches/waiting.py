"""``overlap.backward(loss, more=True)``: the backward of a micro-batch waits for that of the step's last one.

For loops that call backward themselves for each micro-batch, as those of frameworks do. While losses wait, a
``WaitingGradient`` stands in ``.grad`` of each parameter, in place of the sum that the plain loop has there: whoever
uses it is told, and a loop that clears it has thrown the sum away, as in the plain loop.
"""

import torch

from instep._micro_batches.graphs import leaves_of
from instep._micro_batches.run import Together, refuse_wrappers, require_own_step
from instep._optim.parameters import AttachedParameter
from instep._step.remedies import never_cleared, while_waiting
from instep._torch.lifetime import weakly
from instep._torch.placeholders import ZERO, WaitingGradient, dtype_of_gradient
from instep._wiring.build import Parts
from instep.errors import AccumulationError, InstepError


class Waiting:
    """The losses of one step that wait for the last one's backward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._step: Together | None = None
        self._marks: list[_Mark] = []
        # Neither may lead back to the parts.
        parts.accumulation.waiting = weakly(self.count)
        parts.accumulation.finish = weakly(self.finish)

    def count(self) -> int:
        """How many there are. Those that the loop has thrown away are let go of."""
        step = self._of_this_step()
        return 0 if step is None else len(step.losses)

    def add(self, loss: object) -> None:
        """The backward of ``loss`` is to wait.

        Raises:
            AccumulationError: one backward for all would not compute what the plain loop does.
        """
        parts = self._parts
        step = self._of_this_step()
        if step is None:
            require_own_step(parts, "backward(more=True)")
            refuse_wrappers(parts)
        if self._is_reduced and not parts.accumulation.is_in_hold:
            self.drop()
            raise AccumulationError(
                "backward(more=True) came outside of no_sync(): on several ranks the forward and backward of all "
                "micro-batches but the last belong into it (with FSDP2 into set_requires_gradient_sync(False)), or "
                "into `with overlap.accumulate():`. What had waited is thrown away"
            )
        step = step or Together(parts)
        step.add(loss)
        if self._step is None:
            self._mark()
            self._step = step

    def take(self, loss: torch.Tensor) -> Together | None:
        """``loss`` is the last of its step. Returns all of them, if any have waited. Nothing waits from here on."""
        step = self._of_this_step()
        if step is not None:
            step.add(loss)  # raises where it is none: those that wait still do
            self.drop()
        return step

    def finish(self) -> None:
        """``optimizer.step()`` is called, and no last micro-batch came: the plain loop steps with those that did. Not
        where ranks reduce: they have not been told which was the last."""
        step = None if self._is_reduced else self._of_this_step()
        if step is not None:
            self.drop()
            step.backward()

    def drop(self) -> int:
        """Throw away what waits. Returns how many there were."""
        step, self._step = self._step, None
        marks, self._marks = self._marks, []
        for mark in marks:
            mark.remove()
        return 0 if step is None else len(step.losses)

    @property
    def _is_reduced(self) -> bool:
        return bool(self._parts.refs.ddps()) or self._parts.sharding is not None

    def _of_this_step(self) -> Together | None:
        """What waits, unless the loop has thrown it away by clearing all gradients."""
        step, marks = self._step, self._marks
        if step is None:
            return None
        cleared = [mark for mark in marks if mark.is_cleared]
        if not cleared:
            return step
        if len(cleared) < len(marks):
            name = cleared[0].attached.spec.name
            raise AccumulationError(
                f"the gradient of {name!r} was cleared, and others were not, while the backward of {self.drop()} "
                "micro-batches waits for that of the last: it would have to throw a part of each away. Call "
                "zero_grad() of all attached optimizers, or none, between the micro-batches of a step; or leave out "
                "more=True"
            )
        if any(mark.is_zeroed for mark in marks):
            reached = leaves_of(step.losses)  # the plain loop has no gradient of the others, and none to zero
            for mark in marks:
                mark.zero(reached)
        self.drop()
        return None

    def _mark(self) -> None:
        for attached in self._parts.schedule.parameters:
            parameter = attached.get()
            gradient = parameter.grad
            if gradient is not None and gradient is attached.spent:
                self.drop()
                raise never_cleared(attached.spec.name, "backward()")
            if parameter.requires_grad:
                mark = _Mark(attached, gradient)
                self._marks.append(mark)
                parameter.grad = mark.gradient


class _Mark:
    """What stands in ``.grad`` of one parameter while losses wait.

    Attributes:
        before: what stood there: nothing, or zeros, to which autograd adds.
        gradient: what stands there.
        is_zeroed: whether the loop has zeroed that, which needs no values.
    """

    def __init__(self, attached: AttachedParameter, before: torch.Tensor | None) -> None:
        self.attached = attached
        self.before = before
        self.is_zeroed = False
        # Weakly: autograd keeps it.
        parameter = attached.get()
        explain, dtype = weakly(self._explain), dtype_of_gradient(parameter)
        self.gradient = WaitingGradient(parameter, attached.spec.name, explain, dtype=dtype)

    def _explain(self, operation: str) -> InstepError | None:
        if operation not in ZERO:
            return while_waiting(self.attached.spec.name, operation)
        self.is_zeroed = True
        return None

    @property
    def is_cleared(self) -> bool:
        parameter = self.attached.peek()
        return parameter is None or parameter.grad is not self.gradient or self.is_zeroed

    def zero(self, reached: set[torch.Tensor]) -> None:
        """Leave in ``.grad`` the zeros of the plain loop, if it has any there. It was zeroed."""
        parameter = self.attached.peek()
        if parameter is not None and self.before is None and parameter in reached:
            self.before = torch.zeros_like(parameter, dtype=self.gradient.dtype, requires_grad=False)

    def remove(self) -> None:
        """Put back what was found, unless the loop has put something else there."""
        parameter = self.attached.peek()
        if parameter is not None and parameter.grad is self.gradient:
            parameter.grad = self.before
