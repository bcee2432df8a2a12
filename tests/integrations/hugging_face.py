"""What the tests of the ``Trainer`` and of accelerate share: a tiny model, its data, and two ranks."""

import gc
from collections.abc import Iterator

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from tests.distributed.pool import RankPool

VOCABULARY, LENGTH = 48, 10
logging.disable_progress_bar()


def tiny(dropout: float = 0.1) -> GPT2LMHeadModel:
    """Two layers of width 32, the output layer tied to the embedding, always with the same weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": one, "labels": one} for one in found]


def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    pool.run(_freeze)
    yield pool
    pool.stop()


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # transformers is there for good, as torch is: see the pool


def hooks_of(module: nn.Module) -> dict[str, int]:
    """How many hooks there are in ``module``, of each kind."""
    found: dict[str, int] = {}
    for one in module.modules():
        for name, value in vars(one).items():
            if name.endswith("_hooks") and value:
                found[name] = found.get(name, 0) + len(value)
    return found
