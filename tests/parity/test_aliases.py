"""``schedule="forward"``: whoever has got hold of memory before ``step()`` finds after it what the plain loop finds.

The optimizers here are stepped when somebody waits for them, so that a reader whom nobody sees finds old values.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.devices import on_cpu_only

SMALL = 2_000  # bytes: several buckets
STEPS = 4


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Blocks()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.weight = self.model.get_parameter("inner.weight")
        self.bias = self.model.get_parameter("inner.bias")
        self.kept: Any = None

    def backward(self, i: int) -> None:
        self.model(batch(i)[0]).square().sum().backward()

    @property
    def entry(self) -> Any:
        return self.optimizer.state[self.weight]


Take = Callable[[Loop], Any]
Read = Callable[[Any], Any]


def clone(value: Any) -> Any:
    return deepcopy(value)


def _numpy(tensor: torch.Tensor) -> Any:
    pytest.importorskip("numpy")
    return tensor.detach().numpy()


# Taken once, before the third step; read after each.
TAKEN: dict[str, tuple[Take, Read]] = {
    "a state_dict": (lambda loop: loop.model.state_dict(), clone),
    "detach": (lambda loop: loop.weight.detach(), clone),
    "data": (lambda loop: loop.weight.data, clone),
    "a row": (lambda loop: loop.weight.data[1], clone),
    "NumPy": (lambda loop: _numpy(loop.weight), clone),
    "a storage": (lambda loop: loop.weight.untyped_storage(), lambda kept: kept.tolist()),
    "all parameters' data": (lambda loop: [p.data for p in loop.model.parameters()], clone),
    "the optimizer's state_dict": (lambda loop: loop.optimizer.state_dict(), clone),
    "the optimizer's state": (lambda loop: loop.optimizer.state, lambda kept: clone(list(kept.values()))),
    "an entry": (lambda loop: loop.entry, clone),
    "a tensor of the state": (lambda loop: loop.entry["exp_avg"], clone),
    "NumPy of the state": (lambda loop: _numpy(loop.entry["exp_avg"]), clone),
    "a storage of the state": (lambda loop: loop.entry["exp_avg"].untyped_storage(), lambda kept: kept.tolist()),
}


@pytest.mark.parametrize("taken", TAKEN)
def test_a_reader_who_took_it_earlier(taken: str) -> None:
    take, read = TAKEN[taken]
    plain, loop = Loop(), Loop()
    with instep.attach(loop.model, loop.optimizer, defer=True, bucket_bytes=SMALL) as overlap:
        for i in range(STEPS):
            found = []
            for one in (plain, loop):
                one.backward(i)
                if i == 2:
                    one.kept = take(one)
                one.optimizer.step()
                found.append(None if one.kept is None else read(one.kept))
                one.optimizer.zero_grad()
            assert repr(found[0]) == repr(found[1])
            assert i >= 2 or overlap.state == "pending"
        overlap.synchronize()
        assert (
            first_difference(training_state(plain.model, plain.optimizer), training_state(loop.model, loop.optimizer))
            is None
        )
        loop.kept = None
        loop.backward(0)
        loop.optimizer.step()
        assert overlap.state == "pending"  # put off again, once nobody has it any more


def zero(gradient: torch.Tensor) -> None:
    gradient.zero_()


GRADIENTS: dict[str, tuple[Take, Read]] = {
    "the gradient": (lambda loop: loop.weight.grad, zero),
    "its data": (lambda loop: loop.weight.grad.data, zero),  # type: ignore[union-attr]
    "a row": (lambda loop: loop.weight.grad[1], zero),  # type: ignore[index]
    "NumPy": (lambda loop: _numpy(loop.weight.grad), lambda kept: kept.fill(0)),  # type: ignore[arg-type]
    "a list": (lambda loop: [p.grad for p in loop.model.parameters()], lambda kept: list(map(zero, kept))),
}


@pytest.mark.parametrize("taken", [pytest.param(name, marks=[on_cpu_only] * (name == "NumPy")) for name in GRADIENTS])
def test_a_gradient_that_is_written_after_the_step(taken: str) -> None:
    take, write = GRADIENTS[taken]
    plain, loop = Loop(), Loop()
    with instep.attach(loop.model, loop.optimizer, defer=True, bucket_bytes=SMALL) as overlap:
        for i in range(STEPS):
            for one in (plain, loop):
                one.backward(i)
                kept = take(one)
                one.optimizer.step()
                write(kept)
                del kept
                one.optimizer.zero_grad()
            overlap.synchronize()
            assert (
                first_difference(
                    training_state(plain.model, plain.optimizer), training_state(loop.model, loop.optimizer)
                )
                is None
            )


class Flat(nn.Module):
    """Its parameters, and their gradients, are views of two flat tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        parameters = list(self.parameters())
        self.values = torch.cat([p.data.flatten() for p in parameters])
        self.gradients = torch.zeros_like(self.values)
        begin = 0
        for p in parameters:
            p.data = self.values[begin : begin + p.numel()].view_as(p)
            p.grad = self.gradients[begin : begin + p.numel()].view_as(p)
            begin += p.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x).tanh())
        return found


def test_flat_buffers() -> None:
    def run(attach: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Flat()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attach:
            instep.attach(model, optimizer, defer=True, bucket_bytes=1)
        found = []
        for i in range(STEPS):
            torch.manual_seed(i)
            model(torch.randn(3, 4)).square().sum().backward()
            model.gradients.clamp_(-1, 1)
            optimizer.step()
            model.gradients.zero_()
            found.append(model.values.clone())
        return found

    assert all(map(torch.equal, run(False), run(True)))
