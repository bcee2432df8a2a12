"""The private parts of torch that instep stands on. A failure here says which one has changed."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel

from instep._torch.engine import Backward, Phase, call_at_end, current, graph_task, is_compiled, runs
from instep._torch.hooks import undecorated_step


def test_graph_task_numbers_the_running_backward() -> None:
    seen: list[int | None] = []
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(graph_task()))
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    assert graph_task() is None
    assert len(set(seen)) == 2
    assert None not in seen


def test_a_compiled_backward_says_so() -> None:
    seen: list[bool] = []
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(is_compiled()))
    layer(torch.ones(1, 2)).sum().backward()
    with compiled_autograd._enable(lambda graph: graph):
        layer(torch.ones(1, 2)).sum().backward()
    assert seen[0] is False
    assert True in seen
    assert not is_compiled()


def test_callbacks_run_at_the_end_in_the_order_they_were_asked_for() -> None:
    order: list[str] = []
    layer = nn.Linear(2, 2)

    def first() -> None:
        order.append("first")
        call_at_end(lambda: order.append("third"))

    def hook(_: torch.Tensor) -> None:
        order.append("gradient")
        call_at_end(first)
        call_at_end(lambda: order.append("second"))

    layer.weight.register_post_accumulate_grad_hook(hook)
    layer(torch.ones(1, 2)).sum().backward()
    assert order == ["gradient", "first", "second", "third"]


def backward_asking(ask: Callable[[], object], *, then: Callable[[], object] = lambda: None) -> None:
    """A backward in which ``ask`` is called at its first gradient of a parameter, and ``then`` at the next."""
    calls = iter([ask, then])
    layer = nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: next(calls)())
    layer(torch.ones(1, 2)).sum().backward()


def test_ends_are_called_phase_by_phase_whatever_the_order_of_asking() -> None:
    order: list[str] = []

    def ask() -> None:
        for phase in reversed(Phase):
            for number in range(2):
                current().at(phase, partial(order.append, f"{phase.name} {number}"))

    backward_asking(ask)
    assert order == [f"{phase.name} {number}" for phase in Phase for number in range(2)]


def test_ends_of_torchs_own_run_between_the_first_two_phases() -> None:
    """DDP asks for its end while gradients arrive, behind what is asked for at its last bucket; or, with
    ``static_graph``, in a callback, which launches the buckets."""
    order: list[str] = []

    def launch() -> None:
        current().at(Phase.AFTER_DDP, partial(order.append, "after"))
        current().at(Phase.BEFORE_DDP, partial(order.append, "before"))
        call_at_end(partial(order.append, "DDP"))

    def ask() -> None:
        current().at(Phase.SETTLED, partial(order.append, "settled"))

    backward_asking(ask, then=launch)
    assert order == ["before", "DDP", "after", "settled"]
    for turns in range(6):
        order.clear()

        def in_a_callback(turns: int) -> None:
            call_at_end(launch if turns == 0 else partial(in_a_callback, turns - 1))

        backward_asking(ask, then=partial(in_a_callback, turns))
        assert order[-3:] == ["DDP", "after", "settled"] or order == ["settled", "before", "DDP", "after"]
        assert order.index("before") < order.index("DDP") < order.index("after")
    assert order[0] == "settled"  # it is that late


def test_what_is_asked_for_before_ddps_end_keeps_later_phases_waiting() -> None:
    """A turn may be in the queue by then: behind DDP's callback, and before DDP's end."""
    order: list[str] = []

    def launch() -> None:
        current().at(Phase.BEFORE_DDP, before)
        call_at_end(partial(order.append, "DDP"))

    def before() -> None:
        order.append("before")
        current().at(Phase.AFTER_DDP, partial(order.append, "after"))

    def ask() -> None:
        current().at(Phase.SETTLED, partial(order.append, "settled"))
        call_at_end(launch)

    backward_asking(ask)
    assert order == ["before", "DDP", "after", "settled"]


def test_an_end_that_is_asked_for_in_a_phase_is_called_in_the_phase_that_it_names() -> None:
    order: list[str] = []

    def first() -> None:
        order.append("after")
        current().at(Phase.LAST, partial(order.append, "last"))
        current().at(Phase.AFTER_DDP, partial(order.append, "after, too"))

    def ask() -> None:
        current().at(Phase.SETTLED, partial(order.append, "settled"))
        current().at(Phase.AFTER_DDP, first)

    backward_asking(ask)
    assert order == ["after", "after, too", "settled", "last"]


def test_a_nested_backward_is_another() -> None:
    seen: list[Backward] = []
    order: list[str] = []

    def inner() -> None:
        seen.append(current())
        current().at(Phase.LAST, partial(order.append, "inner"))

    def outer() -> None:
        seen.append(current())
        current().at(Phase.AFTER_DDP, partial(order.append, "outer"))
        with torch.enable_grad():
            backward_asking(inner, then=inner)

    backward_asking(outer, then=lambda: seen.append(current()))
    assert order == ["inner", "inner", "outer"]
    assert seen[0] is seen[3] is not seen[1] is seen[2]
    with pytest.raises(RuntimeError):
        current()


def fail(_: object = None) -> Any:
    raise ValueError("boom")


@pytest.mark.parametrize("phase", Phase)
def test_a_failed_backward_drops_its_ends_before_the_except_clause(phase: Phase) -> None:
    """Also those of a backward that is kept."""
    events: list[str] = []
    kept: list[Backward] = []
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    hidden = x * 1
    hidden.register_hook(fail)

    def ask(_: torch.Tensor) -> None:
        kept.append(current())
        for number in "12":
            current().at(phase, partial(events.append, "end"), partial(events.append, "failed " + number))

    layer.weight.register_post_accumulate_grad_hook(ask)
    try:
        layer(hidden).sum().backward()
    except ValueError:
        events.append("except")
    assert events == ["failed 1", "failed 2", "except"]


@pytest.mark.parametrize("phase", Phase)
def test_an_end_that_raises_has_those_after_it_fail_before_the_except_clause(phase: Phase) -> None:
    """And not itself, nor those before it."""
    events: list[str] = []

    def ask() -> None:
        current().at(phase, partial(events.append, "end 1"), partial(events.append, "failed 1"))
        current().at(phase, fail, partial(events.append, "failed 2"))
        for later in range(phase, Phase.LAST + 1):
            current().at(Phase(later), partial(events.append, "end"), partial(events.append, f"failed {later}"))

    try:
        backward_asking(ask)
    except ValueError:
        events.append("except")
    assert events[0] == "end 1"
    assert sorted(events[1:-1]) == [f"failed {later}" for later in range(phase, Phase.LAST + 1)]
    assert events[-1] == "except"


def test_a_failed_backward_keeps_nothing_alive() -> None:
    class Held:
        def end(self) -> None:
            """Nothing."""

    gc.disable()
    try:
        refs: list[weakref.ref[Held]] = []

        def ask() -> None:
            held = Held()
            refs.append(weakref.ref(held))
            current().at(Phase.AFTER_DDP, fail)
            for phase in Phase:
                current().at(phase, held.end, held.end)

        with pytest.raises(ValueError, match="boom"):
            backward_asking(ask)
        (ref,) = refs
        assert ref() is None
    finally:
        gc.enable()


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_end_that_is_interrupted_may_have_noted_nothing(error: type[BaseException]) -> None:
    calls: list[str] = []

    def end() -> None:
        calls.append("end")
        raise error

    with pytest.raises(error):
        backward_asking(lambda: current().at(Phase.AFTER_DDP, end, lambda: calls.append("failed")))
    assert calls == (["end", "failed"] if error is KeyboardInterrupt else ["end"])
