"""Threads: one model is trained on one at a time; models of their own do not meet."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import instep
from instep._torch.interrupts import StepLock
from instep._torch.worker import NAME, Task, Worker
from instep.errors import ConcurrentBackwardError, UncommittedStepError
from tests import net
from tests.cases import Blocks, batch, weights
from tests.devices import on_cpu_only
from tests.inside import before_updates, schedule_of, source_of
from tests.parity.lockstep import SMALL, WAYS


def in_thread(do: Callable[[], Any]) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(net.SECONDS)
    assert not thread.is_alive()
    return raised


def make() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    x, y = batch(i)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_forward_while_the_step_of_another_thread_is_open() -> None:
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, 2)
    model, optimizer = make()
    with instep.attach(model, optimizer, schedule="backward"):
        loss_of(model, 0).backward()
        (error,) = in_thread(lambda: loss_of(model, 9))
        assert isinstance(error, ConcurrentBackwardError)
        optimizer.step()
        optimizer.zero_grad()
        others: list[Any] = in_thread(lambda: loss_of(model, 1).backward())
        (other,) = others or [None]
        assert other is None  # between steps any thread may go on
        optimizer.step()
    assert all(map(torch.equal, weights(plain), weights(model)))


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_a_backward_beside_another(way: str) -> None:
    """torch's in-backward optimizers crash the process here."""
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, 1)
    model, optimizer = make()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **WAYS[way]) as overlap:
        losses: dict[str, torch.Tensor] = {}
        raised: list[BaseException] = []

        def other() -> None:
            raised.extend(in_thread(lambda: losses["other"].backward()))

        def forward() -> None:
            losses["other"] = loss_of(model, 5)

        assert not in_thread(forward)
        handle = next(model.blocks[1].parameters()).register_hook(lambda _: other())
        loss_of(model, 0).backward()
        handle.remove()
        assert all(isinstance(error, ConcurrentBackwardError) for error in raised)
        assert raised
        optimizer.step()
        overlap.synchronize()
    assert all(map(torch.equal, weights(plain), weights(model)))


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(0)[0])


@on_cpu_only  # elsewhere the engine's threads run backward, and nobody knows the loop's
@pytest.mark.parametrize("when", ["between", "in step()"])
@pytest.mark.parametrize("way", ["undo", "backward", "forward", "default"])
def test_another_thread_evaluates(way: str, when: str) -> None:
    """At no time does it bring to an end what the loop's thread is in the middle of."""
    plain, optimizer = make()
    train(plain, optimizer, 4)
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, bucket_bytes=SMALL, **WAYS.get(way, {}))
    raised: list[BaseException] = []

    def look(*_: object) -> None:
        raised.extend(in_thread(lambda: evaluate(model)))

    if when == "in step()":
        optimizer.register_step_post_hook(look)  # after instep's: the call is not over
        optimizer.register_step_pre_hook(look)
    for i in range(4):
        loss_of(model, i).backward()
        if when == "between":
            look()
        optimizer.step()
        optimizer.zero_grad()
    overlap.synchronize()
    assert all(map(torch.equal, weights(plain), weights(model)))
    expected = (UncommittedStepError,) if way in ("undo", "backward") else ()
    assert all(isinstance(error, expected) for error in raised), raised
    assert raised or not expected
    overlap.detach()


@on_cpu_only
@pytest.mark.parametrize("way", ["undo", "backward", "forward", "default"])
def test_another_thread_evaluates_all_the_time(way: str) -> None:
    plain, optimizer = make()
    train(plain, optimizer, 40)
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, bucket_bytes=SMALL, **WAYS.get(way, {}))
    over, raised = threading.Event(), set[type[BaseException]]()

    def run() -> None:
        while not over.is_set():
            try:
                evaluate(model)
            except Exception as error:
                raised.add(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        train(model, optimizer, 40)
    finally:
        over.set()
        thread.join(net.SECONDS)
    overlap.synchronize()
    assert all(map(torch.equal, weights(plain), weights(model)))
    assert raised <= {UncommittedStepError}
    overlap.detach()


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
@pytest.mark.parametrize("threads", [2, 4])
def test_models_of_their_own(way: str, threads: int) -> None:
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, 30)
    models = [make() for _ in range(threads)]
    overlaps = [instep.attach(*pair, bucket_bytes=SMALL, **WAYS[way]) for pair in models]
    running = [threading.Thread(target=train, args=(*pair, 30)) for pair in models]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(net.SECONDS)
    for (model, _), overlap in zip(models, overlaps, strict=True):
        overlap.detach()
        assert all(map(torch.equal, weights(plain), weights(model)))


def test_gradients_are_counted_under_the_lock_that_applies_them() -> None:
    """The engine has a thread for each accelerator, and the gradients of one model may arrive on several: what the
    hooks count must not change between two lines of theirs. Here there is one thread, and the lock tells."""
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward")
    sink = source_of(overlap)._sink
    seen: list[int] = []
    arrive, apply = type(sink).arrive, type(sink).apply

    def look(call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: Any, **kwargs: Any) -> Any:
            seen.append(sink._step.lock._depth)
            return call(*args, **kwargs)

        return looked

    with patch.object(type(sink), "arrive", look(arrive)), patch.object(type(sink), "apply", look(apply)):
        train(model, optimizer, 4)  # with a hook on each parameter, and with one on each bucket
    overlap.detach()
    assert len(seen) > 8
    assert min(seen) == 1


class NotForTheWorker(StepLock):
    """A lock that the thread of the step must not wait for: who waits for that thread has the lock."""

    def __enter__(self) -> None:
        assert threading.current_thread().name != NAME, "an update waits for itself"
        super().__enter__()


@on_cpu_only  # on an accelerator it has no thread
def test_an_update_on_the_thread_of_the_step_does_not_wait_for_itself() -> None:
    """It comes upon the optimizer of the loop and its parameters, and not only upon what it is given."""
    found, looked = [], []
    for attached in (False, True):
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attached:
            overlap = instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=SMALL)
            schedule_of(overlap)._step.lock = NotForTheWorker()

        def look(_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert len(optimizer.state) >= 0
            assert all(p.sum().isfinite() for p in optimizer.param_groups[0]["params"])
            looked.append(threading.current_thread().name)

        with before_updates(look):
            train(model, optimizer, 3)
            if attached:
                overlap.synchronize()
                assert looked.count(NAME) > 3
                overlap.detach()
        found.append(weights(model))
    assert all(map(torch.equal, *found))


@on_cpu_only
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")
def test_the_handler_of_a_signal_waits_for_what_the_thread_waits_for() -> None:
    """As one that saves the model when a scheduler says that the job is about to end."""
    let_run = threading.Event()
    worker = Worker()
    task = worker.run(lambda: [let_run.wait(net.SECONDS)].clear())
    main = threading.get_ident()
    handled: list[bool] = []

    def handle(*_: object) -> None:
        if let_run.is_set():
            return  # sent once more
        let_run.set()
        task.wait()
        handled.append(task.done)

    def send() -> None:
        while sys._current_frames()[main].f_code is not Task.wait.__code__:
            time.sleep(0)
        # Again and again: Python runs no handler for a signal that comes just before the wait for a lock begins.
        last = time.monotonic() + net.SECONDS / 6
        while not let_run.is_set() and time.monotonic() < last:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
        ended.wait(net.SECONDS / 6)
        if not ended.is_set():
            task._gate.release()  # else the test would hang

    before, ended = signal.signal(signal.SIGUSR1, handle), threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    try:
        task.wait()
        hung = not sender.is_alive()
    finally:
        ended.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        worker.stop()
    assert handled == [True]
    assert not hung


@on_cpu_only
def test_an_update_has_as_many_of_torchs_threads_as_its_step() -> None:
    """By their number some kernels divide a sum; and each thread of Python has a number of its own."""
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noted: list[tuple[str, int]] = []

    def note(_: Any) -> None:
        noted.append((threading.current_thread().name, torch.get_num_threads()))

    before = torch.get_num_threads()
    how: dict[str, Any] = {"schedule": "forward", "defer": True, "bucket_bytes": SMALL}
    with before_updates(note), instep.attach(model, optimizer, **how) as overlap:
        try:
            for count in (1, 3, 2):
                torch.set_num_threads(count)
                noted.clear()
                train(model, optimizer, 1)
                torch.set_num_threads(5)
                overlap.synchronize()
                assert set(noted) == {(NAME, count)}
                assert torch.get_num_threads() == 5
        finally:
            torch.set_num_threads(before)
