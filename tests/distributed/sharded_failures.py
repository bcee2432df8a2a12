"""Models that FSDP has divided, loops over them that fail somewhere, and all that FSDP knows of itself."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from instep.sources.fsdp.modules import fsdp2_groups
from instep_tools.harness import first_difference
from tests.cases import Blocks, two_groups
from tests.devices import here
from tests.distributed.sharded import Loop, mesh, nested, parameters_of


class BoomError(Exception):
    """The user's own."""


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise BoomError


def fail(*_: object) -> Any:
    raise BoomError


@contextmanager
def failing(model: nn.Module, where: str, error: Callable[..., Any] = fail) -> Iterator[None]:
    """In the middle of the middle block: in its forward, its backward, or where a gradient is ready. ``early``: before
    any gradient is."""
    block: Any = model.get_submodule("blocks.1")
    layer = getattr(block, "_fsdp_wrapped_module", block)[1]
    if where == "forward":
        handle = layer.register_forward_hook(error)
    elif where == "backward":
        handle = layer.register_forward_hook(lambda module, args, output: RaisesInBackward.apply(output))
    elif where == "early":
        outer = model.get_submodule("outer")
        handle = outer.register_forward_pre_hook(lambda module, args: RaisesInBackward.apply(*args))
    else:
        handle = layer.weight.register_post_accumulate_grad_hook(error)
    try:
        yield
    finally:
        handle.remove()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, foreach=True)


def build(name: str) -> Loop:
    torch.manual_seed(0)
    model = {**FSDP2, **FSDP1, **ON_FOUR}[name](Blocks())
    return Loop(model, adamw(model))


def require_equal(plain: Loop, loop: Loop, where: str) -> None:
    loop.overlap.synchronize()
    difference = first_difference(
        parameters_of(plain.model, plain.optimizer), parameters_of(loop.model, loop.optimizer)
    )
    assert difference is None, f"{where}: {difference}"


def values(loop: Loop) -> list[torch.Tensor]:
    """What the optimizer holds."""
    if loop.overlap is not None:
        loop.overlap.synchronize()
    found = [p for group in loop.optimizer.param_groups for p in group["params"]]
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in found]


def moved(loop: Loop, i: int) -> list[bool]:
    """Which parameters an iteration moves; those of which this rank has a part."""
    before = values(loop)
    loop.learn(i)
    return [not torch.equal(a, b) for a, b in zip(before, values(loop), strict=True) if a.numel()]


def root_only(model: Any) -> nn.Module:
    return fully_shard(model)


def prefetched(model: Any) -> nn.Module:
    nested(model)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    for module in (*model.blocks, model):
        module._set_unshard_async_op(True)
    return model


def grouped(model: Any) -> nn.Module:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.inner, model.outer])
    return fully_shard(model)


def several_roots(model: Any) -> nn.Module:
    for module in (*model.blocks, model.inner, model.outer):
        fully_shard(module)
    return model


def fsdp1(model: Any, **options: Any) -> nn.Module:
    options = {"use_orig_params": True, "device_id": here(), **options}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp1_grad_op(model: nn.Module) -> nn.Module:
    return fsdp1(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def fsdp1_no_shard(model: nn.Module) -> nn.Module:
    return fsdp1(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def fsdp1_low(model: nn.Module) -> nn.Module:
    return fsdp1(model, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32))


def hsdp(model: nn.Module) -> nn.Module:
    return nested(model, mesh=mesh(2, 2))


low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FSDP2: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "nested": nested,
    "root only": root_only,
    "not resharded": partial(nested, reshard_after_forward=False),
    "prefetched": prefetched,
    "mixed precision": partial(nested, mp_policy=low),
    "grouped": grouped,
    "several roots": several_roots,
    "offloaded": partial(nested, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}
FSDP1: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp1": fsdp1,
    "fsdp1, shard grad op": fsdp1_grad_op,
    "fsdp1, no shard": fsdp1_no_shard,
    "fsdp1, mixed precision": fsdp1_low,
}
ON_FOUR: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "hsdp": hsdp,
    "resharded to two of four": partial(nested, reshard_after_forward=2),
}


def told(value: Any) -> Any:
    """Enough of a value to see whether it is another one."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return type(value).__name__, tuple(value.shape), local.untyped_storage().size(), value.grad is None
    if isinstance(value, (bool, int, float, str, type(None))) or type(value).__module__.endswith("_fsdp_common"):
        return str(value)
    if isinstance(value, (list, set, tuple, dict)):
        return type(value).__name__, len(value)
    if callable(value) and not isinstance(value, nn.Module):
        return "function"
    return type(value).__name__


def fsdp2_state(model: nn.Module) -> dict[str, Any]:
    """All that FSDP2 knows, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            owners = [state, state._state_ctx, state._comm_ctx]
            for group in fsdp2_groups(state):
                owners += [group, *group.fsdp_params]
            for number, owner in enumerate(owners):
                for key, value in vars(owner).items():
                    found[f"{name}: {type(owner).__name__}[{number}].{key}"] = told(value)
    return found


# Counted over iterations, and buffers that are reused: not of the state between two.
PASSING = ("_iter", "._tensors", "_pre_forward_order_index", "_free_event_queue")
