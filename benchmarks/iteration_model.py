"""How long an iteration of data-parallel training takes, by when the optimizer steps: an event model, in seconds.

A model of the loop, not of the machine: forward, backward, communication and step take as long as they are said to,
and wait for each other, and for a core that they share, as they do in the loop. Every schedule is drained when the next
backward begins: what runs from there to the following backward is all of the steady state.

``iteration_seconds`` is the entry: it builds a ``_Program`` of tasks and runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

Algorithm = Literal["ring", "tree"]
ScheduleName = Literal["plain", "backward", "forward", "no optimizer"]
"""When buckets are stepped:

- ``plain``: after backward and all communication, by the main thread.
- ``backward``: by the main thread too, but each as soon as it has arrived, from the end of backward's own work on.
- ``forward``: after all communication, by a worker; the next forward waits for a layer's step before that layer.
- ``no optimizer``: ``plain`` with a step that costs nothing.
"""
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclass(frozen=True)
class Work:
    """The work of a rank in an iteration. Sequences are by bucket, in the order of backward: the deepest first.

    Attributes:
        gradient_bytes: the bytes that each bucket communicates.
        forward: seconds of a core for the forward of the layers whose parameters are in the bucket.
        backward: seconds of a core for their backward.
        step: seconds of a core for the bucket's optimizer step.
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
    """The network between the ranks. It carries one bucket at a time, both ways at once.

    Attributes:
        bytes_per_second: the speed of one rank's link, in each direction.
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
        """Return the seconds that an all-reduce of ``size`` bytes takes."""
        if self.ranks == 1:
            return 0.0
        if self.algorithm == "ring":
            # Reduce-scatter and all-gather: in each a rank sends all shards but one, one hop after another.
            hops = 2 * (self.ranks - 1)
            return hops / self.ranks * size / self.bytes_per_second + hops * self.latency
        # Up the tree and down again, in pieces: each level costs its latency, and the bytes pass each link once a way.
        depth = (self.ranks - 1).bit_length()
        return 2 * size / self.bytes_per_second + 2 * depth * self.latency


@dataclass(frozen=True)
class Host:
    """The cores of a rank.

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


def iteration_seconds(schedule: ScheduleName, work: Work, link: Link, host: Host) -> float:
    """Return the seconds of an iteration in the steady state, from the beginning of one backward to that of the
    next."""
    if schedule == "no optimizer":
        return iteration_seconds("plain", work.without_step(), link, host)
    program = _Program()
    made: list[int] = []
    # Backward, layer by layer, and each bucket's communication, behind that of the one before it.
    for seconds in work.backward:
        made.append(program.add(seconds, *made[-1:]))
    arrived: list[int] = []
    for number, size in enumerate(work.gradient_bytes):
        cpu = host.communication_cpu * size
        arrived.append(program.add(cpu, made[number], *arrived[-1:], link=link.allreduce(size)))

    # The step: where the main thread waits for all communication first, and who steps.
    main = made[-1]
    if schedule != "backward":
        main = program.add(0.0, main, arrived[-1])
    worker = main
    stepped: dict[int, int] = {}
    numbers = range(len(work.step))
    for number in reversed(numbers) if schedule == "forward" else numbers:
        worker = stepped[number] = program.add(work.step[number], worker, arrived[number])
    if schedule != "forward":
        main = worker  # they are the same thread
    # The next forward, the shallowest layer first: each layer waits for its own step alone.
    main = program.add(work.overhead, main)
    for number in reversed(numbers):
        main = program.add(work.forward[number], main, stepped[number])
    return program.seconds(shared=host.cores == 1)


def exposed_seconds(schedule: ScheduleName, work: Work, link: Link, host: Host) -> float:
    """Return how many seconds of the step are left: by how much the iteration is longer than the plain one without an
    optimizer."""
    return iteration_seconds(schedule, work, link, host) - iteration_seconds("no optimizer", work, link, host)


def bound(work: Work, link: Link, host: Host) -> float:
    """Return seconds that no schedule can undercut: those in which the link or a core never waits.

    One core has everything to do. With more cores, the step and the communication have cores of their own.
    """
    cpu = [host.communication_cpu * size for size in work.gradient_bytes]
    communication = sum(max(link.allreduce(size), busy) for size, busy in zip(work.gradient_bytes, cpu, strict=True))
    if host.cores == 1:
        return max(communication, work.main + sum(work.step) + sum(cpu))
    return max(communication, work.main, sum(work.step))


@dataclass(frozen=True)
class _Task:
    """Seconds of a core and of the link, spent at the same time, once the tasks in ``after`` are done."""

    core: float
    link: float
    after: frozenset[int]


@dataclass
class _Program:
    """Tasks, with those that each must wait for."""

    tasks: list[_Task] = field(default_factory=list)

    def add(self, core: float, *after: int, link: float = 0.0) -> int:
        """Add a task, and return its number."""
        self.tasks.append(_Task(core, link, frozenset(after)))
        return len(self.tasks) - 1

    def seconds(self, shared: bool) -> float:
        """Return the seconds until all tasks are done.

        Args:
            shared: whether tasks that compute at the same time share one core equally. Otherwise each has a core.
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
            # On to the next moment at which a task's core or link ends: this very moment, for what takes no time.
            passed = min(
                min((time for time in (core * slower, link) if time > 0), default=0.0)
                for core, link in running.values()
            )
            now += passed
            for number, (core, link) in list(running.items()):
                # An exact 0.0 where the core ends: a rest by rounding would make another event.
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
