"""What to change, in a sentence or more for a recording.

Each rule is a function of a run and its figures that returns a sentence, or ``None`` where it has nothing to say.
``suggestions`` asks the rules in the order of their importance.
"""

from collections.abc import Callable, Sequence

from instep_tools.output import size_of, time_of
from instep_tools.report.figures import Figures
from instep_tools.report.run import Run

_BACKWARD = "instep.attach(model, optimizer, schedule='backward')"
_PIPELINE = "instep.attach(model, optimizer, schedule='backward', pipeline=schedule)"
WORTH = 0.02
"""The share of an iteration, or of the gradients, below which a gain is not worth a change."""
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
"""torch's optimizers with a fused implementation: a recording has only the name of the class."""


def suggestions(run: Run, found: Figures) -> list[str]:
    """Return the sentences, the most important first."""
    rules: Sequence[Callable[[Run, Figures], str | None]] = (_steps_hidden, _fused)
    if found.pipeline is not None:
        rules = (_bubbles, _fused)
    elif not run.setup.options:
        rules = (_time_to_gain, _memory_to_gain, _fused)
    said = [sentence for rule in rules if (sentence := rule(run, found)) is not None]
    return said or ["Nothing to change."]


def _bubbles(run: Run, found: Figures) -> str | None:
    """Say how much of a pipeline is bubbles, and how much of the step takes their place."""
    assert found.pipeline is not None
    pipeline = found.pipeline
    said = (
        f"By rank, an iteration has bubbles of {by_rank(pipeline.bubbles)}. Of the step, "
        f"{by_rank(pipeline.step_inside)} lie inside schedule.step(), and {by_rank(pipeline.step_after)} after it"
    )
    if any(pipeline.step_inside):
        return f"{said}."
    return f"{said}: with {_PIPELINE} a stage is stepped when its last micro-batch is through."


def by_rank(seconds: Sequence[float]) -> str:
    """Return a duration of each rank in words, where there are many of them the least and the most."""
    if len(seconds) > 4:
        return f"{time_of(min(seconds))} to {time_of(max(seconds))}"
    return ", ".join(map(time_of, seconds))


def _time_to_gain(run: Run, found: Figures) -> str | None:
    """Say how much of a plain loop's step could run behind communication."""
    if run.setup.ranks == 1 or found.communication.total == 0:
        return None
    step, late = found.step.exposed, found.communication.exposed
    # A step can run while communication outlasts backward, and at no other time.
    if late < WORTH * found.iteration:
        return (
            f"Communication is over when backward is ({time_of(late)} of it stay exposed), so there is next to nothing "
            f"to hide the step of {time_of(step)} behind: expect no shorter iterations from instep here."
        )
    return (
        f"Attach: {time_of(late)} of communication stay exposed, and {_BACKWARD} runs up to {time_of(min(step, late))} "
        "of the step meanwhile."
    )


def _memory_to_gain(run: Run, found: Figures) -> str | None:
    """Say how much of a plain loop's memory could be freed in backward."""
    gradients, alive = run.setup.nbytes.get("gradients", 0), run.ranks[0].gradient_bytes
    # DDP's buckets are there for good, whoever steps.
    if run.setup.wrapper == "DistributedDataParallel" or alive < WORTH * gradients:
        return None
    return (
        f"Attach for memory: up to {size_of(alive)} of gradients are alive at once. With {_BACKWARD} they are stepped "
        "bucket by bucket in backward, and freed; of several micro-batches with overlap.micro_batches(). `instep plan` "
        "says whether they, or activations, set the peak."
    )


def _steps_hidden(run: Run, found: Figures) -> str | None:
    """Say how much of an attached loop's step is hidden, and why the rest is not."""
    step = found.step
    if step.total == 0:
        return None
    share, is_late = step.hidden / step.total, step.exposed >= WORTH * found.iteration
    if run.setup.ranks == 1 and run.setup.options.get("schedule") == "'backward'" and share < 0.5:
        return (
            f"On one device {time_of(step.exposed)} of the step of {time_of(step.total)} inside backward is not "
            "hidden, and is not meant to be: there instep saves memory, not time."
        )
    if share >= 0.5 or not is_late:
        return f"{share:.0%} of the step is hidden, and {time_of(step.exposed)} of an iteration are left of it."
    if run.setup.ranks == 1:
        return (
            f"{time_of(step.exposed)} of the step stay exposed: it is taken at once, or takes longer than what it is "
            "hidden behind."
        )
    if found.communication.exposed < WORTH * found.iteration:
        return (
            f"{time_of(step.exposed)} of the step stay exposed: communication ends with backward, and there is nothing "
            "to hide them behind. The plain loop takes as long here."
        )
    return (
        f"{time_of(step.exposed)} of the step stay exposed although {time_of(found.communication.exposed)} of "
        "communication do, too: smaller buckets (bucket_cap_mb) arrive, and are stepped, earlier."
    )


def _fused(run: Run, found: Figures) -> str | None:
    """Say that a slow step has a fused implementation."""
    name, _, implementation = run.setup.optimizer.partition("(")
    if implementation.startswith("fused") or found.step.total < 5 * WORTH * found.iteration or name not in FUSED:
        return None
    return (
        f"The step takes {time_of(found.step.total)}: with fused=True the optimizer needs one pass over memory (and "
        "its numbers differ from the other implementations' in the last bit)."
    )
