"""What an optimizer keeps of single parameters outside of its ``state``: nobody puts that back after a trial."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.changes import alike, fingerprint, is_immutable
from instep._optim.reach import reached_from


class Elsewhere:
    """Looks before a trial, and after, at mappings by parameter and at attributes of the parameters.

    Args:
        places: what an update can get at, by the name to use in a message.
        parameters: those that the trial updates.
    """

    def __init__(self, places: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        self._places = places
        self._kept = [(name, mapping, _by_parameter(mapping)) for name, mapping in self._mappings()]
        self._parameters = [(p, held := _attributes_of(p), fingerprint(held)) for p in parameters]

    @property
    def kept(self) -> str | None:
        """The place with values of single parameters that an update may change; ``None``: there is none."""
        return next((name for name, _, kept in self._kept if not all(map(is_immutable, kept.values()))), None)

    def restore(self) -> tuple[str, bool] | None:
        """Take out what the trial has added. The place, and whether all there is as it was; ``None``: it added nothing,
        and wrote nothing."""
        before = {id(mapping): kept for _, mapping, kept in self._kept}
        place, whole = None, True
        for name, mapping in list(self._mappings()):
            kept, now = before.get(id(mapping), {}), _by_parameter(mapping)
            if kept.keys() != now.keys() or any(now[key] is not value for key, value in kept.items()):
                place = name
                _make(mapping, now, kept)
        for parameter, held, content in self._parameters:
            now = _attributes_of(parameter)
            changed = [key for key in now.keys() | held.keys() if now.get(key) is not held.get(key)]
            if changed:
                place = f"the attribute {min(changed)!r} of parameters"
                _make(vars(parameter), now, held)
            if not alike(fingerprint(held), content):
                place, whole = place or "attributes of parameters", False
        return None if place is None else (place, whole)

    def _mappings(self) -> Iterator[tuple[str, MutableMapping[Any, Any]]]:
        for name, value in self._places.items():
            found = list(reached_from([value]))
            states = {id(one.state) for one in found if isinstance(one, Optimizer)}
            for one in found:
                if isinstance(one, MutableMapping) and id(one) not in states and _by_parameter(one):
                    yield name, one


def _by_parameter(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in mapping.items() if isinstance(key, torch.Tensor)}


def _attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Those aside in which a tensor of a wrapper class has its values."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    inner = () if flatten is None else flatten()[0]
    return {name: value for name, value in vars(parameter).items() if name not in inner}


def _make(mapping: MutableMapping[Any, Any], now: Mapping[Any, Any], before: Mapping[Any, Any]) -> None:
    mapping.update(before)
    for key in now.keys() - before.keys():
        del mapping[key]
