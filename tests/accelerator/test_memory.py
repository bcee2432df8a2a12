"""What the allocator has given out at most in a regular step, of a model whose gradients set the peak.

Peaks are of live blocks, and with those that ``record_stream`` holds while the device lags behind the host.
"""

import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.accelerator.recording import Log, recorded
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.accelerator
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


BACKWARD: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "clipped in two passes": {"schedule": "backward", "clip": instep.ClipNorm(1.0, mode="two_pass")},
    "clipped by bucket": {"schedule": "backward", "clip": instep.ClipNorm(1.0, mode="per_bucket")},
    "clipped by the norm before": {"schedule": "backward", "clip": instep.ClipNorm(1.0, mode="previous_norm")},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", BACKWARD)
def test_backward_has_one_bucket_of_gradients(way: str, optimizer: str) -> None:
    """And the one that fills meanwhile."""
    plain, found = plain_peak(optimizer), peak(optimizer, BACKWARD[way])
    assert found <= plain.peak - GRADIENTS + BUCKET + plain.peak // 20
    assert found <= plain.own + 2 * BUCKET + LAYER


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, instep.ClipNorm(1.0)])
def test_forward_has_what_the_plain_loop_has(clip: Any, optimizer: str) -> None:
    assert peak(optimizer, {"schedule": "forward", "defer": True, "clip": clip}) <= plain_peak(optimizer).peak + BUCKET


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_undo_has_copies_of_weights_and_state_beside(optimizer: str) -> None:
    plain = plain_peak(optimizer)
    assert abs(peak(optimizer, {"schedule": "backward", "undo": True}) - plain.peak - plain.own) <= BUCKET


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_undo_on_the_host_has_what_the_plain_loop_has(optimizer: str) -> None:
    assert peak(optimizer, {"schedule": "backward", "undo": "host"}) <= plain_peak(optimizer).peak + BUCKET


# Ranks.


def on_ranks(pool: RankPool, *args: Any) -> Measured:
    """Of the first; the others' must be the same."""
    first, *others = pool.run(measure, *args)
    assert all(other == first for other in others)
    return Measured(*first)


@functools.cache
def plain_on_ranks(pool: RankPool, wrapper: str, optimizer: str) -> Measured:
    return on_ranks(pool, wrapper, optimizer, None)


DDP: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "across the iteration": {"schedule": "forward", "defer": True, "cross_iteration": True},
}


@pytest.mark.parametrize("way", DDP)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ddp_has_what_it_has_without(two_emulated_ranks: RankPool, optimizer: str, way: str) -> None:
    """Its buckets are there for good: to tell the allocator of a stream that uses them costs nothing."""
    plain = plain_on_ranks(two_emulated_ranks, "ddp", optimizer)
    found = on_ranks(two_emulated_ranks, "ddp", optimizer, DDP[way])
    assert found.held == found.peak
    assert found.peak <= plain.peak + (0 if way == "backward" else BUCKET)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_divided_state(two_emulated_ranks: RankPool, optimizer: str) -> None:
    """What is divided is saved, but for a few buckets under way."""
    plain = plain_on_ranks(two_emulated_ranks, "ddp", optimizer)
    found = on_ranks(two_emulated_ranks, "ddp", optimizer, {"schedule": "backward", "shard_state": True})
    assert found.keeps == 0
    assert found.peak <= plain.peak - (plain.own - found.own) + 3 * BUCKET


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_fsdp_has_no_more_than_without(two_emulated_ranks: RankPool, way: str) -> None:
    plain = plain_on_ranks(two_emulated_ranks, "fsdp2", "SGD")
    found = on_ranks(two_emulated_ranks, "fsdp2", "SGD", {"schedule": way, "defer": way == "forward"})
    assert found.keeps == plain.keeps == 0
    assert found.held == found.peak
    assert found.peak <= plain.peak
    if way == "backward":
        assert found.peak <= plain.peak - GRADIENTS // 2 + BUCKET + plain.peak // 20


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicated_has_a_few_buckets(two_emulated_ranks: RankPool, optimizer: str) -> None:
    """One fills, two are on their way, and one is stepped."""
    plain = plain_on_ranks(two_emulated_ranks, "replicate", optimizer)
    found = on_ranks(two_emulated_ranks, "replicate", optimizer, {"schedule": "backward"})
    assert found.held == found.peak
    assert plain.peak <= plain.own + GRADIENTS + 4 * BUCKET
    assert found.peak <= found.own + 4 * BUCKET + LAYER
