"""Drawn programs that may do what instep refuses: it refuses, or the attached loop is the plain loop."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import event, example, given, settings

from tests.parity import wild
from tests.parity.made import Recipe
from tests.parity.oracle import run_or_refuse
from tests.parity.programs import Program, Step
from tests.parity.wild import EVERYTHING, SOME
from tests.parity.zoo import installed

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's optimizers, and schedulers that come first
DRAWN: Counter[str] = Counter()


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_compiled() -> Iterator[None]:
    """Some packages compile their update, which takes longer than all the rest."""
    with torch.compiler.set_stance("force_eager"):
        yield


def run(program: Program) -> None:
    outcome = run_or_refuse(program)
    DRAWN[program.optimizer or "made by hand"] += 1
    event(outcome)


def _left_out(memory: str) -> Program:
    """Its first step is skipped: nothing is compared in it."""
    steps = (Step(((False, False, True),), event="skip"), Step(((True, True, True),)))
    return Program("", 4, 3, steps, way="undo", recipe=Recipe(memory=memory))


FOREIGN = Program("", 2, 2, (Step(((True, True),)),) * 3, way="backward", recipe=Recipe(memory="on the parameter"))


@example(replace(FOREIGN, steps=FOREIGN.steps * 2))
@example(_left_out("parameter"))
@example(_left_out("object"))
@example(_left_out("on the parameter"))
@given(wild.made)
@SOME
def test_optimizers_made_by_hand(program: Program) -> None:
    run(program)


@given(wild.drawn_optimizers)
@settings(SOME, max_examples=40)
def test_drawn_optimizers(program: Program) -> None:
    run(program)


ONCE = Program("AdamW-0-fused", 2, 2, (Step(((True, True),)),))
ADDED = replace(ONCE, steps=(Step(((True, True),), edits=(("forward", "add"),)),), leave_out=True, limit=0.001)
FOUND_WITH_EDITS = [
    replace(ADDED, way="two_pass", clip="norm", call="checkpointed"),
    replace(ADDED, way="two_pass", clip="norm", steps=(replace(ADDED.steps[0], frozen=frozenset({0})),), bias=False),
    replace(ONCE, way="forward", clip="norm", steps=(Step(((True, True),), edits=(("forward", "freeze"),)),)),
]


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_a_closure_that_detaches_and_attaches_again(way: str) -> None:
    steps = (Step(((True, True),), edits=(("backward", "attach again"),)),) * 2
    assert run_or_refuse(replace(ONCE, way=way, closure=True, steps=steps)) == "equal"


@pytest.mark.parametrize("memory", ["state", "position", "name", "parameter", "object", "on the parameter", "group"])
@pytest.mark.parametrize("way", ["backward", "two_pass", "undo"])
def test_what_attributes_remember_of_a_step_that_is_detached_from(way: str, memory: str) -> None:
    """Between backward and ``step()``: what backward has applied stands, and what its updates have left beside it."""
    once = Step(((True,),))
    steps = (once, once, once, replace(once, edits=(("backward", "attach again"),)), once)
    recipe = Recipe(memory=memory)
    clip = "norm" if way == "two_pass" else None
    program = Program("", 1, 1, steps, bias=False, groups=(0.5,), way=way, clip=clip, limit=0.001, recipe=recipe)
    assert run_or_refuse(program) == "equal"


@example(FOUND_WITH_EDITS[0])
@example(FOUND_WITH_EDITS[1])
@example(FOUND_WITH_EDITS[2])
@given(wild.edited)
@SOME
def test_edits_in_the_middle_of_a_step(program: Program) -> None:
    run(program)


@given(wild.edited_made)
@SOME
def test_edits_of_optimizers_made_by_hand(program: Program) -> None:
    run(program)


@given(wild.called)
@SOME
def test_parts_and_outputs(program: Program) -> None:
    run(program)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(40))  # a failure ends its part alone, and `--dist load` shares the parts out
@given(program=wild.everything)
@settings(EVERYTHING, max_examples=500)
def test_many_wild_programs(program: Program, part: int) -> None:
    run(program)


def test_what_was_drawn(record_property: Callable[[str, object], None]) -> None:
    """Kept in the report: ``--junit-xml`` has it, and ``-s`` shows it."""
    packages = installed()
    record_property("optimizers by package", packages)
    record_property("optimizers drawn", dict(DRAWN))
    print(f"{sum(packages.values())} optimizers: {packages}; {len(DRAWN)} of them drawn")
    assert packages["torch"] >= 40
