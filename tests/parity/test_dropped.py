"""A loop dropped at a random moment of a random program leaves nothing behind."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import instep
from tests.parity.dropping import KEPT, run_dropped
from tests.parity.edits import MOMENTS
from tests.parity.programs import Program
from tests.parity.wild import EVERYTHING, SOME, plain_steps

PROGRAMS = plain_steps()
MOMENT = st.sampled_from(MOMENTS)
KEEPS = st.frozensets(st.sampled_from(KEPT), max_size=2)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """What torch has loaded is there for good, and is not looked through again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@given(PROGRAMS, MOMENT, KEEPS)
@SOME
def test_dropped(program: Program, moment: str, kept: frozenset[str]) -> None:
    run_dropped(program, moment, kept)


@pytest.mark.parametrize("options", [{"schedule": "backward"}, {"schedule": "forward", "defer": True}], ids=str)
def test_an_optimizer_whose_class_refers_to_the_model(options: dict[str, Any]) -> None:
    """It was made where the model is. Nobody outside keeps its functions."""

    def train() -> weakref.ref[nn.Module]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

        class Own(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                assert model.training
                return super().step(closure)

        optimizer = Own(model.parameters(), lr=0.1)
        instep.attach(model, optimizer, **options)
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weakref.ref(model)

    model = train()
    gc.collect()
    assert model() is None


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(PROGRAMS, MOMENT, KEEPS)
@settings(EVERYTHING, max_examples=2_000)
def test_often_dropped(program: Program, moment: str, kept: frozenset[str]) -> None:
    run_dropped(program, moment, kept)
