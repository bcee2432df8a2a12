"""What shows only in training: an update that begins to draw random numbers, or to write what is not its to write."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import instep
from instep.errors import HyperparameterChangedError, TornStepError, UnsupportedOptimizerError
from tests.cases import Blocks, batch, two_groups
from tests.parity.changes import DRAWS, LATER, Later
from tests.parity.lockstep import SMALL, UNDO, WAYS, Refused, learn, lockstep, loss_of

# Not by a thread: while one that has just been started runs, it may be that one that draws.
pytestmark = pytest.mark.timeout(600, method="signal")


def train(model: Any, optimizer: Any, steps: int) -> None:
    for i in range(steps):
        loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def torn(match: str) -> Refused:
    return Refused(UnsupportedOptimizerError, "torn", match=match)


def seeded(lane: Any, i: int) -> Any:
    """Both loops start from the same generators."""
    random.seed(i)
    np.random.seed(i)
    learn(lane, i)
    return [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]


# Python's and NumPy's are looked at where updates are compared: in the first two steps, and then from time to time.
OF_TORCH = [name for name in DRAWS if name not in ("random", "NumPy", "Python's, its own")]


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_update_that_begins_to_draw_is_torn_at_once(name: str) -> None:
    lane = lockstep("backward", DRAWS[name], seeded, 18, refused={"backward": torn("draws random numbers")})
    assert lane.overlap.step_count == LATER - 1


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("way", UNDO)
def test_an_update_that_begins_to_draw_is_put_back(way: str, name: str) -> None:
    lane = lockstep("undo", DRAWS[name], seeded, 18, **UNDO[way])
    assert lane.overlap.redo_count == 3


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("way", ["forward", "late"])
def test_what_begins_to_draw_is_never_put_off(way: str, name: str) -> None:
    lockstep(way, DRAWS[name], seeded, 18)


def test_another_thread_that_draws_is_no_update() -> None:
    torch.manual_seed(0)
    model = Blocks(depth=2)
    optimizer = Later(two_groups(model))
    end, began = threading.Event(), threading.Event()

    def draw() -> None:
        while not end.is_set():
            random.random()
            torch.rand(())
            began.set()

    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward") as overlap:
        thread = threading.Thread(target=draw)
        thread.start()
        try:
            began.wait()
            train(model, optimizer, 14)
            assert overlap.step_count == 14
        finally:
            end.set()
            thread.join()


class DecaysAllLater(torch.optim.Optimizer):
    """All parameters, with a gradient or without."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                entry = self.state[p]
                if p.grad is not None:
                    entry["count"] = entry.get("count", 0) + 1
                    p.sub_(p.grad, alpha=group["lr"])
                if entry.get("count", 0) >= LATER:
                    p.mul_(0.9)


@pytest.mark.parametrize("undo", [False, True])
def test_a_step_that_begins_to_write_parameters_without_gradient(undo: bool) -> None:
    torch.manual_seed(0)
    model = Blocks(depth=2)
    optimizer = DecaysAllLater(two_groups(model))
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward", undo=undo) as overlap:
        train(model, optimizer, LATER - 1)
        with pytest.raises(UnsupportedOptimizerError, match=r"without a gradient too: '\w+\.weight'"):
            train(model, optimizer, 1)
        assert overlap.step_count == LATER - 1
        with pytest.raises(TornStepError):
            optimizer.step()


class WritesOthersLater(torch.optim.Optimizer):
    """Later on it writes a parameter that it was not given, through what it holds beside its groups."""

    def __init__(self, params: Any, hold: Callable[[Any], Any]) -> None:
        super().__init__(params, {"lr": 0.05})
        self.held = hold(self.param_groups[0]["params"][0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    entry = self.state[p]
                    entry["count"] = entry.get("count", 0) + 1
                    p.sub_(p.grad, alpha=group["lr"])
                    if entry["count"] >= LATER:
                        target_of(self.held).mul_(0.9)


def target_of(held: Any) -> Any:
    if callable(held):
        return held()
    return held[0] if isinstance(held, list) else held.target if isinstance(held, HoldsOne) else held


class HoldsOne:
    def __init__(self, target: Any) -> None:
        self.target = target


HOLDERS = {"itself": lambda p: p, "a list": lambda p: [p], "an object": HoldsOne, "a function": lambda p: lambda: p}


@pytest.mark.parametrize("held", list(HOLDERS))
@pytest.mark.parametrize("way", list(WAYS))
def test_an_update_that_begins_to_write_what_it_was_not_given(way: str, held: str) -> None:
    def build() -> Any:
        model = Blocks(depth=1)
        return model, WritesOthersLater(model.parameters(), HOLDERS[held])

    expected = torn("writes parameters that it was not given")
    # With settings that cannot be copied "forward" steps at once, as the plain loop does.
    refused = {"backward": expected, "two_pass": expected}
    lane = lockstep(way, build, steps=LATER + 1, refused=refused)
    if way not in refused:
        assert lane.overlap.step_count == LATER + 1


class SharesLater(torch.optim.Optimizer):
    """State that all parameters share: read by each, and written by each later on."""

    def __init__(self, params: Any, written: bool) -> None:
        super().__init__(params, {"lr": 0.05})
        self.written = written

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    entry = self.state[p]
                    entry["count"] = entry.get("count", 0) + 1
                    p.sub_(p.grad, alpha=group["lr"])
                    if "scale" in entry:
                        p.mul_(entry["scale"])
                        if self.written and entry["count"] >= LATER:
                            entry["scale"].mul_(0.999)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("way", ["backward", "forward", "late", *UNDO])
def test_state_that_parameters_share(way: str, written: bool) -> None:
    def build() -> Any:
        model = Blocks(depth=2)
        optimizer = SharesLater(two_groups(model), written)
        scale = torch.full((), 0.999)
        for p in model.parameters():
            optimizer.state[p]["scale"] = scale
        return model, optimizer

    shared = "by the update of another bucket" if way == "backward" else "The step was put back"
    expected = Refused(HyperparameterChangedError, "torn" if way == "backward" else "open", match=shared)
    way, options = ("undo", UNDO[way]) if way in UNDO else (way, {})
    in_parts = written and way in ("backward", "undo")
    lockstep(way, build, learn, 18, {way: expected} if in_parts else None, **options)
