"""Norms taken one by one make torch's total, bit for bit, and what they use of torch is still there."""

import inspect
import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, get_total_norm
from torch.utils import _foreach_utils

import instep
from instep import ClipNorm
from instep._gradients.clipping import clip_by, norms_of, scales_down, total_norm

NORM_TYPES = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf]
DTYPES = {
    "float32": [torch.float32],
    "bfloat16": [torch.bfloat16],
    "mixed": [torch.float32, torch.bfloat16, torch.float64, torch.float16],
    "with complex": [torch.float32, torch.complex64],
}
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 31, 64, 100, 1023, 1025, 4097, 33_000]


def gradients(dtypes: list[torch.dtype], seed: int = 0, sizes: list[int] = SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [values.to(dtypes[number % len(dtypes)]) for number, values in enumerate(real)]


def in_parts(tensors: list[torch.Tensor], norm_type: float, seed: int) -> list[torch.Tensor]:
    """The norms, taken of a few gradients at a time, in any order."""
    order = list(range(len(tensors)))
    random.Random(seed).shuffle(order)
    norms: dict[int, torch.Tensor] = {}
    while order:
        part = [order.pop() for _ in range(min(len(order), 3))]
        norms.update(zip(part, norms_of([tensors[i] for i in part], norm_type), strict=True))
    return [norms[i] for i in range(len(tensors))]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape == ()
    assert torch.equal(found, expected) or (bool(found.isnan()) and bool(expected.isnan()))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_norms_taken_in_parts_make_torchs_total(dtypes: str, norm_type: float, seed: int) -> None:
    if dtypes == "with complex" and norm_type == 0.0:
        pytest.skip("torch's own warns, and drops imaginary parts")
    # The largest element of an empty tensor is not defined: torch raises.
    tensors = gradients(DTYPES[dtypes], seed, SIZES[1:] if norm_type == math.inf else SIZES)
    expected = get_total_norm(tensors, norm_type)
    assert_same(total_norm(tensors, in_parts(tensors, norm_type, seed), norm_type), expected)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 64, 300])
def test_any_number_of_gradients(count: int) -> None:
    tensors = gradients(DTYPES["mixed"], count, [1 + 13 * i % 101 for i in range(count)])
    assert_same(total_norm(tensors, in_parts(tensors, 2.0, count), 2.0), get_total_norm(tensors))


def test_no_gradient_at_all() -> None:
    assert norms_of([], 2.0) == []
    assert_same(total_norm([], [], 2.0), get_total_norm([]))


def test_gradients_that_are_not_contiguous() -> None:
    tensors = [g.view(-1, 2).t() for g in gradients([torch.float32], sizes=[64, 100, 4096])]
    tensors += [g[::2] for g in gradients([torch.float32], sizes=[64, 100, 4096])]
    assert_same(total_norm(tensors, in_parts(tensors, 2.0, 0), 2.0), get_total_norm(tensors))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_norm_that_is_not_finite(value: float, norm_type: float) -> None:
    tensors = gradients([torch.float32], sizes=[8, 9, 33])
    tensors[1][3] = value
    assert_same(total_norm(tensors, in_parts(tensors, norm_type, 0), norm_type), get_total_norm(tensors, norm_type))


def test_a_norm_that_is_not_finite_raises_where_that_is_asked_for() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.inf])
    model = nn.Module()
    model.weight = parameter
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    instep.attach(model, optimizer, clip=ClipNorm(1.0, error_if_nonfinite=True))
    for clip in (partial(get_total_norm, [parameter.grad], 2.0, True), optimizer.step):
        with pytest.raises(RuntimeError, match="norm of order 2"):
            clip()


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 1e9])
def test_clipping_with_the_total_is_clip_grad_norm(max_norm: float) -> None:
    def parameters() -> list[nn.Parameter]:
        made = []
        for gradient in gradients(DTYPES["mixed"], sizes=SIZES[1:]):
            made.append(nn.Parameter(torch.zeros_like(gradient)))
            made[-1].grad = gradient.clone()
        return made

    plain, ours = parameters(), parameters()
    expected = clip_grad_norm_(plain, max_norm)
    norms = norms_of([p.grad for p in ours if p.grad is not None], 2.0)
    total = total_norm(ours, norms, 2.0)  # like the parameters: their gradients may be gone by then
    clip_by(ours[:7], max_norm, total)
    clip_by(ours[7:], max_norm, total)
    assert_same(total, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, ours, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("total", [0.0, 0.5, 0.999999, 1.0, 1.0000001, 1.5, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1, 1e9])
def test_scales_down_says_whether_clipping_changes_anything(total: float, max_norm: float) -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    clip_by([parameter], max_norm, torch.tensor(total))
    assert scales_down(max_norm, torch.tensor(total)) == (not torch.equal(parameter.grad, torch.ones(1)))


def test_torch_groups_gradients_by_device_and_dtype_and_says_where_they_were() -> None:
    """``_group_tensors_by_device_and_dtype``, private: the groups in order of appearance, with positions."""
    tensors: Any = gradients([torch.float32, torch.float64], sizes=[1, 2, 3, 4, 5])
    grouped = _foreach_utils._group_tensors_by_device_and_dtype([tensors], with_indices=True)
    cpu = torch.device("cpu")
    # Whatever the order of the groups is, it must be that which torch has without positions.
    assert list(grouped) == list(_foreach_utils._group_tensors_by_device_and_dtype([tensors]))
    assert {key: positions for key, (_, positions) in grouped.items()} == {
        (cpu, torch.float32): [0, 2, 4],
        (cpu, torch.float64): [1, 3],
    }
    for [members], positions in grouped.values():
        assert all(member is tensors[position] for member, position in zip(members, positions, strict=True))


def test_torch_says_which_gradients_its_foreach_kernels_take() -> None:
    """``_has_foreach_support``, private: of tensors on one device."""
    cpu = torch.device("cpu")
    assert _foreach_utils._has_foreach_support([torch.zeros(1), torch.zeros(2)], cpu) is True

    class Other(torch.Tensor):
        pass

    assert _foreach_utils._has_foreach_support([torch.zeros(1).as_subclass(Other)], cpu) is False


def test_the_foreach_norm_takes_a_list_and_an_order() -> None:
    """``_foreach_norm``, private: one 0-dim norm each, in the tensors' dtype."""
    tensors = gradients([torch.bfloat16], sizes=[3, 100])
    for norm, tensor in zip(torch._foreach_norm(tensors, 2.0), tensors, strict=True):
        assert_same(norm, torch.linalg.vector_norm(tensor, 2.0))


def test_torchs_own_total_norm_is_made_of_these() -> None:
    """If torch takes another way, the numbers may differ where this machine does not show it: on an accelerator."""
    source = inspect.getsource(clip_grad._get_total_norm)
    for name in (
        "_group_tensors_by_device_and_dtype(",
        "_has_foreach_support(device_tensors, device)",
        "torch._foreach_norm(device_tensors, norm_type)",
        "torch.linalg.vector_norm(g, norm_type)",
        "torch.stack([norm.to(first_device) for norm in norms])",
    ):
        assert name in source
