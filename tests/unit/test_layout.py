"""Which parameters share a bucket of a replicated model: torch's own assignment is the oracle."""

import random

import pytest
import torch
import torch.distributed as dist

from instep.sources.replicate.layout import BucketSizes, as_they_arrived, before_any_backward

DTYPES = [torch.float32, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_those_of_ddp(seed: int) -> None:
    draw = random.Random(seed)
    parameters = [torch.empty(draw.randint(0, 40), dtype=draw.choice(DTYPES[: 1 + seed % 3])) for _ in range(30)]
    sparse = frozenset(draw.sample(range(30), seed % 4))
    first, rest = draw.randint(1, 200), draw.randint(1, 400)
    expected = [number in sparse for number in range(30)]
    sizes = BucketSizes(first, rest)

    in_order, _ = dist._compute_bucket_assignment_by_size(parameters, [first, rest], expected)
    found = before_any_backward(parameters, range(30), sparse, sizes)
    assert list(found.buckets) == [tuple(bucket) for bucket in reversed(in_order)]
    assert not found.agreed

    order = draw.sample(range(30), 30)
    arrived = [parameters[number] for number in order]
    rebuilt, _ = dist._compute_bucket_assignment_by_size(arrived, [first, rest], expected, order)
    found = as_they_arrived(parameters, order, sparse, sizes)
    # Of several dtypes, torch sends the last buckets in no particular order.
    assert sorted(found.buckets) == sorted(tuple(bucket) for bucket in rebuilt)
    assert found.agreed


def test_sizes_are_those_of_ddp() -> None:
    assert BucketSizes.of(None) == BucketSizes(dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20)
    assert BucketSizes.of(0.5) == BucketSizes(2**19, 2**19)


def test_frozen_parameters_are_in_no_bucket() -> None:
    parameters = [torch.empty(4) for _ in range(4)]
    assert before_any_backward(parameters, (0, 2), frozenset(), BucketSizes(1, 1)).buckets == ((2,), (0,))
