"""``attach(…, pipeline=)``: the weights, state, losses and norms of the schedule followed by ``optimizer.step()``."""

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from instep import ClipNorm
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
    skipping,
    train_both,
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
    assert loop.overlap.stats()["freed_bytes"] == 5 * sum(p.numel() * p.element_size() for p in trained)


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
    pool.run(
        both,
        Kind("ScheduleInterleaved1F1B", ranks, 2, micro_batches=ranks),
        "undo",
        partial(clipped, 0.7),
        clip=ClipNorm(0.7),
    )


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
        clip = {} if way == "backward" else {"clip": ClipNorm(0.7)}
        both(KINDS[3], way, partial(clipped, 0.7) if clip else learn, **clip)
    finally:
        del os.environ["INSTEP_DISABLE"]
