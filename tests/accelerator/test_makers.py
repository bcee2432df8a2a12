"""Models whose gradients are made on several streams, and have their memory from several."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import instep
from tests.accelerator.device import emu
from tests.accelerator.loops import WAYS
from tests.accelerator.recording import recorded
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.accelerator

STEPS = 6
ONE_BUCKET = 10**7


class Towers(nn.Module):
    """Each on its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(10, 10), nn.Linear(10, 10)
        self.stream = torch.Stream("emu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.accelerator.current_stream()
        self.stream.wait_stream(here)
        with emu().stream(self.stream):
            other = self.other(x)
        one = self.one(x)
        here.wait_stream(self.stream)
        return one * other


class Branch(nn.Module):
    """A branch on a stream that waits once, and then makes tensors before any of its modules runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))
        self.branch = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))
        self.stream = torch.Stream("emu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.accelerator.current_stream()
        self.stream.wait_stream(here)
        trunk = self.trunk(x)
        with emu().stream(self.stream):
            mixed = (x * 2).sin() @ (torch.ones(10, 10) + 1)
            branch = self.branch(mixed)
        here.wait_stream(self.stream)
        return trunk + branch


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(5)))


class Train:
    """Steps of a loop, each on the stream that ``stream_of`` gives for its number."""

    def __init__(self, stream_of: Callable[[int, list[torch.Stream]], torch.Stream]) -> None:
        self.stream_of = stream_of

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Any], None]) -> None:
        home = torch.accelerator.current_stream()
        streams = [home, torch.Stream("emu")]
        last = home
        for i in range(STEPS):
            stream = self.stream_of(i, streams)
            stream.wait_stream(last)
            with emu().stream(stream):
                # The loss of the step before is alive: with its graph, and the streams of that.
                loss = model(torch.full((4, 10), 0.1 * (i + 1))).square().mean()
                backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            last = stream
        home.wait_stream(last)
        del loss


LOOPS: Mapping[str, Train] = {
    "one stream": Train(lambda i, streams: streams[0]),
    "warmed up on another": Train(lambda i, streams: streams[i < 1]),
    "in turns": Train(lambda i, streams: streams[i % 2]),
}
MODELS: Mapping[str, Callable[[], nn.Module]] = {"towers": Towers, "branch": Branch, "layers": layers}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **WAYS,
    "forward, clipped": {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(1e6)},
    "undo, clipped": {"schedule": "backward", "undo": True, "clip": instep.ClipNorm(1e6)},
    "backward, finite": {"schedule": "backward", "nonfinite": "raise"},
    "in two passes": {"schedule": "backward", "clip": instep.ClipNorm(1e6, mode="two_pass")},
}


def compare(
    make: Callable[[], nn.Module],
    loop: Callable[[nn.Module, torch.optim.Optimizer, Callable[[Any], None]], None],
    options: Mapping[str, Any],
) -> None:
    """Plain and attached: the same bits, and nothing is left to chance."""
    found = []
    for attached in (False, True):
        with torch.device("emu"), recorded() as log:
            torch.manual_seed(0)
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            overlap = instep.attach(model, optimizer, **options) if attached else None
            loop(model, optimizer, torch.Tensor.backward if overlap is None else overlap.backward)
            if overlap is not None:
                overlap.detach()
            found.append([value.cpu() for value in model.state_dict().values()])
        log.assert_ordered()
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("bucket_bytes", [450, ONE_BUCKET])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", MODELS)
def test_streams(model: str, loop: str, options: str, bucket_bytes: int) -> None:
    compare(MODELS[model], LOOPS[loop], {**OPTIONS[options], "bucket_bytes": bucket_bytes})


class Monitored(nn.Module):
    """Its head is looked at on a stream of its own, which the loop joins after backward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = layers(), nn.Linear(10, 10)
        self.stream = torch.Stream("emu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trunk = self.trunk(x)
        self.stream.wait_stream(torch.accelerator.current_stream())
        with emu().stream(self.stream):
            self.seen = self.head(trunk.detach()).sum().detach()
        self.looked_at = trunk  # until the loop has joined
        return self.head(trunk)


class Evaluated(nn.Module):
    """All of it is evaluated on a stream of its own while backward runs. It has its weights itself: no module in it is
    seen to run."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [f"weight{i}" for i in range(4)]
        for name in self.weights:
            self.register_parameter(name, nn.Parameter(torch.randn(10, 10) / 3))
        self.stream = torch.Stream("emu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.weights:
            x = torch.tanh(x @ getattr(self, name))
        return x


class HeadEvaluated(nn.Module):
    """Its head is called by itself, on a stream of its own, while backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = layers(), nn.Linear(10, 10)
        self.stream = torch.Stream("emu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.trunk(x))
        return found


def monitor(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[Any], None]) -> None:
    """The stream on which weights are read is joined between backward and ``step()``."""
    for i in range(STEPS):
        x = torch.full((4, 10), 0.1 * (i + 1))
        loss = model(x).square().mean()
        if not isinstance(model, Monitored):
            model.stream.wait_stream(torch.accelerator.current_stream())
            with emu().stream(model.stream), torch.no_grad():
                model.seen = (model.head if isinstance(model, HeadEvaluated) else model)(x).sum()
        backward(loss)
        torch.accelerator.current_stream().wait_stream(model.stream)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("bucket_bytes", [450, ONE_BUCKET])
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("model", [Monitored, Evaluated, HeadEvaluated])
def test_weights_read_on_a_stream_that_is_joined_after_backward(
    model: type[nn.Module], options: str, bucket_bytes: int
) -> None:
    compare(model, monitor, {**WAYS[options], "bucket_bytes": bucket_bytes})


def replicated(schedule: str) -> None:
    compare(
        lambda: instep.replicate(Towers()), LOOPS["one stream"], {"schedule": schedule, "defer": schedule == "forward"}
    )


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_replicated(two_emulated_ranks: RankPool, schedule: str) -> None:
    two_emulated_ranks.run(replicated, schedule)
