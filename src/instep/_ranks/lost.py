"""Process groups in which a communication has failed: nobody waits for their ranks any more."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_lost: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


@contextmanager
def communicating(group: dist.ProcessGroup) -> Iterator[None]:
    """Around what waits for a communication of ``group``: the first one that fails is the last one that is waited for.
    Once a rank is lost, each would take as long as the group waits."""
    try:
        yield
    except Exception:
        _lost.add(group)
        raise


def is_lost(group: dist.ProcessGroup) -> bool:
    return group in _lost
