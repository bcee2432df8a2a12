"""What a page of the documentation says of memory, and no other test shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint_sequential

import instep
from tests.cases import Sometimes, batch, weights

WIDTH, DEPTH = 256, 8
GRADIENTS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # in torch's own compiler
@pytest.mark.parametrize(
    ("how", "share"), [("eager", 0.2), ("by block", 0.2), ("as a whole", 0.95), ("checkpointed", 0.2)]
)
def test_what_backward_holds_at_its_peak(how: str, share: float) -> None:
    plain, attached = (peak_of_backward(how, attach) for attach in (False, True))
    assert plain >= GRADIENTS
    assert plain * (share - 0.1) < attached < plain * (share + 0.1)


def peak_of_backward(how: str, attach: bool) -> int:
    """The most bytes that a backward has on the CPU beyond what there was before it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole: Any = model
    if how == "as a whole":
        whole = torch.compile(model, backend="aot_eager")
    for layer in model if how == "by block" else ():
        layer.compile(backend="aot_eager")
    overlap = instep.attach(whole, optimizer, bucket_bytes=1, schedule="backward") if attach else None

    def loss() -> torch.Tensor:
        x = torch.ones(4, WIDTH)
        out = checkpoint_sequential(model, 4, x, use_reentrant=False) if how == "checkpointed" else whole(x)
        return out.square().mean()

    for _ in range(2):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    last = loss()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        last.backward()
    optimizer.step()
    if overlap is not None:
        overlap.detach()
    return most_allocated(seen)


def most_allocated(seen: profile) -> int:
    """The most bytes alive at once of those that were allocated in it.

    A sum of the profiler's changes tells less: it also has frees of what was there before, some of them with the size
    of memory that an earlier profile saw at the same address.
    """
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    alive: dict[int, int] = {}
    most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        # An address that is given out again was freed. A free without an allocation is of memory from before.
        alive.pop(event["args"]["Addr"], None)
        if event["args"]["Bytes"] > 0:
            alive[event["args"]["Addr"]] = event["args"]["Bytes"]
        most = max(most, sum(alive.values()))
    return most


def test_what_an_earlier_profile_saw_is_not_taken_off() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        seen_once = [torch.ones(4, WIDTH) for _ in range(3000)]
    seen_once.clear()  # out of every profile's sight: each address stays known with its size
    assert peak_of_backward("eager", False) >= GRADIENTS


@pytest.mark.parametrize(("bucket_bytes", "in_backward"), [(1, 6), (1 << 20, 0)])
def test_an_unused_parameter_holds_up_its_own_bucket_alone(bucket_bytes: int, in_backward: int) -> None:
    torch.manual_seed(0)
    model = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, bucket_bytes=bucket_bytes, schedule="backward") as overlap:
        for i in range(3):
            before = weights(model)
            model(batch(i)[0], 0).square().mean().backward()
            assert moved(before, weights(model)) == in_backward
            optimizer.step()
            assert moved(before, weights(model)) == 6
            optimizer.zero_grad()
        names = [spec.name for bucket in overlap.plan.buckets for spec in bucket.parameters]
        assert names[-2:] == ["experts.1.bias", "experts.1.weight"]


def moved(before: list[torch.Tensor], after: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
