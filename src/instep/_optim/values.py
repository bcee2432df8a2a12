"""Values that an optimizer holds: what each kind refers to, what can be reached, and how it looks now."""

import copyreg
import hashlib
import logging
import random
import reprlib
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GenericAlias,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from instep._torch.versions import PLAIN, is_pinned, memory_of, version_of

# Kinds of objects: what each refers to, and how it is made to refer to the same again. Whoever looks into objects asks
# here: to find something (``reachable_values``, ``held_in``), to compare (``Look``), to put back (``contents.py``).


class Kind(NamedTuple):
    """How objects of one kind are looked into.

    Attributes:
        parts: what such an object refers to, by key; of a set the elements are the keys.
        put: makes it refer to the same parts again; ``None``: it always refers to the same.
    """

    parts: Callable[[Any], dict[Any, Any]]
    put: Callable[[Any, dict[Any, Any]], object] | None = None


def put_dict(held: dict[Any, Any], items: dict[Any, Any], but: tuple[type, ...] = ()) -> None:
    """Keys of the kinds ``but``, if they are not among ``items``, stay as they are."""
    for key, item in items.items():
        held[key] = item  # not by update(), which a Counter's adds to
    for key in [key for key in held if key not in items and not isinstance(key, but)]:
        del held[key]
    # As they came in, if they do not; any others before them.
    if any(key is not other for key, other in zip(filter(items.__contains__, held), items, strict=True)):
        for key in items:
            held[key] = held.pop(key)


def _by_number(held: Iterable[Any]) -> dict[Any, Any]:
    return dict(enumerate(held))


def _put_list(held: list[Any], items: dict[Any, Any]) -> None:
    held[:] = items.values()


def _put_deque(held: deque[Any], items: dict[Any, Any]) -> None:
    held.clear()
    held.extend(items.values())


def _put_set(held: set[Any], items: dict[Any, Any]) -> None:
    held.update(items)
    held.intersection_update(items)


def _of_function(function: Any) -> dict[Any, Any]:
    """What it encloses, by number, and what it is given."""
    function = compiled_from(function)
    enclosed = {n: cell.cell_contents for n, cell in enumerate(function.__closure__ or ()) if is_filled(cell)}
    return enclosed | {name: getattr(function, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}


def _put_enclosed(function: Any, parts: dict[Any, Any]) -> None:
    for number, cell in enumerate(compiled_from(function).__closure__ or ()):
        if number in parts:
            cell.cell_contents = parts[number]


def _named(*names: str) -> Callable[[Any], dict[Any, Any]]:
    return lambda value: {name: getattr(value, name) for name in names}


_KINDS: dict[type, Kind] = {
    dict: Kind(lambda held: dict(held.items()), put_dict),
    list: Kind(_by_number, _put_list),
    deque: Kind(_by_number, _put_deque),
    tuple: Kind(_by_number),
    set: Kind(dict.fromkeys, _put_set),
    frozenset: Kind(dict.fromkeys),
    FunctionType: Kind(_of_function, _put_enclosed),
    MethodType: Kind(_named("__self__", "__func__")),
    partial: Kind(_named("func", "args", "keywords")),
    slice: Kind(_named("start", "stop", "step")),
}


_OF_A_KIND = tuple(_KINDS)


def kind_of(value: Any) -> Kind | None:
    """``None``: of one of these kinds it is not. It may have attributes, or memory."""
    known = _KINDS.get(type(value))
    if known is None and isinstance(value, _OF_A_KIND):
        return next(kind for cls, kind in _KINDS.items() if isinstance(value, cls))
    return known


def parts_of(value: Any) -> dict[Any, Any] | None:
    """What an object refers to; ``None`` if nothing is known of that."""
    kind = kind_of(value)
    if kind is not None:
        return kind.parts(value)
    return dict(value.items()) if isinstance(value, Mapping) else attributes_of(value)


def attributes_of(value: Any) -> dict[Any, Any] | None:
    # Python's own list of the slots of a class and its bases, by the names under which they are, which it keeps.
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes.update(getattr(value, "__dict__", {}))
    return attributes or None


def compiled_from(function: Any) -> Any:
    """The function that ``torch.compile`` was given, whose wrapper encloses much of torch's."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's, of numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def buffer_of(value: Any) -> Any:
    """The memory in which its values are: an array of NumPy's, or a view of what others may look at, too; ``None``: it
    has none."""
    if is_array(value):
        return value
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None


# What an update can get at beside what it is given: through the attributes, groups and state of its optimizer.

NUMBERS = frozenset({bool, int, float, str, type(None)})


def reachable_values(owners: Iterable[object], but: object = None) -> Iterator[Any]:
    """``owners`` and all that they refer to through containers, attributes, weak references, and what functions of
    theirs enclose or are given. Numbers are left out; tensors, classes, Python's modules and objects of torch's are not
    looked into, nor is what a ``Module`` holds but parameters.

    Args:
        but: what is not looked into either: an optimizer to which its own functions refer.
    """
    seen: set[int] = {id(but)}
    left = list(owners)
    while left:
        value = left.pop()
        if type(value) in NUMBERS or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        left.extend(_referred_by(value))


def _referred_by(value: Any) -> Iterable[Any]:
    if type(value) in PLAIN or isinstance(value, (torch.Tensor, type, GenericAlias, CodeType, ModuleType)):
        return ()
    if isinstance(value, nn.Module):
        return value.parameters()
    if isinstance(value, (set, frozenset)):
        return value
    if isinstance(value, (weakref.ref, BuiltinMethodType)):
        return (value() if isinstance(value, weakref.ref) else value.__self__,)
    if not isinstance(value, (*_OF_A_KIND, Mapping)) and is_of_torch(value):
        return ()
    return (parts_of(value) or {}).values()


def is_of_torch(value: object) -> bool:
    """Whether its class is one of torch's own: not an optimizer, a scheduler, or a tensor. So are instep's."""
    module, open_in_torch = f"{type(value).__module__}.", ("torch.optim.", "torch._tensor", "torch.nn.")
    return module.startswith(("torch.", "instep.")) and not module.startswith(open_in_torch)


def access_to(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What reads the state of a random number generator of torch's, Python's or NumPy's, and what writes it; ``None``:
    it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return None
    if isinstance(value, numpy.random.RandomState):  # which keeps every other number of a normal distribution by itself
        return partial(value.get_state, legacy=False), value.set_state
    bits = value.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


# What an update reads beside parameters and their state, and what has become of it since: groups and attributes.
#
# Values are compared by what they hold, not by what somebody is told of: a tensor may be written through ``.data`` or a
# NumPy view, a setting may lie in an object. What is looked into is bounded, see ``fingerprint``.


DEPTH = 4
"""How many objects, lists and dicts inside one another are looked into."""
MOST = 1024
"""How many values of one setting are looked into, and of how many elements a tensor is compared by value."""

ABSENT = object()
"""Stands for a value that a mapping has not."""
SHORT = reprlib.Repr()  # a setting may hold whole parameters
SHORT.maxother = SHORT.maxstring = 80
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
PER_PARAMETER = ("params", "param_names")
"""The keys of a group that hold one item for each parameter: all others are settings."""


def put_item(mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    if value is ABSENT:
        mapping.pop(key, None)
    else:
        mapping[key] = value


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in PER_PARAMETER}


# Not looked into: they are no settings, and hold much.
_CLOSED = (nn.Module, nn.Parameter, Optimizer, torch.Generator, type, ModuleType, logging.Logger, threading.Thread)


def is_immutable(value: Any) -> bool:
    if isinstance(value, _IMMUTABLE) or (isinstance(value, tuple) and all(map(is_immutable, value))):
        return True
    return type(value).__module__ == "numpy" and isinstance(value, sys.modules["numpy"].generic)


def compares_values(value: Any) -> bool:
    """Whether its class compares, and hashes, what it holds, of which nothing else is known."""
    if isinstance(value, weakref.ref):  # which compares, and hashes, what it refers to
        return False
    kind: Any = type(value)
    return kind.__eq__ is not object.__eq__ and kind.__hash__ is not None


def is_closed(value: Any) -> bool:
    """Whether it is only told apart from others."""
    return isinstance(value, _CLOSED)


def is_plain(value: Any) -> bool:
    """Whether ``private`` copies all of it."""
    if type(value) in NUMBERS:
        return True
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return is_immutable(value) or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


def private(value: Any) -> Any:
    """A copy that may be changed in place without its origin seeing it. Objects, and what cannot be changed, are
    shared."""
    if type(value) in NUMBERS or is_immutable(value) or isinstance(value, nn.Parameter):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: private(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(private, value))
    return value


class _Seen:
    """A tensor as it is now."""

    __slots__ = ("_address", "_copy", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, most: int) -> None:
        self._tensor = tensor  # held, so that no other one can have its address
        self._version = version_of(tensor)
        self._address = address_of(tensor)
        self._copy = tensor.detach().clone() if _can_be_read(tensor, most) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen):
            return NotImplemented
        if self._copy is not None and other._copy is not None:
            return same_bits(self._copy, other._copy)
        if self._tensor is other._tensor and not is_fake(type(self._tensor)):
            return self._version == other._version and self._address == other._address
        return torch.equal(self._tensor, other._tensor)

    __hash__ = None  # type: ignore[assignment]


class _Itself:
    """Something that is not looked into."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value  # held, so that no other one can have its identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class Look:
    """One look at a value, which tells what it holds in tuples and dicts that are compared by ``==``. Each object is
    looked into once.

    Args:
        elements: of how many a tensor is compared by what it holds.
        is_setting: whether it is a setting of a group. A parameter in one, such as a learning rate that is learned, is
            no weight that is stepped: it is looked at as other tensors are.

    Attributes:
        depth: how many objects inside one another are looked into.
        most: how many values are looked into, and of how many words the memory of an array.
        is_ordered: whether a dict whose keys have changed places is another one.
        takes_state: whether the values that a dict keeps by parameter are looked at: they are per-parameter state.
    """

    depth: float = DEPTH
    most: float = MOST
    is_ordered = True
    takes_state = False

    def __init__(self, elements: int = MOST, is_setting: bool = False) -> None:
        self._seen: dict[int, int] = {}
        self._elements = elements
        self._is_setting = is_setting

    def of(self, value: Any) -> Any:
        self._left = self.most
        return self._at(value, self.depth)

    def tensor(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) and not self._is_setting:
            return _Itself(tensor)
        return _Seen(tensor, self._elements)

    def _at(self, value: Any, depth: float) -> Any:
        if is_immutable(value):  # equal ones may be one object or two
            return _immutable(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        return _Itself(value) if depth == 0 or is_closed(value) else self._inside(value, depth - 1)

    def _inside(self, value: Any, depth: float) -> Any:
        memory = None if kind_of(value) else buffer_of(value)
        if memory is not None and memory.nbytes <= 8 * self.most:
            dtype = memory.dtype.str if is_array(memory) else memory.format
            return type(value), dtype, memory.shape, hashlib.blake2b(memory.tobytes(), digest_size=16).digest()
        parts = parts_of(value)
        if parts is None and compares_values(value):
            return type(value), value
        if parts is None or len(parts) > self._left:
            return _Itself(value)
        self._left -= len(parts)
        if isinstance(value, Mapping):  # a key may be a tensor, which compares itself to any number
            items = [
                (key, part) for key, part in parts.items() if self.takes_state or not isinstance(key, torch.Tensor)
            ]
            parts = {_Itself(key) if isinstance(key, torch.Tensor) else key: part for key, part in items}
        order = tuple(parts) if isinstance(value, dict) and self.is_ordered else ()
        return type(value), order, {key: self._at(part, depth) for key, part in parts.items()}


def _immutable(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), *map(_immutable, value)
    if isinstance(value, (float, complex)):
        number = complex(value)
        return type(value), struct.pack("=dd", number.real, number.imag)  # -0.0 and NaN are values, too
    return type(value), value.tobytes() if type(value).__module__ == "numpy" else value


def fingerprint(value: Any, elements: int = MOST, is_setting: bool = False) -> Any:
    """What ``value`` holds, to be compared by ``==`` with another fingerprint later. For the arguments see ``Look``.

    Objects of all kinds are looked into, ``DEPTH`` deep and up to ``MOST`` values. A tensor of up to so many
    ``elements`` on a CPU is compared bit for bit, another one by its identity, memory and version. Modules, parameters
    and optimizers are only told apart. So are the values that a dict keeps by parameter: they are taken for
    per-parameter state.
    """
    return Look(elements, is_setting).of(value)


def held_in(values: Iterable[Any], kind: type, depth: int = DEPTH) -> Iterator[Any]:
    """What there is of ``kind`` where ``fingerprint`` would look, one inside another too."""
    for value in values:
        if isinstance(value, kind):
            yield value
        if depth and not (is_immutable(value) or isinstance(value, (torch.Tensor, *_CLOSED))):
            parts = parts_of(value) or {}
            yield from held_in(parts.values() if len(parts) <= MOST else (), kind, depth - 1)


def unlike(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> Iterator[Any]:
    """The keys under which two mappings of fingerprints have not the same."""
    return (k for k in then.keys() | now.keys() if k not in now or k not in then or now[k] != then[k])


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
    # Of a quantized one its numbers: to see it as bytes would end the process.
    flat = (tensor.int_repr() if tensor.is_quantized else tensor).contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride
