"""A list of modules on ranks: each in its own ``DistributedDataParallel``; and what is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import instep
from instep.errors import AttachError
from instep_tools.harness import first_difference
from tests.cases import Blocks, batch
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import loss_of, nested

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
}


def wrapped(wrap: str, view: bool) -> nn.Module:
    model = Blocks(depth=1).to(here())
    if wrap == "replicate":
        return instep.replicate(model, bucket_cap_mb=0.004)
    return DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=view)


def compare(wrap: str, way: str, view: bool, together: bool) -> str | None:
    rank = dist.get_rank()
    lanes: list[tuple[Any, Any, torch.optim.Optimizer, Any]] = []
    for attach in (False, True):
        torch.manual_seed(0)
        first, second = wrapped(wrap, view), wrapped(wrap, view)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
        overlap = instep.attach([first, second], optimizer, **WAYS[way]) if attach else None
        lanes.append((first, second, optimizer, overlap))
    for i in range(5):
        for first, second, optimizer, overlap in lanes:
            x, y = (t.to(here()) for t in batch(1000 * rank + i))
            with overlap.keep_gradients() if overlap is not None and i == 3 else nullcontext():
                if together:
                    (loss_of(first(x), y) + loss_of(second(x), y)).backward()
                else:
                    loss_of(first(x) if i % 2 else second(x), y).backward()
            if i == 3:
                clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
            optimizer.step()
            optimizer.zero_grad()
    lanes[1][3].synchronize()
    if lanes[1][3].step_count != 5:
        return f"{lanes[1][3].step_count} steps"
    lanes[1][3].detach()
    states = (
        ((f"{place}.{name}", p.detach()) for place, m in enumerate(lane[:2]) for name, p in m.named_parameters())
        for lane in lanes
    )
    return first_difference(*states)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("wrap", "view"), [("ddp", False), ("ddp", True), ("replicate", False)])
def test_each_in_a_wrapper_of_its_own(two_ranks: RankPool, wrap: str, view: bool, way: str, together: bool) -> None:
    assert two_ranks.run(compare, wrap, way, view, together) == [None, None]


def refused(make: Callable[[nn.Module], nn.Module], options: dict[str, Any]) -> str:
    models = [make(Blocks(depth=1)), make(Blocks(depth=1))]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    with pytest.raises(AttachError) as error:
        instep.attach(models, optimizer, **options)
    assert not any(map(instep.attached, models))
    return str(error.value)


def test_a_sharded_one_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(refused, nested, {"defer": True}):
        assert "model is a list, and FSDP shards one of its modules" in message


def test_shard_state_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(refused, DistributedDataParallel, {"shard_state": True}):
        assert "shard_state=True" in message
