"""Losses of a large vocabulary, whose logits are never all there at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.devices import here
from tests.parity.lockstep import in_micro_batches, lockstep

WORDS, CHUNK = 96, 8


class Words(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(self.words(tokens))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()


def in_chunks(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    def of_chunk(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, model.words.weight), targets, reduction="sum")

    x, targets = model(tokens)
    chunks = zip(x.split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.stack([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum() / len(targets)


def of_torch(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """It computes gradients in forward, and refuses a second backward unless it is told that one follows."""
    make: Any = nn.LinearCrossEntropyOptions
    x, targets = model(tokens)
    options = make(batch_chunk_size=CHUNK, allow_retain_graph=True)
    loss: torch.Tensor = F.linear_cross_entropy(x, model.words.weight, targets, options=options)
    return loss


LOSSES = [
    in_chunks,
    pytest.param(of_torch, marks=pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="since torch 2.13")),
]


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Words()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (3, 11), generator=torch.Generator().manual_seed(seed)).to(here())


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("way", ["backward", "undo", "forward"])
def test_micro_batches(way: str, loss_of: Any) -> None:
    lockstep(way, _built, in_micro_batches(lambda lane, seed: loss_of(lane.model, _tokens(seed))))


@pytest.mark.parametrize("loss_of", LOSSES)
def test_clipping_in_two_passes(loss_of: Any) -> None:
    lockstep("two_pass", _built, lambda lane, i: lane.learn(loss_of(lane.model, _tokens(i))))
