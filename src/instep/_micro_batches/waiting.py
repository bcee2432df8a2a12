"""``overlap.backward(loss, more=True)``: the backward of a micro-batch waits for that of the step's last one.

For loops that call backward themselves for each micro-batch, as those of frameworks do. While losses wait, the spent
gradient of each parameter stands in its ``.grad``, in place of the sum that the plain loop has there: whoever reads it
is told, and a loop that clears it has thrown the sum away, as in the plain loop.
"""

from instep._micro_batches.run import Together, ddps_of, refuse_wrappers, require_own_step
from instep._optim.parameters import AttachedParameter
from instep._step.remedies import never_cleared
from instep._torch.lifetime import weakly
from instep._torch.placeholders import ZeroedGradient
from instep._wiring.build import Parts
from instep.errors import AccumulationError


class Waiting:
    """The losses of one step that wait for the last one's backward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._step: Together | None = None
        self._marked: list[AttachedParameter] = []
        parts.accumulation.waiting = weakly(self.count)  # which would lead back to the parts

    def count(self) -> int:
        """How many there are."""
        step = self._of_this_step()
        return 0 if step is None else len(step.losses)

    def add(self, loss: object) -> None:
        """The backward of ``loss`` is to wait.

        Raises:
            AccumulationError: one backward for all would not compute what the plain loop does. Nothing waits then.
        """
        parts = self._parts
        step = self._of_this_step()
        if step is None:
            require_own_step(parts, "backward(more=True)")
            refuse_wrappers(parts)
        if (ddps_of(parts) or parts.sharding is not None) and not parts.accumulation.is_in_hold:
            self.drop()
            raise AccumulationError(
                "backward(more=True) came outside of no_sync(): on several ranks the forward and backward of all "
                "micro-batches but the last belong into it (with FSDP2 into set_requires_gradient_sync(False)), or "
                "into `with overlap.accumulate():`"
            )
        step = step or Together(parts)
        step.add(loss)
        if self._step is None:
            self._mark()
            self._step = step

    def take(self) -> Together | None:
        """The last loss of the step has come: those that wait, if any do. Nothing waits from here on."""
        step = self._of_this_step()
        self.drop()
        return step

    def drop(self) -> int:
        """Throw away what waits. Returns how many there were."""
        step, self._step = self._step, None
        marked, self._marked = self._marked, []
        for attached in marked:
            parameter = attached.peek()
            if parameter is not None and parameter.grad is attached.spent:
                parameter.grad = None
        return 0 if step is None else len(step.losses)

    def _of_this_step(self) -> Together | None:
        """What waits, unless the loop has thrown it away by clearing all gradients."""
        if self._step is None:
            return None
        cleared = [a.spec.name for a in self._marked if _is_cleared(a)]
        if not cleared:
            return self._step
        if len(cleared) < len(self._marked):
            raise AccumulationError(
                f"the gradient of {cleared[0]!r} was cleared, and others were not, while the backward of {self.drop()} "
                "micro-batches waits for that of the last: it would have to throw a part of each away. Call "
                "zero_grad() of all attached optimizers, or none, between the micro-batches of a step; or leave out "
                "more=True"
            )
        self.drop()
        return None

    def _mark(self) -> None:
        for attached in self._parts.schedule.parameters:
            parameter = attached.get()
            gradient = parameter.grad
            if gradient is not None and gradient is attached.spent:
                self.drop()
                raise never_cleared(attached.spec.name, "backward()")
            if gradient is None and attached.spent is not None and parameter.requires_grad:
                parameter.grad = attached.spent
                self._marked.append(attached)


def _is_cleared(attached: AttachedParameter) -> bool:
    gradient = attached.get().grad
    return gradient is not attached.spent and (gradient is None or ZeroedGradient.is_unused(gradient))
