"""What a run is expected to need and to take: the figures of a plan, and the arithmetic from bytes to seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from instep.report.iteration import SCHEDULES, Algorithm, Host, Link, Schedule, Work, exposed_seconds, iteration_seconds

BACKWARD_TO_FORWARD = 2.0
"""A backward takes two products for each one of the forward: by inputs, and by weights."""

EVERYTHING = "everything"
"""What is refused where the optimizer is, or the model, with all options."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes by dtype.

    Attributes:
        state: of the optimizer, of one rank that keeps all of it.
        activations: what the forward leaves for backward; ``None``: the forward was not run.
    """

    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    gradients: Mapping[str, int]
    state: Mapping[str, int]
    activations: int | None

    @property
    def own(self) -> int:
        """Bytes that are there whatever the loop does: parameters, buffers and state."""
        return sum(sum(one.values()) for one in (self.parameters, self.buffers, self.state))


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes there are in a step, on one rank.

    Attributes:
        way: how the loop steps.
        implementation: of the optimizer: foreach, fused, or as it comes.
        total: all bytes; of them ``own`` are parameters, buffers and state.
    """

    way: str
    implementation: str
    total: int
    own: int

    @property
    def above(self) -> int:
        return self.total - self.own


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Parameters that step, and under DDP travel, together.

    Attributes:
        step_bytes: what the optimizer reads and writes: parameters and state twice, gradients once.
    """

    nbytes: int
    parameters: tuple[str, ...]
    step_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates that are reached, not those of a data sheet.

    Attributes:
        flops: a second.
        memory_bytes: a second.
        link_bytes: a second, of each rank in each direction.
        latency: seconds from one rank to another.
    """

    ranks: int
    flops: float
    memory_bytes: float
    link_bytes: float
    latency: float


@dataclass(frozen=True, slots=True)
class Timing:
    """An iteration under one schedule, in seconds.

    Attributes:
        exposed: what is left of the step, and of what could be hidden with it; negative where more was hidden.
    """

    schedule: str
    iteration: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Times:
    """By schedule, and what they are made of. Without a forward there are no schedules to tell of."""

    forward: float | None
    backward: float | None
    step: float
    communication: float
    algorithm: str
    schedules: tuple[Timing, ...]


@dataclass(frozen=True, slots=True)
class Offloaded:
    """``offload="host"``: what is copied in a step.

    Attributes:
        nbytes: of state, in each direction.
        seconds: that this takes, in both directions at a time.
        exposed: of these, what backward does not hide; ``None``: it is not known how long backward takes.
    """

    nbytes: int
    seconds: float
    exposed: float | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """What ``attach`` says to some options in this set-up."""

    options: str
    reason: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """The whole plan, as ``--json`` writes it.

    Attributes:
        offloaded: ``None``: it was not asked for.
        accepted: options, with the schedule, that ``attach`` takes.
        assumptions: what was not given, and taken to be so.
    """

    model: str
    optimizer: str
    ranks: int
    tensors: int
    numel: int
    sizes: Sizes
    peaks: tuple[Peak, ...]
    buckets: tuple[PlannedBucket, ...]
    times: Times
    offloaded: Offloaded | None
    refusals: tuple[Refusal, ...]
    accepted: tuple[str, ...]
    assumptions: tuple[str, ...]


def times(buckets: Sequence[PlannedBucket], machine: Machine, forward: float | None) -> Times:
    """How long an iteration takes by schedule; each bucket has the share of forward and backward that it has of the
    bytes.

    Args:
        forward: seconds of the whole forward; ``None``: not known, and then neither is an iteration.
    """
    sizes = [bucket.nbytes for bucket in buckets]
    steps = [bucket.step_bytes / machine.memory_bytes for bucket in buckets]
    link = _quicker(sizes, machine)
    communication = sum(map(link.allreduce, sizes))
    if forward is None:
        return Times(None, None, sum(steps), communication, link.algorithm, ())
    shares = [forward * size / max(sum(sizes), 1) for size in sizes]
    work = Work(sizes, shares, [BACKWARD_TO_FORWARD * share for share in shares], steps)
    host = Host()
    found = tuple(
        Timing(one, iteration_seconds(one, work, link, host), exposed_seconds(one, work, link, host))
        for one in _schedules(machine.ranks)
    )
    return Times(forward, BACKWARD_TO_FORWARD * forward, sum(steps), communication, link.algorithm, found)


def _quicker(sizes: Sequence[int], machine: Machine) -> Link:
    links = [Link(machine.link_bytes, machine.latency, machine.ranks, algorithm) for algorithm in get_args(Algorithm)]
    return min(links, key=lambda link: sum(map(link.allreduce, sizes)))


def _schedules(ranks: int) -> list[Schedule]:
    return [one for one in SCHEDULES if ranks > 1 or one != "cross_iteration"]
