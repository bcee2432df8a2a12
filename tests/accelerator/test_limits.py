"""What docs/accelerators.md says that a loop must know."""

import pytest
import torch
from torch import nn

import instep
from instep.errors import TornStepError, UncommittedStepError
from tests.accelerator.device import emu
from tests.accelerator.loops import WAYS
from tests.accelerator.recording import recorded
from tests.inside import after_updates

pytestmark = pytest.mark.accelerator


@pytest.fixture
def model() -> nn.Module:
    with torch.device("emu"):
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


@pytest.mark.parametrize("synchronizes", [False, True])
def test_a_stream_that_waits_before_the_forward_and_reads_after_it(model: nn.Module, synchronizes: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="forward", defer=True)
    x = torch.ones(2, 16, device="emu")
    other = torch.Stream("emu")
    with recorded() as log:
        model(x).sum().backward()
        optimizer.step()
        other.wait_stream(torch.accelerator.current_stream())
        model(x)
        with emu().stream(other):
            if synchronizes:
                overlap.synchronize()
            copies = [p.detach().clone() for p in model.parameters()]
    assert {finding.kind for finding in log.findings} == (set() if synchronizes else {"race"})
    overlap.detach()
    assert copies


def test_a_forward_on_another_stream_after_buckets_were_read_in_another_order(model: nn.Module) -> None:
    """The last bucket first: whoever comes later must come after that one, too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=1)
    x = torch.ones(2, 16, device="emu")
    other = torch.Stream("emu")
    with recorded() as log:
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            other.wait_stream(torch.accelerator.current_stream())
            read = [p.sum() for p in reversed(list(model.parameters()))]
            with emu().stream(other), torch.no_grad():
                model(x)
            torch.accelerator.current_stream().wait_stream(other)
    log.assert_ordered()
    overlap.detach()
    assert read


def ctrl_c(parameters: list[torch.Tensor]) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c(model: nn.Module, way: str) -> None:
    """In an update of torch's own, as those are that wait. It reaches the loop once, on the loop's own stream; then
    the step is torn, or was put back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    overlap = instep.attach(model, optimizer, bucket_bytes=1, **WAYS[way])
    x = torch.ones(2, 16, device="emu")

    def train() -> None:
        model(x).sum().backward()
        optimizer.step()

    def train_and_use() -> None:
        train()
        model(x)  # whoever comes next to what was put off is told

    with recorded() as log:
        train()
        optimizer.zero_grad()
        with after_updates(ctrl_c), pytest.raises(KeyboardInterrupt):
            train_and_use()
        if "undo" not in way:
            with pytest.raises(TornStepError):
                model(x)
        overlap.accept_torn()
        optimizer.zero_grad()
        train()
        weights = [p.detach().clone() for p in model.parameters()]
    log.assert_ordered()
    overlap.detach()
    assert all(bool(weight.isfinite().all()) for weight in weights)


@pytest.mark.parametrize("what", ["weight", "gradient", "state"])
def test_a_write_through_what_was_taken_before_the_step(model: nn.Module, what: str) -> None:
    """Such a parameter is stepped at once, on the loop's stream: nobody races."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    overlap = instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=1)
    x = torch.ones(2, 16, device="emu")
    last = list(model.parameters())[-1]
    with recorded() as log:
        model(x).sum().backward()
        optimizer.step()
        overlap.synchronize()
        model(x).sum().backward()
        held = {"weight": last.detach(), "gradient": last.grad, "state": optimizer.state[last]["momentum_buffer"]}
        taken = held.pop(what)
        held.clear()
        optimizer.step()
        assert overlap.state == "pending"  # of the others
        optimizer.zero_grad()
        taken.mul_(2.0)
        model(x)
    log.assert_ordered()
    overlap.detach()


@pytest.mark.races
def test_a_write_that_races_with_an_update_under_way(model: nn.Module) -> None:
    """Whoever waits for it is told, and the step is torn: nobody knows which came first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    overlap = instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=1)
    x = torch.ones(2, 16, device="emu")
    last = list(model.parameters())[-1]
    with recorded() as log:
        model(x).sum().backward()
        optimizer.step()
        overlap.synchronize()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        vars(optimizer)["state"][last]["momentum_buffer"].mul_(2.0)  # behind the property, which would wait
        with pytest.raises(UncommittedStepError, match=r"while the update was due.*overlap\.synchronize\(\)"):
            model(x)
        with pytest.raises(TornStepError, match=r"3 parameters were updated .* and 1 may have been updated or not"):
            model(x)
    assert {finding.kind for finding in log.findings} == {"race"}
    overlap.accept_torn()
    overlap.detach()


@pytest.mark.parametrize("waits", [False, True])
def test_a_gradient_hook_with_a_stream_of_its_own(model: nn.Module, waits: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other, norms = torch.Stream("emu"), []

    def log_norm(gradient: torch.Tensor) -> None:
        other.wait_stream(torch.accelerator.current_stream())
        with emu().stream(other):
            norms.append(gradient.norm())
        if waits:
            torch.accelerator.current_stream().wait_stream(other)

    for parameter in model.parameters():
        parameter.register_hook(log_norm)
    overlap = instep.attach(model, optimizer, bucket_bytes=1, schedule="backward")
    x = torch.ones(2, 16, device="emu")
    with recorded() as log:
        for _ in range(3):
            model(x).sum().backward()
            torch.accelerator.current_stream().wait_stream(other)
            optimizer.step()
            optimizer.zero_grad()
    assert {finding.kind for finding in log.findings} == (set() if waits else {"lifetime"})
    overlap.detach()


@pytest.mark.parametrize("synchronizes", [False, True])
def test_a_gradient_of_the_loops_own_that_another_stream_has_allocated(model: nn.Module, synchronizes: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=1)
    x = torch.ones(2, 16, device="emu")
    other = torch.Stream("emu")
    with recorded() as log:
        for _ in range(3):
            loss = model(x).sum()
            with emu().stream(other):
                if synchronizes:
                    overlap.synchronize()
                received = [torch.empty_like(p) for p in model.parameters()]
            loss.backward()
            other.wait_stream(torch.accelerator.current_stream())
            with emu().stream(other):
                for mine, parameter in zip(received, model.parameters(), strict=True):
                    assert parameter.grad is not None
                    mine.copy_(parameter.grad)
                    parameter.grad.record_stream(other)
            torch.accelerator.current_stream().wait_stream(other)
            for parameter in reversed(list(model.parameters())):
                parameter.grad = received.pop()
            del mine, parameter
            optimizer.step()
            optimizer.zero_grad()
            other.wait_stream(torch.accelerator.current_stream())
    assert {finding.kind for finding in log.findings} == (set() if synchronizes else {"lifetime"})
    overlap.detach()
