"""What a value holds, copied to be put back into the same objects, bit for bit; whether it is back; digests of it.

Nothing else in instep writes a copy back. A tensor is looked at down to its memory: of a sparse one that of its indices
and values, of a wrapper class that of the tensors inside, of a ``DTensor`` its local one. Where torch does not tell
what a tensor holds, ``copy_of`` raises: what is put back is seen to be back.
"""

import copy
import hashlib
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from threading import local
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch.autograd import grad_mode

from instep._optim.values import (
    access_to,
    attributes_of,
    has_buffer,
    inner_of,
    is_closed,
    is_compared_by_value,
    is_filled,
    is_generator,
    is_immutable,
    is_wrapper,
)
from instep._torch.versions import PLAIN, is_pinned


class Kept(Protocol):
    """What a tensor held when it was kept."""

    def put_back(self, tensor: torch.Tensor) -> None: ...

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor holds that, bit for bit."""
        ...


def copy_of(tensor: torch.Tensor, host: bool) -> Kept:
    """A copy that ``restore`` can put back.

    Args:
        host: in host memory, pinned where the tensor is on an accelerator.

    Raises:
        TypeError: nobody could tell whether it was put back.
    """
    if (
        type(tensor) in PLAIN
        and tensor.dtype in _NUMBERS
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor.is_neg() or tensor._is_zerotensor())
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
    ):
        return _of_dense(tensor, host)  # as nearly all are
    # Some are watched: to be copied is no use of the values that anybody need be told of.
    with torch._C.DisableTorchFunctionSubclass():
        return _kind_of(tensor)(tensor, host)


def restore(tensor: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Write it back, into the same object and the same memory: others may hold views of it."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # nothing else may write it
                kept.put_back(tensor)
        else:
            kept.put_back(tensor)
    return tensor


def is_back(tensor: torch.Tensor, kept: Kept) -> bool:
    """Whether the tensor holds what was kept, bit for bit."""
    with torch._C.DisableTorchFunctionSubclass():
        return kept.is_in(tensor)


def _kind_of(tensor: torch.Tensor) -> Callable[[torch.Tensor, bool], Kept]:
    if is_wrapper(tensor):
        return _OfWrapper
    if tensor.is_meta:
        return _OfMeta
    if tensor.is_nested:
        return _OfNested
    if tensor.is_quantized:
        raise TypeError(f"a tensor of the dtype {tensor.dtype}")
    if tensor.layout is torch.strided and not tensor._is_zerotensor():
        if tensor.untyped_storage().nbytes() < tensor.nbytes and tensor.is_contiguous():
            raise TypeError("a tensor whose memory was given back")  # to read it would end the process
        return _OfMemory
    if tensor.layout in _PARTS:
        return _OfSparse
    layout = "without memory" if tensor.layout is torch.strided else f"of the layout {tensor.layout}"
    raise TypeError(f"a tensor {layout}")


_NUMBERS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: what is copied, and compared, so has no arithmetic to change it."""
    if tensor.is_conj():
        tensor = tensor.conj()  # the memory as it is
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    wanted = _INTEGERS.get(tensor.element_size())
    if wanted is None:  # two numbers of 8 bytes
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor if tensor.dtype is wanted else tensor.view(wanted)


class _OfMemory:
    """Of a tensor with memory of its own, in any order: also of one with several elements at one place.

    Args:
        dense: numbers of which each one is there once, one after the other: nothing else is asked.

    Attributes:
        alias: has the place in memory, and keeps it, whatever the tensor is made to refer to.
    """

    __slots__ = ("_copy", "alias")

    def __init__(self, tensor: torch.Tensor, host: bool, *, dense: bool = False) -> None:
        if tensor.is_pinned() if dense else is_pinned(tensor):
            _await_copies()
        self.alias = tensor.detach()
        bits = self.alias if dense else _each_once(_bits_of(self.alias))
        if host and bits.device.type != "cpu":
            self._copy = torch.empty_like(bits, device="cpu", pin_memory=True).copy_(bits, non_blocking=True)
        else:
            self._copy = bits.clone()

    def put_back(self, tensor: torch.Tensor) -> None:
        alias = self.alias
        if tensor.device != alias.device:  # it was moved: to where it is now
            fits = tensor.shape == alias.shape and tensor.dtype == alias.dtype
            self.alias = tensor.detach() if fits else torch.empty_like(alias, device=tensor.device)
        self.write()
        if not _is_same_memory(tensor, self.alias):
            tensor.data = self.alias

    def write(self) -> None:
        alias, kept = self.alias, self._copy
        if is_pinned(alias):
            _await_copies()
        if alias.numel():  # somebody may have made the memory smaller
            last = sum((n - 1) * stride for n, stride in zip(alias.shape, alias.stride(), strict=True))
            nbytes = (alias.storage_offset() + 1 + last) * alias.element_size()
            if alias.untyped_storage().nbytes() < nbytes:
                alias.untyped_storage().resize_(int(nbytes))
        bits = alias if kept.dtype is alias.dtype and kept.shape == alias.shape else _each_once(_bits_of(alias))
        # Memory of others, a mapped file, say, may be such that nobody may write it.
        if alias.untyped_storage().resizable() or not torch.equal(_bits_of(bits), _bits_of(kept).to(bits.device)):
            bits.copy_(kept, non_blocking=True)

    def is_in(self, tensor: torch.Tensor) -> bool:
        if _type_of_memory(tensor) != _type_of_memory(self.alias):
            return False
        if is_pinned(tensor):
            _await_copies()
        bits = _bits_of(tensor.detach())
        return torch.equal(bits, _bits_of(self._copy).to(bits.device).expand(bits.shape))


_of_dense = partial(_OfMemory, dense=True)


def _type_of_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.layout, tensor.is_nested, tensor.is_conj(), tensor.is_neg()


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.layout is b.layout
        and a.dtype is b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]
    )


def _each_once(bits: torch.Tensor) -> torch.Tensor:
    """A view without dimensions that stand still, which torch does not write. Others may still share their memory:
    they are written several times, with what they all have held."""
    if 0 not in bits.stride():
        return bits
    sizes = [1 if stride == 0 else size for size, stride in zip(bits.shape, bits.stride(), strict=True)]
    return bits.as_strided(sizes, bits.stride(), bits.storage_offset())


def _await_copies() -> None:
    """Some optimizers keep state in pinned memory, from and to which an accelerator copies while the host goes on."""
    torch.accelerator.current_stream().synchronize()


class _OfMeta:
    """Of a tensor that has a shape, and no values."""

    __slots__ = ("_alias",)

    def __init__(self, tensor: torch.Tensor, host: bool) -> None:
        self._alias = tensor.detach()

    def put_back(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta and _type_of_memory(tensor) != _type_of_memory(self._alias):
            tensor.data = self._alias

    def is_in(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and _type_of_memory(tensor) == _type_of_memory(self._alias)


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of which a sparse one consists."""
    alias = tensor.detach()
    return [getattr(alias, name)() for name in _PARTS[tensor.layout]]


class _OfSparse:
    """Of a sparse tensor: its indices and values. What writes into one gives it others."""

    __slots__ = ("_coalesced", "_layout", "_parts", "_shape")

    def __init__(self, tensor: torch.Tensor, host: bool) -> None:
        self._layout = tensor.layout
        self._shape = tensor.shape
        self._coalesced = _coalesced(tensor)
        self._parts = [_OfMemory(part, host) for part in _parts_of(tensor)]

    def put_back(self, tensor: torch.Tensor) -> None:
        for part in self._parts:
            part.write()
        parts = [part.alias for part in self._parts]
        if not self._is_of_same_kind(tensor) or not all(map(_is_same_memory, _parts_of(tensor), parts)):
            tensor.data = self._rebuilt(parts)

    def _rebuilt(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._layout is torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices, values, self._shape, is_coalesced=self._coalesced, check_invariants=False
            )
        rows, columns, values = parts
        return torch.sparse_compressed_tensor(
            rows, columns, values, self._shape, layout=self._layout, check_invariants=False
        )

    def _is_of_same_kind(self, tensor: torch.Tensor) -> bool:
        return (tensor.layout, tensor.shape, _coalesced(tensor)) == (self._layout, self._shape, self._coalesced)

    def is_in(self, tensor: torch.Tensor) -> bool:
        if not self._is_of_same_kind(tensor):
            return False
        return all(part.is_in(now) for part, now in zip(self._parts, _parts_of(tensor), strict=True))


def _coalesced(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo and tensor.is_coalesced()


class _OfNested:
    """Of a nested tensor with the strided layout: each of its tensors. One that is jagged is a wrapper."""

    __slots__ = ("_alias", "_parts")

    def __init__(self, tensor: torch.Tensor, host: bool) -> None:
        self._alias = tensor.detach()
        self._parts = [_OfMemory(part, host) for part in self._alias.unbind()]

    def put_back(self, tensor: torch.Tensor) -> None:
        for part in self._parts:
            part.write()
        tensor.data = self._alias  # which has that memory

    def is_in(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_nested or tensor.dtype != self._alias.dtype:
            return False
        now = tensor.detach().unbind()
        return len(now) == len(self._parts) and all(p.is_in(part) for p, part in zip(self._parts, now, strict=True))


class _OfWrapper:
    """Of a tensor whose class keeps its values in others: those, and the numbers that it notes beside them."""

    __slots__ = ("_inner", "_noted")

    def __init__(self, tensor: Any, host: bool) -> None:
        self._inner = [(name, inner, copy_of(inner, host)) for name, inner in inner_of(tensor).items()]
        self._noted = _noted(tensor)

    def put_back(self, tensor: Any) -> None:
        for name, inner, kept in self._inner:
            restore(inner, kept)
            if getattr(tensor, name) is not inner:
                setattr(tensor, name, inner)
        for name, number in self._noted.items():
            setattr(tensor, name, number)

    def is_in(self, tensor: Any) -> bool:
        if not is_wrapper(tensor):
            return False
        return (
            list(inner_of(tensor)) == [name for name, _, _ in self._inner]
            and digest_of_value(_noted(tensor)) == digest_of_value(self._noted)
            and all(is_back(getattr(tensor, name), kept) for name, _, kept in self._inner)
        )


def _noted(tensor: torch.Tensor) -> dict[str, float]:
    """A scale, say."""
    return {name: value for name, value in getattr(tensor, "__dict__", {}).items() if type(value) is float}


# What is read of a tensor shows where it is another one for a moment.


# Of each number one bit of the exponent.
_BITS = {torch.float64: 1 << 57, torch.float32: 1 << 28, torch.bfloat16: 1 << 12, torch.float16: 1 << 13}
_BITS |= {torch.complex128: 1 << 57, torch.complex64: 1 << 28 | 1 << 60}


def disturb(tensor: torch.Tensor) -> None:
    """Give every element of its memory another value; done once more, the same bits as before. A floating-point number
    is multiplied by a power of two, an integer is another one. A tensor that is not dense stays as it is."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        kind = _kind_of(tensor)
        if kind is _OfWrapper:
            for inner in inner_of(tensor).values():
                disturb(inner)
        elif kind is _OfMemory and tensor.untyped_storage().resizable():  # torch's own: others may not be written
            with grad_mode._unsafe_preserve_version_counter(tensor):
                _each_once(_bits_of(tensor.detach())).bitwise_xor_(_BITS.get(tensor.dtype, 1))


Restore = Callable[[], Any]
"""Puts back what a value held. Returns the value, which is the same object."""
_SIMPLE = frozenset({int, float, bool, str, type(None)})


class Contents:
    """Copies the contents of values, each object once, however often it is referred to.

    Args:
        host: keep the copies of tensors in host memory, pinned where the tensors are on an accelerator.
        copied: what is kept of a tensor.
    """

    def __init__(self, host: bool, copied: Callable[[torch.Tensor, bool], Kept] = copy_of) -> None:
        self._host = host
        self._copy_of = copied
        self._known: dict[int, Restore] = {}

    def known(self, value: Any) -> None:
        """``value`` is put back by whoever says so."""
        self._known[id(value)] = lambda: value

    def of(self, value: Any) -> Restore:
        """The present contents of ``value``; ``TypeError``, if an object cannot be copied."""
        known = self._known.get(id(value))
        if known is None:
            if isinstance(value, torch.Tensor):
                known = partial(restore, value, self._copy_of(value, self._host))
            elif type(value) in _SIMPLE or (type(value) is not dict and is_immutable(value)):
                return lambda: value
            else:
                self.known(value)  # while what it holds is copied, which may be itself
                known = self._copied(value)
            self._known[id(value)] = known
        return known

    def _copied(self, value: Any) -> Restore:
        if isinstance(value, dict):
            return partial(put_dict, value, {key: self.of(item) for key, item in value.items()})
        if isinstance(value, (list, deque)):
            return partial(_put_list, value, [self.of(item) for item in value])
        if isinstance(value, tuple):
            return self._fixed(value, value)
        if isinstance(value, set):
            return partial(_put_set, value, set(value))
        if isinstance(value, FunctionType):
            cells = [cell for cell in value.__closure__ or () if is_filled(cell)]
            return partial(_put_cells, value, [(cell, self.of(cell.cell_contents)) for cell in cells])
        if isinstance(value, MethodType):
            return self._fixed(value, [value.__self__])
        if isinstance(value, partial):
            return self._fixed(value, [value.func, value.args, value.keywords])
        if _is_array(value):
            return partial(_put_items, value, ..., value.copy()) if value.flags.writeable else lambda: value
        return self._object(value)

    def _fixed(self, value: Any, items: Iterable[Any]) -> Restore:
        """Of what cannot be made to refer to something else."""
        return partial(_put_each, value, [self.of(item) for item in items])

    def _object(self, value: Any) -> Restore:
        if isinstance(value, (bytearray, array)):
            return partial(_put_items, value, slice(None), value[:])
        if is_generator(value):
            read, write = access_to(value)
            return partial(_put_state, value, write, read())
        if isinstance(value, local) or has_buffer(value):  # of ctypes, say
            raise TypeError(f"a {type(value).__name__}, whose values are not its attributes")
        attributes = attributes_of(value)
        if (attributes or hasattr(value, "__dict__")) and not isinstance(value, (type, ModuleType)):
            return partial(_put_attributes, value, {name: self.of(item) for name, item in (attributes or {}).items()})
        if hasattr(type(value), "__next__"):
            raise TypeError(f"a {type(value).__name__}, which moves on when it is asked")
        # A class, say, which is its own copy; or a number, a date.
        if copy.deepcopy(value) is value or is_compared_by_value(value):
            return lambda: value
        raise TypeError(f"a {type(value).__name__}, which does not tell what it holds")


def _no_copy(tensor: torch.Tensor, host: bool) -> Kept:
    """Raises the ``TypeError`` that ``copy_of`` would."""
    with torch._C.DisableTorchFunctionSubclass():
        if _kind_of(tensor) is _OfWrapper:
            for inner in inner_of(tensor).values():
                _no_copy(inner, host)
    return _OfMeta(_NOTHING, host)


_NOTHING = torch.empty(0, device="meta")


def require_contents(value: Any, known: torch.Tensor) -> None:
    """Raise the ``TypeError`` that ``Contents.of`` would. ``known`` is put back by whoever says so."""
    questions = Contents(host=False, copied=_no_copy)
    questions.known(known)
    questions.of(value)


def put_dict(held: dict[Any, Any], items: dict[Any, Restore], but: tuple[type, ...] = ()) -> dict[Any, Any]:
    """Keys of the kinds ``but``, if they are not among ``items``, stay as they are."""
    for key, item in items.items():
        held[key] = item()  # not by update(), which a Counter's adds to
    for key in [key for key in held if key not in items and not isinstance(key, but)]:
        del held[key]
    # As they came in, if they do not; any others before them.
    if any(key is not other for key, other in zip(filter(items.__contains__, held), items, strict=True)):
        for key in items:
            held[key] = held.pop(key)
    return held


def _put_list(held: Any, items: list[Restore]) -> Any:
    values = [item() for item in items]
    if isinstance(held, list):
        held[:] = values
    else:
        held.clear()
        held.extend(values)
    return held


def _put_set(held: set[Any], items: set[Any]) -> set[Any]:
    held.update(items)
    held.intersection_update(items)
    return held


def _put_each(held: Any, items: list[Restore]) -> Any:
    for item in items:
        item()
    return held


def _put_items(held: Any, where: Any, copied: Any) -> Any:
    held[where] = copied
    return held


def _put_state(held: Any, write: Callable[[Any], Any], state: Any) -> Any:
    write(state)
    return held


def _put_cells(held: FunctionType, enclosed: list[tuple[Any, Restore]]) -> FunctionType:
    for cell, item in enclosed:
        cell.cell_contents = item()
    return held


def _put_attributes(held: Any, attributes: dict[str, Restore]) -> Any:
    # Past what its class does with attributes that are set.
    for name, item in attributes.items():
        object.__setattr__(held, name, item())
    for name in (attributes_of(held) or {}).keys() - attributes.keys():
        object.__delattr__(held, name)
    return held


def _is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's, of numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


# Digests: two of the same value are equal, and those of two values in practice are not. They are taken where the tensor
# is, in the order of its elements, by pieces, and only a few numbers reach the host.
#
# Words of 64 bits are multiplied by odd random weights, and added up with wrap-around. The top bit of a word moves
# nothing but the top bit of the sum, so that two of them would cancel out: the upper halves of all words are added up
# once more by themselves. What differs is then missed by one in 2**33 at most, and mostly by one in 2**64.


Digest = tuple[Any, ...]

_WORDS = 1 << 18
"""In one piece: on a CPU it stays in the cache."""
_FEW = 4096  # bytes, on a CPU: those of a few go through a hash at once


def digest_of(tensor: torch.Tensor) -> Digest:
    """A digest of the tensor's bits, with its dtype, shape and layout: not of its strides, nor of where it is.
    ``TypeError``, if nobody could tell what the tensor holds."""
    with torch._C.DisableTorchFunctionSubclass():
        kind = _kind_of(tensor)
        if kind is _OfMemory:
            return _digest_of_memory(tensor)
        if kind is _OfWrapper:
            inner = tuple((name, digest_of(part)) for name, part in inner_of(tensor).items())
            return type(tensor), tensor.dtype, digest_of_value(_noted(tensor)), inner
        if kind is _OfNested:
            return tensor.dtype, "nested", tuple(map(digest_of, tensor.detach().unbind()))
        if kind is _OfSparse:
            parts = tuple(map(digest_of, _parts_of(tensor)))
            return tensor.dtype, tensor.shape, tensor.layout, _coalesced(tensor), parts
        return tensor.dtype, tensor.shape, tensor.layout, "meta"


def _digest_of_memory(tensor: torch.Tensor) -> Digest:
    if is_pinned(tensor):
        _await_copies()
    bits = _bits_of(tensor.detach()).reshape(-1)
    if bits.device.type == "cpu" and bits.nbytes <= _FEW:
        numbers: Any = bits.clone().numpy()  # torch resizes no memory that NumPy has ever had
    else:
        room = torch.empty(min(_WORDS, bits.nbytes // 8 + 1), dtype=torch.int64, device=bits.device)
        numbers = torch.stack([number for words in _words_of(bits) for number in _sums(words, room)]).cpu().numpy()
    content = hashlib.blake2b(numbers, digest_size=16).digest()
    return tensor.dtype, tensor.shape, tensor.layout, content


def _words_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces of up to ``_WORDS`` words of 64 bits; zeros behind the last."""
    each = 8 // flat.element_size()
    for piece in flat.split(_WORDS * each):
        if piece.numel() % each or piece.storage_offset() % each:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % each))
        yield piece.view(torch.int64)


def _sums(words: torch.Tensor, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _weights(words.device)[:, : words.numel()]
    room = room[: words.numel()]  # memory that is not new is faster
    sum_of_words = torch.mul(words, low, out=room).sum()
    return sum_of_words, torch.bitwise_right_shift(words, 32, out=room).mul_(high).sum()


@cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)  # torch's own is left alone
    shape = (2, _WORDS)
    weights = torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=generator, dtype=torch.int64, device="cpu")
    return (weights | 1).to(device)


def digest_of_value(value: Any) -> Digest:
    """A digest of what a value of state holds: containers, arrays, objects and tensors are looked into. Functions,
    classes, modules, optimizers and generators are told apart only."""
    return _Digests().of(value)


class _Digests:
    """One look at a value: each object is looked into once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def of(self, value: Any) -> Digest:
        if isinstance(value, torch.Tensor):
            return digest_of(value)
        if isinstance(value, (float, complex)):
            number = complex(value)
            return type(value), struct.pack("=dd", number.real, number.imag)  # -0.0 and NaN are values, too
        if is_immutable(value):  # equal ones may be one object or two
            return type(value), *(map(self.of, value) if isinstance(value, tuple) else (value,))
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        return type(value), *self._inside(value)

    def _inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Mapping):
            yield frozenset((self._key(key), self.of(item)) for key, item in value.items())
        elif isinstance(value, (list, tuple, deque)):
            yield from map(self.of, value)
        elif isinstance(value, (set, frozenset)):
            yield frozenset(map(self._key, value))
        elif _is_array(value):
            yield value.dtype.str, value.shape, hashlib.blake2b(value.tobytes(), digest_size=16).digest()
        elif has_buffer(value):
            yield bytes(memoryview(value))
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
            yield from (id(value.__code__), self.of(cells), self.of(value.__defaults__))
        elif isinstance(value, (partial, slice)):
            names = ("func", "args", "keywords") if isinstance(value, partial) else ("start", "stop", "step")
            yield from (self.of(getattr(value, name)) for name in names)
        elif not is_closed(value) and is_compared_by_value(value):
            yield value
        elif is_closed(value) or callable(value) or (attributes := attributes_of(value)) is None:
            yield id(value)
        else:
            yield from ((name, self.of(item)) for name, item in sorted(attributes.items()))

    def _key(self, key: Any) -> Any:
        return id(key) if isinstance(key, torch.Tensor) else (type(key), key)
