"""Modules of torch's own classes whose ``compile()`` was called: torch 2.13 compiles them only if they have a hook."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import instep
from instep._refusals.model import _ONLY_WITH_HOOKS
from instep.errors import AttachError
from tests.parity.lockstep import WAYS


@pytest.fixture(autouse=True)
def _compiles_anew() -> None:
    torch.compiler.reset()


def counted(*hooks: Any) -> tuple[nn.Sequential, CompileCounter]:
    """A model with these hooks, and what counts its compiled graphs."""
    model, counter = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), CompileCounter()
    for hook in hooks:
        model.register_forward_pre_hook(hook)
    model.compile(backend=counter)
    return model, counter


def nothing(*_: Any) -> None: ...


def test_what_this_torch_does() -> None:
    graphs = []
    for hooks in ((), (nothing,)):
        torch.compiler.reset()  # what was left alone once is left alone later
        model, counter = counted(*hooks)
        model(torch.ones(2, 8))
        graphs.append(counter.frame_count)
    assert (graphs[0] != graphs[1]) == _ONLY_WITH_HOOKS, f"{graphs} graphs without and with a hook: change the rule"


def options_of(way: str) -> dict[str, Any]:
    return {} if way == "default" else dict(WAYS[way])


@pytest.mark.parametrize("way", ["default", *WAYS])
def test_a_model_that_is_compiled_only_with_hooks_is_refused(way: str) -> None:
    model, _ = counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not _ONLY_WITH_HOOKS:
        instep.attach(model, optimizer, **options_of(way)).detach()
        return
    with pytest.raises(AttachError, match=r"compile\(\) was called on a Sequential.*register_forward_pre_hook"):
        instep.attach(model, optimizer, **options_of(way))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("way", ["default", *WAYS])
def test_what_the_message_says_is_the_plain_loop(way: str) -> None:
    """As many graphs as without the line; nor is a part refused that gets no hook."""
    graphs = []
    for attaches in (False, True):
        torch.compiler.reset()
        model, counter = counted(nothing)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if attaches:
            instep.attach(model, optimizer, **options_of(way)).detach()
        model(torch.ones(2, 8))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("way", ["default", *WAYS])
def test_parts(way: str) -> None:
    model = Own()
    model.compile(backend=CompileCounter())  # a class of the user's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    instep.attach(model, optimizer, **options_of(way)).detach()
    model.layer.compile(backend=CompileCounter())
    if _ONLY_WITH_HOOKS and way not in ("backward", "two_pass"):
        with pytest.raises(AttachError, match=r"compile\(\) was called on a Linear"):
            instep.attach(model, optimizer, **options_of(way))
    else:
        instep.attach(model, optimizer, **options_of(way)).detach()
