"""Updates that give memory back which they have read, which the next tensor of the loop's may get at once; that write
gradients; and whose state is in pinned memory."""

import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.accelerator.loops import SMALL, WAYS
from tests.accelerator.recording import recorded
from tests.cases import grad_of
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.accelerator


class GivingBack(torch.optim.Optimizer):
    """Momentum, whose state ``keep`` updates in its own way."""

    make: Callable[..., dict[str, Any]]
    keep: Callable[..., torch.Tensor]

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state.update(self.make(p))
                momentum = self.keep(state, p)
                p.sub_(momentum, alpha=0.05)


def replaced(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    state["momentum"] = state["momentum"] * 0.9 + p.grad
    return state["momentum"]


def replaced_inside(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    state["box"].momentum = state["box"].momentum * 0.9 + p.grad
    return state["box"].momentum


def latest(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    state["latest"] = [*state["latest"][-2:], grad_of(p).clone()]
    return torch.stack(state["latest"]).mean(0)


def by_data(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    state["momentum"].data = state["momentum"] * 0.9 + p.grad
    return state["momentum"]


def resized(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    history = state["momentum"]
    history.resize_(len(history) + 1, *p.shape[1:])[-1].copy_(grad_of(p)[0])
    return history.mean(0).expand_as(p)


def weight_by_data(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    p.data = p * 0.99
    return state["momentum"].mul_(0.9).add_(p.grad)


def gradient_by_data(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    grad_of(p).data = grad_of(p) * 0.99
    return state["momentum"].mul_(0.9).add_(p.grad)


def gradient_written(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    """It may lie in a bucket of DDP's, which copies from there."""
    grad_of(p).mul_(0.99)
    return state["momentum"].mul_(0.9).add_(p.grad)


def on_the_host(state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    """In pinned memory, which the host itself never touches."""
    found = state["momentum"].to(p.device, non_blocking=True) * 0.9 + p.grad
    state["momentum"].copy_(found, non_blocking=True)
    return found


def momentum(p: torch.Tensor) -> dict[str, Any]:
    return {"momentum": torch.zeros_like(p)}


KINDS: Mapping[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "replaced": (momentum, replaced),
    "replaced in an object": (lambda p: {"box": SimpleNamespace(momentum=torch.zeros_like(p))}, replaced_inside),
    "the oldest of a list": (lambda p: {"latest": [torch.zeros_like(p)]}, latest),
    "state.data": (momentum, by_data),
    "resized": (momentum, resized),
    "weight.data": (momentum, weight_by_data),
    "gradient.data": (momentum, gradient_by_data),
    "gradient written": (momentum, gradient_written),
    "pinned": (lambda p: {"momentum": torch.zeros(p.shape, device="cpu", pin_memory=True)}, on_the_host),
}


def kind_of(name: str) -> type[GivingBack]:
    make, keep = map(staticmethod, KINDS[name])
    return type("Kind", (GivingBack,), {"make": make, "keep": keep})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_given_back(kind: str, way: str) -> None:
    """Of state that was made on the loop's stream, before the model was attached. Activations are as large as it is."""
    found = []
    for options in (None, WAYS[way]):
        with torch.device("emu"), recorded() as log:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5)))
            optimizer = kind_of(kind)(model.parameters())
            for i in range(6):
                if i == 2 and options is not None:
                    overlap = instep.attach(model, optimizer, bucket_bytes=SMALL, **options)
                model(torch.full((16, 16), 0.1 * (i + 1))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if options is not None:
                overlap.detach()
            found.append([p.cpu() for p in model.parameters()])
        log.assert_ordered()
    assert all(map(torch.equal, *found))


def in_hook(kind: str) -> None:
    """Of state that was loaded."""
    found = []
    for attached in (False, True):
        with torch.device("emu"), recorded() as log:
            torch.manual_seed(0)
            model: nn.Module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5)))
            optimizer = kind_of(kind)(model.parameters())
            for i in range(6):
                if i == 2 and attached:
                    model = in_backward(model, optimizer)
                elif i == 2:
                    model = DistributedDataParallel(model, bucket_cap_mb=SMALL / 2**20)
                model(torch.full((16, 16), 0.1 * (i + 1))).square().sum().backward()
                if i < 2 or not attached:
                    optimizer.step()
                optimizer.zero_grad()
            found.append([p.cpu() for p in model.parameters()])
        log.assert_ordered()
    assert all(map(torch.equal, *found))


def in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Optimizers of single parameters, with the state that they have in ``optimizer``, behind DDP's buckets."""
    instep.apply_optimizer_in_backward(type(optimizer), model.parameters(), {})
    for parameter in model.parameters():
        (own,) = parameter._in_backward_optimizers  # type: ignore[attr-defined]
        own.state[parameter] = optimizer.state.pop(parameter)
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL / 2**20)
    ddp.register_comm_hook(weakref.ref(ddp), instep.apply_optim_in_backward_hook(False))
    return ddp


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "weight.data"])
def test_given_back_in_a_communication_hook(two_emulated_ranks: RankPool, kind: str) -> None:
    two_emulated_ranks.run(in_hook, kind)
