"""Recordings of one job may be compared, and no others: a smaller model has a lower peak, whatever instep does."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from instep.report.figures import Figures, figures
from instep.report.run import Job, Run


@dataclass(frozen=True)
class Compared:
    """Recordings of one job, beside each other.

    Attributes:
        name: what this job is to the reader; empty where there is nothing to say.
        weights: what whoever made the recordings has found of their weights, in words; ``None``: they are compared by
            the digests that were recorded.
    """

    runs: Sequence[Run]
    name: str = ""
    weights: str | None = None

    @cached_property
    def figures(self) -> list[Figures]:
        return [figures(run) for run in self.runs]

    @property
    def job(self) -> Job:
        return self.runs[0].job

    @property
    def title(self) -> str:
        """The job in words."""
        job = self.job
        ranks = "one rank" if job.ranks == 1 else f"{job.ranks} ranks"
        batch = f", given {' and '.join(job.batch)}" if job.batch else ""
        said = f"{job.model}, {numbers(job.count)} of {' and '.join(job.dtypes)}, {ranks}, {job.device}{batch}"
        return f"{self.name}: {said}" if self.name else said


def by_job(runs: Sequence[Run]) -> list[Compared]:
    """In the order of the first recording of each job."""
    found: dict[Job, list[Run]] = {}
    for run in runs:
        found.setdefault(run.job, []).append(run)
    return [Compared(same) for same in found.values()]


def numbers(count: int) -> str:
    """How many parameters, counted by element."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit} parameters"
    return f"{count} parameters"
