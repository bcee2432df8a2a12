"""The process group of DDP's reducer, which tells a source of each bucket that is reduced in it.

A communication hook is told of buckets too. But it costs a pass over all gradients: with a hook the reducer copies and
leaves it to the hook to divide, without one it divides as it copies. And a hook stays for good.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from instep._autograd.hooks import UntracedHook
from instep._autograd.tracing import untraced
from instep.errors import AttachError
from instep.sources.ddp.reductions import BucketListener, buckets_of

Future = torch.futures.Future[Any]


@dataclass(frozen=True, slots=True, eq=False)
class SentBucket:
    """A bucket, in the terms of the ``torch.distributed.GradBucket`` that a communication hook is given, and that
    Python cannot make."""

    _index: int
    _parameters: Sequence[torch.Tensor]
    _last: bool
    _buffer: torch.Tensor

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def is_last(self) -> bool:
        return self._last


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A bucket of the reducer's, which there is as long as ``storage`` is."""

    index: int
    parameters: Sequence[torch.Tensor]
    last: bool
    storage: StorageWeakRef


class ReducerGroup(dist.ProcessGroup):
    """Stands in the place of DDP's process group in its reducer, and hands on all that the reducer asks of it.

    Three private names of torch's are needed. ``DistributedDataParallel`` itself has ``Reducer._update_process_group``
    to change the number of ranks, and ``Reducer._get_zeros_like_grad_buckets`` for ``join()``.
    ``_create_work_from_future`` is for process groups that are written in Python; a ``Work`` that is written in Python
    would not do, since torch 2.6 does not ask such a one for its future.
    ``tests/distributed/test_reducer_group.py`` fails clearly when torch changes them.

    Args:
        source: is told of each bucket. The reducer has divided it already.
    """

    comm_hook = None

    def __init__(self, ddp: DistributedDataParallel, source: BucketListener) -> None:
        _init: Any = super().__init__  # torch's annotation lacks this one
        _init(ddp.process_group.rank(), ddp.process_group.size())
        self.source = source
        self._group = ddp.process_group
        self._ddp = weakref.ref(ddp)
        self._buckets: dict[tuple[torch.device, int], _Known] = {}
        self._rebuilt: bool | None = None
        self._handle: RemovableHandle | None = None

    @staticmethod
    def fits(ddp: DistributedDataParallel) -> bool:
        """Whether the reducer of ``ddp`` divides by itself, and shows its buckets: not with sparse gradients."""
        if not hasattr(ddp, "reducer") or ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"):
            return False
        try:
            buckets_of(ddp)
        except RuntimeError:
            return False
        return True

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        self._look(ddp)
        ddp.reducer._update_process_group(self)
        self._handle = ddp.register_forward_hook(UntracedHook(self._after_forward))

    def disconnect(self) -> None:
        ddp = self._ddp()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            if ddp is not None:
                ddp.reducer._update_process_group(ddp.process_group)

    def before_backward(self) -> None:
        """A backward begins: look for the reducer's buckets again, if it has made new ones since the forward. Some
        libraries that wrap DDP have it do so (Lightning). In the middle of backward it does not show them."""
        ddp = self._ddp()
        if ddp is not None and any(known.storage.expired() for known in self._buckets.values()):
            self._look(ddp)

    # What the reducer calls: in a forward or backward of what was compiled, too, where torch.compile would trace it.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return self._group._get_backend_name()

    @untraced
    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]  # the one of its forms
        known = self._buckets.get((tensors[0].device, tensors[0].data_ptr()))
        if known is None or known.storage.expired():
            # Not a bucket that is known: one that was made since, perhaps where another one lay (optimizer.step() will
            # find its gradients); the counts of which parameters were used; the zeros of a rank that has joined.
            return self._group.allreduce(tensors, opts)
        bucket = SentBucket(known.index, known.parameters, known.last, tensors[0])
        own = self.source.communicate(bucket, self._group, 1)
        if own is not None:
            return work_of(own)
        work = self._reduce(tensors, opts)
        self.source.launched(bucket, work.get_future())
        return work

    def _reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        return self._group.allreduce(tensors, opts)

    @untraced
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]  # the one of its forms
        return self._group.broadcast(tensors, opts)

    def _after_forward(self, ddp: DistributedDataParallel, args: object, output: object) -> None:
        if ddp._comm_hooks:
            raise AttachError(
                "register_comm_hook was called on an attached DistributedDataParallel: give the hook to "
                "attach(…, comm_hook=(state, hook)), which runs it before the step"
            )
        if ddp._has_rebuilt_buckets != self._rebuilt:
            self._look(ddp)

    def _look(self, ddp: DistributedDataParallel) -> None:
        """Note where each of the reducer's buckets lies in memory. The buckets themselves must not be kept: DDP frees
        them as it makes new ones."""
        self._rebuilt = ddp._has_rebuilt_buckets
        self._buckets = {
            (bucket.buffer().device, bucket.buffer().data_ptr()): _Known(
                bucket.index(),
                bucket.parameters(),
                bucket.is_last(),
                StorageWeakRef(bucket.buffer().untyped_storage()),
            )
            for bucket in buckets_of(ddp)
        }


work_of: Callable[[Future], Work] = _distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
