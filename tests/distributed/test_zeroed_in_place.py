"""``zero_grad(set_to_none=False)`` with ``schedule="backward"``, whatever reduces the gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import instep
from instep.errors import SpentGradientError
from tests.cases import Blocks
from tests.distributed.pool import RankPool
from tests.distributed.reduced import SOURCES
from tests.distributed.sharded import Loop, both


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def first(loop: Loop, i: int) -> None:
    (loop.model if i % 2 else loop.optimizer).zero_grad(set_to_none=False)
    loop.backward(i)
    loop.optimizer.step()


def last(loop: Loop, i: int) -> None:
    loop.backward(i)
    loop.optimizer.step()
    (loop.model if i % 2 else loop.optimizer).zero_grad(set_to_none=False)


def train(name: str, step: Callable[[Loop, int], None]) -> None:
    both("backward", SOURCES[name], sgd, step)


@pytest.mark.parametrize("step", [first, last])
@pytest.mark.parametrize("name", list(SOURCES))
def test_gradients_are_zeroed_in_place(two_ranks: RankPool, name: str, step: Callable[[Loop, int], None]) -> None:
    two_ranks.run(train, name, step)


def local(parameter: torch.Tensor) -> torch.Tensor:
    found = parameter.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def never_cleared(name: str) -> list[str]:
    torch.manual_seed(0)
    model = SOURCES[name](Blocks())
    loop = Loop(model, sgd(model))
    loop.overlap = instep.attach(model, loop.optimizer, schedule="backward")
    loop.backward(0)
    loop.optimizer.step()
    before = [local(p).clone() for p in model.parameters()]
    told = []
    try:
        loop.backward(1)
        loop.optimizer.step()
    except SpentGradientError as error:
        told.append(str(error))
    loop.overlap.synchronize()  # on an accelerator torch's thread may still be ending this backward
    loop.optimizer.zero_grad()
    same = all(torch.equal(local(p), q) for p, q in zip(model.parameters(), before, strict=True))
    loop.overlap.detach()
    return [*told, f"untouched: {same}"]


@pytest.mark.parametrize("name", list(SOURCES))
def test_gradients_that_are_never_cleared(two_ranks: RankPool, name: str) -> None:
    for told, untouched in two_ranks.run(never_cleared, name):
        assert "Call zero_grad()" in told
        assert untouched == "untouched: True"
