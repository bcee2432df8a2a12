"""Two ranks: what the loop changes between backward and step, and what an update does to gradients and generators."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import HyperparameterChangedError, TornStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.parity.changes import (
    move_one,
    pop,
    put_another_tensor,
    through_data,
)

EXACT: list[dict[str, Any]] = [{"schedule": "backward", "undo": True}, {"schedule": "forward", "defer": True}]


def made(optimizer: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Blocks(depth=2), bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    return model, optimizer(model)


def adamw(model: nn.Module) -> Any:
    groups = [{**group, "lr": torch.tensor(0.02)} for group in two_groups(model)]
    return torch.optim.AdamW(groups, foreach=False)


def write_lr(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        through_data(group["lr"], 0.01)


CHANGES = {"lr": write_lr, "members": partial(move_one, i=0), "entry": pop, "state": put_another_tensor}


def iteration(model: Any, optimizer: Any, i: int, before: Any = None, after: Any = None, clip: bool = False) -> Any:
    x, y = batch(100 * dist.get_rank() + i)
    nn.functional.cross_entropy(model(x), y).backward()
    if before is not None:
        before(optimizer)
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if after is not None:
        after(optimizer)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()] if clip else []
    optimizer.zero_grad()
    return gradients


def body_changes(name: str, options: dict[str, Any], when: str) -> str | None:
    plain, model = made(adamw), made(adamw)
    with instep.attach(*model, **options) as overlap:
        for i in range(4):
            change: dict[str, Any] = {when: CHANGES[name]} if i == 2 else {}
            iteration(*plain, i, **change)
            iteration(*model, i, **change)
        overlap.synchronize()
        return first_difference(training_state(*plain), training_state(*model))


@pytest.mark.parametrize("options", EXACT, ids=str)
@pytest.mark.parametrize("name", ["lr", "members", "entry"])
def test_changes_before_the_step(two_ranks: RankPool, name: str, options: dict[str, Any]) -> None:
    if name == "lr" and options.get("undo") and here().type != "cpu":
        pytest.skip("compared on the device: the next step tells, and tears, see body_refused")
    assert two_ranks.run(body_changes, name, options, "before") == [None, None]


@pytest.mark.parametrize("name", CHANGES)
def test_changes_while_steps_are_due(two_ranks: RankPool, name: str) -> None:
    assert two_ranks.run(body_changes, name, {"schedule": "forward", "defer": True}, "after") == [None, None]


def body_refused(name: str) -> bool:
    model, optimizer = made(adamw)
    with instep.attach(model, optimizer, schedule="backward"):
        for i in range(2):
            iteration(model, optimizer, i)
        change = CHANGES[name]
        if name == "lr" and here().type != "cpu":
            iteration(model, optimizer, 2, change)  # compared there: the host does not wait, and the next step tells
            change = None
        with pytest.raises(HyperparameterChangedError):
            iteration(model, optimizer, 3, change)
        with pytest.raises(TornStepError):
            iteration(model, optimizer, 4)
    return True


@pytest.mark.parametrize("name", CHANGES)
def test_changes_before_the_step_are_refused_by_default(two_ranks: RankPool, name: str) -> None:
    assert two_ranks.run(body_refused, name) == [True, True]
