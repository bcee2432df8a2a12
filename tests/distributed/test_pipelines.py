"""``attach(…, pipeline=)``: the weights, state, losses and norms of the schedule followed by ``optimizer.step()``."""

import copy
import gc
import io
import itertools
import math
import os
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import instep
from instep import ClipNorm
from instep._step.in_backward import BackwardSchedule
from instep._torch import pipelining
from instep.errors import AttachError, CheckpointError, InstepError
from instep_tools.harness import first_difference
from tests.checkpoint import saved
from tests.devices import here
from tests.distributed.pipelines import (
    MULTI,
    ROWS,
    SINGLE,
    WAYS,
    WIDTH,
    Kind,
    Loop,
    accumulated,
    attach_to,
    both,
    by_momentum,
    clipped,
    data_groups,
    learn,
    needs_schedules,
    one_of_each,
    parameters_in,
    pipelines_of,
    scaled,
    skipping,
    train_both,
)
from tests.distributed.pool import RankPool

pytestmark = needs_schedules

KINDS = [Kind(name) for name in SINGLE] + [Kind(name, per_rank=2) for name in MULTI]
by_schedule = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.schedule)
in_every_way = pytest.mark.parametrize("way", WAYS)
FEW = [KINDS[1], KINDS[3], KINDS[5]]
by_few = pytest.mark.parametrize("kind", FEW, ids=lambda kind: kind.schedule)
STEPPING = ("backward", "undo")


@in_every_way
@by_schedule
def test_every_schedule(two_ranks: RankPool, kind: Kind, way: str) -> None:
    two_ranks.run(both, kind, way)


# That stages are stepped in the run, and not by ``optimizer.step()``.


def freed(kind: Kind) -> None:
    loop = train_both(kind, "backward")
    trained = [p for optimizer in loop.optimizers for p in optimizer.state]
    assert loop.overlap.stats()["freed_bytes"] == 5 * sum(p.numel() * p.element_size() for p in trained)


@by_schedule
def test_gradients_are_freed_in_the_run(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(freed, kind)


def on_trial(kind: Kind) -> None:
    loop = train_both(kind, "undo", clip=ClipNorm(math.inf))
    assert loop.overlap.redo_count == 0


@by_schedule
def test_stages_are_stepped_on_trial(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(on_trial, kind)


def once_in_a_run(kind: Kind) -> None:
    """What a forward of the model asks for is asked for once in a run, and not for each micro-batch."""
    loop = Loop(kind)
    loop.overlap = attach_to(loop, "backward")
    looked: list[Any] = []
    for i in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackwardSchedule, "before_forward", lambda schedule: looked.append(schedule))
            learn(loop, i)
        assert len(looked) == i + 1


@by_schedule
def test_forwards_are_looked_at_once_in_a_run(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(once_in_a_run, kind)


def ends_of_micro_batches(kind: Kind) -> None:
    loop = Loop(kind)
    loop.overlap = attach_to(loop, "backward")
    ended: list[Any] = []
    usual = BackwardSchedule.end_micro_batches

    def noted(schedule: BackwardSchedule) -> None:
        ended.append(schedule)
        usual(schedule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackwardSchedule, "end_micro_batches", noted)
        accumulated(loop, 0)
        assert len(ended) == 1, "the ranks vote on one step"
        evaluated_in_between(loop, 1)
        assert len(ended) == 2


@pytest.mark.parametrize("kind", KINDS[:4], ids=lambda kind: kind.schedule)  # torch cannot evaluate the V-shaped ones
def test_micro_batches_end_once_in_a_step(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(ends_of_micro_batches, kind)


# Clipping by the norm of all stages.


@in_every_way
@by_few
@pytest.mark.parametrize("max_norm", [1e-3, 1.2, 1e9])
def test_clipping_over_stages(two_ranks: RankPool, kind: Kind, way: str, max_norm: float) -> None:
    if way == "backward":
        pytest.skip("exact with undo or forward")
    two_ranks.run(both, kind, way, partial(clipped, max_norm), clip=ClipNorm(max_norm))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms(two_ranks: RankPool, norm_type: float) -> None:
    iteration = partial(clipped, 0.5, norm_type=norm_type)
    two_ranks.run(both, FEW[1], "undo", iteration, clip=ClipNorm(0.5, norm_type))


# What a rank has beside one optimizer and one stage.


@in_every_way
def test_an_optimizer_of_each_stage(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(both, Kind("ScheduleInterleaved1F1B", per_rank=2, optimizers=one_of_each), way)


@in_every_way
def test_a_weight_of_two_stages(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(both, Kind("ScheduleZBVZeroBubble", per_rank=2, tied=True), way)


@in_every_way
def test_gradients_that_are_not_divided(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(both, Kind("ScheduleInterleavedZeroBubble", per_rank=2, scale=False, optimizers=by_momentum), way)


@in_every_way
@by_few
def test_several_runs_in_a_step(two_ranks: RankPool, kind: Kind, way: str) -> None:
    two_ranks.run(both, kind, way, accumulated)


# Data parallelism in each stage: two pipelines of two ranks.


def ddp(stage: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(stage, process_group=data_groups(2), find_unused_parameters=True, **options)


def sharded(stage: Any) -> Any:
    for one in (stage.first, stage.second, stage):
        fully_shard(one, mesh=DeviceMesh.from_group(data_groups(2), here().type))
    return stage


@in_every_way
@pytest.mark.parametrize("wrap", [ddp, sharded], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("name", SINGLE)
def test_data_parallel_stages(four_ranks: RankPool, name: str, wrap: Any, way: str) -> None:
    four_ranks.run(both, Kind(name, wrap=wrap), way)


@pytest.mark.parametrize("wrap", [ddp, sharded], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("way", ["default", "undo"])
def test_clipping_over_stages_and_shards(four_ranks: RankPool, wrap: Any, way: str) -> None:
    four_ranks.run(both, Kind(wrap=wrap), way, partial(clipped, 0.7), clip=ClipNorm(0.7))


@pytest.mark.parametrize("name", MULTI[1:4])
@pytest.mark.parametrize("way", ["default", *STEPPING])
def test_several_sharded_stages_of_a_rank(four_ranks: RankPool, name: str, way: str) -> None:
    four_ranks.run(both, Kind(name, per_rank=2, wrap=sharded), way)


# Decisions that all stages hear.


@in_every_way
@by_few
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_that_are_left_out(two_ranks: RankPool, kind: Kind, way: str, rank: int) -> None:
    if way == "backward":
        pytest.skip("weights are written before the ranks know")
    two_ranks.run(both, kind, way, partial(skipping, rank), nonfinite="skip")


@pytest.mark.parametrize("way", ["default", "forward", "undo"])
@by_few
@pytest.mark.parametrize("rank", [0, 1])
def test_a_scaler_that_hears_of_all_stages(two_ranks: RankPool, kind: Kind, way: str, rank: int) -> None:
    two_ranks.run(both, replace(kind, scales_loss=True), way, partial(scaled, rank))


@pytest.mark.parametrize("way", WAYS)
def test_without_overlap(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(disabled, way)


def disabled(way: str) -> None:
    os.environ["INSTEP_DISABLE"] = "1"
    try:
        if way == "backward":
            both(KINDS[3], way)
        else:
            both(KINDS[3], way, partial(clipped, 0.7), clip=ClipNorm(0.7))
    finally:
        del os.environ["INSTEP_DISABLE"]


# Errors: every rank that goes on knows.


class RaisesAt(torch.optim.SGD):
    """Gradient descent, one step of which raises on one rank."""

    def __init__(self, parameters: Any, rank: int, at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.rank, self.at = rank, at

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if dist.get_rank() == self.rank and state.get("steps") == self.at:
                    raise MemoryError("in the update")
                state["steps"] = state.get("steps", 0) + 1
                parameter.add_(parameter.grad, alpha=-0.1)


def raising(rank: int, stages: Any) -> list[torch.optim.Optimizer]:
    return [RaisesAt(parameters_in(stages), rank, 2)]


def one_update_raises(kind: Kind, way: str, rank: int) -> tuple[str, str]:
    """What the loop of this rank hears, in the step that fails or in the one after it, and its state then."""
    loop = Loop(replace(kind, optimizers=partial(raising, rank)))
    loop.overlap = attach_to(loop, way)
    for i in range(5):
        try:
            learn(loop, i)
        except Exception as error:
            return f"{type(error).__name__}: {error}", loop.overlap.state
    return "nothing", loop.overlap.state


@by_few
@pytest.mark.parametrize("way", ["backward"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_raises_is_heard_of_on_all_ranks(kind: Kind, way: str, rank: int) -> None:
    pool = RankPool(2, group_seconds=20)
    try:
        heard = pool.run(one_update_raises, kind, way, rank)
    finally:
        pool.stop()
    (failed, failed_state), (other, other_state) = heard[rank], heard[1 - rank]
    assert failed.startswith("MemoryError"), heard
    assert other.startswith("TornStepError"), heard
    assert f"rank {rank}" in other, heard
    assert (failed_state, other_state) == ("torn", "torn"), heard


def one_backward_raises(way: str) -> tuple[str, str, bool]:
    """Stage 0 of rank 0 raises in its last micro-batch, when stage 2, which is there too, has been stepped. What this
    rank hears, its state then, and whether its weights are those before the step."""
    loop = Loop(KINDS[3])
    loop.overlap = attach_to(loop, way)
    raises = itertools.count(1)

    def raise_in_the_last(gradient: torch.Tensor) -> None:
        if next(raises) == 3 * loop.kind.micro_batches:
            raise MemoryError("in backward")

    if dist.get_rank() == 0:
        dict(loop.models[0].named_parameters())["first.weight"].register_hook(raise_in_the_last)
    before: list[torch.Tensor] = []
    for i in range(5):
        before = [p.detach().clone() for p in parameters_in(loop.models)]
        try:
            learn(loop, i)
        except Exception as error:
            said = "; ".join(f"{type(one).__name__}: {one}" for one in causes_of(error))
            state = loop.overlap.state
            return said, state, all(map(torch.equal, before, parameters_in(loop.models)))
    return "nothing", loop.overlap.state, False


@pytest.mark.parametrize("way", STEPPING)
def test_a_backward_that_raises_after_another_stage_was_stepped(way: str) -> None:
    pool = RankPool(2, group_seconds=10)
    try:
        (failed, state, untouched), (other, _, _) = pool.run(one_backward_raises, way)
    finally:
        pool.stop()
    assert "MemoryError: in backward" in failed
    assert (state, untouched) == (("torn", False) if way == "backward" else ("open", True))  # its gradients are there
    assert other != "nothing"
    if way == "backward":  # it had begun to step, and the others hear that it was torn
        assert "TornStepError" in other, other
        assert "rank 0" in other, other


def a_rank_is_killed(kind: Kind, way: str) -> str:
    loop = Loop(kind)
    loop.overlap = attach_to(loop, way)
    for i in range(2):
        learn(loop, i)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for i in range(2, 5):
            learn(loop, i)
    except Exception as error:
        return "; ".join(map(str, causes_of(error)))
    return "nothing"


@by_few
@pytest.mark.parametrize("way", ["backward", "undo"])
def test_a_rank_that_dies_is_heard_of(kind: Kind, way: str) -> None:
    said = RankPool(2, group_seconds=60).run_until_a_rank_dies(0, a_rank_is_killed, kind, way)
    assert said != "nothing"
    assert "Timed out" not in said


def frozen_for_a_while(rank: int, loop: Loop, i: int) -> Any:
    """From the third step to the fifth one rank has nothing to train."""
    if dist.get_rank() == rank:
        for parameter in parameters_in(loop.models):
            parameter.requires_grad_(i not in (2, 3))
    losses = loop.run(i)
    loop.step()
    return losses


@in_every_way
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_trains_nothing_for_a_while(two_ranks: RankPool, way: str, clip: float | None, rank: int) -> None:
    if clip is None or way == "backward":
        two_ranks.run(both, KINDS[1], way, partial(frozen_for_a_while, rank))
    else:
        two_ranks.run(both, KINDS[1], way, partial(frozen_and_clipped, rank, clip), clip=ClipNorm(clip))


def frozen_and_clipped(rank: int, max_norm: float, loop: Loop, i: int) -> Any:
    if dist.get_rank() == rank:
        for parameter in parameters_in(loop.models):
            parameter.requires_grad_(i not in (2, 3))
    return clipped(max_norm, loop, i)


def frozen_from_the_start(way: str) -> None:
    both(replace(KINDS[1], wrap=frozen_on_the_first_rank), way)


def frozen_on_the_first_rank(stage: nn.Module) -> nn.Module:
    return stage.requires_grad_(dist.get_rank() > 0)


@in_every_way
def test_a_rank_that_trains_nothing(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(frozen_from_the_start, way)


def heard_after(mistake: str, way: str) -> str:
    """What this rank hears when rank 0 makes a mistake in the third step, and goes on."""
    loop = Loop(KINDS[1])
    loop.overlap = attach_to(loop, way)
    raises = itertools.count(1)

    def raise_in_the_last(gradient: torch.Tensor) -> None:
        if next(raises) == 3 * loop.kind.micro_batches:
            raise MemoryError("in backward")

    if mistake == "caught" and dist.get_rank() == 0:
        dict(loop.models[0].named_parameters())["first.weight"].register_hook(raise_in_the_last)
    try:
        for i in range(6):
            try:
                loop.run(i)
            except Exception as error:
                if not any(isinstance(one, MemoryError) for one in causes_of(error)):
                    raise
                for optimizer in loop.optimizers:
                    optimizer.zero_grad()
                continue
            if mistake == "left out" and i == 2 and dist.get_rank() == 0:
                for optimizer in loop.optimizers:
                    optimizer.zero_grad()
            else:
                loop.step()
    except Exception as error:
        return "; ".join(f"{type(one).__name__}: {one}" for one in causes_of(error))
    return "nothing"


@pytest.mark.parametrize("mistake", ["caught", "left out"])
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_a_mistake_of_one_rank_is_heard_of(mistake: str, way: str) -> None:
    pool = RankPool(2, group_seconds=8)
    try:
        _, said = pool.run(heard_after, mistake, way)  # the one that was mistaken may wait for the other
    finally:
        pool.stop()
    assert "rank 0 said that this step failed there" in said or "ranks are at different steps" in said


def another_schedule() -> str:
    loop = Loop(KINDS[1])
    loop.overlap = attach_to(loop, "backward")
    learn(loop, 0)
    other = Loop(KINDS[1])
    stage = pipelining._stages_of(loop.pipeline)[0]
    loop.pipeline = Schedule1F1B(stage, 4, loss_fn=other._loss)
    try:
        learn(loop, 1)
    except Exception as error:
        return "; ".join(map(str, causes_of(error)))
    return "nothing"


def test_another_schedule_is_named() -> None:
    pool = RankPool(2, group_seconds=5)
    try:
        said = pool.run(another_schedule)
    finally:
        pool.stop()
    assert any("attach with pipeline= that one" in one for one in said), said


# What is refused, and what a user is told.


def refusals() -> None:
    loop = Loop(KINDS[3])
    first, second = loop.models
    optimizer = loop.optimizers[0]

    def refused(match: str, model: Any, **options: Any) -> None:
        with pytest.raises(AttachError, match=match):
            instep.attach(model, optimizer, **{"pipeline": loop.pipeline, **options})

    refused(r"must be a schedule of torch\.distributed\.pipelining", [first, second], pipeline=loop)
    refused(r"has 2 stages on this rank, and model is 1: .*\[stage\.submod for stage in stages\]", first)
    refused("Linear is none of them", [first, second, nn.Linear(2, 2)])
    refused(
        "accumulation_steps=2 does not go with pipeline: the schedule has micro-batches",
        loop.models,
        accumulation_steps=2,
    )
    two_pass = ClipNorm(1.0, mode="two_pass")
    refused("two_pass.*runs each backward once", loop.models, schedule="backward", clip=two_pass)
    refused("shard_state does not go with pipeline", loop.models, shard_state=True)
    refused(r"undo=True \(exact: [^;]*$", loop.models, schedule="backward", clip=ClipNorm(1.0))
    overlap = instep.attach(loop.models, optimizer, schedule="backward", pipeline=loop.pipeline)
    for call in (overlap.micro_batches, lambda: overlap.backward(torch.ones(1, requires_grad=True).sum(), more=True)):
        with pytest.raises(InstepError, match=r"does not go with pipeline=: ScheduleInterleaved1F1B runs 4"):
            call()


def test_what_is_refused(two_ranks: RankPool) -> None:
    two_ranks.run(refusals)


def without_the_schedule(kind: Kind) -> str:
    loop = Loop(kind)
    instep.attach(loop.models, loop.optimizers, schedule="backward")
    try:
        loop.run(0)
    except Exception as error:
        return "; ".join(map(str, causes_of(error)))
    return "nothing"


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those behind it: torch has one of its own around each that a stage raises."""
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=lambda kind: kind.schedule)
def test_without_the_schedule_the_error_names_it(kind: Kind) -> None:
    pool = RankPool(2, group_seconds=5)
    try:
        said = pool.run(without_the_schedule, kind)
    finally:
        pool.stop()
    assert any("attach(…, pipeline=schedule)" in one for one in said), said


# The life of an attachment.


def detached_and_attached_again(kind: Kind) -> None:
    plain, loop = Loop(kind), Loop(kind)
    for i in range(6):
        if i % 2 == 0:
            loop.overlap = attach_to(loop, "undo" if i == 2 else "backward")
        learn(plain, i)
        learn(loop, i)
        if i % 2:
            loop.overlap.detach()
            methods = (*pipelining.MEETS, *pipelining.BACKWARDS, *pipelining.FINISHES)
            left = [name for stage in pipelining._stages_of(loop.pipeline) for name in methods if name in vars(stage)]
            assert not left
            assert "step" not in vars(loop.pipeline)
        difference = first_difference(plain.state(), loop.state())
        assert difference is None, difference


@by_few
def test_detached_and_attached_again(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(detached_and_attached_again, kind)


def evaluated_in_between(loop: Loop, i: int) -> Any:
    losses = learn(loop, i)
    if i == 1:
        x = torch.ones(ROWS * loop.kind.micro_batches, WIDTH, device=here())
        target = torch.zeros(len(x), dtype=torch.int64, device=here())
        losses = loop.pipeline.eval(*([x] if loop.is_first else []), **({"target": target} if loop.is_last else {}))
    return losses


@in_every_way
@pytest.mark.parametrize("kind", FEW[:2], ids=lambda kind: kind.schedule)  # torch cannot evaluate the V-shaped ones
def test_evaluations(two_ranks: RankPool, kind: Kind, way: str) -> None:
    two_ranks.run(both, kind, way, evaluated_in_between)


def nothing_is_kept(kind: Kind) -> None:
    loop = Loop(kind)
    loop.overlap = attach_to(loop, "backward")
    for i in range(3):
        learn(loop, i)
    weights = [weakref.ref(p) for model in loop.models for p in model.parameters()]
    loop.overlap = None
    del loop
    gc.collect()  # torch's own schedule and stages refer to each other
    assert not [ref for ref in weights if ref() is not None]


def resumed(kind: Kind, way: str) -> None:
    """Each rank saves what it has with torch, and a new loop goes on from there."""
    loop, resumed = Loop(kind), Loop(kind)
    loop.overlap = attach_to(loop, way)
    for i in range(3):
        learn(loop, i)
    saved = io.BytesIO()
    models, optimizers = loop.models, loop.optimizers
    torch.save([[one.state_dict() for one in models], [one.state_dict() for one in optimizers]], saved)
    saved.seek(0)
    states, optimizer_states = torch.load(saved, weights_only=True)
    resumed.overlap = attach_to(resumed, way)
    for model, state in zip(resumed.models, states, strict=True):
        model.load_state_dict(state)
    for optimizer, state in zip(resumed.optimizers, optimizer_states, strict=True):
        optimizer.load_state_dict(state)
    for i in range(3, 6):
        learn(loop, i)
        learn(resumed, i)
        difference = first_difference(loop.state(), resumed.state())
        assert difference is None, difference


@in_every_way
@by_few
def test_resumed_training(two_ranks: RankPool, kind: Kind, way: str) -> None:
    two_ranks.run(resumed, kind, way)


def checkpointed(kind: Kind, way: str, directory: str) -> None:
    """All stages are in one checkpoint, of which a loop that has trained on other data takes what it has. (The first
    iteration of a new ``DistributedDataParallel`` in a stage differs in the last bit in plain torch, too. A parameter
    that has never been used has state after torch's load alone, which updates nothing.)"""
    group = pipelines_of(kind)
    loop, resumed = Loop(kind, group), Loop(kind, group)
    loop.overlap = attach_to(loop, way)
    for i in range(3):
        learn(loop, i)
    saved.save(directory, saved.stages_of(loop.overlap), loop.optimizers, loop.overlap)
    resumed.overlap = attach_to(resumed, way)
    learn(resumed, 9)
    saved.load(directory, saved.stages_of(resumed.overlap), resumed.optimizers, resumed.overlap)
    for i in range(3, 6):
        learn(loop, i)
        learn(resumed, i)
        whole, found = dict(loop.state()), dict(resumed.state())
        difference = first_difference(iter(whole.items()), ((name, found.get(name)) for name in whole))
        assert difference is None, difference
    assert resumed.overlap.step_count == 6


@in_every_way
@by_few
def test_one_checkpoint_of_all_stages(two_ranks: RankPool, kind: Kind, way: str, tmp_path: Path) -> None:
    two_ranks.run(checkpointed, kind, way, str(tmp_path))


@pytest.mark.parametrize("wrap", [ddp, sharded], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("per_rank", [1, 2])
def test_one_checkpoint_of_stages_on_several_ranks(
    four_ranks: RankPool, wrap: Any, per_rank: int, tmp_path: Path
) -> None:
    kind = Kind("ScheduleInterleaved1F1B" if per_rank > 1 else "Schedule1F1B", per_rank=per_rank, wrap=wrap)
    four_ranks.run(checkpointed, kind, "backward", str(tmp_path))


def of_a_longer_one() -> None:
    """torch would read the stages that have a name here, and leave out the rest."""
    loop = Loop(Kind())
    loop.overlap = attach_to(loop, "backward")
    learn(loop, 0)
    state = loop.overlap.state_dict()
    assert state["stages"] == 2
    with pytest.raises(CheckpointError, match="is of a pipeline of 4 stages, and this one has 2"):
        loop.overlap.load_state_dict({**state, "stages": 4})
    loop.overlap.load_state_dict(state)


def test_a_checkpoint_of_a_longer_pipeline_is_refused(two_ranks: RankPool) -> None:
    two_ranks.run(of_a_longer_one)


def copied(kind: Kind) -> None:
    """A copy of the schedule is a plain one."""
    loop, other = Loop(kind), Loop(kind)
    loop.overlap = attach_to(loop, "backward")
    other.pipeline = copy.deepcopy(loop.pipeline)
    learn(loop, 0)
    before = [p.detach().clone() for p in parameters_in(loop.models)]
    other.run(1)
    assert all(map(torch.equal, before, parameters_in(loop.models)))
    stages = pipelining._stages_of(other.pipeline)
    assert all(p.grad is not None for p in stages[0].submod.first.parameters())


@by_few
def test_a_copy_of_the_schedule(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(copied, kind)


@by_few
def test_nothing_keeps_the_model(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(nothing_is_kept, kind)


def names_of_torch(kind: Kind) -> None:
    """What ``_torch/pipelining.py`` relies on, which has no public name."""
    loop = Loop(kind)
    stages = pipelining._stages_of(loop.pipeline)
    assert [stage.submod for stage in stages] == loop.models
    assert loop.pipeline._n_microbatches == kind.micro_batches
    calls: list[tuple[str, bool]] = []

    def noted(name: str, call: Any, options: Any) -> Any:
        calls.append((name, bool(options.get("last_backward"))))
        return call()

    for stage in stages:
        for name in (*pipelining.MEETS, *pipelining.BACKWARDS):
            assert callable(getattr(stage, name)), f"a stage of torch has no {name}"
        for name in (*pipelining.MEETS, *pipelining.BACKWARDS, *pipelining.FINISHES):
            if hasattr(stage, name):
                pipelining.StageCall(stage, name, partial(noted, name))
    loop.run(0)
    last = [number for number, (_, is_last) in enumerate(calls) if is_last]
    assert len(last) == len(stages), "last_backward=True comes once for each stage, by name"
    if hasattr(stages[0], pipelining.FINISHES[0]):
        finished = [number for number, (name, _) in enumerate(calls) if name in pipelining.FINISHES]
        assert all(any(after > number for after in finished) for number in last), "nothing comes after it"


@by_schedule
def test_the_names_of_torch(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(names_of_torch, kind)
