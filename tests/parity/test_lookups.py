"""Micro-batches of a model whose head is its embedding: but for the rows that are looked up, what a lookup contributes
are zeros, so that the gradients of the head wait for it in these rows alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from tests.cases import Tied
from tests.devices import here
from tests.parity.lockstep import Contender, in_every_way, in_micro_batches, lockstep, loss_of

WORDS = 512
"""Of which a test looks up fewer than half."""


def tokens(seed: int, words: int = WORDS, **options: Any) -> torch.Tensor:
    return torch.randint(words, (2, 6), generator=torch.Generator("cpu").manual_seed(seed), **options).to(here())


def built(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied(words=WORDS).to(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def usual(lane: Contender, seed: int) -> torch.Tensor:
    words = tokens(seed)
    return loss_of(lane.model(words).flatten(0, 1), words.flatten())


@in_every_way
def test_every_way(way: str) -> None:
    lockstep(way, built, in_micro_batches(usual))


def test_bfloat16() -> None:
    lockstep("backward", partial(built, dtype=torch.bfloat16), in_micro_batches(usual))


def test_masters() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tied(words=WORDS).to(torch.bfloat16)
        return model, instep.masters(torch.optim.AdamW)(model.parameters(), lr=1e-2)

    lockstep("backward", build, in_micro_batches(usual))


Uses = Callable[[Any, torch.Tensor, int], torch.Tensor]


def twice(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    """An encoder and a decoder that look up the same words."""
    return model.head(torch.tanh(model.middle(model.embedding(words) + model.embedding(words.flip(1)))))


def looked_up_first_and_last(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    """Backward comes to a lookup before it comes to the head."""
    return model(words) + model.embedding(words).mean()


def padded(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    x = F.embedding(words, model.embedding.weight, padding_idx=int(words[0, 0]), scale_grad_by_freq=True)
    return model.head(model.middle(x))


def short_numbers(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    return model(words.int())


def the_head_in_some(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    x = torch.tanh(model.middle(model.embedding(words)))
    return model.head(x) if micro % 2 else x @ torch.ones(16, WORDS, device=x.device)


def lookups_in_some(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    return model(words) if micro % 2 else model.head(model.middle(torch.ones(*words.shape, 16, device=words.device)))


def a_head_in_parts(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    x = model.middle(model.embedding(words))
    return torch.cat([model.head(part) for part in x.split(2)])


def behind_hooks(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    """What is saved is packed: nobody asks for the words."""
    with torch.autograd.graph.save_on_cpu():
        return model(words)


class Reads(torch.autograd.Function):
    """Uses a weight, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0][..., :16], None


def a_head_without_gradients(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    logits: torch.Tensor = Reads.apply(model.middle(model.embedding(words)), model.embedding.weight)
    return logits


def a_penalty(model: Any, words: torch.Tensor, micro: int) -> torch.Tensor:
    return model(words) + model.embedding.weight.square().sum()


@pytest.mark.parametrize(
    "uses",
    [
        twice,
        looked_up_first_and_last,
        padded,
        short_numbers,
        the_head_in_some,
        lookups_in_some,
        a_head_in_parts,
        behind_hooks,
        a_head_without_gradients,
        a_penalty,
    ],
)
def test_uses(uses: Uses) -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        words = tokens(seed)
        return loss_of(uses(lane.model, words, seed % 3).flatten(0, 1), words.flatten())

    lockstep("backward", built, in_micro_batches(loss))


def test_a_vocabulary_of_which_most_is_looked_up() -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        words = torch.arange(seed, seed + 2 * WORDS // 5, device=here()).view(2, -1) % WORDS
        return loss_of(lane.model(words).flatten(0, 1), words.flatten())

    lockstep("backward", built, in_micro_batches(loss))


def test_the_sign_of_a_zero_is_that_of_the_plain_loop() -> None:
    """0.0 of a lookup makes 0.0 of -0.0."""
    weights = [nn.Parameter(torch.ones(WORDS, 2, device=here())) for _ in range(2)]

    class Looks(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, seed: int) -> torch.Tensor:
            return F.embedding(tokens(seed), self.weight).sum() - (self.weight * 0.0).sum()

    plain, model = map(Looks, weights)
    for seed in range(3):
        plain(seed).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        with overlap.keep_gradients():
            overlap.micro_batches(model, range(3))
        expected, found = (weight.grad for weight in weights)
        assert expected is not None
        assert found is not None
        assert torch.equal(found, expected)
        assert torch.equal(found.signbit(), expected.signbit())
        assert (found == 0).any()
        optimizer.step()


def test_a_checkpointed_embedding_is_not_computed_again_for_its_words() -> None:
    computed = []

    class Checkpointed(Tied):
        def looked_up(self, words: torch.Tensor) -> torch.Tensor:
            computed.append(words)
            return self.embedding(words)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.looked_up, words, use_reentrant=False))

    model = Checkpointed(words=WORDS).to(here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        overlap.micro_batches(lambda seed: model(tokens(seed)).square().mean(), range(3))
        assert len(computed) == 6
        optimizer.step()
