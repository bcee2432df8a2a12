"""A loop under DDP with ``shard_state=True``, beside the same loop without instep."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.cases import Blocks, two_groups, weights
from tests.devices import here
from tests.distributed.sharded import Loop, Step
from tests.late import late_updates

WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "late": {"schedule": "forward", "defer": True},
}


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    device = here()
    return DistributedDataParallel(model.to(device), **{"bucket_cap_mb": 0.004, **options})


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, **options)


def flat(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    saved = optimizer.state_dict()
    for number, entry in saved["state"].items():
        for key, value in entry.items():
            assert not isinstance(value, DTensor)
            yield f"{number}.{key}", value
    yield "groups", str(saved["param_groups"])


def same(plain: Any, other: Any) -> str | None:
    a, b = dict(flat(plain)), dict(flat(other))
    if a.keys() != b.keys():
        return f"{a.keys() ^ b.keys()}"
    for key, value in a.items():
        equal = torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        if not equal:
            return f"{key}: {value} and {b[key]}"
    return None


def both(
    way: str,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    step: Step = Loop.learn,
    build: Callable[[], nn.Module] = Blocks,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    steps: int = 5,
    equal: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
    **options: Any,
) -> Loop:
    # Both receive into DDP's buckets: one since it hands out no gradients, the other since these are views of them.
    wrap = wrap or partial(ddp, gradient_as_bucket_view=way != "backward")
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = wrap(build())
        loops.append(Loop(model, make_optimizer(model)))
    plain, loop = loops
    loop.overlap = instep.attach(loop.model, loop.optimizer, shard_state=True, **{**WAYS[way], **options})
    with late_updates() if way == "late" else nullcontext():
        for i in range(steps):
            expected, found = step(plain, i), step(loop, i)
            if isinstance(expected, torch.Tensor):
                assert equal(expected, found), f"iteration {i}: {expected} and {found}"
            if way == "late" and i < steps - 1:
                continue
            loop.overlap.synchronize()
            for (name, _), a, b in zip(
                plain.model.named_parameters(), weights(plain.model), weights(loop.model), strict=True
            ):
                assert equal(a, b), f"iteration {i}: {name}"
            if equal is torch.equal:
                difference = same(plain.optimizer, loop.optimizer)
                assert difference is None, f"iteration {i}: {difference}"
    assert loop.overlap.step_count == steps
    loop.overlap.detach()
    if equal is torch.equal:
        for i in range(2):  # the optimizer is a plain one again
            step(plain, steps + i)
            loop.overlap = None
            step(loop, steps + i)
            assert all(map(torch.equal, weights(plain.model), weights(loop.model)))
    return loop


def saved(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    return loop.model.state_dict()["module.blocks.2.3.weight"].clone()
