"""The rows of the parity tables: optimizers in all their forms, and small models with something odd about them."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from tests.devices import default_device

OptimizerCase = tuple[str, type[torch.optim.Optimizer], dict[str, Any]]

_KWARGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True},
    ],
    "Adam": [{"lr": 1e-2, "weight_decay": 0.01}, {"lr": 1e-2, "amsgrad": True}],
    "AdamW": [{"lr": 1e-2}, {"lr": 1e-2, "amsgrad": True, "maximize": True}],
    "NAdam": [{"lr": 1e-2, "weight_decay": 0.01}],
    "RAdam": [{"lr": 1e-2}],
    "Adagrad": [{"lr": 1e-2, "lr_decay": 0.1}],
    "Adadelta": [{"lr": 1.0}],
    "Adamax": [{"lr": 1e-2}],
    "ASGD": [{"lr": 1e-2, "t0": 2}],
    "RMSprop": [{"lr": 1e-2, "momentum": 0.9, "centered": True}],
    "Rprop": [{"lr": 1e-2}],
    "Adafactor": [{"lr": 1e-2}],
}


def optimizer_cases() -> Iterator[OptimizerCase]:
    """Every optimizer of ``torch.optim`` that updates parameter by parameter, in each implementation it has."""
    for name, variants in _KWARGS.items():
        cls = getattr(torch.optim, name)
        accepted = inspect.signature(cls).parameters
        for number, kwargs in enumerate(variants):
            for form in ("for-loop", "foreach", "fused"):
                flags = {"foreach": False} if form == "for-loop" else {form: True}
                if set(flags) <= set(accepted):
                    yield f"{name}-{number}-{form}", cls, {**kwargs, **flags}


class Blocks(nn.Module):
    """Residual blocks between a linear layer in and one out: enough parameters for several buckets."""

    def __init__(self, width: int = 24, depth: int = 3, out: int = 10) -> None:
        super().__init__()
        self.inner = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.outer = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outer(x)


class Checkpointed(Blocks):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outer(x)


class Reentrant(Checkpointed):
    reentrant = True


class Tied(nn.Module):
    """A byte model whose output layer is its embedding."""

    def __init__(self, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Sometimes(nn.Module):
    """Two experts of which the input picks one, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        x = self.trunk(x)
        if expert is not None:
            x = x + self.experts[expert](x)
        return self.out(x)


class Rotations(nn.Module):
    """A complex parameter between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 6)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.outer = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer((self.inner(x) * self.turn).real)


assign: Callable[[Any, str, Any], Any] = setattr
"""``setattr`` where an expression is needed."""


def attachment_of(model: nn.Module) -> instep.Attachment:
    """The attachment of a model that has one."""
    overlap = instep.attached(model)
    assert overlap is not None
    return overlap


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that has one; ``.grad`` is read once."""
    grad = parameter.grad
    assert grad is not None
    return grad


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters as they are in memory: instep is not told that somebody reads them."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach().clone() for p in model.parameters()]


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values on every device; on torch's default one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator, device="cpu")
    y = torch.randint(0, 10, (rows,), generator=generator, device="cpu")
    return x.to(default_device()), y.to(default_device())


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest, the rest with a learning rate of its own."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices}, {"params": rest, "lr": 3e-3}]


class SparseWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8, sparse=True)
        self.out = nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(tokens))


def channels_last() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 10, 2), nn.Flatten())
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out


class Transposed(nn.Module):
    """A dense parameter whose strides are not those of its shape, and one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.randn(10, 16).t())
        self.gaps = nn.Parameter(torch.randn(16, 20)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.dense + x @ self.gaps
