"""Small optimizers with one oddity each, of kinds that are met in published ones."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

HANDLES: dict[int, float] = {}
"""What a native library would keep for its objects."""


class Own(torch.optim.Optimizer):
    """One update for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def before(self) -> None:
        """Once in each ``step()``."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)


class Warmed(Own):
    """Keeps a function over itself: over the object, compiled, or over a group."""

    def __init__(self, params: Any, lr: float = 1e-2, keeps: str = "function") -> None:
        super().__init__(params, lr)
        self.count = 0
        self.param_groups[0]["count"] = 0
        self.rate: Callable[[], float] = {
            "function": lambda: 1 / (1 + self.count),
            "compiled": torch.compile(self.rate_now, backend="eager", dynamic=False),
            "group": lambda: 1 / (1 + self.param_groups[0]["count"]),
        }[keeps]

    def rate_now(self) -> float:
        return 1 / (1 + self.count)

    def before(self) -> None:
        self.count += 1
        self.param_groups[0]["count"] += 1

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * self.rate() * p.grad)


class Native(Own):
    """Gives back in its finalizer the handle that its constructor took."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.handle = len(HANDLES)
        HANDLES[self.handle] = 0.5

    def __del__(self) -> None:
        HANDLES.pop(self.handle, None)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * HANDLES[self.handle] * p.grad)


def _update(p: Any, g: Any, m: Any, v: Any, lr: float) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    n = (m * m).sum().sqrt() + (g * g).sum().sqrt()
    p.sub_(lr * m / (v.sqrt() + 1e-8) * torch.tanh(n) * torch.exp(-n))


@cache
def _compiled() -> Callable[..., None]:
    """One for the process, as where a module decorates it; made late, since it imports the compiler."""
    return torch.compile(_update, dynamic=False)


class Compiled(Own):
    """Compiles its update for each shape."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        _compiled()(p, p.grad, state["m"], state["v"], group["lr"])


class Late(Own):
    """Couples all parameters in every third step."""

    def before(self) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm().item() if self.steps % 3 == 0 else 1.0
        self.scale = 1.0 / (1.0 + norm)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * self.scale * p.grad)


class Counted(Own):
    """Has a count that no attribute holds: each update draws the next number of a generator."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.numbers = (1 / n for n in iter(range(1, 10**6)))

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * next(self.numbers) * p.grad)


class OfPosition(Own):
    """Later parameters of a group learn slower: where a parameter stands matters."""

    def before(self) -> None:
        self.place = 0

    def update(self, p: Any, group: dict[str, Any]) -> None:
        self.place += 1
        p.sub_(group["lr"] / self.place * p.grad)
