"""Process groups, and the stores over which they find their ranks: what torch has no public name for.

``communicating`` notes the groups in which a communication has failed: nobody waits for their ranks any more.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def store_of_world(place: str) -> Any:
    """A part of the store over which process groups find their ranks. All processes of the world see the same."""
    c10d: Any = dist.distributed_c10d  # torch has no public name for that store
    return c10d.PrefixStore(f"instep/{place}", c10d._get_default_store())


def world() -> dist.ProcessGroup:
    """The default group: what is kept by it ends with ``destroy_process_group()``."""
    group = dist.group.WORLD
    assert group is not None, "ranks share a model only where torch.distributed was initialized"
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of ``group`` wait. torch has a public way to set that, and none to ask for it."""
    for kind in ("cuda", "cpu"):
        try:
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return timeout
    return dist.default_pg_timeout


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
    """Whether a communication of ``group`` has failed."""
    return group in _lost


def count_of_collectives() -> int:
    """How many collectives this rank has begun, in all of its groups. torch numbers them, under a private name."""
    count = 0
    if dist.is_available() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            for device in group._device_types:
                with suppress(RuntimeError):  # of a backend that does not
                    count += group._get_backend(device)._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return count
