"""What the emulated accelerator cannot show: CUDA graphs, compiled kernels, and a device that lags behind the host.

``INSTEP_TEST_ACCELERATOR=cuda pytest -m accelerator tests/accelerator/test_cuda.py``
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import UncommittedStepError
from tests.accelerator import ACCELERATOR

pytestmark = [pytest.mark.accelerator, pytest.mark.skipif(ACCELERATOR != "cuda", reason="of CUDA")]
WAYS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
}
Train = Callable[[Mapping[str, Any] | None], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    with torch.device("cuda"):
        yield
    torch.use_deterministic_algorithms(False)


def assert_equal(train: Train, way: str) -> None:
    expected, found = train(None), train(WAYS[way])
    assert all(map(torch.equal, expected, found))


def layers(width: int = 256, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())])


class Iteration:
    """One iteration of a loop, over the same input tensor each time."""

    def __init__(self, options: Mapping[str, Any] | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model: Any = model
        self.optimizer = optimizer
        self.overlap = None if options is None else instep.attach(model, optimizer, **options)
        self.x = torch.randn(32, 256)

    def run(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.x.copy_(torch.randn(32, 256))

    def weights(self) -> list[torch.Tensor]:
        if self.overlap is not None:
            self.overlap.detach()
        return [p.detach().clone() for p in self.model.parameters()]


def capturable(options: Mapping[str, Any] | None) -> Iteration:
    model = layers()
    return Iteration(options, model, torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, foreach=True))


def warmed_up(iteration: Iteration) -> None:
    """As torch's manual has it: on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            iteration.run()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "undo"])
def test_a_graph_of_a_whole_iteration(way: str) -> None:
    def train(options: Mapping[str, Any] | None) -> list[torch.Tensor]:
        iteration = capturable(options)
        warmed_up(iteration)
        if iteration.overlap is not None:
            iteration.overlap.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            iteration.run()
        for seed in range(5):
            iteration.fill(seed)
            graph.replay()
        return iteration.weights()

    assert_equal(train, way)


def test_what_was_put_off_before_a_graph_is_not_recorded() -> None:
    iteration = capturable(WAYS["forward"])
    warmed_up(iteration)
    assert iteration.overlap is not None
    with pytest.raises(UncommittedStepError, match=r"overlap\.synchronize"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        iteration.run()
    iteration.overlap.synchronize()
    iteration.run()
    iteration.overlap.detach()


@pytest.mark.parametrize("way", WAYS)
def test_graphed_callables(way: str) -> None:
    def train(options: Mapping[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(layers(), nn.Linear(256, 256))
        torch.cuda.make_graphed_callables(model[0], (torch.randn(32, 256, requires_grad=True),))
        iteration = Iteration(options, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        iteration.x.requires_grad_()
        for seed in range(5):
            with torch.no_grad():
                iteration.fill(seed)
            iteration.run()
        return iteration.weights()

    assert_equal(train, way)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled(way: str, mode: str) -> None:
    def train(options: Mapping[str, Any] | None) -> list[torch.Tensor]:
        model = layers(depth=2)
        iteration = Iteration(options, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        iteration.model = torch.compile(model, mode=mode)
        for seed in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            iteration.fill(seed)
            iteration.run()
        iteration.model = model
        return iteration.weights()

    assert_equal(train, way)


class _Late(torch.autograd.Function):
    """Its backward takes the device some milliseconds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.cuda._sleep(3_000_000)
        return gradients[0].clone()


class Lagging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Late.apply(nn.functional.gelu(layer(x)))
        return x


class SlowAdamW(torch.optim.AdamW):
    """Its step takes the device some milliseconds."""

    def step(self, closure: Any = None) -> Any:
        torch.cuda._sleep(3_000_000)
        return super().step(closure)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, SlowAdamW])
@pytest.mark.parametrize("way", WAYS)
def test_a_device_that_lags_behind(way: str, kind: Any, options: Mapping[str, Any]) -> None:
    """Weights are copied by another stream, and memory that gradients had is written at once."""

    def train(given: Mapping[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Lagging()
        optimizer = kind(model.parameters(), lr=1e-3, **options)
        overlap = None if given is None else instep.attach(model, optimizer, bucket_bytes=1 << 20, **given)
        other, seen = torch.cuda.Stream(), []
        for seed in range(6):
            torch.manual_seed(seed)
            model(torch.randn(64, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            written = [torch.full((512, 512), 7.0) for _ in range(8)]
            if seed % 2:
                if overlap is not None:
                    overlap.synchronize()
                other.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(other):
                    seen += [p.detach().clone() for p in model.parameters()]
                torch.cuda.current_stream().wait_stream(other)
            del written
        if overlap is not None:
            overlap.detach()
        return [*seen, *(p.detach().clone() for p in model.parameters())]

    assert_equal(train, way)


@pytest.mark.parametrize("options", [{"schedule": "backward"}, {"schedule": "backward", "bucket_bytes": 1}])
def test_what_the_caching_allocator_gives_out(options: Mapping[str, Any]) -> None:
    """Above weights and state: of the gradients, no more than the largest bucket and the one that fills meanwhile."""
    gradients = 40 * 1024 * 1024 * 4

    def peak(given: Mapping[str, Any] | None) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(40)])
        iteration = Iteration(given, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        iteration.x = torch.randn(4, 1024)
        for _ in range(3):
            iteration.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        iteration.run()
        torch.cuda.synchronize()
        found: int = torch.cuda.max_memory_allocated() - before
        iteration.weights()
        return found

    assert peak(None) >= gradients
    assert peak(options) <= gradients // 5
