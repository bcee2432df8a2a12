"""What a value holds, copied to be put back into the same objects, bit for bit; whether it is back; digests of it.

Nothing else in instep writes a copy back. A tensor is looked at down to its memory: of a sparse one that of its indices
and values, of a wrapper class that of the tensors inside, of a ``DTensor`` its local one. Where torch does not tell
what a tensor holds, ``copy_of`` raises: what is put back is seen to be back.
"""

import copy
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from math import inf
from operator import setitem
from threading import local
from types import ModuleType
from typing import Any

import torch
from torch.autograd import grad_mode

from instep._optim.values import (
    NUMBERS,
    Look,
    access_to,
    attributes_of,
    buffer_of,
    compares_values,
    inner_of,
    is_array,
    is_immutable,
    is_wrapper,
    kind_of,
)
from instep._torch.versions import PLAIN, is_pinned
from instep._torch.watch import plain_type


def copy_of(tensor: torch.Tensor, host: bool) -> "Kept":
    """A copy that ``restore`` can put back.

    Args:
        host: in host memory, pinned where the tensor is on an accelerator.

    Raises:
        TypeError: nobody could tell whether it was put back.
    """
    if (
        type(tensor) in PLAIN
        and tensor.dtype in _FLOATS
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor.is_neg() or tensor._is_zerotensor())
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
    ):
        return _of_dense(tensor, host)  # as nearly all are
    # Some are watched: to be copied is no use of the values that anybody need be told of.
    with torch._C.DisableTorchFunctionSubclass():
        return _kind_of(tensor)(tensor, host)


def restore(tensor: torch.Tensor, kept: "Kept") -> torch.Tensor:
    """Write it back, into the same object and the same memory: others may hold views of it."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # nothing else may write it
                kept.put_back(tensor)
        else:
            kept.put_back(tensor)
    return tensor


def is_back(tensor: torch.Tensor, kept: "Kept") -> bool:
    """Whether the tensor holds what was kept, bit for bit."""
    with torch._C.DisableTorchFunctionSubclass():
        return kept.is_in(tensor)


def _kind_of(tensor: torch.Tensor) -> "type[_OfMemory | _OfParts]":
    if is_wrapper(tensor) or tensor.is_meta or tensor.is_nested:
        return _OfParts
    if tensor.is_quantized:
        raise TypeError(f"a tensor of the dtype {tensor.dtype}")
    if tensor.layout is torch.strided and not tensor._is_zerotensor():
        if tensor.untyped_storage().nbytes() < tensor.nbytes and tensor.is_contiguous():
            raise TypeError("a tensor whose memory was given back")  # to read it would end the process
        return _OfMemory
    if tensor.layout in _PARTS:
        return _OfParts
    layout = "without memory" if tensor.layout is torch.strided else f"of the layout {tensor.layout}"
    raise TypeError(f"a tensor {layout}")


_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64})
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
        if _form_of(tensor) != _form_of(self.alias):
            return False
        if is_pinned(tensor):
            _await_copies()
        bits = _bits_of(tensor.detach())
        return torch.equal(bits, _bits_of(self._copy).to(bits.device).expand(bits.shape))


_of_dense = partial(_OfMemory, dense=True)


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is beside the bits in its memory, its strides aside."""
    if is_wrapper(tensor):
        return plain_type(tensor), tensor.dtype, {name: number.hex() for name, number in _numbers_of(tensor).items()}
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    shape = "nested" if tensor.is_nested else tensor.shape
    return tensor.dtype, shape, tensor.layout, tensor.is_meta, tensor.is_conj(), tensor.is_neg(), coalesced


def _numbers_of(wrapper: torch.Tensor) -> dict[str, float]:
    """What one of a wrapper class notes beside its tensors: a scale, say."""
    return {name: value for name, value in getattr(wrapper, "__dict__", {}).items() if type(value) is float}


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


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of which one consists: a sparse or nested one, or one of a wrapper class. On ``meta`` it has none."""
    if is_wrapper(tensor):
        return inner_of(tensor)
    alias = tensor.detach()
    if alias.is_nested:
        return {str(number): part for number, part in enumerate(alias.unbind())}
    return {} if alias.is_meta else {name: getattr(alias, name)() for name in _PARTS[alias.layout]}


class _OfParts:
    """Of a tensor that consists of others, or has a shape, and no values. A nested one is of a wrapper class where it
    is jagged."""

    __slots__ = ("_alias", "_form", "_numbers", "_parts")

    def __init__(self, tensor: torch.Tensor, host: bool) -> None:
        self._form = _form_of(tensor)
        self._parts = {name: (part, copy_of(part, host)) for name, part in _parts_of(tensor).items()}
        self._numbers = _numbers_of(tensor) if is_wrapper(tensor) else {}
        # Refers to the parts: what writes into a sparse tensor gives that others.
        self._alias = None if is_wrapper(tensor) else tensor.detach()

    def put_back(self, tensor: torch.Tensor) -> None:
        for part, kept in self._parts.values():
            restore(part, kept)
        parts = {name: part for name, (part, _) in self._parts.items()}
        if self._alias is None:
            for name, value in (parts | self._numbers).items():
                if getattr(tensor, name) is not value:
                    setattr(tensor, name, value)
        elif _form_of(tensor) != self._form or not all(
            map(_is_same_memory, _parts_of(tensor).values(), parts.values())
        ):
            tensor.data = self._alias

    def is_in(self, tensor: torch.Tensor) -> bool:
        if _form_of(tensor) != self._form:
            return False
        now = _parts_of(tensor)
        return now.keys() == self._parts.keys() and all(
            is_back(now[name], kept) for name, (_, kept) in self._parts.items()
        )


Kept = _OfMemory | _OfParts
"""What a tensor held when it was kept. ``put_back(tensor)`` writes that, and ``is_in(tensor)`` tells whether the tensor
holds it, bit for bit."""


# What is read of a tensor shows where it is another one for a moment.


# Of each number one bit of the exponent.
_BITS = {torch.float64: 1 << 57, torch.float32: 1 << 28, torch.bfloat16: 1 << 12, torch.float16: 1 << 13}
_BITS |= {torch.complex128: 1 << 57, torch.complex64: 1 << 28 | 1 << 60}


def disturb(tensor: torch.Tensor) -> None:
    """Give every element of its memory another value; done once more, the same bits as before. A floating-point number
    is multiplied by a power of two, an integer is another one. A tensor that is not dense stays as it is."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if is_wrapper(tensor):
            for inner in inner_of(tensor).values():
                disturb(inner)
        elif _kind_of(tensor) is _OfMemory and tensor.untyped_storage().resizable():  # else it may be another's
            with grad_mode._unsafe_preserve_version_counter(tensor):
                _each_once(_bits_of(tensor.detach())).bitwise_xor_(_BITS.get(tensor.dtype, 1))


class Contents:
    """What a value holds, as it is now, and all that it refers to, to be put back into the same objects.

    Args:
        host: keep the copies of tensors in host memory, pinned where the tensors are on an accelerator.
        but: is put back by whoever says so.

    Raises:
        TypeError: an object cannot be copied.
    """

    def __init__(self, value: Any, host: bool = False, but: object = None) -> None:
        self.value = value
        self._host = host
        self._put_back: list[Callable[[], object]] = []  # each object by itself
        seen, left = {id(but)}, [value]
        while left:
            held = left.pop()
            if type(held) not in NUMBERS and id(held) not in seen:
                seen.add(id(held))
                left.extend(self.keep(held))

    def put_back(self) -> Any:
        """Returns the value, which is the same object."""
        for put in self._put_back:
            put()
        return self.value

    def keep(self, held: Any) -> Iterable[Any]:
        """Notes how this object is put back. Returns what it refers to."""
        if isinstance(held, torch.Tensor):
            self._put_back.append(partial(restore, held, copy_of(held, self._host)))
            return ()
        if is_immutable(held):
            return ()
        kind = kind_of(held)
        if kind is None:
            return () if self._keeps_memory(held) else self._keep_attributes(held)
        parts = kind.parts(held)
        if kind.put is not None:
            self._put_back.append(partial(kind.put, held, parts))
        return parts.values()

    def _keeps_memory(self, held: Any) -> bool:
        """Whether what it holds is in memory of its own, or is the state of a generator."""
        if is_array(held):
            if held.flags.writeable:
                self._put_back.append(partial(setitem, held, ..., held.copy()))
        elif isinstance(held, (bytearray, array)):
            self._put_back.append(partial(setitem, held, slice(None), held[:]))
        elif (access := access_to(held)) is not None:
            read, write = access
            self._put_back.append(partial(write, read()))
        elif isinstance(held, local) or buffer_of(held) is not None:  # of ctypes, say
            raise TypeError(f"a {type(held).__name__}, whose values are not its attributes")
        else:
            return False
        return True

    def _keep_attributes(self, held: Any) -> Iterable[Any]:
        attributes = attributes_of(held) or {}
        if (attributes or hasattr(held, "__dict__")) and not isinstance(held, (type, ModuleType)):
            self._put_back.append(partial(_put_attributes, held, attributes))
            return attributes.values()
        if hasattr(type(held), "__next__"):
            raise TypeError(f"a {type(held).__name__}, which moves on when it is asked")
        # A class, say, which is its own copy; or a number, a date.
        if copy.deepcopy(held) is held or compares_values(held):
            return ()
        raise TypeError(f"a {type(held).__name__}, which does not tell what it holds")


def _put_attributes(held: Any, attributes: dict[str, Any]) -> None:
    # Past what its class does with attributes that are set.
    for name, item in attributes.items():
        object.__setattr__(held, name, item)
    for name in (attributes_of(held) or {}).keys() - attributes.keys():
        object.__delattr__(held, name)


# Digests: two of the same value are equal, and those of two values in practice are not. They are taken where the tensor
# is, in the order of its elements, by pieces, and only a few numbers reach the host.
#
# Words of 32 bits are multiplied by odd random weights of 64, and added up with wrap-around. What differs is then
# missed by one in 2**32 at most, and mostly by one in 2**64.


Digest = tuple[Any, ...]

_WORDS = 1 << 18
"""In one piece: on a CPU its products stay in the cache."""
_FEW = 4096  # bytes, on a CPU: those of a few go through a hash at once


def digest_of(tensor: torch.Tensor) -> Digest:
    """A digest of the tensor's bits, with its dtype, shape and layout: not of its strides, nor of where it is.
    ``TypeError``, if nobody could tell what the tensor holds."""
    with torch._C.DisableTorchFunctionSubclass():
        if _kind_of(tensor) is _OfMemory:
            return _form_of(tensor), _digest_of_memory(tensor)
        return _form_of(tensor), {name: digest_of(part) for name, part in _parts_of(tensor).items()}


def _digest_of_memory(tensor: torch.Tensor) -> bytes:
    if is_pinned(tensor):
        _await_copies()
    bits = _bits_of(tensor.detach()).reshape(-1)
    if bits.device.type == "cpu" and bits.nbytes <= _FEW:
        numbers: Any = bits.clone().numpy()  # torch resizes no memory that NumPy has ever had
    else:
        room = torch.empty(min(_WORDS, bits.nbytes // 4 + 1), dtype=torch.int64, device=bits.device)
        numbers = torch.stack([_sum(words, room) for words in _words_of(bits)]).cpu().numpy()
    return hashlib.blake2b(numbers, digest_size=16).digest()


def _words_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces of up to ``_WORDS`` words of 32 bits; zeros behind the last."""
    for piece in flat.split(_WORDS * 4 // flat.element_size()):
        short = -piece.nbytes % 4 // flat.element_size()
        if short or piece.storage_offset() * flat.element_size() % 4:
            piece = torch.nn.functional.pad(piece, (0, short))
        yield piece.view(torch.int32)


def _sum(words: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    weights, products = _weights(words.device)[: words.numel()], room[: words.numel()]
    return torch.mul(words, weights, out=products).sum()  # memory that is not new is faster


@cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)  # torch's own is left alone
    bounds = -(1 << 63), (1 << 63) - 1
    return (torch.randint(*bounds, (_WORDS,), generator=generator, dtype=torch.int64, device="cpu") | 1).to(device)


def digest_of_value(value: Any) -> Any:
    """What a value of state holds, however deep, to be compared by ``==``: tensors by their digests. Classes, modules,
    optimizers and what tells nothing of itself are told apart only."""
    return _Digests().of(value)


class _Digests(Look):
    """A look at a value that takes no copies: of a tensor, wherever that is, its digest."""

    depth = most = inf
    is_ordered = False
    takes_state = True

    def tensor(self, tensor: torch.Tensor) -> Any:
        return digest_of(tensor)
