"""``attach(…, pipeline=)``: the weights, state, losses and norms of the schedule followed by ``optimizer.step()``."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from instep import ClipNorm, ClipValue
from tests.devices import here
from tests.distributed.pipelines import (
    MULTI,
    SINGLE,
    WAYS,
    Kind,
    Loop,
    accumulated,
    both,
    by_momentum,
    clipped,
    data_groups,
    learn,
    one_of_each,
    scaled,
    train_both,
    with_nan,
)
from tests.distributed.pool import RankPool

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


def learn_and_look(loop: Loop, i: int) -> Any:
    losses = loop.run(i)
    if loop.overlap is not None:
        assert loop.overlap.state == "open"
    loop.step()
    return losses


def freed(kind: Kind) -> None:
    loop = train_both(kind, "backward", learn_and_look)
    trained = [p for optimizer in loop.optimizers for p in optimizer.state]
    assert loop.overlap.stats()["freed_bytes"] == 4 * sum(p.numel() * p.element_size() for p in trained)


@by_schedule
def test_gradients_are_freed_in_the_run(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(freed, kind)


def on_trial(kind: Kind) -> None:
    loop = train_both(kind, "undo", learn_and_look, clip=ClipNorm(math.inf))
    assert loop.overlap.redo_count == 0


@by_schedule
def test_stages_are_stepped_on_trial(two_ranks: RankPool, kind: Kind) -> None:
    two_ranks.run(on_trial, kind)


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


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(request: pytest.FixtureRequest, ranks: int) -> None:
    pool = request.getfixturevalue("three_ranks" if ranks == 3 else "four_ranks")
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        pool.run(both, Kind(name, ranks, micro_batches=5), "backward")
    pool.run(both, Kind("ScheduleInterleaved1F1B", ranks, 2, micro_batches=ranks), "undo", partial(clipped, 0.7), clip=ClipNorm(0.7))


# Data parallelism in each stage: two pipelines of two ranks.


def ddp(stage: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(stage, process_group=data_groups(2), find_unused_parameters=True, **options)


def sharded(stage: nn.Module) -> nn.Module:
    for one in (stage.first, stage.second):
        fully_shard(one, mesh=DeviceMesh.from_group(data_groups(2), here().type))  # type: ignore[arg-type]
    return fully_shard(stage, mesh=DeviceMesh.from_group(data_groups(2), here().type))


@in_every_way
@pytest.mark.parametrize("wrap", [ddp, sharded], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("name", SINGLE)
def test_data_parallel_stages(four_ranks: RankPool, name: str, wrap: Any, way: str) -> None:
    four_ranks.run(both, Kind(name, wrap=wrap), way)
