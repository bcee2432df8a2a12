"""A loop under DDP that steps in backward, beside plain DDP, in the same ranks."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import batch, optimizer_cases, two_groups
from tests.devices import here
from tests.distributed.pool import RankPool

OPTIMIZERS = {name: (cls, kwargs) for name, cls, kwargs in optimizer_cases()}


def blocks_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x.to(here())).float(), y.to(here()))


def compare(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    optimizer: str,
    ddp_options: dict[str, Any],
    *,
    groups: bool = True,
    steps: int = 4,
    micro_batches: int = 1,
    ignored: tuple[str, ...] = (),
    scheduler: bool = True,
) -> str | None:
    """Run both loops on this rank. The first difference in words, with the step it was found after."""
    rank = torch.distributed.get_rank()
    cls, kwargs = OPTIMIZERS[optimizer]

    def build(attach: bool) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
        torch.manual_seed(0)
        inner = make().to(here())
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, list(ignored))
        model = DistributedDataParallel(inner, **ddp_options)
        opt = cls(two_groups(model) if groups else model.parameters(), **kwargs)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1 / (1 + e)) if scheduler else None
        overlap = instep.attach(model, opt, schedule="backward") if attach else None

        def step(i: int) -> None:
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                hold = contextlib.nullcontext() if last else overlap.accumulate() if overlap else model.no_sync()
                with hold:
                    loss(model, 1000 * rank + micro_batches * i + micro).backward()
            if overlap is not None:
                applied = sum(p.grad is not None and "Spent" in repr(p.grad) for p in model.parameters())
                assert applied > 0, "nothing was stepped in backward"
            opt.step()
            opt.zero_grad()
            if sched is not None:
                sched.step()

        return model, opt, step

    plain, plain_optimizer, plain_step = build(False)
    model, opt, step = build(True)
    for i in range(steps):
        plain_step(i)
        step(i)
        difference = first_difference(training_state(plain, plain_optimizer), training_state(model, opt))
        if difference is not None:
            return f"after step {i + 1}: {difference}"
    overlap = instep.attached(model)
    assert overlap is not None
    assert overlap.step_count == steps
    overlap.detach()
    return None


def assert_equal_on_all(pool: RankPool, *args: Any, **kwargs: Any) -> None:
    assert pool.run(compare, *args, **kwargs) == [None] * pool.world_size
