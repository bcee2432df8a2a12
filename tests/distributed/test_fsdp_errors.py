"""An error in a forward or backward of a sharded model that the loop catches: training goes on as if that iteration
had never been. The oracle is a plain loop that never ran it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import instep
from instep.errors import TornStepError
from instep.verification import first_difference
from tests.cases import Blocks, two_groups
from tests.distributed.pool import RankPool
from tests.distributed.sharded import WAYS, Loop, nested, parameters_of
from tests.late import late_updates

warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

MIDDLE = 1  # of the three blocks


class Boom(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Boom


def fail(*_: object) -> Any:
    raise Boom


@contextmanager
def failing(model: nn.Module, where: str) -> Iterator[None]:
    """In the middle of the middle block: forward, backward, or where its gradients are ready. ``early``: before any
    gradient is."""
    layer = model.get_submodule(f"blocks.{MIDDLE}")
    layer = getattr(layer, "_fsdp_wrapped_module", layer)[1]
    if where == "forward":
        handle = layer.register_forward_hook(fail)
    elif where == "backward":
        handle = layer.register_forward_hook(lambda module, args, output: RaisesInBackward.apply(output))
    elif where == "early":
        handle = model.outer.register_forward_pre_hook(lambda module, args: RaisesInBackward.apply(*args))
    elif where == "gradient":
        handle = layer.weight.register_post_accumulate_grad_hook(fail)
    else:
        raise ValueError(where)
    try:
        yield
    finally:
        handle.remove()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, foreach=True)


def build(shard: Callable[[nn.Module], nn.Module]) -> Loop:
    torch.manual_seed(0)
    model = shard(Blocks())
    return Loop(model, adamw(model))


def require_equal(plain: Loop, loop: Loop, where: str) -> None:
    loop.overlap.synchronize()
    difference = first_difference(
        parameters_of(plain.model, plain.optimizer), parameters_of(loop.model, loop.optimizer)
    )
    assert difference is None, f"{where}: {difference}"


def values(loop: Loop) -> list[torch.Tensor]:
    found = [p for group in loop.optimizer.param_groups for p in group["params"]]
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in found]


def moved(loop: Loop, i: int) -> list[bool]:
    """Which parameters an iteration moves."""
    before = values(loop)
    loop.learn(i)
    return [not torch.equal(a, b) for a, b in zip(before, values(loop), strict=True) if a.numel()]


def root_only(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def prefetching(model: nn.Module) -> nn.Module:
    nested(model)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    for module in (*model.blocks, model):
        module._set_unshard_async_op(True)
    return model


def several_roots(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.inner)
    fully_shard(model.outer)
    return model


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHAPES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "nested": nested,
    "root only": root_only,
    "not resharded": partial(nested, reshard_after_forward=False),
    "prefetched": prefetching,
    "mixed precision": partial(nested, mp_policy=low),
    "several roots": several_roots,
    "offloaded": partial(nested, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp1": fsdp1,
}
WHERE = ("forward", "backward", "gradient", "early")


def goes_on(name: str, where: str, way: str) -> None:
    plain, loop = build(SHAPES[name]), build(SHAPES[name])
    held = [id(p) for p in loop.model.parameters()]
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    for i in range(4):
        if i in (0, 2):
            with failing(loop.model, where), pytest.raises(Boom):
                loop.backward(100 + i)
            assert [id(p) for p in loop.model.parameters()] == held, "not the parameters that the optimizer holds"
            if loop.overlap._step.state == "torn":
                raise AssertionError("torn")
            loop.optimizer.zero_grad()
        plain.learn(i)
        loop.learn(i)
        require_equal(plain, loop, f"iteration {i}")
    loop.overlap.detach()


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", SHAPES)
def test_training_goes_on(two_ranks: RankPool, name: str, where: str, way: str) -> None:
    two_ranks.run(goes_on, name, where, way)
