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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        micro_batches: how many one run has.
    """

    def __init__(self, schedule: Any) -> None:
        stages = _stages_of(schedule)
        self.kind = type(schedule).__name__
        self.group: Any = stages[0].group
        self.count: int = stages[0].num_stages
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

    def has_backward(self, place: int) -> bool:
        """Whether the stage at ``place`` runs backwards: not in ``schedule.eval(…)``, in which torch makes the same
        calls."""
        schedule = self._schedule()
        stages = () if schedule is None else _stages_of(schedule)
        return any(stage.has_backward for stage in stages if stage.stage_index == place)

    def around(self, run: "Around", names: Iterable[str], make: "Callable[[int, str], Around]") -> "list[StageCall]":
        """Put ``run`` around each run, and around each method of these ``names`` what ``make`` makes of the place of
        its stage and its name, until what is returned is removed. The ``LOSS`` is that of the last stage."""
        schedule = self._schedule()
        if schedule is None:
            return []
        calls = [StageCall(schedule, "step", run)]
        calls += [StageCall(schedule, LOSS, make(self.count - 1, LOSS)) for name in names if name == LOSS]
        for stage in _stages_of(schedule):
            finishes = hasattr(stage, FINISHES[0])
            own = [name for name in names if hasattr(stage, name) and (finishes or name not in FINISHES)]
            calls += [StageCall(stage, name, make(int(stage.stage_index), name)) for name in own]
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
