"""Optimizers that couple parameters, each by another road: what becomes of one depends on which others step with it.

``COUPLED`` begin in the first two updates, ``LATE`` later. Each is a function from a model to an optimizer.
"""

import ctypes
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]

COUPLED: dict[str, tuple[Make, str]] = {}
"""With what becomes of it: "judged" (every step is left to the optimizer) or "refused" (an error, and nothing of that
step is written)."""
LATE: dict[str, Make] = {}


class Coupled(torch.optim.Optimizer):
    """Multiplies each update with a number that ``scales`` takes from all parameters that have a gradient."""

    def __init__(self, params: Any, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})
        self.made()

    def made(self) -> None:
        """What it holds from the beginning."""

    def those(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def scales(self, those: list[Any]) -> list[float]:
        return [1.0] * len(those)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        those = self.those()
        for p, scale in zip(those, self.scales(those), strict=True):
            state = self.state[p]
            state["average"] = p.grad.clone() if "average" not in state else state["average"].lerp_(p.grad, 0.1)
            p.sub_(state["average"], alpha=self.param_groups[0]["lr"] * scale)


def coupling(name: str, becomes: str = "judged") -> Callable[[Any], Any]:
    """Register a class of optimizers, or a function that makes one of a model."""

    def register(made: Any) -> Any:
        COUPLED[name] = (of_parameters(made) if isinstance(made, type) else made, becomes)
        return made

    return register


def begins_later(name: str) -> Callable[[Any], Any]:
    def register(made: Any) -> Any:
        LATE[name] = of_parameters(made)
        return made

    return register


def of_parameters(cls: Any) -> Make:
    return lambda model: cls(model.parameters())


def shrunk(total: float) -> float:
    """A scale that is never 1, so that two sums give two scales."""
    return 1.0 / (1.0 + abs(total))


# Values that leave torch.


@coupling("numpy")
class ThroughNumpy(Coupled):
    def scales(self, those: list[Any]) -> list[float]:
        return [shrunk(sum(float(np.square(p.grad.numpy()).sum()) for p in those))] * len(those)


def floats_of(tensor: torch.Tensor) -> Any:
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float * tensor.numel())).contents


@coupling("weights written at data_ptr")
class WritesMemory(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        those = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = shrunk(sum(sum(map(abs, floats_of(p.grad))) for p in those))
        for p in those:
            weights, gradients = floats_of(p), floats_of(p.grad)
            for index in range(p.numel()):
                weights[index] -= 0.05 * scale * gradients[index]


# Numbers of tensors.


@coupling("item() of the one before")
class ItemOfTheOneBefore(Coupled):
    def scales(self, those: list[Any]) -> list[float]:
        return [shrunk(p.grad.norm().item()) for p in (*those[-1:], *those[:-1])]


# What lives from one step to the next in the object.


@coupling("running mean in self")
class RunningMean(Coupled):
    mean = 0.0

    def scales(self, those: list[Any]) -> list[float]:
        found = []
        for p in those:
            self.mean = 0.9 * self.mean + 0.1 * p.grad.norm().item()
            found.append(shrunk(self.mean))
        return found


@coupling("counter of parameters in self")
class CountsParameters(Coupled):
    def made(self) -> None:
        self.seen = 0

    def scales(self, those: list[Any]) -> list[float]:
        self.seen += len(those)
        return [1.0 / max(self.seen, 1)] * len(those)


# The shape of the group.


@coupling("position in the group")
class Position(Coupled):
    def scales(self, those: list[Any]) -> list[float]:
        return [0.9**place for place, _ in enumerate(those)]


@coupling("k mod number")
class Rotates(Coupled):
    """In each step another parameter goes twice as far."""

    def made(self) -> None:
        self.k = 0

    def scales(self, those: list[Any]) -> list[float]:
        self.k += bool(those)
        return [2.0 if place == self.k % len(those) else 1.0 for place in range(len(those))]


# Other threads, and numbers that are drawn.


@coupling("a norm on a worker thread")
class OnWorker(Coupled):
    def scales(self, those: list[Any]) -> list[float]:
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(sum(p.grad.norm().item() for p in those)))
        thread.start()
        thread.join()
        return [shrunk(found[0])] * len(those)


@coupling("random")
class DrawsFromPython(Coupled):
    def scales(self, those: list[Any]) -> list[float]:
        return [random.uniform(0.5, 1.5) for _ in those]


@coupling("np.random")
class DrawsFromNumpy(Coupled):
    def scales(self, those: list[Any]) -> list[float]:
        return [float(np.random.uniform(0.5, 1.5)) for _ in those]


@coupling("torch.rand")
class DrawsFromTorch(Coupled):
    def scales(self, those: list[Any]) -> list[float]:
        return [torch.rand(()).item() for _ in those]


@coupling("a numpy Generator of its own")
class DrawsFromItsOwn(Coupled):
    def made(self) -> None:
        self.generator = np.random.default_rng(0)

    def scales(self, those: list[Any]) -> list[float]:
        return [float(self.generator.uniform(0.5, 1.5)) for _ in those]


# Other weights.


@coupling("another weight through a module")
def through_module(model: nn.Module) -> torch.optim.Optimizer:
    class ReadsModule(Coupled):
        model: Any

        def scales(self, those: list[Any]) -> list[float]:
            return [shrunk(self.model[0].weight.sum().item())] * len(those)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            # One after the other, the first of which the others read.
            for p in self.those():
                p.sub_(p.grad, alpha=0.05 * shrunk(self.model[0].weight.sum().item()))

    optimizer = ReadsModule(model.parameters())
    optimizer.model = model
    return optimizer


@coupling("another weight through a closure of step")
def through_closure(model: nn.Module) -> torch.optim.Optimizer:
    first = next(model.parameters())

    class ReadsClosure(Coupled):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.those():
                p.sub_(p.grad, alpha=0.05 * shrunk(first.sum().item()))

    return ReadsClosure(model.parameters())


@coupling(".data")
class ThroughData(Coupled):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        those = self.those()
        if those:
            mean = torch.stack([p.grad.data.mean() for p in those]).mean()
            for p in those:
                p.data = p.data - 0.05 * (p.grad.data - mean)


# Parts of all.


@coupling("a pair, by id")
class Pair(Coupled):
    """The third and the fifth, if both are there."""

    def made(self) -> None:
        whole = self.param_groups[0]["params"]
        self.pair = (id(whole[2]), id(whole[4]))

    def scales(self, those: list[Any]) -> list[float]:
        there = {id(p) for p in those}
        both = there.issuperset(self.pair)
        return [2.0 if both and id(p) in self.pair else 1.0 for p in those]


@coupling("dict by id(p)")
class ById(Coupled):
    """Of each one the update before is kept, and the sum of all of them is read."""

    def made(self) -> None:
        self.norms: dict[int, float] = {}

    def scales(self, those: list[Any]) -> list[float]:
        self.norms.update((id(p), p.grad.norm().item()) for p in those)
        return [shrunk(sum(self.norms.values()))] * len(those)


@coupling("a flat buffer of which weights are views")
class FlatBuffer(torch.optim.Optimizer):
    """All weights lie in one tensor, which is updated as a whole."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        whole = self.param_groups[0]["params"]
        self.flat = torch.cat([p.detach().flatten() for p in whole])
        for p, piece in zip(whole, self.flat.split([p.numel() for p in whole]), strict=True):
            p.data = piece.view_as(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        if found:
            norm = torch.stack([g.norm() for g in found]).norm()
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / (1 + norm), alpha=0.05)


@coupling("decay of all parameters")
class DecaysAll(Coupled):
    """Parameters without a gradient decay, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)


@coupling("a returned value")
class ReturnsNorm(Coupled):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        return sum(p.grad.norm().item() for p in self.those())


@coupling("an update that raises on less than all")
class NeedsAll(Coupled):
    def made(self) -> None:
        self.number = len(self.param_groups[0]["params"])

    def scales(self, those: list[Any]) -> list[float]:
        assert len(self.param_groups[0]["params"]) == self.number
        return [1.0] * len(those)


@coupling("buffers by position")
class ByPosition(Coupled):
    def made(self) -> None:
        self.buffers = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, buffer in zip(self.param_groups[0]["params"], self.buffers, strict=False):
            if p.grad is not None:
                p.sub_(buffer.mul_(0.9).add_(p.grad.view_as(buffer)), alpha=0.05)


@coupling("a compiled step over the list")
def compiled_list(model: nn.Module) -> torch.optim.Optimizer:
    class Compiled(Coupled):
        update: Any

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if those := self.those():
                self.update(those, [p.grad for p in those])

    def update(weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(gradient / (1 + norm))

    optimizer = Compiled(model.parameters())
    optimizer.update = torch.compile(update, backend="eager")
    return optimizer


@coupling("inner optimizer of all", "refused")
class Inner(torch.optim.Optimizer):
    """Lookahead: the inner optimizer has the same groups, and this one a number of steps."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.inner.param_groups = self.param_groups
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.steps += 1
        those = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if those:
            mean = torch.stack([p.mean() for p in those]).mean()
            for p in those:
                p.lerp_(mean, 0.01)


# What nobody can put back.


@coupling("parameters kept in self.params")
class KeepsParams(Coupled):
    def made(self) -> None:
        self.params = list(self.param_groups[0]["params"])

    def those(self) -> list[Any]:
        return [p for p in self.params if p.grad is not None]


ELSEWHERE: dict[int, list[Any]] = {}
"""By the ``id`` of an optimizer."""


@coupling("parameters kept in a dict of the module, written through .data")
class KeepsParamsElsewhere(Coupled):
    def made(self) -> None:
        ELSEWHERE[id(self)] = list(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> Any:
        for p in ELSEWHERE[id(self)]:
            if p.grad is not None:
                p.data.sub_(p.grad.data, alpha=0.05)


@coupling("inner optimizer with groups of its own", "refused")
class InnerOfItsOwn(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.inner = torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


@coupling("itertools.count")
class Counts(Coupled):
    def made(self) -> None:
        self.numbers = itertools.count(1)

    def scales(self, those: list[Any]) -> list[float]:
        return [1.0 / next(self.numbers) for _ in those]


def decreasing() -> Iterator[float]:
    value = 1.0
    while True:
        value *= 0.9
        yield value


@coupling("Python generator")
class FromGenerator(Coupled):
    def made(self) -> None:
        self.numbers = decreasing()

    def scales(self, those: list[Any]) -> list[float]:
        return [next(self.numbers) for _ in those]


@coupling("class attribute")
def in_class(model: nn.Module) -> torch.optim.Optimizer:
    class CountsInClass(Coupled):
        calls = 0

        def scales(self, those: list[Any]) -> list[float]:
            type(self).calls += bool(those)
            return [1.0 / max(1, self.calls)] * len(those)

    return CountsInClass(model.parameters())


CALLS = [0]


@coupling("module global", "refused")
def in_module(model: nn.Module) -> torch.optim.Optimizer:
    CALLS[0] = 0

    class CountsInModule(Coupled):
        def scales(self, those: list[Any]) -> list[float]:
            CALLS[0] += bool(those)
            return [1.0 / max(1, CALLS[0])] * len(those)

    return CountsInModule(model.parameters())


@coupling("__slots__ of the optimizer")
class HasSlots(Coupled):
    __slots__ = ("calls",)

    def made(self) -> None:
        self.calls = 0

    def scales(self, those: list[Any]) -> list[float]:
        self.calls += bool(those)
        return [1.0 / max(1, self.calls)] * len(those)


@coupling("closure of step", "refused")
def in_closure(model: nn.Module) -> torch.optim.Optimizer:
    calls = 0

    class CountsInClosure(Coupled):
        def scales(self, those: list[Any]) -> list[float]:
            nonlocal calls
            calls += bool(those)
            return [1.0 / max(1, calls)] * len(those)

    return CountsInClosure(model.parameters())


@coupling("closure of one's own")
class NeedsClosure(Coupled):
    def made(self) -> None:
        self.closure = lambda: torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "step() needs a closure"
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


# Later.


def norm_of(those: list[Any]) -> float:
    return sum(p.grad.square().sum().item() for p in those)


class CountsSteps(Coupled):
    def made(self) -> None:
        self.steps = 0

    def scales(self, those: list[Any]) -> list[float]:
        self.steps += bool(those)
        return [shrunk(norm_of(those)) if self.is_due(those) else 1.0] * len(those)

    def is_due(self, those: list[Any]) -> bool:
        raise NotImplementedError


@begins_later("after three steps")
class AfterThree(CountsSteps):
    def is_due(self, those: list[Any]) -> bool:
        return self.steps > 3


@begins_later("every third step")
class EveryThird(CountsSteps):
    def is_due(self, those: list[Any]) -> bool:
        return self.steps > 1 and self.steps % 3 == 1  # of the first step in backward nothing is compared again


@begins_later("after three, in state")
class AfterThreeInState(Coupled):
    """The count is that of each parameter."""

    def scales(self, those: list[Any]) -> list[float]:
        for p in those:
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        joint = shrunk(norm_of(those))
        return [joint if self.state[p]["steps"] > 3 else 1.0 for p in those]


@begins_later("when a gradient is large")
class WhenLarge(Coupled):
    """The loop's loss is larger from the fourth step on."""

    def scales(self, those: list[Any]) -> list[float]:
        norm = norm_of(those)
        return [shrunk(norm) if norm > 1e4 else 1.0] * len(those)
