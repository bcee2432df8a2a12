"""Loops whose streams wait for one another only where the plain loop needs it."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import instep
from tests import net
from tests.accelerator.device import emu
from tests.accelerator.loops import SMALL, WAYS
from tests.accelerator.recording import recorded

pytestmark = pytest.mark.accelerator

Copies = list[torch.Tensor]
ITERATIONS = 3


class Program:
    """A loop on two streams, beside a third one, which asks the attachment where it has one."""

    def __init__(self, options: Mapping[str, Any] | None, model: nn.Module) -> None:
        self.model = model
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        self.overlap: Any = None
        if options is not None:
            self.overlap = instep.attach(model, self.optimizer, **{"bucket_bytes": SMALL, **options})
        self.first = torch.accelerator.current_stream()
        self.second, self.third = torch.Stream("emu"), torch.Stream("emu")
        self.copies: Copies = []

    def loss(self, i: int) -> torch.Tensor:
        return self.model(torch.full((4, 32), 0.1 * (i + 1))).square().sum()

    def backward(self, loss: torch.Tensor) -> None:
        if self.overlap is None:
            loss.backward()
        else:
            self.overlap.backward(loss)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def learn(self, i: int) -> None:
        self.backward(self.loss(i))
        self.step()

    def read(self) -> None:
        self.copies += [p.detach().clone() for p in self.model.parameters()]

    def forward(self, i: int) -> None:
        with torch.no_grad():
            self.copies.append(self.loss(i))


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def compare(
    options: Mapping[str, Any], body: Callable[[Program], None], make: Callable[[], nn.Module] = layers
) -> None:
    """Run ``body`` plain and attached: the same bits, and both times nothing left to chance."""
    found = []
    for chosen in (None, options):
        with torch.device("emu"), recorded() as log:
            torch.manual_seed(0)
            program = Program(chosen, make())
            body(program)
            if program.overlap is not None:
                program.overlap.detach()
            found.append([t.cpu() for t in (*program.copies, *program.model.state_dict().values())])
            del program
        log.assert_ordered()
    assert all(map(torch.equal, *found))


def test_two_streams_read() -> None:
    """The other one first: the loop's own does not wait for it."""

    def body(program: Program) -> None:
        for i in range(ITERATIONS):
            program.learn(i)
            program.second.wait_stream(program.first)
            with emu().stream(program.second):
                program.forward(i)
            program.forward(i)
            program.first.wait_stream(program.second)

    compare({"schedule": "forward", "defer": True}, body)


@pytest.mark.parametrize("way", WAYS)
def test_synchronize_on_another_stream(way: str) -> None:
    """The plain loop's waits; instep's need not."""

    def body(program: Program) -> None:
        for i in range(ITERATIONS):
            program.learn(i)
            if program.overlap is None:
                program.second.wait_stream(program.first)
            with emu().stream(program.second):
                if program.overlap is not None:
                    program.overlap.synchronize()
                program.read()
            program.first.wait_stream(program.second)

    compare(WAYS[way], body)


@pytest.mark.parametrize("way", WAYS)
def test_step_on_another_stream_that_reads_after_the_forward(way: str) -> None:
    """It has no need to wait for the forward's stream."""

    def body(program: Program) -> None:
        for i in range(ITERATIONS):
            program.backward(program.loss(i))
            program.second.wait_stream(program.first)
            with emu().stream(program.second):
                program.step()
            program.first.wait_stream(program.second)
            program.forward(i)
            with emu().stream(program.second):
                program.read()
            program.first.wait_stream(program.second)

    compare(WAYS[way], body)


def test_synchronize_after_a_forward_on_another_stream() -> None:
    def body(program: Program) -> None:
        for i in range(ITERATIONS):
            program.learn(i)
            program.second.wait_stream(program.first)
            with emu().stream(program.second):
                program.forward(i)
            if program.overlap is None:
                program.third.wait_stream(program.first)
            with emu().stream(program.third):
                if program.overlap is not None:
                    program.overlap.synchronize()
                program.read()
            program.first.wait_stream(program.second)
            program.first.wait_stream(program.third)

    compare({"schedule": "forward", "defer": True}, body)


@pytest.mark.parametrize("undo", [True, "host"])
def test_put_back_by_another_stream(undo: Any) -> None:
    """The loop's stream, which does not wait for that one, finds the old weights, too."""

    def body(program: Program) -> None:
        for i in range(ITERATIONS):
            program.second.wait_stream(program.first)
            program.backward(program.loss(i))
            with emu().stream(program.second):
                program.read()
            program.read()
            program.first.wait_stream(program.second)
            program.step()

    compare({"schedule": "backward", "undo": undo}, body)


@pytest.mark.parametrize("way", WAYS)
def test_backward_is_called_on_another_stream(way: str) -> None:
    """The forward's stream, on which gradients are made, goes on without the one that has called."""

    def body(program: Program) -> None:
        for i in range(ITERATIONS):
            loss = program.loss(i)
            program.second.wait_stream(program.first)
            with emu().stream(program.second):
                program.backward(loss)
            program.copies += [torch.full((32, 32), 3.0) for _ in range(8)]
            program.second.wait_stream(program.first)
            with emu().stream(program.second):
                program.step()
            program.first.wait_stream(program.second)

    compare(WAYS[way], body)


class SparseFirst(nn.Module):
    """Its last gradient is one that a ``GradScaler`` leaves to ``step()``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32, sparse=True)
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.embedding(torch.tensor([1, 2, 3, 1])))


def test_put_back_in_a_backward_that_another_stream_has_called() -> None:
    def body(program: Program) -> None:
        scaler = torch.amp.GradScaler("emu", init_scale=2.0**4) if program.overlap is None else scalers[0]
        for i in range(ITERATIONS):
            loss = scaler.scale(program.loss(i))
            program.second.wait_stream(program.first)
            with emu().stream(program.second):
                program.backward(loss)
            program.read()
            program.second.wait_stream(program.first)
            with emu().stream(program.second):
                scaler.step(program.optimizer)
                scaler.update()
                program.optimizer.zero_grad()
            program.first.wait_stream(program.second)

    scalers = [torch.amp.GradScaler("emu", init_scale=2.0**4)]
    compare({"schedule": "backward", "undo": True, "scaler": scalers[0]}, body, SparseFirst)


def test_the_optimizer_is_gone_before_weights_are_read() -> None:
    def body(program: Program) -> None:
        program.learn(0)
        program.optimizer = None
        gc.collect()
        last = time.monotonic() + net.SECONDS
        while program.overlap is not None and program.overlap.state == "pending" and time.monotonic() < last:
            time.sleep(0.001)
        program.read()

    compare({"schedule": "forward", "defer": True}, body)


def test_backward_does_not_wait_for_the_latest_bucket() -> None:
    """Each bucket is waited for when the next one has been stepped, and the last one where backward ends."""
    with torch.device("emu"), recorded() as log:
        program = Program({"schedule": "backward"}, layers())
        program.learn(0)
        program.overlap.detach()
    stepped: dict[str, int] = {}  # by event: how many kernels of the side stream it holds
    count, waited = 0, 0
    lag = []  # at each wait of the loop's stream: how many kernels it does not wait for
    side = next(stream for stream in log.streams if stream != "0.0")
    for kind, *rest in log.lines:
        if kind == "op" and rest[0] == side:
            count += 1
        elif kind == "record" and rest[1] == side:
            stepped[rest[0]] = count
        elif kind == "wait" and rest[1] == "0.0" and rest[0] in stepped:
            waited = max(waited, stepped[rest[0]])
            lag.append(count - waited)
    assert len(lag) >= 4
    assert all(lag[:-2]), lag
    assert lag[-1] == 0


def test_a_backward_that_raised_keeps_no_gradient() -> None:
    """And is torn at once."""

    def stop(gradient: torch.Tensor) -> None:
        raise KeyError

    with torch.device("emu"):
        program = Program({"schedule": "backward"}, layers())
        next(program.model.parameters()).register_hook(stop)
        gc.collect()
        before = emu().memory_allocated()
        with pytest.raises(KeyError):
            program.backward(program.loss(0))
        assert "torn" in repr(program.overlap)
        program.overlap.accept_torn()
        gc.collect()
        assert emu().memory_allocated() == before
        program.overlap.detach()
