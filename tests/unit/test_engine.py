"""The private parts of torch that instep stands on. A failure here says which one has changed."""

import _thread
import gc
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instep._autograd import engine
from instep._autograd.engine import _EndOfBackward, at_end_of_backward, graph_task, runs
from instep._optim.calling import undecorated_step
from tests import net


def test_graph_task_numbers_the_running_backward() -> None:
    seen: list[int | None] = []
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(graph_task()))
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    assert graph_task() is None
    assert len(set(seen)) == 2
    assert None not in seen


def test_callbacks_run_at_the_end_in_the_order_they_were_asked_for() -> None:
    order: list[str] = []
    layer = nn.Linear(2, 2)

    def never() -> None:
        order.append("failed")

    def first() -> None:
        order.append("first")
        at_end_of_backward(lambda: order.append("third"), never)

    def hook(_: torch.Tensor) -> None:
        order.append("gradient")
        at_end_of_backward(first, never)
        at_end_of_backward(lambda: order.append("second"), never)

    layer.weight.register_post_accumulate_grad_hook(hook)
    layer(torch.ones(1, 2)).sum().backward()
    assert order == ["gradient", "first", "second", "third"]


def test_a_failed_backward_drops_its_callbacks_before_the_except_clause() -> None:
    events: list[str] = []
    layer = nn.Linear(2, 2)

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    x = torch.ones(1, 2, requires_grad=True)
    hidden = x * 1
    hidden.register_hook(fail)
    layer.weight.register_post_accumulate_grad_hook(
        lambda _: at_end_of_backward(lambda: events.append("end"), lambda: events.append("failed"))
    )
    try:
        layer(hidden).sum().backward()
    except ValueError:
        events.append("except")
    assert events == ["failed", "except"]


def test_torch_wraps_step_once_and_marks_it() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: object = None) -> Any:
            """Mine."""

    layer = nn.Linear(2, 2)
    for cls in (torch.optim.SGD, Mine):
        cls(layer.parameters(), lr=0.1)
        assert undecorated_step(cls) is not cls.step
        assert not hasattr(undecorated_step(cls), "hooked")


def test_what_is_read_of_ddp_is_there() -> None:
    assert DistributedDataParallel._get_active_ddp_module() is None
    source = DistributedDataParallel.__init__.__code__.co_names
    assert {"parameters_to_ignore", "process_group"} <= set(source)


def test_runs_tells_which_parameters_backward_comes_to() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    leaves = [torch.autograd.graph.get_gradient_edge(p).node for p in (used.weight, used.bias, unused.weight)]

    def found(run: object) -> list[bool]:
        seen: list[bool] = []
        output = used(x)
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(lambda _: seen.extend(map(runs, leaves)))
        run(output.sum())  # type: ignore[operator]
        return seen

    assert found(lambda loss: loss.backward()) == [True, True, False]
    assert found(lambda loss: loss.backward(inputs=[used.bias])) == [False, True, False]
    assert found(lambda loss: torch.autograd.grad(loss, x)) == [False] * 3
    assert found(lambda loss: torch.autograd.grad(loss, [used.weight, x])) == [False] * 3


def test_what_was_interrupted_while_it_was_made_can_be_dropped() -> None:
    half = object.__new__(_EndOfBackward)
    del half  # warnings are errors: one that is ignored in __del__, too
    gc.collect()


def start_and_let_run(function: Any, arguments: tuple[Any, ...]) -> None:
    _thread.start_new_thread(function, arguments)
    time.sleep(0.05)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell has its background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("start", [_thread.start_new_thread, start_and_let_run])
def test_an_interrupt_of_what_a_failed_backward_is_owed_is_not_lost(
    start: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon another thread runs."""
    threads = SimpleNamespace(start_new_thread=start, interrupt_main=_thread.interrupt_main)
    monkeypatch.setattr(engine, "_thread", threads)
    calls: list[int] = []

    def failed() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # wherever Python asks next
        end = _EndOfBackward(lambda: None, failed)
        del end
        patience = time.monotonic() + net.SECONDS
        # Python 3.13 may raise Ctrl-C at the jump back of an idle loop, where no clause catches it.
        while time.monotonic() < patience:
            time.sleep(0.001)
    assert calls == [0, 1]
