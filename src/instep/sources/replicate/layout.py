"""Which parameters share a bucket of a ``Replicated``: DDP's own rule, so that ranks add up in the same order.

With three ranks or more the order in which a ring adds depends on where in its buffer an element lies: another layout
differs in the last bit. Before any backward buckets follow the model's order (``before_any_backward``), and then the
order in which gradients arrived on the first rank (``as_they_arrived``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from instep.buckets import MIB

FIRST_BYTES = MIB
"""The first bucket's size where none is asked for, as in DDP: communication begins early."""
DEFAULT_MIB = 25
"""The size of all other buckets, as in DDP."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """When a bucket is full, in bytes: the first one of each dtype and device, and those after it."""

    first: int
    rest: int

    @classmethod
    def of(cls, bucket_cap_mb: float | None) -> "BucketSizes":
        """What ``DistributedDataParallel(bucket_cap_mb=…)`` makes of it."""
        if bucket_cap_mb is None:
            return cls(FIRST_BYTES, DEFAULT_MIB * MIB)
        return cls(int(bucket_cap_mb * MIB), int(bucket_cap_mb * MIB))


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Which parameters share a bucket, in the order in which buckets are sent.

    Attributes:
        buckets: the numbers of the parameters in each bucket.
        agreed: whether this is the order in which gradients arrived on the first rank. Until then it is the model's.
    """

    buckets: tuple[tuple[int, ...], ...]
    agreed: bool = False


def before_any_backward(
    parameters: Sequence[torch.Tensor], members: Sequence[int], sparse: frozenset[int], sizes: BucketSizes
) -> BucketLayout:
    """The layout of the parameters numbered ``members`` before a backward has shown an order: the model's order
    backwards, as DDP's with ``find_unused_parameters``."""
    buckets = sorted(_fill(parameters, members, sparse, sizes), key=min)
    return BucketLayout(tuple(reversed(buckets)))


def as_they_arrived(
    parameters: Sequence[torch.Tensor], order: Sequence[int], sparse: frozenset[int], sizes: BucketSizes
) -> BucketLayout:
    """The layout in the order in which gradients arrived, as DDP's after its first backward."""
    return BucketLayout(tuple(_fill(parameters, order, sparse, sizes)), agreed=True)


def _fill(
    parameters: Sequence[torch.Tensor], order: Iterable[int], sparse: frozenset[int], sizes: BucketSizes
) -> list[tuple[int, ...]]:
    done: list[tuple[int, ...]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    left: dict[tuple[torch.dtype, torch.device], int] = {}
    for number in order:
        if number in sparse:
            done.append((number,))
            continue
        parameter = parameters[number]
        key = parameter.dtype, parameter.device
        filling.setdefault(key, []).append(number)
        left[key] = left.get(key, sizes.first) - parameter.numel() * parameter.element_size()
        if left[key] <= 0:
            done.append(tuple(filling.pop(key)))
            left[key] = sizes.rest
    return [*done, *map(tuple, filling.values())]
