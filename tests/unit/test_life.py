"""The attachment holds nothing alive, and leaves nothing behind."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import StaleAttachmentError, TornStepError
from tests.cases import Blocks, batch
from tests.late import late_updates
from tests.living import POINTS, LoopError, Made, backward, no_gc, settle, stepped, survivors, train


def live_tensors() -> int:
    """Garbage that other tests have left may go in several rounds: a first one frees what has held the rest."""
    rounds: list[int] = []
    while len(rounds) < 2 or rounds[-1] != rounds[-2]:
        gc.collect()
        rounds.append(sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()))
    return rounds[-1]


SMALL = 2_000  # bytes: several buckets even in these models
OPTIONS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "host": {"schedule": "backward", "undo": "host"},
    "forward": {"schedule": "forward", "defer": True},
    "clipped": {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(1.0)},
    "nonfinite": {"schedule": "forward", "defer": True, "nonfinite": "skip"},
    "undo clipped": {"schedule": "backward", "undo": True, "clip": instep.ClipNorm(1.0), "nonfinite": "skip"},
    "two_pass": {"schedule": "backward", "clip": instep.ClipNorm(1.0, mode="two_pass")},
    "accumulation": {"schedule": "backward", "accumulation_steps": 2},
}


def make(way: str | None, fused: bool = False) -> Made:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return (
        model,
        optimizer,
        None if way is None else instep.attach(model, optimizer, bucket_bytes=SMALL, **OPTIONS[way]),
    )


@pytest.mark.parametrize("keep", [True, False], ids=["attachment kept", "attachment dropped"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("way", [None, *OPTIONS])
def test_a_dropped_model_is_freed_by_reference_count(way: str | None, point: str, keep: bool) -> None:
    assert survivors(lambda: make(way), point, keep=keep) == []
    assert survivors(lambda: make(way, fused=True), point, keep=keep) == []


class KnowsModel(torch.optim.SGD):
    """An optimizer of somebody's own, whose attributes and groups refer to the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([{"params": list(model.parameters()), "of": {"model": model}}], lr=1e-2, momentum=0.9)
        self.models = [model]


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_nor_does_what_was_looked_at_in_an_optimizer_keep_it(way: str) -> None:
    with no_gc():
        model = Blocks()
        optimizer = KnowsModel(model)
        instep.attach(model, optimizer, bucket_bytes=SMALL, **OPTIONS[way])
        train((model, optimizer, None))
        seen = weakref.ref(model)
        del model, optimizer
        assert seen() is None


class Fails(torch.optim.SGD):
    failing = False

    def step(self, closure: Any = None) -> Any:
        if Fails.failing and any(p.shape == (24, 16) for group in self.param_groups for p in group["params"]):
            raise LoopError
        return super().step(closure)


@pytest.mark.parametrize("way", ["backward", "undo", "forward"])
def test_nothing_is_kept_by_an_error_in_the_update(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one() -> list[Callable[[], object]]:
        model = Blocks()
        optimizer = Fails(model.parameters(), lr=0.1)
        instep.attach(model, optimizer, bucket_bytes=SMALL, **OPTIONS[way])
        model(batch(0)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        monkeypatch.setattr(Fails, "failing", True)
        with suppress(LoopError):
            model(batch(0)[0]).sum().backward()
            optimizer.step()
            model(batch(0)[0])
        monkeypatch.setattr(Fails, "failing", False)
        with suppress(TornStepError):
            model(batch(0)[0])
        return [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]

    with no_gc():
        assert [ref() for ref in one() if ref() is not None] == []


@pytest.mark.parametrize("way", OPTIONS)
def test_the_core_does_not_keep_a_graph_s_optimizer(way: str) -> None:
    with no_gc():
        model, optimizer, _ = make(way)
        train((model, optimizer, instep.attached(model)))
        loss = model(batch(0)[0]).sum()
        gone = weakref.ref(optimizer), weakref.ref(model)
        weight = model.get_parameter("inner.weight")
        del model, optimizer, _
        settle()
        assert [ref() for ref in gone] == [None, None]
    loss.backward()  # there is nobody to step
    assert type(weight.grad) is torch.Tensor


def parameter_of_an_open_step(made: Made) -> torch.Tensor:
    train(made)
    backward(made, 2)
    weight: torch.Tensor = made[0].get_parameter("inner.weight")
    return weight


@pytest.mark.parametrize("keep", [lambda made: made[0](batch(0)[0]), parameter_of_an_open_step], ids=["graph", "leaf"])
@pytest.mark.parametrize("way", OPTIONS)
def test_the_core_goes_with_the_model(way: str, keep: Callable[[Made], torch.Tensor]) -> None:
    """Neither a graph nor a gradient that was applied keeps it."""
    with no_gc():
        made = make(way)
        kept = keep(made)
        assert made[2] is not None
        schedule = weakref.ref(made[2]._parts.schedule)
        del made
        settle()
        assert schedule() is None
        del kept


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["forward", "clipped", "nonfinite"])
def test_a_parameter_that_is_kept_alone_gets_what_was_due(way: str, fused: bool) -> None:
    """Also where the collector finds the model, in a cycle."""

    def weight_of(way: str | None, cycle: bool) -> torch.Tensor:
        torch.manual_seed(0)
        made = make(way, fused)
        stepped(made)
        model: Any = made[0]
        if cycle:
            model.itself = [model]
        return model.inner.weight

    for cycle in (False, True):
        plain = weight_of(None, cycle).detach()
        with late_updates() as run_all:  # else the thread may be through before anybody looks
            found = weight_of(way, cycle)
            gc.collect()
            if way != "clipped":  # the plain loop does not clip
                assert torch.equal(found, plain)
            run_all()
        settle()
        assert type(found) is nn.Parameter
        if way != "clipped":
            assert torch.equal(found.detach(), plain)


@pytest.mark.parametrize("way", ["undo", "host"])
def test_a_parameter_that_is_kept_alone_has_no_step_on_trial(way: str) -> None:
    def weight_of(way: str | None, cycle: bool) -> torch.Tensor:
        torch.manual_seed(0)
        made = make(way)
        POINTS["backward"](made)
        model: Any = made[0]
        if cycle:
            model.itself = [model]
        return model.inner.weight

    for cycle in (False, True):
        plain, found = weight_of(None, cycle), weight_of(way, cycle)
        gc.collect()
        assert type(found) is nn.Parameter
        assert torch.equal(found, plain)


def test_it_lives_as_long_as_the_model() -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    instep.attach(model, optimizer, schedule="backward")
    gc.collect()
    model(batch(0)[0]).sum().backward()
    assert "SpentGradient" in repr(model.inner.weight.grad)
    overlap = instep.attached(model)
    assert overlap is not None
    overlap.detach()


@pytest.mark.nightly
def test_many_models_do_not_grow() -> None:
    def models(count: int) -> int:
        for _ in range(count):
            model = Blocks()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            instep.attach(model, optimizer, schedule="backward")
            model(batch(0)[0]).sum().backward()
            optimizer.step()
        del model, optimizer
        return live_tensors()

    before = models(10)
    assert models(300) == before


def test_a_dropped_optimizer_is_named() -> None:
    model = Blocks()
    instep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule="backward")
    with pytest.raises(StaleAttachmentError, match="SGD no longer exists"):
        model(batch(0)[0]).sum().backward()
    overlap = instep.attached(model)
    assert overlap is not None
    overlap.detach()


@pytest.mark.parametrize("way", OPTIONS)
def test_tensors_are_swapped_after_detach(way: str) -> None:
    model, optimizer, overlap = make(way)
    assert overlap is not None
    train((model, optimizer, overlap))
    plan = overlap.plan
    overlap.detach()
    weight = model.get_parameter("inner.weight")
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(24, 16)))
    assert model.get_parameter("inner.weight") is weight
    assert not weight.any()
    assert overlap.plan == plan
    assert "detached" in repr(overlap)
    overlap.synchronize()
    overlap.detach()
