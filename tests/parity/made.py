"""Hand-written optimizers, composed of switches: whatever somebody may write into a ``step()``."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.devices import here

SIZE = 1_600  # elements, 40 x 40: of a parameter that is larger than those anybody would make up
SCALE = 100.0  # of a gradient that is larger than those anybody would make up
COMPARED = 2  # updates: what begins later is silent until a later comparison


@dataclass(frozen=True)
class Recipe:
    """What the ``step()`` of a hand-written optimizer does.

    Attributes:
        gradient: what becomes of ``p.grad``: ``"read"``, ``"decayed"`` or ``"centralized"`` in place, ``"replaced"``,
            or a ``"product"`` of three matrices, which autocast computes in its own dtype.
        decays_all: parameters without a gradient are decayed too.
        memory: where the momentum is kept: ``"state"``; an attribute, by ``"position"``, ``"name"`` or
            ``"parameter"``, or by parameter in an ``"object"``; ``"on the parameter"``; the ``"group"``; ``"nowhere"``.
        couples: parameters are scaled by a norm over all of them, ``"always"``, or those of a large ``"size"`` or with
            gradients of a large ``"scale"``.
        draws: where random numbers come from: ``"torch"``, ``"numpy"`` and ``"random"`` are the global generators,
            ``"torch generator"``, ``"numpy generator"`` and ``"random generator"`` the optimizer's own.
        draws_for: all parameters, or those of a large size.
        since: the step, counted from 1, from which it couples and draws.
        counts: where steps are counted, for a rate that decays.
        settings: where the learning rate is.
        returns: whether ``step()`` returns what it did.
    """

    gradient: str = "read"
    decays_all: bool = False
    memory: str = "state"
    couples: str | None = None
    draws: str | None = None
    draws_for: str = "all"
    since: int = 1
    counts: str | None = None
    settings: str = "group"
    returns: bool = False

    @property
    def is_late(self) -> bool:
        """Whether it may begin to couple parameters, or to draw, after the updates that are compared."""
        late = self.since > COMPARED and (self.couples or self.draws)
        return bool(late or self.couples == "scale")


recipes = st.builds(
    Recipe,
    gradient=st.sampled_from(["read", "read", "decayed", "centralized", "replaced", "product"]),
    decays_all=st.sampled_from([False, False, False, True]),
    memory=st.sampled_from(
        ["state"] * 5 + ["position", "name", "parameter", "object", "on the parameter", "group", "nowhere"]
    ),
    couples=st.sampled_from([None, None, None, None, "always", "size", "scale"]),
    draws=st.sampled_from(
        [None] * 12
        + ["torch", "torch generator", "numpy", "numpy generator", "random", "random generator"]
    ),
    draws_for=st.sampled_from(["all", "large"]),
    since=st.integers(1, 8),
    counts=st.sampled_from([None, None, "group", "attribute", "tensor", "object", "list", "state"]),
    settings=st.sampled_from(["group", "group", "tensor", "object in the group", "object"]),
    returns=st.sampled_from([False, False, False, True]),
)  # fmt: skip


@dataclass
class Settings:
    lr: float


@dataclass
class Counter:
    n: int = 0


@dataclass
class Generators:
    """Those an optimizer may have of its own."""

    torch: Any = field(default_factory=lambda: torch.Generator(here()).manual_seed(5))
    numpy: Any = field(default_factory=lambda: np.random.default_rng(5))
    random: Any = field(default_factory=lambda: random.Random(5))


class Made(torch.optim.Optimizer):
    """SGD with momentum, as its recipe says."""

    torch_generator: Any
    numpy_generator: Any
    random_generator: Any

    def __init__(self, params: Any, lr: float, recipe: Recipe) -> None:
        super().__init__(params, {"lr": lr})
        self.recipe = recipe
        for group in self.param_groups:
            self._place_settings(group)
        if recipe.settings == "object":
            self.settings = Settings(lr)
        if recipe.counts in ("attribute", "tensor", "object", "list"):
            made = {"attribute": 0, "tensor": torch.zeros(()), "object": Counter(), "list": [0]}
            self.count: Any = made[recipe.counts]
        if recipe.draws is not None and recipe.draws.endswith("generator"):
            kind = recipe.draws.split()[0]
            setattr(self, f"{kind}_generator", getattr(Generators(), kind))
        if recipe.memory in ("position", "name", "parameter"):
            self.memory: Any = {}
        elif recipe.memory == "object":
            self.memory = SimpleNamespace(entries={})

    def _place_settings(self, group: dict[str, Any]) -> None:
        if self.recipe.settings == "tensor":
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        elif self.recipe.settings == "object in the group":
            group["cfg"] = Settings(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        self._count()
        stepped = [
            (group, position, p, self._entry(group, position, p))
            for group, position, p in self._parameters()
            if p.grad is not None
        ]
        for *_, entry in stepped:
            entry["step"] = entry.get("step", 0) + 1
        norm = self._norm(stepped)
        if self.recipe.decays_all:
            for *_, p in self._parameters():
                p.mul_(0.99)
        for group, _, p, entry in stepped:
            self._update(group, p, entry, norm)
        return len(stepped) if self.recipe.returns else returned

    def _parameters(self) -> Iterator[tuple[dict[str, Any], int, torch.Tensor]]:
        position = 0
        for group in self.param_groups:
            for p in group["params"]:
                yield group, position, p
                position += 1

    def _entry(self, group: dict[str, Any], position: int, p: torch.Tensor) -> dict[str, Any]:
        memory = self.recipe.memory
        place: Any
        key: Any
        if memory in ("state", "nowhere"):
            return self.state[p]
        if memory == "group":
            place, key = group.setdefault("memory", {}), position
        elif memory == "name":
            place, key = self.memory, group["param_names"][next(i for i, q in enumerate(group["params"]) if q is p)]
        elif memory == "on the parameter":
            place, key = vars(p), "memory"
        elif memory == "object":
            place, key = self.memory.entries, p
        else:
            place, key = self.memory, p if memory == "parameter" else position
        return place.setdefault(key, {})

    def _norm(self, stepped: list[Any]) -> torch.Tensor | None:
        """Over those that are coupled."""
        coupled = [p.grad.double().norm() for _, _, p, entry in stepped if self._couples(p, entry)]
        return torch.stack(coupled).norm() if coupled else None

    def _couples(self, p: Any, entry: dict[str, Any]) -> bool:
        couples = self.recipe.couples
        if couples is None or entry["step"] < self.recipe.since:
            return False
        return (
            couples == "always"
            or (couples == "size" and p.numel() > SIZE)
            or (couples == "scale" and bool(p.grad.norm() > SCALE))
        )

    def _update(self, group: dict[str, Any], p: Any, entry: dict[str, Any], norm: torch.Tensor | None) -> None:
        gradient = self._changed(p)
        if norm is not None and self._couples(p, entry):
            gradient = gradient / (1 + norm.item())
        if self.recipe.memory != "nowhere":
            if "momentum" not in entry:
                entry["momentum"] = torch.zeros_like(p)
            gradient = entry["momentum"].mul_(0.5).add_(gradient)
        large = p.numel() > SIZE
        if self.recipe.draws and entry["step"] >= self.recipe.since and (large or self.recipe.draws_for == "all"):
            gradient = gradient * (1 + self._draw())
        p.add_(gradient, alpha=-self._rate(group))

    def _changed(self, p: Any) -> torch.Tensor:
        kind = self.recipe.gradient
        if kind == "decayed":
            p.grad.add_(p, alpha=0.1)
        elif kind == "centralized":
            p.grad.sub_(p.grad.mean())
        elif kind == "replaced":
            p.grad = p.grad + 0.1 * p
        elif kind == "product" and p.dim() == 2:
            unit = p.grad / (1 + p.grad.norm())
            return (unit @ unit.T @ unit).to(p.dtype)
        return p.grad

    def _rate(self, group: dict[str, Any]) -> float:
        if self.recipe.settings == "object":
            rate = self.settings.lr
        elif self.recipe.settings == "object in the group":
            rate = group["cfg"].lr
        else:
            rate = float(group["lr"])
        return rate / (1 + 0.25 * self._counted(group))

    def _count(self) -> None:
        kind = self.recipe.counts
        if kind == "group":
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
        elif kind == "state":
            self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload]  # a name
        elif kind == "object":
            self.count.n += 1
        elif kind == "list":
            self.count[0] += 1
        elif kind is not None:
            self.count += 1

    def _counted(self, group: dict[str, Any]) -> float:
        kind = self.recipe.counts
        if kind is None:
            return 0.0
        if kind == "group":
            return float(group["count"])
        if kind == "state":
            return float(self.state["count"])  # type: ignore[index]
        return float({"object": lambda: self.count.n, "list": lambda: self.count[0]}.get(kind, lambda: self.count)())

    def _draw(self) -> float:
        draws = {
            "torch": lambda: torch.rand(()).item(),
            "torch generator": lambda: torch.rand((), generator=self.torch_generator).item(),
            "numpy": np.random.rand,
            "numpy generator": lambda: self.numpy_generator.random(),
            "random": random.random,
            "random generator": lambda: self.random_generator.random(),
        }
        return float(draws[str(self.recipe.draws)]())

    def outside(self) -> Iterator[tuple[str, Any]]:
        """What it keeps beside ``state`` and ``param_groups``."""
        count = vars(self).get("count")
        yield "count", count.n if isinstance(count, Counter) else count
        if self.recipe.memory not in ("state", "group", "nowhere"):
            for group, position, p in self._parameters():
                for key, value in self._entry(group, position, p).items():
                    yield f"memory of {position}: {key}", value
        if hasattr(self, "torch_generator"):
            yield "torch generator", self.torch_generator.get_state()
        if hasattr(self, "numpy_generator"):
            yield "numpy generator", repr(self.numpy_generator.bit_generator.state)
        if hasattr(self, "random_generator"):
            yield "random generator", self.random_generator.getstate()
