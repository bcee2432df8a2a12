"""Process groups beside those that a model was built with."""

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def group_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, whose collectives never meet those of ``group``. All of its ranks must call
    this. It is kept as long as ``group`` is."""
    found = _beside.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        backend, timeout = dist.get_backend(group), timeout_of(group)
        found = dist.new_group(ranks, timeout, backend, use_local_synchronization=True, group_desc="instep")
        assert found is not None, "this rank is one of them"
        _beside[group] = found
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """For how long its collectives wait. torch has a public way to set that, and none to ask for it."""
    for kind in ("cuda", "cpu"):
        try:
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return timeout
    return dist.default_pg_timeout
