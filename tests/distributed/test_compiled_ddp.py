"""``torch.compile`` around a ``DistributedDataParallel`` and its training step, beside the compiled plain loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.devices import here
from tests.distributed.pool import RankPool

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "forward": {"schedule": "forward", "defer": True},
}


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager")


class Loop:
    """A loop.

    Args:
        how: what is compiled: the model in DDP, ``"inside"``; DDP itself, ``"before"`` it is attached or ``"after"``,
            with ``"in place"`` by its own method; its optimizer's ``"step"``; or a whole ``"iteration"``.
    """

    def __init__(self, how: str, options: dict[str, Any] | None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        # DDP's own smallest buckets, of 1 MiB: what torch.compile divides its graphs by.
        layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.Tanh())]
        inner: Any = nn.Sequential(*layers, nn.Linear(512, 4))
        if how == "inside":
            inner = compiled(inner)
        self.model: Any = DistributedDataParallel(inner, gradient_as_bucket_view=True, bucket_cap_mb=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if how == "before":
            self.model = compiled(self.model)
        if how == "in place before":
            self.model.compile(backend="aot_eager")
        self.overlap = None if options is None else instep.attach(self.model, self.optimizer, **options)
        self.forward: Callable[..., Any] = compiled(self.model) if how == "after" else self.model
        if how == "in place after":
            self.model.compile(backend="aot_eager")
        self.take = compiled(self.optimizer.step) if how == "step" else self.optimizer.step
        self.iterate = compiled(self._iterate) if how == "iteration" else self._iterate

    def _iterate(self, x: torch.Tensor) -> None:
        self.forward(x).square().mean().backward()
        self.take()
        self.optimizer.zero_grad()

    def step(self, i: int) -> None:
        self.iterate(torch.randn(3, 512, generator=torch.Generator(here()).manual_seed(10 * i + dist.get_rank())))


def body_compiled(how: str, way: str) -> str | None:
    plain = Loop(how, None)
    expected = []
    for i in range(4):
        plain.step(i)
        expected.append([(name, torch.as_tensor(v).clone()) for name, v in _state(plain)])
    loop = Loop(how, WAYS[way])
    assert loop.overlap is not None
    for i in range(4):
        loop.step(i)
        loop.overlap.synchronize()
        difference = first_difference(iter(expected[i]), _state(loop))
        if difference is not None:
            return f"step {i}: {difference}"
    steps = loop.overlap.step_count
    loop.overlap.detach()
    return None if steps == 4 else f"{steps} steps were counted"


def _state(loop: Loop) -> Any:
    state = training_state(loop.model, loop.optimizer)
    return ((name, value) for name, value in state if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("how", ["inside", "before", "after", "in place before", "in place after"])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_compiled_model(two_ranks: RankPool, way: str, how: str) -> None:
    assert two_ranks.run(body_compiled, how, way) == [None] * 2


@pytest.mark.parametrize("how", ["step", "iteration"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "backward"])
def test_a_compiled_step(two_ranks: RankPool, way: str, how: str) -> None:
    assert two_ranks.run(body_compiled, how, way) == [None] * 2


def body_refused(how: str) -> str:
    loop = Loop(how, WAYS["backward"])
    assert loop.overlap is not None
    with pytest.raises(UnsupportedOptimizerError, match=r"AdamW\.step\(\) was compiled"):
        loop.step(0)
    state = loop.overlap.state
    loop.overlap.detach()
    return state


@pytest.mark.parametrize("how", ["step", "iteration"])
def test_a_compiled_step_is_refused_where_backward_has_stepped(two_ranks: RankPool, how: str) -> None:
    assert two_ranks.run(body_refused, how) == ["torn"] * 2
