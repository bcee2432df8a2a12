"""Under DistributedDataParallel: the attached loop beside the plain one, in the same ranks, bit for bit."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import instep
from instep.verification import first_difference, training_state
from tests.cases import Blocks, Rotations, Sometimes, Tied, batch, optimizer_cases, two_groups
from tests.devices import here, sparse_collectives
from tests.distributed.pool import RankPool

OPTIMIZERS = {name: (cls, kwargs) for name, cls, kwargs in optimizer_cases()}
EVERY_FORM = ["SGD-1-for-loop", "AdamW-0-for-loop", "AdamW-0-foreach", "AdamW-0-fused"]


def _blocks_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x.to(here())).float(), y.to(here()))


def _tied_loss(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(seed)).to(here())
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _expert_loss(choice: Callable[[int], int | None]) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        return nn.functional.cross_entropy(model(x.to(here()), choice(seed)), y.to(here()))

    return loss


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


def _image_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x.view(-1, 1, 4, 4).to(here())), y.to(here()))


class Transposed(nn.Module):
    """A dense parameter whose strides are not those of its shape, and one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.randn(10, 16).t())
        self.gaps = nn.Parameter(torch.randn(16, 20)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.dense + x @ self.gaps


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("model", [(channels_last, _image_loss), (Transposed, _blocks_loss)])
@pytest.mark.parametrize("optimizer", ["SGD-1-for-loop", "AdamW-0-foreach", "AdamW-0-fused"])
def test_parameters_with_strides_of_their_own(three_ranks: RankPool, optimizer: str, model: Any, view: bool) -> None:
    make, loss = model
    assert_equal_on_all(three_ranks, make, loss, optimizer, {"gradient_as_bucket_view": view}, groups=False)


def compare(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    optimizer: str,
    ddp_options: dict[str, Any],
    *,
    groups: bool = True,
    steps: int = 4,
    micro_batches: int = 1,
    ignored: tuple[str, ...] = (),
    scheduler: bool = True,
) -> str | None:
    """Run both loops on this rank. The first difference in words, with the step it was found after."""
    rank = torch.distributed.get_rank()
    cls, kwargs = OPTIMIZERS[optimizer]

    def build(attach: bool) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
        torch.manual_seed(0)
        inner = make().to(here())
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, list(ignored))
        model = DistributedDataParallel(inner, **ddp_options)
        opt = cls(two_groups(model) if groups else model.parameters(), **kwargs)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1 / (1 + e)) if scheduler else None
        overlap = instep.attach(model, opt) if attach else None

        def step(i: int) -> None:
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                hold = contextlib.nullcontext() if last else overlap.accumulate() if overlap else model.no_sync()
                with hold:
                    loss(model, 1000 * rank + micro_batches * i + micro).backward()
            if overlap is not None:
                applied = sum(p.grad is not None and "Spent" in repr(p.grad) for p in model.parameters())
                assert applied > 0, "nothing was stepped in backward"
            opt.step()
            opt.zero_grad()
            if sched is not None:
                sched.step()

        return model, opt, step

    plain, plain_optimizer, plain_step = build(False)
    model, opt, step = build(True)
    for i in range(steps):
        plain_step(i)
        step(i)
        difference = first_difference(training_state(plain, plain_optimizer), training_state(model, opt))
        if difference is not None:
            return f"after step {i + 1}: {difference}"
    overlap = instep.attached(model)
    assert overlap is not None
    assert overlap.step_count == steps
    overlap.detach()
    return None


def assert_equal_on_all(pool: RankPool, *args: Any, **kwargs: Any) -> None:
    assert pool.run(compare, *args, **kwargs) == [None] * pool.world_size


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_matches_plain_ddp(two_ranks: RankPool, optimizer: str) -> None:
    assert_equal_on_all(two_ranks, Blocks, _blocks_loss, optimizer, {"bucket_cap_mb": 0.004})


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
    assert_equal_on_all(three_ranks, Blocks, _blocks_loss, "AdamW-0-fused", options)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("optimizer", EVERY_FORM)
def test_accumulation_with_no_sync(three_ranks: RankPool, optimizer: str, view: bool) -> None:
    assert_equal_on_all(
        three_ranks, Blocks, _blocks_loss, optimizer, {"gradient_as_bucket_view": view}, micro_batches=3
    )


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
    assert_equal_on_all(three_ranks, frozen_blocks, _blocks_loss, "AdamW-0-foreach", {"bucket_cap_mb": 0.002})


def test_ignored_parameters_step_from_their_local_gradient(three_ranks: RankPool) -> None:
    ignored = ("inner.weight", "blocks.1.1.bias")
    assert_equal_on_all(three_ranks, Blocks, _blocks_loss, "AdamW-0-fused", {}, ignored=ignored)


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
    assert_equal_on_all(three_ranks, Rotations, _blocks_loss, "AdamW-0-foreach", {"gradient_as_bucket_view": view})
