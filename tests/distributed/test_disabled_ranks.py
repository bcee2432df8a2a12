"""``INSTEP_DISABLE=1`` on all ranks, beside a loop that does by itself what ``attach`` is told."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.distributed.pool import RankPool

MAX_NORM, MICRO = 0.05, 3


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.004)


def sharded(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


KINDS = {"ddp": in_ddp, "fsdp2": sharded}


class Loop:
    """Micro-batches in ``no_sync``, clipping, and steps left out where one rank's loss is infinite."""

    def __init__(self, kind: str, held_by: str, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.kind, self.held_by, self.plain = kind, held_by, options is None
        self.model: Any = KINDS[kind](Blocks())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.overlap = None if options is None else instep.attach(self.model, self.optimizer, **options)

    def holding(self, micro: int) -> Any:
        if self.kind == "fsdp2" and self.plain:
            self.model.set_requires_gradient_sync(micro == MICRO - 1)
        elif self.plain and micro < MICRO - 1:
            return self.model.no_sync()
        elif self.overlap is not None and self.held_by == "accumulate" and micro < MICRO - 1:
            return self.overlap.accumulate()
        return nullcontext()

    def step(self, i: int) -> None:
        infinite = i == 1 and dist.get_rank() == 1
        for micro in range(MICRO):
            with self.holding(micro):
                x, y = batch(100 * dist.get_rank() + MICRO * i + micro)
                (nn.functional.cross_entropy(self.model(x), y) * (torch.inf if infinite else 1)).backward()
        if self.plain and i != 1:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        if not self.plain or i != 1:
            self.optimizer.step()
        self.optimizer.zero_grad()


def body(kind: str, held_by: str) -> str | None:
    options: dict[str, Any] = {
        "schedule": "backward",
        "clip": instep.ClipNorm(MAX_NORM),
        "undo": True,
        "nonfinite": "skip",
    }
    if held_by == "accumulation_steps":
        options["accumulation_steps"] = MICRO
    with patch.dict("os.environ", INSTEP_DISABLE="1"):
        plain, disabled = Loop(kind, held_by, None), Loop(kind, held_by, options)
    assert disabled.overlap is not None
    for i in range(4):
        plain.step(i)
        disabled.step(i)
        difference = first_difference(
            training_state(plain.model, plain.optimizer), training_state(disabled.model, disabled.optimizer)
        )
        if difference is not None:
            return f"step {i}: {difference}"
    counts = disabled.overlap.step_count, disabled.overlap.skip_count
    disabled.overlap.detach()
    return None if counts == (3, 1) else f"counted {counts}"


@pytest.mark.parametrize("held_by", ["accumulate", "accumulation_steps"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_plain_loop(two_ranks: RankPool, kind: str, held_by: str) -> None:
    assert two_ranks.run(body, kind, held_by) == [None] * 2
