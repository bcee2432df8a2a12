"""Optimizers from other packages, as they come."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from tests.cases import Blocks, batch, two_groups

STEPS = 6


def assert_equal(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    def build() -> Any:
        model = Blocks(width=64)
        optimizer = make(model)

        def step(i: int) -> None:
            x, y = batch(i)
            if hasattr(optimizer, "train"):  # schedule-free optimizers have a mode
                optimizer.train()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    found = instep.verify(build, steps=STEPS, bucket_bytes=20_000, schedule="backward")
    assert found.equal, found.difference


@pytest.mark.parametrize("name", ["AdamW", "Lion", "StableAdamW"])
def test_optimi(name: str) -> None:
    optimi = pytest.importorskip("optimi")
    assert_equal(lambda model: getattr(optimi, name)(two_groups(model), lr=1e-3))


@pytest.mark.parametrize("foreach", [True, False])
def test_schedule_free_keeps_state_in_its_groups(foreach: bool) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    assert_equal(
        lambda model: schedulefree.AdamWScheduleFree(two_groups(model), lr=1e-3, warmup_steps=3, foreach=foreach)
    )


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_bitsandbytes(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert_equal(lambda model: getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-3, min_8bit_size=16))
