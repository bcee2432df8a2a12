"""Where each parameter of an optimizer stands in its ``param_groups``, and which of a bucket's are in which group."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import torch

from instep.errors import StaleAttachmentError

Groups = Sequence[Mapping[str, Any]]


class Members(NamedTuple):
    """The parameters of a bucket that one group holds, in the group's order: where each stands in the bucket, and where
    in the group."""

    in_bucket: list[int]
    in_group: list[int]


class GroupLayout:
    """The members of all groups, as they are when a step begins. Kept from step to step while the groups hold the same.

    Args:
        name: of the optimizer.
    """

    def __init__(self, name: str, groups: Groups) -> None:
        self._name = name
        self._ids = _ids_of(groups)
        self._position = {key: position for position, key in enumerate(chain.from_iterable(self._ids))}
        self._bounds = [0, *accumulate(map(len, self._ids))]
        # Of buckets that were asked for, by the first parameter's id: the ids of all, and the answer.
        self._known: dict[int, tuple[list[int], list[Members]]] = {}
        self._room = 0

    def is_of(self, groups: Groups) -> bool:
        """Whether ``groups`` hold the same parameters in the same order."""
        return _ids_of(groups) == self._ids

    def holds(self, value: object) -> bool:
        return id(value) in self._position

    def members_of(self, bucket: Sequence[torch.Tensor]) -> list[Members]:
        """The parameters of ``bucket`` by group: all groups, those aside that were added since the step began.

        Raises:
            StaleAttachmentError: a parameter is in no group.
        """
        ids = list(map(id, bucket))
        known = self._known.get(ids[0])
        if known is not None and known[0] == ids:
            return known[1]
        members = self._divide(ids, bucket)
        # Buckets that are stepped together differ from step to step: their answers shall not take ever more memory.
        self._room -= len(ids)
        if self._room < 0:
            self._known.clear()
            self._room = 2 * len(self._position)
        self._known[ids[0]] = ids, members
        return members

    def were_moved(self, groups: Groups) -> bool:
        """Whether a parameter has left its place. Others may have been added behind them, or in groups of their own."""
        found = _ids_of(groups[: len(self._ids)])
        return [now[: len(then)] for now, then in zip(found, self._ids, strict=False)] != self._ids

    def added_to(self, state: Mapping[Any, Any], size: int) -> list[Any]:
        """The keys that came into ``state`` when it had ``size``, in the order of the groups; then those that are no
        parameters."""
        last = len(self._position)
        return sorted(islice(state, size, None), key=lambda key: self._position.get(id(key), last))

    def _divide(self, ids: Sequence[int], bucket: Sequence[torch.Tensor]) -> list[Members]:
        position = self._position
        for key, parameter in zip(ids, bucket, strict=True):
            if key not in position:
                raise StaleAttachmentError(
                    f"a parameter of shape {tuple(parameter.shape)} is no longer in {self._name}.param_groups. "
                    "detach() before taking parameters out of an optimizer, or now, and attach again after"
                )
        positions = [position[key] for key in ids]
        order = sorted(range(len(positions)), key=positions.__getitem__)
        positions.sort()
        members = []
        for first, last in zip(self._bounds, self._bounds[1:], strict=False):
            mine = slice(bisect_left(positions, first), bisect_left(positions, last))
            members.append(Members(order[mine], [at - first for at in positions[mine]]))
        return members


def _ids_of(groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]
