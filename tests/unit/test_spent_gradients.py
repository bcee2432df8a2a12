"""What a gradient that was applied and freed, or that is lent, still answers, and what it raises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import instep
from instep._step.judging import LEFT
from instep.errors import AccumulationError, SpentGradientError

WITHOUT_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda gradient: gradient.new_zeros(gradient.shape),
    "full_like": lambda gradient: torch.full_like(gradient, 0.5),
    "ones_like": torch.ones_like,
    "new_full": lambda gradient: gradient.new_full(gradient.shape, 0.5),
    "empty_like": lambda gradient: torch.empty_like(gradient).zero_(),
    "another dtype": lambda gradient: torch.zeros_like(gradient, dtype=torch.float64).float(),
    "another device": lambda gradient: torch.zeros(torch.zeros_like(gradient, device="meta").shape),
}


def make(wrapped: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    first: Any = model[0]
    first.weight = nn.Parameter(wrapped(first.weight.detach()))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, like: Any) -> list[torch.Tensor]:
    """A loop that puts tensors of its own in the place of all gradients, where a step has been taken."""
    for number in range(5):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().sum().backward()
        optimizer.step()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = like(p.grad)
            assert p.grad is not None
            assert type(p.grad) is torch.Tensor
    return list(model.parameters())


@pytest.mark.parametrize("like", WITHOUT_VALUES)
def test_between_steps_it_gives_what_needs_no_values(like: str) -> None:
    model, optimizer = make()
    instep.attach(model, optimizer, schedule="backward")
    plain = train(*make(), WITHOUT_VALUES[like])
    assert all(map(torch.equal, train(model, optimizer, WITHOUT_VALUES[like]), plain))


@pytest.mark.parametrize("like", WITHOUT_VALUES)
def test_what_replaces_it_in_a_step_would_be_stepped(like: str) -> None:
    model, optimizer = make()
    instep.attach(model, optimizer, schedule="backward")
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(SpentGradientError, match=r"'0\.weight', which was applied during backward and freed"):
        WITHOUT_VALUES[like](model[0].weight.grad)
    optimizer.step()


def test_other_tensors_are_not_made_like_it_with_its_values() -> None:
    model, optimizer = make()
    instep.attach(model, optimizer, schedule="backward")
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    gradient = model[0].weight.grad
    for use in (
        lambda: gradient + torch.zeros_like(gradient),
        gradient.clone,
        lambda: torch.zeros(6, 4).copy_(gradient),
    ):
        with pytest.raises(SpentGradientError, match="from a step that is over"):
            use()


def two(weight: torch.Tensor) -> torch.Tensor:
    return TwoTensor(weight.clone(), weight.clone())


def judged(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Updates of such parameters are compared with their parts, after the first one."""
    for _ in range(LEFT):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_its_class_has_beyond_torch_s_own_is_a_use() -> None:
    model, optimizer = make(two)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    instep.attach(model, optimizer, schedule="backward")
    judged(model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    spent = model[0].weight.grad
    uses: list[Callable[[], object]] = [lambda: spent.a]
    if hasattr(TwoTensor, "get_elem_a"):  # not in torch 2.6
        uses.append(lambda: spent.get_elem_a())
    for use in uses:
        with pytest.raises(SpentGradientError, match=r"TwoTensor\.\w+ was called on the gradient of '0\.weight'"):
            use()
    optimizer.step()
    with pytest.raises(SpentGradientError, match=r"TwoTensor\.a met the gradient of '0\.weight' from a step that is"):
        _ = spent.a
    with pytest.raises(SpentGradientError, match="zeros_like met"):  # which would be of torch's own class
        torch.zeros_like(spent)
    with pytest.raises(SpentGradientError, match=r"TwoTensor\.a met"):
        _ = spent.detach().a


def test_who_asks_whether_there_is_an_attribute_finds_none() -> None:
    model, optimizer = make(two)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward")
    judged(model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    for parameter in model.parameters():
        assert not hasattr(parameter.grad, "a")
        assert getattr(parameter.grad, "_local_tensor", None) is None
        with pytest.raises(AttributeError, match="'SpentGradient' object has no attribute 'nothing'"):
            _ = parameter.grad.nothing
    assert overlap.state == "open"
    optimizer.step()


def test_a_gradient_that_is_lent_has_what_the_real_one_has() -> None:
    from instep._torch.placeholders import HeldGradient

    told: list[str] = []
    before_use: Any = lambda operation, args: told.append(operation)  # noqa: E731
    held: Any = HeldGradient(TwoTensor(torch.ones(2), torch.zeros(2)), lambda: before_use)
    assert not hasattr(held, "nothing")
    assert not told
    assert torch.equal(held.a, torch.ones(2))
    assert told == ["TwoTensor.a"]
    assert not hasattr(HeldGradient(torch.ones(2), lambda: before_use), "a")


def test_one_that_waits_says_so() -> None:
    model, optimizer = make(two)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward")
    overlap.backward(model(torch.randn(3, 4)).sum(), more=True)
    with pytest.raises(
        AccumulationError, match=r"TwoTensor\.a met the gradient of '0\.weight', which is not there yet"
    ):
        _ = model[0].weight.grad.a
    optimizer.zero_grad()
    overlap.detach()
