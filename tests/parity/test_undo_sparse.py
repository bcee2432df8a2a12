"""``undo`` with state that is no dense tensor: sparse momentum, and state in tensors of wrapper classes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import UnsupportedOptimizerError
from tests.judged import own_steps_are_judged
from tests.wrappers import Closed, Scaled

Loop = Callable[[nn.Module], None]
IN_BACKWARD: dict[str, Any] = {"schedule": "backward", "undo": True}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.more = nn.Embedding(20, 4, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return (self.embedding(words) * self.more(words)).square().mean()


def _scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _coalesced(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.coalesce()


def _written(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.coalesce() * 0.5)


@pytest.mark.parametrize("touch", [_scaled, _coalesced, _written], ids=lambda touch: touch.__name__[1:])
def test_sparse_state_is_put_back(touch: Loop) -> None:
    models = [Words(), Words()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in models]
    with instep.attach(models[1], optimizers[1], **IN_BACKWARD) as overlap:
        for step in range(5):
            words = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(step))
            for model, optimizer in zip(models, optimizers, strict=True):
                model(words).backward()
                touch(model)
                optimizer.step()
                optimizer.zero_grad()
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(one, other), f"step {step}"
                buffers = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (one, other), strict=True)]
                assert torch.equal(*(buffer.to_dense() for buffer in buffers)), f"step {step}"
                assert torch.equal(*(buffer.coalesce().indices() for buffer in buffers)), f"step {step}"
        assert overlap.redo_count > 0


class Quantizes(torch.optim.Optimizer):
    """Keeps its momentum in a tensor that has neither ``clone`` nor ``copy_``, and from ``since`` on in one of another
    class."""

    def __init__(self, params: Any, kind: type[Scaled], since: int = 0) -> None:
        super().__init__(params, {})
        self.kind, self.since = kind, since

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                kind = Scaled if self.since else self.kind
                state.update(momentum=kind(torch.zeros(p.shape, dtype=torch.int8), torch.ones(())), step=0)
            elif state["step"] == self.since:
                state["momentum"] = self.kind(state["momentum"].codes, state["momentum"].scale)
            momentum, state["step"] = state["momentum"], state["step"] + 1
            values = momentum.codes * momentum.scale * 0.9 + p.grad
            momentum.scale.copy_(values.abs().max() / 127)
            momentum.codes.copy_((values / momentum.scale).round())
            p.sub_(momentum.codes * momentum.scale, alpha=0.1)


def _dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def _step(models: list[nn.Module], optimizers: list[Quantizes], step: int, touch: Loop = _scaled) -> None:
    batch = torch.rand(4, 6, generator=torch.Generator().manual_seed(step))
    for model, optimizer in zip(models, optimizers, strict=True):
        model(batch).square().mean().backward()
        touch(model)
        optimizer.step()
        optimizer.zero_grad()
    _require_same(models, optimizers, step)


def _require_same(models: list[nn.Module], optimizers: list[Quantizes], step: int) -> None:
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other), f"step {step}"
        first, second = (o.state[p]["momentum"] for o, p in zip(optimizers, (one, other), strict=True))
        assert torch.equal(first.codes, second.codes), f"step {step}"
        assert torch.equal(first.scale, second.scale), f"step {step}"


def test_state_of_a_wrapper_class_is_put_back() -> None:
    models = [_dense(), _dense()]
    optimizers = [Quantizes(model.parameters(), Scaled) for model in models]
    with instep.attach(models[1], optimizers[1], bucket_bytes=64, **IN_BACKWARD) as overlap:
        for step in range(5):
            _step(models, optimizers, step)
        assert overlap.redo_count > 0


@pytest.mark.parametrize("since", [3, 7])
def test_state_that_cannot_be_put_back_is_told_and_can_be_gone_on_from(since: int) -> None:
    """It is met late: the step that meets it is the plain loop's, and the next backward raises before it writes."""
    models = [_dense(), _dense()]
    optimizers = [Quantizes(model.parameters(), Closed, since) for model in models]
    overlap = instep.attach(models[1], optimizers[1], bucket_bytes=64, **IN_BACKWARD)
    told: list[str] = []
    step = -1
    while not told and step < 20:
        step += 1
        try:
            _step(models, optimizers, step, touch=lambda model: None)
        except UnsupportedOptimizerError as error:
            told.append(str(error))
    assert "state['momentum'] of a parameter of the shape" in told[0]
    assert "of the class Closed, which has no __tensor_flatten__" in told[0]
    assert step > 0
    # The plain loop has taken this step. Nothing of the attached one was written; and there is a way on.
    overlap.detach()
    optimizers[1].zero_grad()
    batch = torch.rand(4, 6, generator=torch.Generator().manual_seed(step))
    models[1](batch).square().mean().backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    _require_same(models, optimizers, step)
    for later in range(step + 1, step + 3):
        _step(models, optimizers, later)


class QuantizesLarge(Quantizes):
    """As torchao's do, and so small tensors on trial do not show it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not self.state[p]:
                kind = self.kind if p.numel() >= 10_000 else Scaled
                self.state[p].update(momentum=kind(torch.zeros(p.shape, dtype=torch.int8), torch.ones(())), step=1)
        super().step()


def test_state_that_cannot_be_put_back_of_large_parameters() -> None:
    """It is told where it would be copied, by the backward after the one that has made it."""
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)))
    optimizers: list[Quantizes] = [QuantizesLarge(model.parameters(), Closed) for model in models]
    with instep.attach(models[1], optimizers[1], bucket_bytes=64, **IN_BACKWARD) as overlap:
        _step(models, optimizers, 0, touch=lambda model: None)
        assert overlap.redo_count == 0
        before = [p.detach().clone() for p in models[1].parameters()]
        with pytest.raises(UnsupportedOptimizerError, match=r"of the shape \(128, 128\): a tensor of the class Closed"):
            _step(models, optimizers, 1, touch=lambda model: None)
        assert all(map(torch.equal, before, models[1].parameters()))
        _require_same_but(models, optimizers)


def _require_same_but(models: list[nn.Module], optimizers: list[Quantizes]) -> None:
    """Nothing was written by the backward that has raised; and ``step()`` goes on."""
    before = [p.detach().clone() for p in models[1].parameters()]
    optimizers[1].zero_grad()
    optimizers[1].step()
    assert all(map(torch.equal, before, models[1].parameters()))


def test_state_that_cannot_be_put_back_from_the_first_step() -> None:
    """It is seen in the first update, which is then taken whole, as all that come."""
    models = [_dense(), _dense()]
    optimizers = [Quantizes(model.parameters(), Closed) for model in models]
    with own_steps_are_judged(), instep.attach(models[1], optimizers[1], **IN_BACKWARD) as overlap:
        for step in range(4):
            _step(models, optimizers, step)
            _require_same(models, optimizers, step)
        (why,) = overlap.plan.judged
        assert "could not be put back" in why
