"""Entries of an optimizer's state, to find out later whether somebody has written them. They are large: no copies."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from instep._core.changes import alike, fingerprint, is_immutable
from instep._core.parts import memory_of

Entry = Mapping[Any, Any] | None
_versions = attrgetter("_version")


class Entries:
    """Some parameters' entries, as they are now."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: list[Entry] = []
        self._values: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._found: list[int] = []
        self._others: list[tuple[Any, Any]] = []
        self.add(entries)

    def add(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        values = [value for entry in entries if entry for value in entry.values()]
        tensors = [v if type(v) is torch.Tensor else memory_of(v) for v in values if isinstance(v, torch.Tensor)]
        if len(tensors) < len(values):
            others = [v for v in values if not isinstance(v, torch.Tensor) and not is_immutable(v)]
            self._others += [(value, fingerprint(value)) for value in others]
        self._entries += entries
        self._values += values
        self._tensors += tensors
        self._found += map(_versions, tensors)

    def are(self, entries: Sequence[Entry]) -> bool:
        """Whether these are the same entries, whatever they hold. An empty one is none."""
        if len(entries) != len(self._entries):
            return False
        pairs = zip(entries, self._entries, strict=True)
        return all(map(is_, entries, self._entries)) or all(a is b or not (a or b) for a, b in pairs)

    def replaced_by(self, entries: Sequence[Entry]) -> bool:
        """Whether one of these is another entry that holds something."""
        return any(now and now is not then for now, then in zip(entries, self._entries, strict=True))

    @property
    def written(self) -> bool:
        """Whether an entry has other values since, or one of them was written. Not seen: a tensor through ``.data``."""
        values = [value for entry in self._entries if entry for value in entry.values()]
        return (
            len(values) != len(self._values)
            or not all(map(is_, values, self._values))
            or list(map(_versions, self._tensors)) != self._found
            or not all(alike(fingerprint(value), then) for value, then in self._others)
        )
