"""What the allocator has given out at most in a regular step, of a model whose gradients set the peak.

Peaks are of live blocks, and with those that ``record_stream`` holds while the device lags behind the host.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import pytest

import instep
from tests.accelerator.measuring import BUCKET, GRADIENTS, LAYER, OPTIMIZERS, Measured, measure, peak, plain_peak
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.accelerator


BACKWARD: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "clipped in two passes": {"schedule": "backward", "clip": instep.ClipNorm(1.0, mode="two_pass")},
    "the norm alone": {"schedule": "backward", "clip": instep.ClipNorm(math.inf)},
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
