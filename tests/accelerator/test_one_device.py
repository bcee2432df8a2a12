"""The attached loop beside the plain one on the emulated accelerator: the same bits, and nothing left to chance."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._optim.kernels import KernelCall
from instep.errors import InstepError
from tests.accelerator import ACCELERATOR, EMULATED
from tests.accelerator.comparing import compare
from tests.accelerator.loops import CLIP, HAPPENINGS, MODELS, ONLY, OPTIMIZERS, READERS, WAYS, train
from tests.accelerator.recording import recorded

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def _on_the_device() -> Any:
    with torch.device(ACCELERATOR):
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "failing"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "two devices"])
def test_models_and_optimizers(model: str, optimizer: str, way: str) -> None:
    _, log = compare(WAYS[way], model=model, optimizer=optimizer)
    assert ACCELERATOR != EMULATED or len(log.streams) == 2, "the step is on a stream of its own"


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("happening", "way"),
    [(one, way) for one, way in product(HAPPENINGS, WAYS) if one != "nothing" and way in ONLY.get(one, WAYS)],
)
def test_what_happens_and_who_reads_next(happening: str, way: str, reader: str, own_stream: bool) -> None:
    optimizer = "failing" if happening == "a bucket that fails" else "AdamW"
    options = dict(WAYS[way])
    if happening == "a gradient that is not finite":
        options["nonfinite"] = "skip"
    compare(options, optimizer=optimizer, happening=happening, reader=reader, own_stream=own_stream)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["tied", "two devices"])
def test_readers(model: str, way: str, reader: str) -> None:
    compare(WAYS[way], model=model, optimizer="fused", reader=reader)


@pytest.mark.parametrize("happening", [name for name in HAPPENINGS if name not in ONLY and "bucket" not in name])
@pytest.mark.parametrize("way", WAYS)
def test_two_devices(way: str, happening: str) -> None:
    compare(WAYS[way], model="two devices", happening=happening)


CLIPS: Mapping[str, Mapping[str, Any]] = {
    "forward": {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(CLIP)},
    "two passes": {"schedule": "backward", "clip": instep.ClipNorm(CLIP, mode="two_pass")},
    "undo": {"schedule": "backward", "undo": True, "clip": instep.ClipNorm(CLIP)},
    "undo on the host": {"schedule": "backward", "undo": "host", "clip": instep.ClipNorm(CLIP)},
    "undo, and nothing to clip": {"schedule": "backward", "undo": True, "clip": instep.ClipNorm(1e6)},
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
@pytest.mark.parametrize("clip", CLIPS)
def test_clips(clip: str, optimizer: str, micro_batches: int) -> None:
    norm = CLIPS[clip]["clip"].max_norm
    compare(CLIPS[clip], {"clip": norm}, optimizer=optimizer, micro_batches=micro_batches)


class OtherLater(torch.autograd.Function):
    """From its fifth call on every second one gives twice the gradient."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        OtherLater.calls += 1
        return gradients[0] * (2 if OtherLater.calls > 4 and OtherLater.calls % 2 == 0 else 1)


def test_another_gradient_in_the_second_pass() -> None:
    """The host does not wait to know: the step after it, or the one after that, says so."""
    OtherLater.calls = 0
    model = torch.nn.ParameterList([torch.ones(3), torch.ones(3)]).to(ACCELERATOR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, bucket_bytes=1, **CLIPS["two passes"]) as overlap:

        def steps(count: int) -> None:
            for _ in range(count):
                overlap.backward((model[0] * OtherLater.apply(model[1])).sum())
                optimizer.step()
                optimizer.zero_grad()
                torch.accelerator.synchronize()

        steps(2)
        with pytest.raises(InstepError, match="gave '1' another gradient than the first in an earlier step"):
            steps(3)
        assert overlap.state == "torn"
        overlap.accept_torn()


@pytest.mark.parametrize("way", [name for name in WAYS if name != "backward"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
def test_the_loop_clips(optimizer: str, way: str) -> None:
    compare(WAYS[way], optimizer=optimizer, clip=CLIP)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["blocks", "tied", "dropout"])
def test_accumulation(model: str, way: str) -> None:
    compare(WAYS[way], model=model, micro_batches=3)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "backward"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
def test_a_scaler(optimizer: str, way: str) -> None:
    scalers = [torch.amp.GradScaler(ACCELERATOR, init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    options = {**WAYS[way], **({"scaler": scalers[1]} if "undo" in WAYS[way] else {})}
    expected = train(None, optimizer=optimizer, scaler=scalers[0])
    with recorded() as log:
        found = train(options, optimizer=optimizer, scaler=scalers[1])
    assert all(map(torch.equal, expected, found))
    log.assert_ordered()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_right_after_another(way: str) -> None:
    """Nothing of the first is waited for by a forward: the second has its gradients at hand."""

    def twice(options: Mapping[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        with nullcontext() if options is None else instep.attach(layer, optimizer, **options):
            for i in range(3):
                layer(torch.full((2, 64), float(i))).sum().backward()
                optimizer.step()
                for p in layer.parameters():
                    p.grad = torch.ones(p.shape)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().cpu() for p in layer.parameters()]

    expected = twice(None)
    with recorded() as log:
        found = twice(WAYS[way])
    assert all(map(torch.equal, expected, found))
    log.assert_ordered()


class _TwoDtypes(nn.Module):
    """Neighbours in one bucket have different dtypes, which no kernel of an accelerator takes in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(8, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype))
        return x


@pytest.mark.parametrize("kind", ["one dtype", "two dtypes"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_fused_kernels_are_called_as_step_calls_them(
    optimizer: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    run = KernelCall.run

    def counted(self: KernelCall, gradients: list[torch.Tensor]) -> None:
        called.append(self.function)
        run(self, gradients)

    monkeypatch.setattr(KernelCall, "run", counted)

    def learn(options: Mapping[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = _TwoDtypes() if kind == "two dtypes" else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made: Any = torch.optim.AdamW if optimizer == "AdamW" else partial(torch.optim.SGD, momentum=0.9)
        steps = made(model.parameters(), lr=1e-2, fused=True)
        with nullcontext() if options is None else instep.attach(model, steps, **options):
            for i in range(4):
                model(torch.full((2, 8), float(i))).float().square().sum().backward()
                steps.step()
                steps.zero_grad()
        return [p.detach().float().cpu() for p in model.parameters()]

    expected = learn(None)
    assert not called
    with recorded() as log:
        found = learn({"schedule": "backward", "bucket_bytes": 1 << 20})
    assert all(map(torch.equal, expected, found))
    log.assert_ordered()
    assert len(called) == (3 if kind == "one dtype" else 0)  # the first step makes state
