"""``random="keyed"``: optimizers that draw in their update, and the plain loop whose numbers are to be met. It has an
optimizer for each parameter, each of whose steps draws from generators that are seeded by a key."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.devices import here

SEED = 1234
Make = Callable[[Any], torch.optim.Optimizer]


def round_randomly(into: torch.Tensor, value: torch.Tensor) -> None:
    """float32 into bfloat16: up or down, by chance, and right in the mean."""
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    into.copy_(((bits + noise) & -65536).view(torch.float32))


class Rounded(torch.optim.Optimizer):
    """AdamW of bfloat16 parameters with stochastic rounding."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun = self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad.float(), self.state[p], group, begun)
        return loss

    def begin(self) -> Any:
        """What is found out before the first parameter, with or without gradients."""

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        if not state:
            state["step"], state["m"], state["v"] = 0, torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["step"] += 1
        (first, second), step = group["betas"], state["step"]
        state["m"].lerp_(gradient, 1 - first)
        state["v"].lerp_(gradient.square(), 1 - second)
        scale = (state["v"] / (1 - second**step)).sqrt_().add_(1e-8)
        value = p.float() * (1 - group["lr"] * group["weight_decay"])
        self.write(p, value - group["lr"] * (state["m"] / (1 - first**step)) / scale)

    def write(self, p: torch.Tensor, value: torch.Tensor) -> None:
        if p.dtype is torch.bfloat16:
            round_randomly(p, value)
        else:
            p.copy_(value)


class RoundedAdafactor(Rounded):
    """Rows and columns of squared gradients, and a clipped update, in bfloat16 with stochastic rounding."""

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        squared = gradient.square() + 1e-30
        if p.dim() < 2:
            mean = state["all"] = squared.lerp(state.get("all", squared), 0.9)
            update = gradient * mean.rsqrt()
        else:
            rows, columns = squared.mean(-1), squared.mean(-2)
            rows = state["rows"] = rows.lerp(state.get("rows", rows), 0.9)
            columns = state["columns"] = columns.lerp(state.get("columns", columns), 0.9)
            scale = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)
            update = gradient * scale
        update = update / torch.clamp(update.norm() / update.numel() ** 0.5, min=1.0)
        self.write(p, p.float() - group["lr"] * update)


class Langevin(Rounded):
    """SGD with noise (SGLD): what is drawn is added to each parameter."""

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        self.write(p, p.float() - group["lr"] * gradient + group["lr"] * torch.randn_like(p, dtype=torch.float32))


class LangevinByKeys(Rounded):
    """The same in a plain loop: ``step()`` itself seeds torch's generators for each parameter, and puts them back.

    Attributes:
        number: of the next step that finds a gradient.
    """

    def __init__(self, params: Any, names: Mapping[int, str], **options: Any) -> None:
        super().__init__(params, **options)
        self._names = names
        self.number = 0

    def begin(self) -> Any:
        number = self.number
        self.number += any(p.grad is not None for group in self.param_groups for p in group["params"])
        return number

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        shard = p.device_mesh.get_local_rank() if isinstance(p, DTensor) else None
        with drawing_by(key_of(begun, self._names[id(p)], shard)):
            Langevin.update(self, p, gradient, state, group, begun)  # type: ignore[arg-type]


LangevinByKeys.__name__ = Langevin.__name__  # by which two states are compared


class Whitened(Rounded):
    """Kron-like: ``step()`` throws a coin for whether to renew preconditioners, with or without gradients."""

    def begin(self) -> bool:
        return bool(torch.rand([], device="cpu") < 0.5)

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        if not state:
            state["scale"] = torch.ones_like(gradient)
        if begun:
            probe = torch.randn_like(gradient)
            state["scale"].lerp_((gradient * probe).abs() + 0.1, 0.3)
        self.write(p, p.float() - group["lr"] * gradient / state["scale"])


RECIPES: Mapping[str, type[Rounded]] = {
    "AdamW, rounded": Rounded,
    "Adafactor, rounded": RoundedAdafactor,
    "Langevin": Langevin,
    "Kron-like": Whitened,
}


class Dropping(nn.Module):
    """The loop draws, too."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.Dropout(0.3), nn.GELU()) for _ in range(2)
        )
        self.outer = nn.Linear(24, 10)
        self.to(here(), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.to(self.inner.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.outer(x).float()
        return out


def groups_of(model: nn.Module, lr: float = 1e-2) -> list[dict[str, Any]]:
    """Two, of which the second learns faster."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "lr": lr}, {"params": parameters[1::2], "lr": 3 * lr}]


def key_of(step: int, name: str, shard: int | None = None, seed: int = SEED) -> int:
    """By the words of ``instep.draw_key``, and not by its code."""
    text = "/".join([str(seed), str(step), "" if shard is None else str(shard), name])
    return int(hashlib.blake2b(text.encode("utf-8"), digest_size=64).hexdigest()[:16], 16) & ((1 << 63) - 1)


def generators() -> list[torch.Generator]:
    """torch's default ones, of the CPU and of the device that the tests run on."""
    found = [torch.default_generator]
    if here().type != "cpu":
        found.append(torch.get_device_module(here()).default_generators[here().index])
    return found


@contextmanager
def drawing_by(key: int) -> Iterator[None]:
    before = [generator.get_state() for generator in generators()]
    for generator in generators():
        generator.manual_seed(key)
    yield
    for generator, state in zip(generators(), before, strict=True):
        generator.set_state(state)


class ByHand:
    """The optimizers of a plain loop, one for each parameter.

    Args:
        groups: as one optimizer would be given them.
        names: of the parameters, by ``id``.
        shards: which shard of it this rank steps, by name.

    Attributes:
        number: of the next step.
    """

    def __init__(
        self,
        make: Make,
        groups: list[dict[str, Any]],
        names: Mapping[int, str],
        shards: Mapping[str, int] | None = None,
    ) -> None:
        self._make = make
        self._shards = shards or {}
        self.number = 0
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for group in groups:
            self.add(group, names)

    def add(self, group: dict[str, Any], names: Mapping[int, str]) -> None:
        for p in group["params"]:
            self.optimizers[names[id(p)]] = self._make([{**group, "params": [p]}])

    def step(self) -> None:
        for name, optimizer in self.optimizers.items():
            with drawing_by(key_of(self.number, name, self._shards.get(name))):
                optimizer.step()
        self.number += 1

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def state(self) -> Iterator[tuple[str, Any]]:
        for name, optimizer in self.optimizers.items():
            (group,) = optimizer.param_groups
            yield from _of_one(name, group["params"][0], optimizer, group)


def state_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield from _of_one(names[id(p)], p, optimizer, group)


def _of_one(
    name: str, p: torch.Tensor, optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    yield name, p.detach()
    for key, value in optimizer.state.get(p, {}).items():
        yield f"{name}: {key}", value
    yield f"{name}: lr", group["lr"]


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}
