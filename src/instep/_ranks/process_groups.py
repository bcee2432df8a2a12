"""Process groups, and the stores over which they find their ranks: what torch has no public name for.

``group_beside`` makes a group of instep's own between the ranks of a group that a model was built with. torch does not
know of it: ``new_group`` names a group by how many a rank has made before, which would have to be the same on all
ranks. ``communicating`` notes the groups in which a communication has failed: nobody waits for their ranks any more.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep.errors import AttachError


def require_another(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ``AttachError`` if ``group_beside`` cannot make another group like ``group``, before anything is sent."""
    known = type(group._get_backend(device)).__name__ in ("ProcessGroupGloo", "ProcessGroupNCCL")
    if not known and _plugin_of(group) is None:
        raise AttachError(
            "this needs a process group of gloo, of NCCL or of a backend that another package has registered, and "
            f"that of the model is {group.name()}"
        )


def group_beside(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group whose collectives never meet those of ``group``, for tensors on ``device``. It is kept as long as
    ``group`` is. All ranks of ``group`` must call this, and wait for one another the first time."""
    found = _beside.get(group)
    if found is None:
        backend: Any = type(group._get_backend(device))  # the class alone says how it is made
        store = store_of_world(f"buckets/{group.group_name}")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if backend.__name__ == "ProcessGroupGloo":
            theirs: Any = group._get_backend(device).options
            options: Any = type(theirs)()
            # As the model's own group was made, but for the threads.
            options._timeout, options._devices, options._threads = theirs._timeout, theirs._devices, _GLOO_THREADS
            made = backend(store, rank, size, options)
        elif backend.__name__ == "ProcessGroupNCCL":
            options = backend.Options()
            options._timeout = timeout_of(group)
            made = backend(store, rank, size, options)
        else:
            made = _plugin_of(group).creator_fn(store, rank, size, timeout_of(group))
        if isinstance(made, dist.ProcessGroup):  # of another package, which has made a whole group and no backend
            _beside[group] = made
            return made
        found = dist.ProcessGroup(store, rank, size)
        kind = getattr(dist.ProcessGroup.BackendType, backend.__name__.removeprefix("ProcessGroup").upper())
        found._register_backend(torch.device(device.type), kind, made)
        _beside[group] = found
    return found


_GLOO_THREADS = 4
"""How many collectives gloo runs at once. Each waits for the other ranks between its two halves: with 2, torch's own
number, a fast link is idle for a part of the time."""


_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def _plugin_of(group: dist.ProcessGroup) -> Any:
    """A backend of another package, registered with ``dist.Backend.register_backend``, which was told how to make a
    group; ``None``: the backend is torch's own, or is made in a way that is not known here."""
    plugin: Any = dist.Backend._plugins.get(dist.get_backend(group).upper())
    return None if plugin is None or plugin.extended_api else plugin


def store_of_world(place: str) -> Any:
    """A part of the store over which process groups find their ranks. All processes of the world see the same."""
    c10d: Any = dist.distributed_c10d  # torch has no public name for that store
    return c10d.PrefixStore(f"instep/{place}", c10d._get_default_store())


def world() -> dist.ProcessGroup:
    """The default group: what is kept by it ends with ``destroy_process_group()``."""
    found = dist.group.WORLD
    assert found is not None, "ranks share a model only where torch.distributed was initialized"
    return found


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
