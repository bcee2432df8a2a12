"""Plans are values."""

import pytest
import torch
from torch import nn

import instep
from instep.buckets import MIB, ParameterSpec, Plan, bucket_bytes_for, default_buckets, fill_buckets


def specs(*sizes: int, device: str = "cpu") -> list[ParameterSpec]:
    return [
        ParameterSpec(i, f"p{i}", torch.Size([size]), torch.float32, torch.device(device), size)
        for i, size in enumerate(sizes)
    ]


def sizes_of(buckets: object) -> list[list[int]]:
    return [[p.nbytes for p in bucket.parameters] for bucket in buckets]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "expected"),
    [
        ((), 10, []),
        ((3, 3, 3), 1, [[3], [3], [3]]),
        ((3, 3, 3), 6, [[3, 3], [3]]),
        ((3, 3, 3), 7, [[3, 3], [3]]),
        ((3, 3, 3), 9, [[3, 3, 3]]),
        ((100, 3), 10, [[100], [3]]),
        ((3, 100, 3, 3), 10, [[3], [100], [3, 3]]),
    ],
)
def test_a_bucket_closes_before_it_holds_too_much(sizes: tuple[int, ...], bucket_bytes: int, expected: object) -> None:
    assert sizes_of(fill_buckets("local", specs(*sizes), bucket_bytes)) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 12, 1, 12), [[1, 12], [1, 12]]),
        ((3, 12), [[3, 12]]),
        ((4, 12), [[4], [12]]),
        ((2, 2, 7), [[2, 2], [7]]),
        ((1, 2, 100), [[1, 2, 100]]),
    ],
)
def test_a_bucket_with_less_than_enough_takes_one_more(sizes: tuple[int, ...], expected: object) -> None:
    assert sizes_of(fill_buckets("local", specs(*sizes), 10, enough=4)) == expected


def test_by_default_small_tensors_go_along_with_the_next_large_one() -> None:
    """And not where a size is given, which is a bound."""
    kib = 1024
    both = specs(*(64 * kib, kib) * 16)  # a twentieth is 52 KiB
    assert sizes_of(default_buckets("local", both)) == [[64 * kib], *[[kib, 64 * kib]] * 15, [kib]]
    medium = specs(*(64 * kib, 40 * kib) * 16)
    assert sizes_of(default_buckets("local", medium)) == [[64 * kib], [40 * kib]] * 16

    widths = (128, 4) * 16
    model = nn.ParameterList(nn.Parameter(torch.ones(width, 128)) for width in widths)
    for bucket_bytes, count in ((None, 16), (52 * kib, 32)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=bucket_bytes) as overlap:
            assert len(overlap.plan.buckets) == count


def test_devices_never_share_a_bucket() -> None:
    mixed = [*specs(1, 1), *specs(1, 1, device="meta")]
    mixed = [mixed[0], mixed[2], mixed[1], mixed[3]]
    assert [{p.device.type for p in b.parameters} for b in fill_buckets("local", mixed, 2)] == [{"cpu"}, {"meta"}]


def test_the_table() -> None:
    plan = Plan(fill_buckets("local", specs(1024 * 1024, 512 * 1024, 1, 2), 1024 * 1024))
    assert str(plan).splitlines() == [
        "bucket  source  parameters   MiB  names",
        "0       local            1  1.00  p0",
        "1       local            3  0.50  p1 … p3",
        "total                    4  1.50",
    ]


@pytest.mark.parametrize(("device", "expected"), [("cpu", 16), ("meta", 16), ("cuda", 50)])
def test_the_bytes_of_a_bucket_unless_told(device: str, expected: int) -> None:
    specs = [
        ParameterSpec(i, str(i), torch.Size([1]), torch.float32, torch.device(device), 100 * MIB) for i in range(10)
    ]
    assert bucket_bytes_for(specs) == expected * MIB
    assert bucket_bytes_for(specs[:1]) == 5 * MIB
