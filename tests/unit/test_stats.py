"""``overlap.stats()``, and how an attachment is shown in a notebook."""

import json
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._optim.parameters import AttachedParameters
from instep._optim.stepper import Stepper
from instep._step.state import StepTimes
from tests.cases import Blocks, batch
from tests.distributed.pool import RankPool
from tests.inside import schedule_of

COUNTS = {"steps", "redos", "skips", "votes", "freed_bytes"}
TIMES = {"exposed_ms", "outside_ms"}
WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "at once": {"schedule": "forward", "defer": False},
    "undo": {"schedule": "backward", "undo": True},
}


def attached(fused: bool = True, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, instep.Attachment]:
    model = Blocks(depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return model, optimizer, instep.attach(model, optimizer, bucket_bytes=2_000, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for i in range(steps):
        model(batch(i)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_plain_numbers(way: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if disabled:
        monkeypatch.setenv("INSTEP_DISABLE", "1")
    model, optimizer, overlap = attached(**WAYS[way])
    before = overlap.stats()
    assert before == dict.fromkeys(COUNTS, 0)
    train(model, optimizer)
    overlap.synchronize()
    found = overlap.stats()
    assert found.keys() == COUNTS | TIMES
    assert type(found) is dict
    assert all(name.isidentifier() and type(value) in (int, float) for name, value in found.items())
    assert json.loads(json.dumps(found)) == found
    assert found["steps"] == 3
    assert found["exposed_ms"] > 0
    assert (found["freed_bytes"] > 0) == (way == "backward" and not disabled)
    overlap.detach()


def test_bytes_that_backward_has_freed() -> None:
    model, optimizer, overlap = attached(schedule="backward")
    size = sum(p.nbytes for p in model.parameters())
    train(model, optimizer)
    assert overlap.stats()["freed_bytes"] == 3 * size
    with overlap.keep_gradients():
        train(model, optimizer, 1)
    assert overlap.stats()["freed_bytes"] == 3 * size
    assert overlap.stats()["steps"] == 4
    overlap.detach()


def test_a_bucket_whose_update_fails_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("the update failed")

    model, _, overlap = attached(schedule="backward")
    monkeypatch.setattr(Stepper, "step", fail)
    with pytest.raises(ValueError, match="the update failed"):
        model(batch(0)[0]).sum().backward()
    assert overlap.stats()["freed_bytes"] == 0
    overlap.detach()


def test_what_runs_in_backward_is_hidden_from_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each look moves on by a second."""
    model, optimizer, overlap = attached(schedule="backward")
    train(model, optimizer, 2)
    seconds = iter(range(1000))
    monkeypatch.setattr("instep._step.state.perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr("instep._step.in_backward.perf_counter", lambda: float(next(seconds)))
    train(model, optimizer, 1)
    found = overlap.stats()
    assert found["outside_ms"] == 1000 * len(overlap.plan.buckets)
    assert found["exposed_ms"] == 1000
    overlap.detach()


def test_what_is_waited_for_is_exposed() -> None:
    """Kernels that are not fused run where they are waited for."""
    model, optimizer, overlap = attached(fused=False, schedule="forward", defer=True)
    train(model, optimizer, 4)
    times = schedule_of(overlap).times
    assert times.outside < times.exposed
    overlap.detach()


def test_times_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("instep._step.state.perf_counter", lambda: now)
    times, bucket = StepTimes(), AttachedParameters()
    found = []
    for in_step, waited, waited_in_step, ran in [(2.0, 3.0, 0.5, 7.0), (1.0, 0.0, 0.0, 4.0), (1.0, 6.0, 0.0, 5.0)]:
        now += ran
        times.ran(bucket, now - ran)
        now += waited
        times.waited(bucket, now - waited)
        times.step_begins()
        now += in_step
        times.waited(bucket, now - waited_in_step)
        times.step_returns()
        times.step_returns()
        times.committed()
        found.append((times.exposed, times.outside))
    assert found == [(5.0, 4.0), (1.0, 4.0), (7.0, 0.0)]


def test_an_accelerator_s_work_is_not_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, overlap = attached(schedule="backward")
    train(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr("instep._step.state.StepMembers.living", lambda members: [torch.ones(1, device="meta")])
        assert overlap.stats().keys() == COUNTS
    overlap.detach()


def votes_cast() -> list[int]:
    model = nn.parallel.DistributedDataParallel(Blocks(depth=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        train(model, optimizer)
        found = overlap.stats()
    return [int(found["votes"]), int(found["freed_bytes"])]


def test_votes_of_ranks(two_ranks: RankPool) -> None:
    """DDP's buckets stay: nothing is freed."""
    assert two_ranks.run(votes_cast) == [[3, 0], [3, 0]]


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_in_a_notebook() -> None:
    class Odd(nn.Linear): ...

    Odd.__name__ = "<script>&"
    model = Odd(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward", clip=instep.ClipValue(0.5))
    shown = overlap._repr_html_()
    assert "<script" not in shown
    cells = Cells()
    cells.feed(shown)
    assert not cells.open
    assert cells.texts[0] == "instep.Attachment of <script>&"
    rows = dict(zip(cells.texts[1::2], cells.texts[2::2], strict=True))
    assert rows["optimizers"] == "SGD"
    assert rows["schedule"] == "'backward'"
    assert rows["clip"] == repr(instep.ClipValue(0.5))
    assert rows["steps"] == "0"
    overlap.detach()
    assert "detached" in overlap._repr_html_()
