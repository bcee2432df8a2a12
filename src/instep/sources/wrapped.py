"""The attached parameters that a wrapper (``DistributedDataParallel``, ``Replicated``) reduces."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from instep._optim.parameters import AttachedParameter
from instep._optim.plan import Bucket


class WrappedParameters:
    """Found by the tensors in the wrapper's buckets, some of which may not be attached."""

    def __init__(self, parameters: Iterable[AttachedParameter]) -> None:
        self._by_id = {id(attached.get()): attached for attached in parameters}

    def adopt(self, parameters: Sequence[AttachedParameter], reduced: Collection[int]) -> list[AttachedParameter]:
        """Take in those of ``parameters`` that are in ``reduced``, by ``id``. Returns the others."""
        self._by_id.update((id(a.get()), a) for a in parameters if id(a.get()) in reduced)
        return [attached for attached in parameters if id(attached.get()) not in reduced]

    def among(self, tensors: Iterable[torch.Tensor]) -> list[AttachedParameter]:
        """Those of ``tensors`` that are attached, in the same order."""
        return self.with_ids(map(id, tensors))

    def with_ids(self, ids: Iterable[int]) -> list[AttachedParameter]:
        """As ``among``, for the ``id`` of each tensor."""
        return [self._by_id[key] for key in ids if key in self._by_id]

    def __getitem__(self, tensor: torch.Tensor) -> AttachedParameter:
        return self._by_id[id(tensor)]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._by_id

    def __iter__(self) -> Iterator[AttachedParameter]:
        return iter(self._by_id.values())


def as_bucket(source: str, parameters: Iterable[AttachedParameter]) -> Bucket:
    """A bucket of the wrapper as a plan shows it."""
    return Bucket(source, tuple(attached.spec for attached in parameters))
