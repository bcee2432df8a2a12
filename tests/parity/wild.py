"""Programs that may do what instep refuses: any optimizer, any edit in the middle of a step, any call, any output."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.devices import here
from tests.parity.edits import EDITS, MOMENTS
from tests.parity.made import SIZE, recipes
from tests.parity.outputs import OUTPUTS
from tests.parity.programs import BESIDE, CALLS, RIGHT, SPENDING, Program, Step, programs
from tests.parity.zoo import zoo

WILD_WAYS = (*RIGHT, "late", "late beside")
LARGE = int(SIZE**0.5) + 1
edits = st.lists(st.tuples(st.sampled_from(MOMENTS), st.sampled_from(sorted(EDITS))), max_size=2).map(tuple)
ours = st.sampled_from(["SGD-1-for-loop", "AdamW-0-fused", "AdamW-0-foreach", "Adam tensor rate", "SGD tensor rate"])
no_names = st.just("")
no_edits, no_recipe, whole, tensors = st.just(()), st.none(), st.just("whole"), st.just("tensor")
all_names = st.deferred(lambda: st.sampled_from(sorted(zoo())))


@st.composite
def wild(
    draw: Any,
    names: Any = ours,
    recipe: Any = no_recipe,
    edits: Any = no_edits,
    calls: Any = whole,
    outputs: Any = tensors,
    ways: tuple[str, ...] = WILD_WAYS,
) -> Program:
    """One of ``programs``, with what is given here in place of the usual."""
    program = draw(programs(ways))
    recipe = draw(recipe)
    steps = tuple(replace(step, edits=_watched(program.way, draw(edits))) for step in program.steps)
    program = replace(
        program,
        steps=steps,
        optimizer=draw(names),
        recipe=recipe,
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64])),
        call=draw(calls),
        output=draw(outputs),
        closure=draw(st.sampled_from([False] * 7 + [True])),
        nonfinite=draw(st.sampled_from(["allow", "allow", "skip", "raise"])) if program.scaler is None else "allow",
        leave_out=any(edit == "add" for step in steps for _, edit in step.edits),
        every=draw(st.booleans()),
        autocast=draw(st.sampled_from([""] * 5 + ["backward", "step", "all"])),
    )
    return _agreeing(draw, program)


def _watched(way: str, edits: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Without what is done between backward and ``step()`` after a ``detach()`` there, of which nobody is told: what
    backward has applied is applied (docs/limits.md)."""
    kept: list[tuple[str, str]] = []
    for moment, edit in edits:
        if way in SPENDING and moment == "backward" and ("backward", "attach again") in kept:
            continue
        kept.append((moment, edit))
    return tuple(kept)


def _agreeing(draw: Any, program: Program) -> Program:
    """Without what the plain loop has no word for."""
    if program.call == "pipeline" or any(moment == "forward" for step in program.steps for moment, _ in step.edits):
        # The verb runs forward and backward: nothing is done in between.
        program = replace(program, accumulate="hold" if program.accumulate == "micro_batches" else program.accumulate)
    if program.nonfinite == "skip" and program.way in ("backward", "two_pass"):
        program = replace(program, nonfinite="raise")
    if program.way in BESIDE:
        program = replace(program, nonfinite="allow")
    if program.closure:
        # The scaler takes none, and what is done between backward and step() is nobody's then.
        program = replace(program, scaler=None, clip=None, nonfinite="allow")
        program = replace(program, way="backward" if program.way == "two_pass" else program.way)
    if program.recipe is not None:
        program = replace(
            program, width=draw(st.sampled_from([program.width, LARGE])), scale=draw(st.sampled_from([1.0, 1.0, 1e4]))
        )
    elif program.optimizer.startswith("SGD"):
        # torch's own couples parameters in bfloat16 (docs/limits.md).
        program = replace(program, dtype=torch.float32, scaler=None)
    if program.dtype == torch.bfloat16:
        program = replace(program, scaler=None)
    return program


def longer(program: Program) -> Program:
    """With its steps again and again: an optimizer may do something else from a later step on."""
    return replace(program, steps=(program.steps * 9)[:9])


any_call = st.sampled_from(sorted(CALLS))
any_output = st.sampled_from(sorted(OUTPUTS))
made = wild(names=no_names, recipe=recipes).map(longer)
drawn_optimizers = wild(names=all_names)
edited = wild(names=st.one_of(ours, all_names), edits=edits)
edited_made = wild(names=no_names, recipe=recipes, edits=edits)
called = wild(calls=any_call, outputs=any_output)
everything = st.one_of(
    wild(names=all_names, edits=edits, calls=any_call, outputs=any_output),
    wild(names=no_names, recipe=recipes, edits=edits, calls=any_call, outputs=any_output).map(longer),
)

WAYS_ON_RANKS = ("backward", "forward", "undo", "shard_state")


@st.composite
def on_ranks(draw: Any) -> Program:
    """For ranks: the model is called as a whole, since DDP is not there for its parts."""
    some_edits = st.one_of(no_edits, edits)
    program = draw(wild(edits=some_edits, outputs=any_output, ways=WAYS_ON_RANKS))
    if program.way == "shard_state":  # what docs/sharded.md says is equal within rounding
        foreach = program.optimizer.replace("-fused", "-foreach")
        # After a detach() behind backward gradients are gone, and torch's clip_grad_value_ wants one.
        gone = any(("backward", "attach again") in step.edits for step in program.steps)
        clips = "norm" not in str(program.clip) and not (gone and str(program.clip).endswith("in the loop"))
        program = replace(program, optimizer=foreach, clip=program.clip if clips else None)
    no_sync = program.accumulate != "micro_batches" and draw(st.sampled_from([False, False, False, True]))
    return replace(program, no_sync=no_sync)


@st.composite
def on_shards(draw: Any) -> Program:
    """For FSDP2, whose hooks are those of the model: no part of it is called by itself."""
    names, recipe = draw(st.sampled_from([(ours, no_recipe), (ours, no_recipe), (no_names, recipes)]))
    some_edits, calls = st.one_of(no_edits, edits), st.sampled_from(["whole", "whole", "twice", "checkpointed"])
    program = draw(wild(names, recipe, some_edits, calls, any_output))
    return program if here().type == "cpu" else replace(program, steps=tuple(map(_unraced, program.steps)))


def _unraced(step: Step) -> Step:
    """Without a write of weights between forward and backward, in which FSDP2 gathers them again on a stream of its
    own: the plain loop races."""
    return replace(step, edits=tuple(e for e in step.edits if e[0] != "forward" or "write a weight" not in e[1]))


@st.composite
def plain_steps(draw: Any, names: Any = ours, ways: tuple[str, ...] = RIGHT) -> Program:
    """Nothing but steps: between them there is no moment at which something else has been done."""
    program = draw(programs(ways))
    steps = tuple(replace(step, overflow=False, event=None) for step in program.steps)
    return replace(
        program,
        optimizer=draw(names),
        steps=(steps * 4)[: max(3, len(steps))],
        dtype=torch.float32,
        decay=None,
        scaler=None,
        clip=program.clip if str(program.clip).startswith("norm") else None,  # by value torch wants a gradient
        clear="none",
        call=draw(any_call),
    )


@st.composite
def summed_on_shards(draw: Any) -> Program:
    """For FSDP2: steps by ``micro_batches()``. Now and then the first layer does not run, and in a step mostly all of
    the micro-batches run the same."""
    program = draw(plain_steps(ways=("backward", "undo", "undo on the host")))
    steps = program.steps
    if draw(st.booleans()):
        steps = tuple(replace(step, micro_batches=step.micro_batches[:1] * len(step.micro_batches)) for step in steps)
    if draw(st.sampled_from([True, True, True, False])):
        first = [tuple((True, *run[1:]) for run in step.micro_batches) for step in steps]
        steps = tuple(replace(step, micro_batches=runs) for step, runs in zip(steps, first, strict=True))
    call = draw(st.sampled_from(["whole", "whole", "twice", "checkpointed"]))
    return replace(program, steps=steps, accumulate="micro_batches", call=call)


EVERYTHING = settings(deadline=None, suppress_health_check=list(HealthCheck))


SOME = settings(EVERYTHING, max_examples=20, derandomize=True)
