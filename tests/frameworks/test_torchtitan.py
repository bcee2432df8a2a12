"""torchtitan's training step in a few lines, over ``fully_shard``: accumulation, its own clipping over the mesh, and a
schedule of the learning rate for each step."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.cases import batch
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, both, nested
from tests.frameworks.comparing import optional

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

MICRO_BATCHES = 2
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("forward", {"defer": "auto"}),
    "forward": ("forward", {}),
    "undo": ("undo", {}),
    "together": ("backward", {}),  # without clipping: two passes are refused over fully_shard
}
"""By name: that of ``both``, and options beside it."""


def train_step(way: str, loop: Loop, i: int) -> torch.Tensor:
    utils = optional("torchtitan.distributed.utils")
    model: Any = loop.model
    if i == 0:
        loop.schedule = LambdaLR(loop.optimizer, lambda step: 1.0 / (1 + step))  # type: ignore[attr-defined]
    loop.optimizer.zero_grad()
    losses = []
    for micro in range(MICRO_BATCHES):
        x, y = batch(100 * torch.distributed.get_rank() + MICRO_BATCHES * i + micro)
        more = micro < MICRO_BATCHES - 1
        if way == "together":
            model.set_requires_gradient_sync(not more)
        loss = nn.functional.cross_entropy(model(x), y) / MICRO_BATCHES
        if loop.overlap is None or way != "together":
            loss.backward()
        else:
            loop.overlap.backward(loss, more=more)
        losses.append(loss.detach())
    if way != "together":
        utils.clip_grad_norm_(list(model.parameters()), 0.5, foreach=True)
    loop.optimizer.step()
    loop.schedule.step()  # type: ignore[attr-defined]
    return torch.stack(losses)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(way: str) -> None:
    name, options = WAYS[way]
    both(name, nested, adamw, partial(train_step, way), steps=4, **options)


@pytest.mark.parametrize("way", WAYS)
def test_train_step(two_ranks: RankPool, way: str) -> None:
    optional("torchtitan.distributed.utils")
    two_ranks.run(train, way)
