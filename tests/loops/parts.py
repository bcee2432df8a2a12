"""Small networks and data for the forms."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.loops.form import Run

Pair = tuple[torch.Tensor, torch.Tensor]
STEPS = 6


def rows(steps: int = STEPS, size: int = 8, width: int = 12, classes: int = 4) -> Iterator[Pair]:
    """Batches of vectors and their classes."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(size, width, generator=draw), torch.randint(classes, (size,), generator=draw)


def images(steps: int = STEPS, size: int = 4, channels: int = 1, side: int = 8) -> Iterator[Pair]:
    """Batches of images and their classes."""
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        yield torch.randn(size, channels, side, side, generator=draw), torch.randint(4, (size,), generator=draw)


def tokens(steps: int = STEPS, size: int = 4, length: int = 8, vocabulary: int = 20) -> Iterator[Pair]:
    """Batches of tokens and the tokens that follow."""
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        text = torch.randint(vocabulary, (size, length + 1), generator=draw)
        yield text[:, :-1], text[:, 1:]


def fit(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, **looks: Callable[[], Any]
) -> None:
    """The usual loop over ``rows``. What ``looks`` return after each step is logged."""
    for x, y in rows(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item(), **{name: look() for name, look in looks.items()})


def mlp(inner: int = 12, out: int = 4, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))


class ConvNet(nn.Module):
    """Convolutions with batch normalization and dropout, and a linear layer."""

    def __init__(self, channels: int = 1, out: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU()
        )
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 9, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(x).flatten(1)))


class Block(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.feed(self.norm2(x))


class Text(nn.Module):
    """A language model whose output layer is its embedding, if ``tied``."""

    def __init__(self, width: int = 16, depth: int = 2, vocabulary: int = 20, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def features(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(text))


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
