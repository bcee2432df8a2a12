"""A foreign optimizer steps a bucket as itself: for that moment its groups hold the bucket's parameters alone. Nobody
else sees it: no other thread, no handler of a signal, no hook, no method that needs all parameters."""

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests import net
from tests.judged import own_steps_are_judged

LAYERS = 4
BUCKETED: dict[str, Any] = {"schedule": "backward", "bucket_bytes": 300}
"""A bucket of each layer."""


class Momentum(torch.optim.Optimizer):
    """Calls ``inside`` in the middle of each update."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def inside(self, group: dict[str, Any]) -> None:
        """In the middle of ``step()``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        some = False
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    some = True
                    state = self.state[p]
                    state["m"] = p.grad.clone() if "m" not in state else state["m"].mul_(0.9).add_(p.grad)
                    p.sub_(state["m"], alpha=group["lr"])
            self.inside(group)
        self.calls += some


class Waits(Momentum):
    """Stops in the middle of the first bucket of a backward, until it is told to go on."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        WAITS[id(self)] = (threading.Event(), threading.Event(), threading.Event())

    def inside(self, group: dict[str, Any]) -> None:
        armed, came, may_go = WAITS[id(self)]
        if armed.is_set():
            armed.clear()
            came.set()
            assert may_go.wait(net.SECONDS)


WAITS: dict[int, tuple[threading.Event, threading.Event, threading.Event]] = {}
"""Aside, so that the optimizer can be pickled."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))


class Loop:
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], model: nn.Module | None = None) -> None:
        self.model = layers() if model is None else model
        self.optimizer = make(self.model.parameters())

    def backward(self, i: int) -> None:
        torch.manual_seed(i)
        self.model(torch.randn(4, 8)).square().mean().backward()

    def step(self, i: int, *, zeroes: bool = True) -> None:
        self.backward(i)
        self.optimizer.step()
        if zeroes:
            self.optimizer.zero_grad()

    def require_equal(self, other: "Loop") -> None:
        difference = first_difference(
            training_state(self.model, self.optimizer), training_state(other.model, other.optimizer)
        )
        assert difference is None, difference


def both(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> tuple[Loop, Loop, instep.Attachment]:
    plain, attached = Loop(make), Loop(make)
    return plain, attached, instep.attach(attached.model, attached.optimizer, **{**BUCKETED, **options})


# Other threads.


@contextmanager
def in_the_window(loop: Loop, i: int) -> Iterator[Callable[[], None]]:
    """The step of iteration ``i`` has stopped in the middle of a bucket, on another thread. Yields what lets it go."""
    armed, came, may_go = WAITS[id(loop.optimizer)]
    armed.set()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            loop.step(i)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert came.wait(net.SECONDS)
        yield may_go.set
    finally:
        may_go.set()
        thread.join(net.SECONDS)
        came.clear()
        may_go.clear()
    assert not errors, errors


def called_in_the_window(loop: Loop, i: int, action: Callable[[], Any]) -> Any:
    """What ``action`` returns, on a thread of its own: it may wait until the bucket is stepped."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    with in_the_window(loop, i) as go_on:
        thread.start()
        thread.join(0.02)  # what waits has begun to
        go_on()
    thread.join(net.SECONDS)
    (result,) = found
    return result


@pytest.fixture
def stopped() -> Iterator[Loop]:
    """A loop of which two steps are taken."""
    loop = Loop(Waits)
    with instep.attach(loop.model, loop.optimizer, **BUCKETED):
        for i in range(2):
            loop.step(i)
        yield loop
    WAITS.clear()


def test_what_another_thread_writes_into_the_window_is_no_silent_loss() -> None:
    """It is taken for what the update has written: buckets disagree, which is said."""
    _, attached, overlap = both(Waits)
    attached.step(0)
    armed, came, may_go = WAITS[id(attached.optimizer)]

    def write() -> None:
        assert came.wait(net.SECONDS)
        attached.optimizer.param_groups[0]["lr"] = 0.01
        may_go.set()

    armed.set()
    thread = threading.Thread(target=write)
    thread.start()
    with pytest.raises(UnsupportedOptimizerError, match=r"param_groups\[0\]\['lr'\]"):
        attached.step(1)
    thread.join(net.SECONDS)
    overlap.accept_torn()
    overlap.detach()


def test_a_setting_that_another_thread_writes_while_a_part_is_judged_is_taken_back_and_said() -> None:
    """A known limit: nobody can tell it from what the update has written."""
    attached = Loop(Waits)
    with own_steps_are_judged():
        overlap = instep.attach(attached.model, attached.optimizer, **BUCKETED)
    with overlap:
        with in_the_window(attached, 0):
            attached.optimizer.param_groups[0]["lr"] = 0.01
        assert attached.optimizer.param_groups[0]["lr"] == 0.05
        assert "param_groups[0]['lr']" in overlap.plan.judged[0]


def test_a_group_that_another_thread_adds_is_kept(stopped: Loop) -> None:
    more = nn.Parameter(torch.zeros(2))
    called_in_the_window(stopped, 2, lambda: stopped.optimizer.add_param_group({"params": [more]}))
    assert [len(group["params"]) for group in stopped.optimizer.param_groups] == [2 * LAYERS, 1]
    assert stopped.optimizer.param_groups[1]["params"][0] is more


# Handlers of signals.


def test_a_handler_that_raises_leaves_the_whole() -> None:
    class InterruptedError(Exception):
        pass

    def handle(number: int, frame: Any) -> None:
        raise InterruptedError

    class Signals(Momentum):
        def inside(self, group: dict[str, Any]) -> None:
            if self.calls == 1:
                signal.raise_signal(signal.SIGUSR1)

    _, attached, overlap = both(Signals)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        attached.step(0)
        with pytest.raises((InterruptedError, instep.errors.InstepError)):
            attached.step(1)
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, before)
    require_whole(attached)
    overlap.accept_torn()
    overlap.detach()


def require_whole(loop: Loop) -> None:
    (group,) = loop.optimizer.param_groups
    assert type(group["params"]) is list
    assert list(map(id, group["params"])) == list(map(id, loop.model.parameters()))
    assert (
        not {"state_dict", "add_param_group", "zero_grad", "__getstate__", "load_state_dict"}
        & vars(loop.optimizer).keys()
    )


# Hooks.


# A step that raises.


# Methods that need all parameters, called by the update itself.


# Settings of single parameters, names, schedulers, loss scales, groups, parameters of all kinds.


class ByPlace(Momentum):
    """An update that looks up each parameter by its name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.5 if name == "2.bias" else group["lr"])


def test_names_stand_beside_their_parameters() -> None:
    def make(model: nn.Module) -> Loop:
        return Loop(lambda _: ByPlace(model.named_parameters()), model)

    plain, attached = make(layers()), make(layers())
    with instep.attach(attached.model, attached.optimizer, **BUCKETED):
        for i in range(3):
            plain.step(i)
            attached.step(i)
            plain.require_equal(attached)
    names = attached.optimizer.param_groups[0]["param_names"]
    assert names == [name for name, _ in attached.model.named_parameters()]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=8, cycle_momentum=False
    ),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
}


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, undo: bool) -> None:
    plain, attached, overlap = both(Momentum, undo=undo)
    with overlap, warnings.catch_warnings():
        warnings.simplefilter("error")
        loops = [(loop, SCHEDULERS[name](loop.optimizer)) for loop in (plain, attached)]
        for i in range(4):
            for loop, scheduler in loops:
                loop.step(i)
                scheduler.step()
            plain.require_equal(attached)


def test_a_loss_scale() -> None:
    plain, attached = Loop(Momentum), Loop(Momentum)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2) for _ in range(2)]
    options = {**BUCKETED, "undo": True, "scaler": scalers[1]}
    with instep.attach(attached.model, attached.optimizer, **options) as overlap:
        for i in range(5):
            for loop, scaler in zip((plain, attached), scalers, strict=True):
                torch.manual_seed(i)
                loss = loop.model(torch.randn(4, 8)).square().mean() * (float("inf") if i == 2 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(loop.optimizer)
                scaler.update()
                loop.optimizer.zero_grad()
            plain.require_equal(attached)
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert overlap.step_count + overlap.skip_count >= 4


class Odd(nn.Module):
    """Frozen, tied, and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_frozen_tied_and_unused_parameters_in_groups(groups: int, undo: bool) -> None:
    def make() -> Loop:
        torch.manual_seed(0)
        model = Odd()
        parameters = list(model.parameters())
        split = [{"params": parameters[number::groups], "lr": 0.05 / (1 + number)} for number in range(groups)]
        return Loop(lambda _: Momentum(split), model)

    plain, attached = make(), make()
    with instep.attach(attached.model, attached.optimizer, **BUCKETED, undo=undo):
        for i in range(4):
            plain.step(i)
            attached.step(i)
            plain.require_equal(attached)
    assert vars(plain.optimizer)["calls"] == vars(attached.optimizer)["calls"] == 4


# What a process has after an optimizer was judged, or refused.
