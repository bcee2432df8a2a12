"""Who else has the memory of parameters, gradients and state, by reference counts.

Whoever uses one of these tensors itself is noticed (``_torch/watch.py``). Another tensor of the same memory, a NumPy
array, a kept storage or an entry of the state that was taken earlier is not: its owner may read at any time, and would
find an old value while an update is deferred. But each of them counts among the owners of the memory, and the owners
that belong to the tensors themselves are known. So a count above the known one means: do not defer.

torch has no public name for the number of a storage's owners. ``tests/unit/test_owners.py`` fails clearly when the
private one changes.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, compress
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._torch.versions import are_plain, memory_of

_VALUES = methodcaller("values")
_OWNERS: Callable[[int], int] = torch._C._storage_Use_Count
_STORAGE = torch.Tensor.untyped_storage
_ADDRESS = attrgetter("_cdata")
_IS_TORCHS = methodcaller("resizable")  # memory of NumPy's, of a mapped file or of another process is not
_IS_SHARED = methodcaller("is_shared")  # with another process, on a CPU; elsewhere always true


class OwnerCount(NamedTuple):
    """The owners that a storage has when nobody else uses it, not counting its own object in Python.

    Attributes:
        each: so many for each tensor in it.
        more: so many beside these.
    """

    each: int
    more: int = 0

    def of(self, tensors: int) -> int:
        return self.each * tensors + self.more


BY_THEMSELVES = OwnerCount(1)
IN_VIEWS_OF_DDP = OwnerCount(2, 1)
"""DDP's bucket is an owner, and has a view of its own for each gradient."""
IN_VIEWS_OF_REPLICATE = OwnerCount(1, 1)
"""The buffer that a bucket was reduced in is an owner, and each of its views. So it is with FSDP2's gradients."""
IN_SHARDS_OF_FSDP2 = OwnerCount(3)
"""FSDP2 keeps the padded shard and a flat view of it beside the local tensor of the parameter."""


def have_other_owners(
    tensors: Sequence[torch.Tensor], owners: OwnerCount = BY_THEMSELVES, some: Sequence[bool] | None = None
) -> list[bool]:
    """Of each plain strided tensor: whether its memory has an owner that is not one of ``tensors``.

    Args:
        some: for each whether ``owners`` says how many it has, since torch or instep keeps it, itself or as a view: the
            others have one. ``None``: so it is for all.
    """
    if some is not None:
        theirs = iter(have_other_owners(list(compress(tensors, some)), owners))
        usual = iter(have_other_owners([t for t, is_one in zip(tensors, some, strict=True) if not is_one]))
        return [next(theirs if is_one else usual) for is_one in some]
    if not tensors:
        return []
    storages = list(map(_STORAGE, tensors))
    known = _known()
    alone = owners.of(1) + known.wrapper
    counts = list(map(_OWNERS, map(_ADDRESS, storages)))
    references = list(map(sys.getrefcount, storages))
    on_cpu = storages[0].device.type == "cpu"
    foreign = not all(map(_IS_TORCHS, storages)) or (on_cpu and any(map(_IS_SHARED, storages)))
    if not foreign and set(counts) <= {alone} and set(references) <= {known.in_list}:
        return [False] * len(storages)
    shared: dict[int, int] = {}
    for storage in storages:
        shared[storage._cdata] = shared.get(storage._cdata, 0) + 1
    return [
        count != owners.of(shared[storage._cdata]) + known.wrapper
        or reference != known.in_list + shared[storage._cdata] - 1
        or not _IS_TORCHS(storage)
        or (storage.device.type == "cpu" and _IS_SHARED(storage))
        for storage, count, reference in zip(storages, counts, references, strict=True)
    ]


def state_is_kept(optimizer: Optimizer) -> bool:
    """Whether anybody refers to the mapping that ``optimizer`` has as its ``state``."""
    return _references_to_state(optimizer) != _known().state


def entries_are_kept(entries: Sequence[Mapping[Any, Any] | None]) -> list[bool]:
    """Of each entry of an optimizer's state, in the state and in ``entries`` alone: whether anybody else refers to the
    entry, to a tensor in the entry, or to the memory of one."""
    usual = _known().in_list_and_dict
    counts = list(map(sys.getrefcount, entries))
    shared = [entry is not None and count != usual for entry, count in zip(entries, counts, strict=True)]
    values = list(chain.from_iterable(map(_VALUES, filter(None, entries))))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    del values
    if not tensors:
        return shared
    kept = [count != usual for count in list(map(sys.getrefcount, tensors))]
    ids = {id(tensor) for tensor, is_kept in zip(tensors, kept, strict=True) if is_kept}
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    ids.update(id(tensor) for tensor in tensors if tensor.layout is not torch.strided)  # cannot be asked
    ids.update(id(tensor) for tensor, is_kept in zip(strided, _state_has_other_owners(strided), strict=True) if is_kept)
    if not ids:
        return shared
    return [
        before or (entry is not None and any(id(value) in ids for value in entry.values()))
        for before, entry in zip(shared, entries, strict=True)
    ]


def _state_has_other_owners(tensors: Sequence[torch.Tensor]) -> list[bool]:
    if are_plain(tensors):
        return have_other_owners(tensors)
    memory = list(map(memory_of, tensors))
    # The local tensor of a DTensor that was made by ``from_local`` is a view of the one that was given.
    from_local = [local is not tensor and local._is_view() for local, tensor in zip(memory, tensors, strict=True)]
    return have_other_owners(memory, IN_VIEWS_OF_REPLICATE, from_local)


def _references_to_state(optimizer: Any) -> int:
    return sys.getrefcount(vars(optimizer)["state"])


class _Known:
    """What is counted where nobody else has anything, as this Python and this torch count.

    Attributes:
        wrapper: the owners of memory that a storage's object in Python adds.
        in_list: the references to an object that is in one list.
        in_list_and_dict: the same, of one that is in a dict, too.
        state: those to the state of an optimizer.
    """

    def __init__(self) -> None:
        tensors = [torch.zeros(1)]
        storages = list(map(_STORAGE, tensors))
        self.wrapper = next(map(_OWNERS, map(_ADDRESS, storages))) - 1
        self.in_list = next(map(sys.getrefcount, storages))
        entries = {0: {0: torch.zeros(1)}}
        values = list(entries.values())
        self.in_list_and_dict = next(map(sys.getrefcount, values))  # ``entries`` is still there
        self.state = _references_to_state(SimpleNamespace(state={}))  # to which nobody else refers


@cache
def _known() -> _Known:
    return _Known()
