"""``TornStepError`` tells the truth of each parameter, on the rank whose update stops and on the others."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import InstepError, TornStepError
from tests.cases import Blocks
from tests.distributed.loops import loss_of
from tests.distributed.pool import RankPool
from tests.stopping import LEFT, Stops, require_true

BUCKET_MIB = 0.004


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True)


def _replicated(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=BUCKET_MIB)


BACKWARD: dict[str, Any] = {"schedule": "backward"}
FORWARD: dict[str, Any] = {"schedule": "forward", "defer": True}
WAYS: Mapping[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    "ddp, backward": (_ddp, BACKWARD),
    "ddp, forward": (_ddp, FORWARD),
    "ddp, across": (_ddp, {**FORWARD, "cross_iteration": True}),
    "replicate, backward": (_replicated, BACKWARD),
    "shard_state, backward": (_ddp, {**BACKWARD, "shard_state": True}),
    "shard_state, forward": (_ddp, {**FORWARD, "shard_state": True}),
}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = _ddp(Blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(steps):
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def stopped(way: str, left: int) -> str | None:
    """The first rank's update stops in the second step. Returns what this rank was told of it."""
    old, new = plain(1), plain(2)
    wrap, options = WAYS[way]
    torch.manual_seed(0)
    model = wrap(Blocks())
    optimizer = Stops(model.parameters(), lr=0.1)
    with patch.object(instep.options, "DEFAULT_BUCKET_BYTES", 4_000):  # of updates that are put off
        overlap = instep.attach(model, optimizer, **options)
    told: TornStepError | None = None
    for i in range(2):
        if i == 1 and dist.get_rank() == 0:
            LEFT["parameters"] = left
        with suppress(ZeroDivisionError, InstepError):  # the very error; or another rank's
            loss_of(model, i).backward()
            optimizer.step()
            overlap.synchronize()
            optimizer.zero_grad()
    LEFT.clear()
    for _ in range(2):  # the first may raise what has stopped the step
        try:
            loss_of(model, 2)
        except TornStepError as error:
            told = error
        except (ZeroDivisionError, InstepError):
            pass
    with torch._C.DisableTorchFunctionSubclass():
        found = values(model)
    if told is not None:
        named = {name.removeprefix("module.") for name in (*told.applied, *told.pending, *told.unsure)}
        assert named
        words = [
            [name.removeprefix("module.") for name in names] for names in (told.applied, told.pending, told.unsure)
        ]
        require_true(TornStepError(2, words[0], words[1], told.rank, None, words[2]), found, old, new)
    return None if told is None else str(told)


@pytest.mark.parametrize("left", [0, 3, 6])
@pytest.mark.parametrize("way", WAYS)
def test_each_parameter_is_what_its_list_says(way: str, left: int) -> None:
    """Ranks of their own: what has stopped half way may leave collectives that nobody waits for."""
    pool = RankPool(2)
    try:
        first, _ = pool.run(stopped, way, left)
    finally:
        pool.stop()
    assert first is not None
