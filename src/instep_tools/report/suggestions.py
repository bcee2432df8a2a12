"""What to change, in at most three sentences for a recording.

Each rule is a function of a run, its figures and its memory that returns a sentence, or ``None`` where it has nothing
to say. ``suggestions`` asks the rules in the order of their importance.
"""

from collections.abc import Callable, Sequence

from instep_tools.report.figures import (
    Figures,
    backwards_in_an_iteration,
    by_rank,
    bytes_change,
    duration_change,
    mib,
    ms,
)
from instep_tools.report.memory import GRADIENTS, MIB, Memory
from instep_tools.report.run import Run

_BACKWARD = "instep.attach(model, optimizer, schedule='backward')"
_PIPELINE = "instep.attach(model, optimizer, schedule='backward', pipeline=schedule)"
_TEMPORARIES = ("temporaries of backward", "temporaries of the step")
WORTH = 0.02
"""The share of an iteration, or of a peak, below which a gain is not worth a change."""


def suggestions(run: Run, found: Figures) -> list[str]:
    """Return between one and three sentences, the most important first."""
    memory = run.ranks[0].memory
    rules: Sequence[Callable[[Run, Figures, Memory], str | None]]
    if found.pipeline is not None:
        rules = (_bubbles, _fused)
    elif not run.setup.options:
        rules = (_time_to_gain, _memory_to_gain, _bucket_view, _fused)
    else:
        rules = (_steps_hidden, _communication, _memory_kept, _bucket_view, _large_bucket, _fused)
    said = [sentence for rule in rules if (sentence := rule(run, found, memory)) is not None]
    return said[:3] or ["Nothing to change."]


def suggestions_beside(runs: Sequence[Run], found: Sequence[Figures]) -> list[list[str]]:
    """Return the sentences for each of several recordings of one job.

    A plain loop that was recorded with instep, too, is told what instep changed: a guess could contradict the table.
    """
    figured = list(zip(runs, found, strict=True))
    said = []
    for run, one in figured:
        # What another optimizer changes is not instep's doing.
        same = [(other, its) for other, its in figured if other.setup.optimizer == run.setup.optimizer]
        attached = [(other, its) for other, its in same if other.setup.options]
        said.append(_measured(run, one, attached) if attached and not run.setup.options else suggestions(run, one))
    return said


def _measured(run: Run, found: Figures, attached: Sequence[tuple[Run, Figures]]) -> list[str]:
    """Return what the attached loops changed beside the plain loop ``run``."""
    said = []
    for other, its in attached:
        memory = bytes_change([run.ranks[0].memory.peak, other.ranks[0].memory.peak])
        time = duration_change([run, other], [found, its])
        said.append(f"{other.setup.label}, as recorded here: peak memory: {memory}; iteration: {time}.")
    rules = (_bucket_view, _fused)
    return [*said, *(sentence for rule in rules if (sentence := rule(run, found, run.ranks[0].memory)) is not None)]


def _bubbles(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say how much of a pipeline is bubbles, and how much of the step takes their place."""
    pipeline = found.pipeline
    if pipeline is None:
        return None
    said = (
        f"By rank, an iteration has bubbles of {by_rank(pipeline.bubbles)}. Of the step, "
        f"{by_rank(pipeline.step_inside)} lie inside schedule.step(), and {by_rank(pipeline.step_after)} after it"
    )
    if any(pipeline.step_inside):
        return f"{said}."
    return f"{said}: with {_PIPELINE} a stage is stepped when its last micro-batch is through."


def _time_to_gain(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say how much of a plain loop's step could run behind communication."""
    if run.job.ranks == 1 or found.communication.total == 0:
        return None
    step, late = found.step.exposed, found.communication.exposed
    # A step can run while communication outlasts backward, and at no other time.
    if late < WORTH * found.iteration:
        return (
            f"Communication is over when backward is ({ms(late)} of it stay exposed), so there is next to nothing to "
            f"hide the step of {ms(step)} behind: expect no shorter iterations from instep here."
        )
    return (
        f"Attach: {ms(late)} of communication stay exposed, and {_BACKWARD} runs up to "
        f"{ms(min(step, late))} of the step meanwhile."
    )


def _memory_to_gain(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say how much of a plain loop's peak is gradients that could be freed in backward."""
    if run.setup.wrapper == "DistributedDataParallel":
        return None
    gradients, total = memory.alive.get(GRADIENTS, 0), run.setup.nbytes.get(GRADIENTS, 0)
    # ``attach`` takes a twentieth. Of FSDP's groups the recording says nothing: a guess.
    bucket = min(16 * MIB, total // (2 if run.setup.wrapper else 20))
    saved = gradients - bucket
    if saved > WORTH * memory.peak and (count := backwards_in_an_iteration(run)) > 1:
        return (
            f"Gradients are {mib(gradients)} of the peak of {mib(memory.peak)}. An iteration has {count} backwards, "
            "whose gradients add up until the last. schedule='backward' with overlap.micro_batches() frees them bucket "
            "by bucket, and keeps the activations of all micro-batches instead."
        )
    if saved > WORTH * memory.peak:
        return (
            f"Attach for memory: gradients are {mib(gradients)} of the peak of {mib(memory.peak)}; with "
            f"instep.attach(model, optimizer, schedule='backward') they are stepped bucket by bucket in backward "
            f"and never all alive, which saves up to {mib(saved)}."
        )
    passing = {name: memory.alive.get(name, 0) for name in ("activations", *_TEMPORARIES, "other")}
    largest = max(passing, key=lambda name: passing[name])
    return (
        f"At the peak of {mib(memory.peak)} there are {mib(gradients)} of gradients and {mib(passing[largest])} of "
        f"{largest}, which set it: stepping in backward would save next to nothing."
    )


def _steps_hidden(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say how much of an attached loop's step is hidden, and why the rest is not."""
    step = found.step
    if step.total == 0:
        return None
    share = step.hidden / step.total
    if run.job.ranks == 1 and run.setup.options.get("schedule") == "'backward'" and share < 0.5:
        part = "" if share < WORTH else f"{ms(step.exposed)} of "
        return (
            f"On one device {part}the step of {ms(step.total)} inside backward is not hidden, and is not meant to be: "
            + (
                "undo also keeps copies until optimizer.step(). Without undo instep saves memory there."
                if "undo" in run.setup.options
                else "there instep saves memory, not time."
            )
        )
    if share >= 0.5 or step.exposed < WORTH * found.iteration:
        return f"{share:.0%} of the step is hidden, and {ms(step.exposed)} of an iteration are left of it."
    if run.job.ranks == 1:
        return (
            f"{ms(step.exposed)} of the step stay exposed: it is taken at once, or takes longer than what it is hidden "
            "behind."
        )
    if found.communication.exposed < WORTH * found.iteration:
        return (
            f"{ms(step.exposed)} of the step stay exposed: communication ends with backward, and there is nothing to "
            "hide them behind. The plain loop takes as long here."
        )
    return (
        f"{ms(step.exposed)} of the step stay exposed although {ms(found.communication.exposed)} of communication "
        "do, too: smaller buckets (bucket_cap_mb) arrive, and are stepped, earlier."
    )


def _communication(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say that the network is what an iteration waits for."""
    late = found.communication.exposed
    hooked = "comm_hook" in run.setup.options or run.setup.wrapper != "DistributedDataParallel"
    if hooked or late < 0.1 * found.iteration:
        return None
    return f"{ms(late)} of communication stay exposed: docs/slow-networks.md says how to send less, or less often."


def _memory_kept(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say how much memory an option costs that keeps all gradients."""
    gradients = memory.alive.get(GRADIENTS, 0)
    if run.setup.wrapper == "DistributedDataParallel" or gradients < 2 * WORTH * memory.peak:
        return None
    if run.setup.options.get("schedule") == "'forward'" or "undo" in run.setup.options:
        option = "undo" if "undo" in run.setup.options else "schedule='forward'"
        return (
            f"{option} keeps all gradients until they are applied: {mib(gradients)} of the peak. "
            "schedule='backward' does not, if the loop can do without."
        )
    return None


def _bucket_view(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say how much memory DDP's second copy of the gradients takes."""
    if run.setup.wrapper != "DistributedDataParallel" or run.setup.bucket_view:
        return None
    return (
        "Build DistributedDataParallel with gradient_as_bucket_view=True: gradients then lie in its buckets, and the "
        f"second copy of {mib(run.setup.nbytes.get('gradients', 0))} goes."
    )


def _large_bucket(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say which bucket is too large. More than half of the gradients in one bucket overlap with little, and all of
    their memory is alive at once."""
    total = sum(bucket.nbytes for bucket in found.buckets)
    if not found.buckets or len(run.setup.gradients) < 4:
        return None
    largest = max(found.buckets, key=lambda bucket: bucket.nbytes)
    if largest.nbytes <= total / 2 or len(largest.parameters) < 2:
        return None
    option = "bucket_cap_mb of DistributedDataParallel" if run.setup.wrapper else "bucket_bytes"
    return (
        f"One bucket holds {largest.nbytes / total:.0%} of the gradients ({mib(largest.nbytes)}): a smaller {option} "
        "lets steps begin earlier."
    )


def _fused(run: Run, found: Figures, memory: Memory) -> str | None:
    """Say that a slow step has a fused implementation."""
    if run.setup.fused or found.step.total < 5 * WORTH * found.iteration or not _has_fused(run.setup.optimizer):
        return None
    return (
        f"The step takes {ms(found.step.total)}: with fused=True the optimizer needs one pass over memory (and its "
        "numbers differ from the other implementations' in the last bit)."
    )


def _has_fused(optimizer: str) -> bool:
    # A recording has only the name of the class. These are torch's optimizers with a fused implementation.
    return optimizer.split("(")[0] in ("SGD", "Adam", "AdamW", "Adagrad")
