"""Of a model on several ranks that is dropped, at any point of a step, no more is left than of the plain loop's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.cases import Blocks
from tests.distributed.pool import RankPool
from tests.distributed.sharded import nested
from tests.living import POINTS, Made, survivors


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)


def replicated(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=0.004)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "replicate": replicated, "fsdp2": nested}
OPTIONS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "forward": {"schedule": "forward", "defer": True},
    "clipped": {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(1.0)},
    "shard_state": {"schedule": "backward", "shard_state": True},
    "shard_state forward": {"shard_state": True, "schedule": "forward", "defer": True},
    "comm_hook": {"schedule": "backward", "comm_hook": None},
}
CASES = [
    (wrapper, way)
    for wrapper in WRAPPERS
    for way in OPTIONS
    if wrapper == "ddp" or way in ("backward", "undo", "forward", "clipped")
]


def plain_mean(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return instep.comm_hooks.mean_allreduce(bucket.buffer(), torch.distributed.group.WORLD, 2)  # type: ignore[arg-type]  # there is one


def make(wrapper: str, way: str | None) -> Made:
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if way is None:
        return model, optimizer, None
    options = {**OPTIONS[way]}
    if way == "comm_hook":
        options["comm_hook"] = (None, plain_mean)
    return model, optimizer, instep.attach(model, optimizer, **options)


def body(wrapper: str, way: str, point: str) -> dict[str, list[str]]:
    """What is left of the attached loop, and not of the plain one."""
    found = {}
    for how, options in (("count", {}), ("kept", {"keep": True}), ("collector", {"collect": True})):
        plain = survivors(lambda: make(wrapper, None), point, **options)
        left = survivors(lambda: make(wrapper, way), point, **options)
        found[how] = sorted(set(left) - set(plain))
    return found


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("wrapper", "way"), CASES)
def test_no_more_is_left_than_of_the_plain_loop(two_ranks: RankPool, wrapper: str, way: str, point: str) -> None:
    assert two_ranks.run(body, wrapper, way, point) == [{"count": [], "kept": [], "collector": []}] * 2
