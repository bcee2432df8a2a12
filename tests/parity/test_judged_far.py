"""Foreign optimizers that keep things where few do, and loops that do what few do: each step is the plain loop's."""

import collections
import copy
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep._optim import contents
from instep.errors import UnsupportedOptimizerError
from tests.judged import own_steps_are_judged
from tests.parity.judged_loops import (
    WAYS,
    Plain,
    calls_while_judged,
    each_way,
    layers,
    loss_of,
    require_same,
    train,
    usual,
)

# Where it counts.


class InSlot(Plain):
    __slots__ = ("counted",)

    def made(self) -> None:
        self.counted = 0

    def count(self) -> float:
        self.counted += 1
        return self.counted


class InClass(Plain):
    counted = 0

    def made(self) -> None:
        type(self).counted = 0

    def count(self) -> float:
        type(self).counted += 1
        return self.counted


class OfTheName(Plain):
    """That which torch's schedulers use."""

    _step_count = 0

    def made(self) -> None:
        self._step_count = 0

    def count(self) -> float:
        self._step_count += 1
        return self._step_count


class In(Plain):
    """``make`` makes what it counts in, and ``move`` counts."""

    make: Any = staticmethod(lambda: [0])
    move: Any = staticmethod(lambda held: None)

    def made(self) -> None:
        self.held = self.make()

    def count(self) -> float:
        return float(type(self).move(self.held))


def counts_in(make: Callable[[], Any], move: Callable[[Any], float]) -> type[In]:
    return type("CountsIn", (In,), {"make": staticmethod(make), "move": staticmethod(move)})


def in_counter(held: Any) -> float:
    held.update(n=1)
    return float(held["n"])


def in_first(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def deep(held: Any) -> float:
    held[0][0][0][0][0][0] += 1
    return float(held[0][0][0][0][0][0])


def in_value(held: Any) -> float:
    held.value += 1
    return float(held.value)


def in_data(held: Any) -> float:
    held.data.add_(1)
    return float(held.flatten()[0])


def in_buffer(held: Any) -> float:
    held.b = held.b + 1
    return float(held.b)


def by_scheduler(held: Any) -> float:
    held.optimizer.step()
    held.step()
    return float(held.optimizer.param_groups[0]["lr"])


def a_local() -> Any:
    held = threading.local()
    held.value = 0
    return held


def a_module() -> nn.Module:
    held = nn.Module()
    held.register_buffer("b", torch.zeros(()))
    return held


def a_scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), 1)


COUNTS: dict[str, type[Plain]] = {
    "a slot": InSlot,
    "the class": InClass,
    "a scheduler's name": OfTheName,
    "a Counter": counts_in(collections.Counter, in_counter),
    "six deep": counts_in(lambda: [[[[[[0]]]]]], deep),
    "a long list": counts_in(lambda: [0] * 2000, in_first),
    "a long dict": counts_in(lambda: dict.fromkeys(range(2000), 0), in_first),
    "a long array": counts_in(lambda: np.zeros(2000), in_first),
    "a parameter's data": counts_in(lambda: nn.Parameter(torch.zeros(1)), in_data),
    "the data of a tensor": counts_in(lambda: torch.zeros(1_100_000, dtype=torch.int8), in_data),
    "a buffer that is replaced": counts_in(a_module, in_buffer),
    "a number of ctypes": counts_in(lambda: ctypes.c_int(0), in_value),
    "a local of threads": counts_in(a_local, in_value),
    "another optimizer's scheduler": counts_in(a_scheduler, by_scheduler),
}


def counted(optimizer: Any) -> Any:
    held = getattr(optimizer, "held", None)
    kinds = (ctypes.c_int, threading.local)
    if isinstance(held, kinds):
        return held.value
    if isinstance(held, torch.Tensor):
        return held.unique().tolist()  # all of it counts alike, and it may be large
    if isinstance(held, nn.Module):
        return [buffer.tolist() for buffer in held.buffers()]
    if isinstance(held, np.ndarray):
        return held.tolist()
    if isinstance(held, torch.optim.lr_scheduler.StepLR):
        return held.get_last_lr()
    return held, getattr(optimizer, "counted", None), getattr(optimizer, "_step_count", None)


@each_way
@pytest.mark.parametrize("where", COUNTS)
def test_a_counter(where: str, way: str) -> None:
    require_same(lambda model: COUNTS[where](model.parameters()), way, counted)


# Averages that methods reach otherwise than by the object.


AVERAGE: dict[int, torch.Tensor] = {}


class AveragesInAGlobal(Plain):
    def made(self) -> None:
        AVERAGE.clear()
        AVERAGE.update((id(p), p.detach().clone()) for group in self.param_groups for p in group["params"])

    def count(self) -> float:
        for p in (p for group in self.param_groups for p in group["params"]):
            AVERAGE[id(p)].lerp_(p, 0.1)
        return 0.0


def averages_in_a_closure(model: nn.Module) -> Any:
    average = copy.deepcopy(model).requires_grad_(False)

    class Averages(Plain):
        def count(self) -> float:
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(p.detach(), 0.1)
            return 0.0

        def found(self) -> list[Any]:
            return [p.tolist() for p in average.parameters()]

    return Averages(model.parameters())


@each_way
def test_an_average_in_a_global(way: str) -> None:
    plan = require_same(
        lambda model: AveragesInAGlobal(model.parameters()), way, lambda o: [mean.tolist() for mean in AVERAGE.values()]
    )
    assert ("an average" in str(plan.judged)) == (way != "default")


@each_way
def test_an_average_in_a_closure(way: str) -> None:
    require_same(averages_in_a_closure, way, lambda optimizer: optimizer.found())


# What step() does to the optimizer itself.


class NewGroups(Plain):
    def count(self) -> float:
        self.param_groups = [{**group, "n": group.get("n", 0) + 1} for group in self.param_groups]
        return float(self.param_groups[0]["n"])


class ClampsAll(Plain):
    """Weights without a gradient, too, which changes nothing."""

    def count(self) -> float:
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-100, 100)
        return 0.0


class Moments(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.with_gradient():
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            p.sub_(state["m"].mul_(0.9).add_(p.grad), alpha=0.05)


class Restarts(Moments):
    """In its fourth step."""

    def made(self) -> None:
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        super().step()
        if self.steps % 4 == 0:
            self.state.clear()


class GetsItems(dict[str, int]):
    __getattr__ = dict.__getitem__


@each_way
@pytest.mark.parametrize(
    "kind",
    [NewGroups, ClampsAll, counts_in(lambda: GetsItems(n=0), lambda held: held.update(n=held.n + 1) or held["n"])],
)
def test_what_a_step_does_to_its_optimizer(kind: type[Plain], way: str) -> None:
    require_same(
        lambda model: kind(model.parameters()), way, lambda o: [len(group["params"]) for group in o.param_groups]
    )


@pytest.mark.parametrize("held", [lambda: (i for i in range(9)), threading.Lock])
@each_way
def test_what_nobody_can_put_back(held: Callable[[], Any], way: str) -> None:
    plan = require_same(lambda model: counts_in(held, lambda _: 0.0)(model.parameters()), way)
    assert ("cannot be put back" in str(plan.judged)) == (way != "default")


def test_a_restart_is_put_back_with_undo() -> None:
    require_same(lambda model: Restarts(model.parameters()), "undo")


def test_a_restart_raises_in_backward() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="takes entries out of its state"):
        train(lambda model: Restarts(model.parameters()), "backward", lambda o: None)


# Closures.


class LineSearch(Plain):
    """Writes weights, and asks the closure again, which runs no backward."""

    def step(self, closure: Any = None) -> Any:
        first, lr = closure(), 0.5
        stepped = [(p, p.detach().clone(), p.grad.clone()) for p in self.with_gradient()]
        for _ in range(3):
            with torch.no_grad():
                for p, _, gradient in stepped:
                    p.sub_(gradient, alpha=lr)
            if closure() < first:
                break
            with torch.no_grad():
                for p, before, _ in stepped:
                    p.copy_(before)
            lr /= 4
        return first


class Sharpness(Plain):
    """Two backwards in a step."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.with_gradient()]).norm()
            moves = [(p, p.grad * 0.05 / norm) for p in self.with_gradient()]
            for p, move in moves:
                p.add_(move)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move).sub_(p.grad, alpha=0.05)
        return loss


def with_search(model: nn.Module, optimizer: Any, i: int) -> None:
    loss_of(model, i).backward()

    @torch.no_grad()
    def closure() -> torch.Tensor:
        return loss_of(model, i)

    optimizer.step(closure)
    optimizer.zero_grad()


def with_two_backwards(model: nn.Module, optimizer: Any, i: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        return loss

    optimizer.step(closure)


@each_way
@pytest.mark.parametrize(("kind", "learn"), [(LineSearch, with_search), (Sharpness, with_two_backwards)])
def test_a_closure_that_step_calls_again(kind: type[Plain], learn: Callable[..., None], way: str) -> None:
    require_same(lambda model: kind(model.parameters()), way, learn=learn)


# Parameters that get their first gradient late.


class Clipped(Plain):
    """By the norm of all gradients of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            those = [p for p in group["params"] if p.grad is not None]
            if those:
                norm = torch.stack([p.grad.norm() for p in those]).norm().item()
                for p in those:
                    p.sub_(p.grad, alpha=0.05 / (1 + norm))


def head_first(model: nn.Module) -> Any:
    model.requires_grad_(False)
    next(model[4].parameters()).requires_grad_(True)  # type: ignore[index]
    return Clipped(model.parameters())


def then_all(model: nn.Module, optimizer: Any, i: int) -> None:
    if i == 3:
        model.requires_grad_(True)
    usual(model, optimizer, i)


def in_two_groups(model: nn.Module) -> Any:
    """The second has one weight alone, which shows no coupling."""
    return Clipped([{"params": list(model[0].parameters())}, {"params": [model[4].weight]}])  # type: ignore[index]


def group_by_group(model: nn.Module, optimizer: Any, i: int) -> None:
    loss_of(model, i).backward(inputs=None if i > 2 else [model[4].weight])  # type: ignore[index]
    optimizer.step()
    optimizer.zero_grad()


def with_a_group_more(model: nn.Module, optimizer: Any, i: int) -> None:
    if i == 3:
        optimizer.add_param_group({"params": list(model[0].parameters())})  # type: ignore[index]
    usual(model, optimizer, i)


@each_way
@pytest.mark.parametrize(
    ("make", "learn"),
    [(head_first, then_all), (lambda model: Clipped(model[4].parameters()), with_a_group_more)],
    ids=["unfrozen", "a group"],
)
def test_parameters_that_come_late(make: Callable[[nn.Module], Any], learn: Callable[..., None], way: str) -> None:
    require_same(make, way, learn=learn, steps=8)


@pytest.mark.parametrize("way", ["undo", "default"])
def test_a_branch_that_is_first_used_late(way: str) -> None:
    require_same(in_two_groups, way, learn=group_by_group, steps=8)


def test_a_branch_that_is_first_used_late_in_backward() -> None:
    """Other buckets of that step have been stepped: nobody knows whether they were right."""
    model = layers()
    optimizer = in_two_groups(model)
    with own_steps_are_judged(), instep.attach(model, optimizer, **WAYS["backward"]) as overlap:
        for i in range(3):
            group_by_group(model, optimizer, i)
        with pytest.raises(UnsupportedOptimizerError, match="has begun to couple parameters"):
            group_by_group(model, optimizer, 3)
        overlap.accept_torn()


# Parameters that it reads, and is not given.


class ReadsByAttribute(Plain):
    """Divides by the norm of all weights, to which a list refers."""

    def made(self) -> None:
        self.every = [p for group in self.param_groups for p in group["params"]]

    def count(self) -> float:
        return float(torch.stack([p.detach().norm() for p in self.every]).norm())


def reads_by_closure(model: nn.Module) -> Any:
    """Preconditions gradients by the model's weights, as adapters of low rank are."""

    class Reads(Plain):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.grad.div_(1 + next(model.parameters()).square().mean())
            super().step()

    return Reads(model.parameters())


@each_way
@pytest.mark.parametrize("make", [lambda model: ReadsByAttribute(model.parameters()), reads_by_closure])
def test_parameters_that_it_reads(make: Callable[[nn.Module], Any], way: str) -> None:
    plan = require_same(make, way)
    assert ("uses parameters that it was not given" in str(plan.judged)) == (way != "default")


# Parameters that it writes, or keeps something of, and is not given.


class RefersToAll(Plain):
    def made(self) -> None:
        self.every = [p for group in self.param_groups for p in group["params"]]
        self.moments: dict[Any, torch.Tensor] = {}


class ClipsAll(RefersToAll):
    def count(self) -> float:
        torch.nn.utils.clip_grad_norm_(self.every, 1e-3)
        return 0.0


class MomentsOfAll(RefersToAll):
    """In an attribute, by parameter."""

    def count(self) -> float:
        for p in self.every:
            if p.grad is not None:
                self.moments.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        return 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count()
        for p in self.with_gradient():
            p.sub_(self.moments[p], alpha=0.05)


class StateOfAll(RefersToAll):
    def count(self) -> float:
        for p in self.every:
            if p.grad is not None:
                state = self.state[p]
                state["m"] = state.get("m", 0) * 0.9 + p.grad
        return 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count()
        for p in self.with_gradient():
            p.sub_(self.state[p]["m"], alpha=0.05)


class WeightsOfAll(RefersToAll):
    """Through ``.data``, which counts no write."""

    def count(self) -> float:
        for p in self.every:
            p.data.mul_(0.999)
        return 0.0


@each_way
@pytest.mark.parametrize("kind", [ClipsAll, MomentsOfAll, StateOfAll, WeightsOfAll])
def test_what_it_writes_of_others(kind: type[RefersToAll], way: str) -> None:
    plan = require_same(
        lambda model: kind(model.parameters()),
        way,
        lambda o: ([value.tolist() for value in o.moments.values()], [e["m"].tolist() for e in o.state.values()]),
    )
    assert ("left to optimizer.step()" in str(plan.judged)) == (way != "default")


class MakesStateOfAll(RefersToAll):
    """In its first step, which couples nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.every:
            if not self.state[p]:
                self.state[p]["m"] = torch.zeros_like(p)
        for p in self.with_gradient():
            p.sub_(self.state[p]["m"].mul_(0.9).add_(p.grad), alpha=0.05)


@each_way
def test_state_that_it_makes_for_all(way: str) -> None:
    plan = require_same(
        lambda model: MakesStateOfAll(model.parameters()), way, lambda o: [e["m"].tolist() for e in o.state.values()]
    )
    assert not plan.judged


def copies_of(count: int) -> int:
    """How many tensors are copied while an optimizer that refers to all of ``count`` layers is judged."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
    optimizer = MakesStateOfAll(model.parameters())
    optimizer.moments = {p: torch.zeros(3) for p in model.parameters()}
    return calls_while_judged(contents, "_of_dense", model, optimizer)


def test_what_it_refers_to_is_kept_once() -> None:
    few, many = copies_of(4), copies_of(16)
    assert 0 < many <= 5 * few
