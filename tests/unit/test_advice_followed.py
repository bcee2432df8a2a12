"""What a message advises works when the loop does just that."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import instep
from instep.errors import StaleAttachmentError

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "defer": {"defer": True},
    "clipped": {"clip": instep.ClipNorm(1.0)},
}


class Loop:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.options = options
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        self.build()
        self.attach()
        self.step()

    def build(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def attach(self) -> None:
        self.overlap = instep.attach(self.model, self.optimizer, **self.options)

    def step(self) -> None:
        weight = self.model[0]._parameters.get("weight")
        dtype = torch.float32 if weight is None else weight.dtype
        self.model(torch.ones(2, 3, dtype=dtype)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# What goes wrong, and then what the message says.


def replaces(loop: Loop) -> None:
    loop.model[0].weight = nn.Parameter(torch.ones(3, 3))  # type: ignore[union-attr]


def replaces_in_both(loop: Loop) -> None:
    old = loop.model[0].weight
    replaces(loop)
    for group in loop.optimizer.param_groups:
        group["params"] = [loop.model[0].weight if p is old else p for p in group["params"]]


def drops_the_module_s(loop: Loop) -> None:
    del loop.optimizer.param_groups[0]["params"][0]
    loop.optimizer.state.clear()
    replaces(loop)
    gc.collect()


def converts(loop: Loop) -> None:
    loop.model.double()


def takes_one_out(loop: Loop) -> None:
    del loop.optimizer.param_groups[0]["params"][0]


def gives_one_twice(loop: Loop) -> None:
    loop.optimizer.param_groups.append({**loop.optimizer.param_groups[0], "params": [loop.model[0].weight]})


def prunes(loop: Loop) -> None:
    prune.random_unstructured(loop.model[0], "weight", 0.3)


def build_anew(loop: Loop) -> None:
    loop.overlap.detach()
    loop.build()
    loop.attach()


def attach_again(loop: Loop) -> None:
    loop.overlap.detach()
    loop.attach()


def take_it_out(loop: Loop) -> None:
    loop.optimizer.param_groups.pop()


ANEW = r"detach\(\), build the optimizer anew.*, and attach again"
STALE: dict[Callable[[Loop], None], tuple[str, Callable[[Loop], None]]] = {
    replaces: (ANEW, build_anew),
    replaces_in_both: (r"detach\(\), and attach again, with the same optimizer", attach_again),
    converts: (ANEW, build_anew),
    takes_one_out: (r"detach\(\) before taking .* or now, and attach again after", attach_again),
    gives_one_twice: ("Take it out of the groups it has come into", take_it_out),
    prunes: (r"detach\(\), and attach again, with the same optimizer", attach_again),
}


@pytest.mark.parametrize("wrong", STALE, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_stale_attachment(way: str, wrong: Callable[[Loop], None]) -> None:
    said, followed = STALE[wrong]
    loop = Loop(WAYS[way])
    wrong(loop)
    with pytest.raises(StaleAttachmentError, match=said) as told:
        loop.step()
    assert "fully_shard" not in str(told.value)
    followed(loop)
    loop.step()
    loop.overlap.synchronize()
    loop.overlap.detach()


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_a_parameter_that_is_gone(way: str) -> None:
    loop = Loop(WAYS[way])
    drops_the_module_s(loop)
    with pytest.raises(StaleAttachmentError) as told:
        instep.attached(loop.model)._parts.schedule.parameters[0].get()  # type: ignore[union-attr]
    assert "no longer exists. detach(), build the optimizer anew" in str(told.value)
    build_anew(loop)
    loop.step()
    loop.overlap.detach()


def test_an_optimizer_that_is_gone() -> None:
    loop = Loop({"schedule": "backward"})
    del loop.optimizer
    with pytest.raises(StaleAttachmentError, match=r"Call instep.attached\(model\).detach\(\), and attach another one"):
        loop.model(torch.ones(2, 3)).sum().backward()
    overlap = instep.attached(loop.model)
    assert overlap is not None
    overlap.detach()
    loop.build()
    loop.attach()
    loop.step()
    loop.overlap.detach()
