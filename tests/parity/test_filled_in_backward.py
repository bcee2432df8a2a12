"""Hooks of a backward write what ``step()`` reads, after gradients that were there before: a bucket that is stepped in
backward would find what the last step has left."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import HyperparameterChangedError
from instep_tools.harness import first_difference, training_state
from tests.judged import own_steps_are_judged

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "backward": {"schedule": "backward", "bucket_bytes": 64},
    "one bucket": {"schedule": "backward", "bucket_bytes": 1 << 20},
    "undo": {"schedule": "backward", "bucket_bytes": 64, "undo": True},
}
STEPS = 6


class Scales(torch.optim.Optimizer):
    """Takes a number from somewhere, and multiplies the gradient with it."""

    def __init__(self, model: nn.Module, read: Callable[[Any, Any], float]) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.read = read
        self.model = model
        self.by_parameter: dict[Any, float] = {}
        self.by_name = {"scale": 1.0}
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * self.read(self, p))


def write_attribute(optimizer: Any, p: Any, value: float) -> None:
    p.scale = value


def write_tensor(optimizer: Any, p: Any, value: float) -> None:
    p.scale = torch.full((2000,), value)


def write_mapping(optimizer: Any, p: Any, value: float) -> None:
    optimizer.by_parameter[p] = value


def write_state(optimizer: Any, p: Any, value: float) -> None:
    optimizer.state[p]["scale"] = value


def write_own(optimizer: Any, p: Any, value: float) -> None:
    optimizer.scale = value


def write_dict(optimizer: Any, p: Any, value: float) -> None:
    optimizer.by_name["scale"] = value


def write_module(optimizer: Any, p: Any, value: float) -> None:
    optimizer.model[0].scale = value


def write_buffer(optimizer: Any, p: Any, value: float) -> None:
    optimizer.model[0].buffer.fill_(value)


PLACES: dict[str, tuple[Callable[[Any, Any, float], None], Callable[[Any, Any], float]]] = {
    "an attribute of parameters": (write_attribute, lambda o, p: getattr(p, "scale", 1.0)),
    "a tensor on parameters": (write_tensor, lambda o, p: float(p.scale[0]) if hasattr(p, "scale") else 1.0),
    "a mapping by parameter": (write_mapping, lambda o, p: o.by_parameter.get(p, 1.0)),
    "the state": (write_state, lambda o, p: o.state[p].get("scale", 1.0)),
    "an attribute": (write_own, lambda o, p: o.scale),
    "a dict": (write_dict, lambda o, p: o.by_name["scale"]),
    "an attribute of a module": (write_module, lambda o, p: getattr(o.model[0], "scale", 1.0)),
    "a buffer": (write_buffer, lambda o, p: float(o.model[0].buffer)),
}


class Training:
    """A loop whose first layer, the last one in backward, has a hook that writes for all parameters."""

    def __init__(self, place: str, way: str | None, since: int) -> None:
        write, read = PLACES[place]
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.model[0].register_buffer("buffer", torch.ones(()))
        self.optimizer = Scales(self.model, read)
        with own_steps_are_judged():
            self.overlap = None if way is None else instep.attach(self.model, self.optimizer, **WAYS[way])
        self._i = 0

        def fill(_: Any) -> None:
            if self._i >= since:
                for p in self.model.parameters():
                    write(self.optimizer, p, 1.0 / (1 + self._i))

        self.model[0].get_parameter("weight").register_post_accumulate_grad_hook(fill)

    def step(self, i: int) -> None:
        self._i = i
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        self.model(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_what_hooks_of_backward_fill_is_left_to_step(place: str, way: str) -> None:
    plain, attached = Training(place, None, 0), Training(place, way, 0)
    for i in range(STEPS):
        plain.step(i)
        attached.step(i)
        states = (training_state(loop.model, loop.optimizer) for loop in (plain, attached))
        assert first_difference(*states) is None, f"step {i + 1}"
    assert attached.overlap is not None
    assert bool(attached.overlap.plan.judged) == (way != "default")
    assert all("is written in backward" in line for line in attached.overlap.plan.judged)
    attached.overlap.detach()


@pytest.mark.parametrize("way", ["backward", "undo"])
@pytest.mark.parametrize("place", [name for name in PLACES if name not in ("an attribute of a module", "a buffer")])
def test_what_hooks_begin_to_fill_later_is_never_silent(place: str, way: str) -> None:
    plain, attached = Training(place, None, 3), Training(place, way, 3)
    assert attached.overlap is not None
    raises = way == "backward" or place == "the state"  # a write into state that is put back is lost, and said to be
    with attached.overlap as overlap:
        for i in range(STEPS):
            plain.step(i)
            if i == 3 and raises:
                with pytest.raises(HyperparameterChangedError):
                    attached.step(i)
                overlap.accept_torn()
                attached.optimizer.zero_grad()
                break
            attached.step(i)
            states = (training_state(loop.model, loop.optimizer) for loop in (plain, attached))
            assert first_difference(*states) is None, f"step {i + 1}"


@pytest.mark.parametrize("i", [1, 2])
def test_what_hooks_put_on_parameters_stays_where_a_step_of_torchs_is_put_back(i: int) -> None:
    """torch's own optimizers write nothing there."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward", undo=True, bucket_bytes=64) as overlap:
        for number in range(3):
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p, number=number: setattr(p, "seen", number))
            model(torch.ones(2, 4)).square().sum().backward()
            if number == i:
                optimizer.param_groups[0]["lr"] = 0.01  # backward has stepped with the other one: put back
            optimizer.step()
            optimizer.zero_grad()
            assert [p.seen for p in model.parameters()] == [number] * 4  # type: ignore[attr-defined]
        assert overlap.redo_count == 1
