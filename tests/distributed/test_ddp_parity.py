"""Under DistributedDataParallel: the attached loop beside the plain one, in the same ranks, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from tests.cases import Blocks, Rotations, Sometimes, SparseWords, Tied, Transposed, batch, channels_last
from tests.devices import here, sparse_collectives
from tests.distributed.ddp_lockstep import OPTIMIZERS, assert_equal_on_all, blocks_loss, compare
from tests.distributed.pool import RankPool

EVERY_FORM = ["SGD-1-for-loop", "AdamW-0-for-loop", "AdamW-0-foreach", "AdamW-0-fused"]


def _tied_loss(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(seed), device="cpu").to(here())
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _expert_loss(choice: Callable[[int], int | None]) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        return nn.functional.cross_entropy(model(x.to(here()), choice(seed)), y.to(here()))

    return loss


def _image_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x.view(-1, 1, 4, 4).to(here())), y.to(here()))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("model", [(channels_last, _image_loss), (Transposed, blocks_loss)])
@pytest.mark.parametrize("optimizer", ["SGD-1-for-loop", "AdamW-0-foreach", "AdamW-0-fused"])
def test_parameters_with_strides_of_their_own(three_ranks: RankPool, optimizer: str, model: Any, view: bool) -> None:
    make, loss = model
    assert_equal_on_all(three_ranks, make, loss, optimizer, {"gradient_as_bucket_view": view}, groups=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_matches_plain_ddp(two_ranks: RankPool, optimizer: str) -> None:
    assert_equal_on_all(two_ranks, Blocks, blocks_loss, optimizer, {"bucket_cap_mb": 0.004})


@pytest.mark.parametrize("cap", [0.004, 25])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_every_ddp_option_on_three_ranks(
    three_ranks: RankPool, view: bool, find_unused: bool, static: bool, cap: float
) -> None:
    options = {
        "gradient_as_bucket_view": view,
        "find_unused_parameters": find_unused,
        "static_graph": static,
        "bucket_cap_mb": cap,
    }
    assert_equal_on_all(three_ranks, Blocks, blocks_loss, "AdamW-0-fused", options)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("optimizer", EVERY_FORM)
def test_accumulation_with_no_sync(three_ranks: RankPool, optimizer: str, view: bool) -> None:
    assert_equal_on_all(three_ranks, Blocks, blocks_loss, optimizer, {"gradient_as_bucket_view": view}, micro_batches=3)


def expert_by_rank(seed: int) -> int:
    return torch.distributed.get_rank() % 2


def first_expert(seed: int) -> int:
    return 0


def no_expert_or_one(seed: int) -> int | None:
    return None if seed % 2 else 1


def unused_parity(choice: Callable[[int], int | None], *args: Any, **kwargs: Any) -> str | None:
    return compare(Sometimes, _expert_loss(choice), *args, **kwargs)


@pytest.mark.parametrize("choice", [expert_by_rank, first_expert, no_expert_or_one])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD-1-for-loop", "AdamW-0-foreach"])
def test_unused_parameters(
    three_ranks: RankPool, choice: Callable[[int], int | None], view: bool, optimizer: str
) -> None:
    """Weight decay and momentum must leave a parameter alone that no rank used, and move one that any rank did."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view, "bucket_cap_mb": 0.001}
    assert three_ranks.run(unused_parity, choice, optimizer, options) == [None] * 3


@pytest.mark.parametrize("view", [False, True])
def test_tied_weights(three_ranks: RankPool, view: bool) -> None:
    assert_equal_on_all(
        three_ranks, Tied, _tied_loss, "AdamW-0-fused", {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.001}
    )


def frozen_blocks() -> nn.Module:
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    return model


def test_frozen_parameters(three_ranks: RankPool) -> None:
    assert_equal_on_all(three_ranks, frozen_blocks, blocks_loss, "AdamW-0-foreach", {"bucket_cap_mb": 0.002})


def test_ignored_parameters_step_from_their_local_gradient(three_ranks: RankPool) -> None:
    ignored = ("inner.weight", "blocks.1.1.bias")
    assert_equal_on_all(three_ranks, Blocks, blocks_loss, "AdamW-0-fused", {}, ignored=ignored)


def bfloat16_blocks() -> nn.Module:
    return Blocks().to(torch.bfloat16)


def _bfloat16_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x.to(here(), torch.bfloat16)).float(), y.to(here()))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("optimizer", EVERY_FORM)
def test_bfloat16_parameters(three_ranks: RankPool, optimizer: str, view: bool) -> None:
    assert_equal_on_all(three_ranks, bfloat16_blocks, _bfloat16_loss, optimizer, {"gradient_as_bucket_view": view})


@sparse_collectives
@pytest.mark.parametrize("optimizer", ["SGD-0-for-loop", "Adagrad-0-for-loop"])
def test_sparse_embeddings(three_ranks: RankPool, optimizer: str) -> None:
    # Adagrad takes sparse gradients only without lr_decay's foreach form; gloo reduces them natively.
    assert_equal_on_all(three_ranks, SparseWords, _tied_loss, optimizer, {}, groups=False)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="plain DDP over gloo took none in torch 2.6")
@pytest.mark.parametrize("view", [False, True])
def test_complex_parameters(three_ranks: RankPool, view: bool) -> None:
    assert_equal_on_all(three_ranks, Rotations, blocks_loss, "AdamW-0-foreach", {"gradient_as_bucket_view": view})
