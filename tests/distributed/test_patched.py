"""Optimizer objects whose ``step`` was replaced, with a method that steps one parameter, on ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.distributed.pool import RankPool
from tests.parity.patched import with_step_param, with_step_parameter

PATCHES = {"step_param": with_step_param, "step_parameter": with_step_parameter}


def body(name: str, options: dict[str, object]) -> str | None:
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks(), bucket_cap_mb=0.004)
        loops.append((model, PATCHES[name](model)))
    with instep.attach(*loops[1], **options) as overlap:  # type: ignore[arg-type]
        for i in range(4):
            for model, optimizer in loops:
                x, y = batch(100 * dist.get_rank() + i)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            overlap.synchronize()
            difference = first_difference(*(training_state(*loop) for loop in loops))
            if difference is not None:
                return f"step {i}: {difference}"
    return None


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize(
    "options",
    [{"schedule": "backward"}, {"schedule": "backward", "undo": True}, {"schedule": "forward", "defer": True}],
    ids=["backward", "undo", "forward"],
)
def test_under_ddp(two_ranks: RankPool, name: str, options: dict[str, object]) -> None:
    assert two_ranks.run(body, name, options) == [None] * 2
