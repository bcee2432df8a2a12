"""torch swaps what a parameter is (``torch.utils.swap_tensors``), to convert or to load it, and the loop goes on."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import instep
from instep.errors import StaleAttachmentError, UncommittedStepError

STEPS, SMALL = 7, 300  # bytes: a bucket of each matrix
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "backward": {"schedule": "backward", "bucket_bytes": SMALL},
    "undo": {"schedule": "backward", "bucket_bytes": SMALL, "undo": True},
    "defer": {"schedule": "forward", "bucket_bytes": SMALL, "defer": True},
}


def load(model: nn.Module, *, assign: bool = False) -> None:
    model.load_state_dict(
        {name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()}, assign=assign
    )


def swap(model: nn.Module) -> None:
    old: Any = next(iter(model.parameters()))
    torch.utils.swap_tensors(old, nn.Parameter(torch.full_like(old, 0.2)))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "cpu": lambda model: model.cpu(),
    "double": lambda model: model.double(),
    "load": load,
    "assign": lambda model: load(model, assign=True),
}


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def make(kind: type[nn.Parameter] | type[TwoTensor] = nn.Parameter) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    if kind is TwoTensor:
        weight = model[0].weight.detach()
        model[0].weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    return model


def train(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, change: Callable[[nn.Module], object], at: int, when: str
) -> list[torch.Tensor]:
    for number in range(STEPS):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(model[2].weight.dtype)
        model(inputs).pow(2).sum().backward()
        if number == at and when == "after backward":
            change(model)
        optimizer.step()
        if number == at and when == "after step":
            change(model)
        optimizer.zero_grad()
        if number == at and when == "after zero_grad":
            change(model)
    found: list[torch.Tensor] = []
    for p in model.parameters():
        state = [value for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        for value in (p.detach(), *state):
            found += [value.a, value.b] if isinstance(value, TwoTensor) else [value]
    return [value.clone() for value in found]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [nn.Parameter, TwoTensor])
@pytest.mark.parametrize("when", ["after backward", "after step", "after zero_grad"])
@pytest.mark.parametrize("at", [1, STEPS - 2])
@pytest.mark.parametrize("change", CHANGES)
def test_the_default_goes_on(change: str, at: int, when: str, kind: Any) -> None:
    if kind is TwoTensor and change in ("load", "assign"):
        pytest.skip("torch swaps what it converts of a subclass, and copies what it loads")
    plain, model = make(kind), make(kind)
    expected = train(plain, sgd(plain), CHANGES[change], at, when)
    optimizer = sgd(model)
    overlap = instep.attach(model, optimizer)
    assert all(map(torch.equal, train(model, optimizer, CHANGES[change], at, when), expected))
    if change in ("cpu", "double"):  # what is loaded comes without a gradient, and such a step writes nothing
        assert overlap.step_count == STEPS


@pytest.mark.parametrize("when", ["after step", "after zero_grad"])
@pytest.mark.parametrize("at", [1, STEPS - 2])
@pytest.mark.parametrize("change", ["cpu", "load", "assign"])
@pytest.mark.parametrize("way", ["backward", "undo", "defer"])
def test_so_does_every_schedule_between_steps(way: str, change: str, at: int, when: str) -> None:
    plain, model = make(), make()
    expected = train(plain, sgd(plain), CHANGES[change], at, when)
    optimizer = sgd(model)
    overlap = instep.attach(model, optimizer, **WAYS[way])
    assert all(map(torch.equal, train(model, optimizer, CHANGES[change], at, when), expected))
    if way == "backward":  # the hooks of the tensors that were swapped out are nobody's any more
        assert overlap.stats()["freed_bytes"] == STEPS * sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("at", [1, STEPS - 2])
@pytest.mark.parametrize("way", ["default", "backward", "undo"])
def test_a_parameter_that_the_loop_swaps(way: str, at: int) -> None:
    plain, model = make(), make()
    expected = train(plain, sgd(plain), swap, at, "after zero_grad")
    optimizer = sgd(model)
    instep.attach(model, optimizer, **WAYS[way])
    assert all(map(torch.equal, train(model, optimizer, swap, at, "after zero_grad"), expected))


@pytest.mark.parametrize("kind", [nn.Parameter, TwoTensor])
@pytest.mark.parametrize("way", ["backward", "undo", "defer"])
def test_another_dtype_is_told_of_at_the_next_forward(way: str, kind: Any) -> None:
    model = make(kind)
    optimizer = sgd(model)
    instep.attach(model, optimizer, **WAYS[way])
    with pytest.raises(StaleAttachmentError, match=r"was torch.float32 .* is torch.float64 .*detach\(\), build"):
        train(model, optimizer, CHANGES["double"], 1, "after zero_grad")


@pytest.mark.parametrize("change", CHANGES)
def test_what_backward_has_stepped_is_not_swapped(change: str) -> None:
    model = make()
    optimizer = sgd(model)
    instep.attach(model, optimizer, **WAYS["backward"])
    with pytest.raises(UncommittedStepError, match=r"'0\.weight' was used between"):
        train(model, optimizer, CHANGES[change], 1, "after backward")


@pytest.mark.parametrize("way", ["default", "undo", "defer"])
@pytest.mark.parametrize("mode", [False, True], ids=["", "default device"])
def test_a_parameter_made_of_a_parameter(way: str, mode: bool) -> None:
    """``nn.Parameter(weight)`` asks for the class of the weight, which is another one while instep watches it."""

    def copied(model: nn.Module) -> None:
        for p in model.parameters():
            with torch.device("cpu") if mode else nullcontext():
                assert type(nn.Parameter(p)) is nn.Parameter
        found = nn.Embedding.from_pretrained(next(iter(model.parameters())))
        assert found.weight.untyped_storage().data_ptr() == next(iter(model.parameters())).untyped_storage().data_ptr()

    for when in ("after backward", "after step"):
        for at in range(STEPS):
            plain, model = make(), make()
            expected = train(plain, sgd(plain), copied, at, when)
            optimizer = sgd(model)
            instep.attach(model, optimizer, **WAYS[way])
            assert all(map(torch.equal, train(model, optimizer, copied, at, when), expected))


@contextmanager
def others_in_place(model: nn.Module) -> Iterator[None]:
    """As tensordict's ``params.data.to_module(model)``: other parameters stand in the modules for a moment."""
    places = [(module._parameters, name, p) for module in model.modules() for name, p in module._parameters.items()]
    for table, name, p in places:
        assert p is not None
        table[name] = nn.Parameter(p.data)
    yield
    for table, name, p in places:
        table[name] = p


@pytest.mark.parametrize("at", [1, STEPS - 2])
@pytest.mark.parametrize("way", WAYS)
def test_others_stand_in_for_a_moment(way: str, at: int) -> None:
    def evaluate(model: nn.Module) -> None:
        with torch.no_grad(), others_in_place(model):
            seen.append(model(torch.ones(2, 8)).clone())

    seen: list[torch.Tensor] = []
    plain, model = make(), make()
    expected = train(plain, sgd(plain), evaluate, at, "after zero_grad")
    optimizer = sgd(model)
    instep.attach(model, optimizer, **WAYS[way])
    assert all(map(torch.equal, train(model, optimizer, evaluate, at, "after zero_grad"), expected))
    assert torch.equal(*seen)


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("way", ["backward", "undo", "defer"])
def test_others_that_get_gradients_are_told_of(way: str, imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", torch) if imported else None
    model = make()
    optimizer = sgd(model)
    instep.attach(model, optimizer, **WAYS[way])
    with others_in_place(model), pytest.raises(StaleAttachmentError, match=r"replaced after attach or taken") as told:
        model(torch.ones(2, 8))
    assert (
        "under torch.no_grad(), or attach the module whose forward does it. Else detach()" in str(told.value)
    ) == imported


def test_torch_has_what_this_relies_on() -> None:
    """A swapped parameter has another implementation, to which nobody has told Python's table of hooks."""
    assert is_traceable_wrapper_subclass(make(TwoTensor)[0].weight)
    weight: Any = make()[0].weight
    heard: list[object] = []
    weight.register_post_accumulate_grad_hook(heard.append)
    before = weight._cdata
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(8, 8)))
    assert weight._cdata != before
    weight.sum().backward()
    assert not heard
    weight._post_accumulate_grad_hooks = None
    weight.register_post_accumulate_grad_hook(heard.append)
    weight.sum().backward()
    assert len(heard) == 1
