"""How long an iteration of a pipeline takes, by when its stages are stepped: an event model, in seconds.

Each rank has one worker, which does the rank's actions in the given order, and each as soon as what it needs is there:
a forward the output of the stage before, a backward the gradient of the stage behind, the gradients of weights those of
inputs. Iterations follow each other without a pause, so that a rank begins the next one while others are in this one.

Left out is all else that a real pipeline waits for: the bytes of messages (each takes the same time, and none waits for
another), the work of sending, a rank that waits until its messages have arrived (torch's ``Schedule1F1B`` waits for a
send and a receive together, and every schedule for all sends at its end), data parallelism in the stages, input data,
the loop's own work between iterations, memory, and processors that ranks share. Copies that ``undo`` takes for a trial,
the norms of a rank's own gradients, and their scaling cost nothing, unless they are counted in the step. No step is
clipped: one that has to be is put back and done again after the norm, which the model does not say.

``steady`` is the entry. It makes the tasks of one iteration, and runs them often enough for a steady state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward, and the two halves of a backward: gradients of inputs, and of weights."""
WayName = Literal["plain", "plain, clipped", "backward", "undo, clipped", "no optimizer"]
"""When stages are stepped:

- ``plain``: all stages of a rank after its last action, by ``optimizer.step()``.
- ``plain, clipped``: the same, but all ranks wait for the norm of all stages first.
- ``backward``: each stage after its last backward. The rank's next action waits for that.
- ``undo, clipped``: the same, on trial. A rank that is through with its steps waits for the norm.
- ``no optimizer``: never.
"""
WAYS: tuple[WayName, ...] = get_args(WayName)

ITERATIONS = 12
"""Time is taken over so many, after as many others: a cycle of 2, 3 or 4 iterations ends with them."""


class Action(NamedTuple):
    """Of one stage, for one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int


@dataclass(frozen=True)
class Stage:
    """Seconds that the work of one stage takes.

    Attributes:
        forward: of a micro-batch.
        backward_inputs: of a micro-batch, for the gradients of the stage's inputs.
        backward_weights: of a micro-batch, for the gradients of its weights. A whole backward takes both.
        step: of the optimizer.
    """

    forward: float
    backward_inputs: float
    backward_weights: float
    step: float

    def __post_init__(self) -> None:
        if min(self.forward, self.backward_inputs, self.backward_weights, self.step) < 0:
            raise ValueError(f"seconds are not negative: {self}")

    def of(self, kind: Kind) -> float:
        """Return the seconds of an action."""
        if kind == "B":
            return self.backward_inputs + self.backward_weights
        return {"F": self.forward, "I": self.backward_inputs, "W": self.backward_weights}[kind]


@dataclass(frozen=True)
class Pipeline:
    """Stages on ranks.

    Attributes:
        order: by rank, what it does in an iteration.
        stages: first stage first.
        message: seconds from the end of an action until its result is on another rank.
        norm: seconds of the all-reduce of the norm, from the moment at which the last rank takes part.
    """

    order: Mapping[int, Sequence[Action]]
    stages: Sequence[Stage]
    message: float = 0.0
    norm: float = 0.0

    def __post_init__(self) -> None:
        if min(self.message, self.norm) < 0:
            raise ValueError(f"seconds are not negative: {self.message}, {self.norm}")
        actions = [action for actions in self.order.values() for action in actions]
        if len(self.ranks) != len(actions):
            raise ValueError("an action is there twice")
        if {action.stage for action in actions} != set(range(len(self.stages))):
            raise ValueError(f"the order is not that of {len(self.stages)} stages")
        if len({(action.stage, rank) for action, rank in self.ranks.items()}) != len(self.stages):
            raise ValueError("a stage is on two ranks")

    @cached_property
    def ranks(self) -> Mapping[Action, int]:
        """Where each action is done."""
        return {action: rank for rank, actions in self.order.items() for action in actions}

    def stages_of(self, rank: int) -> list[int]:
        """Return those of a rank, first stage first."""
        return sorted({action.stage for action in self.order[rank]})


@dataclass(frozen=True)
class Steady:
    """An iteration in the steady state.

    Attributes:
        seconds: from its beginning to that of the next one.
        exposed: by stage, the seconds of its step for which the rank had something else to do: its next action had all
            that it needs. The rest of the step fills a bubble. What a rank waits for the norm is not the step's, and
            is in ``seconds`` alone.
    """

    seconds: float
    exposed: Mapping[int, float]


def steady(way: WayName, pipeline: Pipeline) -> Steady:
    """Return how long an iteration takes, and what of the steps is exposed.

    Raises:
        ValueError: a rank waits for something that never comes.
    """
    tasks = _feasible({rank: list(_tasks(way, pipeline, rank)) for rank in pipeline.order})
    run = _Run(dict.fromkeys(pipeline.order, 0.0), dict.fromkeys(range(len(pipeline.stages)), 0.0))
    for _ in range(ITERATIONS):
        run.iterate(tasks)
    begun, before = run.now, dict(run.exposed)
    for _ in range(ITERATIONS):
        run.iterate(tasks)
    exposed = {stage: (seconds - before[stage]) / ITERATIONS for stage, seconds in run.exposed.items()}
    return Steady((run.now - begun) / ITERATIONS, exposed)


_Key: TypeAlias = tuple[str, int, int]
"""What is done, the stage or rank that it is of, and the micro-batch."""


@dataclass(frozen=True)
class _Task:
    """What a rank's worker does next.

    Attributes:
        after: what must be done before, on any rank, and the seconds from then on.
        step_of: the stage, if this is its step.
    """

    key: _Key
    rank: int
    seconds: float
    after: Sequence[tuple[_Key, float]] = ()
    step_of: int | None = None

    @property
    def is_action(self) -> bool:
        return self.key[0] in get_args(Kind)


def _tasks(way: WayName, pipeline: Pipeline, rank: int) -> Iterator[_Task]:
    """Of one iteration, in the rank's order."""
    in_run = way in ("backward", "undo, clipped")
    last = {action.stage: action for action in pipeline.order[rank] if action.kind in ("B", "W")}
    for action in pipeline.order[rank]:
        seconds = pipeline.stages[action.stage].of(action.kind)
        yield _Task(_key(action), rank, seconds, list(_needs(pipeline, rank, action)))
        if in_run and last.get(action.stage) == action:
            yield _step(pipeline, rank, action.stage)
    if way.endswith("clipped"):
        steps_after = [] if in_run else pipeline.stages_of(rank)
        yield _Task(("norm sent", rank, 0), rank, 0.0)
        arrived: list[tuple[_Key, float]] = [(("norm sent", other, 0), pipeline.norm) for other in pipeline.order]
        yield _Task(("norm", rank, 0), rank, 0.0, arrived)
    else:
        steps_after = pipeline.stages_of(rank) if way == "plain" else []
    for stage in steps_after:
        yield _step(pipeline, rank, stage)


def _step(pipeline: Pipeline, rank: int, stage: int) -> _Task:
    return _Task(("step", stage, 0), rank, pipeline.stages[stage].step, step_of=stage)


def _key(action: Action) -> _Key:
    return action.kind, action.stage, action.micro_batch


def _needs(pipeline: Pipeline, rank: int, action: Action) -> Iterator[tuple[_Key, float]]:
    """What an action must wait for, and for how long after that."""
    stage, kind, micro_batch = action
    if kind == "W":
        yield ("I", stage, micro_batch), 0.0
        return
    if kind != "F":
        yield ("F", stage, micro_batch), 0.0
    neighbour = stage - 1 if kind == "F" else stage + 1
    if 0 <= neighbour < len(pipeline.stages):
        # Stages may differ in whether their backwards are halved.
        whole = Action(neighbour, "F" if kind == "F" else "B", micro_batch)
        needed = whole if kind == "F" or whole in pipeline.ranks else Action(neighbour, "I", micro_batch)
        yield _key(needed), 0.0 if pipeline.ranks.get(needed) == rank else pipeline.message


def _feasible(programs: Mapping[int, Sequence[_Task]]) -> list[_Task]:
    """Return all tasks in an order in which each finds done what it needs, with each rank's own order kept."""
    done: set[_Key] = set()
    found: list[_Task] = []
    places = dict.fromkeys(programs, 0)
    while len(found) < sum(map(len, programs.values())):
        before = len(found)
        for rank, tasks in programs.items():
            while places[rank] < len(tasks) and all(key in done for key, _ in tasks[places[rank]].after):
                task = tasks[places[rank]]
                places[rank] += 1
                done.add(task.key)
                found.append(task)
        if len(found) == before:
            stuck = [tasks[places[rank]].key for rank, tasks in programs.items() if places[rank] < len(tasks)]
            raise ValueError(f"each rank waits for something that never comes: {stuck}")
    return found


@dataclass
class _Run:
    """Iterations, one after the other.

    Attributes:
        free: by rank, when its worker has nothing left to do.
        exposed: by stage, in all iterations.
    """

    free: dict[int, float]
    exposed: dict[int, float]
    # By rank: stages that were stepped, each with its beginning and end, since the rank's last action.
    _steps: dict[int, list[tuple[int, float, float]]] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return max(self.free.values())

    def iterate(self, tasks: Sequence[_Task]) -> None:
        ends: dict[_Key, float] = {}
        for task in tasks:
            ready = max((ends[key] + seconds for key, seconds in task.after), default=0.0)
            begin = max(self.free[task.rank], ready)
            self.free[task.rank] = ends[task.key] = begin + task.seconds
            if task.step_of is not None:
                self._steps.setdefault(task.rank, []).append((task.step_of, begin, begin + task.seconds))
            elif task.is_action:
                for stage, began, ended in self._steps.pop(task.rank, []):
                    self.exposed[stage] += max(0.0, ended - max(began, ready))
