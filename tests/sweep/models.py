"""The nets that the cases train, and their batches: small, of the layers that people train."""

from typing import Any

import torch
from torch import nn

WORDS, WIDTH, LENGTH = 96, 64, 12
"""A weight of 64 by 64 or more has the 4,096 elements from which low-bit optimizers quantize their state."""


class Block(nn.Module):
    """Attention of one head, and two linear layers: what FSDP shards as one group."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)  # draws: a generator that attach leaves advanced shows in the weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(1, 2) / WIDTH**0.5
        y = x + torch.softmax(scores, -1) @ self.v(y)
        return y + self.dropout(self.down(torch.tanh(self.up(y))))


class Net(nn.Module):
    """Embedding, two blocks, of which ``depth`` are used, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.depth = 2
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x)
        for block in self.blocks[: self.depth]:
            y = block(y)
        return self.head(self.norm(y))


class Spherical(Net):
    """Weights on geoopt's sphere, and a layer of them that no forward uses."""

    def __init__(self) -> None:
        import geoopt

        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        layers: list[Any] = [self.unused, *(block.up for block in self.blocks if isinstance(block, Block))]
        for layer in layers:
            sphere = geoopt.Sphere()
            layer.weight = geoopt.ManifoldParameter(sphere.projx(layer.weight.detach()), manifold=sphere)


def half() -> nn.Module:
    return Net().bfloat16()


def int8() -> nn.Module:
    """Weights in torchao's int8, which training rounds stochastically.

    Those of ``up`` and ``down``: its backward views gradients, which of queries and keys are not contiguous.
    """
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    net = Net()
    quantize_(net, int8_weight_only_quantized_training(), filter_fn=lambda _, name: name.endswith(("up", "down")))
    return net


def adapted(**options: Any) -> nn.Module:
    """Adapters of peft at attention and linear layers; the rest is frozen."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q", "v", "up", "down"], **options)
    return peft.get_peft_model(Net(), config)  # it takes any module


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1000 * rank + step))
    return words[:, :-1], words[:, 1:]
