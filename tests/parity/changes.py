"""Optimizers and settings that a loop, or the optimizer itself, changes while it trains."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.cases import Blocks, grad_of, two_groups
from tests.devices import here


def move_one(optimizer: Any, i: int) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


class Compared:
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.lr == other.lr  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


class Plain(Compared):
    def __init__(self, lr: float = 0.05, more: Any = None) -> None:
        self.lr, self.more = lr, more


class Configured(torch.optim.Optimizer):
    """Reads its learning rate, and a factor, from wherever it was given them."""

    def __init__(self, params: Any, read: Callable[[Any, dict[str, Any]], float], **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.read = read

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.sub_(momentum, alpha=float(self.read(self, group)))


def configured(read: Callable[[Any, dict[str, Any]], float], give: Callable[[Any], None]) -> Callable[[], Any]:
    def build() -> Any:
        model = Blocks(depth=2)
        optimizer = Configured(two_groups(model), read)
        give(optimizer)
        return model, optimizer

    return build


def through_data(lr: torch.Tensor, value: float) -> None:
    lr.data.fill_(value)


def first(optimizer: Any) -> Any:
    return optimizer.param_groups[0]["params"][0]


def pop(optimizer: Any) -> None:
    optimizer.state.pop(first(optimizer))


def put_another_tensor(optimizer: Any) -> None:
    entry = optimizer.state[first(optimizer)]
    entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])


LATER = 16


class Later(torch.optim.Optimizer):
    """SGD; later on it does something more with each parameter."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.05, **defaults})

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    entry = self.state[p]
                    entry["count"] = entry.get("count", 0) + 1
                    p.sub_(p.grad * (self.factor(p, group) if entry["count"] >= LATER else 1.0), alpha=group["lr"])


def drawing(draw: Callable[[Any, dict[str, Any]], float], give: Callable[[Any], None] = lambda o: None) -> Any:
    class Draws(Later):
        def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
            return draw(self, group)

    def build() -> Any:
        random.seed(0)
        np.random.seed(0)
        model = Blocks(depth=2)
        optimizer = Draws(two_groups(model))
        give(optimizer)
        return model, optimizer

    return build


class Holder:
    def __init__(self) -> None:
        self.inside = [torch.Generator(here()).manual_seed(0)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder)

    __hash__ = None  # type: ignore[assignment]


def holders_in_groups(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["holder"] = Holder()


DRAWS = {
    "torch": drawing(lambda o, g: float(torch.rand(()))),
    "random": drawing(lambda o, g: random.random()),
    "NumPy": drawing(lambda o, g: float(np.random.rand())),
    "its own": drawing(
        lambda o, g: float(torch.rand((), generator=o.generator)),
        lambda o: setattr(o, "generator", torch.Generator(here()).manual_seed(0)),
    ),
    "in an object": drawing(
        lambda o, g: float(torch.rand((), generator=o.holder.inside[0])), lambda o: setattr(o, "holder", Holder())
    ),
    "in its groups": drawing(lambda o, g: float(torch.rand((), generator=g["holder"].inside[0])), holders_in_groups),
    "Python's, its own": drawing(
        lambda o, g: float(o.generator.random()), lambda o: setattr(o, "generator", random.Random(0))
    ),
}


class Writes(torch.optim.Optimizer):
    """SGD with momentum, after something was done to the gradient."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def write(self, p: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(self.write(p))
                    p.sub_(momentum, alpha=group["lr"])


class Decays(Writes):
    def write(self, p: Any) -> torch.Tensor:
        return p.grad.add_(p, alpha=0.3)


class Replaces(Writes):
    def write(self, p: Any) -> torch.Tensor:
        p.grad = p.grad + 0.3 * p
        return p.grad


class Odd(nn.Module):
    """One weight has a shape that no probe makes up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 41)
        self.odd = nn.Linear(41, 37)
        self.outer = nn.Linear(37, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.odd(torch.tanh(self.inner(x)))))


def couple(optimizer: Any, mine: list[torch.Tensor]) -> None:
    norm = torch.stack([grad_of(p).norm() for p in mine]).norm()
    for p in mine:
        p.sub_(p.grad / norm, alpha=1e-3)


def couple_state(optimizer: Any, mine: list[torch.Tensor]) -> None:
    norm = torch.stack([grad_of(p).norm() for p in mine]).norm()
    for p in mine:
        optimizer.state[p]["momentum"].div_(1 + norm)


LATE: dict[str, tuple[Any, str]] = {
    "couples": (couple, "couples parameters.*step 3.*parameter '"),
    "couples its state": (couple_state, "couples parameters.*step 3.*state 'momentum' of parameter '"),
}
