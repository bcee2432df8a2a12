"""The random number generators that an update may draw from: bucket by bucket, what is drawn would go to other
parameters than in the plain loop."""

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from instep._core.reach import reached_from
from instep._core.worker import NAME

Read = Callable[[], Any]
Write = Callable[[Any], Any]


class Generators:
    """Generators with their present states: those that all share (torch's on the CPU and on ``devices``, Python's and
    NumPy's), and those that ``owners`` refer to.

    Args:
        owners: optimizers, or values in which one may have generators of its own.
        shared: whether to look at those that all share.
    """

    def __init__(self, devices: Iterable[torch.device], owners: Iterable[object] = (), *, shared: bool = True) -> None:
        self._owners = list(owners)
        self._known: dict[int, tuple[Read, Write]] = dict(enumerate(_shared(devices) if shared else ()))
        self._before = {key: read() for key, (read, _) in self._known.items()}
        self._find()

    def advanced(self) -> bool:
        """Whether one of them is in another state than it was, or has been made since."""
        drawn = any(not _same(read(), self._before[key]) for key, (read, _) in self._known.items())
        count = len(self._known)
        self._find()
        return drawn or len(self._known) > count

    def restore(self) -> None:
        """Put the states back."""
        for key, (_, write) in self._known.items():
            write(self._before[key])

    def _find(self) -> None:
        for generator in _held_by(self._owners):
            if id(generator) not in self._known:
                self._known[id(generator)] = access = _access(generator)
                self._before[id(generator)] = access[0]()


def nobody_else_draws() -> bool:
    """Whether no other thread runs that may draw from the generators that all share: one that loads data, say."""
    return all(t is threading.current_thread() or t.name in (NAME, "MainThread") for t in threading.enumerate())


def _shared(devices: Iterable[torch.device]) -> Iterator[tuple[Read, Write]]:
    yield torch.get_rng_state, torch.set_rng_state
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        module = torch.get_device_module(device)
        yield partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.get_state, numpy.random.set_state


def _access(generator: Any) -> tuple[Read, Write]:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _held_by(owners: Iterable[object]) -> Iterator[Any]:
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return (value for value in reached_from(owners) if isinstance(value, kinds))


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, before)
    return pickle.dumps(now) == pickle.dumps(before)
