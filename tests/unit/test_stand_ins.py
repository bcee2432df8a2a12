"""The tensors that stand in ``.grad``, with ``schedule="forward"``, until their gradients have been applied."""

import copy
import weakref

import pytest
import torch
from torch import nn

import instep
from instep._torch.watch import plain_type
from tests.living import no_gc


def loop() -> tuple[nn.Linear, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), torch.randn(4, 3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor | None:
    """One iteration; what stands in ``.grad`` of the weight after ``step()``."""
    model(x).square().sum().backward()
    optimizer.step()
    return next(model.parameters()).grad


def is_watched(gradient: torch.Tensor) -> bool:
    return plain_type(gradient) is torch.Tensor is not type(gradient)


@pytest.mark.parametrize("keeper", ["variable", "gradient of another"])
def test_a_gradient_that_somebody_keeps_stays_what_it_was(keeper: str) -> None:
    model, optimizer, x = loop()
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    instep.attach(model, optimizer, schedule="forward", defer=True)
    kept, expected = [], []
    for _ in range(4):
        expected.append(train(plain, plain_optimizer, x))
        plain_optimizer.zero_grad()
        gradient = train(model, optimizer, x)
        if keeper == "variable":
            kept.append(gradient)
        else:
            other = nn.Parameter(torch.zeros(2, 3))
            other.grad = gradient
            kept.append(other)
        del gradient
        optimizer.zero_grad()

    for one, plain_gradient in zip(kept, expected, strict=True):
        found = one.grad if isinstance(one, nn.Parameter) else one
        assert found is not None
        assert plain_gradient is not None
        assert torch.equal(found + 0, plain_gradient)


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_gradient_is_freed_where_the_loop_clears_it(iterations: int) -> None:
    model, optimizer, x = loop()
    overlap = instep.attach(model, optimizer, schedule="forward", defer=True)
    for _ in range(iterations):
        model(x).square().sum().backward()
        gradient = weakref.ref(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        overlap.synchronize()

        assert gradient() is None


def test_it_is_laid_out_as_the_gradient() -> None:
    model, optimizer, x = loop()
    instep.attach(model, optimizer, schedule="forward", defer=True)
    for i in range(4):
        model(x).square().sum().backward()
        assert model.weight.grad is not None
        if i % 2:
            # No view, whose base has the memory too: such a gradient is applied at once, and nothing stands for it.
            model.weight.grad = torch.empty_strided((2, 3), (1, 2)).copy_(model.weight.grad)
        strides = model.weight.grad.stride()
        optimizer.step()

        assert is_watched(model.weight.grad)
        assert model.weight.grad.stride() == strides
        optimizer.zero_grad()


def test_one_that_was_used_keeps_no_gradient() -> None:
    """Also before Python's collector comes."""
    with no_gc():
        model, optimizer, x = loop()
        instep.attach(model, optimizer, schedule="forward", defer=True)
        gradient = train(model, optimizer, x)
        assert gradient is not None
        assert is_watched(gradient)
        gradient.zero_()
        assert model.weight.grad is not None
        real = weakref.ref(model.weight.grad)
        del gradient
        optimizer.zero_grad()
        assert real() is None


def test_a_backward_that_nobody_sees_adds_to_gradients_that_are_due() -> None:
    """Its graph was made before the step, of parameters alone, and autograd adds to the tensor in ``.grad``."""
    found = []
    for attached in (False, True):
        model, optimizer, x = loop()
        overlap = instep.attach(model, optimizer, schedule="forward", defer=True) if attached else None
        for _ in range(3):
            model(x).square().sum().backward()
            other = (model.weight * 2).sum()
            optimizer.step()
            assert overlap is None or overlap.state == "pending"
            other.backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.clone())
            optimizer.zero_grad()
        found.append(model.weight.detach().clone())
        if overlap is not None:
            overlap.detach()
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))
