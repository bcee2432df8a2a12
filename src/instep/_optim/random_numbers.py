"""Random numbers in an update: the generators that it may draw from, and ``random="keyed"``."""

import ctypes
import hashlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.dtensor import drawn_by_part, shard_index
from instep._optim.kinds import read_by_update
from instep._optim.stages import Stage, Update
from instep._optim.values import access_to, reachable_values
from instep._torch.engine import graph_task, is_captured, is_of_backward
from instep._torch.versions import memory_of
from instep._torch.worker import NAME
from instep.errors import UnsupportedOptimizerError, class_name


def draw_key(seed: int, step: int, name: str, shard: int | None = None) -> int:
    """What torch's default generators are seeded with for the update of one parameter, with ``random="keyed"``.

    The key is made of the first 8 bytes of ``blake2b`` over the UTF-8 text ``"{seed}/{step}/{shard}/{name}"``, read as
    a number with the highest byte first, without its highest bit: ``0 <= key < 2**63``. Of a parameter that is updated
    as a whole, ``{shard}`` is empty: ``"1234/0//layers.0.weight"``.

    Args:
        seed: what ``attach`` was given.
        step: how many steps had been committed before this one: 0 in the first.
        name: of the parameter, in the model without any wrapper.
        shard: which part of the parameter this rank updates, counted from 0 along the dimensions of the device mesh
            over which it is sharded; ``None``: all of it.

    Since 0.1.0.

    Example:
        ```python
        torch.manual_seed(instep.draw_key(1234, step=0, name="layers.0.weight"))
        # What an optimizer draws by torch.randn_like in the first update of this weight, on a CPU, attached
        # with random="keyed", seed=1234:
        noise = torch.randn_like(model.layers[0].weight)
        ```
    """
    part = "" if shard is None else str(shard)
    digest = hashlib.blake2b(f"{seed}/{step}/{part}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63


# The random number generators that an update may draw from: bucket by bucket, what is drawn would go to other
# parameters than in the plain loop.


Read = Callable[[], Any]
Write = Callable[[Any], Any]


States = list[tuple[torch.Generator, torch.Tensor]]
"""Generators of torch's, each with the state that it had."""


def _states(devices: Iterable[torch.device]) -> States:
    """torch's default generators on the CPU and on ``devices``, with their present states."""
    return [(generator, generator.get_state()) for generator in _defaults(devices)]


def _restore(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)


class Generators:
    """Generators with their present states: those that all share (torch's on the CPU and on ``devices``, Python's and
    NumPy's), and those that ``owners`` refer to.

    Args:
        owners: values in which an optimizer may have generators of its own.
        torchs_alone: what can be asked around each bucket's update.
    """

    def __init__(
        self, devices: Iterable[torch.device], owners: Iterable[object] = (), *, torchs_alone: bool = False
    ) -> None:
        self._owners = list(owners)
        self._kinds: Any = torch.Generator if torchs_alone else object
        self._known: dict[int, tuple[Read, Write]] = dict(enumerate(_shared(devices, torchs_alone=torchs_alone)))
        self._shared = frozenset(self._known)
        self.begin()
        self._find()

    @classmethod
    def of(cls, optimizer: Optimizer, devices: Iterable[torch.device], *, torchs_alone: bool = False) -> "Generators":
        """With those that the update of ``optimizer`` may draw from."""
        # The groups themselves: what an update puts there later is found, too.
        owners = [read_by_update(optimizer), optimizer.param_groups, *([] if torchs_alone else [optimizer.state])]
        return cls(devices, owners, torchs_alone=torchs_alone)

    def begin(self) -> None:
        """Their states are what they are now."""
        self._others = _times_of_others()
        self._before = {key: read() for key, (read, _) in self._known.items()}

    def have_advanced(self) -> bool:
        """What can be asked often: whether one has, and no other thread can have drawn. Then the states are put
        back."""
        if not self._advanced() or not self._others_rest():
            return False
        self.restore()
        return True

    def _advanced(self) -> set[int]:
        return {key for key, (read, _) in self._known.items() if not _same(read(), self._before[key])}

    def drawn(self) -> bool:
        """Whether this thread has drawn from one of them, or made one, since. What another thread may have drawn from
        those that all share does not count."""
        advanced, count = self._advanced(), len(self._known)
        self._find()
        if advanced - self._shared or len(self._known) > count:
            return True
        return bool(advanced) and self._others_rest()

    def restore(self, *, even_shared: bool = False) -> None:
        """Put the states back; those that all share if no other thread can have drawn, or ``even_shared``."""
        rest = even_shared or self._others_rest()
        for key, (_, write) in self._known.items():
            if rest or key not in self._shared:
                write(self._before[key])

    def _others_rest(self) -> bool:
        return None not in self._others.values() and _times_of_others() == self._others

    def _find(self) -> None:
        for value in reachable_values(self._owners):
            access = access_to(value) if isinstance(value, self._kinds) else None
            if access is not None and id(value) not in self._known:
                self._known[id(value)] = access
                self._before[id(value)] = access[0]()


_NEVER_DRAW = (NAME, "MainThread", "tqdm_monitor")
"""Names of threads: instep's, the loop's, where it is not this one, and that which redraws tqdm's bars."""


def _times_of_others() -> dict[int, int | None]:
    """How long the threads have run that may draw, one that loads data, say: ns of CPU, ``None`` where nobody tells."""
    if threading.active_count() == 1:  # asked for each bucket
        return {}
    here = threading.current_thread()
    others = [t.native_id or 0 for t in threading.enumerate() if t is not here and t.name not in _NEVER_DRAW]
    if graph_task() is None and all(map(is_of_backward, others)):
        # An accelerator's thread of backward draws only in a backward. None runs here, and no thread is left that may
        # have called one, so such a thread at most winds up the last.
        others = []
    return {native_id: _time_of(native_id) for native_id in others}


def _time_of(native_id: int) -> int | None:
    if sys.platform != "linux" or not native_id:
        return None
    try:
        # Linux's number for the CPU clock of a thread, as clock_gettime(2) has it. Unlike pthread_getcpuclockid it may
        # be asked for of a thread that has ended.
        return time.clock_gettime_ns((~native_id << 3) | 6)
    except OSError:
        return None


def _defaults(devices: Iterable[torch.device]) -> Iterator[torch.Generator]:
    yield torch.default_generator
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        yield torch.get_device_module(device).default_generators[device.index]


def _shared(devices: Iterable[torch.device], *, torchs_alone: bool) -> Iterator[tuple[Read, Write]]:
    for generator in _defaults(devices):
        yield generator.get_state, generator.set_state
    if not torchs_alone:
        yield random.getstate, random.setstate
    if not torchs_alone and (numpy := sys.modules.get("numpy")) is not None:
        yield partial(numpy.random.get_state, legacy=False), numpy.random.set_state


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        # By its address: any operation, and ``numpy()``, would meet the modes that the loop is in.
        return ctypes.string_at(now.data_ptr(), now.nbytes) == ctypes.string_at(before.data_ptr(), before.nbytes)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_same(value, before[key]) for key, value in now.items())
    if hasattr(now, "tobytes"):  # an array of NumPy's
        return bool(now.tobytes() == before.tobytes())
    return bool(now == before)


class KeyedDraws(Stage):
    """What the updates of one attachment draw from: each parameter's from generators that are seeded for it.

    Args:
        seed: the user's.
        committed: how many steps the attachment has committed.

    Attributes:
        earlier: steps that count, and that the attachment does not count among its own: what a checkpoint was loaded
            from had taken them.
    """

    def __init__(self, seed: int, committed: Callable[[], int]) -> None:
        self.seed = seed
        self.earlier = 0
        self._committed = committed
        self._places: dict[int, tuple[str, int | None]] = {}  # by ``id``: the name, and the shard that this rank has
        self._loops: States = []  # torch's generators, as the loop has left them, while step() runs

    def keep(self, devices: Iterable[torch.device]) -> None:
        """``step()`` is about to run, and finds no gradient. What it draws even so is no draw of the loop's."""
        self._loops = _states(devices)

    def give_back(self) -> None:
        """``step()`` has returned, or raised."""
        loops, self._loops = self._loops, []
        _restore(loops)

    def require_names(self, optimizer: Optimizer) -> None:
        """Raise ``UnsupportedOptimizerError`` if ``optimizer.step()`` finds a gradient of a parameter that has no name,
        and so no key."""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._places and parameter.grad is not None:
                    raise UnsupportedOptimizerError(
                        f"random='keyed': {class_name(optimizer)}.param_groups[{index}] holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in the model. It has no name there, and so its draws no "
                        "key. Give it to an optimizer of its own, or put it into the model"
                    )

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        """torch's default generators are seeded for the parameter, and put back.

        Raises:
            UnsupportedOptimizerError: a CUDA graph is being recorded.
        """
        parameter = update.owned[0]
        name, shard = self._places[id(parameter)]
        device = memory_of(parameter).device
        if is_captured(device):
            raise UnsupportedOptimizerError(
                f"random='keyed' seeds a generator for each update of {class_name(update.optimizer)}, and a CUDA graph "
                "that is being recorded would draw the same numbers in each replay. Capture forward and backward "
                "without optimizer.step(), or leave out random and seed"
            )
        key, before = draw_key(self.seed, self.number, name, shard), _states({device})
        try:
            for generator, _ in before:
                generator.manual_seed(key)
            with drawn_by_part(parameter):
                yield
        finally:
            _restore(before)

    def portions_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
        """Each parameter of a bucket is stepped by an update of its own."""
        yield from (slice(number, number + 1) for number in range(len(tensors)))

    @property
    def number(self) -> int:
        """Of the running step, counted from 0."""
        return self._committed() + self.earlier

    def name(self, parameter: torch.Tensor, name: str) -> None:
        """The bare model knows ``parameter`` by ``name``."""
        self._places[id(parameter)] = name, shard_index(parameter)
