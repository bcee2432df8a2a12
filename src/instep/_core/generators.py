"""The random number generators that an optimizer's ``step()`` may draw from."""

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

Read = Callable[[], Any]
Write = Callable[[Any], Any]


class Generators:
    """The global ones of torch (on the CPU and on ``devices``), Python and NumPy, and those that ``owners`` refer to,
    with their present states.

    Args:
        owners: optimizers, or whatever else holds generators of its own.
    """

    def __init__(self, devices: Iterable[torch.device], owners: Iterable[object] = ()) -> None:
        self._owners = list(owners)
        self._known: dict[int, tuple[Read, Write]] = dict(enumerate(_global(devices)))
        self._before = {key: read() for key, (read, _) in self._known.items()}
        self._find()

    def advanced(self) -> bool:
        """Whether one of them is in another state than it was, or has been made since."""
        drawn = any(_bits(read()) != _bits(self._before[key]) for key, (read, _) in self._known.items())
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


def _global(devices: Iterable[torch.device]) -> Iterator[tuple[Read, Write]]:
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
    """Those that can be reached through containers and attributes."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    seen: set[int] = set()
    left = list(owners)
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            yield value
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        elif not isinstance(value, (torch.Tensor, torch.nn.Module, type)) and not callable(value):
            left.extend(getattr(value, "__dict__", {}).values())


def _bits(state: Any) -> Any:
    return bytes(state.tolist()) if isinstance(state, torch.Tensor) else pickle.dumps(state)
