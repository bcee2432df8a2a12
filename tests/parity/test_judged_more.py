"""What a foreign optimizer is asked before it is stepped in backward, and what it finds there: one question a test."""

import functools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep._optim import proved
from instep._optim.stepper import Stepper
from instep._step import judging
from instep._torch.interrupts import heard, held
from instep.errors import HyperparameterChangedError, TornStepError, UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.devices import here, on_cpu_only
from tests.judged import own_steps_are_judged

WAYS: dict[str, dict[str, Any]] = {"backward": {"schedule": "backward"}, "undo": {"schedule": "backward", "undo": True}}
each_way = pytest.mark.parametrize("way", WAYS)
Make = Callable[[nn.Module], Any]


class Plain(torch.optim.Optimizer):
    """Gradient descent. A class that inherits from it says what else an update does."""

    def __init__(self, model: nn.Module, lr: float = 0.05) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.made(model)

    def made(self, model: nn.Module) -> None:
        """What it holds from the beginning."""

    def those(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def update(self, those: list[Any]) -> Any:
        for p in those:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self.update(self.those())


def norm_of(those: Sequence[Any]) -> float:
    return sum(p.grad.square().sum().item() for p in those) ** 0.5


class Coupled(Plain):
    """Divides by the norm of all gradients from step ``begins`` on, counted from 1."""

    begins = 1

    def made(self, model: nn.Module) -> None:
        self.steps = 0

    def update(self, those: list[Any]) -> Any:
        self.steps += bool(those)
        scale = 1 / (1 + norm_of(those)) if self.steps >= self.begins else 1.0
        for p in those:
            p.sub_(p.grad, alpha=0.05 * scale)


# The two loops.


@dataclass
class Found:
    """What has become of an attached loop.

    Attributes:
        freed: of each step, the indices of the parameters that were updated in backward.
    """

    freed: list[set[int]] = field(default_factory=list)
    verdict: str = ""
    model: Any = None
    optimizer: Any = None


class Layers(nn.Sequential):
    """Of which the first ``depth`` run."""

    depth = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(*[*self][: self.depth])(x)


def layers(depth: int = 4) -> Any:
    torch.manual_seed(0)
    return Layers(*(nn.Linear(4, 4, bias=False) for _ in range(depth)))


def seed(i: int) -> None:
    random.seed(i)
    np.random.seed(i)
    torch.manual_seed(i)


def backward(model: Any, i: int, depth: int = 4) -> None:
    """Of the first ``depth`` layers."""
    seed(i)
    model.depth = depth
    model(torch.randn(3, 4)).square().sum().backward()


def require_refused(make: Make, because: str) -> None:
    model = layers()
    optimizer = make(model)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=64) as overlap:
        with pytest.raises(UnsupportedOptimizerError, match=because):
            backward(model, 0)
        overlap.accept_torn()
        optimizer.zero_grad()


def both(
    make: Make,
    steps: int = 4,
    way: str = "backward",
    each: int = 64,
    around: Callable[[], Any] = nullcontext,
    short: Sequence[int] = (),
    **options: Any,
) -> Found:
    """A plain loop, and one that is attached. They are equal after each step, in what ``step()`` returns, too.

    Args:
        each: the bytes of a bucket: 64 are those of one weight.
        around: a block for ``step()``.
        short: the steps, from 0 on, in which the last two layers get no gradient.
    """
    plain, model = layers(), layers()
    seed(0)
    expected = make(plain)
    seed(0)
    optimizer = make(model)
    found = Found(model=model, optimizer=optimizer)
    with instep.attach(model, optimizer, bucket_bytes=each, **{**WAYS[way], **options}) as overlap:
        for i in range(steps):
            depth = 2 if i in short else 4
            backward(plain, i, depth)
            with around():
                returned = expected.step()
            backward(model, i, depth)
            found.freed.append({n for n, p in enumerate(model.parameters()) if "Spent" in repr(p.grad)})
            with around():
                also = optimizer.step()
            states = (training_state(plain, expected), training_state(model, optimizer))
            assert (difference := first_difference(*states)) is None, f"step {i + 1}: {difference}"
            assert returned == also or returned is also, f"step {i + 1}"
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert way != "undo" or one.grad is other.grad is None or torch.equal(one.grad, other.grad)
            expected.zero_grad()
            optimizer.zero_grad()
        found.verdict = "\n".join(overlap.plan.judged)
    return found


def judged(make: Make, steps: int = 5, way: str = "backward", each: int = 64, **options: Any) -> Found:
    with own_steps_are_judged():
        return both(make, steps, way, each, **options)


def refused(make: Make, match: str, way: str = "backward", **options: Any) -> None:
    """In the first step, of which nothing is written."""
    model = layers()
    optimizer = make(model)
    with own_steps_are_judged(), instep.attach(model, optimizer, bucket_bytes=64, **{**WAYS[way], **options}):
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, 0)
        with pytest.raises(UnsupportedOptimizerError, match=match):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))


ALL = {0, 1, 2, 3}


# Parameters that miss an update.


class Counts(Plain):
    """Counts the updates of each parameter in its state."""

    def update(self, those: list[Any]) -> Any:
        for p in those:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            p.sub_(p.grad, alpha=0.05 / self.state[p]["step"])


class Stabilizes(Counts):
    """In each third update of any parameter all are written that have state, as geoopt's do."""

    def update(self, those: list[Any]) -> Any:
        super().update(those)
        if any(self.state[p]["step"] % 3 == 0 for p in those):
            for p in (p for p in self.param_groups[0]["params"] if self.state[p]):
                p.mul_(0.99)


class Caches(Counts):
    """Keeps in its group what it has computed last for a number of updates, as AdaBelief does."""

    def made(self, model: nn.Module) -> None:
        self.param_groups[0]["cache"] = [None, None]

    def update(self, those: list[Any]) -> Any:
        super().update(those)
        for p in those:
            self.param_groups[0]["cache"][:] = [self.state[p]["step"], 0.5 / self.state[p]["step"]]


@each_way
@pytest.mark.parametrize("short", [(3,), (3, 4), (2,), (2, 3, 4), (3, 5, 7)])
@pytest.mark.parametrize("kind", [Stabilizes, Caches])
def test_an_update_that_a_parameter_has_missed_couples_it(kind: Make, short: Sequence[int], way: str) -> None:
    verdict = judged(kind, 10, way, short=short).verdict
    assert "left to optimizer.step()" in verdict


def test_a_parameter_that_has_missed_an_update_is_awaited_where_nobody_sees_the_forward() -> None:
    model = layers()
    optimizer = Caches(model)
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=64) as overlap:
        for i in range(6):
            seed(i)
            nn.Sequential(*[*model][: 2 if i == judging.LEFT else 4])(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "left to optimizer.step()" in overlap.plan.judged[0]


def test_nobody_waits_once_two_updates_were_compared_where_nobody_sees_the_forward() -> None:
    model = layers()
    optimizer = Counts(model)
    freed = []
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=64):
        for i in range(9):
            # The third layer is away from the fourth step on, and the last one too, but comes back twice.
            used = [*model][:2] if i in (3, 5) else [*model[:2], model[3]] if i in (4, 6, 7, 8) else [*model]
            seed(i)
            nn.Sequential(*used)(torch.randn(3, 4)).square().sum().backward()
            freed.append("Spent" in repr(model[0].weight.grad))
            optimizer.step()
            optimizer.zero_grad()
    assert freed[-2:] == [True, True]


@each_way
def test_an_update_of_several_that_writes_those_without_a_gradient(way: str) -> None:
    class Decays(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if len(those) > 1:  # as no part has
                for p in (p for p in self.param_groups[0]["params"] if p.grad is None):
                    p.mul_(0.99)

    assert "changes parameters that have no gradient" in judged(Decays, 6, way, short=(1,)).verdict


@each_way
def test_parameters_that_have_missed_an_update_are_compared_when_they_are_back(way: str) -> None:
    found = judged(Counts, 11, way, short=(3, 4, 6, 8, 9))
    assert not found.verdict
    none: set[int] = set()
    #      compared, missed and awaited, back: compared with the others; and the same again; from then on it is known.
    freed = [none, none, none, {0, 1}, none, none, {0, 1}, none, {0, 1}, {0, 1}, ALL]
    assert way == "undo" or found.freed == freed


def test_the_plan_says_that_a_parameter_is_awaited() -> None:
    model = layers()
    optimizer = Counts(model)
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=64) as overlap:
        for i in range(6):
            backward(model, i, 2 if i >= judging.LEFT else 4)
            optimizer.step()
            optimizer.zero_grad()
        assert "until a parameter that has missed some has a gradient again" in overlap.plan.judged[0]
        model[2:].requires_grad_(False)  # nobody waits for these
        backward(model, 7, 2)
        assert "Spent" in repr(model[0].weight.grad)
        optimizer.step()


# What is asked of the first updates.


@each_way
def test_two_updates_after_the_first_are_compared_and_then_buckets_are_stepped(way: str) -> None:
    found = judged(Plain, way=way)
    assert not found.verdict
    assert way == "undo" or found.freed == [set(), set(), set(), ALL, ALL]


def test_the_plan_says_how_many_steps_are_left() -> None:
    model = layers()
    optimizer = Plain(model)
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward") as overlap:
        for said in (
            "the next 3 steps are taken in optimizer.step(), and the last 2 are compared with their parts",
            "the next 2 steps are taken in optimizer.step(), and compared with their parts",
            "the next step is taken in optimizer.step(), and compared with its parts",
        ):
            assert overlap.plan.judged == (f"Plain: {said}",)
            backward(model, 0)
            optimizer.step()
            optimizer.zero_grad()
        assert overlap.plan.judged == ()


@each_way
def test_values_that_depend_on_the_others(way: str) -> None:
    assert "other values when it is stepped without the others" in judged(Coupled, way=way).verdict


@each_way
def test_state_that_depends_on_the_others(way: str) -> None:
    class Counts(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            for p in those:
                self.state[p]["together"] = len(those)

    assert "another state when it is stepped without the others" in judged(Counts, way=way).verdict


def test_an_attribute_that_depends_on_how_many_step_together() -> None:
    class Counts(Plain):
        count = 0

        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those:
                self.count = len(those)

    assert "'count' depends on which parameters step together" in judged(Counts).verdict


def test_a_counter_of_steps_couples_nothing() -> None:
    class Counts(Plain):
        def made(self, model: nn.Module) -> None:
            self.count, self.steps = 0, [0]

        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those:
                self.count += 1
                self.steps[0] += 1

    found = judged(Counts)
    assert not found.verdict
    assert found.freed[-1] == ALL
    assert (found.optimizer.count, found.optimizer.steps) == (5, [5])


def test_parameters_without_a_gradient_that_are_changed() -> None:
    class DecaysAll(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99)

    assert "changes parameters that have no gradient" in judged(DecaysAll).verdict


def test_a_step_without_gradients_that_raises() -> None:
    class NeedsOne(Plain):
        def update(self, those: list[Any]) -> Any:
            assert those, "no gradient"
            super().update(those)

    assert "raises when no parameter has a gradient (AssertionError: no gradient" in judged(NeedsOne).verdict


def test_a_value_that_is_returned() -> None:
    class Returns(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            return norm_of(those)

    assert "returns a value that depends on what it updates" in judged(Returns).verdict


def test_an_update_that_raises_on_less_than_all() -> None:
    class NeedsAll(Plain):
        def update(self, those: list[Any]) -> Any:
            assert len(those) in (0, 4)
            super().update(those)

    assert "its step() raises on '0.weight' alone" in judged(NeedsAll).verdict


WEIGHTS: list[Any] = []


def shrink() -> None:
    WEIGHTS[0].mul_(0.99)


def test_a_parameter_that_is_written_through_a_global() -> None:
    """Of a function that a method calls: nobody looks there."""

    class Writes(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those:
                shrink()

    model = layers()
    WEIGHTS[:] = [next(model.parameters()).detach()]  # in Python another tensor
    optimizer = Writes(model)
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=64):
        backward(model, 0)
        optimizer.step()  # beside the first step nothing stands
        optimizer.zero_grad()
        backward(model, 1)
        with pytest.raises(
            UnsupportedOptimizerError, match="writes 1 parameters, too, or their state, where its groups hold others"
        ):
            optimizer.step()
    WEIGHTS.clear()


@each_way
def test_what_is_kept_by_parameter_in_an_attribute(way: str) -> None:
    class Momentum(Plain):
        def made(self, model: nn.Module) -> None:
            self.buffers: dict[Any, torch.Tensor] = {}

        def update(self, those: list[Any]) -> Any:
            for p in those:
                buffer = self.buffers.setdefault(p, torch.zeros_like(p))
                p.sub_(buffer.mul_(0.9).add_(p.grad), alpha=0.05)

    assert not judged(Momentum, 5, way).verdict


@each_way
@pytest.mark.parametrize("replaced", [True, False])
def test_gradients_that_an_update_writes(way: str, replaced: bool) -> None:
    class Writes(Plain):
        def update(self, those: list[Any]) -> Any:
            for p in those:
                p.grad = p.grad * 0.5 if replaced else p.grad.mul_(0.5)
                p.sub_(p.grad, alpha=0.05)

    judged(Writes, way=way)


class Finalized:
    """What must be given back once."""

    def __init__(self) -> None:
        self.number = 1

    def __del__(self) -> None:
        self.number = 0


def test_an_attribute_with_a_finalizer_cannot_be_put_back() -> None:
    class Holds(Plain):
        def made(self, model: nn.Module) -> None:
            self.handle = Finalized()

    assert "attribute 'handle' cannot be put back (TypeError: a Finalized, which" in judged(Holds).verdict


@each_way
@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.uniform()), lambda: torch.rand(()).item()])
def test_numbers_that_are_drawn(way: str, draw: Callable[[], float]) -> None:
    class Draws(Plain):
        def update(self, those: list[Any]) -> Any:
            for p in those:
                p.sub_(p.grad, alpha=0.05 * draw())

    assert "draws random numbers in step()" in judged(Draws, way=way).verdict


def test_numbers_that_are_drawn_while_another_thread_rests() -> None:
    """As a progress bar's: it waits all the time."""

    class Draws(Plain):
        def update(self, those: list[Any]) -> Any:
            for p in those:
                p.sub_(p.grad, alpha=0.05 * random.random())

    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    time.sleep(0.1)  # until it rests
    try:
        assert "draws random numbers in step()" in judged(Draws).verdict
    finally:
        end.set()
        thread.join()


def test_numbers_of_a_generator_of_its_own() -> None:
    class Draws(Plain):
        def made(self, model: nn.Module) -> None:
            self.numbers = random.Random(0)

        def update(self, those: list[Any]) -> Any:
            for p in those:
                p.sub_(p.grad, alpha=0.05 * self.numbers.random())

    assert "draws random numbers in step()" in judged(Draws).verdict


def test_a_generator_from_which_nobody_draws_is_no_draw() -> None:
    class Holds(Plain):
        def made(self, model: nn.Module) -> None:
            self.numbers = np.random.default_rng(0)
            self.others = torch.Generator().manual_seed(0)

    found = judged(Holds)
    assert not found.verdict
    assert found.freed[-1] == ALL


def descended(p: Any, gradient: Any) -> None:
    p.sub_(gradient, alpha=0.05)


def descended_all(weights: list[Any], gradients: list[Any]) -> None:
    for p, gradient in zip(weights, gradients, strict=True):
        p.sub_(gradient, alpha=0.05)


def test_what_is_compiled_for_one_parameter_is_compared_from_the_second_update_on() -> None:
    class Compiled(Plain):
        def made(self, model: nn.Module) -> None:
            self.one = torch.compile(descended, backend="eager")

        def update(self, those: list[Any]) -> Any:
            for p in those:
                self.one(p, p.grad)

    torch._dynamo.reset()
    model = layers()
    optimizer = Compiled(model)
    freed = []
    # Alone: a plain loop would have compiled it.
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=64):
        for i in range(4):
            backward(model, i)
            freed.append(sum("Spent" in repr(p.grad) for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    assert freed == [0, 0, 0, 4]


def test_what_is_compiled_for_each_list_is_left_whole() -> None:
    class Compiled(Plain):
        def made(self, model: nn.Module) -> None:
            self.all = torch.compile(descended_all, backend="eager")

        def update(self, those: list[Any]) -> Any:
            if those:
                self.all(those, [p.grad for p in those])

    torch._dynamo.reset()
    assert "is compiled (torch.compile) anew" in judged(Compiled, 4, each=128).verdict


def test_a_coupling_of_two_that_step_in_one_bucket() -> None:
    """Each one alone comes out as in the whole, a bucket does not."""

    class Pairs(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if len(those) == 2:
                those[0].mul_(0.99)

    assert judged(Pairs, each=128).verdict
    assert not judged(Pairs).verdict


def test_a_verdict_leaves_every_step_whole() -> None:
    found = judged(Coupled, 6)
    assert not any(found.freed)


# Later updates.


def test_other_buckets_are_left_and_compared_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "EVERY", 4)
    found = judged(Plain, 16)
    left = [ALL - freed for freed in found.freed[3::4]]
    assert all(len(two) == 2 for two in left)
    assert set().union(*left) == ALL
    assert all(freed == ALL for n, freed in enumerate(found.freed[3:], 4) if n % 4)


def test_a_coupling_that_begins_late_tears_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "EVERY", 4)

    class Late(Coupled):
        begins = 4

    model = layers()
    optimizer = Late(model)
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=64) as overlap:
        for i in range(3):
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, 3)
        with pytest.raises(UnsupportedOptimizerError, match="has begun to couple parameters"):
            optimizer.step()
        with pytest.raises(TornStepError):
            backward(model, 4)
        overlap.accept_torn()
        optimizer.zero_grad()
        assert "left to optimizer.step()" in repr(overlap)


def test_what_begins_to_refer_to_parameters_is_known_after_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not looked for in each step."""
    monkeypatch.setattr(judging, "EVERY", 4)

    class RefersLater(torch.optim.SGD):
        every: Sequence[Any] = ()
        steps = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            for p in mine:
                p.sub_(p.grad, alpha=0.1)
            if self.steps == 6:
                for p in self.every:
                    p.mul_(0.5)
            return None

    model = layers()
    optimizer = RefersLater(model.parameters(), lr=0.1)
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=64) as overlap:
        for step in range(1, 6):
            optimizer.steps = step
            if step == 4:
                optimizer.every = [next(model.parameters())]  # no backward has saved it: the input needs no gradient
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.steps = 6
        with pytest.raises(UnsupportedOptimizerError, match="writes parameters that it was not given"):
            backward(model, 6)
        overlap.accept_torn()
        optimizer.zero_grad()


class CachesByStep(torch.optim.SGD):
    """Keeps a number for each parameter's own count of steps, as some implementations of RAdam do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.cached = [0.0] * 3

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            count = self.state[p]["step"] = self.state[p].get("step", 0) + 1
            self.cached[count % 3] = 1.0 / count
            p.sub_(p.grad, alpha=0.1 * self.cached[count % 3])


@pytest.mark.parametrize("undo", [True, False])
def test_a_layer_that_is_first_used_later_and_leaves_other_attributes(undo: bool) -> None:
    """With ``undo`` all of that step is left to ``step()``."""
    loops = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        optimizer = CachesByStep(model.parameters())
        overlap = None
        if attached:
            with own_steps_are_judged():
                overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=16, undo=undo)
        loops.append((model, optimizer, overlap))
    for i in range(6):
        x = torch.full((2, 3), 0.1 * i + 0.1)
        for model, optimizer, overlap in loops:
            used = model if i >= 4 else [model[0], model[2]]
            functools.reduce(lambda h, layer: layer(h).tanh(), used, x).square().sum().backward()
            if i == 4 and overlap is not None and not undo:
                with pytest.raises(UnsupportedOptimizerError, match="has begun to couple parameters"):
                    optimizer.step()
                overlap.accept_torn()
                overlap.detach()
                return
            optimizer.step()
            optimizer.zero_grad()
        (plain, one, _), (attached_model, other, overlap) = loops
        assert first_difference(training_state(plain, one), training_state(attached_model, other)) is None
        assert one.cached == other.cached
        assert overlap is not None
        assert ("left to optimizer.step()" in repr(overlap)) == (i >= 4)
    assert overlap is not None
    overlap.detach()


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_what_is_drawn_by_keys_is_compared_in_pairs(schedule: str) -> None:
    refused(Coupled, "'0.weight' gets other values together with '1.weight'", schedule=schedule, random="keyed", seed=1)


def test_what_couples_nothing_is_drawn_by_keys() -> None:
    model = layers()
    optimizer = Plain(model)
    options: Any = {"schedule": "backward", "random": "keyed", "seed": 1}
    with own_steps_are_judged(), instep.attach(model, optimizer, bucket_bytes=64, **options):
        for i in range(3):
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()


# What the object finds while it steps a bucket. These classes count as proved.


def test_hooks_of_the_object_run_once_in_a_step() -> None:
    class Inherits(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)

    torch.optim.SGD([torch.ones(1)])  # torch calls the hooks in its step() from now on, also where another calls it
    calls: list[int] = []

    def make(model: nn.Module) -> Any:
        optimizer = Inherits(model.parameters(), 0.05)
        optimizer.register_step_post_hook(lambda *_: calls.append(len(optimizer.param_groups[0]["params"])))
        return optimizer

    found = both(make, 2)
    assert found.freed == [ALL, ALL]
    each = len(calls) // 4
    assert calls == [4] * 4 * each


class Raises(Plain):
    """On the weight at one place, in the second step."""

    def made(self, model: nn.Module) -> None:
        self.count, self.bad = 0, [*model.parameters()][1]
        self.steps = [0]

    def update(self, those: list[Any]) -> Any:
        if those:
            self.count += 1
            self.steps[0] += 1
        super().update(those)
        if self.count == 2 and any(p is self.bad for p in those):
            raise ArithmeticError("no such update")


def test_an_update_that_raises_leaves_the_object_as_it_was() -> None:
    model = layers()
    optimizer = Raises(model)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=64) as overlap:
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        hooks = vars(optimizer)["_optimizer_step_post_hooks"]
        with pytest.raises(ArithmeticError, match="no such update"):
            backward(model, 1)
        assert vars(optimizer)["_optimizer_step_post_hooks"] is hooks
        assert len(optimizer.param_groups[0]["params"]) == 4
        assert type(optimizer.param_groups[0]["params"]) is list
        assert (optimizer.count, optimizer.steps) == (1, [1])
        assert "state_dict" not in vars(optimizer)
        overlap.accept_torn()
        optimizer.zero_grad()


def test_two_buckets_that_leave_other_attributes() -> None:
    class Notes(Plain):
        norm = 0.0

        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those:
                self.norm = norm_of(those)

    require_refused(Notes, "'norm' in a way that depends on which parameters step")


class Slotted:
    __slots__ = ("slot",)


class Holder(Slotted):
    def __init__(self) -> None:
        self.number = self.slot = 0


@each_way
def test_what_a_step_leaves_is_what_its_buckets_have_left(way: str) -> None:
    class Counts(Plain):
        state: Any  # to torch's types, the keys are tensors alone

        def made(self, model: nn.Module) -> None:
            self.steps, self.idle, self.once, self.window = 0, 0, True, [0.0]
            self.moving, self.object = torch.zeros(2, device="cpu"), Holder()

        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if not those:
                self.idle += 1
                return
            self.steps += 1
            self.window.append(float(self.steps))
            self.moving.add_(1)
            self.object.number += 1
            self.object.slot += 1
            vars(self).pop("once", None)
            self.param_groups[0]["k"] = self.steps
            vars(self)["state"]["shared"] = self.steps

    optimizer = both(Counts, 3, way).optimizer
    assert (optimizer.steps, optimizer.idle, hasattr(optimizer, "once")) == (3, 0, False)
    assert optimizer.window == [0.0, 1.0, 2.0, 3.0]
    assert optimizer.moving.tolist() == [3.0, 3.0]
    assert (optimizer.object.number, optimizer.object.slot) == (3, 3)
    assert (optimizer.param_groups[0]["k"], optimizer.state["shared"]) == (3, 3)


def test_an_attribute_that_was_changed_between_backward_and_step() -> None:
    class Scaled(Plain):
        scale = 1.0

        def made(self, model: nn.Module) -> None:
            self.scale = 0.5

    model = layers()
    optimizer = Scaled(model)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=64) as overlap:
        backward(model, 0)
        optimizer.scale = 0.25
        with pytest.raises(HyperparameterChangedError, match="'scale' of Scaled was changed"):
            optimizer.step()
        overlap.accept_torn()
        optimizer.zero_grad()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_group_that_an_update_adds(by_hand: bool) -> None:
    extra = nn.Parameter(torch.zeros(2))

    class Adds(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those and len(self.param_groups) == 1 and by_hand:
                self.param_groups.append({"params": [extra]})
            elif those and len(self.param_groups) == 1:
                self.add_param_group({"params": [extra]})

    require_refused(Adds, "its list of param_groups in a way that depends")


def test_large_tensors_that_an_update_writes() -> None:
    class Averages(Plain):
        def made(self, model: nn.Module) -> None:
            self.average = torch.zeros(1 << 21)

        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those:
                self.average.add_(1)

    require_refused(Averages, "writes large tensors to which it refers")


def test_a_module_that_an_update_writes() -> None:
    class Averages(Plain):
        def made(self, model: nn.Module) -> None:
            self.average = nn.Linear(2, 2).requires_grad_(False)

        @torch.no_grad()
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those:
                self.average.weight.add_(1)

    require_refused(Averages, "or those of a module")


class Reaches(Plain):
    """Keeps momentum in an attribute, and writes a parameter that another attribute refers to."""

    def made(self, model: nn.Module) -> None:
        self.first = next(model.parameters())
        self.buffers = {p: torch.ones_like(p) for p in model.parameters()}

    def update(self, those: list[Any]) -> Any:
        for p in those:
            p.sub_(self.buffers[p].mul_(0.9).add_(p.grad), alpha=0.05)
            self.first.mul_(0.99)


def test_undo_puts_back_what_an_update_reaches_by_attributes() -> None:
    model = layers()
    optimizer = Reaches(model)
    with instep.attach(model, optimizer, schedule="backward", undo=True, bucket_bytes=64):
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, 0)
        optimizer.zero_grad()
        assert all(map(torch.equal, before, model.parameters()))
        assert all(bool((buffer == 1).all()) for buffer in optimizer.buffers.values())


def in_thread(ask: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_sees_all_parameters() -> None:
    seen: list[Any] = []

    class Looks(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            params = self.param_groups[0]["params"]
            if those:
                seen.append((len(params), in_thread(lambda: len(params)), in_thread(lambda: len([*params]))))

    model = layers()
    optimizer = Looks(model)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=64):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [(1, 4, 4)] * 4


def test_an_update_may_ask_for_all_state() -> None:
    seen: list[int] = []

    class Saves(Plain):
        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those:
                seen.append(len(self.state_dict()["param_groups"][0]["params"]))
                seen.append(len(self.param_groups[0]["params"]))

    model = layers()
    optimizer = Saves(model)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=64):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [4, 1] * 4


def test_another_thread_waits_with_what_needs_all_parameters() -> None:
    class Saved(Plain):
        def zero_grad(self, set_to_none: bool = True) -> None:
            entered.set()

        def update(self, those: list[Any]) -> Any:
            super().update(those)
            if those and not threads:
                threads.append(threading.Thread(target=self.zero_grad))
                threads[0].start()
                early.append(entered.wait(0.3))

    entered, threads, early = threading.Event(), list[threading.Thread](), list[bool]()
    model = layers()
    optimizer = Saved(model)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=64):
        backward(model, 0)
        threads[0].join()
        optimizer.step()
        model.zero_grad()
    assert early == [False]
    assert entered.is_set()


# Signals.


@contextmanager
def handled(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_of_a_signal_finds_all_parameters() -> None:
    class Signals(Plain):
        def update(self, those: list[Any]) -> Any:
            if those:
                signal.raise_signal(signal.SIGUSR1)
            super().update(those)

    seen: list[int] = []
    model = layers()
    optimizer = Signals(model)
    with (
        handled(lambda *_: seen.append(len([*optimizer.param_groups[0]["params"]]))),
        instep.attach(model, optimizer, schedule="backward", bucket_bytes=64),
    ):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [4] * 4 or here().type != "cpu"  # a thread of backward is not waited for by signals
    assert set(seen) == {4}


def test_handlers_run_after_the_block_and_are_put_back() -> None:
    seen: list[int] = []

    def handler(*_: Any) -> None:
        seen.append(1)

    with handled(handler):
        with suppress(ArithmeticError), held(heard()):
            signal.raise_signal(signal.SIGUSR1)
            assert not seen
            raise ArithmeticError
        assert seen == [1]
        assert signal.getsignal(signal.SIGUSR1) is handler


def test_on_another_thread_no_signal_is_held() -> None:
    def handler(*_: Any) -> None: ...

    def hold() -> bool:
        with held([signal.SIGUSR1]):
            return signal.getsignal(signal.SIGUSR1) is handler

    with handled(handler):
        assert in_thread(hold)


# Classes that are proved.


class Swept(Plain):
    """A class that the sweep has found, as ``proved`` names it."""

    def made(self, model: nn.Module) -> None:
        self.mode = "usual"


def swept(monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None, **changed: Any) -> Any:
    optimizer = Swept(layers())
    found = {
        "distribution": "torch",
        "version": "1",
        "settings": [["mode=another"], proved.settings_of(optimizer)],
        **changed,
    }
    monkeypatch.setattr(proved, "_proved", lambda: {f"{__name__}.Swept": found})
    monkeypatch.setattr(proved, "_version_of", {"torch": "1"}.get)
    return optimizer if model is None else Swept(model)


def test_a_class_is_proved_in_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proved.is_proved(swept(monkeypatch))
    assert not proved.is_proved(swept(monkeypatch, version="2"))
    assert not proved.is_proved(swept(monkeypatch, distribution="none", version="1"))


def test_a_class_is_proved_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = swept(monkeypatch)
    optimizer.param_groups[0]["lr"] = 0.5
    assert proved.is_proved(optimizer)
    optimizer.param_groups[0]["clip"] = 1.0
    assert not proved.is_proved(optimizer)
    del optimizer.param_groups[0]["clip"]
    optimizer.mode = "another"
    assert not proved.is_proved(optimizer)


def test_a_class_is_proved_over_parameters_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not proved.is_proved(swept(monkeypatch, layers().bfloat16()))


def test_a_step_that_was_replaced_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = swept(monkeypatch)
    optimizer.step = lambda closure=None: None
    assert not proved.is_proved(optimizer)


def test_a_proved_class_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: nn.Module) -> Any:
        return Swept(model)

    swept(monkeypatch)
    assert judged(make, 2).freed == [ALL, ALL]


# Inside of an autocast block.


@contextmanager
def in_bfloat16() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


class Multiplies(Plain):
    """Its update has a product, which autocast rounds."""

    def update(self, those: list[Any]) -> Any:
        for p in those:
            p.sub_(p.grad @ p.grad.T @ p.grad, alpha=0.05)


def test_a_foreign_step_that_was_compared_inside_of_a_block_matters_there_no_more() -> None:
    found = judged(Plain, 4, around=in_bfloat16)
    assert not found.verdict
    assert found.freed[-1] == ALL


@on_cpu_only
def test_a_foreign_step_that_computes_other_numbers_inside_of_a_block() -> None:
    assert "gets other values" in judged(Multiplies, 4, around=in_bfloat16).verdict


@on_cpu_only
def test_whether_the_block_matters() -> None:
    model = layers()
    sgd, foreign = torch.optim.SGD(model.parameters(), 0.0), Multiplies(model)
    own, stepper = Stepper(sgd), Stepper(foreign)
    assert not stepper.autocast_matters()
    with in_bfloat16():
        assert stepper.autocast_matters()
        assert not own.autocast_matters()
        stepper.came_out_alike()
        assert not stepper.autocast_matters()


# Objects of torch's that have got another step.


def test_an_object_that_steps_one_parameter_is_given_its_place_in_the_group() -> None:
    def make(model: nn.Module) -> Any:
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.05)

        @torch.no_grad()
        def step_parameter(p: Any, group: dict[str, Any], index: int) -> None:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05 * (index + 1))

        def step(closure: Any = None) -> None:
            for group in optimizer.param_groups:
                for index, p in enumerate(group["params"]):
                    step_parameter(p, group, index)

        optimizer.step_parameter, optimizer.step = step_parameter, step
        return optimizer

    found = judged(make)
    assert not found.verdict
    assert found.freed[-1] == ALL


def test_a_class_of_torchs_that_gets_a_step_of_its_own_after_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=True)
    calls: list[int] = []
    plain = torch.optim.SGD.step  # which calls the hooks: torch has seen to it where the first one was made

    def step(self: Any, closure: Any = None) -> Any:
        calls.append(len(calls))
        return plain(self, closure)

    with instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=64) as overlap:
        for i in range(2):
            if i:
                overlap.synchronize()
                monkeypatch.setattr(torch.optim.SGD, "step", step)
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()
        overlap.synchronize()
        assert calls == [0]
