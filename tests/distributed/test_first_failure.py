"""The first communication that fails is the last one that is waited for: once a rank is lost, each takes as long as the
process group waits, and three of them one after the other take three times as long as was promised."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._ranks import step_ranks, vote
from instep._ranks.process_groups import communicating, is_lost
from instep.errors import TornStepError
from instep.sources.zero.shards import GatheredShards
from tests.cases import Blocks
from tests.distributed.loops import loss_of, train
from tests.distributed.pool import RankPool


class LostError(RuntimeError):
    """What a collective raises whose peer is gone."""


class Lost:
    """A collective that fails, and the future of it."""

    waits = 0

    def wait(self, *_: Any) -> None:
        Lost.waits += 1
        raise LostError("gone")

    def get_future(self) -> "Lost":
        return self


def lost_from(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Of the collectives that are started, those from ``number`` on fail. Ranks start the same ones."""
    calls = iter(range(1000))
    Lost.waits = 0
    return lambda *args, **kwargs: real(*args, **kwargs) if next(calls) < number else Lost()


def replicated(options: dict[str, Any] | None, number: int) -> bool:
    """Returns whether the backward came to so many collectives."""
    torch.manual_seed(0)
    model = instep.replicate(Blocks(), bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    overlap = None if options is None else instep.attach(model, optimizer, **options)
    train(model, optimizer, range(1))
    loss = loss_of(model, 1)
    with patch.object(dist, "all_reduce", lost_from(dist.all_reduce, number)), suppress(LostError):
        loss.backward()
    if overlap is not None:
        overlap.accept_torn()
        overlap.detach()
    if Lost.waits:
        assert is_lost(model.process_group)
    assert Lost.waits <= 1
    return bool(Lost.waits)


def each_replicated(options: dict[str, Any] | None) -> list[bool]:
    return [replicated(options, number) for number in range(8)]


@pytest.mark.parametrize("options", [None, {"schedule": "backward"}, {"schedule": "backward", "undo": True}], ids=str)
def test_replicate_waits_for_nothing_after_it(options: dict[str, Any] | None) -> None:
    pool = RankPool(2)
    try:
        for found in pool.run(each_replicated, options):
            assert found[:3] == [True] * 3  # more buckets than are in flight at once
            assert not found[-1]
    finally:
        pool.stop()


def sharded(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Blocks(), bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with patch.object(instep.options, "DEFAULT_BUCKET_BYTES", 4_000):  # of updates that are put off
        overlap = instep.attach(model, optimizer, shard_state=True, **options)
    train(model, optimizer, range(1))
    overlap.synchronize()
    return model, optimizer, overlap


def rows_are_lost(options: dict[str, Any]) -> None:
    """The second bucket's rows do not arrive."""
    model, optimizer, overlap = sharded(options)
    real, waits = GatheredShards.wait, []

    def wait(self: GatheredShards) -> None:
        waits.append(self)
        if len(waits) == 2:
            raise LostError("gone")
        real(self)

    def step() -> None:
        train(model, optimizer, range(1, 2))
        overlap.synchronize()

    with patch.object(GatheredShards, "wait", wait):
        with pytest.raises(LostError if options["schedule"] == "backward" else TornStepError):
            step()
        with pytest.raises(TornStepError) as torn:
            loss_of(model, 2)
    assert len(waits) == 2
    assert isinstance(torn.value.__cause__, LostError)
    assert torn.value.applied
    assert torn.value.unsure
    overlap.accept_torn()


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_rows_that_do_not_arrive(schedule: str) -> None:
    pool = RankPool(2)
    try:
        pool.run(rows_are_lost, {"schedule": schedule})
    finally:
        pool.stop()


def vote_is_lost() -> None:
    """Nothing is written, nor sent: no rank waits for rows once it could not hear whether there is a step."""
    model, optimizer, overlap = sharded({"schedule": "forward"})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sent: list[Any] = []
    loss_of(model, 1).backward()

    def step() -> None:
        optimizer.step()
        overlap.synchronize()

    with (
        patch.object(vote.Vote, "verdict", Lost.wait),
        patch.object(dist, "all_gather", lambda *args, **kwargs: sent.append(args)),
        pytest.raises(TornStepError) as torn,
    ):
        step()
    assert not sent
    assert isinstance(torn.value.__cause__, LostError)
    assert len(torn.value.pending) == len(before)
    assert overlap.state == "torn"
    with torch._C.DisableTorchFunctionSubclass():
        assert all(map(torch.equal, before, model.parameters()))
    overlap.accept_torn()


def test_a_vote_that_is_lost() -> None:
    pool = RankPool(2)
    try:
        pool.run(vote_is_lost)
    finally:
        pool.stop()


class Unanswered:
    """A vote that some rank does not answer."""

    def __init__(self) -> None:
        self.waits = 0

    def is_completed(self) -> bool:
        return False

    def wait(self, *_: Any) -> None:
        self.waits += 1
        raise LostError("gone")


def at_exit() -> tuple[int, int]:
    """How often the end of the process waits for a vote, before a communication is lost and after it."""
    group = dist.group.WORLD
    assert group is not None
    neighbours = step_ranks.neighbours_of([SimpleNamespace(process_group=group)], ())
    assert neighbours is not None
    ranks = step_ranks.StepRanks(neighbours, [{}, {}], "model", waits=True, matters=True)
    ranks.open()
    beside, unanswered = ranks.open(), Unanswered()
    counts = []
    for is_gone in (False, True):
        if is_gone:
            with suppress(LostError), communicating(group):
                raise LostError("gone")
        with patch.object(beside, "_last", unanswered):
            references = sys.getrefcount(beside._gloo)
            vote._finish_sending()
            assert sys.getrefcount(beside._gloo) == references + 1  # its own end would wait, too
        counts.append(unanswered.waits)
    return counts[0], counts[1]


def test_the_end_of_the_process() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(at_exit) == [(1, 1)] * 2
    finally:
        pool.stop()
