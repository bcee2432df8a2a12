"""While a CUDA graph is recorded: on the emulated accelerator, which records none, and is told that it does."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._optim import kernels, undo
from instep._step import deferrable, in_backward, streams, update
from instep.errors import UncommittedStepError, UnsupportedOptimizerError
from tests.accelerator.recording import recorded

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def _on_the_device() -> Any:
    with torch.device("emu"):
        yield


def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streams, deferrable, update, in_backward):
        monkeypatch.setattr(module, "is_captured", lambda device: device.type == "emu")


def train(options: Mapping[str, Any] | None, steps: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    overlap = None if options is None else instep.attach(model, optimizer, bucket_bytes=1_000, **options)
    learn(model, optimizer, steps)
    return model, optimizer, overlap


def learn(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for i in range(first, first + steps):
        model(torch.full((2, 16), float(i))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "options", [{"schedule": "backward"}, {"schedule": "forward", "defer": True}], ids=["backward", "forward"]
)
def test_all_is_on_the_loops_stream(options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And waits for none of before: neither the side stream nor one that made gradients then."""
    plain = train(None, 6)[0]
    with torch.get_device_module("emu").stream(torch.Stream("emu")):
        model, optimizer, overlap = train(options, 3)
        overlap.synchronize()
    torch.accelerator.synchronize()
    recording(monkeypatch)
    monkeypatch.setattr(streams, "_is_captured", lambda stream: stream == torch.accelerator.current_stream())
    with recorded() as log:
        learn(model, optimizer, 3, first=3)
    assert len(log.streams) == 1
    assert log.count("wait") == 0
    monkeypatch.undo()
    overlap.detach()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_what_was_put_off_before_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, overlap = train({"schedule": "forward", "defer": True}, 3)
    recording(monkeypatch)
    with pytest.raises(UncommittedStepError, match=r"overlap\.synchronize"):
        model(torch.ones(2, 16))
    monkeypatch.undo()
    overlap.synchronize()
    learn(model, optimizer, 1)
    overlap.detach()


def test_undo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies would be written when the graph is replayed, and put back before. Nothing is written."""
    model, optimizer, overlap = train({"schedule": "backward", "undo": True}, 3)
    before = [p.detach().clone() for p in model.parameters()]
    recording(monkeypatch)
    monkeypatch.setattr(undo, "is_captured", lambda device: True)
    with pytest.raises(UnsupportedOptimizerError, match="without undo"):
        model(torch.ones(2, 16)).sum().backward()
    monkeypatch.undo()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    learn(model, optimizer, 1)
    overlap.detach()


def test_a_step_outside_of_the_graph_of_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, overlap = train({"schedule": "backward"}, 3)
    recording(monkeypatch)
    monkeypatch.setattr(in_backward, "is_captured", lambda device: True)
    model(torch.ones(2, 16)).sum().backward()
    monkeypatch.setattr(in_backward, "is_captured", lambda device: False)
    with pytest.raises(UncommittedStepError, match="the same graph"):
        optimizer.step()
    monkeypatch.undo()
    overlap.accept_torn()
    optimizer.zero_grad()
    learn(model, optimizer, 1)
    overlap.detach()


def test_torch_is_asked_whether_the_step_may_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is called directly would not ask for ``capturable=True``."""
    called: list[Any] = []
    monkeypatch.setattr(kernels.KernelCall, "run", lambda self, gradients: called.append(self))
    monkeypatch.setattr(kernels, "is_captured", lambda device: True)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with instep.attach(model, optimizer, schedule="backward"):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not called
