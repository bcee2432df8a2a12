"""Values that an optimizer holds: what can be reached from it, copied and put back, and whether it was changed."""

import logging
import random
import reprlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import (
    BuiltinMethodType,
    ClassMethodDescriptorType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from instep._torch.versions import PLAIN, is_pinned, memory_of, version_of

# What an update can get at beside what it is given: through the attributes, groups and state of its optimizer.


_NUMBERS = frozenset({bool, int, float, str, type(None)})
_REFER_TO_NOTHING = _NUMBERS | {
    *(UnionType, GenericAlias),
    *(MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType),
    MemberDescriptorType,
}


def reachable_values(owners: Iterable[object], but: object = None) -> Iterator[Any]:
    """``owners`` and all that they refer to through containers, attributes, weak references, and what functions of
    theirs enclose or are given. Numbers and descriptors are left out; tensors, classes, Python's modules and objects of
    torch's are not looked into, nor is what a ``Module`` holds but parameters.

    Args:
        but: what is not looked into either: an optimizer to which its own functions refer.
    """
    seen: set[int] = {id(but)}
    left = list(owners)
    while left:
        value = left.pop()
        if type(value) in _REFER_TO_NOTHING or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        left.extend(_referred_by(value))


def _referred_by(value: Any) -> Iterable[Any]:
    if type(value) in PLAIN or isinstance(value, (torch.Tensor, type, ModuleType)):
        return ()
    if isinstance(value, torch.nn.Module):
        return value.parameters()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, (MethodType, BuiltinMethodType)):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if is_filled(cell))
        return *cells, value.__defaults__, value.__kwdefaults__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, weakref.ref):
        return (value(),)
    return () if is_of_torch(value) else (attributes_of(value) or {}).values()


def is_of_torch(value: object) -> bool:
    """Whether its class is one of torch's own: not an optimizer, a scheduler, or a tensor. So are instep's."""
    module, open_in_torch = f"{type(value).__module__}.", ("torch.optim.", "torch._tensor", "torch.nn.")
    return module.startswith(("torch.", "instep.")) and not module.startswith(open_in_torch)


def is_generator(value: Any) -> bool:
    """Whether it is a random number generator: of torch, Python or NumPy."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


def access_to(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What reads the state of a random number generator, and what writes it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def compiled_from(function: Any) -> Any:
    """The function that ``torch.compile`` was given, whose wrapper encloses much of torch's."""
    return getattr(function, "_torchdynamo_orig_callable", function)


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


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in PER_PARAMETER}


# Not looked into: they are no settings, and hold much.
_CLOSED = (nn.Module, nn.Parameter, Optimizer, torch.Generator, type, ModuleType, logging.Logger, threading.Thread)


def is_immutable(value: Any) -> bool:
    if isinstance(value, _IMMUTABLE) or (isinstance(value, tuple) and all(map(is_immutable, value))):
        return True
    return type(value).__module__ == "numpy" and isinstance(value, sys.modules["numpy"].generic)


def is_compared_by_value(value: Any) -> bool:
    """Whether its class compares, and hashes, what it holds, of which nothing is known, or all is immutable."""
    if isinstance(value, weakref.ref):  # which compares, and hashes, what it refers to
        return False
    kind: Any = type(value)
    compares = kind.__eq__ is not object.__eq__ and kind.__hash__ is not None
    return compares and all(map(is_immutable, (attributes_of(value) or {}).values()))


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

    def __init__(self, tensor: torch.Tensor, most: int) -> None:
        self._tensor = tensor  # held, so that no other one can have its address
        self._version = version_of(tensor)
        self._address = address_of(tensor)
        self._copy = tensor.detach().clone() if _can_be_read(tensor, most) else None

    def like(self, other: "_Values") -> bool:
        if self._copy is not None and other._copy is not None:
            return same_bits(self._copy, other._copy)
        if self._tensor is other._tensor and not is_fake(type(self._tensor)):
            return self._version == other._version and self._address == other._address
        return torch.equal(self._tensor, other._tensor)


class _Itself(NamedTuple):
    """Something that is not looked into."""

    value: Any

    def like(self, other: "_Itself") -> bool:
        return self.value is other.value


class _Held(NamedTuple):
    """What a list, a dict or an object holds."""

    kind: type
    items: Mapping[Any, Any]

    def like(self, other: "_Held") -> bool:
        items, others = self.items, other.items
        return (
            self.kind is other.kind
            and items.keys() == others.keys()
            and (not issubclass(self.kind, dict) or list(items) == list(others))
            and all(alike(value, others[key]) for key, value in items.items())
        )


class _Look:
    """One look at a value: each object is looked into once."""

    def __init__(self, elements: int) -> None:
        self._seen: dict[int, int] = {}
        self._left = MOST
        self._elements = elements

    def at(self, value: Any, depth: int) -> Any:
        if is_immutable(value):
            return value
        if isinstance(value, torch.Tensor):
            return _Itself(value) if isinstance(value, nn.Parameter) else _Values(value, self._elements)
        is_closed = depth == 0 or isinstance(value, _CLOSED)
        items = None if is_closed else _items_of(value)
        if items is None and not is_closed and is_compared_by_value(value):
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if items is None or len(items) > self._left:
            return _Itself(value)
        self._left -= len(items)
        return _Held(type(value), {key: self.at(item, depth - 1) for key, item in items.items()})


def fingerprint(value: Any, elements: int = MOST) -> Any:
    """What ``value`` holds, to be compared with ``alike`` later.

    Lists, tuples, sets, dicts, arrays and objects are looked into, ``DEPTH`` deep and up to ``MOST`` values. A tensor
    of up to so many ``elements`` on a CPU is compared bit for bit, another one by its identity, memory and version.
    Modules, parameters and optimizers are only told apart. So are the values that a dict keeps by parameter: they are
    taken for per-parameter state.
    """
    return _Look(elements).at(value, DEPTH)


def held_in(value: Any, kinds: tuple[type, ...], depth: int = DEPTH) -> Iterator[Any]:
    """What there is of ``kinds`` where ``fingerprint`` looks."""
    if isinstance(value, kinds):
        yield value
    elif depth and not is_immutable(value) and not isinstance(value, (torch.Tensor, *_CLOSED)):
        items = _items_of(value) or {}
        for item in items.values() if len(items) <= MOST else ():
            yield from held_in(item, kinds, depth - 1)


def unlike(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> Iterator[Any]:
    """The keys under which two mappings of fingerprints have not the same."""
    return (k for k in then.keys() | now.keys() if k not in now or k not in then or not alike(now[k], then[k]))


def alike(a: Any, b: Any) -> bool:
    """Whether two fingerprints are of values that hold the same."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (_Values, _Itself, _Held)):
        return a.like(b)
    return bool(a == b) or (a != a and b != b)


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class, and not torch, knows where its values are."""
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH and not is_fake(type(tensor))


def is_fake(kind: type[torch.Tensor]) -> bool:
    """Whether it is torch's class of tensors without values, on which torch's own operations run."""
    return kind.__module__ == "torch._subclasses.fake_tensor"


def inner_of(tensor: Any) -> dict[str, torch.Tensor]:
    """The tensors in which one of a wrapper class keeps its values, by name; ``TypeError``, if the class does not
    tell."""
    name = type(tensor).__name__
    if getattr(tensor, "__tensor_flatten__", None) is None:
        raise TypeError(f"a tensor of the class {name}, which has no __tensor_flatten__ to tell what it holds")
    every = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    inner = {name: v for name, v in every.items() if isinstance(v, torch.Tensor)}  # others: a mesh of devices
    if not inner or not all(getattr(tensor, name) is v for name, v in inner.items()):
        raise TypeError(f"a tensor of the class {name}, whose __tensor_flatten__ names no tensors that it keeps")
    return inner


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors have the same memory, byte by byte: NaN of another payload and -0.0 are other values.
    For what is put back, which must be what it was."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(bytes_of(a), bytes_of(b))


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, and NaN where the other one is. For what was computed twice: which payload a NaN
    gets is up to the kernel, and a loop that diverges must diverge the same way."""
    if is_wrapper(a) or is_wrapper(b):
        return type(a) is type(b) and same(inner_of(a), inner_of(b))
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and same(list(a.unbind()), list(b.unbind()))
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if a.layout is not torch.strided and a.layout is b.layout:
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
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        try:
            return same_numbers(memory_of(a), memory_of(b))
        except TypeError:  # of a class that does not tell what it holds
            return others and type(a) is type(b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], others=others) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(*pair, others=others) for pair in zip(a, b, strict=True))
    if is_immutable(a) or isinstance(a, (set, frozenset)) or is_compared_by_value(a):
        return bool(a == b) or bool(a != a and b != b)
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
    if isinstance(value, FunctionType):
        cells = enumerate(compiled_from(value).__closure__ or ())
        return {number: cell.cell_contents for number, cell in cells if is_filled(cell)}
    if isinstance(value, MethodType):
        return {"__self__": value.__self__, "__func__": value.__func__}
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if has_buffer(value) and (view := memoryview(value)).nbytes <= 8 * MOST:  # a NumPy array, or another one
        return {"bytes": bytes(view)}
    return attributes_of(value)


def has_buffer(value: Any) -> bool:
    """Whether it has memory that others may look at, in which its values are."""
    try:
        memoryview(value)
    except (TypeError, ValueError, BufferError):
        return False
    return True


def attributes_of(value: Any) -> dict[Any, Any] | None:
    attributes = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    attributes.update(getattr(value, "__dict__", {}))
    return attributes or None


def is_closed(value: Any) -> bool:
    """Whether it is only told apart from others."""
    return isinstance(value, _CLOSED)


_SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""By class: what ``_slots_of`` has found, asked for each value of each step."""


def _slots_of(cls: type) -> tuple[str, ...]:
    """The names of its slots, and of the classes that it is made of. Python looks at ``__slots__`` once, too."""
    if (known := _SLOTS.get(cls)) is None:
        names: dict[str, None] = {}
        for base in cls.__mro__:
            slots = vars(base).get("__slots__", ())
            private_to = f"_{base.__name__.lstrip('_')}"  # as Python names those that begin with two underscores
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name not in ("__dict__", "__weakref__"):
                    names[f"{private_to}{name}" if name.startswith("__") and not name.endswith("__") else name] = None
        known = _SLOTS[cls] = tuple(names)
    return known


def _is_small(tensor: torch.Tensor, most: int = MOST) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() <= most


def _can_be_read(tensor: torch.Tensor, most: int = MOST) -> bool:
    """Without waiting for an accelerator, which may be copying to pinned memory."""
    has_memory = _is_small(tensor, most) and tensor.untyped_storage().nbytes() >= tensor.nbytes
    return has_memory and tensor.device.type == "cpu" and not is_pinned(tensor)


def waits_for_host(value: Any) -> bool:
    """Whether it is a small tensor on an accelerator, whose values the host cannot know without waiting."""
    if not isinstance(value, torch.Tensor) or not _is_small(value) or value.is_meta:
        return False
    return not _can_be_read(value) and not is_pinned(value)


def address_of(tensor: torch.Tensor) -> int:
    """Where its values begin; 0: torch does not tell."""
    memory = memory_of(tensor)
    return memory.data_ptr() if type(memory) in PLAIN and memory.layout is torch.strided else 0


def storage_of(tensor: torch.Tensor) -> int:
    """Where its memory begins, which all views of it share; 0: torch does not tell."""
    return memory_of(tensor).untyped_storage().data_ptr() if address_of(tensor) else 0


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor, byte by byte: its memory, where it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride
