"""Ctrl-C at a line of instep's, anywhere in an iteration: then the loop clears its gradients and goes on, as if the
step had been taken or left out; or an error says that it is torn. Nothing waits for ever.

Python runs a signal's handler at fewer places. An exception that another thread sends may come at any of them.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._torch.hooks import last_of_pre_hooks
from instep._wiring import build as connect
from instep._wiring.hooks import SteppingItself
from instep.attaching import attach_stepping_itself
from instep.attachment import Attachment
from instep.errors import TornStepError, UncommittedStepError
from instep.sources.local import WritingBackwards
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.devices import on_cpu_only
from tests.inside import schedule_of
from tests.parity.interrupts import LineInterrupter, once, press_ctrl_c, send_an_exception

WAYS: dict[str, dict[str, Any]] = {
    "forward": {"defer": True, "bucket_bytes": 4_000},
    "backward": {"schedule": "backward", "bucket_bytes": 4_000},
    "undo": {"schedule": "backward", "undo": True, "bucket_bytes": 4_000},
    "beside": {"schedule": "backward", "defer": True, "bucket_bytes": 4_000},
    "default": {},
    "skip": {"nonfinite": "skip", "defer": True, "bucket_bytes": 4_000},
    "clipped": {"clip": instep.ClipNorm(0.1), "schedule": "backward", "undo": True, "bucket_bytes": 4_000},
}
BEFORE, AFTER = 3, 2  # iterations
SOME = 15


class Loop:
    def __init__(self, way: str | None) -> None:
        self.way = way
        torch.manual_seed(0)
        self.model = Blocks()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.overlap = None if way is None else instep.attach(self.model, self.optimizer, **WAYS[way])

    def step(self, i: int, *, clips: bool = False) -> None:
        x, y = batch(i)
        # None is clipped before the iteration that is interrupted, which is on trial therefore.
        (nn.functional.cross_entropy(self.model(x), y) * (1e-3 if i < BEFORE else 1.0)).backward()
        if clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[tuple[str, Any]]:
        return list(training_state(self.model, self.optimizer))


@cache
def plain(*, clips: bool, skips: bool) -> list[tuple[str, Any]]:
    """What the plain loop has in the end, with or without the iteration that is interrupted."""
    loop = Loop(None)
    for i in range(BEFORE + 1 + AFTER):
        if not (skips and i == BEFORE):
            loop.step(i, clips=clips)
    return [(name, value.clone() if isinstance(value, torch.Tensor) else value) for name, value in loop.state()]


def lines_of(way: str) -> int:
    """Of instep's that run in one iteration."""
    loop = Loop(way)
    assert loop.overlap is not None
    with loop.overlap:
        for i in range(BEFORE):
            loop.step(i)
        interrupter = LineInterrupter()
        with interrupter.watching():
            loop.step(BEFORE)
    return interrupter.lines


FINAL = ("backward", "beside")
"""Where half of a backward is half of a step, which is torn."""


def interrupted(way: str, where: int, interrupt: Callable[[], None] = press_ctrl_c) -> None:
    loop, interrupter = Loop(way), LineInterrupter(where, interrupt=interrupt)
    assert loop.overlap is not None
    with loop.overlap:
        for i in range(BEFORE):
            loop.step(i)
        told = interrupter.interrupt(lambda: loop.step(BEFORE))
        try:
            loop.optimizer.zero_grad()
            for i in range(BEFORE + 1, BEFORE + 1 + AFTER):
                loop.step(i)
            loop.overlap.synchronize()
        except (TornStepError, UncommittedStepError) as error:
            told = error
        except Exception as error:
            raise AssertionError(f"interrupted at {interrupter.place}: {error!r}") from error
        if told is not None:
            assert isinstance(told, (TornStepError, UncommittedStepError)), (interrupter.place, told)
            assert way in FINAL or interrupt is send_an_exception, (interrupter.place, told)
            loop.overlap.accept_torn()
            loop.step(BEFORE)
            loop.overlap.synchronize()
            return
        found = loop.state()
        ends = [plain(clips=way == "clipped", skips=skips) for skips in (True, False)]
        differences = [first_difference(iter(end), iter(found)) for end in ends]
        assert None in differences, f"interrupted at {interrupter.place}: {differences}"


@pytest.mark.parametrize("way", list(WAYS))
def test_some_lines(way: str) -> None:
    count = lines_of(way)
    for number in range(SOME):
        interrupted(way, (2 * number + 1) * count // (2 * SOME))


@pytest.mark.parametrize("way", list(WAYS))
def test_an_exception_is_sent_at_some_lines(way: str) -> None:
    count = lines_of(way)
    for number in range(SOME):
        interrupted(way, (2 * number + 1) * count // (2 * SOME), send_an_exception)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("interrupt", [press_ctrl_c, send_an_exception])
@pytest.mark.parametrize("way", list(WAYS))
def test_every_line(way: str, interrupt: Callable[[], None]) -> None:
    for where in range(lines_of(way)):
        interrupted(way, where, interrupt)


def test_every_line_where_the_default_rests() -> None:
    """torch takes the step: what may be wrong is the count."""
    loop, where, ends = Loop(None), 0, set()
    with instep.attach(loop.model, loop.optimizer, defer=False) as overlap:
        for i in range(SOME):
            loop.step(i)
        while True:
            assert schedule_of(overlap).rests
            before = overlap.step_count
            interrupter = LineInterrupter(where)
            assert interrupter.interrupt(partial(loop.step, where)) is None
            loop.optimizer.zero_grad()
            for i in range(AFTER):
                loop.step(i)
            ends.add(overlap.step_count - before - AFTER)
            assert ends <= {0, 1}, interrupter.place
            if interrupter.place is None:
                break
            where += 1
    assert where > 30
    assert ends == {0, 1}


def detach(loop: Loop) -> None:
    assert loop.overlap is not None
    loop.overlap.detach()


def attach(loop: Loop) -> None:
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[loop.way or "default"])


def interrupted_around(
    way: str, act: Callable[[Loop], None], where: int | None, function: Callable[..., Any] | None = None
) -> int:
    """Interrupt ``attach``, or ``detach`` between two steps, and train on without instep. How many lines there are."""
    loop, interrupter = Loop(None if act is attach else way), LineInterrupter(where, function)
    loop.way = way
    for i in range(BEFORE):
        loop.step(i)
    assert interrupter.interrupt(lambda: act(loop)) is None
    if loop.overlap is not None and where is None:
        loop.overlap.detach()
    for i in range(BEFORE, BEFORE + 1 + AFTER):
        loop.step(i)
    if loop.overlap is not None:  # nobody was there to be interrupted: an object was being freed
        loop.overlap.detach()
    difference = first_difference(iter(plain(clips=False, skips=False)), iter(loop.state()))
    assert difference is None, f"interrupted at {interrupter.place}: {difference}"
    return interrupter.lines


@pytest.mark.parametrize("act", [attach, detach])
@pytest.mark.parametrize("way", ["forward", "backward", "undo", "default"])
def test_some_lines_of_what_comes_before_and_after(way: str, act: Callable[[Loop], None]) -> None:
    """The loop is the plain one, and nothing is left that steps, or waits."""
    count = interrupted_around(way, act, None)
    for number in range(SOME):
        interrupted_around(way, act, (2 * number + 1) * count // (2 * SOME))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("act", [attach, detach])
@pytest.mark.parametrize("way", ["forward", "backward", "undo", "default"])
def test_every_line_of_what_comes_before_and_after(way: str, act: Callable[[Loop], None]) -> None:
    for where in range(interrupted_around(way, act, None)):
        interrupted_around(way, act, where)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_each_line_of_detach_itself(way: str) -> None:
    """Before and after each of the things that it gives back."""
    for where in range(interrupted_around(way, detach, None, Attachment._detach)):
        interrupted_around(way, detach, where, Attachment._detach)


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_an_error_where_a_gradient_was_offered(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody has asked for the end of backward yet: the step is none."""
    loop, calls = Loop(way), list[None]()
    accepts_update = WritingBackwards.accepts_update

    def fails_once(self: Any, task: Any) -> bool:
        calls.append(None)
        if len(calls) == 1:
            raise ZeroDivisionError
        return accepts_update(self, task)

    assert loop.overlap is not None
    with loop.overlap:
        for i in range(BEFORE):
            loop.step(i)
        with monkeypatch.context() as patch:
            patch.setattr(WritingBackwards, "accepts_update", fails_once)
            with pytest.raises(ZeroDivisionError):
                loop.step(BEFORE)
        loop.optimizer.zero_grad()
        for i in range(BEFORE + 1, BEFORE + 1 + AFTER):
            loop.step(i)
        difference = first_difference(iter(plain(clips=False, skips=True)), iter(loop.state()))
        assert difference is None, difference


@on_cpu_only  # a thread of the engine's asks elsewhere, which is not traced
@pytest.mark.parametrize("where", range(3))
def test_where_a_loop_that_steps_itself_asks_for_the_end_of_backward(where: int) -> None:
    """The interrupted backward steps nothing, and the next one does."""
    model = nn.Linear(16, 10)
    overlap = attach_stepping_itself(model, torch.optim.SGD(model.parameters(), lr=0.1))
    interrupter = LineInterrupter(where, SteppingItself.ask)
    with overlap:
        for interrupts in (False, True, False):
            before = model.weight.detach().clone()
            loss = model(batch(0)[0]).sum()
            if interrupts:
                assert interrupter.interrupt(loss.backward) is None
                assert interrupter.place is not None
            else:
                loss.backward()
            model.zero_grad()
            assert torch.equal(model.weight, before) == interrupts
    assert overlap.step_count == 2


@pytest.mark.parametrize("way", ["forward", "backward", "undo", "default"])
def test_attach_is_interrupted_where_its_last_hook_is_not_noted_yet(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "last_of_pre_hooks", once(last_of_pre_hooks))
    loop = Loop(None)
    with pytest.raises(KeyboardInterrupt):
        instep.attach(loop.model, loop.optimizer, **WAYS[way])
    for i in range(BEFORE + 1 + AFTER):
        loop.step(i)
    assert first_difference(iter(plain(clips=False, skips=False)), iter(loop.state())) is None
