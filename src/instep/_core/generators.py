"""Whether an update draws random numbers: bucket by bucket they would go to other parameters than in the plain loop."""

import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from instep._core.changes import held_in
from instep._core.worker import NAME

_Place = tuple[Callable[[], Any], Callable[[Any], Any]]


class Generators:
    """The generators that an update may draw from, as they are now.

    Args:
        settings: values in which it may have generators of its own.
    """

    def __init__(self, settings: Iterable[Any], device: torch.device) -> None:
        own = [found for value in settings for found in held_in(value, (torch.Generator, random.Random))]
        self._places: list[_Place] = [_place_of(generator) for generator in own]
        # Another thread (one that loads data, say) may draw from the generators that all share.
        if all(t is threading.current_thread() or t.name in (NAME, "MainThread") for t in threading.enumerate()):
            self._places += _shared(device)
        self._before = [get() for get, _ in self._places]

    def advanced(self) -> bool:
        return not all(_same(get(), before) for (get, _), before in zip(self._places, self._before, strict=True))

    def restore(self) -> None:
        for (_, put), before in zip(self._places, self._before, strict=True):
            put(before)


def _place_of(generator: Any) -> _Place:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    return generator.getstate, generator.setstate


def _shared(device: torch.device) -> list[_Place]:
    places: list[_Place] = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        places.append((lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)))
    if (numpy := sys.modules.get("numpy")) is not None:
        places.append((numpy.random.get_state, numpy.random.set_state))
    return places


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, before)
    if isinstance(now, tuple):
        return all(map(_same, now, before))
    return bytes(now) == bytes(before) if hasattr(now, "tobytes") else bool(now == before)
