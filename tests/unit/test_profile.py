"""What torch's profiler shows of a step."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import instep
from instep._torch import engine
from tests.cases import Blocks, batch

STEPS = 3


def ranges_of(use: Callable[[torch.Tensor], object] | None = None, **options: Any) -> list[str]:
    """The names of instep's own ranges, in the order of their beginning, over three steps of which the last is
    traced. ``use``: of each parameter, before ``step()``."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with instep.attach(model, optimizer, bucket_bytes=4_000, **options) as overlap:
        for i in range(STEPS):
            with profile(activities=[ProfilerActivity.CPU]) if i == STEPS - 1 else torch.enable_grad() as trace:
                torch.nn.functional.cross_entropy(model(batch(i)[0]), batch(i)[1]).backward()
                if use is not None:
                    list(map(use, model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
                overlap.synchronize()
        buckets = len(overlap.plan.buckets)
    assert trace is not None
    found = [event for event in trace.events() if event.name.startswith("instep::")]
    names = [event.name for event in sorted(found, key=lambda event: event.time_range.start)]
    assert names.count("instep::update") in (0, buckets)
    return list(dict.fromkeys(names))


def test_a_step_in_backward() -> None:
    assert ranges_of(schedule="backward") == ["instep::update", "instep::before update", "instep::after update"]


def test_a_step_that_is_put_off() -> None:
    """The update itself runs on a thread that the profiler does not follow."""
    assert ranges_of(defer=True) == ["instep::before update", "instep::after update", "instep::wait for update"]


def test_a_step_that_is_taken_twice() -> None:
    found = ranges_of(attrgetter("grad"), schedule="backward", undo=True)
    assert found == ["instep::update", "instep::rollback", "instep::before update", "instep::after update"]


def test_nothing_is_made_where_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(profiler, "record_function", lambda name, first=None: made.append(name))
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward"):
        model(batch(0)[0]).sum().backward()
        made.clear()
        assert engine.profiled("update") is engine.profiled("after update")
    assert made == []


def test_torch_says_whether_a_profiler_is_on() -> None:
    """A private name."""
    assert profiler._is_profiler_enabled is False
    with profile(activities=[ProfilerActivity.CPU]):
        assert profiler._is_profiler_enabled is True
    assert profiler._is_profiler_enabled is False
