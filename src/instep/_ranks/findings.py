"""What each rank finds for itself, told to the others without waiting for them.

Ranks need not come to it at the same point of their loops, nor at all: one may have run out of data, or run a backward
that the others do not. So this is no collective. Each rank writes to the store over which the process group was made,
and looks there now and then.
"""

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch.distributed as dist

from instep._ranks.groups import store_beside

_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]]" = weakref.WeakKeyDictionary()


class Findings:
    """A yes or no of every rank, for one attachment. Ranks that attach several models do so in the same order.

    Args:
        groups: several where a rank shares its step with others along more than one dimension of a mesh.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._stores: list[tuple[Any, str, int]] = [
            (
                store_beside(group, "findings"),
                str(next(_numbers.setdefault(group, count()))),
                dist.get_world_size(group),
            )
            for group in groups
        ]

    def say(self, found: bool) -> None:
        """Tell the others. A rank that has said yes may say no later."""
        for store, number, _ in self._stores:
            store.add(f"{number}/{'yes' if found else 'no'}", 1)

    def all_found(self) -> bool | None:
        """``False`` as soon as one has said no, ``True`` once all have said yes; ``None`` before.

        Raises what the store raises: the rank that keeps it may have ended.
        """
        if any(store.add(f"{number}/no", 0) for store, number, _ in self._stores):
            return False
        return True if all(store.add(f"{number}/yes", 0) >= size for store, number, size in self._stores) else None
