"""Loops side by side: what differs after each step, the most memory that a step takes, and how long each takes.

``verify``, the demo and the selftest train the same loop plain and attached, and ask these questions.
"""

import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instep import Attachment

# What a step changes, and the first difference.


def training_state(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Everything that a step changes, each with a name: parameters, buffers, optimizer state and the values of groups.

    Parameters keep their names, and state is named after its parameter.
    """
    names: dict[int, str] = {}
    reshard(model)  # a step that ends with an evaluation leaves gathered parameters there, without a state
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield f"parameter {name!r}", parameter.detach()
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", buffer
    for number, one in enumerate([optimizer] if isinstance(optimizer, Optimizer) else optimizer):
        kind = f"{type(one).__name__} {number}" if number else type(one).__name__
        for key, value in one.state.items():
            yield from _leaves(f"{kind}.state of {names.get(id(key), key)!r}", value)
        for index, group in enumerate(one.param_groups):
            for option, value in group.items():
                if option != "params":
                    yield from _leaves(f"{kind}.param_groups[{index}][{option!r}]", value)


def first_difference(plain: Iterator[tuple[str, Any]], other: Iterator[tuple[str, Any]]) -> str | None:
    """Compare two results of ``training_state`` bit for bit. Returns the first difference in words, or ``None``."""
    left, right = dict(plain), dict(other)
    for name in left.keys() ^ right.keys():
        return f"only the {'plain' if name in left else 'attached'} loop has {name}"
    for name, a in left.items():
        b = right[name]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{name} is {a.dtype} {tuple(a.shape)}, attached {b.dtype} {tuple(b.shape)}"
            if a.device != b.device:
                a, b = a.cpu(), b.cpu()  # state of offload="host"
            if not same(a, b):
                return f"{name} differs{_gap(a, b)}"
        elif type(a) is not type(b) or not _same_value(a, b):
            return f"{name} is {a!r}, attached {b!r}"
    return None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, and NaN at the same places: which payload a NaN has is up to the
    kernel. Of what is spread over ranks this rank's part."""
    first, second = list(_plain_in(a)), list(_plain_in(b))
    return type(a) is type(b) and len(first) == len(second) and all(map(_same_plain, first, second))


def _plain_in(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors in which one of any class or layout keeps its values."""
    for held in _held_in(tensor):
        if held.is_nested:
            yield from held.unbind()
        else:
            yield held.to_dense() if held.layout is not torch.strided else held


def _held_in(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors in a wrapper, whose own storage has its whole size and no memory (``DTensor``); any other tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):
                yield from _held_in(inner)
    else:
        yield tensor


def _same_plain(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    return (a.is_floating_point() or a.is_complex()) and bool(torch.all((a == b) | ((a != a) & (b != b))))


def _gap(a: torch.Tensor, b: torch.Tensor) -> str:
    if type(a) not in (torch.Tensor, nn.Parameter) or a.is_nested:
        return ""  # its class may not know how to subtract
    gap = (a.detach().to_dense().double() - b.detach().to_dense().double()).abs().max().item()
    return f" by up to {gap:.3g}"


def _same_value(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are equal, by ``==``, by what they pickle to, or by their attributes."""
    try:
        if a == b:
            return True
    except (ValueError, RuntimeError):
        pass  # of an array, and of an object that holds a tensor, torch and NumPy have no single answer
    try:
        # NaN equals NaN here too. So do two objects of equal content whose class has no ``==`` of its own.
        if pickle.dumps(a) == pickle.dumps(b):
            return True
    except Exception:  # its class decides how, and whether, an object is pickled
        pass
    # Equal tensors need not be pickled alike. An object without attributes does not show what it holds.
    mine, theirs = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
    try:
        return bool(mine) and first_difference(_leaves("", mine), _leaves("", theirs)) is None
    except RecursionError:
        return False


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values in nested containers, each with its path behind ``name``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield from _leaves(f"{name}[{i}]", item)
    else:
        yield name, value


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters of ``fully_shard`` back into the modules."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def lockstep(
    loops: Sequence[Callable[[int], object]],
    states: Callable[[], Sequence[Iterator[tuple[str, Any]]]],
    steps: int,
    overlap: Attachment | None,
) -> Iterator[str | None]:
    """Take each step in both loops, under the same random numbers. Yields the first difference after it, in words.

    Args:
        loops: the plain one, and the other.
        states: the ``training_state`` of both.
        overlap: of the other one.
    """
    for number in range(steps):
        for take in loops:
            torch.manual_seed(number)
            take(number)
        if overlap is not None:
            overlap.synchronize()  # an update that was put off is to be compared, too
        difference = first_difference(*states())
        yield None if difference is None else f"after step {number + 1}: {difference}"


# Memory and time.


class LiveBytes(TorchDispatchMode):
    """A mode that counts the storages that operations on this thread make, backward's too. Any thread may free them.

    Args:
        there: tensors that were made before, and do not count.

    Attributes:
        now: the bytes that are alive.
        peak: the most bytes that were alive since ``reset``.
    """

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in there}

    def reset(self) -> None:
        """Look for the peak from now on."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                for held in _held_in(result):
                    if held.layout is torch.strided:
                        self._count(held.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            # ``_cdata`` is the address of the storage itself: views share it, and it is free for a new storage as soon
            # as the finalizer has run.
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class Peak:
    """The most bytes of tensors that are alive at once, while its block runs: by the allocator of an accelerator, on a
    CPU by a look at every operation.

    Attributes:
        is_known: whether the backend tells.
        nbytes: the peak, once the block has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live = LiveBytes() if device.type == "cpu" else None
        self._allocator: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._before = self.nbytes = 0
        self.is_known = device.type == "cpu" or hasattr(self._allocator, "max_memory_allocated")

    def __enter__(self) -> "Peak":
        if self._live is not None:
            self._live.__enter__()
        elif self.is_known:
            self._before = self._allocator.memory_allocated(self._device)
            self.reset()
        return self

    def __exit__(self, *error: Any) -> None:
        wait(self._device)
        if self._live is not None:
            self.nbytes = self._live.peak
            self._live.__exit__(*error)
        elif self.is_known:
            self.nbytes = int(self._allocator.max_memory_allocated(self._device)) - self._before

    def reset(self) -> None:
        """Look for the peak from now on."""
        wait(self._device)
        if self._live is not None:
            self._live.reset()
        elif self.is_known:
            self._allocator.reset_peak_memory_stats(self._device)


def wait(device: torch.device) -> None:
    """Wait until the device has done everything that was launched on it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


Result = TypeVar("Result")


def timed(step: Callable[[], Result], overlap: Attachment | None, device: torch.device) -> tuple[Result, float]:
    """What ``step`` returns, and its seconds, with the update that was put off."""
    # Kernels run behind the clock's back: it starts and stops where nothing runs.
    wait(device)
    started = perf_counter()
    returned = step()
    if overlap is not None:
        overlap.synchronize()
    wait(device)
    return returned, perf_counter() - started
