"""Values that an optimizer holds: what can be reached from it, copied and put back, and whether it was changed."""

import copy
import logging
import reprlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._torch.versions import memory_of, version_of

# What an update can get at beside what it is given: through the attributes, groups and state of its optimizer.


_NUMBERS = frozenset({bool, int, float, str, type(None)})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def reachable_values(owners: Iterable[object]) -> Iterator[Any]:
    """``owners`` and all that they refer to through containers, attributes, and what functions of theirs enclose.
    Numbers are left out; tensors and classes are not looked into, nor is what a module holds but parameters."""
    seen: set[int] = set()
    left = list(owners)
    while left:
        value = left.pop()
        if type(value) in _NUMBERS or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in _TENSORS:
            continue
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        elif isinstance(value, torch.nn.Module):
            left.extend(value.parameters())
        elif isinstance(value, MethodType):
            left.append(value.__self__)
        elif isinstance(value, FunctionType):
            left.extend(cell.cell_contents for cell in value.__closure__ or () if is_filled(cell))
        elif not isinstance(value, (torch.Tensor, type)) and not callable(value):
            left.extend(getattr(value, "__dict__", {}).values())


def is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# What an update reads beside parameters and their state, and what has become of it since: groups and attributes.
#
# Values are compared by what they hold, not by what somebody is told of: a tensor may be written through ``.data`` or a
# NumPy view, a setting may lie in an object. What is looked into is bounded, see ``fingerprint``.


DEPTH = 4
"""How many objects, lists and dicts inside one another are looked into."""
MOST = 1024
"""How many values of one setting are looked into, and of how many elements a tensor is compared by value."""

ABSENT = object()
SHORT = reprlib.Repr()  # a setting may hold whole parameters
SHORT.maxother = SHORT.maxstring = 80
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
PER_PARAMETER = ("params", "param_names")
"""The keys of a group that hold one item for each parameter: all others are settings."""
# Not looked into: they are no settings, and hold much.
_CLOSED = (nn.Module, nn.Parameter, Optimizer, torch.Generator, type, ModuleType, logging.Logger, threading.Thread)


def is_immutable(value: Any) -> bool:
    return isinstance(value, _IMMUTABLE) or (isinstance(value, tuple) and all(map(is_immutable, value)))


def is_plain(value: Any) -> bool:
    """Whether ``private`` copies all of it."""
    if type(value) in _NUMBERS:
        return True
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return is_immutable(value) or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


def private(value: Any) -> Any:
    """A copy that may be changed in place without its origin seeing it. Objects, and what cannot be changed, are
    shared."""
    if type(value) in _NUMBERS or is_immutable(value) or isinstance(value, nn.Parameter):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: private(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(private, value))
    return value


class _Values:
    """A tensor as it is now."""

    __slots__ = ("_address", "_copy", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # held, so that no other one can have its address
        self._version = version_of(tensor)
        self._address = _address(tensor)
        self._copy = tensor.detach().clone() if _can_be_read(tensor) else None

    def like(self, other: "_Values") -> bool:
        if self._copy is not None and other._copy is not None:
            return same_bits(self._copy, other._copy)
        if self._tensor is other._tensor:
            return self._version == other._version and self._address == other._address
        return torch.equal(self._tensor, other._tensor)


class _Itself:
    """Something that is not looked into."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def like(self, other: "_Itself") -> bool:
        return self._value is other._value


class _Held:
    """What a list, a dict or an object holds."""

    __slots__ = ("_items", "_kind")

    def __init__(self, kind: type, items: Mapping[Any, Any]) -> None:
        self._kind = kind
        self._items = items

    def like(self, other: "_Held") -> bool:
        mine, others = self._items, other._items
        return (
            self._kind is other._kind
            and mine.keys() == others.keys()
            and all(alike(value, others[key]) for key, value in mine.items())
        )


class _Look:
    """One look at a value: each object is looked into once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._left = MOST

    def at(self, value: Any, depth: int) -> Any:
        if is_immutable(value):
            return value
        if isinstance(value, torch.Tensor):
            return _Itself(value) if isinstance(value, nn.Parameter) else _Values(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        items = None if depth == 0 or isinstance(value, _CLOSED) else _items_of(value)
        if items is None or len(items) > self._left:
            return _Itself(value)
        self._left -= len(items)
        return _Held(type(value), {key: self.at(item, depth - 1) for key, item in items.items()})


def fingerprint(value: Any) -> Any:
    """What ``value`` holds, to be compared with ``alike`` later.

    Lists, tuples, sets, dicts, arrays and objects are looked into, ``DEPTH`` deep and up to ``MOST`` values. A tensor
    of up to ``MOST`` elements on a CPU is compared bit for bit, another one by its identity, memory and version.
    Modules, parameters and optimizers are only told apart. So are the values that a dict keeps by parameter: they are
    taken for per-parameter state.
    """
    return _Look().at(value, DEPTH)


def held_in(value: Any, kinds: tuple[type, ...], depth: int = DEPTH) -> Iterator[Any]:
    """What there is of ``kinds`` where ``fingerprint`` looks."""
    if isinstance(value, kinds):
        yield value
    elif depth and not is_immutable(value) and not isinstance(value, (torch.Tensor, *_CLOSED)):
        items = _items_of(value) or {}
        for item in items.values() if len(items) <= MOST else ():
            yield from held_in(item, kinds, depth - 1)


def alike(a: Any, b: Any) -> bool:
    """Whether two fingerprints are of values that hold the same."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (_Values, _Itself, _Held)):
        return a.like(b)
    return bool(a == b) or (a != a and b != b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors have the same memory, byte by byte: NaN of another payload and -0.0 are other values.
    For what is put back, which must be what it was."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(bytes_of(a), bytes_of(b))


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, and NaN where the other one is. For what was computed twice: which payload a NaN
    gets is up to the kernel, and a loop that diverges must diverge the same way."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if a.is_sparse and b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    can_be_nan = a.is_floating_point() or a.is_complex()
    return can_be_nan and bool(torch.all((a == b) | ((a != a) & (b != b))))


def same(a: Any, b: Any, *, others: bool = False) -> bool:
    """Whether two values of a group, of state, or that a step returns are equal: containers by what they hold, tensors
    by their numbers, of what is spread over ranks this rank's part.

    Args:
        others: the answer for two objects of one class, of which nobody knows how to compare them.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return tensors and same_numbers(memory_of(a), memory_of(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], others=others) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(*pair, others=others) for pair in zip(a, b, strict=True))
    if isinstance(a, (*_IMMUTABLE, set, frozenset)):
        return bool(a == b) or (a != a and b != b)
    return others


def values_differ(a: Any, b: Any) -> bool:
    """Whether what was computed twice has come out differently. Objects of unknown kinds do not count."""
    return not same(a, b, others=True)


def _items_of(value: Any) -> dict[Any, Any] | None:
    """What a value holds, by name or number; ``None`` if nothing is known of that."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if not isinstance(key, torch.Tensor)}
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    return _content_of_buffer(value) or _attributes_of(value)


def _content_of_buffer(value: Any) -> dict[Any, Any] | None:
    """Of a NumPy array, or another one."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    return {"bytes": bytes(view)} if view.nbytes <= 8 * MOST else None


def _attributes_of(value: Any) -> dict[Any, Any] | None:
    names = {name for cls in type(value).__mro__ for name in _slots_of(cls)}
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    return found or None


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    # As Python names those that begin with two underscores.
    private_to = f"_{cls.__name__.lstrip('_')}"
    mangled = (f"{private_to}{s}" if s.startswith("__") and not s.endswith("__") else s for s in slots)
    return tuple(s for s in mangled if s not in ("__dict__", "__weakref__"))


def _is_small(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() <= MOST


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Without waiting for an accelerator, which may be copying to pinned memory."""
    return _is_small(tensor) and tensor.device.type == "cpu" and not is_pinned(tensor)


def waits_for_host(value: Any) -> bool:
    """Whether it is a small tensor on an accelerator, whose values the host cannot know without waiting."""
    if not isinstance(value, torch.Tensor) or not _is_small(value) or value.is_meta:
        return False
    return not _can_be_read(value) and not is_pinned(value)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether its memory is pinned. A torch that is built for the CPU alone knows without asking the tensor; any other
    asks its class, and ``DTensor`` knows nothing of it, nor need another one."""
    if tensor.device.type != "cpu":
        return False
    try:
        return tensor.is_pinned() if type(tensor) is torch.Tensor else memory_of(tensor).is_pinned()
    except NotImplementedError:
        return False


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if type(tensor) is torch.Tensor and tensor.layout is torch.strided else 0


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor, byte by byte: its memory, where it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride


# What a value of optimizer state holds, copied, to be put back into the same objects: others may refer to them.


Restore = Callable[[], Any]
"""Puts back what a value held. Returns the value, which is the same object."""


class Contents:
    """Copies the contents of values, each object once, however often it is referred to.

    Args:
        host: keep the copies of tensors in host memory, pinned where the tensors are on an accelerator.
    """

    def __init__(self, host: bool) -> None:
        self._host = host
        self._known: dict[int, Restore] = {}

    def known(self, value: Any) -> None:
        """``value`` is put back by whoever says so."""
        self._known[id(value)] = lambda: value

    def of(self, value: Any) -> Restore:
        """The present contents of ``value``.

        Raises:
            TypeError: an object cannot be copied.
        """
        known = self._known.get(id(value))
        if known is None:
            if isinstance(value, torch.Tensor):
                known = partial(restore, value, copy_of(value, self._host))
            elif is_immutable(value):
                return lambda: value
            else:
                self.known(value)  # while what it holds is copied, which may be itself
                known = self._copied(value)
            self._known[id(value)] = known
        return known

    def _copied(self, value: Any) -> Restore:
        if isinstance(value, dict):
            return _dict(value, {key: self.of(item) for key, item in value.items()})
        if isinstance(value, (list, deque)):
            return _list(value, [self.of(item) for item in value])
        if isinstance(value, tuple):
            return _tuple(value, [self.of(item) for item in value])
        if isinstance(value, set):
            return _set(value, set(value))
        if isinstance(value, FunctionType):
            return _function(value, [self._filled(cell) for cell in value.__closure__ or ()])
        if isinstance(value, MethodType):
            return _tuple(value, [self.of(value.__self__)])
        if isinstance(value, partial):
            return _tuple(value, [self.of(item) for item in (value.func, value.args, value.keywords)])
        if hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
            return _object(value, {name: self.of(item) for name, item in vars(value).items()})
        copied = copy.deepcopy(value)
        return lambda: copied

    def _filled(self, cell: Any) -> Restore | None:
        return self.of(cell.cell_contents) if is_filled(cell) else None


def copy_of(tensor: torch.Tensor, host: bool) -> torch.Tensor:
    if not host or tensor.device.type == "cpu":
        if is_pinned(tensor):
            _await_copies()
        return tensor.detach().clone()
    kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return kept.copy_(tensor.detach(), non_blocking=True)


def _await_copies() -> None:
    """Some optimizers keep state in pinned memory, from and to which an accelerator copies while the host goes on."""
    torch.accelerator.current_stream().synchronize()


def restore(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if is_pinned(tensor):
        _await_copies()
    if tensor.shape != values.shape:
        tensor.resize_(values.shape)
    tensor.detach().copy_(values, non_blocking=True)
    return tensor


# Never empty in between, where that can be: Ctrl-C may come anywhere, and then this is done again.


def _dict(held: dict[Any, Any], items: dict[Any, Restore]) -> Restore:
    def put() -> dict[Any, Any]:
        held.update((key, item()) for key, item in items.items())
        for key in held.keys() - items.keys():
            del held[key]
        return held

    return put


def _list(held: Any, items: list[Restore]) -> Restore:
    def put() -> Any:
        values = [item() for item in items]
        if isinstance(held, list):
            held[:] = values
        else:
            held.clear()
            held.extend(values)
        return held

    return put


def _tuple(held: Any, items: list[Restore]) -> Restore:
    """Of what cannot be made to refer to something else."""

    def put() -> Any:
        for item in items:
            item()
        return held

    return put


def _set(held: set[Any], items: set[Any]) -> Restore:
    def put() -> set[Any]:
        held.update(items)
        held.intersection_update(items)
        return held

    return put


def _object(held: Any, attributes: dict[str, Restore]) -> Restore:
    def put() -> Any:
        vars(held).update((name, item()) for name, item in attributes.items())
        for name in vars(held).keys() - attributes.keys():
            delattr(held, name)
        return held

    return put


def _function(held: FunctionType, enclosed: list[Restore | None]) -> Restore:
    def put() -> FunctionType:
        for cell, item in zip(held.__closure__ or (), enclosed, strict=True):
            if item is not None:
                cell.cell_contents = item()
        return held

    return put


# What an optimizer keeps of single parameters outside of its ``state``: nobody puts that back after a trial.


class OutsideState:
    """Looks before a trial, and after, at mappings by parameter and at attributes of the parameters.

    Args:
        places: what an update can get at, by the name to use in a message.
        parameters: those that the trial updates.
    """

    def __init__(self, places: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        self._places = places
        self._kept = [(name, mapping, _by_parameter(mapping)) for name, mapping in self._mappings()]
        self._parameters = [(p, held := _attribute_values(p), fingerprint(held)) for p in parameters]

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
            now = _attribute_values(parameter)
            changed = [key for key in now.keys() | held.keys() if now.get(key) is not held.get(key)]
            if changed:
                place = f"the attribute {min(changed)!r} of parameters"
                _make(vars(parameter), now, held)
            if not alike(fingerprint(held), content):
                place, whole = place or "attributes of parameters", False
        return None if place is None else (place, whole)

    def _mappings(self) -> Iterator[tuple[str, MutableMapping[Any, Any]]]:
        for name, value in self._places.items():
            found = list(reachable_values([value]))
            states = {id(one.state) for one in found if isinstance(one, Optimizer)}
            for one in found:
                if isinstance(one, MutableMapping) and id(one) not in states and _by_parameter(one):
                    yield name, one


def _by_parameter(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in mapping.items() if isinstance(key, torch.Tensor)}


def _attribute_values(parameter: torch.Tensor) -> dict[str, Any]:
    """Those aside in which a tensor of a wrapper class has its values."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    inner = () if flatten is None else flatten()[0]
    return {name: value for name, value in vars(parameter).items() if name not in inner}


def _make(mapping: MutableMapping[Any, Any], now: Mapping[Any, Any], before: Mapping[Any, Any]) -> None:
    mapping.update(before)
    for key in now.keys() - before.keys():
        del mapping[key]
