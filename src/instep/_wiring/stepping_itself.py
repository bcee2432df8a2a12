"""An attachment whose optimizers nobody steps: each backward ends with ``optimizer.step()``."""

from collections.abc import Sequence

from torch.optim import Optimizer

from instep._autograd.backward import Phase, current
from instep._step.schedule import Schedule
from instep._wiring.held import living_parameters
from instep.sources import Source
from instep.sources.ddp.source import DDPSource


class SteppingItself:
    def __init__(self, optimizers: Sequence[Optimizer], schedule: Schedule, sources: Sequence[Source]) -> None:
        self._optimizers = list(optimizers)  # nobody else need hold one whose step() nobody calls
        self._schedule = schedule
        self._sources = sources
        self._due = False

    def ask(self) -> None:
        """A backward is running: step where it ends."""
        if not self._due:
            current().at(Phase.SETTLED, self._step, self._never_stepped)
            self._due = True  # now that its end will be heard of, whatever comes

    def _step(self) -> None:
        self._due = False
        # DDP sets gradients that no source announces, of parameters that only other ranks used, where it has reduced.
        reduced = [source.reduced() for source in self._sources if isinstance(source, DDPSource)]
        if self._schedule.state == "open" or any(reduced):
            for optimizer in self._optimizers:
                optimizer.step()
            self._clear()

    def _never_stepped(self) -> None:
        self._due = False
        self._clear()

    def _clear(self) -> None:
        for parameter in living_parameters(self._schedule):
            parameter.grad = None
