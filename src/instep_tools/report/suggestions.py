"""What to change, in a sentence or two for a recording."""

from collections.abc import Iterator, Sequence

from instep_tools.output import size_of, time_of
from instep_tools.report.figures import Figures
from instep_tools.report.run import Run

_BACKWARD = "instep.attach(model, optimizer, schedule='backward')"
WORTH = 0.02
"""The share of an iteration below which a gain is not worth a change."""


def suggestions(run: Run, found: Figures) -> list[str]:
    """Return the sentences, the most important first."""
    if found.pipeline is not None:
        said = _of_pipeline(found)
    elif run.setup.options:
        said = _of_attached(run, found)
    else:
        said = _of_plain(run, found)
    return list(said) or ["Nothing to change."]


def _of_pipeline(found: Figures) -> Iterator[str]:
    """Say how much of a pipeline is bubbles, and how much of the step takes their place."""
    pipeline = found.pipeline
    assert pipeline is not None
    said = (
        f"By rank, an iteration has bubbles of {by_rank(pipeline.bubbles)}. Of the step, "
        f"{by_rank(pipeline.step_inside)} lie inside schedule.step(), and {by_rank(pipeline.step_after)} after it"
    )
    to_do = f": with {_BACKWARD[:-1]}, pipeline=schedule) a stage is stepped when its last micro-batch is through"
    yield f"{said}{'' if any(pipeline.step_inside) else to_do}."


def by_rank(seconds: Sequence[float]) -> str:
    """Return a duration of each rank in words, where there are many of them the least and the most."""
    if len(seconds) > 4:
        return f"{time_of(min(seconds))} to {time_of(max(seconds))}"
    return ", ".join(map(time_of, seconds))


def _of_plain(run: Run, found: Figures) -> Iterator[str]:
    """Say how much of a plain loop's step could run behind communication, and what could be freed in backward."""
    step, late = found.step.exposed, found.communication.exposed
    # A step can run while communication outlasts backward, and at no other time.
    if found.communication.total and late < WORTH * found.iteration:
        yield (
            f"Communication is over when backward is ({time_of(late)} of it stay exposed), so there is next to nothing "
            f"to hide the step of {time_of(step)} behind: expect no shorter iterations from instep here."
        )
    elif found.communication.total:
        yield (
            f"Attach: {time_of(late)} of communication stay exposed, and {_BACKWARD} runs up to "
            f"{time_of(min(step, late))} of the step meanwhile."
        )
    # DDP's buckets are there for good, whoever steps.
    if run.setup.wrapper != "DistributedDataParallel" and run.ranks[0].gradient_bytes:
        yield (
            f"Attach for memory: up to {size_of(run.ranks[0].gradient_bytes)} of gradients are alive at once. With "
            f"{_BACKWARD} they are stepped bucket by bucket in backward, and freed; of several micro-batches with "
            "overlap.micro_batches(). `instep plan` says whether they, or activations, set the peak."
        )


def _of_attached(run: Run, found: Figures) -> Iterator[str]:
    """Say how much of an attached loop's step is hidden, and why the rest is not."""
    step, late = found.step, found.communication.exposed
    if not step.total:
        return
    left = f"{time_of(step.exposed)} of the step of {time_of(step.total)} stay exposed"
    if step.hidden >= 0.5 * step.total or step.exposed < WORTH * found.iteration:
        yield f"{step.hidden / step.total:.0%} of the step is hidden, and {time_of(step.exposed)} are left of it."
    elif run.setup.ranks == 1 and run.setup.options.get("schedule") == "'backward'":
        yield f"{left}, as they are meant to on one device: inside backward instep saves memory, not time."
    elif run.setup.ranks == 1:
        yield f"{left}: it is taken at once, or takes longer than what it is hidden behind."
    elif late < WORTH * found.iteration:
        yield f"{left}: communication ends with backward, and there is nothing to hide them behind."
    else:
        yield (
            f"{left} although {time_of(late)} of communication do, too: smaller buckets (bucket_cap_mb) arrive, and "
            "are stepped, earlier."
        )
