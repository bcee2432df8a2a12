"""What a run is expected to need and to take: the figures of a plan, and the events of one iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

# How long an iteration of data-parallel training takes, by when the optimizer steps: an event model, in seconds.
#
# A model of the loop, not of the machine: forward, backward, communication and step take as long as they are said to,
# and wait for each other, and for a core that they share, as they do in the loop. Every schedule is drained when the
# next backward begins: what runs from there to the following one is all of the steady state.


Algorithm = Literal["ring", "tree"]
Schedule = Literal["plain", "backward", "forward", "cross_iteration", "no optimizer"]
"""When buckets are stepped.

- ``plain``: after backward and all communication, by the main thread.
- ``backward``: by the main thread too, but each as soon as it has arrived, from the end of backward's own work on.
- ``forward``: after all communication, by a worker; the next forward waits for a layer's step before that layer.
- ``cross_iteration``: as they arrive, by a worker, from the end of backward on, which waits for none of them. They are
  sent in the static order with which the iteration is shortest: some as backward makes them, then the shallowest first.
- ``no optimizer``: ``plain`` with a step that costs nothing.
"""

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Work:
    """What a rank has to do in an iteration. Sequences are by bucket, in the order of backward: the deepest first.

    Attributes:
        gradient_bytes: what is communicated of each bucket.
        forward: seconds of a core, of the layers whose parameters are in the bucket.
        backward: the same.
        step: the same, of the optimizer.
        overhead: seconds of a core between ``optimizer.step()`` and the next forward.
    """

    gradient_bytes: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    step: Sequence[float]
    overhead: float = 0.0

    def __post_init__(self) -> None:
        per_bucket = (self.gradient_bytes, self.forward, self.backward, self.step)
        if len({len(values) for values in per_bucket}) != 1 or not self.gradient_bytes:
            raise ValueError(f"one value for each bucket, and at least one: {[len(values) for values in per_bucket]}")
        if min(self.overhead, *map(min, per_bucket)) < 0:
            raise ValueError("bytes and seconds are not negative")

    def without_step(self) -> "Work":
        return replace(self, step=[0.0] * len(self.step))

    @property
    def main(self) -> float:
        """Seconds of everything but the step."""
        return self.overhead + sum(self.forward) + sum(self.backward)


@dataclass(frozen=True)
class Link:
    """What joins the ranks. It carries one bucket at a time, both ways at once.

    Attributes:
        bytes_per_second: of one rank, in each direction.
        latency: seconds from one rank to another.
    """

    bytes_per_second: float
    latency: float
    ranks: int
    algorithm: Algorithm = "ring"

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency < 0 or self.ranks < 1:
            raise ValueError(f"no such link: {self}")

    def allreduce(self, size: float) -> float:
        """Seconds for so many bytes."""
        if self.ranks == 1:
            return 0.0
        if self.algorithm == "ring":
            hops = 2 * (self.ranks - 1)
            return hops / self.ranks * size / self.bytes_per_second + hops * self.latency
        depth = (self.ranks - 1).bit_length()
        return 2 * size / self.bytes_per_second + 2 * depth * self.latency


@dataclass(frozen=True)
class Host:
    """What computes.

    A GPU is one core with ``communication_cpu`` 0: a step on a side stream takes from backward and forward the memory
    bandwidth that it uses, as if they took turns. What communication takes from them is left out.

    Attributes:
        cores: with 1, the main thread, the worker that steps and the thread that communicates share it equally among
            those of them that have something to do. With more, each has one to itself.
        communication_cpu: seconds of a core for each byte of gradients communicated, at the same time as the link
            carries it.
    """

    cores: int = 1
    communication_cpu: float = 0.0

    def __post_init__(self) -> None:
        if self.cores < 1 or self.communication_cpu < 0:
            raise ValueError(f"no such host: {self}")


def iteration_seconds(schedule: Schedule, work: Work, link: Link, host: Host) -> float:
    """Of an iteration in the steady state."""
    if schedule == "no optimizer":
        return iteration_seconds("plain", work.without_step(), link, host)
    count = len(work.step)
    if schedule != "cross_iteration":
        return _period(schedule, work, link, host, range(count))
    # With one left to choose from, there is no choice.
    orders = [[*range(first), *reversed(range(first, count))] for first in range(count)]
    return min(_period(schedule, work, link, host, order) for order in orders)


def exposed_seconds(schedule: Schedule, work: Work, link: Link, host: Host) -> float:
    """What is left of the step: by how much the iteration is longer than the plain one without an optimizer. Negative
    where more than the step was hidden."""
    return iteration_seconds(schedule, work, link, host) - iteration_seconds("no optimizer", work, link, host)


def bound(work: Work, link: Link, host: Host) -> float:
    """Seconds below which no schedule comes, in which the link or a core never waits.

    One core has everything to do. With more, the step and the communication have their own.
    """
    cpu = [host.communication_cpu * size for size in work.gradient_bytes]
    communication = sum(max(link.allreduce(size), busy) for size, busy in zip(work.gradient_bytes, cpu, strict=True))
    if host.cores == 1:
        return max(communication, work.main + sum(work.step) + sum(cpu))
    return max(communication, work.main, sum(work.step))


@dataclass(frozen=True)
class _Task:
    """Seconds of a core and of the link, spent at the same time, once those before it are done."""

    core: float
    link: float
    after: frozenset[int]


@dataclass
class _Program:
    tasks: list[_Task] = field(default_factory=list)

    def add(self, core: float, *after: int, link: float = 0.0) -> int:
        """Returns its number."""
        self.tasks.append(_Task(core, link, frozenset(after)))
        return len(self.tasks) - 1

    def seconds(self, shared: bool) -> float:
        """Until all of it is done.

        Args:
            shared: those that compute at the same time get an equal share of one core each; else they get all of one.
        """
        left = [len(task.after) for task in self.tasks]
        followers: list[list[int]] = [[] for _ in self.tasks]
        for number, task in enumerate(self.tasks):
            for before in task.after:
                followers[before].append(number)
        running = {number: (task.core, task.link) for number, task in enumerate(self.tasks) if not task.after}
        now = 0.0
        while running:
            slower = max(1, sum(core > 0 for core, _ in running.values())) if shared else 1
            # To the next moment at which something ends: now, for what takes no time.
            passed = min(
                min((time for time in (core * slower, link) if time > 0), default=0.0)
                for core, link in running.values()
            )
            now += passed
            for number, (core, link) in list(running.items()):
                core = core - passed / slower if core * slower > passed else 0.0
                link = max(0.0, link - passed)
                running[number] = core, link
                if core or link:
                    continue
                del running[number]
                for follower in followers[number]:
                    left[follower] -= 1
                    if not left[follower]:
                        running[follower] = self.tasks[follower].core, self.tasks[follower].link
        return now


def _period(schedule: Schedule, work: Work, link: Link, host: Host, order: Sequence[int]) -> float:
    """Seconds from the beginning of one backward to that of the next, if buckets are sent in this order."""
    program = _Program()
    made: list[int] = []
    for seconds in work.backward:
        made.append(program.add(seconds, *made[-1:]))
    arrived: dict[int, int] = {}
    last: list[int] = []
    for number in order:
        size = work.gradient_bytes[number]
        cpu = host.communication_cpu * size
        arrived[number] = program.add(cpu, made[number], *last, link=link.allreduce(size))
        last = [arrived[number]]

    main = made[-1]
    if schedule in ("plain", "forward"):
        main = program.add(0.0, main, *last)
    worker = main
    stepped: dict[int, int] = {}
    for number in reversed(order) if schedule == "forward" else order:
        worker = stepped[number] = program.add(work.step[number], worker, arrived[number])
    if schedule in ("plain", "backward"):
        main = worker  # they are the same thread
    main = program.add(work.overhead, main)
    for number in reversed(range(len(work.forward))):
        main = program.add(work.forward[number], main, stepped[number])
    return program.seconds(shared=host.cores == 1)


# What a run is expected to need and to take: the figures of a plan, and the arithmetic from bytes to seconds.


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
