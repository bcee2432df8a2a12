"""``schedule="forward"``: what a few ordinary steps of the loop show of what it could gain."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from instep._autograd.watch import Watch
from instep._optim.parts import are_plain

FIRST, LAST = 4, 7
"""The steps that are looked at: the first ones make state."""


class Gains(NamedTuple):
    """What ordinary steps have shown.

    Attributes:
        leaves_gradients: whether the loop leaves gradients alone between backward and ``step()``.
        step: milliseconds that ``step()`` took, in the median.
        iteration: milliseconds from one step to the next.
    """

    leaves_gradients: bool
    step: float
    iteration: float


class Observed:
    """
    Args:
        living: the parameters that are still there.

    Attributes:
        uses_gradients: whether the loop has read or replaced a ``.grad`` between backward and ``step()``; ``None``: not
            known.
        step_seconds: how long the calls of ``step()`` took; several optimizers' together.
        iteration_seconds: from one step to the next.
    """

    def __init__(self, living: Callable[[], list[torch.Tensor]]) -> None:
        self.uses_gradients: bool | None = None
        self.step_seconds: list[float] = []
        self.iteration_seconds: list[float] = []
        self._living = living
        self._watch = Watch(gradient=self._used)
        self._is_watching = False  # parameters are not kept: the loop may drop its model
        self._steps = 0
        self._began: float | None = None

    @property
    def gains(self) -> Gains | None:
        """``None``: not known yet."""
        if self._steps <= LAST or self.uses_gradients is None:
            return None
        step, iteration = (1e3 * median(times) for times in (self.step_seconds, self.iteration_seconds))
        return Gains(not self.uses_gradients, step, iteration)

    @property
    def _looks(self) -> bool:
        return FIRST <= self._steps <= LAST

    def backward_ended(self) -> None:
        """The loop goes on, and may look at gradients."""
        if not self._looks or self.uses_gradients or torch.compiler.is_compiling():
            return
        found = [p for p in self._living() if p.requires_grad]
        if are_plain(found):
            self._is_watching = True
            self._watch.start(found)

    def let_go(self) -> None:
        """A forward, or ``step()``, begins: neither is the loop's own use."""
        if self._is_watching:
            self._watch.stop(self._living())
            self._is_watching = False
            self.uses_gradients = bool(self.uses_gradients)

    def step_begins(self) -> None:
        """The first optimizer of a step is about to update."""
        now = perf_counter()
        if self._looks and self._began is not None:
            self.iteration_seconds.append(now - self._began)
        self._began = now

    def step_returned(self, *, is_last: bool) -> None:
        """An optimizer's ``step()`` is about to return."""
        if is_last:
            if self._looks and self._began is not None:
                self.step_seconds.append(perf_counter() - self._began)
            self._steps += 1

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        self.uses_gradients = True
