"""Recordings of two ranks: one file, with what was on its way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.report.figures import figures
from instep.report.run import Run, load
from tests.cases import Blocks
from tests.distributed.pool import RankPool

BUCKETS = 4  # about
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "crossing": {"schedule": "forward", "defer": True, "cross_iteration": True},
    "zero": {"schedule": "backward", "shard_state": True},
}


def body(how: str, wrapper: str, path: Path) -> None:
    torch.manual_seed(0)
    model: Any = Blocks(width=64)
    if wrapper == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        nbytes = sum(p.numel() * 4 for p in model.parameters())
        model = DistributedDataParallel(model, bucket_cap_mb=nbytes / BUCKETS / 2**20, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    overlap = None if how == "plain" else instep.attach(model, optimizer, **HOW[how])

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(3)
    with instep.record(model, optimizer, 3) as recording:
        train(4)
    recording.save(path)
    if overlap is not None:
        overlap.synchronize()
        overlap.detach()


def recorded(pool: RankPool, how: str, wrapper: str, path: Path) -> Run:
    pool.run(body, how, wrapper, path)
    return load(path)


@pytest.mark.parametrize("how", HOW)
def test_ddp(two_ranks: RankPool, how: str, tmp_path: Path) -> None:
    run = recorded(two_ranks, how, "ddp", tmp_path / "run.json")
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert (run.job.ranks, run.setup.wrapper, run.setup.bucket_view) == (2, "DistributedDataParallel", True)
    assert run.ranks[0].memory.alive["DDP's buckets of gradients"] == run.setup.nbytes["gradients"]
    for rank in run.ranks:
        assert len(rank.iterations) == 3
        sent = [span for span in rank.spans if span.kind == "communication"]
        assert {span.thread for span in sent}.isdisjoint({rank.main})
        # Nor votes: a step has one, of a few integers.
        if how != "zero":
            assert len(sent) >= 3 * (BUCKETS - 1)
            assert all("all_reduce" in span.name for span in sent), sorted({span.name for span in sent})
            assert how == "crossing" or all(float(span.name.split()[1]) > 1 for span in sent)
    first, second = (rank.iterations[0][0] for rank in run.ranks)
    assert abs(first - second) < 20, "on one clock"
    found = figures(run)
    assert 0 <= found.communication.exposed <= found.communication.total
    assert found.communication.total > 0
    assert len(found.by_rank) == 2
    if how in ("backward", "crossing"):
        assert len(found.buckets) >= BUCKETS - 1
        assert all(bucket.flight is not None and bucket.step > 0 for bucket in found.buckets)


def test_a_sharded_model(two_ranks: RankPool, tmp_path: Path) -> None:
    run = recorded(two_ranks, "backward", "fsdp", tmp_path / "run.json")
    assert run.setup.wrapper == "DTensor"
    found = figures(run)
    assert found.communication.total > 0
    assert found.step.total > 0
    kinds = {span.name.split(",")[0] for span in run.ranks[1].spans if span.kind == "communication"}
    assert kinds == {"all_gather", "all_reduce"}, "gloo scatters by reducing all"


def test_a_job_is_the_same_in_any_wrapper(two_ranks: RankPool, tmp_path: Path) -> None:
    ddp, fsdp = (recorded(two_ranks, "plain", wrapper, tmp_path / f"{wrapper}.json").job for wrapper in ("ddp", "fsdp"))
    assert ddp == fsdp
    assert (ddp.model, ddp.ranks, ddp.batch) == ("Blocks", 2, ("(8, 16) float32",))
