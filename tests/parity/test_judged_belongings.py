"""Foreign optimizers that read, write or keep something that belongs to parameters which they are not given: each step
is the plain loop's, or an error says before anything is written that it cannot be."""

import configparser
import functools
import os
import random
import signal
import threading
import warnings
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep._optim import values
from instep.errors import AttachError, UnsupportedOptimizerError
from tests import net
from tests.forking import forking
from tests.judged import own_steps_are_judged
from tests.parity.judged_loops import WAYS, Plain, calls_while_judged, each_way, layers, require_same, usual

SMALL = {"undo": {**WAYS["undo"], "bucket_bytes": 1}}
"""One bucket for each parameter."""


class Momentum(Plain):
    """One parameter after the other; ``begin`` and ``end`` around them."""

    def begin(self) -> None: ...

    def update(self, p: Any) -> None:
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        p.sub_(m.mul_(0.9).add_(p.grad), alpha=0.05)

    def end(self) -> None: ...

    @property
    def every(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.begin()
        for p in list(self.with_gradient()):
            self.update(p)
        self.end()


def of_parameters(kind: type[Momentum]) -> Callable[[nn.Module], Momentum]:
    return lambda model: kind(model.parameters())


def require_plain(make: Callable[[nn.Module], Any], way: str, look: Any = lambda o: None, said: str = "") -> None:
    """Every step is left to ``step()``, and says why."""
    with pytest.MonkeyPatch.context() as patched:
        for name, options in SMALL.items():
            patched.setitem(WAYS, name, options)
        plan = require_same(make, way, look)
    assert (said in str(plan.judged) and bool(plan.judged)) == (way != "default")


# What it does with gradients.


class ClearsThem(Momentum):
    def end(self) -> None:
        self.zero_grad()


class ClearsThemInPlace(Momentum):
    def end(self) -> None:
        self.zero_grad(set_to_none=False)


@each_way
@pytest.mark.parametrize("kind", [ClearsThem, ClearsThemInPlace])
def test_gradients_that_it_clears(kind: type[Momentum], way: str) -> None:
    assert not require_same(of_parameters(kind), way).judged


class NormOfAll(Momentum):
    """Over all parameters of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        super().__init__(model.parameters())

    def begin(self) -> None:
        self.scale = 1 + sum(float(p.grad.norm()) for p in self.model.parameters() if p.grad is not None)

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 * self.scale)


class CountOfAll(NormOfAll):
    def begin(self) -> None:
        self.scale = sum(p.grad is not None for p in self.model.parameters())


class AllInState(Momentum):
    """Steps what its state holds."""

    def with_gradient(self) -> Iterator[Any]:
        for p in self.every:
            if p.grad is not None:
                self.state[p].setdefault("m", torch.zeros_like(p))
        return (p for p in self.state if p.grad is not None)


@each_way
@pytest.mark.parametrize("make", [NormOfAll, CountOfAll, of_parameters(AllInState)])
def test_gradients_of_others(make: Callable[[nn.Module], Any], way: str) -> None:
    require_plain(make, way)


class Penalty(Momentum):
    """By autograd."""

    def update(self, p: Any) -> None:
        with torch.enable_grad():
            (p**2).sum().mul(1e-2).backward()
        super().update(p)


@each_way
def test_a_backward_in_step(way: str) -> None:
    require_plain(of_parameters(Penalty), way, said="runs a backward of its own")


# What it keeps by parameter, and moves for all of them.


class Ages(Momentum):
    def made(self) -> None:
        self.ages = dict.fromkeys(self.every, 0)

    def end(self) -> None:
        for p in self.ages:
            self.ages[p] += 1

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 * self.ages[p])


class AgesOfParameters(Momentum):
    def begin(self) -> None:
        for p in self.every:
            p.age = getattr(p, "age", 0) + 1

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 * p.age)


class AveragesByParameter(Momentum):
    def made(self) -> None:
        self.averages = {p: p.detach().clone() for p in self.every}

    def end(self) -> None:
        for p in self.every:
            self.averages[p].lerp_(p, 0.1)


class AveragesInState(Momentum):
    """Made after the first update, and moved after the others."""

    def end(self) -> None:
        for p in self.every:
            entry = self.state[p]
            if "average" in entry:
                entry["average"].lerp_(p, 0.1)
            else:
                entry["average"] = p.detach().clone()


def kept(optimizer: Any) -> Any:
    held = [*getattr(optimizer, "ages", {}).values(), *getattr(optimizer, "averages", {}).values()]
    entries = [value for entry in optimizer.state.values() for value in entry.values()]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in (*held, *entries)]


@each_way
@pytest.mark.parametrize("kind", [Ages, AgesOfParameters, AveragesByParameter, AveragesInState])
def test_what_is_moved_for_all_parameters(kind: type[Momentum], way: str) -> None:
    require_plain(of_parameters(kind), way, kept)
    require_same(of_parameters(kind), way, kept)  # in the default buckets, too


# What it reads of others, by whatever road.


class KeepsDicts(Momentum):
    """Of each step a dict by parameter: the last gradients of all."""

    def made(self) -> None:
        self.past: Any = []

    def begin(self) -> None:
        self.now = {p: p.grad.clone() for p in self.with_gradient()}

    def update(self, p: Any) -> None:
        p.sub_(sum(past.get(p, 0) for past in self.past[-2:]) + p.grad, alpha=0.05)

    def end(self) -> None:
        self.past.append(self.now)


class KeepsOne(KeepsDicts):
    """The last one alone, in place of the one before."""

    def end(self) -> None:
        self.past = [self.now]


class KeepsOneInGroup(KeepsDicts):
    def update(self, p: Any) -> None:
        p.sub_(self.param_groups[0].get("past", {}).get(p, 0) + p.grad, alpha=0.05)

    def end(self) -> None:
        self.param_groups[0]["past"] = self.now


@pytest.mark.parametrize("kind", [KeepsDicts, KeepsOne, KeepsOneInGroup])
@each_way
def test_what_is_kept_by_parameter_in_a_dict_of_each_step(kind: type[Momentum], way: str) -> None:
    """Bucket by bucket, it would be a dict of each bucket, of which the last stays."""
    require_plain(of_parameters(kind), way, kept, "depends on which parameters step together")


class InAGroup(Momentum):
    """Momentum in a dict by parameter, in the group."""

    def update(self, p: Any) -> None:
        m = self.param_groups[0].setdefault("m", {}).setdefault(p, torch.zeros_like(p))
        p.sub_(m.mul_(0.9).add_(p.grad), alpha=0.05)


class CountsByParameter(Momentum):
    """In a ``Counter``, to which ``update()`` adds."""

    def made(self) -> None:
        self.ages: Any = Counter()

    def update(self, p: Any) -> None:
        self.ages[p] += 1
        p.sub_(p.grad, alpha=0.05 / self.ages[p])


@pytest.mark.parametrize("kind", [InAGroup, CountsByParameter])
@each_way
def test_what_is_kept_by_parameter_is_put_back(kind: type[Momentum], way: str) -> None:
    plan = require_same(of_parameters(kind), way, kept)
    assert "left to" not in str(plan.judged)


class FillsOne(KeepsDicts):
    """In place, and made with the first step."""

    def begin(self) -> None:
        self.past = self.past or [{}]

    def update(self, p: Any) -> None:
        super().update(p)
        self.past[0][p] = p.grad.clone()

    def end(self) -> None: ...


@each_way
def test_what_is_kept_by_parameter_in_a_dict_that_the_first_step_makes(way: str) -> None:
    plan = require_same(of_parameters(FillsOne), way, lambda o: None)
    assert "left to" not in str(plan.judged)


class KeepsOneLater(KeepsOne):
    """From the fifth step on: the first ones show nothing of it."""

    def made(self) -> None:
        super().made()
        self.steps = 0

    def begin(self) -> None:
        self.steps += 1
        if self.steps >= 5:
            super().begin()

    def end(self) -> None:
        if self.steps >= 5:
            super().end()


def test_a_dict_of_each_step_that_comes_later_is_torn() -> None:
    model = layers()
    optimizer = KeepsOneLater(model.parameters())
    with own_steps_are_judged(), instep.attach(model, optimizer, schedule="backward", bucket_bytes=1) as overlap:
        for i in range(5):
            loss = model(torch.full((2, 4), 0.1 * i)).square().sum()
            if i == 4:
                with pytest.raises(UnsupportedOptimizerError, match="depends on which parameters step together"):
                    loss.backward()
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert overlap.state == "torn"
        overlap.accept_torn()


class ReadsState(Momentum):
    def begin(self) -> None:
        self.total = sum(float(entry["m"].abs().mean()) for entry in self.state.values())

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-2 * self.total)


class ReadsNorms(Momentum):
    """Of the last step's gradients, which it keeps by parameter."""

    def made(self) -> None:
        self.norms: dict[Any, float] = {}

    def begin(self) -> None:
        self.total = sum(self.norms.values())

    def update(self, p: Any) -> None:
        self.norms[p] = float(p.grad.norm())
        super().update(p)
        p.mul_(1 - 1e-3 * self.total)


IN_A_GLOBAL: list[Any] = []


def in_a_global() -> list[Any]:
    return IN_A_GLOBAL


class InASlot:
    __slots__ = ("parameters",)
    parameters: list[Any]


class Called:
    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def __call__(self) -> list[Any]:
        return self.parameters


def by_default(parameters: list[Any]) -> Callable[[], list[Any]]:
    def found(them: list[Any] = parameters) -> list[Any]:
        return them

    return found


class ReadsBy(Momentum):
    """All parameters, by one road."""

    def __init__(self, model: nn.Module, road: str) -> None:
        super().__init__(model.parameters())
        every, self.road = self.every_one(), road
        IN_A_GLOBAL[:] = every if road == "a global" else []
        if road == "a slot":
            self.box = InASlot()
            self.box.parameters = every
        if road == "a weak reference":
            self.model: Any = weakref.ref(model)
        found = {
            "a callable": Called(every),
            "a partial": functools.partial(list, every),
            "a default": by_default(every),
        }
        if road in found:
            self.found = found[road]

    def every_one(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def begin(self) -> None:
        if self.road == "a slot":
            every = self.box.parameters
        elif self.road == "a weak reference":
            every = list(self.model().parameters())
        else:
            found: Any = in_a_global if self.road == "a global" else self.found
            every = found()
        self.total = sum(float(p.abs().mean()) for p in every)

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-2 * self.total)


@each_way
@pytest.mark.parametrize("road", ["a slot", "a callable", "a partial", "a default", "a global", "a weak reference"])
def test_parameters_that_it_reads_by_whatever_road(road: str, way: str) -> None:
    require_plain(lambda model: ReadsBy(model, road), way, said="uses parameters")


@each_way
@pytest.mark.parametrize("kind", [ReadsState, ReadsNorms])
def test_what_it_reads_of_what_belongs_to_others(kind: type[Momentum], way: str) -> None:
    require_plain(of_parameters(kind), way, said="uses parameters")


class Second(Momentum):
    others: Any = ()

    def update(self, p: Any) -> None:
        super().update(p)
        for other in self.others:
            value = other if isinstance(other, nn.Parameter) else other["m"]
            p.mul_(1 - 1e-2 * value.abs().mean())


def two(of_state: bool) -> Callable[[nn.Module], list[Momentum]]:
    def make(model: nn.Module) -> list[Momentum]:
        parameters = list(model.parameters())
        first, second = Momentum(parameters[:3]), Second(parameters[3:])
        second.others = _Entries(first) if of_state else parameters[:3]
        return [first, second]

    return make


class _Entries:
    def __init__(self, optimizer: Any) -> None:
        self.state = optimizer.state

    def __iter__(self) -> Iterator[Any]:
        return iter(self.state.values())


def with_all(model: nn.Module, optimizers: Any, i: int) -> None:
    model(torch.full((3, 4), 0.1 * i + 0.1)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


@each_way
@pytest.mark.parametrize("of_state", [False, True])
def test_what_belongs_to_another_optimizer(of_state: bool, way: str) -> None:
    require_same(two(of_state), way, learn=with_all)


class Counts(Momentum):
    counter: Any

    def begin(self) -> None:
        self.counter["n"] += 1

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 * self.counter["n"])


def with_one_counter(model: nn.Module) -> list[Momentum]:
    parameters, counter = list(model.parameters()), {"n": 0}
    first, second = Counts(parameters[:3]), Counts(parameters[3:])
    first.counter = second.counter = counter
    return [first, second]


@each_way
def test_a_counter_that_two_optimizers_share(way: str) -> None:
    plan = require_same(with_one_counter, way, learn=with_all)
    assert ("shares a dict with another optimizer" in str(plan.judged)) == (way != "default")


@each_way
def test_a_foreign_optimizer_beside_one_of_torchs_in_one_bucket(way: str) -> None:
    def make(model: nn.Module) -> list[Any]:
        parameters = list(model.parameters())
        matrices, others = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim == 1]
        return [Momentum(matrices), torch.optim.AdamW(others, lr=0.01)]

    require_same(make, way, learn=with_all)


# What moves elsewhere.


class Ticks(Momentum):
    """In the model: an attribute of Python, or a buffer, which it reaches by a weak reference."""

    def __init__(self, model: nn.Module, weak: bool) -> None:
        self.model: Any = weakref.ref(model) if weak else (lambda: model)
        model.ticks = 0  # type: ignore[assignment]
        model.register_buffer("beats", torch.zeros(()))
        super().__init__(model.parameters())

    def begin(self) -> None:
        model: Any = self.model()
        model.ticks += 1
        model.beats.add_(1)

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 * (self.model().ticks + float(self.model().beats)))


@each_way
@pytest.mark.parametrize("weak", [False, True])
def test_what_moves_in_the_model(weak: bool, way: str) -> None:
    require_plain(lambda model: Ticks(model, weak), way, lambda o: (o.model().ticks, float(o.model().beats)))


class CachesASize(Momentum):
    """Asked for once, over what the groups hold then, and kept where nobody looks."""

    @functools.lru_cache(None)  # noqa: B019  # as published optimizers have it
    def size(self) -> int:
        return sum(p.numel() for group in self.param_groups for p in group["params"])

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 / self.size())


SIZES: dict[int, int] = {}


class KeepsASizeInAGlobal(Momentum):
    def made(self) -> None:
        SIZES.clear()

    def update(self, p: Any) -> None:
        super().update(p)
        count = sum(len(group["params"]) for group in self.param_groups)
        p.mul_(1 - 1e-3 * SIZES.setdefault(id(self), count))


class HoldsQuantized(Momentum):
    """In an attribute, and in the state."""

    def made(self) -> None:
        self.table = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)

    def update(self, p: Any) -> None:
        super().update(p)
        self.state[p]["table"] = self.table


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@each_way
@pytest.mark.parametrize(
    ("kind", "is_left"), [(CachesASize, False), (KeepsASizeInAGlobal, False), (HoldsQuantized, True)]
)
def test_what_the_first_update_finds_out(kind: type[Momentum], is_left: bool, way: str) -> None:
    """It finds out over all parameters: nothing stands beside it."""
    assert bool(require_same(of_parameters(kind), way).judged) == (is_left and way != "default")


class RatesByDepth(Momentum):
    """In a plain dict, which nobody writes."""

    def made(self) -> None:
        self.rates = {p: 0.9**i for i, p in enumerate(self.param_groups[0]["params"])}

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 * self.rates[p])


class Configured(Momentum):
    """What it was made with takes no parameter for a key."""

    def made(self) -> None:
        self.config = configparser.ConfigParser()
        self.config["update"] = {"shrink": "0.999"}
        self.environment = os.environ

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(self.config.getfloat("update", "shrink"))


@each_way
@pytest.mark.parametrize(("kind", "is_left"), [(RatesByDepth, False), (Configured, True)])
def test_what_is_kept_and_never_written(kind: type[Momentum], is_left: bool, way: str) -> None:
    assert bool(require_same(of_parameters(kind), way).judged) == (is_left and way != "default")


COUNT = {"n": 0}


class CopiesACounter(Momentum):
    """From outside, into an attribute that it reads."""

    def made(self) -> None:
        COUNT["n"] = self.n = 0

    def begin(self) -> None:
        count()
        self.n = COUNT["n"]

    def update(self, p: Any) -> None:
        super().update(p)
        p.mul_(1 - 1e-3 * self.n)


def count() -> None:
    COUNT["n"] += 1


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_a_counter_outside_that_shows_in_an_attribute(way: str) -> None:
    model = layers()
    optimizer = CopiesACounter(model.parameters())
    with own_steps_are_judged(), instep.attach(model, optimizer, **WAYS[way]) as overlap:
        usual(model, optimizer, 0)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(UnsupportedOptimizerError, match="other values when the same step is taken again"):
            usual(model, optimizer, 1)
        assert all(map(torch.equal, before, model.parameters()))
        overlap.accept_torn()


class AddsAGroup(Momentum):
    """In its fourth step."""

    def __init__(self, model: nn.Module) -> None:
        *first, weight, bias = model.parameters()
        self.late, self.steps = [weight, bias], 0
        super().__init__(first)

    def begin(self) -> None:
        self.steps += 1
        if self.steps == 4:
            self.add_param_group({"params": self.late})


@pytest.mark.parametrize("way", ["undo", "default"])
def test_a_group_that_it_adds(way: str) -> None:
    require_same(AddsAGroup, way, lambda o: len(o.param_groups))


# How it keeps things.


class StateIsATensor(Momentum):
    def update(self, p: Any) -> None:
        self.state[p] = self.state.get(p, torch.zeros_like(p)) * 0.9 + p.grad
        p.sub_(self.state[p], alpha=0.05)


class HoldsAModule(Momentum):
    def made(self) -> None:
        self.modules = (torch, random, nn.functional)


class HoldsBytes(Momentum):
    def update(self, p: Any) -> None:
        super().update(p)
        entry = self.state[p]
        entry.setdefault("bytes", bytearray(1)).append(1)
        entry.setdefault("array", array("i")).append(len(entry["bytes"]))
        p.mul_(1 - 1e-3 * sum(entry["array"]))


@each_way
@pytest.mark.parametrize("kind", [StateIsATensor, HoldsAModule, HoldsBytes])
def test_how_it_keeps_things(kind: type[Momentum], way: str) -> None:
    require_same(of_parameters(kind), way)


@pytest.mark.parametrize("options", [{"schedule": "backward"}, {"schedule": "backward", "undo": True}])
def test_views_of_one_tensor_are_refused_by_name(options: Any) -> None:
    flat = torch.randn(32)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:16]), nn.Parameter(flat[16:])
    with pytest.raises(AttachError, match="'a' and 'b' are views of one tensor"):
        instep.attach(model, torch.optim.SGD(model.parameters()), **options)
    version = model.a._version
    with instep.attach(model, torch.optim.SGD(model.parameters())):
        assert model.a._version == version
    apart = torch.empty(32)
    model.a, model.b = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
    model.a.data, model.b.data = apart[:16], apart[16:]  # each counts by itself
    with instep.attach(model, torch.optim.SGD(model.parameters()), **options):
        pass


def test_nothing_is_disturbed_while_a_handler_runs() -> None:
    """Weights are other ones for a moment: a handler of a signal, which may save them, comes after it."""
    model, seen = layers(), []

    class Signals(Momentum):
        def begin(self) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    def look(*_: Any) -> None:
        seen.append(min(float(p.detach().abs().max()) for p in model.parameters()))

    before = signal.signal(signal.SIGUSR1, look)
    optimizer = Signals(model.parameters())
    try:
        with own_steps_are_judged(), instep.attach(model, optimizer, **WAYS["backward"]):
            for i in range(2):  # those that are judged
                usual(model, optimizer, i)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen
    assert min(seen) > 1e-3


def looks_at(count: int) -> int:
    """How many values are looked into while an optimizer over ``count`` layers is judged."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
    return calls_while_judged(values, "_referred_by", model, Momentum(model.parameters()))


def test_what_an_optimizer_reaches_is_walked_once_for_all_parts() -> None:
    few, many = looks_at(8), looks_at(64)
    assert 0 < many <= 8 * few


class Catches(NormOfAll):
    """And takes what it finds."""

    def begin(self) -> None:
        self.scale = 1.0
        try:
            self.scale += sum(float(p.norm()) for p in self.model.parameters())
        except Exception:
            self.scale += 1.0


@each_way
def test_an_error_that_it_catches(way: str) -> None:
    require_plain(Catches, way, said="uses parameters")


class MovesStateOfAll(Momentum):
    """Of whatever has some: nobody could put that back."""

    def begin(self) -> None:
        for entry in self.state.values() if len(self.state) > 1 else ():
            entry["m"].mul_(0.99)


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_state_that_it_moves_of_others_is_told(way: str) -> None:
    model = layers()
    optimizer = MovesStateOfAll(model.parameters())
    with own_steps_are_judged(), instep.attach(model, optimizer, **{**WAYS[way], "bucket_bytes": 1}) as overlap:
        usual(model, optimizer, 0)
        with pytest.raises(UnsupportedOptimizerError, match=r"writes \d parameters, too, or their state"):
            usual(model, optimizer, 1)
        overlap.accept_torn()


def test_another_thread_may_evaluate_the_model_meanwhile() -> None:
    model, failed = layers(), []
    batch = torch.ones(1, 4)  # made here: another thread has a default device of its own

    def evaluate() -> None:
        try:
            with torch.no_grad():
                model(batch)
        except Exception as error:
            failed.append(error)

    class Slow(Momentum):
        def begin(self) -> None:
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    optimizer = Slow(model.parameters())
    with own_steps_are_judged(), instep.attach(model, optimizer, **WAYS["backward"]):
        for i in range(2):
            usual(model, optimizer, i)
    assert not failed


# Values and memory of odd kinds.


@dataclass(frozen=True)
class Version:
    major: int
    minor: int


class HoldsNew(Momentum):
    """Equal values, but new objects in each step."""

    def update(self, p: Any) -> None:
        super().update(p)
        entry = self.state[p]
        entry["odd"] = [Decimal(1), timedelta(1), range(2), functools.partial(max, 1), np.float32(1)]
        self.param_groups[0]["last"] = [np.int64(3), Decimal(1), Version(1, 2)]
        self.last = (Fraction(1, 2), timedelta(1), Version(1, 2))


class HoldsHandle(Momentum):
    """A hook's handle, which refers weakly to a dict that nobody can hash."""

    def made(self) -> None:
        self.layer = nn.Linear(1, 1)
        self.handle = self.layer.register_forward_hook(lambda *call: None)


class Resizes(Momentum):
    """Scratch memory, for each parameter."""

    def made(self) -> None:
        self.scratch = torch.empty(0)

    def update(self, p: Any) -> None:
        self.scratch.resize_(p.numel()).copy_(p.grad.flatten())
        history = self.state[p].setdefault("history", torch.empty(0))
        history.resize_(history.numel() + 1)[-1] = 1.0
        super().update(p)


class Frees(Momentum):
    """A workspace in state, whose memory is given back after each update."""

    def update(self, p: Any) -> None:
        work = self.state[p].setdefault("work", torch.empty_like(p))
        work.untyped_storage().resize_(work.nbytes)
        work.copy_(p.grad)
        super().update(p)
        work.untyped_storage().resize_(0)


class ReadOnlyArray(Momentum):
    def update(self, p: Any) -> None:
        table = self.state[p].setdefault("table", np.ones(3))
        table.flags.writeable = False
        super().update(p)
        p.mul_(float(table[0]))


class Bare:
    """Nobody knows what it holds, nor whether it is another one."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bare)


BARE = Bare()


class HoldsBare(Momentum):
    """Which nobody can put back, nor copy."""

    def update(self, p: Any) -> None:
        super().update(p)
        self.state[p]["bare"] = BARE


class HoldsSlice(Momentum):
    def update(self, p: Any) -> None:
        super().update(p)
        self.state[p]["columns"] = slice(1)


@each_way
@pytest.mark.parametrize(
    ("kind", "is_left"),
    [(HoldsNew, False), (HoldsHandle, False), (HoldsSlice, False), (Resizes, True), (ReadOnlyArray, False)],
)
def test_values_and_memory_of_odd_kinds(kind: type[Momentum], is_left: bool, way: str) -> None:
    judged = require_same(of_parameters(kind), way).judged
    assert bool(judged) == (is_left and way != "default"), judged


@each_way
@pytest.mark.parametrize(
    ("kind", "said"), [(HoldsBare, "a Bare, which does not tell what it holds"), (Frees, "memory was given back")]
)
def test_what_nobody_can_put_back_is_left_to_step(kind: type[Momentum], said: str, way: str) -> None:
    require_plain(of_parameters(kind), way, said=said)


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_memory_of_weights_can_be_resized_afterwards(way: str) -> None:
    model = layers()
    optimizer = Momentum(model.parameters())
    with own_steps_are_judged(), instep.attach(model, optimizer, **WAYS[way]):
        for i in range(2):
            usual(model, optimizer, i)
    tensors = [*model.parameters(), *(value for entry in optimizer.state.values() for value in entry.values())]
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


def train_with_read_only_memory(table: str) -> None:
    """Each parameter has a table in a mapped file, which nobody may write: not even what it holds."""

    class Reads(Momentum):
        def update(self, p: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is not writable
                mapped = torch.from_numpy(np.load(table, mmap_mode="r"))
            held = self.state[p].setdefault("table", mapped)
            super().update(p)
            p.mul_(1 - 1e-3 * held[0])

    for way in ("backward", "undo"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(WAYS, way, {**WAYS[way], "bucket_bytes": 1})
            require_same(of_parameters(Reads), way)


def test_memory_that_may_only_be_read(tmp_path: Path) -> None:
    """In a process of its own: who writes there ends it."""
    np.save(tmp_path / "table.npy", np.full(4, 0.5, dtype=np.float32))
    process = forking().Process(target=train_with_read_only_memory, args=(str(tmp_path / "table.npy"),))
    process.start()
    process.join(net.SECONDS)
    assert process.exitcode == 0


class LooksLate(Momentum):
    """At all weights, from its fourth step on."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0
        super().__init__(model.parameters())

    def begin(self) -> None:
        self.steps += 1

    def update(self, p: Any) -> None:
        if self.steps > 3:
            assert all(bool(q.isfinite().all()) for q in self.model.parameters())
        super().update(p)


def test_a_look_at_all_weights_that_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket that runs was stepped, and not put back."""
    monkeypatch.setitem(WAYS, "undo", {**WAYS["undo"], "bucket_bytes": 1})
    require_same(LooksLate, "undo")


def test_what_has_no_gradient_is_not_disturbed() -> None:
    model, seen = layers(), set()
    frozen = nn.Parameter(torch.full((2,), 100.0), requires_grad=False)
    model.register_parameter("frozen", frozen)

    class Looks(Momentum):
        def begin(self) -> None:
            seen.add(float(alias[0]))

    alias = frozen.detach()
    optimizer = Looks(model.parameters())
    with own_steps_are_judged(), instep.attach(model, optimizer, **WAYS["backward"]):
        for i in range(2):
            usual(model, optimizer, i)
    assert seen == {100.0}
