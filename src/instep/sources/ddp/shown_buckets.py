"""The buckets of a DDP instance, as far as it has shown them."""

from collections.abc import Sequence

import torch

from instep._optim.plan import Bucket
from instep.sources.wrapped import WrappedParameters, as_bucket


class ShownBuckets:
    """Those of the last backward. Before the first one: a single bucket that holds everything, as DDP's own in its
    first backward."""

    def __init__(self, parameters: WrappedParameters) -> None:
        self._parameters = parameters
        self._by_index = {0: as_bucket("ddp", parameters)}

    @property
    def in_order(self) -> tuple[Bucket, ...]:
        return tuple(bucket for _, bucket in sorted(self._by_index.items()))

    def show(self, index: int, members: Sequence[torch.Tensor]) -> None:
        """DDP hands over the bucket numbered ``index``. The first one begins a backward."""
        if index == 0:
            self._by_index = {}
        self._by_index[index] = as_bucket("ddp", self._parameters.among(members))
