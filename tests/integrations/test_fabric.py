"""``instep.attach`` after ``fabric.setup``, beside the same loop without it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import instep
from instep.errors import AttachError, SpentGradientError
from instep.integrations.lightning import fabric_backward
from tests.cases import Blocks
from tests.distributed.pool import RankPool
from tests.integrations.fitting import WAYS, assert_same, loader
from tests.integrations.pooled import PooledRanks

ways = pytest.mark.parametrize("way", WAYS)
exact_ways = pytest.mark.parametrize("way", ["forward", "undo"])


def one_device(precision: Any = "32-true") -> Fabric:
    return Fabric(accelerator="cpu", devices=1, precision=precision)


def one_of_two(precision: Any = "32-true", **ddp: Any) -> Fabric:
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=PooledRanks(), **ddp)
    fabric = Fabric(accelerator="cpu", devices=2, precision=precision, strategy=strategy)
    fabric.launch()
    return fabric


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loop(
    fabric: Fabric,
    options: dict[str, Any] | None,
    accumulated: int = 1,
    limit: float | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
) -> list[Any]:
    """Weights, state and losses after a loop that uses all of Fabric; from ``checkpoint``, or saved there midway."""
    model, optimizer = fabric.setup(*build())
    state = {"model": model, "optimizer": optimizer}
    options = None if options is None else dict(options)
    together = options is not None and options.pop("together", False)
    overlap = None if options is None else instep.attach(model, cast(Any, optimizer), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    losses = []
    if resume:
        assert checkpoint is not None
        fabric.load(checkpoint, state)
    steps = 0
    for i, (x, y) in enumerate(loader(8)):
        adds = i % accumulated != accumulated - 1
        micro = overlap.accumulate() if adds and overlap is not None and not together else nullcontext()
        with fabric.no_backward_sync(model, enabled=adds), micro:
            loss = nn.functional.cross_entropy(model(x), y)
            if overlap is not None and together:
                fabric_backward(fabric, overlap, loss, more=adds)
            else:
                fabric.backward(loss)
        losses.append(loss.detach())
        if not adds:
            if limit is not None:
                losses.append(fabric.clip_gradients(model, optimizer, max_norm=limit))  # type: ignore[arg-type]  # a norm
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
            if steps == 2 and checkpoint is not None and not resume:
                fabric.save(checkpoint, state)
    if overlap is not None:
        assert overlap.step_count == steps
        overlap.detach()
    return [list(map(torch.Tensor.detach, model.parameters())), optimizer.optimizer.state_dict(), losses]


@ways
def test_one_device(way: str) -> None:
    assert_same(loop(one_device(), WAYS[way]), loop(one_device(), None))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision(precision: str) -> None:
    for options in WAYS.values():
        assert_same(loop(one_device(precision), options), loop(one_device(precision), None))


@ways
def test_accumulation(way: str) -> None:
    assert_same(loop(one_device(), WAYS[way], accumulated=2), loop(one_device(), None, accumulated=2))


@exact_ways
def test_clip_gradients(way: str) -> None:
    assert_same(loop(one_device(), WAYS[way], limit=0.5), loop(one_device(), None, limit=0.5))


def test_clip_gradients_meets_spent_gradients_in_backward() -> None:
    with pytest.raises(SpentGradientError, match="schedule='forward'"):
        loop(one_device(), WAYS["backward"], limit=0.5)


@ways
def test_save_and_load(way: str, tmp_path: Path) -> None:
    mine, plain = tmp_path / "mine.ckpt", tmp_path / "plain.ckpt"
    loop(one_device(), WAYS[way], checkpoint=mine)
    wanted = loop(one_device(), None, checkpoint=plain)
    assert_same(torch.load(mine), torch.load(plain))
    resumed = loop(one_device(), None, checkpoint=plain, resume=True)
    assert_same(loop(one_device(), WAYS[way], checkpoint=plain, resume=True), resumed)
    assert_same(loop(one_device(), None, checkpoint=mine, resume=True), resumed)
    assert not torch.equal(wanted[0][0], resumed[0][0])


def test_a_loss_that_fabric_scales() -> None:
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    )
    model, optimizer = fabric.setup(*build())
    with instep.attach(model, cast(Any, optimizer), schedule="backward") as overlap:
        loss = model(torch.randn(4, 16)).sum()
        with pytest.raises(AttachError, match=r"fabric\.backward\(loss\) with attach\(…, undo=True\)"):
            fabric_backward(fabric, overlap, loss)


def test_what_fabric_has_prepared_is_taken() -> None:
    """The user's own optimizer is attached, beside one that Fabric does not know."""
    model, prepared = one_device().setup(*build())
    optimizer: Any = prepared
    other = nn.Linear(2, 2)
    optimizers = [optimizer, torch.optim.SGD(other.parameters(), lr=0.1)]
    with instep.attach([model, other], optimizers, schedule="backward") as overlap:
        assert "[_FabricModule, Linear] with AdamW, SGD" in repr(overlap)


def _compare(options: Any, ddp: dict[str, Any], settings: dict[str, Any]) -> None:
    assert_same(loop(one_of_two(**ddp), options, **settings), loop(one_of_two(**ddp), None, **settings))


@ways
def test_two_ranks(way: str, two_ranks: RankPool) -> None:
    two_ranks.run(_compare, WAYS[way], {"gradient_as_bucket_view": True}, {"accumulated": 2})


@exact_ways
def test_two_ranks_clip(way: str, two_ranks: RankPool) -> None:
    two_ranks.run(_compare, WAYS[way], {"precision": "bf16-mixed"}, {"limit": 0.5})


def _refused_inside(_: Any = None) -> str:
    model, optimizer = build()
    _, wrapped = one_of_two().setup(model, optimizer)
    with pytest.raises(instep.errors.AttachError) as refused:
        instep.attach(model, wrapped.optimizer, schedule="backward")
    return str(refused.value)


def test_what_fabric_returned_is_attached_not_what_it_was_given(two_ranks: RankPool) -> None:
    assert "is wrapped in a DistributedDataParallel" in two_ranks.run(_refused_inside)[0]
