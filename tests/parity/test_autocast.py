"""``optimizer.step()`` inside an autocast block. Updates in backward, and behind the next forward, run outside of it:
equal where the block changes nothing of the update, refused or left to ``step()`` where it does."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from instep._optim import kinds, stepper
from instep.errors import HyperparameterChangedError
from instep_tools.harness import training_state
from tests.cases import Blocks, batch
from tests.devices import here
from tests.judged import own_steps_are_judged
from tests.parity.lockstep import EXACT, Contender, Refused, in_every_way, lockstep, loss_of
from tests.parity.made import Made, Recipe

Make = Callable[[nn.Module], torch.optim.Optimizer]


class OnCommand(torch.optim.SGD):
    """Its update can be tried on nothing but the parameters that it was made for."""

    def step(self, closure: Any = None) -> Any:
        if any(p.dim() == 2 and p.shape[1] not in (16, 24, 96) for g in self.param_groups for p in g["params"]):
            raise ValueError("not mine")
        return super().step(closure)


CHANGED: dict[str, Make] = {
    "torch's own": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "made by hand": lambda model: Made(list(model.named_parameters()), 1e-2, Recipe(gradient="product")),
}
UNCHANGED: dict[str, Make] = {
    "torch's own": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "made by hand": lambda model: Made(list(model.named_parameters()), 1e-2, Recipe()),
}
TORN = Refused(HyperparameterChangedError, "torn", "step() was called inside an autocast block")


def in_low_precision() -> Any:
    return torch.autocast(here().type, torch.bfloat16)


def learn(lane: Contender, i: int, around: str) -> torch.Tensor:
    x, y = batch(i)
    with in_low_precision() if around == "all" else nullcontext():
        with in_low_precision() if around == "backward" else nullcontext():
            loss = loss_of(lane.model(x).float(), y)
            lane.backward(loss)
        with in_low_precision() if around == "step" else nullcontext():
            lane.step()
    lane.zero_grad()
    return loss.detach()


def build(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks()
    return model, make(model)


@in_every_way
@pytest.mark.parametrize("around", ["backward", "step", "all"])
@pytest.mark.parametrize("name", list(UNCHANGED))
def test_the_block_does_not_matter(way: str, around: str, name: str) -> None:
    with own_steps_are_judged():  # compared inside of the block, too
        lane = lockstep(way, partial(build, UNCHANGED[name]), partial(learn, around=around))
    assert lane.overlap.redo_count == 0


@in_every_way
@pytest.mark.parametrize("around", ["backward", "step", "all"])
@pytest.mark.parametrize("name", list(CHANGED))
def test_the_block_changes_the_update(way: str, around: str, name: str) -> None:
    refused = None if around == "backward" or way in EXACT else {way: TORN}
    lockstep(way, partial(build, CHANGED[name]), partial(learn, around=around), refused=refused)


def test_the_block_changes_every_optimizer_with_matrix_products() -> None:
    """Else the tests above would compare what is alike anyway."""
    for make in CHANGED.values():
        found = []
        for block in (nullcontext, in_low_precision):
            torch.manual_seed(0)
            model, optimizer = build(make)
            loss_of(model(batch(0)[0]), batch(0)[1]).backward()
            with block():
                optimizer.step()
            found.append([p.detach() for p in model.parameters()])
        assert not all(map(torch.equal, *found))


@pytest.mark.parametrize("cls", sorted(kinds._ELEMENTWISE, key=str))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_block_changes_an_elementwise_update_in_float32(cls: Any, dtype: torch.dtype) -> None:
    found = []
    for block in (nullcontext(), torch.autocast(here().type, dtype)):
        torch.manual_seed(0)
        model = Blocks()
        optimizer = cls(model.parameters())
        for i in range(3):
            x, y = batch(i)
            loss_of(model(x), y).backward()
            with block:
                assert not stepper.Stepper(optimizer).autocast_matters()
                optimizer.step()
            optimizer.zero_grad()
        found.append([value for _, value in training_state(model, optimizer) if isinstance(value, torch.Tensor)])
    assert all(map(torch.equal, *found))


def test_a_foreign_optimizer_is_taken_for_one_that_differs_until_it_was_compared_there() -> None:
    model, optimizer = build(lambda model: OnCommand(model.parameters(), lr=0.1))
    one = stepper.Stepper(optimizer)
    assert not one.autocast_matters()
    with in_low_precision():
        assert one.autocast_matters()
        one.came_out_alike()
        assert not one.autocast_matters()
    del model


def test_an_update_in_lower_precision_is_taken_for_one_that_differs() -> None:
    model = Blocks().to(torch.bfloat16)
    one = stepper.Stepper(optimizer := torch.optim.AdamW(model.parameters()))
    with in_low_precision():
        assert one.autocast_matters()
    assert not one.autocast_matters()
    del optimizer
