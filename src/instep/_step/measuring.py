"""``schedule="forward"`` with ``ClipNorm``: the norm of each gradient is taken as soon as the gradient is final."""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from instep._autograd.watch import Watch
from instep._gradients.clipping import Clipping
from instep._optim.parameters import AttachedParameter
from instep._optim.parts import version_of
from instep._step.accumulation import Accumulation
from instep._step.first_error import FirstError
from instep._step.recorder import Recorder
from instep._step.streams import StepStreams


class MeasuringSink:
    """What sources announce to when nothing is to be written during backward.

    A gradient that is used after it was measured is measured again by ``optimizer.step()``.

    Attributes:
        recorder: told of each bucket's communication; ``None`` when nobody listens.
        on_open: called when the first gradient of a step arrives.
    """

    waits_for_all = by_bucket = frees_gradients = keeps_gradients = False

    def __init__(self, accumulation: Accumulation, clipping: Clipping) -> None:
        self.streams = StepStreams()
        self.lock = threading.RLock()
        self.step_count = 0
        self.recorder: Recorder | None = None
        self.on_open: Callable[[], None] = lambda: None
        self._accumulation = accumulation
        self._clipping = clipping
        self._watch = Watch(gradient=self._used)
        self._measured: dict[int, tuple[AttachedParameter, torch.Tensor, int]] = {}
        self._failure = FirstError()
        self._open = False

    def arrive(self, parameters: Sequence[AttachedParameter]) -> bool:
        self._accumulation.count()
        if self._accumulation.holding:
            return False
        if not self._open:
            self._open = True
            self.on_open()
        return True

    def apply(
        self, bucket: Sequence[AttachedParameter], fetch: Callable[[], None] | None = None, *, final: bool = True
    ) -> bool:
        try:
            if fetch is not None:
                fetch()
            if final:
                # One that was frozen after the forward is announced, and has none.
                found = [(a, g) for a in bucket if (g := a.get().grad) is not None]
                for device in {g.device for _, g in found}:
                    self.streams.makers.gather(device)
                self._clipping.measure([a for a, _ in found], [g for _, g in found])
        except BaseException as error:
            self.fail(error)
            return False
        return True

    def retire(self, bucket: Iterable[AttachedParameter]) -> None:
        for attached in bucket:
            parameter = attached.get()
            if parameter.grad is not None and self._clipping.is_measured(attached):
                self._measured[id(parameter)] = attached, parameter.grad, version_of(parameter.grad)
                self._watch.start([parameter])

    def freed(self, bucket: object) -> None: ...

    def is_applied(self, attached: AttachedParameter) -> bool:
        return self._clipping.is_measured(attached)

    def compute_total_norm(self) -> None: ...

    def fail(self, error: BaseException, begun: object = ()) -> None:
        self._failure.keep(error)

    def updated_on_all(self) -> bool:
        return True  # nothing is stepped in backward

    def received(self, parameters: object) -> None: ...

    def backward_raised(self) -> None:
        self._failure.forget()
        self.close()
        self._clipping.begin()

    def raise_failure(self) -> None:
        self._failure.raise_if_any()

    def close(self) -> None:
        """``optimizer.step()`` is about to use the norms: those of gradients that have changed since are forgotten."""
        for attached, gradient, version in self._measured.values():
            parameter = attached.get()
            self._watch.stop([parameter])
            if parameter.grad is not gradient or version_of(gradient) != version:
                self._clipping.forget(attached)
        self._measured.clear()
        self._open = False

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        self._watch.stop([parameter])
        attached, _, _ = self._measured.pop(id(parameter))
        self._clipping.forget(attached)
