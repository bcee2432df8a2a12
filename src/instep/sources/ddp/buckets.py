"""The buckets of a DDP instance in one backward, from the start of their communication until they are used.

DDP hands each bucket to a source, or to a communication hook, which puts it into a ``Reduction``. ``Reductions``
collects them, and gives them to their owner where backward ends: before DDP's own end, to step them ``as_they_arrive``,
and after it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.multiprocessing.reductions import StorageWeakRef

from instep._torch.engine import Phase, current, graph_task
from instep._torch.lifetime import weakly
from instep.errors import InstepError
from instep.sources import LaunchedBucket, drain


def divided_as_by_ddp(
    tensors: Sequence[torch.Tensor], are_sparse: Sequence[bool], bucket_cap_mb: float | None
) -> list[list[int]]:
    """DDP's buckets of ``tensors``, by number, in the order in which the last of each comes.

    torch has no public name for the rule (``_compute_bucket_assignment_by_size``), nor for the size of DDP's first
    bucket (``_DEFAULT_FIRST_BUCKET_BYTES``): tests/distributed/test_replicated.py compares with DDP's.

    Args:
        bucket_cap_mb: in MiB; ``None``: DDP's own, 25, with a first one that is smaller.
    """
    cap = int((bucket_cap_mb or 25) * 1024 * 1024)
    sizes = [dist._DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb is None else cap, cap]
    buckets, _ = dist._compute_bucket_assignment_by_size([*tensors], sizes, [*are_sparse])
    # The last ones of several dtypes come in no particular order, which may differ from rank to rank.
    return sorted(buckets, key=lambda bucket: bucket[-1])


@dataclass(frozen=True, slots=True, eq=False)
class ReducerBucket:
    """A bucket of the reducer's, in the terms of a ``torch.distributed.GradBucket``, which Python cannot make. There is
    one as long as ``storage`` is.

    Attributes:
        tensor: the bucket's memory, while the reducer sends it.
    """

    number: int
    members: Sequence[torch.Tensor]
    last: bool
    storage: StorageWeakRef
    tensor: torch.Tensor | None = None

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor

    def parameters(self) -> list[torch.Tensor]:
        return list(self.members)

    def is_last(self) -> bool:
        return self.last


AnyBucket = GradBucket | ReducerBucket


B = TypeVar("B", bound=LaunchedBucket)


class Reductions(Generic[B]):
    """Collects the buckets of a DDP instance in one backward, and hands them to their owner where backward ends.

    DDP's own end of backward takes ``.grad`` for what its hooks have left there, and an error before it leaves the
    instance unusable. So there are two calls:

    Args:
        step: is called before DDP's own end, if any. It must not raise, and leaves ``.grad`` as it was.
        settle: is called after DDP's own end. It may replace gradients, and raise.
        raised: is called in the place of either where the backward raises.
    """

    def __init__(
        self,
        step: Callable[[Sequence[B]], None] | None,
        settle: Callable[[Sequence[B]], None],
        raised: Callable[[Sequence[B]], None],
    ) -> None:
        # Weakly: they are methods of the owner, which has this object.
        self._step = None if step is None else weakly(step)
        self._settle, self._raised = weakly(settle), weakly(raised)
        self._under_way: list[B] = []
        self._task: int | None = None

    def begin(self) -> None:
        """A backward is about to hand over its first bucket: ``raised`` is called wherever it raises from here on, not
        only once its last bucket is under way. For an owner that takes gradients off as buckets come."""
        self._under_way.clear()  # of a backward that raised before it came to an end
        current().at(Phase.BEFORE_DDP, lambda: None, self._failed)

    def launched(self, bucket: AnyBucket, in_flight: B) -> bool:
        """The communication of ``bucket`` was started, as ``in_flight``. ``False`` on a rank that has joined and only
        helps the others: ``join()`` copies their weights to it at the end."""
        if graph_task() is None:
            return False
        if bucket.index() == 0:
            if self._under_way and self._task == graph_task():
                raise InstepError(
                    "DistributedDataParallel has shown a second bucket 0 in one backward. With static_graph=True and "
                    "parameters of several dtypes all buckets of the first backward have that number: build it without "
                    "static_graph. Or two instances share one communication hook of instep's: make one for each"
                )
            self._under_way.clear()  # of a backward that raised before it came to an end
            self._task = graph_task()
        self._under_way.append(in_flight)
        if bucket.is_last():
            # In the hook of the last bucket: DDP asks for its own end right after it, so that ours comes first.
            current().at(Phase.BEFORE_DDP, self._before_ddp_ends, self._failed)
        return True

    def _before_ddp_ends(self) -> None:
        if self._step is not None:
            self._step(self._under_way)
        for in_flight in self._under_way:
            # Nobody waits for these where a step was given up, and the next backward writes the same memory: also after
            # one that has failed. gloo ends all that is under way with the first that runs out of time.
            drain([in_flight])
        current().at(Phase.AFTER_DDP, self._after_ddp_ended, self._failed)

    def _after_ddp_ended(self) -> None:
        buckets, self._under_way = self._under_way, []
        self._settle(buckets)

    def _failed(self) -> None:
        buckets, self._under_way = self._under_way, []
        self._raised(buckets)


class Reduction(LaunchedBucket):
    """One bucket of a DDP instance whose gradients are reduced.

    Attributes:
        index: DDP's number of the bucket.
        parameters: the bucket's parameters that got a gradient on this rank.
        unused: the others. Another rank may have used them: DDP's own end of backward knows, and sets ``.grad`` then.
    """

    __slots__ = ("_positions", "_sparse", "index", "parameters", "unused")

    def __init__(self, bucket: AnyBucket, communication: Any) -> None:
        super().__init__(bucket.parameters(), communication)
        self._sparse = bucket.buffer().is_sparse
        self._positions = [i for i, parameter in enumerate(self.members) if parameter.grad is not None]
        self.index = bucket.index()
        self.parameters: list[torch.Tensor] = [self.members[i] for i in self._positions]
        self.unused: list[torch.Tensor] = [p for p in self.members if p.grad is None]

    @property
    def arrived(self) -> bool:
        """Whether waiting would cost nothing. Always false on accelerators: there a future is done as soon as its work
        is queued."""
        return self.members[0].device.type == "cpu" and bool(self.communication.done())

    def gradients(self) -> list[torch.Tensor]:
        """Wait, and return the reduced gradients of ``parameters``. Raises what the communication raised."""
        self.wait()
        result = self.communication.value()
        if isinstance(result, list):  # the future of a backend
            result = result[0]
        slices = [result] if self._sparse else slices_of(result, self.members)
        # A compressing hook may answer in another dtype: DDP too casts what it copies into .grad.
        return [slices[i].to(self.members[i].dtype) for i in self._positions]


def as_they_arrive(reductions: Sequence[Reduction]) -> Iterator[list[Reduction]]:
    """Yield the buckets to step next, in the order of sending: the first one that is left, with those right behind it
    that have arrived already. One call of the optimizer for all of these costs less than one each."""
    start = 0
    while start < len(reductions):
        end = start + 1
        while end < len(reductions) and reductions[end].arrived:
            end += 1
        yield list(reductions[start:end])
        start = end


@contextmanager
def grad_as_left(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Around a step that comes before DDP's own end of backward: ``.grad`` of ``parameters`` is put back after it.
    DDP's end takes what is in ``.grad`` for what its hooks have left there."""
    as_left = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, as_left, strict=True):
            parameter.grad = gradient


def slices_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in a bucket's dense tensor, one for each of its parameters, as views.

    ``GradBucket.gradients()`` knows contiguous reals only. The reducer keeps a dense parameter's own strides
    (channels_last), and complex ones as pairs of reals (``torch/csrc/distributed/c10d/reducer.cpp``,
    ``initialize_bucket_views``).
    """
    slices, offset = [], 0
    for parameter in parameters:
        layout = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
        if layout.is_contiguous() or torch.empty_like(layout, device="meta").stride() != layout.stride():
            view = flat.narrow(0, offset, layout.numel()).view(layout.shape)
        else:
            view = flat.as_strided(layout.shape, layout.stride(), flat.storage_offset() + offset)
        slices.append(torch.view_as_complex(view) if parameter.is_complex() else view)
        offset += layout.numel()
    return slices
