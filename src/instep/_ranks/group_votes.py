"""Votes by ``torch.distributed``: one all-reduce of a few integers, on process groups of their own.

Of their own: a rank whose backward failed has sent fewer collectives than the others, and a vote must never meet one
of theirs. The groups are gloo's, in host memory, so that no accelerator is waited for. Each is kept as long as the
group it stands beside.
"""

import atexit
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from instep._ranks.groups import store_beside, timeout_of
from instep._ranks.lost import is_lost
from instep._ranks.votes import Verdict, Vote

_NOBODY = 2**31

# A process that ends takes what it was about to send with it, and the others would take that for a failure.
_SECONDS_AT_EXIT = 5.0

_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Group]" = weakref.WeakKeyDictionary()


class GroupVotes:
    """The ranks of some process groups.

    Args:
        groups: several where a rank shares its step with others along more than one dimension of a mesh.
        description: what must be the same on all ranks.
        joined: whether some ranks have run out of data (DDP's ``join()``): these do not vote any more.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], description: object, joined: Callable[[], bool]) -> None:
        self._groups = tuple(groups)
        self._description = crc32(repr(description).encode())
        self._joined = joined

    def open(self) -> None:
        for group in self._groups:
            _group_beside(group)

    def cast(self, step: int, *, failed: bool = False, nonfinite: bool = False) -> Vote | None:
        if self._joined():
            return None
        rank = dist.get_rank()
        said = [rank if failed else _NOBODY, rank if nonfinite else _NOBODY, step, -step]
        said += [self._description, -self._description]
        return _Cast([_group_beside(group) for group in self._groups], said)


class _Group:
    """gloo between the ranks of another group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        c10d: Any = dist.distributed_c10d
        size, timeout = dist.get_world_size(group), timeout_of(group)
        self._gloo: Any = c10d.ProcessGroupGloo(store_beside(group, "votes"), dist.get_rank(group), size, timeout)
        self._minimum: Any = c10d.AllreduceOptions()
        self._minimum.reduceOp = dist.ReduceOp.MIN
        self._last: Any = None

    def minimum(self, box: torch.Tensor) -> Any:
        """Start an all-reduce of ``box``, in place."""
        self._last = self._gloo.allreduce([box], self._minimum)
        return self._last

    def finish_sending(self, *, waits: bool) -> None:
        if self._last is None or self._last.is_completed():
            return
        if waits:
            with suppress(Exception):
                self._last.wait(timedelta(seconds=_SECONDS_AT_EXIT))
        if not self._last.is_completed():
            # Some rank does not answer. The end of gloo's group would wait for it as long as for any communication: so
            # it is kept for as long as the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


@atexit.register
def _finish_sending() -> None:
    for group, votes in list(_beside.items()):
        votes.finish_sending(waits=not is_lost(group))


class _Cast:
    """Every group's minimum of what its ranks said."""

    def __init__(self, groups: Sequence[_Group], said: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._boxes = [torch.tensor(said, dtype=torch.int64, device="cpu") for _ in groups]
        self._works = [group.minimum(box) for group, box in zip(groups, self._boxes, strict=True)]

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def verdict(self) -> Verdict:
        with self._lock:
            if self._verdict is None:
                for work in self._works:
                    work.wait()
                failed, nonfinite, first, last, one, other = torch.stack(self._boxes).amin(0).tolist()
                self._verdict = Verdict(
                    failed_on=None if failed == _NOBODY else failed,
                    nonfinite_on=None if nonfinite == _NOBODY else nonfinite,
                    first=first,
                    last=-last,
                    same=one == -other,
                )
            return self._verdict


def groups_of(wrapped: Iterable[Any], parameters: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The process groups of more than one rank with whom this rank takes its steps.

    Args:
        wrapped: what has a ``process_group``: ``DistributedDataParallel``, ``FullyShardedDataParallel`` and the like.
        parameters: of which ``DTensor`` have a device mesh.
    """
    found: dict[dist.ProcessGroup, None] = dict.fromkeys(one.process_group for one in wrapped)
    meshes = dict.fromkeys(mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None)
    for mesh in meshes:
        found.update(dict.fromkeys(mesh.get_all_groups()))
    return [group for group in found if dist.get_world_size(group) > 1]


def in_join(ddps: Iterable[DistributedDataParallel | None]) -> bool:
    """Whether the loop is in ``join()`` of one of these."""
    return any(ddp is not None and ddp._join_config.enable for ddp in ddps)


def _group_beside(group: dist.ProcessGroup) -> _Group:
    found = _beside.get(group)
    if found is None:
        found = _beside[group] = _Group(group)
    return found
