"""A tiny model of transformers', and data for it."""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

VOCABULARY, LENGTH = 48, 10
logging.disable_progress_bar()


def tiny() -> GPT2LMHeadModel:
    """Two layers of width 32, the output layer tied to the embedding, and one that is not used. Always with the same
    weights."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.never_used = nn.Linear(2, 2)
    return model


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": one, "labels": one} for one in found]


def hooks_of(module: nn.Module) -> dict[str, int]:
    """How many hooks there are in ``module``, of each kind."""
    found: dict[str, int] = {}
    for one in module.modules():
        for name, value in vars(one).items():
            if name.endswith("_hooks") and value:
                found[name] = found.get(name, 0) + len(value)
    return found


def most_gradients(of: Any) -> int:
    """The most bytes of gradients that are there when one is complete, while ``of`` trains."""
    most = 0

    def seen(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in of.model.parameters() if type(p.grad) is torch.Tensor))

    handles = [p.register_post_accumulate_grad_hook(seen) for p in of.model.parameters()]
    of.train()
    for handle in handles:
        handle.remove()
    return most
