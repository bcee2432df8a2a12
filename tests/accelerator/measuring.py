"""What the allocator has given out at most in a regular step, of a model whose gradients set the peak."""

import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.accelerator.recording import Log, recorded

LAYERS, WIDTH = 40, 128
LAYER = WIDTH * WIDTH * 4
GRADIENTS = LAYERS * LAYER
BUCKET = 2 * LAYER
WARM_UP, STEPS = 3, 2


class Measured(NamedTuple):
    """In bytes, without what was there before the model was."""

    peak: int
    held: int
    own: int  # weights and state, of this rank
    keeps: int  # calls of record_stream


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20, gradient_as_bucket_view=True)


def _replicated(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=BUCKET / 2**20)


def _fully_sharded(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("emu", (dist.get_world_size(),))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


WRAPPERS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "ddp": _ddp,
    "replicate": _replicated,
    "fsdp2": _fully_sharded,
}
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def measure(wrapper: str, optimizer: str, options: Mapping[str, Any] | None) -> Measured:
    if wrapper != "none":
        # A collective's tensors may be kept until the host knows that it is over, which a later one of its group asks.
        torch.accelerator.synchronize()
        dist.all_reduce(torch.zeros(1, device="emu"))
    gc.collect()
    with recorded() as log:
        pass
    before = _live(log)
    torch.manual_seed(0)
    with torch.device("emu"):
        layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        model = WRAPPERS[wrapper](layers)
        x = torch.randn(2, WIDTH)
    made = OPTIMIZERS[optimizer](model.parameters())
    overlap = None if options is None else instep.attach(model, made, **options)

    def learn() -> None:
        loss = model(x).square().mean()
        loss.backward() if overlap is None else overlap.backward(loss)
        made.step()
        made.zero_grad()

    for _ in range(WARM_UP):
        learn()
    if overlap is not None:
        overlap.synchronize()
    state = [t for values in made.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    own = sum(_bytes(t) for t in (*model.parameters(), *state) if t.device.type == "emu")
    del state
    gc.collect()
    with recorded() as log:
        for _ in range(STEPS):
            learn()
    if overlap is not None:
        overlap.detach()
    log.assert_ordered()
    left = _live(log).keys() & before.keys()
    assert left.isdisjoint(line[1] for line in log.lines if line[0] == "free")
    others = sum(before[block] for block in left)
    return Measured(log.peak_bytes() - others, log.peak_bytes(held=True) - others, own, log.count("keep"))


def _live(log: Log) -> dict[str, int]:
    """The blocks of the first device that were there when the recording began, with their bytes."""
    lines = [line[1:] for line in log.lines if line[0] == "live"]
    return {block: int(size) for block, stream, size in lines if stream.startswith("0.")}


def _bytes(tensor: torch.Tensor) -> int:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.numel() * tensor.element_size()


# One device.


@functools.cache
def plain_peak(optimizer: str) -> Measured:
    plain = measure("none", optimizer, None)
    assert plain.peak >= plain.own + GRADIENTS, "gradients set the peak"
    assert plain.keeps == 0
    return plain


def peak(optimizer: str, options: Mapping[str, Any]) -> int:
    """Without any ``record_stream``."""
    found = measure("none", optimizer, {"bucket_bytes": BUCKET, **options})
    assert found.keeps == 0
    assert found.held == found.peak
    return found.peak
