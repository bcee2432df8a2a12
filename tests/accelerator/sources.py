"""Models on ranks of the emulated accelerator, by the source of their gradients; and a loop of each."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.accelerator.loops import AT, HAPPENINGS, OPTIMIZERS, READERS, SMALL, STEPS, WAYS, Loop, Loss, on_stream
from tests.accelerator.recording import recorded
from tests.cases import Blocks

Wrap = Callable[[nn.Module], nn.Module]


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True, **options})


def sharded(model: Any, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def prefetching(model: Any) -> nn.Module:
    sharded(model)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    return model


def fsdp1(model: Any) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, use_orig_params=True)
    return FullyShardedDataParallel(model, use_orig_params=True)


def tensor_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("emu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return model


def hybrid(model: Any, **options: Any) -> nn.Module:
    """HSDP: each rank has a replica."""
    return sharded(
        model,
        mesh=init_device_mesh("emu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")),
        **options,
    )


LOWER = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FORWARD = {"schedule": "forward", "defer": True}
SOURCES: Mapping[str, tuple[Wrap, Mapping[str, Mapping[str, Any]]]] = {
    "ddp": (ddp, WAYS),
    "ddp, copies": (lambda model: ddp(model, gradient_as_bucket_view=False), WAYS),
    "ddp, static graph": (lambda model: ddp(model, static_graph=True), WAYS),
    "ddp, unused": (lambda model: ddp(model, find_unused_parameters=True), WAYS),
    "shard_state": (
        ddp,
        {"backward": {"schedule": "backward", "shard_state": True}, "forward": {**FORWARD, "shard_state": True}},
    ),
    "shard_state, copies": (
        lambda model: ddp(model, gradient_as_bucket_view=False),
        {"backward": {"schedule": "backward", "shard_state": True}, "forward": {**FORWARD, "shard_state": True}},
    ),
    "replicate": (lambda model: instep.replicate(model, bucket_cap_mb=0.004), WAYS),
    "fsdp2": (sharded, WAYS),
    "fsdp2, prefetching": (prefetching, WAYS),
    "fsdp2, kept gathered": (lambda model: sharded(model, reshard_after_forward=False), WAYS),
    "fsdp2, mixed precision": (lambda model: sharded(model, mp_policy=LOW), WAYS),
    "hsdp": (hybrid, WAYS),
    # Which is cast after the reduction: the gradients are not views of its buffer.
    "hsdp, reduced in bf16": (
        lambda model: hybrid(model, mp_policy=LOWER),
        {**WAYS, "measured": {**FORWARD, "clip": instep.ClipNorm(1e9)}},
    ),
    "fsdp2, offloaded": (
        lambda model: sharded(model, offload_policy=CPUOffloadPolicy()),
        {way: options for way, options in WAYS.items() if way != "undo on the host"},
    ),
    "fsdp1": (fsdp1, WAYS),
    "tensor parallel": (tensor_parallel, WAYS),
}
HAPPENS: Mapping[str, tuple[str, ...]] = {
    # What a plain DDP survives: an error in a backward it does not.
    "rollback": ("forward", "undo", "undo on the host"),
    "accept_torn": ("backward",),
    "detach after the step": tuple(WAYS),
    "weights used on another stream": ("forward", "undo", "undo on the host"),
}
SURVIVE = ("replicate", "fsdp2", "tensor parallel")  # a backward that raises on all ranks
ALONE = ("rollback", "accept_torn", "weights used on another stream")  # all ranks of shard_state would do so


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def _of_this_rank(loss: Loss) -> Loss:
    def mine(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(model, x + dist.get_rank() / 8, y)

    return mine


def train(
    source: str, way: str | None, happening: str, reader: str, own_stream: bool, optimizer: str, **how: Any
) -> list[torch.Tensor]:
    wrap, ways = SOURCES[source]
    torch.manual_seed(0)
    model = wrap(Blocks())
    offload = how.pop("offload", None)
    options = None if way is None else {**ways[way], **_SIZES.get(source, {}), "offload": offload}
    if options is not None and "clip_value" in how:
        options["clip"] = instep.ClipValue(how.pop("clip_value"))
    loss = _loss if source == "tensor parallel" else _of_this_rank(_loss)
    optimizer = _OPTIMIZERS.get(source, optimizer)
    loop = Loop(model, OPTIMIZERS[optimizer](model.parameters()), loss, options, **how)
    with on_stream(own_stream):
        loop.attach()
        for i in range(STEPS):
            HAPPENINGS[happening if i == AT else "nothing"](loop, i)
            READERS[reader](loop)
        return loop.result()


_SIZES: Mapping[str, Mapping[str, Any]] = {"tensor parallel": {"bucket_bytes": SMALL}}
_OPTIMIZERS = {
    "tensor parallel": "one by one",  # torch's foreach takes no plain tensors beside DTensors
    "fsdp2, offloaded": "SGD",  # AdamW makes its step counter on torch's default device, which is not the shards'
}


def compared(source: str, way: str, *args: Any, **how: Any) -> int:
    """How many streams the kernels of the attached loop ran on."""
    expected = train(source, None, *args, **how)
    with recorded() as log:
        found = train(source, way, *args, **how)
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (one, other))
        assert torch.equal(one, other), f"tensor {number} differs by {(one - other).abs().max()}"
    log.assert_ordered()
    return len(log.streams)


def on_device(*args: Any, **how: Any) -> int:
    with torch.device("emu"):
        return compared(*args, **how)
