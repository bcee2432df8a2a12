"""Ctrl-C at every point of a bucket's step inside backward: put back, told, or as if the backward had never been."""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._step.in_backward import BucketSink
from instep.errors import TornStepError
from instep_tools.harness import first_difference
from tests.parity.interrupts import Interrupter

BUCKET = BucketSink.apply.__code__
SOURCE = str(Path(instep.__file__).parent)


class InBucket(Interrupter):
    """At the ``where``-th point in instep's own code below ``BucketSink.apply``."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        above = frame if SOURCE in frame.f_code.co_filename else None
        while above is not None and above.f_code is not BUCKET:
            above = above.f_back
        if above is not None:
            super().__call__(frame, event, arg)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    model(torch.full((3, 6), 1.0 + i)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    yield from model.state_dict().items()
    yield from ((f"{name}'s", optimizer.state[p]["momentum_buffer"]) for name, p in model.named_parameters())


def goes_on(undo: bool, where: int) -> bool:
    """Interrupt the third step in a bucket, and go on; ``False``: there are no more points."""
    (plain, plain_optimizer), (model, optimizer) = build(), build()
    interrupter = InBucket(where)
    with instep.attach(model, optimizer, schedule="backward", undo=undo, bucket_bytes=64) as overlap:
        for i in range(2):
            train(plain, plain_optimizer, i)
            train(model, optimizer, i)
        try:
            with interrupter.watching():
                train(model, optimizer, 2)
            train(plain, plain_optimizer, 2)  # no point left, or the interrupt was lost in an object that is freed
        except KeyboardInterrupt:
            optimizer.zero_grad()
        if interrupter.place is None:
            return False
        point = f"point {where}, in {interrupter.place}"
        try:
            found = copy.deepcopy(model.state_dict())
        except TornStepError:
            assert not undo, f"{point}: torn"
            overlap.accept_torn()
            return True
        assert first_difference(iter(plain.state_dict().items()), iter(found.items())) is None, (
            f"{point}: written, and nobody was told"
        )
        for i in range(3, 5):
            train(plain, plain_optimizer, i)
            train(model, optimizer, i)
            assert first_difference(state(plain, plain_optimizer), state(model, optimizer)) is None, point
    return True


@pytest.mark.parametrize("undo", [False, True])
def test_ctrl_c_in_a_bucket(undo: bool) -> None:
    where = 0
    while goes_on(undo, where):
        where += 1
    assert where > 20
