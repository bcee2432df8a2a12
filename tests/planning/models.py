"""What the tests name on the command line."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from instep_tools.training import ByteGPT, Shape


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def rows() -> torch.Tensor:
    return torch.ones(3, 8)


def forty_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(40)])


def two_rows() -> torch.Tensor:
    return torch.ones(2, 128)


def wide_masters(parameters: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    return instep.masters(torch.optim.AdamW, gradients="float32")(parameters, lr=lr)


def layers_and_rows() -> tuple[nn.Module, torch.Tensor]:
    return layers(), rows()


def halves() -> nn.Module:
    return layers().to(torch.bfloat16)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)
        self.head.weight = self.words.weight


def tied_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def matrices() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(20)))


def eights() -> torch.Tensor:
    return torch.ones(1, 8)


def a_number() -> int:
    return 3


def a_failure() -> nn.Module:
    raise RuntimeError("the model's own error\nand more of it")


def frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


class Chooses(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[y > 0]


def chooses() -> tuple[nn.Module, torch.Tensor]:
    return Chooses(4, 4), torch.ones(2, 4)


def squared(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Wraps(torch.optim.SGD):
    """Holds another optimizer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([*params], lr=lr)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=lr)


class CountsInItsGroup(torch.optim.Optimizer):
    """Keeps a tensor in its group, and state of another shape and dtype than the parameter's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("row", torch.zeros(p.shape[-1], dtype=torch.float64))
                    p.sub_(p.grad * group["lr"])


def benchmarked() -> nn.Module:
    """The model of `benchmarks/gradient_memory.py`."""
    return ByteGPT(Shape(width=512, depth=6, heads=8))


def tokens() -> torch.Tensor:
    return torch.zeros(1, 16, dtype=torch.long)


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(16, dtype=torch.long))


class Attending(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.qkv, self.checkpoints = nn.Linear(16, 48), checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpoints else self.attend(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def large_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))


def a_billion_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(5000, 5000, bias=False) for _ in range(40)))


def attending() -> Any:
    return Attending(checkpoints=False), (torch.ones(1, 32, 16),)


def attending_and_checkpointed() -> Any:
    return Attending(checkpoints=True), (torch.ones(1, 32, 16),)
