"""``schedule="backward"`` with ``defer=True``: a worker updates buckets while backward goes on, and nobody can tell."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._optim.kernels import Kernel, KernelCall
from instep._optim.stepper import Stepper
from instep._step.beside_backward import MOST, UpdatesBeside
from instep._step.deferral import WARM_UP, DeferralTrial
from instep._torch.interrupts import StepLock
from instep._torch.worker import NAME, Task, Worker
from instep.errors import AttachError, HyperparameterChangedError, TornStepError, UncommittedStepError
from instep.sources.local import WritingBackwards
from instep_tools.harness import first_difference, training_state
from tests import net
from tests.cases import Blocks, batch
from tests.devices import on_cpu_only
from tests.inside import trial_of
from tests.late import late_updates
from tests.parity.interrupts import LineInterrupter, send_an_exception

pytestmark = on_cpu_only
BUCKET = 4_000
STEPS = 5


def muon_beside_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, fused=True)]


MAKERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "AdamW": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)],
    "Adam amsgrad": lambda m: [torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, fused=True)],
    "SGD": lambda m: [torch.optim.SGD(m.parameters(), lr=1e-2, fused=True)],
    "SGD momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, fused=True)],
    "Muon": muon_beside_adamw,
}


class Loop:
    def __init__(self, maker: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Blocks()
        self.optimizers = MAKERS[maker](self.model)
        self.overlap: Any = None
        if options:
            given = {"schedule": "backward", "defer": True, "bucket_bytes": BUCKET, **options}
            self.overlap = instep.attach(self.model, self.optimizers, **given)

    def backward(self, i: int) -> None:
        x, y = batch(i)
        nn.functional.cross_entropy(self.model(x), y).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self, steps: int, first: int = 0) -> None:
        for i in range(first, first + steps):
            self.backward(i)
            self.step()


def beside(maker: str = "AdamW") -> Loop:
    return Loop(maker, defer=True)


def difference(one: Loop, other: Loop) -> str | None:
    found = (
        first_difference(training_state(one.model, a), training_state(other.model, b))
        for a, b in zip(one.optimizers, other.optimizers, strict=True)
    )
    return next((text for text in found if text is not None), None)


@contextmanager
def hooked(parameter: torch.Tensor, act: Callable[[], object]) -> Iterator[None]:
    """``act`` is called where the gradient of ``parameter`` has been computed."""
    handle = parameter.register_hook(lambda _: (act(), None)[1])
    try:
        yield
    finally:
        handle.remove()  # autograd would keep what it refers to, such as the loop


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many updates were on their way when each bucket was handed over, with that bucket."""
    found: list[int] = []
    hand_over = UpdatesBeside.hand_over

    def counted(self: UpdatesBeside, bucket: Any) -> None:
        hand_over(self, bucket)
        found.append(len(self._under_way))

    monkeypatch.setattr(UpdatesBeside, "hand_over", counted)
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_each_step_is_the_plain_one(maker: str, late: bool, handed: list[int]) -> None:
    plain, loop = Loop(maker), beside(maker)
    with late_updates() if late else nullcontext():
        for i in range(STEPS):
            plain.train(1, i)
            loop.train(1, i)
            assert difference(plain, loop) is None
    buckets = len(loop.overlap.plan.buckets)
    assert buckets > MOST + 1
    assert len(handed) == (STEPS - 1) * buckets  # the first step makes state, in the hooks
    assert max(handed) <= MOST + 1  # a bucket of two optimizers has two parts


def test_gradients_of_few_buckets_are_alive() -> None:
    loop = beside()
    loop.train(2)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def count(parameter: torch.Tensor) -> None:
        nonlocal most
        if parameter.grad is not None:
            alive.append(weakref.ref(parameter.grad))
        held = sum(gradient.nbytes for ref in alive if (gradient := ref()) is not None)
        most = max(most, held)

    handles = [p.register_post_accumulate_grad_hook(count) for p in loop.model.parameters()]
    loop.backward(2)
    assert loop.overlap.stats()["freed_bytes"] > 0
    for handle in handles:
        handle.remove()
    loop.step()
    largest = max(max(p.nbytes for p in loop.model.parameters()), BUCKET)
    assert most <= (MOST + 1) * largest


# Whoever looks, in backward or after it.


def test_a_weight_that_is_read_in_backward_is_told_of(handed: list[int]) -> None:
    loop = beside()
    loop.train(2)
    told = pytest.raises(UncommittedStepError, match=r"'outer\.weight' was used in backward")
    with hooked(loop.model.inner.bias, lambda: loop.model.outer.weight.sum()), late_updates(), told:
        loop.backward(2)
    assert handed
    with pytest.raises(TornStepError) as torn:
        loop.model(batch(0)[0])
    assert "outer.weight" in torn.value.applied


def test_a_graph_that_has_saved_a_weight_refuses_before_the_update_has_run() -> None:
    """Also with a fused kernel, which counts no write: the node would read what the worker may be writing."""
    loop = beside()
    loop.train(2)
    saved = loop.model.inner.weight  # of the last bucket, which is on its way when the node runs

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (weight,) = ctx.saved_tensors
            return grads[0] * weight.detach().sum()

    x, y = batch(2)
    loss = nn.functional.cross_entropy(loop.model(Late.apply(x.requires_grad_())), y)
    with late_updates(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_with_another_owner_is_updated_in_its_hook(handed: list[int]) -> None:
    plain, loop = Loop(), beside()
    alias = loop.model.outer.weight.detach()
    for i in range(STEPS):
        plain.train(1, i)
        with late_updates():
            loop.backward(i)
            assert torch.equal(alias, plain.model.outer.weight)
        loop.step()
        assert difference(plain, loop) is None
    assert len(handed) == (STEPS - 1) * (len(loop.overlap.plan.buckets) - 1)


def test_a_gradient_that_somebody_has_kept_and_writes(handed: list[int]) -> None:
    loop = beside()
    loop.train(2)
    kept: list[torch.Tensor] = []
    last = loop.model.get_parameter("blocks.0.1.weight")  # of a bucket that is not updated yet when the last one is due
    last.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.detach()))
    told = pytest.raises(UncommittedStepError, match=r"was written in backward, through another tensor")
    with hooked(loop.model.inner.weight, lambda: kept[0].zero_()), late_updates(), told:
        loop.backward(2)
    assert handed


def test_one_thread_at_a_time_steps_with_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one bucket is updated in its hook, and the one before it by a worker that is slow."""
    loop = beside()
    kept = loop.model.get_parameter("blocks.1.1.weight").detach()
    loop.train(2)
    step, running, met = Stepper.step, threading.Semaphore(), []

    def alone(self: Stepper, *args: Any, **kwargs: Any) -> None:
        met.append(running.acquire(blocking=False))
        threading.Event().wait(0.01)
        step(self, *args, **kwargs)
        if met[-1]:
            running.release()

    monkeypatch.setattr(Stepper, "step", alone)
    loop.train(1, 2)
    assert len(met) == len(loop.overlap.plan.buckets)
    assert all(met)
    assert kept is not None


# What stops a step.


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The ``number``-th update from now on raises, when it has begun."""
    run, left = KernelCall.run, [number]

    def fails(self: KernelCall, gradients: list[torch.Tensor]) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ZeroDivisionError("the kernel")
        run(self, gradients)

    monkeypatch.setattr(KernelCall, "run", fails)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("defer", [False, True])
def test_an_update_that_raises_tears_the_step(number: int, defer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of it is what is said where the update runs in the hook, but for what was updated before backward
    has heard of it."""
    plain, loop = Loop(), Loop(defer=defer)
    plain.train(2)
    loop.train(2)
    buckets = [[p.name for p in bucket.parameters] for bucket in loop.overlap.plan.buckets]
    failing(monkeypatch, number)
    with pytest.raises(ZeroDivisionError, match="the kernel"):
        loop.backward(2)
    with pytest.raises(TornStepError) as raised:
        loop.step()
    torn = raised.value
    monkeypatch.undo()
    assert list(torn.unsure) == buckets[number - 1]
    assert set(torn.applied) == {name for bucket in buckets[: number - 1] for name in bucket}
    plain.train(1, 2)
    new, old = dict(plain.model.named_parameters()), dict(loop.model.named_parameters())
    assert all(torch.equal(old[name], new[name]) for name in torn.applied)
    for name in torn.pending:
        assert type(old[name].grad) is torch.Tensor  # as where the update runs in the hook, and nothing in its place
    loop.overlap.accept_torn()
    assert loop.overlap.state == "idle"
    loop.train(1, 3)


def test_backward_that_raises_waits_for_what_was_handed_over(handed: list[int]) -> None:
    plain, loop = Loop(), beside()
    plain.train(3)
    loop.train(2)
    handed.clear()

    with hooked(loop.model.inner.bias, lambda: 1 / 0), late_updates(), pytest.raises(ZeroDivisionError):
        loop.backward(2)
    assert handed
    with pytest.raises(TornStepError) as raised:
        loop.model(batch(0)[0])
    assert raised.value.applied
    assert not raised.value.unsure
    new, old = dict(plain.model.named_parameters()), dict(loop.model.named_parameters())
    assert all(torch.equal(old[name], new[name]) for name in raised.value.applied)


@pytest.mark.parametrize("where", [0, 1])
def test_what_was_given_to_the_worker_is_done_though_an_exception_came_in_between(where: int) -> None:
    """A task may be in the worker's heap, and its token lost."""
    loop = beside()
    loop.train(2)
    interrupter = LineInterrupter(where, Worker._give, send_an_exception)

    def go() -> None:
        assert interrupter.interrupt(lambda: loop.backward(2)) is None
        loop.overlap.accept_torn()
        loop.optimizers[0].zero_grad()
        loop.train(1, 3)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join(net.SECONDS / 30)
    waits_for_ever = thread.is_alive()
    while thread.is_alive():
        loop.overlap._parts.schedule._beside._worker._tokens.put(True)
        thread.join(0.1)
    assert not waits_for_ever
    assert interrupter.place is not None
    assert loop.overlap.state == "idle"


def test_a_switch_that_changes_in_backward_is_noticed() -> None:
    """Muon multiplies matrices, and how is everybody's switch: an update beside backward may have read either."""
    loop = beside("Muon")
    loop.train(2)
    before = torch.get_float32_matmul_precision()

    def change() -> None:
        torch.set_float32_matmul_precision("medium" if before == "highest" else "highest")

    plain = Loop("Muon")
    plain.train(2)
    try:
        # They run where they are waited for, and under the switches of then.
        with hooked(loop.model.get_parameter("blocks.1.1.weight"), change), late_updates():
            loop.backward(2)
    finally:
        torch.set_float32_matmul_precision(before)
    loop.step()
    plain.train(1, 2)
    assert difference(plain, loop) is None


# Whoever comes in between: a signal's handler, another thread, the collector on the worker, a hook that writes.


def in_wait(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], times: int = 1) -> None:
    """``act`` is called so often, as a signal's handler would be, while backward's end waits for the worker."""
    wait, armed = Task.wait, [act] * times

    def interrupted(task: Task) -> None:
        if armed and threading.current_thread().name != NAME:
            armed.pop()()
        wait(task)

    monkeypatch.setattr(Task, "wait", interrupted)


def test_a_handler_that_raises_while_backward_ends_tears_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Ctrl-C alone: any error of a handler's, as of an alarm's."""
    plain, loop = Loop(), Loop(defer=True, bucket_bytes=1 << 20)  # one bucket, so it is the end that waits
    plain.train(3)
    loop.train(2)

    def raise_timeout() -> None:
        raise TimeoutError("the alarm")

    in_wait(monkeypatch, raise_timeout)
    with pytest.raises(TimeoutError):
        loop.backward(2)
    with pytest.raises(TornStepError) as raised:
        loop.step()
    new, old = dict(plain.model.named_parameters()), dict(loop.model.named_parameters())
    assert set(raised.value.applied) == set(new)
    assert all(torch.equal(old[name], new[name]) for name in new)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_torn_where_a_handler_has_raised_before_backward_could_wait(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is on its way, and the error says what has come to be."""
    plain, loop = Loop(), Loop(defer=True, bucket_bytes=1 << 20)
    plain.train(3)
    loop.train(2)

    def alarm(self: WritingBackwards) -> None:
        raise TimeoutError("the alarm")

    with monkeypatch.context() as patch:
        if fails:
            failing(patch, 1)
        run = KernelCall.run
        patch.setattr(WritingBackwards, "no_more", alarm)
        patch.setattr(KernelCall, "run", lambda *of: (threading.Event().wait(0.05), run(*of))[1])
        with pytest.raises(TimeoutError):
            loop.backward(2)
        with pytest.raises(TornStepError) as raised:
            loop.step()
    old, new = dict(loop.model.named_parameters()), dict(plain.model.named_parameters())
    assert set(raised.value.applied) == (set() if fails else set(new))
    assert all(torch.equal(old[name], new[name]) for name in raised.value.applied)
    assert loop.overlap.step_count == 2
    loop.overlap.accept_torn()


def test_a_handler_that_raises_again_where_that_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second error comes out of backward itself, and none is left for the next one."""
    loop = Loop(defer=True, bucket_bytes=1 << 20)
    loop.train(2)

    def raise_timeout() -> None:
        raise TimeoutError("the alarm")

    with monkeypatch.context() as patch:
        in_wait(patch, raise_timeout, 2)
        with pytest.raises(TimeoutError):
            loop.backward(2)
    with suppress(TornStepError):
        loop.step()
    if loop.overlap.state == "torn":
        loop.overlap.accept_torn()
    loop.optimizers[0].zero_grad()
    loop.train(1, 3)


def test_a_handler_that_synchronizes_while_backward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, loop = Loop(), beside()
    plain.train(4)
    loop.train(2)
    in_wait(monkeypatch, lambda: loop.overlap._parts.schedule.settle())
    loop.train(2, 2)
    assert difference(plain, loop) is None


def test_code_that_the_worker_comes_to_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run there, and what it frees may have a ``__del__`` that asks the attachment."""
    plain, loop = Loop(), beside()
    plain.train(3)
    loop.train(2)
    schedule = loop.overlap._parts.schedule
    run, wait = KernelCall.run, Task.wait

    def asks(self: KernelCall, gradients: list[torch.Tensor]) -> None:
        schedule.settle()
        run(self, gradients)

    def waits(task: Task) -> None:
        assert threading.current_thread().name != NAME, "it waits for itself"
        wait(task)

    monkeypatch.setattr(KernelCall, "run", asks)
    monkeypatch.setattr(Task, "wait", waits)
    monkeypatch.setattr(StepLock, "__enter__", lambda _: None)  # at which it would stop before
    monkeypatch.setattr(StepLock, "__exit__", lambda *_: None)
    try:
        loop.train(1, 2)
    finally:
        monkeypatch.undo()
        loop.overlap.detach()
    assert difference(plain, loop) is None


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_denormal_numbers_are_flushed_where_the_loop_has_them_flushed(schedule: str) -> None:
    """A switch of each thread's own."""
    plain, loop = Loop(), Loop(defer=True, schedule=schedule)

    def train(first: int) -> None:
        for one in (plain, loop):
            for i in (first, first + 1):
                x, y = batch(i)
                (nn.functional.cross_entropy(one.model(x), y) * 1e-17).backward()
                one.step()

    train(0)  # the worker's thread is there, and so are squares that are denormal
    if not torch.set_flush_denormal(True):
        pytest.skip("not on this processor")
    try:
        train(2)
    finally:
        torch.set_flush_denormal(False)
    assert difference(plain, loop) is None


def test_state_that_a_hook_writes_beside_its_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the optimizer for it waits, so that the write comes after the update, as in hooks."""
    loop = beside()
    loop.train(2)
    run = KernelCall.run
    monkeypatch.setattr(KernelCall, "run", lambda *of: (threading.Event().wait(0.02), run(*of))[1])
    last = loop.model.get_parameter("blocks.0.1.weight")

    def write() -> None:
        loop.optimizers[0].state[last]["exp_avg"].mul_(3)

    with hooked(loop.model.inner.weight, write):
        loop.backward(2)
    with pytest.raises(HyperparameterChangedError):
        loop.step()
    assert type(loop.optimizers[0]) is torch.optim.AdamW
    loop.overlap.accept_torn()


def test_a_setting_that_changes_where_the_worker_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's settings are those of when its first bucket was handed over, and not of when the worker looks."""
    loop = beside()
    loop.train(2)
    group, calls, armed = loop.optimizers[0].param_groups[0], Kernel.calls, [True]

    def changes(self: Kernel, *args: Any) -> Any:
        found = calls(self, *args)
        if armed:
            armed.clear()
            group["lr"] = 0.5  # as a hook may, meanwhile
        return found

    monkeypatch.setattr(Kernel, "calls", changes)
    with pytest.raises(HyperparameterChangedError, match="lr"):
        loop.backward(2)
    group["lr"] = 1e-2
    loop.overlap.accept_torn()


def test_an_update_that_has_raised_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = beside()
    loop.train(2)
    failing(monkeypatch, 2)
    with pytest.raises(ZeroDivisionError):
        loop.backward(2)
    monkeypatch.undo()
    gone = [weakref.ref(one) for one in loop.model.parameters()]
    gc.disable()
    try:
        loop.overlap.detach()
        del loop
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


# The life of an attachment.


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_a_loop_that_is_dropped_is_freed_at_once() -> None:
    """Without the collector; and its thread ends."""
    loop = beside("Muon")
    loop.train(3)
    gone = [weakref.ref(one) for one in (loop.model, *loop.optimizers)]
    threads = worker_threads()
    assert threads
    worker = weakref.ref(loop.overlap._parts.schedule._beside._worker)
    gc.disable()
    try:
        del loop
        assert [ref() for ref in gone] == [None] * len(gone)
        threads[-1].join(net.SECONDS)
        assert not threads[-1].is_alive()
    finally:
        gc.enable()
        if (left := worker()) is not None:
            left.stop()


def test_detach_ends_the_thread() -> None:
    loop = beside()
    before = worker_threads()
    loop.train(2)
    assert len(worker_threads()) == len(before) + 1
    worker = loop.overlap._parts.schedule._beside._worker
    try:
        loop.overlap.detach()
        assert worker_threads() == before
    finally:
        worker.stop()


def test_detach_in_backward_waits(handed: list[int]) -> None:
    plain, loop = Loop(), beside()
    plain.train(2)
    loop.train(2)
    handed.clear()
    with hooked(loop.model.inner.bias, loop.overlap.detach):
        loop.backward(2)
    loop.step()
    plain.train(1, 2)
    assert handed
    assert difference(plain, loop) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_is_forked_in_backward_waits_for_no_worker() -> None:
    loop = beside()
    loop.train(2)
    ended: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if not loop.overlap._parts.schedule._beside._under_way else 1)
        ended.append(os.waitpid(child, 0)[1])

    with hooked(loop.model.inner.bias, fork):
        loop.backward(2)
    loop.step()
    assert ended == [0]


def test_a_step_of_micro_batches(handed: list[int]) -> None:
    plain, loop = Loop(), beside()
    for i in range(STEPS):
        for k in (0, 1):
            x, y = batch(2 * i + k)
            (nn.functional.cross_entropy(plain.model(x), y) / 2).backward()
        plain.step()
        loop.overlap.micro_batches(
            lambda xy: nn.functional.cross_entropy(loop.model(xy[0]), xy[1]) / 2, [batch(2 * i), batch(2 * i + 1)]
        )
        loop.step()
        assert difference(plain, loop) is None
    assert handed


# Whether it is done.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Has an iteration take so many seconds, in the hook and beside backward."""
    now, seconds = [0.0], [1.0, 1.0]

    begins = UpdatesBeside.backward_begins

    def timed(self: UpdatesBeside) -> None:
        begins(self)
        now[0] += seconds[self.takes_some]

    monkeypatch.setattr(UpdatesBeside, "backward_begins", timed)
    monkeypatch.setattr("instep._wiring.advice.DeferralTrial", partial(DeferralTrial, clock=lambda: now[0]))
    monkeypatch.setattr("instep._step.state.StepTimes.spent", None)  # it is by another clock

    def set_seconds(in_hook: float, beside: float) -> None:
        seconds[:] = in_hook, beside

    return set_seconds


@pytest.mark.parametrize(("seconds", "gains"), [(0.9, True), (1.0, False)])
def test_a_trial_decides(
    seconds: float, gains: bool, clock: Callable[[float, float], None], handed: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr("instep._wiring.advice._one_core", lambda refs: None)
    clock(1.0, seconds)
    plain, loop = Loop(), Loop(defer="auto")
    for number in range(WARM_UP + 32 + 3):  # it decides where the next backward begins
        plain.train(1, number)
        loop.train(1, number)
        if number < WARM_UP + 32:
            assert "steps taken beside backward" not in repr(loop.overlap), "it is still being tried"
    buckets = len(loop.overlap.plan.buckets)
    assert len(handed) == (16 + (2 if gains else 0)) * buckets
    assert difference(plain, loop) is None
    assert ("Steps are taken beside backward (in 16 of 16 pairs" in loop.overlap.advice) == gains
    assert ("steps taken beside backward" in repr(loop.overlap)) == gains


@pytest.mark.parametrize("maker", ["not fused", "one core", "compiled", "asked"])
def test_where_it_is_not_even_tried(maker: str, handed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep._step.deferral.WARM_UP", 0)
    cores = 1 if maker == "one core" else 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setitem(MAKERS, "not fused", lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=False)])
    loop = Loop(maker if maker in MAKERS else "AdamW", defer=False if maker == "asked" else "auto")
    if maker == "compiled":
        monkeypatch.setattr("instep._wiring.advice._is_compiled", lambda model: True)
    loop.train(4)
    assert not handed
    assert trial_of(loop.overlap).never


def test_what_takes_turns_with_backward_stays_in_its_hooks(handed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was asked for."""
    monkeypatch.setitem(MAKERS, "not fused", lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True)])
    plain, loop = Loop("not fused"), beside("not fused")
    plain.train(3)
    loop.train(3)
    assert not handed
    assert difference(plain, loop) is None


@pytest.mark.parametrize(
    "option",
    [{"undo": True}, {"clip": instep.ClipValue(1.0)}, {"nonfinite": "raise"}],
    ids=lambda option: next(iter(option)),
)
def test_an_option_with_a_part_in_each_update(option: dict[str, Any], handed: list[int]) -> None:
    """Asked for together they are refused; unasked, updates run in the hook."""
    with pytest.raises(AttachError, match=f"does not go with {next(iter(option))}: these have a part in each update"):
        Loop(**option)
    loop = Loop(defer="auto", **option)
    loop.train(3)
    assert not handed


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is slow holds backward up where ``MOST`` buckets wait for it, and no longer."""
    loop = beside()
    loop.train(2)
    run = KernelCall.run
    monkeypatch.setattr(KernelCall, "run", lambda *of: (threading.Event().wait(0.01), run(*of))[1])
    done = threading.Thread(target=loop.train, args=(1, 2), daemon=True)
    done.start()
    done.join(net.SECONDS)
    assert not done.is_alive()
