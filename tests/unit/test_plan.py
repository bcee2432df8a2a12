"""Plans are values."""

import pytest
import torch

from instep._optim.parameters import MIB, ParameterSpec, Plan, bucket_bytes_for, fill_buckets


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
