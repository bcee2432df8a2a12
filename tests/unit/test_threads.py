"""Threads: one model is trained on one at a time; models of their own do not meet."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import ConcurrentBackwardError
from tests import net
from tests.cases import Blocks, batch, weights
from tests.parity.lockstep import SMALL, WAYS


def in_thread(do: Callable[[], Any]) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(net.SECONDS)
    assert not thread.is_alive()
    return raised


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    x, y = batch(i)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_forward_while_the_step_of_another_thread_is_open() -> None:
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, 2)
    model, optimizer = make()
    with instep.attach(model, optimizer):
        loss_of(model, 0).backward()
        (error,) = in_thread(lambda: loss_of(model, 9))
        assert isinstance(error, ConcurrentBackwardError)
        optimizer.step()
        optimizer.zero_grad()
        (other,) = in_thread(lambda: loss_of(model, 1).backward()) or [None]
        assert other is None  # between steps any thread may go on
        optimizer.step()
    assert all(map(torch.equal, weights(plain), weights(model)))


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_a_backward_beside_another(way: str) -> None:
    """torch's in-backward optimizers crash the process here."""
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, 1)
    model, optimizer = make()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **WAYS[way]) as overlap:
        losses: dict[str, torch.Tensor] = {}
        raised: list[BaseException] = []

        def other() -> None:
            raised.extend(in_thread(lambda: losses["other"].backward()))

        def forward() -> None:
            losses["other"] = loss_of(model, 5)

        assert not in_thread(forward)
        handle = next(model.blocks[1].parameters()).register_hook(lambda _: other())
        loss_of(model, 0).backward()
        handle.remove()
        assert all(isinstance(error, ConcurrentBackwardError) for error in raised)
        assert raised
        optimizer.step()
        overlap.synchronize()
    assert all(map(torch.equal, weights(plain), weights(model)))


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
@pytest.mark.parametrize("threads", [2, 4])
def test_models_of_their_own(way: str, threads: int) -> None:
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, 30)
    models = [make() for _ in range(threads)]
    overlaps = [instep.attach(*pair, bucket_bytes=SMALL, **WAYS[way]) for pair in models]
    running = [threading.Thread(target=train, args=(*pair, 30)) for pair in models]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(net.SECONDS)
    for (model, _), overlap in zip(models, overlaps, strict=True):
        overlap.detach()
        assert all(map(torch.equal, weights(plain), weights(model)))
