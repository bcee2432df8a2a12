"""``FullyShardedDataParallel(use_orig_params=True)``: bit for bit what it does in the plain loop, on two ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

import instep
from instep.errors import AccumulationError, AttachError, SpentGradientError
from tests.cases import Blocks, optimizer_cases, two_groups
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, both, fsdp1, in_every_way, mesh, sampled

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, **{"foreach": True, **options})


class Frozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class Unused(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3, 3))


class Twice(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return self.outer(x)


SHAPES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "full shard": (Blocks, {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    "shard grad op": (Blocks, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "no shard": (Blocks, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "forward prefetch": (Blocks, {"forward_prefetch": True}),
    "mixed precision": (Blocks, {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.float32)}),
    "reduced in bf16": (Blocks, {"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16)}),
    "frozen": (Frozen, {}),
    "unused": (Unused, {}),
    "used twice": (Twice, {}),
}


def one_shape(name: str, way: str) -> None:
    build, options = SHAPES[name]
    both(way, partial(fsdp1, **options), adamw, build=build)


@pytest.mark.parametrize(("name", "way"), sampled(SHAPES, 3))
def test_models_and_how_they_are_sharded(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_shape, name, way)


def hybrid(strategy: ShardingStrategy, way: str) -> None:
    both(way, partial(fsdp1, sharding_strategy=strategy, device_mesh=mesh(2, 2)), adamw)


@in_every_way
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.HYBRID_SHARD, pytest.param(ShardingStrategy._HYBRID_SHARD_ZERO2, marks=pytest.mark.nightly)],
)
def test_hybrid(four_ranks: RankPool, strategy: ShardingStrategy, way: str) -> None:
    four_ranks.run(hybrid, strategy, way)


CASES = {case[0]: case for case in list(optimizer_cases())[::3]}


def one_optimizer(way: str, cls: Any, kwargs: Any) -> None:
    both(way, fsdp1, lambda model: cls(two_groups(model), **kwargs), steps=4)


@pytest.mark.parametrize(("name", "way"), sampled(CASES, 6))
def test_optimizers(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_optimizer, way, *CASES[name][1:])


def micro_batches(loop: Loop, i: int) -> None:
    with loop.model.no_sync():
        loop.backward(3 * i)
        loop.backward(3 * i + 1)
    loop.learn(3 * i + 2)


def held(loop: Loop, i: int) -> None:
    with loop.model.no_sync() if loop.overlap is None else loop.overlap.accumulate():
        loop.backward(3 * i)
        loop.backward(3 * i + 1)
    loop.learn(3 * i + 2)


def counted(loop: Loop, i: int) -> None:
    if loop.overlap is None:
        return micro_batches(loop, i)
    loop.backward(3 * i)
    loop.backward(3 * i + 1)
    loop.learn(3 * i + 2)
    return None


def evaluated(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    with torch.no_grad():
        return loop.loss(1000 + i)


def saved(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    kind, config = StateDictType.FULL_STATE_DICT, FullStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(loop.model, kind, config):
        return loop.model.state_dict()["blocks.2.3.weight"].clone()


def summoned(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    with FullyShardedDataParallel.summon_full_params(loop.model):
        return next(loop.model.parameters()).detach().clone()


def optimizer_saved(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    state = FullyShardedDataParallel.optim_state_dict(loop.model, loop.optimizer)["state"]
    return state["blocks.1.1.weight"]["exp_avg"].clone() if state else torch.zeros(())


def kept_gradients(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    loop.optimizer.step()
    seen = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
    loop.optimizer.zero_grad(set_to_none=True)
    return torch.cat([g.flatten() for g in seen])


def clipped_by_fsdp(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    norm = loop.model.clip_grad_norm_(0.3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return norm


def skipped(loop: Loop, i: int) -> None:
    loop.backward(i)
    loop.optimizer.zero_grad()
    loop.learn(i + 100)


ANY = {
    "no_sync": (micro_batches, {}),
    "accumulate()": (held, {}),
    "accumulation_steps": (counted, {"accumulation_steps": 3}),
    "evaluated": (evaluated, {}),
    "state_dict()": (saved, {}),
    "summon_full_params": (summoned, {}),
    "optim_state_dict": (optimizer_saved, {}),
}
EXACT: dict[str, tuple[Any, dict[str, Any]]] = {
    "gradients read after the step": (kept_gradients, {}),
    "clip_grad_norm_": (clipped_by_fsdp, {}),
    "a step left out": (skipped, {}),
}


def one_loop(name: str, way: str) -> None:
    step, options = {**ANY, **EXACT}[name]
    both(way, fsdp1, adamw, step, **options)


@pytest.mark.parametrize(("name", "way"), sampled(ANY, 4))
def test_loops(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_loop, name, way)


@pytest.mark.parametrize("way", ["forward", "late", "undo"])
@pytest.mark.parametrize("name", list(EXACT))
def test_loops_that_use_gradients(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_loop, name, way)


def said(error: type[Exception], do: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        do()
    return str(caught.value)


def mistakes() -> list[str]:
    model: Any = fsdp1(Blocks())
    optimizer = adamw(model)
    flat = fsdp1(Blocks(), use_orig_params=False)
    found = [
        said(AttachError, lambda: instep.attach(model, optimizer, bucket_bytes=1000, schedule="backward")),
        said(
            AttachError,
            lambda: instep.attach(model, optimizer, clip=instep.ClipNorm(1.0), schedule="forward", defer=True),
        ),
        said(AttachError, lambda: instep.attach(flat, torch.optim.SGD(flat.parameters(), lr=0.1), schedule="backward")),
    ]
    loop = Loop(model, optimizer)
    with instep.attach(model, optimizer, schedule="backward"):
        loop.learn(0)
        loop.backward(1)
        found.append(said(AccumulationError, lambda: loop.backward(2)))
    model = fsdp1(Blocks())
    loop = Loop(model, adamw(model))
    with instep.attach(model, loop.optimizer, schedule="backward"):
        loop.learn(0)
        loop.backward(1)
        found.append(said(SpentGradientError, lambda: model.clip_grad_norm_(1.0)))
    loop.optimizer.zero_grad()
    found.append(said(AttachError, lambda: instep.attach(model, loop.optimizer, schedule="backward")))
    instep.attach(model, loop.optimizer, schedule="forward", defer=True).detach()
    return found


def test_mistakes(two_ranks: RankPool) -> None:
    for found in two_ranks.run(mistakes):
        assert "bucket_bytes=1000 does not go with FullyShardedDataParallel" in found[0]
        assert "model.clip_grad_norm_" in found[1]
        assert "use_orig_params=True" in found[2]
        assert "already updated the weights" in found[3] or "has updated" in found[3]
        assert "applied during backward" in found[4]
        assert "use schedule='forward'" in found[5]


def offloaded(way: str) -> None:
    both(way, partial(fsdp1, cpu_offload=CPUOffload(offload_params=True)), adamw)


@pytest.mark.skipif(here().type != "cuda", reason="without a GPU FSDP1's own offloading fails in the plain loop")
@in_every_way
def test_offloaded_to_the_host(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(offloaded, way)


def stand_ins_are_gone(way: str) -> list[str]:
    """What attach leaves behind: nothing."""
    loop = both(way, fsdp1, adamw, steps=2)
    left = [name for name, p in loop.model.named_parameters() if hasattr(p, "_in_backward_optimizers")]
    for module in FullyShardedDataParallel.fsdp_modules(loop.model):
        left += [name for name in ("pre_unshard", "unshard") if name in vars(module._handle)]
    for i in range(2):
        loop.learn(i)
    return left


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_detach_leaves_nothing(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(stand_ins_are_gone, way) == [[], []]
