"""Programs that were found to differ in silence, or to fail with something that says nothing, each in all ways."""

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import instep
from instep.errors import InstepError
from instep_tools.harness import first_difference, training_state
from tests.devices import on_cpu_only
from tests.parity.dropping import run_dropped
from tests.parity.edits import MOMENTS
from tests.parity.interrupts import Interrupter
from tests.parity.made import Recipe
from tests.parity.oracle import run_or_refuse
from tests.parity.outputs import OUTPUTS
from tests.parity.programs import CALLS, Program, Step
from tests.parity.wild import LARGE

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = (True, True)
FIVE = (Step((BOTH,)),) * 5
BASE = Program("AdamW-0-fused", 4, 2, FIVE)
EXACT = ("forward", "late", "undo", "undo on the host")
ALL = ("backward", *EXACT)
GENERATORS = ("torch", "numpy", "random", "torch generator", "numpy generator", "random generator")


def broken(*ways: str, **changed: Any) -> Iterator[str]:
    """What the program does against the contract, in each way."""
    for way in ways:
        program = replace(BASE, way=way, **changed)
        try:
            run_or_refuse(program)
        except Exception as error:
            yield f"{way}: {type(error).__name__}: {str(error)[:200]}"


def broken_made(*ways: str, steps: int = 5, clip: str | None = None, **recipe: Any) -> Iterator[str]:
    """An optimizer made by hand, small gradients and large, small parameters and large."""
    for width, scale in ((4, 1.0), (LARGE, 1.0), (4, 1e4)):
        made = Recipe(**recipe)
        found = broken(
            *ways, steps=FIVE[:1] * steps, clip=clip, recipe=made, width=width, scale=scale, optimizer="made"
        )
        yield from (f"{recipe}, width {width}, loss * {scale}: {one}" for one in found)


def broken_by_edits(
    edits: Iterable[str], *ways: str, moments: Iterable[str] = MOMENTS, **changed: Any
) -> Iterator[str]:
    """Each of the edits, at each moment, in two steps of five, with two groups."""
    for edit, moment in product(edits, moments):
        edited = replace(FIVE[0], edits=((moment, edit),))
        steps = (FIVE[0], edited, FIVE[0], edited, FIVE[0])
        for way in ways:
            # A comparison finishes what is due, so that the next step begins with nothing due.
            every = way not in ("forward", "late")
            found = broken(way, **{"steps": steps, "groups": (1.0, 0.5), "every": every, **changed})
            yield from (f"{edit!r} at {moment!r}: {one}" for one in found)


def none(*found: Iterator[str]) -> None:
    everything = list(chain.from_iterable(found))
    assert not everything, "\n".join(everything)


# Optimizers: what ``Recipe`` has for them, and where it is changed the number of steps.
MADE: dict[str, list[dict[str, Any]]] = {
    "parameters without gradient are written": [{"decays_all": True}],
    "couples from the first step": [{"couples": "always"}],
    "couples later": [{"couples": "always", "since": 5, "steps": 8}],
    "couples what is large": [{"couples": "size"}, {"couples": "scale"}],
    "couples, with memory by parameter": [{"couples": "always", "since": 4, "memory": "parameter"}],
    "draws from the first step": [{"draws": draws} for draws in GENERATORS],
    "draws for what is large": [{"draws": draws, "draws_for": "large"} for draws in GENERATORS],
    "draws later": [{"draws": draws, "since": 5, "steps": 8} for draws in GENERATORS],
    "returns what it did": [{"returns": True}],
}
BY_NIGHT: dict[str, list[dict[str, Any]]] = {
    "memory": [{"memory": kind} for kind in ("position", "name", "parameter", "group", "nowhere")],
    "counters": [{"counts": kind} for kind in ("group", "attribute", "tensor", "object", "list", "state")],
}


@pytest.mark.nightly
@pytest.mark.parametrize("clip", ["norm", "norm in the loop"])
def test_gradients_written_by_the_update(clip: str) -> None:
    none(*(broken_made(*EXACT, gradient=kind, clip=clip) for kind in ("decayed", "centralized", "replaced")))


@pytest.mark.parametrize("what", [*MADE, *(pytest.param(name, marks=pytest.mark.nightly) for name in BY_NIGHT)])
def test_an_optimizer(what: str) -> None:
    none(*(broken_made(*ALL, **recipe) for recipe in (MADE | BY_NIGHT)[what]))


# Edits.
EDITED: dict[str, tuple[Iterable[str], dict[str, Any]]] = {
    "a parameter moved to another group": (["move"], {}),
    "state cleared": (["clear state"], {}),
    "gradients": (("write a gradient", "replace a gradient", "set a gradient", "drop a gradient", "clear"), {}),
    "groups": (("value", "another value", "a new key", "load the optimizer"), {}),
    "parameters taken out or put in another order": (("other order", "new lists", "remove"), {}),
    "a group added": (["add"], {"leave_out": True}),
    "weights": (("write a weight", "write a weight through data", "replace the data", "freeze"), {}),
    "attached again": (["attach again"], {}),
}


@pytest.mark.parametrize("what", EDITED)
def test_changed_by_hand(what: str) -> None:
    edits, options = EDITED[what]
    none(broken_by_edits(edits, *ALL, **options))


@on_cpu_only  # on an accelerator the step after it raises
def test_a_tensor_rate_changed_where_no_version_tells() -> None:
    edits = ("tensor in place", "tensor through data", "tensor through NumPy")
    none(broken_by_edits(edits, *ALL, moments=("forward", "backward", "step"), optimizer="SGD tensor rate"))


@pytest.mark.nightly
def test_a_setting_inside_an_object() -> None:
    for settings in ("object", "object in the group"):
        recipe = Recipe(settings=settings)
        none(broken_by_edits(["inside an object"], *ALL, moments=("forward", "backward", "step"), recipe=recipe))


def test_state_changed_by_hand() -> None:
    edits = ("pop state", "replace state", "write state", "replace a state tensor")
    none(broken_by_edits(edits, *ALL, moments=MOMENTS[1:]))


# Calls and outputs.


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_nonfinite_where_no_module_is_called(nonfinite: str) -> None:
    steps = (FIVE[0], replace(FIVE[0], overflow=True), FIVE[0])
    calls = ("whole", "forward", "parts", "weights")
    none(*(broken("forward", "late", "undo", steps=steps, nonfinite=nonfinite, call=call) for call in calls))


def test_nonfinite_with_weights_that_are_shared() -> None:
    overflow = Step(((True, True, False),), frozenset({0, 2}), overflow=True)
    none(broken(*EXACT, depth=3, steps=(overflow, overflow), tied=(1, 0), nonfinite="skip", call="weights"))


def test_two_forwards_of_parts_before_two_backwards() -> None:
    steps = (Step((BOTH, BOTH)),) * 3
    none(*(broken(*ALL, steps=steps, call="pipeline", accumulate=how) for how in ("hold", "plain")))


def test_every_output() -> None:
    none(*(broken(*ALL, output=output) for output in OUTPUTS))


def test_every_call() -> None:
    none(*(broken(*ALL, call=call) for call in CALLS))


# Dropped, and interrupted.


@pytest.mark.nightly
def test_dropped_at_every_moment() -> None:
    found = []
    for way, moment, kept in product((*ALL[:2], *ALL[3:]), MOMENTS, ((), ("optimizer",), ("overlap",))):
        try:
            run_dropped(replace(BASE, way=way), moment, frozenset(kept))
        except AssertionError as error:
            found.append(f"{way}, kept {kept}: {error}")
    assert not found, "\n".join(found)


class Interrupted(torch.optim.SGD):
    """Ctrl-C before the ``at``-th parameter."""

    at: ClassVar = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.at[0] -= 1
                if self.at[0] == 0:
                    raise KeyboardInterrupt
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("undo", [True, "host"])
def test_interrupted_while_a_step_is_done_again(undo: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = Interrupted(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, undo=undo, bucket_bytes=1, schedule="backward"):
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.at[0] = 3
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.zero_grad()
        try:
            model(torch.ones(2, 4))
        except InstepError:
            return
        assert all(map(torch.equal, before, model.parameters()))


def a_step_on_trial() -> tuple[nn.Module, torch.optim.Optimizer, instep.Attachment]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, undo=True, bucket_bytes=1, schedule="backward")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, overlap


def test_interrupted_while_a_step_is_put_back() -> None:
    """At points of it: it is put back as a whole, and Ctrl-C comes then."""
    for where in itertools.count(step=11):
        model, optimizer, overlap = a_step_on_trial()
        with overlap:
            before = copy.deepcopy(list(training_state(model, optimizer)))
            model(torch.ones(2, 4)).square().sum().backward()
            interrupter = Interrupter(where)
            try:
                with interrupter.watching():
                    overlap.rollback()
            except KeyboardInterrupt:
                overlap.rollback()
            difference = first_difference(iter(before), training_state(model, optimizer))
            assert difference is None, f"interrupted at point {where}, in {interrupter.place}: {difference}"
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            assert overlap.step_count == 3
        if interrupter.place is None:
            break
    assert where > 50
