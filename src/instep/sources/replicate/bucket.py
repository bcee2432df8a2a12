"""A bucket of gradients whose memory is freed with the last of them."""

from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from instep.sources.ddp.reductions import slices_of
from instep.sources.in_flight import InFlightBucket


class TransientBucket(InFlightBucket[torch.futures.Future[Any]]):
    """
    Args:
        work: of which ``communication`` is the future; ``None``: of a sparse gradient.

    Attributes:
        numbers: of its parameters.
        unused: the numbers of those that this rank has no new gradient for.
    """

    __slots__ = ("_sparse", "_work", "numbers", "unused")

    def __init__(
        self,
        members: Sequence[torch.Tensor],
        communication: torch.futures.Future[Any],
        work: dist.Work | None,
        numbers: tuple[int, ...],
        unused: frozenset[int],
    ) -> None:
        super().__init__(members, communication)
        self._work = work
        self._sparse = work is None
        self.numbers = numbers
        self.unused = unused

    def wait(self) -> None:
        super().wait()
        # NCCL's work keeps the bucket's memory until the work itself was waited for, not its future alone.
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def put_means(self, used: Set[int]) -> None:
        """The bucket has arrived: put the mean into ``.grad`` of the members with these numbers, and let go of the
        bucket. From now on ``.grad`` alone keeps its memory."""
        for number, parameter, mean in zip(self.numbers, self.members, self._means(), strict=True):
            if number in used:
                parameter.grad = mean
        self.communication = torch.futures.Future()

    def _means(self) -> Sequence[torch.Tensor]:
        result, dtype = self.communication.value(), self.members[0].dtype
        if self._sparse:
            return [result.to(dtype)]
        return slices_of(result[0].to(dtype.to_real()), self.members)
