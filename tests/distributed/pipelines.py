"""Pipelines of ``torch.distributed.pipelining``, and two loops over each, side by side: the schedule followed by
``optimizer.step()``, and the same attached."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

import instep
from instep_tools.harness import first_difference
from tests.devices import here
from tests.late import late_updates

WIDTH, CLASSES, ROWS = 8, 5, 2
"""Of each layer, of what the last stage says, and of a micro-batch."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "late": {"schedule": "forward", "defer": True},  # no update runs before somebody waits for it
    "undo": {"schedule": "backward", "undo": True},
}
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
MULTI = (
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    *(["ScheduleDualPipeV"] if hasattr(schedules, "ScheduleDualPipeV") else []),  # since torch 2.8
)
SCALES = "scale_grads" in inspect.signature(schedules.Schedule1F1B).parameters
"""Whether torch divides gradients: torch 2.6 does not."""
needs_schedules = pytest.mark.skipif(not SCALES, reason="torch 2.6's own schedules wait for ever over gloo")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Stage(nn.Module):
    """Two layers, one of which has a parameter that no gradient comes to."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, out)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.poisoned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x * self.frozen))))
        # The derivative of a root is infinite at zero, and nothing else of the model hears of it.
        return y + 0 * (self.unused - 1).sqrt().sum() if self.poisoned else y


Wrap = Callable[[nn.Module], nn.Module]
Optimizers = Callable[[Sequence[nn.Module]], Sequence[torch.optim.Optimizer]]


def as_it_is(stage: nn.Module) -> nn.Module:
    return stage


def parameters_in(stages: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Each once."""
    return list(dict.fromkeys(p for stage in stages for p in stage.parameters()))


def one_optimizer(stages: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters_in(stages), lr=1e-2, foreach=True)]


def one_of_each(stages: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """As torchtitan has it."""
    return [torch.optim.AdamW(stage.parameters(), lr=1e-2, fused=True) for stage in stages]


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def summed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def by_momentum(stages: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters_in(stages), lr=0.1, momentum=0.9)]


@dataclass
class Kind:
    """One kind of pipeline.

    Attributes:
        ranks: on which its stages are; the others of the world have the same pipeline for other data.
        per_rank: how many stages a rank has.
        scale: whether torch divides gradients by the number of micro-batches.
        tied: whether a rank's first and last stage share a weight.
        scales_loss: whether the loop has a scaler for its loss.
    """

    schedule: str = "Schedule1F1B"
    ranks: int = 2
    per_rank: int = 1
    micro_batches: int = 4
    scale: bool = True
    tied: bool = False
    scales_loss: bool = False
    wrap: Wrap = as_it_is
    optimizers: Optimizers = one_optimizer
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mean_loss

    @property
    def count(self) -> int:
        return self.ranks * self.per_rank


class Loop:
    """A rank's part of one pipeline, with its optimizers."""

    def __init__(self, kind: Kind, group: "dist.ProcessGroup | None" = None) -> None:
        torch.manual_seed(0)
        whole = [Stage(CLASSES if number == kind.count - 1 else WIDTH) for number in range(kind.count)]
        rank = dist.get_rank(group)
        looped, v_shaped = list(range(rank, kind.count, kind.ranks)), [rank, kind.count - 1 - rank]
        mine = v_shaped if kind.schedule in V_SHAPED else looped
        if kind.tied:
            whole[mine[-1]].first.weight = whole[mine[0]].first.weight
        self.kind, self.group = kind, group
        self.models = [kind.wrap(whole[number].to(here())) for number in mine]
        stages = [PipelineStage(m, n, kind.count, here(), group=group) for m, n in zip(self.models, mine, strict=True)]
        made = getattr(schedules, kind.schedule)
        given: Any = stages[0] if kind.schedule in SINGLE else stages
        self.pipeline = made(
            given, kind.micro_batches, loss_fn=self._loss, **({"scale_grads": kind.scale} if SCALES else {})
        )
        self.optimizers = kind.optimizers(self.models)
        self.is_first, self.is_last = 0 in mine, kind.count - 1 in mine
        self.scaler: Any = None
        if kind.scales_loss:
            self.scaler = ShardedGradScaler(here().type, init_scale=64.0, growth_interval=2, process_group=group)
            self.scaler.scale(torch.zeros(1, device=here()))  # the stages that see no loss have the scale, too
        self.overlap: Any = None
        self.steps_in_run = False  # whether it is attached so
        self.parameters_with_gradients = sum(6 for _ in self.models) - kind.tied

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self.kind.loss(output, target)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def run(self, i: int) -> list[torch.Tensor]:
        """``schedule.step()`` on data of this pipeline's own. The losses of the last stage, elsewhere none."""
        replica = dist.get_rank() // self.kind.ranks
        generator = torch.Generator("cpu").manual_seed(1000 * replica + i)
        rows = ROWS * self.kind.micro_batches
        x = torch.randn(rows, WIDTH, generator=generator, device="cpu").to(here())
        y = torch.randint(0, CLASSES, (rows,), generator=generator, device="cpu").to(here())
        losses: list[torch.Tensor] = []
        given = [x] if self.is_first else []
        self.pipeline.step(*given, **({"target": y, "losses": losses} if self.is_last else {}))
        return [loss.detach() for loss in losses]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> Iterator[tuple[str, Any]]:
        """What this rank holds."""
        for name, value in self._state():
            yield name, value.to_local() if isinstance(value, DTensor) else value

    def _state(self) -> Iterator[tuple[str, Any]]:
        for number, model in enumerate(self.models):
            for name, value in model.state_dict().items():
                yield f"{number}.{name}", value
        for number, optimizer in enumerate(self.optimizers):
            # By its place in the groups: how state comes to be decides its order in the dict.
            for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                for name, value in optimizer.state.get(p, {}).items():
                    yield f"optimizer {number}, {place}, {name}", value


Iteration = Callable[[Loop, int], Any]


def learn(loop: Loop, i: int) -> Any:
    losses = loop.run(i)
    if loop.overlap is None:
        loop.parameters_with_gradients = sum(p.grad is not None for p in parameters_in(loop.models))
    if loop.steps_in_run:
        applied = loop.overlap._parts.step.members.applied
        assert len(applied) == loop.parameters_with_gradients, "not all stages were stepped in the run"
        assert loop.overlap.redo_count == 0
    loop.step()
    return losses


def clip_over_stages(loop: Loop, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """As torchtitan's loop clips by the norm of all stages."""
    parameters = parameters_in(loop.models)
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients, norm_type)
    if hasattr(total, "full_tensor"):
        total = total.full_tensor()
    if norm_type == float("inf"):
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=loop.group)
    else:
        total **= norm_type
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=loop.group)
        total **= 1.0 / norm_type
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def clipped(max_norm: float, loop: Loop, i: int, norm_type: float = 2.0) -> Any:
    losses = loop.run(i)
    if loop.overlap is None:
        norm = clip_over_stages(loop, max_norm, norm_type)
        loop.step()
    else:
        loop.step()
        norm = loop.overlap.grad_norm
    return losses, norm.detach().clone()


def pipelines_of(kind: Kind) -> "dist.ProcessGroup | None":
    """The group of this rank's pipeline."""
    if kind.ranks == dist.get_world_size():
        return None
    found = None
    for first in range(0, dist.get_world_size(), kind.ranks):
        ranks = list(range(first, first + kind.ranks))
        group = dist.new_group(ranks)
        found = group if dist.get_rank() in ranks else found
    return found


def both(kind: Kind, way: str = "backward", iteration: Iteration = learn, steps: int = 5, **options: Any) -> None:
    """Train plain and attached, and compare bit for bit after every step what this rank holds."""
    train_both(kind, way, iteration, steps, **options)


def attach_to(loop: Loop, way: str, **options: Any) -> Any:
    models: Any = loop.models if len(loop.models) > 1 else loop.models[0]
    given = {**WAYS[way], **options}
    if loop.scaler is not None and given.get("undo"):
        given["scaler"] = loop.scaler
    overlap = instep.attach(models, loop.optimizers, pipeline=loop.pipeline, **given)
    loop.steps_in_run = given.get("schedule") == "backward" and overlap.state != "disabled"
    return overlap


def train_both(kind: Kind, way: str, iteration: Iteration = learn, steps: int = 5, **options: Any) -> Loop:
    """The same, and return the attached loop."""
    group = pipelines_of(kind)
    plain, loop = Loop(kind, group), Loop(kind, group)
    loop.overlap = attach_to(loop, way, **options)
    with late_updates() if way == "late" else nullcontext():
        for i in range(steps):
            expected = iteration(plain, i)
            loop.parameters_with_gradients = plain.parameters_with_gradients
            found = iteration(loop, i)
            loop.overlap.synchronize()
            named = [(name, copy.copy(value)) for name, value in plain.state()]
            difference = first_difference(iter(named), loop.state())
            assert difference is None, f"rank {dist.get_rank()}, step {i}: {difference}"
            _require_same(expected, found)
    return loop


def _require_same(expected: Any, found: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found), (expected, found)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(expected, found, strict=True):
            _require_same(one, other)
    else:
        assert expected == found


def accumulated(loop: Loop, i: int) -> Any:
    """Two runs of the pipeline in one step."""
    holding = nullcontext() if loop.overlap is None else loop.overlap.accumulate()
    with holding:
        first = loop.run(2 * i)
    second = loop.run(2 * i + 1)
    loop.step()
    return first, second


def poison(loop: Loop, rank: int, on: bool) -> None:
    """Only in one stage of one rank."""
    if dist.get_rank() == rank:
        stage = next(m for m in loop.models[-1].modules() if isinstance(m, Stage))
        stage.poisoned = on


def skipping(rank: int, loop: Loop, i: int) -> Any:
    """The plain loop leaves the step out on all ranks, where a gradient of any is not finite."""
    poison(loop, rank, i == 2)
    losses = loop.run(i)
    if loop.overlap is None and i == 2:
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
    else:
        loop.step()
    return losses


def scaled(rank: int, loop: Loop, i: int) -> Any:
    """With a scaler that hears of all stages."""
    poison(loop, rank, i == 2)
    losses = loop.run(i)
    for optimizer in loop.optimizers:
        loop.scaler.step(optimizer)
    loop.scaler.update()
    for optimizer in loop.optimizers:
        optimizer.zero_grad()
    return losses, loop.scaler.get_scale()


def data_groups(ranks: int) -> dist.ProcessGroup:
    """The group of those that train this rank's stage, in pipelines of so many ranks."""
    found = None
    for stage in range(ranks):
        members = list(range(stage, dist.get_world_size(), ranks))
        group = dist.new_group(members)
        found = group if dist.get_rank() in members else found
    assert found is not None
    return found
