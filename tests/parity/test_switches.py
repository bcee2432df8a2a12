"""Switches of torch for the whole process, set around a part of the loop: the update needs those of ``step()``."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._torch.switches import switched, switches
from instep.errors import HyperparameterChangedError, UncommittedStepError
from tests.cases import Blocks, batch
from tests.devices import here, on_cpu_only
from tests.inside import before_updates
from tests.late import late_updates
from tests.parity.lockstep import EXACT, Contender, Refused, in_every_way, lockstep, loss_of


@contextmanager
def default_dtype(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def products_of_less_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some torches say what they lack
        with torch.backends.mkldnn.flags(enabled=False):
            yield


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the default dtype": default_dtype,
    "the precision of products": products_of_less_precision,
    "mkldnn": without_mkldnn,
}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks()
    return model, torch.optim.NAdam(
        model.parameters(), lr=1e-2
    )  # its state is of the default dtype, from the first step


def learn(lane: Contender, i: int, name: str, around: str) -> torch.Tensor:
    x, y = batch(i)
    block = SWITCHES[name]
    with block() if around == "all" else nullcontext():
        with block() if around == "backward" else nullcontext():
            loss = loss_of(lane.model(x), y)
            lane.backward(loss)
        with block() if around == "step" else nullcontext():
            lane.step()
        if around == "all" and lane.overlap is not None:
            lane.overlap.synchronize()  # lockstep would wait for the update outside of the block
    lane.zero_grad()
    return loss.detach()


@in_every_way
@pytest.mark.parametrize("around", ["backward", "step", "all"])
@pytest.mark.parametrize("name", list(SWITCHES))
def test_set_around_a_part_of_the_loop(way: str, name: str, around: str) -> None:
    torn = Refused(
        HyperparameterChangedError, "torn", "after backward had already stepped parameters under what it was"
    )
    refused = None if around == "all" or way in EXACT else {way: torn}
    lockstep(way, build, partial(learn, name=name, around=around), refused=refused)


class Multiplies(torch.optim.SGD):
    """What an update computes depends on how matrices are multiplied."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if (g := p.grad) is not None:
                    p.sub_(g @ g.T @ g if g.dim() == 2 else g, alpha=group["lr"])


@pytest.mark.parametrize("way", ["forward", "late"])
@pytest.mark.parametrize("name", ["the precision of products", "mkldnn"])
def test_an_update_behind_a_forward_under_other_switches(way: str, name: str) -> None:
    """The next forward is most likely like the last one: the update is not put off behind it."""

    def build_one() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks()
        return model, Multiplies(model.parameters(), lr=0.1)

    lockstep(way, build_one, partial(learn, name=name, around="backward"))


@torch.no_grad()
def other_under_others(parameters: list[torch.Tensor]) -> None:
    """As if products came out otherwise."""
    if not torch.backends.mkldnn.enabled or torch.get_float32_matmul_precision() == "medium":
        for parameter in parameters:
            parameter.mul_(0.5)


@pytest.mark.parametrize("name", ["the precision of products", "mkldnn"])
@pytest.mark.parametrize("way", ["forward", "late"])
def test_a_forward_under_other_switches_than_the_last(way: str, name: str) -> None:
    """An update behind it is one under that of ``step()``, and the forward goes on under its own."""

    def build_one() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(lane: Contender, i: int) -> torch.Tensor:
        x, y = batch(i)
        with SWITCHES[name]() if i % 2 else nullcontext():
            then = switches()
            loss = loss_of(lane.model(x), y)
            assert switches() == then
        return lane.learn(loss)

    with before_updates(other_under_others):
        lane = lockstep(way, build_one, step)
    assert "steps put off" in repr(lane.overlap)


def test_a_default_dtype_that_is_set_anew_while_a_step_is_due() -> None:
    """As Lightning's bf16-true has it, around the forward."""
    torch.manual_seed(0)
    model, optimizer = build()
    with instep.attach(model, optimizer, schedule="forward", defer=True) as overlap, late_updates():
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        x, _ = batch(1)
        with default_dtype():
            model(x)
            assert torch.get_default_dtype() == torch.float64
        overlap.synchronize()
        assert all(entry["mu_product"].dtype == torch.float32 for entry in optimizer.state.values())


@on_cpu_only  # on an accelerator the update has been launched
def test_a_default_dtype_under_which_a_fused_kernel_would_make_other_state() -> None:
    """It may run while the loop asks for the default dtype, which is then left alone."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with instep.attach(model, optimizer, schedule="forward", defer=True) as overlap, late_updates():
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        x, _ = batch(1)
        with default_dtype(), pytest.raises(UncommittedStepError, match=r"get_default_dtype\(\) was .*synchronize"):
            model(x)
        assert overlap.step_count == 1


def test_precisions_by_the_newer_names() -> None:
    """torch then refuses to say one for all backends."""
    before = switches()
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("they came with torch 2.9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", partial(_raise, RuntimeError("mix of the legacy and new")))
        assert switches()["torch.get_float32_matmul_precision()"] is None
    assert switched(before) is None


def _raise(error: Exception) -> None:
    raise error


# Inference tensors count no writes.


def by_hand(lane: Contender, i: int) -> None:
    """Gradients that no backward has made, as those of evolution strategies."""
    generator = torch.Generator(here()).manual_seed(i)
    with torch.inference_mode():
        gradients = [torch.randn(p.shape, generator=generator) for p in lane.model.parameters()]
    for parameter, gradient in zip(lane.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    lane.step()
    lane.zero_grad()


def backward_in_inference_mode(lane: Contender, i: int) -> torch.Tensor:
    x, y = batch(i)
    loss = loss_of(lane.model(x), y)
    with torch.inference_mode():
        lane.backward(loss)
    lane.step()
    lane.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("way", ["backward", *EXACT])  # torch does not clip them
@pytest.mark.parametrize("step", [by_hand, backward_in_inference_mode])
def test_gradients_that_are_inference_tensors(way: str, step: Callable[[Contender, int], Any]) -> None:
    lockstep(way, build, step)


# torch's default device, which a thread has for itself, and of which a hook of backward finds nothing.


class MakesState(torch.optim.SGD):
    """Keeps tensors beside each parameter that it makes without naming a device."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("device", str(torch.empty(0).device))
        return super().step(closure)


def made_on(lane: Contender) -> set[str]:
    return {entry["device"] for entry in lane.optimizer.state.values()}


def on_meta(lane: Contender, i: int, around: str) -> torch.Tensor:
    """An iteration with another default device, as a loop has "cuda"; there is no other one on every machine."""
    with torch.device(here()):
        x, y = batch(i)
    if around == "set for all":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if around == "a block" else nullcontext():
            loss = loss_of(lane.model.forward(x) if around == "set for all" else lane.model(x), y)
            with torch.no_grad(), torch.device("cpu"):
                lane.model(x)  # an evaluation with one of its own
            lane.backward(loss)
            lane.step()
            lane.zero_grad()
    finally:
        if around == "set for all":
            torch.set_default_device(None)
    return loss.detach()


@pytest.mark.parametrize("around", ["a block", "set for all"])
@pytest.mark.parametrize("way", ["backward", *EXACT])
def test_state_is_made_on_the_loops_default_device(way: str, around: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device(here()):
            model = Blocks(depth=2)
        return model, MakesState(model.parameters(), lr=0.1)

    lane = lockstep(way, build, partial(on_meta, around=around))
    assert made_on(lane) == {"meta"}
