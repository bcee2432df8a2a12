"""The attachment holds nothing alive, and leaves nothing behind."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import StaleAttachmentError
from tests.cases import Blocks, batch


def live_tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.fixture
def no_gc() -> Any:
    gc.collect()
    # The first optimizer of a process has torch import its compiler, and the frames of that are kept with it.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("keep", [True, False], ids=["attachment kept", "attachment dropped"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_dropped_model_is_freed_by_reference_count(no_gc: None, keep: bool, steps: int) -> None:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    overlap = instep.attach(model, optimizer)
    if not keep:
        del overlap
    for i in range(steps):
        model(batch(i)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gone = weakref.ref(model), weakref.ref(model.inner.weight), weakref.ref(optimizer)
    del model, optimizer
    assert [ref() for ref in gone] == [None, None, None]


def test_it_lives_as_long_as_the_model() -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    instep.attach(model, optimizer)
    gc.collect()
    model(batch(0)[0]).sum().backward()
    assert "SpentGradient" in repr(model.inner.weight.grad)
    overlap = instep.attached(model)
    assert overlap is not None
    overlap.detach()


def test_attaching_and_detaching_does_not_grow() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def cycles(count: int) -> int:
        for i in range(count):
            with instep.attach(model, optimizer):
                if i % 100 == 0:
                    model(torch.ones(1, 4)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        gc.collect()
        return live_tensors()

    before = cycles(100)
    assert cycles(2_000) == before
    assert not model._forward_pre_hooks
    assert not model.weight._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.nightly
def test_many_models_do_not_grow() -> None:
    def models(count: int) -> int:
        for _ in range(count):
            model = Blocks()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            instep.attach(model, optimizer)
            model(batch(0)[0]).sum().backward()
            optimizer.step()
        del model, optimizer
        gc.collect()
        return live_tensors()

    before = models(10)
    assert models(300) == before


def test_a_dropped_optimizer_is_named() -> None:
    model = Blocks()
    instep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StaleAttachmentError, match="SGD no longer exists"):
        model(batch(0)[0]).sum().backward()
    overlap = instep.attached(model)
    assert overlap is not None
    overlap.detach()
