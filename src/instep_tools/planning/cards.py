"""Which card a peak fits."""

from collections.abc import Sequence

from instep_tools.output import GIB
from instep_tools.planning.job import PlannedBucket

CARDS = (16, 24, 48, 80)
"""In GB, of 10**9 bytes: a card of 24 GB that has 24 * 2**30 has 7% more."""
LEFT = GIB
"""What is left of a card to the CUDA context, the kernels' workspaces and gaps between blocks."""


def card_of(nbytes: int) -> int | None:
    """Return the smallest card, in GB, that a peak fits; ``None``: it fits none."""
    return next((one for one in CARDS if nbytes <= one * 10**9 - LEFT), None)


def more_on_accelerator(buckets: Sequence[PlannedBucket], chosen: int = 0) -> int:
    """Return how many bytes more a peak with ``buckets`` has on an accelerator: there one is alive until the next one
    has been stepped, and they have the size that ``attach`` has ``chosen`` for it, if it has."""
    largest = max(bucket.nbytes for bucket in buckets)
    followed = max((bucket.nbytes for bucket in buckets[:-1]), default=0)
    return max(largest, chosen) - largest + max(followed, chosen)


def said_of_card(nbytes: int) -> str:
    smallest = card_of(nbytes)
    return f"{smallest} GB" if smallest else f"more than {CARDS[-1]} GB"
