"""Optimizers of the user's own that are judged by their first updates: those that couple parameters go on as in the
plain loop, or are refused before anything is written. All others are stepped in backward, and keep what they hold."""

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep._step import judging
from instep.errors import InstepError, UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.judged import own_steps_are_judged
from tests.parity.apart import APART
from tests.parity.couplings import CALLS, COUPLED, LATE, Make
from tests.parity.held import held_by

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward", "bucket_bytes": 300},
    "undo": {"schedule": "backward", "bucket_bytes": 300, "undo": True},
}
STEPS = 6
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    with own_steps_are_judged():
        yield


class Loop:
    """Four layers, and an optimizer of them."""

    def __init__(self, make: Make) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.optimizer = make(self.model)
        self.calls = 0

    def backward(self, i: int) -> None:
        random.seed(i)
        np.random.seed(i)
        CALLS[0] = self.calls  # as if it had the process for itself
        torch.manual_seed(i)
        loss = self.model(torch.randn(4, 8)).square().sum()
        if i > 2:
            loss = loss * 100
            self.optimizer.param_groups[0]["lr"] = 0.0005
        loss.backward()

    def step(self, i: int) -> Any:
        self.backward(i)
        return self.update()

    def update(self) -> Any:
        closure = getattr(self.optimizer, "closure", None)
        returned = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.optimizer.zero_grad()
        self.calls = CALLS[0]
        return returned

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


class Pair:
    """A plain loop, and one that steps in backward."""

    def __init__(self, make: Make, way: str) -> None:
        self.plain, self.attached = Loop(make), Loop(make)
        self.overlap = instep.attach(self.attached.model, self.attached.optimizer, **WAYS[way])
        self.moved = 0  # parameters that the last backward has stepped

    def step(self, i: int) -> None:
        returned = self.plain.step(i)
        memory = [(p.data_ptr(), p.nbytes) for p in self.attached.model.parameters()]
        before = [ctypes.string_at(*place) for place in memory]
        self.attached.backward(i)
        # instep takes note of who reads a weight here, and of who is told its address.
        self.moved = sum(ctypes.string_at(*place) != then for place, then in zip(memory, before, strict=True))
        also = self.attached.update()
        assert also == returned

    def require_equal(self, i: int, *, held: bool = True) -> None:
        states = (training_state(loop.model, loop.optimizer) for loop in (self.plain, self.attached))
        difference = first_difference(*states)
        assert difference is None, f"step {i + 1}: {difference}"
        if held:
            for name, value in held_by(self.plain.model, self.plain.optimizer).items():
                assert held_by(self.attached.model, self.attached.optimizer)[name] == value, f"step {i + 1}: {name!r}"


@each_way
@pytest.mark.parametrize("name", COUPLED)
def test_a_coupling_is_found_in_the_first_two_updates(name: str, way: str) -> None:
    make, becomes = COUPLED[name]
    try:
        pair = Pair(make, way)
    except UnsupportedOptimizerError:
        assert becomes == "refused"
        return
    with pair.overlap:
        for i in range(STEPS):
            before = pair.attached.weights()
            try:
                pair.step(i)
            except UnsupportedOptimizerError:
                found, refusal = "refused", i
                break
            pair.require_equal(i)
            assert not pair.moved
        else:
            found, refusal = "judged", 0
        assert found == becomes
        assert refusal < judging.LEFT
        if becomes == "refused":
            for was, now in zip(before, pair.attached.weights(), strict=True):
                assert torch.equal(was, now), "something of the step was written"
        if becomes != "judged":
            return
        assert any("left to optimizer.step()" in line for line in pair.overlap.plan.judged)
        assert "left to optimizer.step()" in repr(pair.overlap)
        assert pair.overlap.step_count == STEPS


@each_way
@pytest.mark.parametrize("name", APART)
def test_what_couples_nothing_is_stepped_in_backward(name: str, way: str) -> None:
    pair = Pair(APART[name], way)
    with pair.overlap:
        for i in range(STEPS):
            pair.step(i)
            pair.require_equal(i)
            assert pair.moved == (0 if i < judging.LEFT else 8), f"step {i + 1}"
        assert pair.overlap.plan.judged == ()
        assert (pair.overlap.stats()["freed_bytes"] > 0) is (way == "backward")


def first_unlike(pair: Pair) -> int | None:
    """The first step after which the two loops are not alike."""
    for i in range(STEPS):
        pair.step(i)
        try:
            pair.require_equal(i)
        except AssertionError:
            return i
    return None


@each_way
@pytest.mark.parametrize("name", LATE)
def test_a_coupling_that_begins_later_is_found_by_the_next_comparison(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = Pair(LATE[name], way)
    with unseen.overlap:
        begins = first_unlike(unseen)  # the known limit: until it is compared, nobody sees it
    assert begins is not None
    assert begins >= judging.LEFT
    assert unseen.overlap.plan.judged == ()

    monkeypatch.setattr(judging, "EVERY", 1)
    pair = Pair(LATE[name], way)
    for i in range(begins):
        pair.step(i)
        pair.require_equal(i)
    with pytest.raises(InstepError, match="has begun to couple parameters"):
        pair.step(begins)
    assert "left to optimizer.step()" in pair.overlap.plan.judged[0]
    pair.overlap.accept_torn()
    pair.overlap.detach()


@each_way
def test_what_couples_nothing_is_compared_again_and_goes_on(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "EVERY", 2)
    pair = Pair(APART["a schedule of its own in the group"], way)
    with pair.overlap:
        moved = []
        for i in range(2 * STEPS):
            pair.step(i)
            pair.require_equal(i)
            moved.append(pair.moved)
        assert set(moved[judging.LEFT :]) == {4, 8}, moved  # a bucket is a layer
        assert pair.overlap.plan.judged == ()
