"""``torch.distributed.pipelining``: which stages a schedule has here, and when the gradients of a stage are final.

torch calls nobody when a stage is through. So the stage's own methods are put behind ``StageCall``s: those that name
what is received and sent (``MEETS``), those that run a backward (``BACKWARDS``), and those that come after the last of
these, which reduce gradients over FSDP's ranks and divide them by the number of micro-batches (``FINISHES``). The
schedules call these on the stage object, so that an attribute of that object is met first. Hooks of parameters would
not do: zero-bubble schedules compute the gradients of weights with ``torch.autograd.grad``, and add them to ``.grad``
themselves. A recording puts more ``StageCall``s around these.

The names of these methods, ``_stage``, ``_stages``, ``_compute_loss`` and ``_n_microbatches`` are what is private here;
``tests/distributed/test_pipelines.py`` fails clearly when torch changes one.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from instep._torch.hooks import StandIn

BACKWARDS = ("backward_one_chunk", "backward_weight_one_chunk")
"""Of a stage: each runs one backward of a micro-batch, or of its weights alone."""
MEETS = ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops")
"""Of a stage: what is about to be received or sent. Where a step failed on the other rank, that never comes to it."""
COMPUTES = ("forward_one_chunk", *BACKWARDS)
"""Of a stage: all that it computes, each of one micro-batch, whose number is the first argument."""
LOSS = "_compute_loss"
"""Of a schedule: the loss of a micro-batch, after the last stage's forward."""
FINISHES = ("perform_reduce_grad", "scale_grads", "wait_for_gradient_reduction")
"""Of a stage: after the last backward of a run, with final gradients when it returns; one of them may call another at
its end. torch has the first since 2.8 or so, and the last since 2.15. Before that, a run that returns has finished."""


class Pipeline:
    """A pipeline schedule, as ``attach`` is given it. Nobody here keeps it alive: it has the model.

    Attributes:
        kind: the class of the schedule.
        group: the process group of the stages' ranks; ``None``: the default one.
        count: how many stages the pipeline has, on all ranks.
        places: of this rank's stages in the pipeline, the first stage first.
        micro_batches: how many one run has.
    """

    def __init__(self, schedule: Any) -> None:
        stages = _stages_of(schedule)
        self.kind = type(schedule).__name__
        self.group: Any = stages[0].group
        self.count: int = stages[0].num_stages
        self.places: tuple[int, ...] = tuple(int(stage.stage_index) for stage in stages)
        self.micro_batches: int = schedule._n_microbatches
        self._schedule = weakref.ref(schedule)

    def __repr__(self) -> str:
        """The same on all ranks, which compare it."""
        return f"{self.kind} of {self.count} stages and {self.micro_batches} micro-batches"

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The modules of this rank's stages, by their place in the pipeline, first stage first."""
        schedule = self._schedule()
        return {} if schedule is None else {int(stage.stage_index): stage.submod for stage in _stages_of(schedule)}

    @property
    def modules(self) -> list[nn.Module]:
        """Those of this rank's stages, first stage first."""
        return list(self.stages.values())

    def watch(self, runs: Any) -> "list[StageCall]":
        """Have ``runs`` (a ``PipelineSource``) told of each run, until what is returned is removed."""
        schedule, ref = self._schedule(), weakref.ref(runs)
        assert schedule is not None, "it was just attached"
        calls = [StageCall(schedule, "step", lambda call, _: call() if (runs := ref()) is None else runs.run(call))]
        for number, stage in enumerate(_stages_of(schedule)):
            watched = _WatchedStage(ref, number, stage)
            calls += [StageCall(stage, name, watched.meet) for name in MEETS]
            calls += [StageCall(stage, name, watched.backward) for name in BACKWARDS]
            calls += [StageCall(stage, name, watched.finish) for name in FINISHES if hasattr(stage, name)]
        return calls

    def around(self, run: "Around", compute: "Callable[[int, str], Around]") -> "list[StageCall]":
        """Put ``run`` around each run, and around each computation in it what ``compute`` makes of the place of its
        stage and the name of its method (of ``COMPUTES``, or ``LOSS``), until what is returned is removed."""
        schedule = self._schedule()
        if schedule is None:
            return []
        calls = [StageCall(schedule, "step", run), StageCall(schedule, LOSS, compute(self.count - 1, LOSS))]
        for stage in _stages_of(schedule):
            calls += [StageCall(stage, name, compute(int(stage.stage_index), name)) for name in COMPUTES]
        return calls


_MODULE = "torch.distributed.pipelining.schedules"
"""torch itself does not import it, and the import takes a while."""


def is_used() -> bool:
    """Whether somebody may have made a schedule."""
    return _MODULE in sys.modules


def is_schedule(value: object) -> bool:
    """Whether ``value`` is a schedule whose stages can be watched."""
    if (made := sys.modules.get(_MODULE)) is None:
        return False
    return isinstance(value, (made.PipelineScheduleSingle, made.PipelineScheduleMulti))


def _stages_of(schedule: Any) -> Sequence[Any]:
    """This rank's, by their place in the pipeline."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    return sorted(stages, key=lambda stage: int(stage.stage_index))


class _WatchedStage:
    """One stage in its runs. ``runs`` is referred to weakly: the stage is the model's, and must not keep parameters."""

    def __init__(self, runs: "weakref.ref[Any]", number: int, stage: Any) -> None:
        self._runs = runs
        self._number = number
        self._stage = weakref.ref(stage)
        self._ends_with_run = not hasattr(stage, FINISHES[0])
        self.has_ended = False  # whether the last backward of the run has been

    def meet(self, call: Callable[[], Any], options: object) -> Any:
        result, runs = call(), self._runs()
        if result and runs is not None:
            runs.is_about_to_meet()
        return result

    def backward(self, call: Callable[[], Any], options: Mapping[str, Any]) -> Any:
        result, runs, stage = call(), self._runs(), self._stage()
        # Without a backward, as in ``schedule.eval(…)``, torch makes the same calls.
        is_last = bool(options.get("last_backward")) and stage is not None and stage.has_backward
        self.has_ended = is_last and not self._ends_with_run
        if is_last and self._ends_with_run and runs is not None:
            runs.stage_ends_with_run(self._number)
        return result

    def finish(self, call: Callable[[], Any], options: object) -> Any:
        """One of these calls another, which is the last that it does."""
        result = call()
        runs = self._runs()
        if self.has_ended and runs is not None:
            self.has_ended = False
            runs.stage_is_through(self._number)
        return result


Around = Callable[["partial[Any]", Mapping[str, Any]], Any]
"""Makes the call of a method, whose arguments ``args`` of the ``partial`` are, and returns what that returns. The
options of the call stand beside it."""


class StageCall(StandIn):
    """A method of a stage, schedule or other object with something around it (an ``Around``, which must not lead to the
    object), until it is removed."""

    __slots__ = ()

    def __call__(self, *args: Any, **options: Any) -> Any:
        call = partial(self.before(), *args, **options)
        return call() if self._call is None else self._call(call, options)
