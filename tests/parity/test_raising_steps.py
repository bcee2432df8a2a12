"""``optimizer.step()`` is left all of its parameters, and raises: the loop that catches the error goes on as the plain
loop does, with the same weights and state, and nothing is torn."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._ranks.vote import Verdict
from instep.errors import TornStepError
from instep_tools.harness import first_difference, training_state

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "defer": {"defer": True},
    "at once": {"defer": False},
    "defer, nonfinite": {"defer": True, "nonfinite": "raise"},
    "at once, nonfinite": {"defer": False, "nonfinite": "skip"},
}
RAISES_IN, STEPS = 2, 6


class Fails(torch.optim.SGD):
    """Nobody knows it. It raises at one parameter, after it has written the ones before."""

    at: int | None = None

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
                if number == Fails.at:
                    raise ZeroDivisionError("of this parameter")
                if parameter.grad is not None:
                    self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
                    parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


class Loop:
    """A plain loop, or one with instep."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], options: dict[str, Any] | None, *, held: bool):
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4, sparse=make is sparse_adam)
        others = [] if make is sparse_adam else [nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)]
        self.model = nn.Sequential(self.embedding, *others)
        self.optimizer = make(self.model.parameters())
        # Whoever has an alias may read it at any time: such a parameter is not put off.
        self.held = [parameter.detach() for parameter in self.model.parameters()] if held else []
        self.overlap = None if options is None else instep.attach(self.model, self.optimizer, **options)
        self.told: str | None = None

    def prepare(self, number: int, mistake: Callable[["Loop", bool], None]) -> None:
        mistake(self, number == RAISES_IN)
        indices = torch.arange(number, number + 5).remainder(7)
        self.model(indices).square().mean().backward()

    def run(self, mistake: Callable[["Loop", bool], None], then: str) -> Iterator[Any]:
        for number in range(STEPS):
            self.prepare(number, mistake)
            try:
                self.optimizer.step()
            except Exception as error:
                self.told = f"{type(error).__name__}: {error}"
            if number == RAISES_IN and then == "step again":
                mistake(self, False)
                yield self.found()
                self.optimizer.step()
            yield self.found()
            if number != RAISES_IN or then != "keep the gradients":
                self.optimizer.zero_grad()

    def found(self) -> Any:
        if self.overlap is not None:
            self.overlap.synchronize()
        return [(name, _cloned(value)) for name, value in training_state(self.model, self.optimizer)]


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, foreach=False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), lr=0.01)


def fails(parameters: Any) -> torch.optim.Optimizer:
    return Fails(parameters, lr=0.1)


# What makes step() raise.


def sparse(loop: Loop, now: bool) -> None:
    loop.embedding.sparse = now


def dense(loop: Loop, now: bool) -> None:
    loop.embedding.sparse = not now


def no_number(loop: Loop, now: bool) -> None:
    loop.optimizer.param_groups[0]["lr"] = None if now else 0.01


def at_one_parameter(loop: Loop, now: bool) -> None:
    Fails.at = 3 if now else None


CASES = {
    "a sparse gradient": (adam, sparse, False),
    "a dense gradient": (sparse_adam, dense, False),
    "a group": (adam, no_number, True),
    "a group of SGD": (sgd, no_number, True),
    "one parameter": (fails, at_one_parameter, True),
}


@pytest.mark.parametrize("then", ["clear", "keep the gradients", "step again"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_raises_is_the_plain_loop_s(way: str, case: str, then: str) -> None:
    make, mistake, held = CASES[case]
    if then == "step again" and mistake is not no_number and mistake is not at_one_parameter:
        pytest.skip("the gradient is the mistake")
    plain, loop = Loop(make, None, held=held), Loop(make, WAYS[way], held=held)
    assert loop.overlap is not None
    with loop.overlap:
        for number, (expected, found) in enumerate(zip(plain.run(mistake, then), loop.run(mistake, then), strict=True)):
            difference = first_difference(iter(expected), iter(found))
            assert difference is None, f"after {number}: {difference}"
            assert loop.told == plain.told, number
    assert plain.told is not None


def test_a_mistake_in_a_group_of_a_step_that_was_put_off() -> None:
    """See docs/forward.md: the plain loop's error comes from step(), this one at the next use. The step is torn."""
    plain, loop = Loop(adam, None, held=False), Loop(adam, {"defer": True}, held=False)
    assert loop.overlap is not None
    with loop.overlap:
        loop.prepare(0, no_number)
        loop.optimizer.step()
        loop.overlap.synchronize()
        loop.optimizer.zero_grad()
        plain.prepare(RAISES_IN, no_number)
        with pytest.raises(TypeError) as expected:
            plain.optimizer.step()
        loop.prepare(RAISES_IN, no_number)
        loop.optimizer.step()
        with pytest.raises(TypeError) as found:
            next(loop.model.parameters()).sum()
        assert str(found.value) == str(expected.value)
        with pytest.raises(TornStepError):
            loop.model(torch.zeros(1, dtype=torch.long))
        loop.overlap.accept_torn()


class Agreeing:
    """Another rank, which has nothing to say against any step."""

    def __init__(self) -> None:
        self.failed: list[int] = []

    def open(self) -> None: ...

    def cast(self, step: int, *, failed: bool = False, nonfinite: bool = False) -> "Agreeing":
        self.failed += [step] if failed else []
        return self

    def abstain(self) -> "Agreeing":
        return self

    def done(self) -> bool:
        return True

    def verdict(self) -> Verdict:
        return Verdict(None, None, 1, 1, same=True)


@pytest.mark.parametrize("case", [case for case in CASES if case != "one parameter"])
def test_other_ranks_are_told(case: str) -> None:
    """They may have put the step off, and must not train on. (No update of a foreign class is put off.)"""
    make, mistake, held = CASES[case]
    loop = Loop(make, {"defer": True}, held=held)
    assert loop.overlap is not None
    other: Any = Agreeing()
    loop.overlap._parts.votes.voting = other
    with loop.overlap:
        for number in range(RAISES_IN + 1):
            loop.prepare(number, mistake)
            with suppress(Exception):
                loop.optimizer.step()
            if number < RAISES_IN:
                loop.optimizer.zero_grad()
        with suppress(TornStepError):
            loop.model(torch.zeros(1, dtype=torch.long))
        assert loop.overlap.state == "torn"
        assert other.failed
        mistake(loop, False)
        loop.overlap.accept_torn()
