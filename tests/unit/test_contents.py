"""What is put back is seen to be back: tensors of any layout, dtype and class, bit for bit; and digests of them."""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from instep._optim.contents import Contents, copy_of, digest_of, digest_of_value, is_back, restore
from instep._torch.versions import version_of
from tests.wrappers import Closed, Scaled

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.complex64,
    torch.complex128,
]


Write = Callable[[Any], Any]


def _bytes(draw: Random, count: int) -> torch.Tensor:
    return torch.tensor(list(draw.randbytes(count)), dtype=torch.uint8)


def _drawn(draw: Random, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Any bits at all, NaN and -0.0 among them."""
    if dtype is torch.bool:
        return _bytes(draw, count) > 127
    return _bytes(draw, count * dtype.itemsize).view(dtype)


def strided(draw: Random) -> torch.Tensor:
    """Of random strides and offset: dense, with gaps, permuted, expanded, overlapping."""
    shape = [draw.choice([0, 1, 2, 3, 4, 5]) for _ in range(draw.randint(0, 4))]
    if draw.random() < 0.8:
        shape = [max(1, n) for n in shape]
    strides, reach = [0] * len(shape), 1
    for dim in draw.sample(range(len(shape)), len(shape)):
        strides[dim] = draw.choice([reach, reach, reach + 1, 0, 1])
        reach = max(reach, strides[dim] * max(1, shape[dim]))
    offset = draw.randint(0, 3)
    size = offset + 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
    return _drawn(draw, draw.choice(DTYPES), size + 2).as_strided(shape, strides, offset)


def conjugate(draw: Random) -> torch.Tensor:
    return _drawn(draw, torch.complex64, 6).view(2, 3).conj().t()


def negated(draw: Random) -> torch.Tensor:
    return _drawn(draw, torch.complex64, 6).conj().imag


def _matrix(draw: Random) -> torch.Tensor:
    return torch.tensor([[draw.choice([0.0, 0.0, 1.5, -2.0]) for _ in range(6)] for _ in range(4)])


def coalesced(draw: Random) -> torch.Tensor:
    return _matrix(draw).to_sparse(draw.choice([1, 2])).coalesce()


def uncoalesced(draw: Random) -> torch.Tensor:
    at = torch.tensor([[0, 2, 0, draw.randint(0, 3)]])
    return torch.sparse_coo_tensor(at, _drawn(draw, torch.float32, 8).view(4, 2), (4, 2))


def compressed(draw: Random) -> torch.Tensor:
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.to_sparse_csr(),
        lambda t: t.to_sparse_csc(),
        lambda t: t.to_sparse_bsr((2, 2)),
        lambda t: t.to_sparse_bsc((2, 2)),
    ]
    return draw.choice(ways)(_matrix(draw))


def nested(draw: Random) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.rand(n, 2) for n in (1, 3, draw.randint(1, 4))])


def jagged(draw: Random) -> torch.Tensor:
    parts = [torch.rand(n, 2) for n in (1, 3, draw.randint(1, 4))]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def scaled(draw: Random) -> torch.Tensor:
    return Scaled(_drawn(draw, torch.uint8, 7), _drawn(draw, torch.float32, 2), draw.random())


def scaled_twice(draw: Random) -> torch.Tensor:
    return Scaled(Scaled(_drawn(draw, torch.uint8, 7), torch.rand(2)), coalesced(draw))


def leaf(draw: Random) -> torch.Tensor:
    return torch.nn.Parameter(torch.rand(3, 2).t())


def of_inference(draw: Random) -> torch.Tensor:
    with torch.inference_mode():
        return torch.rand(3, 2)


KINDS = [
    strided,
    conjugate,
    negated,
    coalesced,
    uncoalesced,
    compressed,
    nested,
    jagged,
    scaled,
    scaled_twice,
    leaf,
    of_inference,
]


def memory_of(tensor: Any) -> Iterator[torch.Tensor]:
    """Every tensor with memory in it."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from memory_of(getattr(tensor, name))
    elif tensor.is_nested:
        yield from tensor.detach().unbind()
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor.detach()._indices(), tensor.detach()._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.detach().crow_indices(), tensor.detach().col_indices(), tensor.detach().values())
    elif tensor.layout is not torch.strided:
        yield from (tensor.detach().ccol_indices(), tensor.detach().row_indices(), tensor.detach().values())
    else:
        yield tensor.detach()


def everything(tensor: Any) -> Any:
    """The bits in other words than the library's: those that each element has, and what torch says of them."""
    if isinstance(tensor, Scaled):
        return [everything(tensor.codes), everything(tensor.scale), tensor.factor]
    bits = []
    for one in memory_of(tensor):
        one = torch._neg_view(one) if one.is_neg() else one
        one = one.conj() if one.is_conj() else one
        dense = one.reshape(-1).clone(memory_format=torch.contiguous_format)
        bits.append((one.shape, one.dtype, dense.view(torch.uint8).tolist()))
    return [bits, tensor.layout == torch.sparse_coo and tensor.is_coalesced()]


def write_memory(draw: Random) -> Write:
    """In place, each byte."""

    def write(tensor: Any) -> None:
        for one in memory_of(tensor):
            place = torch._neg_view(one) if one.is_neg() else one
            storage = torch.empty(0, dtype=torch.uint8).set_(place.untyped_storage())
            if one.dtype is torch.int64 and one.numel() < 9:
                continue  # indices, which have to be valid
            storage.bitwise_not_() if one.dtype is not torch.bool else storage.bitwise_xor_(1)

    return write


def replace_parts(tensor: Any) -> None:
    """As operations on sparse tensors do, and wrappers that are given new tensors."""
    if isinstance(tensor, Scaled):
        tensor.codes, tensor.factor = torch.zeros(1), 0.5
    elif tensor.layout is torch.sparse_coo:
        tensor.add_(torch.ones(tensor.shape).to_sparse(tensor.sparse_dim()))
    elif tensor.layout is not torch.strided and not hasattr(tensor, "__tensor_flatten__"):
        other = torch.ones(tensor.shape)
        block = tensor.values().shape[1:]
        tensor.data = other.to_sparse(layout=tensor.layout, blocksize=tuple(block) or None)


def inner(tensor: Any) -> list[Any]:
    return [getattr(tensor, n) for n in tensor.__tensor_flatten__()[0]] if hasattr(tensor, "__tensor_flatten__") else []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("replaced", [False, True], ids=["written", "replaced"])
def test_what_is_written_is_put_back(kind: Callable[[Random], torch.Tensor], replaced: bool) -> None:
    for seed in range(300 if kind is strided else 40):
        draw = Random(seed)
        torch.manual_seed(seed)
        tensor = kind(draw)
        before, places = everything(tensor), [one.data_ptr() for one in memory_of(tensor)]
        held, parts, digest = inner(tensor), list(memory_of(tensor)), digest_of(tensor)
        kept = copy_of(tensor, host=draw.random() < 0.5)
        assert is_back(tensor, kept), seed
        write_memory(draw)(tensor)
        if replaced:
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                replace_parts(tensor)
        changed = everything(tensor) != before
        assert is_back(tensor, kept) is not changed, seed
        assert (digest_of(tensor) == digest) is not changed, seed
        requires_grad = tensor.requires_grad
        assert restore(tensor, kept) is tensor
        assert everything(tensor) == before, seed
        assert is_back(tensor, kept), seed
        assert digest_of(tensor) == digest, seed
        # In the same memory, and the same objects.
        assert [one.data_ptr() for one in memory_of(tensor)] == places, seed
        assert all(now is then for now, then in zip(inner(tensor), held, strict=True))
        assert tensor.requires_grad is requires_grad
        del parts


def test_memory_between_the_elements_is_left_alone() -> None:
    whole = torch.arange(12.0)
    view = whole.view(3, 4)[:, 1:3]
    kept = copy_of(view, host=False)
    whole.fill_(7)
    restore(view, kept)
    assert whole.tolist() == [7, 1, 2, 7, 7, 5, 6, 7, 7, 9, 10, 7]


@pytest.mark.parametrize("how", ["resize", "data", "shrunk", "emptied"])
def test_a_tensor_that_got_other_memory(how: str) -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    view = tensor[0]
    kept = copy_of(tensor, host=False)
    if how == "resize":
        tensor.resize_(7, 5)
    elif how == "data":
        tensor.data = torch.zeros(3, 2)
    elif how == "shrunk":
        tensor.resize_(2)
    else:
        tensor.untyped_storage().resize_(0)
    restore(tensor, kept)
    assert tensor.shape == (3, 2)
    assert tensor.stride() == (1, 3)
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]
    tensor.add_(1)
    assert view.tolist() == [1, 4]


def test_as_many_versions_as_one_write() -> None:
    for tensor in (torch.rand(3), torch.nn.Parameter(torch.rand(3)), torch.rand(3, 4)[:, 0]):
        kept, before = copy_of(tensor, host=False), version_of(tensor)
        restore(tensor, kept)
        assert version_of(tensor) == before + 1


def test_a_watched_parameter_is_not_told() -> None:
    told = []

    class Watched(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = torch.nn.Parameter(torch.rand(3))
    parameter.__class__ = Watched
    kept = copy_of(parameter, host=False)
    restore(parameter, kept)
    assert is_back(parameter, kept)
    digest_of(parameter)
    assert not told


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Closed(torch.rand(2), torch.rand(2)), "of the class Closed, which has no __tensor_flatten__"),
        (lambda: torch.rand(2, 2).to_mkldnn(), "of the layout torch._mkldnn"),
        (lambda: torch._efficientzerotensor((2,)), "without memory"),
        (
            lambda: torch.quantize_per_channel(torch.rand(2, 2), torch.rand(2), torch.zeros(2), 0, torch.quint8),
            "of the dtype torch.quint8",
        ),
        (lambda: Scaled(torch.rand(2), Closed(torch.rand(2), torch.rand(2))), "of the class Closed"),
    ],
)
def test_what_cannot_be_seen_to_be_back_raises_at_once(make: Callable[[], torch.Tensor], words: str) -> None:
    tensor = make()
    with pytest.raises(TypeError, match=words):
        copy_of(tensor, host=False)
    with pytest.raises(TypeError, match=words):
        digest_of(tensor)
    with pytest.raises(TypeError, match=words):
        Contents({"a": [tensor]})


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        gc.collect()
        dist.destroy_process_group()


def test_dtensors(mesh: Any) -> None:
    for placement in (Shard(0), Replicate()):
        tensor = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [placement])
        assert isinstance(tensor, DTensor)
        local, kept, digest = tensor._local_tensor, copy_of(tensor, host=False), digest_of(tensor)
        tensor.mul_(2)
        assert not is_back(tensor, kept)
        assert digest_of(tensor) != digest
        restore(tensor, kept)
        assert tensor._local_tensor is local
        assert local.flatten().tolist() == [0, 1, 2, 3, 4, 5]
        assert is_back(tensor, kept)
        assert digest_of(tensor) == digest


def test_a_meta_tensor_has_no_values() -> None:
    tensor = torch.empty(3, 2, device="meta")
    kept = copy_of(tensor, host=False)
    restore(tensor, kept)
    assert is_back(tensor, kept)
    assert digest_of(tensor) != digest_of(tensor.t())


class _Slots:
    __slots__ = ("left", "value")
    left: Any

    def __init__(self, value: Any) -> None:
        self.value = value


def test_values_are_put_back_into_the_same_objects() -> None:
    array, slots, values = np.arange(3.0), _Slots([1]), deque([1, torch.rand(2)], 2)
    held: dict[str, Any] = {"array": array, "slots": slots, "deque": values, "tensor": uncoalesced(Random(0))}
    before, inside = digest_of_value(held), slots.value
    kept = Contents(held)
    array += 1
    slots.value.append(2)
    slots.left = slots.value
    values.append(3)
    held["tensor"].add_(held["tensor"])
    held["more"] = 1
    assert digest_of_value(held) != before
    assert kept.put_back() is held
    assert digest_of_value(held) == before
    assert held["array"] is array
    assert held["slots"] is slots
    assert slots.value is inside
    assert not hasattr(slots, "left")


# Digests.


SIZES = [1, 3, 8, 1000, 1023, 4096, 5001, 40_000, 300_003, 1_000_001]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64], ids=str)
def test_a_digest_sees_every_bit(size: int, dtype: torch.dtype) -> None:
    draw = Random(size)
    torch.manual_seed(size)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    found = {digest_of(tensor)}
    count = 1
    for at in {0, raw.numel() - 1, *(draw.randrange(raw.numel()) for _ in range(20))}:
        for bit in range(8):
            raw[at] ^= 1 << bit
            found.add(digest_of(tensor))
            raw[at] ^= 1 << bit
            count += 1
    assert len(found) == count


@pytest.mark.parametrize("size", [64, 5000, 100_000, 700_000])
def test_a_digest_sees_what_cancels_out_in_a_sum(size: int) -> None:
    """Signs of two numbers, which are the top bits of words, and elements that have changed places."""
    draw = Random(size)
    torch.manual_seed(size)
    for dtype in (torch.float32, torch.float64):
        tensor = torch.rand(size, dtype=dtype) + 1
        found, count = {digest_of(tensor)}, 1
        for _ in range(60):
            a, b = draw.sample(range(size), 2)
            other = tensor.clone()
            other[[a, b]] = -other[[a, b]]  # both bits
            found.add(digest_of(other))
            other = tensor.clone()
            other[[a, b]] = other[[b, a]]
            found.add(digest_of(other))
            other = tensor.clone()
            other[a], other[b] = 1.5, -1.5
            found.add(digest_of(other))
            other[a], other[b] = -1.5, 1.5
            found.add(digest_of(other))
            count += 4
        found.add(digest_of(-tensor))
        assert len(found) == count + 1
    assert digest_of(torch.zeros(size)) != digest_of(-torch.zeros(size))
    nan = torch.full((size,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[size // 2] += 1
    assert digest_of(nan) != digest_of(other)


def test_a_digest_is_of_the_elements_and_not_of_their_memory() -> None:
    for shape in ((3, 5), (300, 500)):
        tensor = torch.rand(shape)
        same = [tensor.t().contiguous().t(), torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(shape)]
        assert all(digest_of(one) == digest_of(tensor) for one in same)
        assert digest_of(tensor.view(-1)) != digest_of(tensor)
        assert digest_of(tensor.view(torch.int32)) != digest_of(tensor)


def test_a_large_tensor_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep._optim.contents._WORDS", 1 << 13)
    tensor = torch.rand(7, 9, 1001)
    digest = digest_of(tensor)
    assert digest_of(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == digest
    for at in ((0, 0, 0), (3, 4, 500), (6, 8, 1000)):
        other = tensor.clone()
        other[at] += 1
        assert digest_of(other) != digest
    assert len(digest) < 6


def test_digests_of_values() -> None:
    class Thing:
        def __init__(self, value: Any) -> None:
            self.value = value

    def equal() -> list[Any]:
        return [
            None, "a", 0.0, -0.0, 1, 1.0, True, float("nan"), 1j, (1, 2), [1, 2], {"a": 1, "b": 2}, {1, 2},
            deque([1, 2]), np.arange(3), np.arange(3.0), torch.arange(3), Thing(1), Thing([torch.ones(2)]), [[]],
            {"a": {"b": torch.zeros(2)}}, b"a", torch.float32, _Slots(1),
        ]  # fmt: skip

    first, second = ([digest_of_value(one) for one in equal()] for _ in range(2))
    assert first == second
    assert not any(a == b for i, a in enumerate(first) for b in first[:i])
    assert digest_of_value({"a": 1, "b": 2}) == digest_of_value({"b": 2, "a": 1})
    pair = (0.9, 0.999)
    assert digest_of_value([pair, pair]) == digest_of_value([pair, tuple([0.9, 0.999])])  # noqa: C409
    around: list[Any] = [1]
    around.append(around)
    assert digest_of_value(around) == digest_of_value(around)


def test_what_weak_references_refer_to_is_not_compared() -> None:
    one, other = torch.ones(2), torch.ones(2)
    first, second = weakref.ref(one), weakref.ref(other)
    assert digest_of_value([first]) == digest_of_value([first])
    assert digest_of_value([first]) != digest_of_value([second])
