"""``instep.attach(model, optimizer)`` takes whatever the plain loop does, at any step, also while steps are put off."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import instep
from instep._step import deferral as deferring
from instep._torch.engine import is_captured
from instep.errors import StaleAttachmentError, UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.devices import here
from tests.late import late_updates

STEPS = 8


class Loop:
    def __init__(self, make: Callable[[Any], Optimizer] = lambda p: AdamW(p, lr=1e-2, fused=True)) -> None:
        torch.manual_seed(0)
        self.model = Blocks()
        self.optimizer = make(self.model.parameters())

    def loss(self, i: int) -> torch.Tensor:
        found: torch.Tensor = self.model(batch(i)[0]).square().mean()
        return found

    def step(self, i: int) -> None:
        self.loss(i).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def difference(plain: Loop, loop: Loop) -> str | None:
    return first_difference(*(training_state(one.model, one.optimizer) for one in (plain, loop)))


@pytest.fixture(params=["at once", "put off"])
def puts_off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps are put off in turns, as in the trial."""
    monkeypatch.setattr("instep._wiring.advice._prevented", lambda held: None)
    monkeypatch.setattr("instep._step.deferrable.runs_beside", lambda optimizer: True)
    monkeypatch.setattr(deferring, "WARM_UP", 0 if request.param == "put off" else 1_000)
    return bool(request.param == "put off")


# What the loop does before step 4: to its model, its optimizer, or its gradients.


def replaces_a_parameter(loop: Loop) -> None:
    inner: Any = loop.model.get_submodule("inner")
    inner.weight = nn.Parameter(inner.weight.detach() * 0.5)


def replaces_it_in_both(loop: Loop) -> None:
    inner: Any = loop.model.get_submodule("inner")
    old, inner.weight = inner.weight, nn.Parameter(inner.weight.detach() * 0.5)
    for group in loop.optimizer.param_groups:
        group["params"] = [inner.weight if p is old else p for p in group["params"]]


def takes_one_out(loop: Loop) -> None:
    del loop.optimizer.param_groups[0]["params"][0]


def adds_a_group(loop: Loop) -> None:
    loop.model.register_parameter("more", nn.Parameter(torch.ones(3)))
    loop.optimizer.add_param_group({"params": [loop.model.get_parameter("more")], "lr": 0.5})


def adds_what_is_not_the_model_s(loop: Loop) -> None:
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def trains_on_another_thread(loop: Loop) -> None:
    thread = threading.Thread(target=loop.step, args=(100,))
    thread.start()
    thread.join()


def leaves_a_backward_out(loop: Loop) -> None:
    loop.loss(50).backward()
    loop.optimizer.zero_grad()


def steps_twice(loop: Loop) -> None:
    loop.loss(50).backward()
    loop.optimizer.step()
    loop.optimizer.step()


def replaces_the_step(loop: Loop) -> None:
    step = type(loop.optimizer).step.__get__(loop.optimizer)

    def twice(closure: Any = None) -> None:
        step()
        step()

    loop.optimizer.step = twice  # type: ignore[method-assign, assignment]


def resizes_in_place(loop: Loop) -> None:
    """The last layer gets two more outputs; the optimizer's state of it begins anew."""
    outer: Any = loop.model.get_submodule("outer")
    with torch.no_grad():
        outer.weight.data = torch.cat([outer.weight, torch.ones(2, outer.weight.shape[1])])
        outer.bias.data = torch.cat([outer.bias, torch.ones(2)])
    for p in (outer.weight, outer.bias):
        p.grad = None
        loop.optimizer.state.pop(p, None)


def evaluates(loop: Loop) -> None:
    with torch.no_grad():
        loop.loss(60)


def keeps_an_error(loop: Loop) -> None:
    with pytest.raises(RuntimeError):
        loop.model(torch.ones(1, 2, 3, 4, 5, 6)).sum().backward()


DOES = [
    replaces_a_parameter,
    replaces_it_in_both,
    takes_one_out,
    adds_a_group,
    adds_what_is_not_the_model_s,
    trains_on_another_thread,
    leaves_a_backward_out,
    steps_twice,
    replaces_the_step,
    evaluates,
    resizes_in_place,
    keeps_an_error,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("does", DOES, ids=lambda does: does.__name__)
def test_whatever_the_loop_does(does: Callable[[Loop], None], puts_off: bool) -> None:
    plain, loop = Loop(), Loop()
    states = set()
    with instep.attach(loop.model, loop.optimizer, bucket_bytes=2_000) as overlap:
        for i in range(STEPS):
            for one in (plain, loop):
                if i == 4:
                    does(one)
                one.step(i)
            states.add(overlap.state)
            overlap.synchronize()
            assert difference(plain, loop) is None, i
    assert ("pending" in states) is puts_off


def test_a_step_that_a_cuda_graph_records_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    with instep.attach(loop.model, loop.optimizer, defer=True) as overlap:
        for recording in (False, True, False):
            monkeypatch.setattr("instep._step.deferrable.is_captured", lambda device, now=recording: now)
            loop.step(0)
            assert overlap.state == ("idle" if recording else "pending")


def test_cuda_is_asked_whether_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_captured(torch.device("cuda"))
    assert not is_captured(torch.device("cpu"))


def test_what_was_asked_for_is_refused_by_name() -> None:
    """With ``defer=True`` the loop hears of it."""
    loop = Loop()
    with instep.attach(loop.model, loop.optimizer, defer=True):
        loop.step(0)
        replaces_a_parameter(loop)
        with pytest.raises(StaleAttachmentError, match=r"inner\.weight"):
            loop.step(1)


# Optimizers whose update cannot be split.


class Coupled(SGD):
    """One norm of all parameters scales every update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.norm() for p in found]).norm()
        for p in found:
            p.sub_(p.grad, alpha=0.01 * float(norm))


class Drawing(SGD):
    """Random numbers round every update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * torch.rand_like(p), alpha=0.01)


class Wrapper(Optimizer):
    """Of another optimizer, without ``Optimizer.__init__``, as some are written. Every second step it does more."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.steps = inner, 0
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.9)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Twice(SGD):
    """Sharpness-aware: the step is taken at weights that it has moved, with a closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moved = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, by in moved:
            p.add_(by)
        with torch.enable_grad():
            closure()
        for p, by in moved:
            p.sub_(by)
        super().step()


def with_closure(loop: Loop, i: int) -> None:
    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(i)
        loss.backward()
        return loss

    if isinstance(loop.optimizer, Twice):
        closure()
    optimizer: Any = loop.optimizer  # torch says that a loss is a float
    optimizer.step(closure)


MAKES: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Loop, int], None], int]] = {
    "LBFGS": (lambda p: LBFGS(p, lr=0.1, max_iter=4), with_closure, STEPS),
    "a closure": (lambda p: SGD(p, lr=0.1, momentum=0.9), with_closure, STEPS),
    "sharpness-aware": (lambda p: Twice(p, lr=0.1), with_closure, STEPS),
    "coupled": (lambda p: Coupled(p, lr=0.1), Loop.step, STEPS),
    "drawing": (lambda p: Drawing(p, lr=0.1), Loop.step, STEPS),
    "a wrapper": (lambda p: Wrapper(AdamW(p, lr=0.1)), Loop.step, 0),  # whose steps nobody counts
}


@pytest.mark.parametrize("defer", ["auto", False])
@pytest.mark.parametrize("name", MAKES)
def test_an_optimizer_that_is_stepped_as_a_whole(name: str, defer: Any) -> None:
    make, step, counted = MAKES[name]
    plain, loop = Loop(make), Loop(make)
    with instep.attach(loop.model, loop.optimizer, defer=defer) as overlap:
        for i in range(STEPS):
            for one in (plain, loop):
                torch.manual_seed(i)
                step(one, i)
            assert difference(plain, loop) is None
        assert overlap.step_count == counted
        if defer == "auto" and name != "a closure":
            assert "is stepped as a whole" in repr(overlap)


@pytest.mark.parametrize("name", ["LBFGS", "a wrapper"])
@pytest.mark.parametrize("option", [{"clip": instep.ClipNorm(1.0)}, {"nonfinite": "skip"}], ids=str)
def test_what_comes_before_an_update_needs_one(name: str, option: dict[str, Any]) -> None:
    loop = Loop(MAKES[name][0])
    with pytest.raises(UnsupportedOptimizerError, match="clip and nonfinite"):
        instep.attach(loop.model, loop.optimizer, **option)


class Normed(nn.Module):
    """Its backward reads a weight that a fused ``step()`` writes without counting."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.into(x)).square().mean()
        return found


def test_a_graph_that_was_made_before_the_last_step_of_a_fused_optimizer(puts_off: bool) -> None:
    """torch does not notice that: backward computes with the new weights."""
    lanes = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Normed()
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        overlap = instep.attach(model, optimizer, bucket_bytes=1) if attached else None
        with late_updates():
            for i in range(STEPS):
                first, second = (
                    model(torch.randn(5, 4, generator=torch.Generator(here()).manual_seed(i + j))) for j in (0, 50)
                )
                for loss in (first, second):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            if overlap is not None:
                overlap.detach()
        lanes.append((model, optimizer))
    found = first_difference(*(training_state(*lane) for lane in lanes))
    assert found is None, found


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_are_part_of_a_graph(puts_off: bool) -> None:
    plain, loop = Loop(), Loop()
    with instep.attach(loop.model, loop.optimizer):
        for i in range(STEPS):
            seen = []
            for one in (plain, loop):
                one.loss(i).backward(create_graph=True)
                one.optimizer.step()
                gradients = [p.grad for p in one.model.parameters() if p.grad is not None]
                assert all(gradient.requires_grad for gradient in gradients)
                seen.append(torch.stack([gradient.square().sum() for gradient in gradients]).sum().item())
                one.optimizer.zero_grad()
            assert seen[0] == seen[1]
    assert (found := difference(plain, loop)) is None, found


def test_detach_after_a_group_was_taken_out() -> None:
    loop = Loop()
    loop.optimizer.add_param_group({"params": [loop.optimizer.param_groups[0]["params"].pop()]})
    overlap = instep.attach(loop.model, loop.optimizer, defer=True)
    loop.step(0)
    loop.optimizer.param_groups.pop()
    with pytest.raises(StaleAttachmentError, match=r"no longer in AdamW.param_groups. detach\(\)"):
        loop.step(1)
    overlap.detach()
    loop.step(1)
