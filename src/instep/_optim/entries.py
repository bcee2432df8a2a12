"""Entries of an optimizer's state, to find out later whether somebody has written them. They are large: no copies."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch

from instep._optim.changes import alike, fingerprint, is_immutable
from instep._optim.parts import are_plain, versions_of

State = Mapping[Any, Any]

_VALUES = methodcaller("values")


class Entries:
    """Some parameters' entries, each as it was when it was added."""

    def __init__(self) -> None:
        self._all: list[_Some] = []

    def add(self, parameters: Sequence[torch.Tensor], state: State) -> None:
        self._all.append(_Some(parameters, state))  # all of them at once: Ctrl-C may come anywhere

    def are_as_left(self, state: State) -> bool:
        """Whether ``state`` has the same entries, an empty one being none, and nothing in them was written."""
        return all(some.are_in(state) and not some.written for some in self._all)

    def are_replaced_in(self, state: State) -> bool:
        """Whether ``state`` has another entry for one of the parameters, that holds something."""
        return any(some.are_replaced_in(state) for some in self._all)

    @property
    def written(self) -> bool:
        """Whether an entry has other values since, or one of them was written. Not seen: a tensor through ``.data``."""
        return any(some.written for some in self._all)


class _Some:
    __slots__ = ("_entries", "_found", "_others", "_parameters", "_tensors", "_values")

    def __init__(self, parameters: Sequence[torch.Tensor], state: State) -> None:
        self._parameters = list(parameters)
        self._entries: list[State | None] = list(map(state.get, parameters))
        self._values = self._tensors = self._values_now()
        self._others: list[tuple[Any, Any]] = []
        if not are_plain(self._values):
            self._tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
            others = [v for v in self._values if not isinstance(v, torch.Tensor) and not is_immutable(v)]
            self._others = [(value, fingerprint(value)) for value in others]
        self._found = versions_of(self._tensors)

    def are_in(self, state: State) -> bool:
        now = list(map(state.get, self._parameters))
        if all(map(is_, now, self._entries)):
            return True
        return all(a is b or not (a or b) for a, b in zip(now, self._entries, strict=True))

    def are_replaced_in(self, state: State) -> bool:
        now = map(state.get, self._parameters)
        return any(a and a is not b for a, b in zip(now, self._entries, strict=True))

    @property
    def written(self) -> bool:
        values = self._values_now()
        return (
            len(values) != len(self._values)
            or not all(map(is_, values, self._values))
            or versions_of(self._tensors) != self._found
            or not all(alike(fingerprint(value), then) for value, then in self._others)
        )

    def _values_now(self) -> list[Any]:
        return list(chain.from_iterable(map(_VALUES, filter(None, self._entries))))
