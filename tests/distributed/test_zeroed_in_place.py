"""``zero_grad(set_to_none=False)`` with ``schedule="backward"``, whatever reduces the gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.distributed import zero
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, both
from tests.distributed.test_keep_gradients import SOURCES


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


def train_divided(name: str, step: Callable[[Loop, int], None]) -> None:
    zero.both("backward", sgd, step, wrap=SOURCES[name])


@pytest.mark.parametrize("step", [first, last])
@pytest.mark.parametrize("name", ["ddp", "ddp, views"])
def test_state_is_divided(two_ranks: RankPool, name: str, step: Callable[[Loop, int], None]) -> None:
    two_ranks.run(train_divided, name, step)
