"""Optimizers that update each parameter by itself, and hold something beside: functions over themselves, counters,
lists, generators that nobody asks. Each is a function from a model to an optimizer."""

import functools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]

APART: dict[str, Make] = {}


class Apart(torch.optim.Optimizer):
    """Momentum. ``scale`` is what each update is multiplied with; ``after`` moves on once per call."""

    def __init__(self, params: Any, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})
        self.made()

    def made(self) -> None:
        """What it holds from the beginning."""

    def scale(self) -> float:
        return 1.0

    def after(self) -> None:
        """The call has updated something."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["momentum"] = p.grad.clone() if "momentum" not in state else state["momentum"].mul_(0.9).add_(p.grad)
        p.sub_(state["momentum"], alpha=group["lr"] * self.scale())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        there = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in there:
            self.update(p, group)
        if there:
            self.after()


def apart(name: str) -> Callable[[Any], Any]:
    """Register a class of optimizers, or a function that makes one of a model."""

    def register(made: Any) -> Any:
        APART[name] = (lambda model: made(model.parameters())) if isinstance(made, type) else made
        return made

    return register


apart("nothing beside")(Apart)


# Functions over the optimizer.


@apart("closures over self")
class ClosesOverSelf(Apart):
    def made(self) -> None:
        self.how_far = lambda: self.param_groups[0]["lr"] * 2
        self.write = lambda p, group: Apart.update(self, p, group)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        self.write(p, group)
        p.sub_(p.grad, alpha=self.how_far())


@apart("finalizer with a handle")
class GivesBack(Apart):
    handles: set[int] = set()  # noqa: RUF012

    def made(self) -> None:
        self.handle = 7
        self.handles.add(7)

    def __del__(self) -> None:
        self.handles.discard(self.handle)

    def scale(self) -> float:
        assert self.handle in self.handles, "the handle was given back"
        return 0.5


@apart("bound method")
class KeepsMethod(Apart):
    def made(self) -> None:
        self.writes = self.far

    def far(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])

    def update(self, p: Any, group: dict[str, Any]) -> None:
        self.writes(p, group)


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def move_on(self, by: int = 1) -> None:
        self.calls += by

    def __call__(self) -> float:
        return 1.0 / (1 + self.calls)


@apart("partial over a list")
class KeepsPartialOfList(Apart):
    def made(self) -> None:
        self.note = functools.partial(list.append, [])

    def after(self) -> None:
        self.note(1)

    def scale(self) -> float:
        return 1.0 / (1 + len(self.note.args[0]))


@apart("closure cell")
class KeepsCell(Apart):
    def made(self) -> None:
        calls = 0

        def move_on(by: int) -> int:
            nonlocal calls
            calls += by
            return calls

        self.move_on = move_on

    def after(self) -> None:
        self.move_on(1)

    def scale(self) -> float:
        return 1.0 / (1 + self.move_on(0))


# Attributes that move on.


@apart("number")
class CountsCalls(Apart):
    def made(self) -> None:
        self.calls = 0

    def after(self) -> None:
        self.calls += 1

    def scale(self) -> float:
        return 1.0 / (1 + self.calls)


def holds(name: str, make: Callable[[], Any], move_on: Callable[[Any], Any], read: Callable[[Any], float]) -> None:
    """Register a class that holds what ``make`` makes: each call moves it on, and each update is scaled with it."""

    class Holds(Apart):
        def made(self) -> None:
            self.held = make()

        def after(self) -> None:
            move_on(self.held)

        def scale(self) -> float:
            return read(self.held)

    apart(name)(Holds)


def shrink(array: Any) -> None:
    array *= 0.9


def count(many: bytearray) -> None:
    many[1] += 1


holds("list", lambda: [1.0], lambda seen: seen.append(seen[-1] * 0.9), lambda seen: seen[-1])
holds(
    "deque",
    lambda: deque([1.0], maxlen=3),
    lambda window: window.append(window[-1] * 0.8),
    lambda window: sum(window) / len(window),
)
holds("tensor in place", lambda: torch.ones(()), lambda beta: beta.mul_(0.9), torch.Tensor.item)
holds("tensor written through NumPy", lambda: torch.ones(()), lambda beta: shrink(beta.numpy()), torch.Tensor.item)
holds("set", set, lambda names: names.add(len(names)), lambda names: 1.0 / (1 + len(names)))
holds("bytearray", lambda: bytearray(2), count, lambda many: 1.0 / (1 + many[1]))
holds("NumPy array", lambda: np.ones(3), lambda array: shrink(array[1:2]), lambda array: float(array.mean()))


@apart("two views of one tensor")
class KeepsViews(Apart):
    def made(self) -> None:
        self.whole = torch.ones(4)
        self.part = self.whole[:2]

    def after(self) -> None:
        self.part.mul_(0.9)

    def scale(self) -> float:
        return self.whole.mean().item()


@apart("nested dict")
class KeepsNested(Apart):
    def made(self) -> None:
        self.table: dict[str, Any] = {"a": {"b": [0, {"calls": 0}]}}

    def after(self) -> None:
        self.table["a"]["b"][1]["calls"] += 1
        self.table["a"].setdefault("late", set()).add(self.table["a"]["b"][1]["calls"])

    def scale(self) -> float:
        return 1.0 / (1 + self.table["a"]["b"][1]["calls"])


@apart("defaultdict and OrderedDict")
class KeepsDicts(Apart):
    def made(self) -> None:
        self.counts: Any = defaultdict(int)
        self.order: Any = OrderedDict(a=1, b=2)

    def after(self) -> None:
        self.counts["calls"] += 1
        self.order.move_to_end("a" if self.counts["calls"] % 2 else "b")

    def scale(self) -> float:
        return 1.0 / (self.counts.get("calls", 0) + next(iter(self.order.values())))


@apart("helper object")
class KeepsHelper(Apart):
    def made(self) -> None:
        self.helper = SimpleNamespace(calls=0, inner=SimpleNamespace(values=[1.0]))

    def after(self) -> None:
        self.helper.calls += 1
        self.helper.inner.values.append(0.9**self.helper.calls)

    def scale(self) -> float:
        return self.helper.inner.values[-1]


@dataclass(slots=True)
class Slotted:
    calls: int = 0
    values: list[float] = field(default_factory=lambda: [1.0])


@apart("__slots__ of a helper")
class KeepsSlotted(Apart):
    def made(self) -> None:
        self.helper = Slotted()

    def after(self) -> None:
        self.helper.calls += 1
        self.helper.values.append(0.9**self.helper.calls)

    def scale(self) -> float:
        return self.helper.values[-1]


@apart("an object that refers to the optimizer")
class KeepsLoop(Apart):
    def made(self) -> None:
        self.helper = SimpleNamespace(owner=self, calls=0)
        self.myself = self

    def after(self) -> None:
        self.helper.owner.helper.calls += 1

    def scale(self) -> float:
        return 1.0 / (1 + self.myself.helper.calls)


# Generators that nobody asks.


@apart("generators that are not asked")
class KeepsGenerators(Apart):
    def made(self) -> None:
        self.numpy = np.random.default_rng(0)
        self.python = random.Random(0)
        self.torch = torch.Generator().manual_seed(0)


# Schedulers.


@apart("scheduler over itself")
def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    class Scheduled(Apart):
        scheduler: torch.optim.lr_scheduler.StepLR

        def after(self) -> None:
            self.calls = getattr(self, "calls", 0) + 1

    optimizer = Scheduled(model.parameters())
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return optimizer


@apart("a schedule of its own in the group")
class WarmsUp(Apart):
    def made(self) -> None:
        for group in self.param_groups:
            group["k"], group["warm"] = 0, 0.1

    def after(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["warm"] = min(1.0, 0.1 * (group["k"] + 1))

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * group["warm"])


@apart("two groups, of which each counts")
def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    class EachCounts(Apart):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                there = [p for p in group["params"] if p.grad is not None]
                for p in there:
                    p.sub_(p.grad, alpha=group["lr"] / (1 + group["k"]))
                if there:
                    group["k"] += 1

    parameters = list(model.parameters())
    return EachCounts([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}], k=0)


@apart("groups' tensors")
class TensorInGroup(Apart):
    def made(self) -> None:
        for group in self.param_groups:
            group["beta"] = torch.ones(())

    def after(self) -> None:
        for group in self.param_groups:
            group["beta"].mul_(0.9)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad * group["beta"], alpha=group["lr"])


@apart("state under names")
class NamedState(Apart):
    state: Any  # to torch's types, the keys are tensors alone

    def made(self) -> None:
        self.state["k"] = torch.zeros((), dtype=torch.long)

    def after(self) -> None:
        self.state["k"] += 1
        self.state["late"] = self.state.get("late", 0) + 1

    def scale(self) -> float:
        return 1.0 / (1 + self.state["k"].item())


@apart("defaults")
class WritesDefaults(Apart):
    def made(self) -> None:
        self.defaults["calls"] = 0

    def after(self) -> None:
        self.defaults["calls"] += 1

    def scale(self) -> float:
        return 1.0 / (1 + self.defaults["calls"])


@apart("state kept by parameter in an attribute")
class ByParameter(Apart):
    def made(self) -> None:
        self.momenta: dict[Any, Any] = {}

    def update(self, p: Any, group: dict[str, Any]) -> None:
        before = self.momenta.get(p)
        self.momenta[p] = p.grad.clone() if before is None else before.mul_(0.9).add_(p.grad)
        p.sub_(self.momenta[p], alpha=group["lr"])


@apart("state in attributes of the parameter")
class OnParameter(Apart):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.momentum = p.grad.clone() if not hasattr(p, "momentum") else p.momentum.mul_(0.9).add_(p.grad)
        p.sub_(p.momentum, alpha=group["lr"])


@apart("state for all made in the first call")
class StateForAll(Apart):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        those = [p for group in self.param_groups for p in group["params"]]
        if not self.state:
            for p in those:
                self.state[p]["momentum"] = torch.zeros_like(p)
        for p in those:
            if p.grad is not None:
                p.sub_(self.state[p]["momentum"].mul_(0.9).add_(p.grad), alpha=0.05)


# torch's own update, with something beside.


@apart("AdamW, of which step() counts")
class CountingAdamW(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += any(p.grad is not None for group in self.param_groups for p in group["params"])
        return super().step(closure)


@apart("SGD over a slice of each gradient, foreach")
class Foreach(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9, foreach=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if gradients := [p.grad for p in group["params"] if p.grad is not None]:
                torch._foreach_mul_(gradients, 0.5)
        return super().step(closure)


@apart("matrices and vectors in two ways")
class TwoWays(Apart):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        if p.ndim == 2:
            p.sub_(nn.functional.normalize(p.grad, dim=0), alpha=group["lr"])
        else:
            super().update(p, group)
