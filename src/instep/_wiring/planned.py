"""The plan of an attachment: its buckets, and the optimizers that are not proven."""

from collections.abc import Sequence

from instep._optim.plan import Plan
from instep._optim.probe import Separability
from instep._step.checking import Check
from instep._step.schedule import Schedule
from instep.options import Options
from instep.sources import Source


class Planned:
    """
    Args:
        separability: of each optimizer.
    """

    def __init__(
        self,
        options: Options,
        schedule: Schedule,
        sources: Sequence[Source],
        separability: Sequence[Separability],
        check: Check | None,
    ) -> None:
        # Else the sources' buckets are those in which norms are taken, or gradients sent: not those that are stepped.
        self._sources_step = options.schedule == "backward" or options.communication.cross_iteration
        self._schedule = schedule
        self._sources = sources
        self._separability = separability
        self._check = check
        self._last: Plan | None = None

    def now(self) -> Plan:
        """The buckets as they are; of one that is detached, as they were."""
        if self._last is not None:
            return self._last
        buckets = [bucket for source in self._sources for bucket in source.buckets if self._sources_step]
        return Plan(self._schedule.planned(buckets), self._unproven())

    def keep(self) -> None:
        """The model is gone, or detached."""
        self._last = self.now()

    def said(self) -> tuple[str, ...]:
        """What is not proven, and how far the comparison of the first steps has come."""
        checked = () if self._check is None else (str(self._check),)
        return tuple(said for said in (*self.now().unproven, *checked) if said)

    def _unproven(self) -> tuple[str, ...]:
        if self._check is not None and not self._check.due:
            return ()
        return tuple(found.unproven for found in self._separability if found.unproven is not None)
