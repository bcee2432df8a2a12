"""The numbers of a finished demo, and what may be said about them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instep.demo.job import WARM_UP_STEPS, Finished, Job, LoopRecord, LoopStep

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoopSummary:
    """One loop. Medians are over the timed steps; ``None`` where a host clock cannot tell."""

    first_loss: float
    last_loss: float
    median_step_seconds: float
    median_optimizer_seconds: float | None
    median_exposed_optimizer_seconds: float | None
    peak_gradient_bytes: int
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and the values that a tenth of them are below or above."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole demo, as ``--json`` writes it. Times and losses are those of rank 0.

    Attributes:
        ratio: plain by instep step time, of pairs that ran one after the other.
        difference: the first tensor that differed, on which rank and after which step; ``None`` if all were equal.
    """

    model: str
    parameters: int
    gradient_bytes: int
    device: str
    ranks: int
    backend: str | None
    buckets: int
    steps: int
    warm_up_steps: int
    difference: str | None
    tensors_compared: int
    ratio: Spread
    plain: LoopSummary
    instep: LoopSummary

    @property
    def equal(self) -> bool:
        """Whether every tensor was, after every step and on every rank."""
        return self.difference is None


def summarize(job: Job, answers: Sequence[Finished]) -> Summary:
    """Put the ranks' answers together. ``answers`` are in rank order."""
    first = answers[0]
    differences = [f"rank {rank}, {a.difference}" for rank, a in enumerate(answers) if a.difference is not None]
    on_cpu = job.placement.device == "cpu"
    return Summary(
        model=job.size.value,
        parameters=first.parameters,
        gradient_bytes=first.gradient_bytes,
        device=job.placement.device,
        ranks=job.placement.ranks,
        backend=job.placement.backend,
        buckets=first.buckets,
        steps=job.steps,
        warm_up_steps=WARM_UP_STEPS,
        difference=differences[0] if differences else None,
        tensors_compared=first.tensors,
        ratio=_ratio(first),
        plain=_loop(first.plain, on_cpu),
        instep=_loop(first.attached, on_cpu),
    )


def notes(summary: Summary) -> list[str]:
    """What the numbers of this situation mean, and what they do not."""
    if summary.ranks == 1:
        return [_one_device(summary), *_device_times(summary)]
    return [
        *_overlap(summary),
        *_device_times(summary),
        "Gradient memory: DDP keeps its buckets for good, with either loop.",
    ]


def _one_device(summary: Summary) -> str:
    alive, held = summary.instep.peak_gradient_bytes / MIB, summary.plain.peak_gradient_bytes / MIB
    return (
        "One device: the gain is memory, not time. No communication is there to hide the step; "
        f"gradients take {alive:.1f} MiB at most, where the plain loop holds {held:.1f} MiB."
    )


def _overlap(summary: Summary) -> list[str]:
    total, bare = summary.instep.median_optimizer_seconds, summary.instep.median_exposed_optimizer_seconds
    if total is None or bare is None:
        return []
    return [
        f"Of {1e3 * total:.1f} ms optimizer time per step instep leaves {1e3 * bare:.1f} ms exposed; during the rest, "
        "gradients are on their way.",
        "The ranks share this machine's cores with their communication: the step time says little about a network.",
    ]


def _device_times(summary: Summary) -> list[str]:
    if summary.device == "cpu":
        return []
    return ["Exposed optimizer time is not given: the host's clock does not see when a step runs on the device."]


def _loop(record: LoopRecord, on_cpu: bool) -> LoopSummary:
    timed = record.steps[WARM_UP_STEPS:]

    def median(seconds: Callable[[LoopStep], float]) -> float:
        return statistics.median(map(seconds, timed))

    return LoopSummary(
        first_loss=record.steps[0].loss,
        last_loss=record.steps[-1].loss,
        median_step_seconds=median(lambda step: step.seconds),
        median_optimizer_seconds=median(lambda step: step.optimizer_seconds) if on_cpu else None,
        median_exposed_optimizer_seconds=median(lambda step: step.exposed_seconds) if on_cpu else None,
        peak_gradient_bytes=record.peak_gradient_bytes,
        losses=tuple(step.loss for step in record.steps),
        step_seconds=tuple(step.seconds for step in record.steps),
    )


def _ratio(answer: Finished) -> Spread:
    pairs = zip(answer.plain.steps[WARM_UP_STEPS:], answer.attached.steps[WARM_UP_STEPS:], strict=True)
    deciles = statistics.quantiles((p.seconds / a.seconds for p, a in pairs), n=10, method="inclusive")
    return Spread(median=deciles[4], p10=deciles[0], p90=deciles[8])
