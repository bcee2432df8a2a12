"""Handlers of signals wait while a step is changed, and what ends that nevertheless is told."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from unittest.mock import patch

import pytest
import torch
from torch import nn

import instep
from instep._torch import interrupts, watch
from instep._torch.engine import EndOfBackward
from instep._torch.interrupts import StepLock, held, look_for_handlers
from tests.parity.interrupts import once

# ruff: noqa: PT012  # what is raised comes out of the end of the block
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals")

Handler = Callable[[int, FrameType | None], None]


class AlarmError(Exception):
    pass


@pytest.fixture
def came() -> Iterator[list[str]]:
    """What the handlers of two signals note, of which the first one raises."""
    noted: list[str] = []

    def usr1(number: int, frame: FrameType | None) -> None:
        noted.append("usr1")
        raise AlarmError

    def usr2(number: int, frame: FrameType | None) -> None:
        noted.append("usr2")

    handlers: dict[int, Handler] = {
        signal.SIGUSR1: usr1,
        signal.SIGUSR2: usr2,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield noted
    for number, handler in handlers.items():
        assert signal.getsignal(number) is handler, "it is not back"
        signal.signal(number, before[number])


def test_each_handler_runs_once_and_after_the_lock(came: list[str]) -> None:
    lock = StepLock()
    with pytest.raises(AlarmError), lock:
        with lock:
            for _ in range(2):
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR2)
        assert not came
    assert sorted(came) == ["usr1", "usr2"]
    assert lock._owner is None


def test_ctrl_c_waits_and_a_second_one_does_not(came: list[str]) -> None:
    lock, reached = StepLock(), []
    torn: list[BaseException] = []
    lock.torn_by = torn.append
    with pytest.raises(KeyboardInterrupt), lock:
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
    assert not torn
    with pytest.raises(KeyboardInterrupt), lock:
        signal.raise_signal(signal.SIGINT)
        reached.append(2)
        signal.raise_signal(signal.SIGINT)
        reached.append(3)
    assert reached == [1, 2]
    assert [type(error) for error in torn] == [KeyboardInterrupt]


def test_an_ordinary_error_tears_nothing_and_another_one_does() -> None:
    lock = StepLock()
    torn: list[BaseException] = []
    lock.torn_by = torn.append
    with pytest.raises(ZeroDivisionError), lock, lock:
        raise ZeroDivisionError
    assert not torn
    with pytest.raises(SystemExit), lock, lock:
        raise SystemExit
    assert [type(error) for error in torn] == [SystemExit]  # once, where the outermost one ends
    with lock:
        pass


def test_what_tears_the_step_may_fail_and_the_lock_is_free(came: list[str]) -> None:
    lock = StepLock()

    def fail(error: BaseException) -> None:
        raise ZeroDivisionError

    lock.torn_by = fail
    with pytest.raises(ZeroDivisionError), lock:
        raise SystemExit
    assert lock._lock.acquire(blocking=False)


def test_a_signal_of_another_handler_in_between(came: list[str]) -> None:
    """One that comes while the handlers are put back: the others are put back nevertheless."""
    calls: list[int] = []

    class Once(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()
            if not calls:
                calls.append(1)
                signal.raise_signal(signal.SIGUSR1)  # which is not among them

    with pytest.raises(AlarmError), held(Once([signal.SIGUSR2])):
        raise AssertionError("it is entered")
    assert came == ["usr1"]


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    first, second = (lambda *_: None), (lambda *_: None)
    try:
        signal.signal(signal.SIGUSR2, first)
        with StepLock():
            signal.signal(signal.SIGUSR2, second)
        assert signal.getsignal(signal.SIGUSR2) is second
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_handlers_are_looked_for_when_it_is_said() -> None:
    before, came = signal.signal(signal.SIGUSR1, signal.SIG_IGN), list[int]()
    lock = StepLock()
    try:
        signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
        look_for_handlers()
        with lock:
            signal.raise_signal(signal.SIGUSR1)
            assert not came
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_holds_the_lock_without_signals(came: list[str]) -> None:
    lock, inside, leave = StepLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    signal.raise_signal(signal.SIGUSR2)
    assert came == ["usr2"]  # at once: this thread has no step in hand
    threading.Timer(0.05, leave.set).start()
    with lock:
        assert leave.is_set()
    thread.join()


def test_a_handler_that_raises_while_another_is_exchanged(monkeypatch: pytest.MonkeyPatch, came: list[str]) -> None:
    """It is known what was there, though the exchange has not returned."""
    exchange = interrupts._set_handler

    def exchange_and_raise(number: int, handler: object) -> object:
        before = exchange(number, handler)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return before

    monkeypatch.setattr(interrupts, "_set_handler", exchange_and_raise)
    with pytest.raises(AlarmError), held([signal.SIGUSR2]):
        raise AssertionError("it is entered")
    assert came == ["usr1"]


def test_an_exception_that_is_kept_tells_no_later_backward() -> None:
    """Ctrl-C in an end of backward, whose traceback keeps that end."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[BaseException] = []

    def iterate() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=1) as overlap:
        iterate()
        with patch.object(EndOfBackward, "run", once(EndOfBackward.run)):
            try:
                iterate()
            except KeyboardInterrupt as error:
                kept.append(error)
        assert kept
        optimizer.zero_grad()
        overlap.accept_torn()
        iterate()

        def frees(_: torch.Tensor) -> None:
            kept.clear()
            gc.collect()

        model.get_parameter("0.weight").register_hook(frees)
        iterate()
        overlap.require_committed()


def test_a_handler_that_reads_between_a_look_at_the_class_and_the_use() -> None:
    """A parameter whose update is due is watched until somebody waits for it, here in a handler."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    tell = watch._tell_of_grad

    def reads_first(parameter: torch.Tensor, func: object) -> None:
        overlap.synchronize()
        tell(parameter, func)

    with instep.attach(model, optimizer, schedule="forward", defer=True) as overlap:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with patch.object(watch, "_tell_of_grad", reads_first):
                optimizer.zero_grad()
        overlap.require_committed()
