"""FSDP2's ``set_manual_backward_finalization``, of torch 2.15: the loop says where backward's reductions end."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.cases import two_groups
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, both, in_every_way, nested

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"),
    reason="this torch's FSDP2 has no set_manual_backward_finalization",
)


def finalized_by_hand(model: Any) -> nn.Module:
    model = nested(model)
    model.set_manual_backward_finalization(True)
    return model


def step(loop: Loop, i: int, asynchronous: bool, micro_batches: int) -> None:
    for number in range(micro_batches):
        loop.model.set_requires_gradient_sync(number == micro_batches - 1)
        loop.backward(micro_batches * i + number)
    handle = loop.model.finalize_backward(async_op=asynchronous)
    if handle is not None:
        handle.wait()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, foreach=True)


def compare(way: str, asynchronous: bool, micro_batches: int) -> None:
    both(way, finalized_by_hand, adamw, partial(step, asynchronous=asynchronous, micro_batches=micro_batches))


@in_every_way
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_finalized_by_hand(two_ranks: RankPool, way: str, asynchronous: bool, micro_batches: int) -> None:
    two_ranks.run(compare, way, asynchronous, micro_batches)
