"""What of a recording must know instep's inside: when forwards and backwards run, what stages of a pipeline compute,
who is told of buckets, and what the loop is, in words. ``instep_tools.recording`` asks a ``RecordedLoop`` for all of
it.

Times are ``perf_counter`` seconds. Which forward and which backward of a pipeline are of which micro-batch only the
calls of its stages tell: hooks of a module or of a graph would not do, as zero-bubble schedules compute the gradients
of weights apart.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instep._ranks.collectives import gather_objects
from instep._step.schedule import Schedule
from instep._step.state import Listener, Recorder
from instep._torch.engine import Backward, Phase, current
from instep._torch.hooks import BoundHook, PlainPickles, is_called_by_step, nodes_of, tensors_in
from instep._torch.lifetime import weakly
from instep._torch.pipelining import COMPUTES, LOSS, Around, Pipeline
from instep.naming import modules_of
from instep.target import called_in, name_parameters


class RecordedLoop:
    """A loop that is to be recorded.

    Args:
        options: of ``attach``, in words; ``None``: it is not attached.
        schedule: of its attachment, which is told whom to tell of buckets; ``None``: its steps are torch's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: Mapping[str, str] | None,
        schedule: Schedule | None,
        pipeline: Pipeline | None,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.options: Mapping[str, str] = options or {}
        self.label = "plain"
        if options is not None:
            self.label = f"instep, {', '.join(f'{name}={value}' for name, value in options.items())}"
        self._schedule = schedule
        self._pipeline = pipeline
        self._own: Recorder | None = None

    def watch(self, begins: Callable[[], None], backward_begins: Callable[[], None]) -> "Clock | StageClock":
        """A clock on its forwards and backwards.

        Args:
            begins: called when an outermost forward, or a run of the pipeline, is about to begin.
            backward_begins: called when a backward comes to an output of a forward.
        """
        if self._pipeline is None:
            return Clock(self.model, begins, backward_begins)
        return StageClock(self._pipeline, self.model, begins)

    def leave_out_of_copies(self) -> Callable[[], None]:
        """Copies and pickles of the model have none of the recording's hooks. Returns what ends that."""
        return PlainPickles(self.model.modules()).remove

    def is_inner(self, optimizer: Optimizer) -> bool:
        """Whether the ``step()`` that runs was called by that of a class that inherits it: it is no step of its own."""
        return is_called_by_step(optimizer)

    def listen(self, listener: Listener) -> None:
        """Have ``listener`` told of buckets, beside a recorder of the user's own."""
        if self._schedule is not None:
            times = self._schedule.times
            self._own = times.recorder
            times.recorder = listener if self._own is None else partial(_tell, (self._own, listener))
            times.listener = listener

    def stop_listening(self) -> None:
        if self._schedule is None:
            return
        try:
            # The recording ends, and its profiler stops behind this. What still communicates then would be written down
            # in memory that the profiler has freed: see ``unseen_by_profiler``.
            self._schedule.synchronize()
        finally:
            self._schedule.times.recorder, self._schedule.times.listener = self._own, None

    def modules(self) -> list[nn.Module]:
        """The modules that are called, without their wrappers."""
        return [[module for prefix, module in modules_of(called) if not prefix][-1] for called in called_in(self.model)]

    @staticmethod
    def gather(value: Any) -> list[Any] | None:
        """What each rank gives, on the first; ``None`` on the others."""
        assert dist.group.WORLD is not None
        return gather_objects(value, dist.group.WORLD)


def _tell(recorders: Sequence[Recorder], kind: str, names: Sequence[str], start: float, end: float) -> None:
    for recorder in recorders:
        recorder(kind, names, start, end)


def _inputs(values: object) -> set[str]:
    """The shapes and dtypes of the tensors in ``values``, and the dtype that autocast computes in."""
    device, inputs = "cpu", set()
    for tensor in tensors_in(values):
        device = tensor.device.type
        inputs.add(f"{tuple(tensor.shape)} {_dtype_name(tensor.dtype)}")
    if torch.is_autocast_enabled(device):
        inputs.add(f"autocast in {_dtype_name(torch.get_autocast_dtype(device))}")
    return inputs


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class BackwardTimes(NamedTuple):
    """When one backward ran.

    Attributes:
        reached: when it came to an output of the model. That of the loss lies before.
        nodes: when the last node of the graph had run.
        returned: when backward returned. Waiting for communication lies between the two.
    """

    reached: float
    nodes: float
    returned: float
    thread: int


class Clock:
    """Notes the forwards and backwards of a model. For the arguments see ``RecordedLoop.watch``.

    Attributes:
        forwards: when each outermost forward began and ended, and on which thread.
        backwards: when each backward ran.
        given: what forwards were given, in words.
    """

    def __init__(
        self, model: nn.Module, forward_begins: Callable[[], None], backward_begins: Callable[[], None]
    ) -> None:
        self.forwards: list[tuple[float, float, int]] = []
        self.backwards: list[BackwardTimes] = []
        self.given: set[str] = set()
        self._forward_begins = forward_begins
        self._backward_begins = backward_begins
        self._depth = 0
        self._began = 0.0
        self._backward: Backward | None = None  # the last backward that was seen
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(BoundHook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(BoundHook(self._after_forward), always_call=True),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        if self._depth == 0:
            self._forward_begins()
            self.given |= _inputs((args, kwargs))
            self._began = perf_counter()
        self._depth += 1

    def _after_forward(self, module: nn.Module, inputs: object, output: Any) -> None:
        # Not below 0: hooks that are put on inside of a forward see its end alone.
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self.forwards.append((self._began, perf_counter(), threading.get_native_id()))
        # Whichever of these nodes the engine reaches first tells that a backward runs.
        for node in nodes_of(output):
            node.register_prehook(weakly(self._backward_runs))

    def _backward_runs(self, gradients: object) -> None:
        if (backward := current()) is self._backward:
            return
        self._backward = backward
        self._backward_begins()
        reached = perf_counter()
        # Two moments of one end: before DDP's own waiting, and after everything.
        nodes: list[float] = []
        backward.at(Phase.BEFORE_DDP, lambda: nodes.append(perf_counter()))
        backward.at(Phase.LAST, partial(self._backward_ended, reached, nodes))

    def _backward_ended(self, reached: float, nodes: list[float]) -> None:
        self.backwards.append(BackwardTimes(reached, nodes[0], perf_counter(), threading.get_native_id()))


class Computed(NamedTuple):
    """What a stage has computed for a micro-batch: a forward, with the loss, or a backward, of some schedules in two
    parts."""

    kind: str
    name: str
    start: float
    end: float
    thread: int
    stage: int


class StageClock:
    """Notes what this rank's stages of a pipeline compute.

    Attributes:
        forwards: the forward of each micro-batch through a stage, and its loss.
        backwards: the backward of each micro-batch through a stage.
        stages: their places in the pipeline.
        stage_of: the stage of each parameter, by the names that buckets have.
        given: what the first stage's forwards were given, in words.
    """

    def __init__(self, pipeline: Pipeline, model: nn.Module, run_begins: Callable[[], None]) -> None:
        self.forwards: list[Computed] = []
        self.backwards: list[Computed] = []
        self.given: set[str] = set()
        self._run_begins = run_begins
        modules = pipeline.stages
        self.stages: Sequence[int] = list(modules)
        stage_of = {id(p): stage for stage, module in modules.items() for p in module.parameters()}
        self.stage_of = {
            places[0].name: stage_of[key] for key, (_, places) in name_parameters(model).items() if key in stage_of
        }
        self._calls = pipeline.around(self._run, (LOSS, *COMPUTES), self._around)

    def stop(self) -> None:
        for call in self._calls:
            call.remove()
        self._calls = []

    def _run(self, call: "partial[Any]", options: object) -> Any:
        self._run_begins()
        return call()

    def _around(self, stage: int, method: str) -> Around:
        return partial(self._compute, stage, method)

    def _compute(self, stage: int, method: str, call: "partial[Any]", options: Mapping[str, Any]) -> Any:
        is_forward = method.startswith("forward")
        if is_forward:
            self.given |= _inputs((call.args[1:], options))
        began = perf_counter()
        try:
            return call()
        finally:
            kind = "forward" if is_forward or method == LOSS else "backward"
            name = _name(method, call, options)
            computed = Computed(kind, name, began, perf_counter(), threading.get_native_id(), stage)
            (self.forwards if kind == "forward" else self.backwards).append(computed)


def _name(method: str, call: "partial[Any]", options: Mapping[str, Any]) -> str:
    if method == LOSS:
        return "loss"
    micro_batch = f"micro-batch {call.args[0]}"
    if "weight" in method:
        return f"weights, {micro_batch}"
    return micro_batch if options.get("full_backward", True) else f"inputs, {micro_batch}"
