"""``keep_gradients()`` on ranks: gradients are reduced as ever, and the step is left to ``optimizer.step()``."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, Sometimes, batch, two_groups
from tests.devices import here
from tests.distributed import zero
from tests.distributed.comm_hooks import HOOKS
from tests.distributed.pool import RankPool
from tests.distributed.reduced import SOURCES, ddp
from tests.distributed.sharded import Loop, both, loss_of

EVERY = 3  # of which the first is kept


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, foreach=True)


def whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def norm_of(model: nn.Module) -> torch.Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(0.1)
    return whole(clip_grad_norm_(model.parameters(), 0.1))


def clipped_now_and_then(loop: Loop, i: int) -> Any:
    """Every third step is kept, clipped by the loop, and taken in the block or behind it."""
    kept = i % EVERY == 0
    norm = None
    with loop.overlap.keep_gradients() if kept and loop.overlap is not None else nullcontext():
        loop.backward(i)
        if i == 0:
            norm = norm_of(loop.model)
            loop.optimizer.step()
    if kept and i > 0:
        norm = norm_of(loop.model)
    if i > 0:
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    return norm


def thrown_away(loop: Loop, i: int) -> None:
    """What a backward has left is cleared, and another one is stepped."""
    if i % 2 == 0:
        with loop.overlap.keep_gradients() if loop.overlap is not None else nullcontext():
            loop.backward(100 + i)
        loop.optimizer.zero_grad()
    loop.backward(i)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def one_source(source: str, way: str, step: Callable[[Loop, int], Any]) -> None:
    both(way, SOURCES[source], adamw, step, steps=2 * EVERY + 1)


@pytest.mark.parametrize("step", [clipped_now_and_then, thrown_away])
@pytest.mark.parametrize("way", ["backward", pytest.param("undo", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source(two_ranks: RankPool, source: str, way: str, step: Callable[[Loop, int], Any]) -> None:
    two_ranks.run(one_source, source, way, step)


def counted(way: str, source: str) -> None:
    both(way, SOURCES[source], adamw, _counted, steps=5, accumulation_steps=2)


def _counted(loop: Loop, i: int) -> Any:
    with loop.overlap.keep_gradients() if i % 2 and loop.overlap is not None else nullcontext():
        for micro in range(2):
            with loop.model.no_sync() if micro == 0 and loop.overlap is None else nullcontext():
                loop.backward(2 * i + micro)
    norm = norm_of(loop.model) if i % 2 else None
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return norm


@pytest.mark.parametrize("source", ["ddp", "ddp, views", "replicate"])
@pytest.mark.parametrize("way", ["backward", pytest.param("undo", marks=pytest.mark.nightly)])
def test_with_micro_batches(two_ranks: RankPool, way: str, source: str) -> None:
    two_ranks.run(counted, way, source)


def sometimes(options: dict[str, Any]) -> None:
    """Parameters that one rank uses, or none."""

    def step(loop: Loop, i: int) -> Any:
        x, y = batch(i * dist.get_world_size() + dist.get_rank())
        with loop.overlap.keep_gradients() if i % 2 and loop.overlap is not None else nullcontext():
            loss_of(loop.model(x, dist.get_rank() if i % 3 else None), y).backward()
        norm = norm_of(loop.model) if i % 2 else None
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return norm

    both("backward", partial(ddp, **options), adamw, step, Sometimes, steps=6)


@pytest.mark.parametrize("view", [False, True])
def test_unused_parameters(two_ranks: RankPool, view: bool) -> None:
    two_ranks.run(sometimes, {"find_unused_parameters": True, "gradient_as_bucket_view": view})


def shards(view: bool, unused: bool) -> None:
    wrap = partial(ddp, gradient_as_bucket_view=view, find_unused_parameters=unused)
    zero.both("backward", adamw, clipped_now_and_then, wrap=wrap, steps=2 * EVERY + 1)


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_shard_state(two_ranks: RankPool, view: bool, unused: bool) -> None:
    """The loop finds the whole mean on each rank."""
    two_ranks.run(shards, view, unused)


def hooked(hook: str, view: bool) -> str | None:
    rank = dist.get_rank()
    make_state, function = HOOKS[hook]
    lanes: list[tuple[DistributedDataParallel, torch.optim.AdamW, Any]] = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks().to(here()), bucket_cap_mb=25, gradient_as_bucket_view=view)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        overlap = None
        if attach:
            overlap = instep.attach(model, optimizer, comm_hook=(make_state(), function), schedule="backward")
        else:
            model.register_comm_hook(make_state(), function)
        lanes.append((model, optimizer, overlap))
    differences: list[str | None] = []
    for i in range(2 * EVERY):
        found = []
        for model, optimizer, overlap in lanes:
            torch.manual_seed(i)
            x, y = (t.to(here()) for t in batch(1000 * rank + i))
            with overlap.keep_gradients() if overlap is not None and i % EVERY == 0 else nullcontext():
                nn.functional.cross_entropy(model(x), y).backward()
            found.append(norm_of(model) if i % EVERY == 0 else torch.zeros(()))
            optimizer.step()
            optimizer.zero_grad()
        if not torch.equal(*found):
            differences.append(f"norms in step {i + 1}: {found}")
        differences.append(first_difference(*(training_state(model, optimizer) for model, optimizer, _ in lanes)))
    lanes[1][2].detach()
    return next((text for text in differences if text is not None), None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", ["bf16", "PowerSGD", "to another tensor", "at once"])
def test_comm_hooks(two_ranks: RankPool, hook: str, view: bool) -> None:
    assert two_ranks.run(hooked, hook, view) == [None] * 2


def in_low_precision(options: dict[str, Any]) -> list[float]:
    """How far a kept step is from one that backward takes: the mean is computed in the same dtype."""
    weights = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = ddp(Blocks())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        overlap = instep.attach(model, optimizer, schedule="backward", mixed_precision=policy, **options)
        for i in range(3):
            x, y = batch(i * dist.get_world_size() + dist.get_rank())
            with overlap.keep_gradients() if kept else nullcontext():
                loss_of(model(x).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        overlap.detach()
        weights.append([p.detach().clone() for p in model.parameters()])
    return [float((a - b).abs().max()) for a, b in zip(*weights, strict=True)]


@pytest.mark.parametrize("options", [{}, {"shard_state": True}])
def test_mixed_precision(two_ranks: RankPool, options: dict[str, Any]) -> None:
    for found in two_ranks.run(in_low_precision, options):
        assert not any(found)


def on_one_rank_alone() -> list[bool]:
    """DDP's gradients are alike on all ranks, so a rank may keep a step that another one takes in backward."""
    rank = dist.get_rank()
    lanes = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = ddp(Blocks())
        optimizer = adamw(model)
        overlap = instep.attach(model, optimizer, schedule="backward") if attach else None
        for i in range(4):
            x, y = batch(i * dist.get_world_size() + rank)
            kept = overlap is not None and i % 2 == rank
            with overlap.keep_gradients() if overlap is not None and kept else nullcontext():
                loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if overlap is not None:
            overlap.synchronize()
            overlap.detach()
        lanes.append([p.detach().clone() for p in model.parameters()])
    return [torch.equal(a, b) for a, b in zip(*lanes, strict=True)]


def test_on_one_rank_alone(two_ranks: RankPool) -> None:
    for found in two_ranks.run(on_one_rank_alone):
        assert all(found)
